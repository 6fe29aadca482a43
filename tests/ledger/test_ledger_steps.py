"""Steps to a loss, and the rule of the ladder by steps, on logs in the forms of the public ones."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy
from ledger import steps
from ledger.__main__ import main

HEAD = f"import torch\n{'=' * 100}\nRunning PyTorch 2.11.0\n{'=' * 100}\n"


def lines_of(losses: dict, planned: int, blend: dict | None = None) -> str:
    """A run as the benchmark's scripts print it, the loss of a blend beside the raw one."""
    text = ""
    for step, loss in losses.items():
        other = f" val_ema_loss:{blend[step]:.5f}" if blend and step in blend else ""
        text += f"step:{step}/{planned} val_loss:{loss:.5f}{other} train_time:{step}.5s "
        text += f"step_avg:{'nan' if step == 0 else 147}ms\n"
    return text


def run_of(end: float, length: int = 100) -> dict:
    """Losses that fall to `end`, at each fifth step of the last half."""
    places = [0, *range(length // 2, length + 1, 5)]
    return {step: round(end + 7 * (1 - step / length) ** 4, 5) for step in places}


def judge(capsys, *words) -> list:
    assert main(["judge", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


def first_by_hand(runs: list) -> tuple:
    for step in sorted(set.intersection(*map(set, runs))):
        mean = sum(run[step] for run in runs) / len(runs)
        if (3.28 - mean) * math.sqrt(len(runs)) >= 0.004:
            return step, mean
    return None


@pytest.fixture
def ends():
    return 3.27 + np.random.default_rng(0).normal(0, 0.0013, 8)


def test_the_first_step_at_which_all_runs_pass_is_the_claim(ends, tmp_path, capsys):
    """One log may have them all, or many logs some each, also below other folders."""
    runs = [run_of(end) for end in ends]
    step, mean = first_by_hand(runs)
    words = f", val_loss, n = 8: passes step {step}, where the mean is {mean:.5f}; "
    (tmp_path / "one.txt").write_text(HEAD + "".join(lines_of(run, 100) for run in runs))
    assert judge(capsys, tmp_path / "one.txt")[0].startswith(f"one.txt{words}")
    for number, run in enumerate(runs):
        folder = tmp_path / f"many/seed_{number}"
        folder.mkdir(parents=True)
        (folder / "stdout.txt").write_text(HEAD + lines_of(run, 100))
        # Twice, and its end once more
        (folder / "console.out").write_text(lines_of(run, 100))
        (folder / "final.txt").write_text(lines_of({100: run[100]}, 100))
    assert judge(capsys, tmp_path / "many")[0].startswith(f"many{words}")


def test_a_run_that_stopped_stands_in_the_way_of_a_claim(ends, tmp_path, capsys):
    """It cannot be left out: who stops the bad runs would pick."""
    runs = [run_of(end) for end in ends]
    step, _ = first_by_hand(runs)
    runs[3] = {at: loss for at, loss in runs[3].items() if at < step}
    last = max(runs[3])
    (tmp_path / "a.txt").write_text(HEAD + "".join(lines_of(run, 100) for run in runs))
    mean = sum(run[last] for run in runs) / 8
    (line,) = judge(capsys, tmp_path / "a.txt")
    assert f"n = 8: does not pass up to step {last}, where the mean is {mean:.5f}; " in line
    assert line.endswith("7 of 8 runs reach it")


def test_few_runs_have_to_pass_by_more(tmp_path, capsys):
    """0.002 nats are enough for four runs, not for two."""
    texts = [lines_of({0: 10.8, 10: loss}, 10) for loss in (3.2779, 3.2781, 3.2778, 3.2782)]
    for number in (2, 4):
        (tmp_path / f"{number}.txt").write_text(HEAD + "".join(texts[:number]))
    two, four = judge(capsys, tmp_path / "2.txt", tmp_path / "4.txt")
    assert "n = 2: does not pass up to step 10, where the mean is 3.27800" in two
    assert "n = 4: passes step 10, where the mean is 3.27800" in four


def test_a_blend_is_judged_beside_the_raw_loss(ends, tmp_path, capsys):
    """Where it is printed late, its steps are those."""
    runs = [run_of(end) for end in ends]
    blends = [{step: loss - 0.008 for step, loss in run.items() if step > 60} for run in runs]
    texts = [lines_of(run, 100, blend) for run, blend in zip(runs, blends)]
    (tmp_path / "log.txt").write_text(HEAD + "".join(texts))
    raw, blend = judge(capsys, tmp_path / "log.txt")
    for line, some in ((raw, runs), (blend, blends)):
        step, mean = first_by_hand(some)
        assert f"passes step {step}, where the mean is {mean:.5f};" in line
    assert "val_ema_loss" in blend and first_by_hand(blends)[0] < first_by_hand(runs)[0]


def test_steps_to_a_loss_are_interpolated_with_an_interval_over_runs(tmp_path, capsys):
    curves = [{0: 4.0, 10: 3.0, 20: 2.0}, {0: 4.0, 10: 3.2, 20: 2.2}, {0: 4.0, 10: 2.9, 20: 2.4}]
    found = [steps.steps_to(curve, 2.5) for curve in curves]
    assert found == pytest.approx([15.0, 17.0, 18.0])
    half = scipy.stats.t.interval(0.95, 2, 0, scipy.stats.sem(found))[1]
    assert steps.steps_words(curves, 2.5) == f"{np.mean(found):.1f} ± {half:.1f}"
    assert steps.steps_to(curves[0], 3.0) == 10 and steps.steps_to(curves[0], 1.9) is None
    assert steps.steps_to(curves[0], 4.0) == 0 and steps.steps_words(curves, 9) == "0.0 ± 0.0"
    assert steps.steps_words(curves, 2.1) == "1 of 3 runs reach it"
    assert steps.steps_words(curves[:1], 2.5) == "15.0"
    assert steps.steps_words([{20: 2.0}, {20: 2.1}], 2.5) == ""  # validated at their end alone
    for number, curve in enumerate(curves):
        (tmp_path / f"{number}.txt").write_text(lines_of(curve, 20))
    (line,) = judge(capsys, tmp_path, "--target", 2.5)
    assert line.endswith(f"; steps to 2.5: {np.mean(found):.1f} ± {half:.1f}")


def test_of_our_own_logs_those_of_one_preset_count(tmp_path, capsys):
    for preset, loss in (("record", 3.27), ("pocket", 1.7)):
        header = f"{'=' * 100}\npreset: {preset}\nrun_id: a\n{'=' * 100}\n"
        (tmp_path / f"{preset}.txt").write_text(f"import a\n{header}{lines_of({0: 9, 5: loss}, 5)}")
    assert "n = 1: passes step 5, where the mean is 3.27000" in judge(capsys, tmp_path)[-1]
    line = judge(capsys, tmp_path, "--preset", "pocket", "--target", 2)[-1]
    assert re.search(r"step 5, where the mean is 1\.70000; steps to 2: 4\.8$", line)
    (tmp_path / "record.txt").unlink()
    assert main(["judge", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "has no run of the preset record that was validated" in err and err.count("\n") == 1
    assert main(["judge", str(Path(tmp_path, "none"))]) == 2
