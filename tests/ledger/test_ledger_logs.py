"""Logs are read to the digit in every form; statistics are by the book.

The public logs are small ones in their forms, written here.
"""

import re

import numpy as np
import pytest
import scipy
from fake_records import PARENT, SCRIPT
from ledger import logs, pages, records
from ledger.__main__ import main

pytest_plugins = ["record_fixtures"]

SOURCE = "import torch\n\nclass Hyperparameters:\n    batch_size = 8*64\n"
RULE = "=" * 100
# The clock is set to zero after ten steps, and the steps around it have no average.
RESET = ("step:0/20 val_loss:10.8258 train_time:275ms step_avg:nanms\n"
         "step:1/20 train_loss:7.7 train_time:22693ms step_avg:nanms\n"
         "step:20/20 val_loss:3.2808 train_time:943ms step_avg:94.34ms\n")
TIMED = ("step:0/20 val_loss:10.8258 train_time:0ms step_avg:0.03ms\n"
         "step:1/20 train_time:94ms step_avg:94.00ms\n"
         "step:20/20 val_loss:3.2808 train_time:943ms step_avg:47.15ms\n")
SECONDS = ("step:0/20 val_loss:10.82580 train_time:0.000s step_avg:0.03ms\n"
           "step:20/20 val_loss:3.28080 train_time:0.943s step_avg:47.15ms\n")
FORMS = {
    "untimed": "s:0 tel:10.8258\ns:0 trl:10.8 lr:0.000001 norm:15.37\ns:20 tel:3.2808\n",
    "ruled": f"{RULE}\n{SOURCE}{RULE}\nRunning python 3.12\n{RULE}\n{RESET}",
    "printed": f"{SOURCE}\n{RULE}\nRunning python 3.12\n\n{RULE}\n{TIMED}",
    "console": f"Fetching 8 files: 100%\ncompile and warmup: 334.5s\n{TIMED.strip()}",
    "track 3": f"{SOURCE}\n{RULE}\nRunning PyTorch 2.11.0\n{RULE}\n{SECONDS}"}


@pytest.mark.parametrize("form", FORMS)
def test_every_public_form_is_read_and_listed(form, tmp_path, capsys):
    (tmp_path / "log.txt").write_text(FORMS[form])
    log = logs.read_log(tmp_path / "log.txt")
    timed = form != "untimed"
    assert {step: loss for step, (loss, _) in log.val.items()} == {0: 10.8258, 20: 3.2808}
    assert log.finished and (log.val_loss, log.last_step) == (3.2808, 20)
    assert log.train_time_ms == (943 if timed else None)
    assert log.source == (SOURCE if RULE in FORMS[form] else None)
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    row = out.splitlines()[3].split()
    assert row == ["log.txt", "1", "20", "3.2808", "(1)", *(["0.016"] if timed else [])]
    assert ("Median minutes" in out) == timed


def test_public_folders_are_listed_by_folder(tmp_path, capsys):
    """They are called as ours are. A run that stopped counts in no mean."""
    names = ["2025-12-22_MultiTokenPrediction", "2025-12-26_LogitRescale"]
    losses = [3.2783, 3.2791, 3.2779]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_gpt.py").write_text(SOURCE)
        for seed, loss in enumerate(losses):
            text = FORMS["printed"].replace("3.2808", str(loss))
            (tmp_path / name / f"{seed}.txt").write_text(text)
    (tmp_path / names[1] / "cut.txt").write_text(TIMED.replace("step:20/20 val", "step:12/20 val"))
    (tmp_path / names[1] / "b.txt").write_text("step 500: train loss 3.1, val loss 3.2\n")
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    p = scipy.stats.ttest_1samp(losses, 3.28, alternative="less").pvalue
    spread = f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f} (3)"
    rows = out.splitlines()[2:]
    assert [re.split(" {2,}", row) for row in rows] == [
        [name, number, "20", spread, f"{p:.2g}", "0.016 (0.016–0.016)"]
        for name, number in zip(names, ("3", "3 of 5"))]
    assert main(["list", str(tmp_path / names[1]), "--target", "3.2"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 5 and f"{spread}  1 " in rows[0]
    assert "stopped at step 12 of 20" in rows[4]
    assert main(["list", str(tmp_path / names[0])]) == 0
    (tmp_path / "empty").mkdir()
    assert main(["list", str(tmp_path / "empty")]) == 2
    assert "has no records and no logs; known are" in capsys.readouterr().err


def test_a_pull_request_is_compared_with_the_baseline_beside_it(tmp_path, capsys):
    """By Welch's test. Sources of one mean that differ are told."""
    losses = {"a_pr": [3.2783, 3.2791, 3.2779], "baseline": [3.2788, 3.2795, 3.2802, 3.2790]}
    times = {"a_pr": [930, 940, 990], "baseline": [1000, 1000, 1010, 1100]}
    for name in losses:
        (tmp_path / name).mkdir()
        for seed, (loss, ms) in enumerate(zip(losses[name], times[name])):
            text = FORMS["printed"].replace("3.2808", str(loss)).replace("943ms", f"{ms}ms")
            text = text.replace("8*64", "4*64" if (name, seed) == ("a_pr", 1) else "8*64")
            (tmp_path / name / f"{seed}.txt").write_text(text)
    assert main(["list", str(tmp_path)]) == 0
    heading, _, ours, theirs = capsys.readouterr().out.splitlines()
    p = scipy.stats.ttest_ind(losses["a_pr"], losses["baseline"], equal_var=False).pvalue
    difference = np.mean(losses["a_pr"]) - np.mean(losses["baseline"])
    words = f"{difference:+.4f} (p {p:.2g}), ×{940 / 1005:.3f}".replace("-", "−")
    assert re.split(" {2,}", ours)[5:] == ["0.016 (0.015–0.017)", words, "2 (+1 −1)"]
    assert theirs.endswith("  0.017 (0.017–0.018)") and "From the baseline" in heading


@pytest.mark.parametrize("name, old, new, words", [
    ("d.txt", "step:20/20 val_loss:3.2808", "step:20/20 val_loss:nan", "diverged at step 20"),
    ("d.txt", "step:20/20 val_loss:3.2808", "step:20/20 val_loss:inf", "diverged at step 20"),
    ("d.txt", "val_loss:10.8258|val_loss:3.2808", "val_loss:nan", "diverged at step 0"),
    ("D.TXT", "step:20/20 val_loss:3.2808", "step:20/20 val_loss:nan", "diverged at step 20"),
    ("d.txt", "step:20/20 val_loss", "step:12/20 val_loss", "stopped at step 12 of 20"),
    ("d.txt", "^", "\udcff", "byte 0 is not text; give a log or script"),
    ("d.txt", "step:", "loss at ", "has no step that can be read"),
    ("d.txt", "val_loss", "train_loss", "has no validation that can be read")])
def test_no_log_is_left_out_of_a_mean_without_a_word(name, old, new, words, tmp_path, capsys):
    """A run that diverged counts as not below the target, and the folder has no difference."""
    for folder in "pull", "baseline":
        (tmp_path / folder).mkdir()
        for seed in range(3):
            text = FORMS["printed"].replace("3.2808", f"3.27{seed}")
            (tmp_path / folder / f"{seed}.txt").write_text(text)
    bad = tmp_path / "pull" / name
    bad.write_bytes(re.sub(old, new, FORMS["printed"], flags=re.M).encode(errors="surrogateescape"))
    assert main(["list", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    *_, row = out.splitlines()
    cells = re.split(" {2,}", row)
    assert cells[1:4] == ["3 of 4", "20", "3.2710 ± 0.0010 (3)"]
    assert err.startswith(f"ledger: in no mean: {bad} {words}") and err.count("\n") == 1
    if words.startswith("diverged"):
        assert cells[4] == "1" and len(cells) == 6  # without a difference
    else:
        assert cells[4] != "1" and cells[6].startswith("+0.0000 (p 1)")
    assert main(["list", str(tmp_path / "pull")]) == 0
    assert capsys.readouterr().err == err


def test_files_that_are_not_called_as_logs_are_counted(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(FORMS["console"])
    (tmp_path / "b.txt.gz").write_bytes(b"")
    (tmp_path / "c").mkdir()
    (tmp_path / "d").symlink_to(tmp_path / "c")
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().err == (
        "ledger: left out: 2 file(s) or linked folders that are not called *.txt, *.log, *.out, "
        "*.stdout\n")
    (tmp_path / "a.txt").write_text("no log\n")
    assert main(["list", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "a.txt has no step that can be read" in err and "has no records and no logs" in err


@pytest.fixture
def whole(measured):
    (path,) = (measured / "records" / PARENT / "logs").glob("pocket-seed-0-*.txt")
    return path


def test_a_log_is_read_back_exactly(whole, tmp_path):
    log = logs.read_log(whole)
    text = whole.read_text()
    (tmp_path / "log.txt").write_text(text.replace("\nrun_id: ", "\nrun_id: \u0444"))
    assert logs.read_run(tmp_path / "log.txt").val_loss == log.val_loss  # a name in any letters
    shown = re.findall(r"^step:(\d+)/40 val_loss:(\S+) train_time:(\d+)ms", text, re.M)
    assert log.val == {int(step): (float(loss), float(ms)) for step, loss, ms in shown}
    assert sorted(log.val) == [0, 10, 20, 30, 40] and sorted(log.train) == [*range(1, 41)]
    assert log.finished and log.header["stages"].startswith("(Stage(window=1, share=1.0), Stage(")
    assert log.final["val_loss"] == re.findall(r"^val_loss: (.*)$", text, re.M)[-1]
    assert log.source == SCRIPT and logs.read_log(whole, text.replace("\n", "\r\n")) == log
    ahead = "step:1/2 train_loss:5.2 next_token_loss:2.1 train_time:9ms step_avg:9.00ms\n"
    assert logs.read_log("log.txt", ahead).train == {1: (2.1, 9)}  # of several tokens, the next's


@pytest.mark.parametrize("share, old, new, is_timed", [  # of the time in which it did not wait
    (0.91, "", "", True), (0.89, "", "", False),
    (0.89, "world_size: 1", "world_size: 2", True),  # ranks wait for each other
    (0.89, "\ndevice: Fake", "\ncuda: 13.0\ndevice: Fake", True),  # and processes for their GPU
    (1, "step:31/40", "resumed at step:30 from a.pt\nstep:31/40", False),
    (1, f"{RULE}\npreset", f"{RULE}\njobs: 2\npreset", False)])
def test_times_are_those_of_whole_runs_alone_on_their_machine(
        share, old, new, is_timed, whole, tmp_path):
    text = whole.read_text()
    time_ms = int(re.search(r"\ntrain_time_ms: (\d+)", text)[1])
    text = text.replace(f"process_time_ms: {time_ms}", f"process_time_ms: {share * time_ms}")
    assert old in text and f": {share * time_ms}\n" in text
    (tmp_path / "log.txt").write_text(text.replace(old, new))
    assert bool(logs.read_run(tmp_path / "log.txt").measured_ms) == is_timed


@pytest.mark.parametrize("old, new, words", [
    (r"train_time:\d+ms", "train_time:infms", "a loss or time that is no finite number"),
    (r"train_time_ms: \d+", "train_time_ms: -5", "a loss or time that is no finite number"),
    (r"\nworld_size: 1", "\nworld_size: one", "'one'"),
    (r"\nval_digest: .*", "", "no val_digest")])
def test_what_no_run_writes_is_not_read(old, new, words, whole, tmp_path):
    text, count = re.subn(old, new, whole.read_text())
    assert count
    (tmp_path / "log.txt").write_text(text)
    with pytest.raises(logs.LedgerError, match="cannot be read: .*" + re.escape(words)):
        logs.read_run(tmp_path / "log.txt")


# ---- Statistics ----
def runs(losses, ms=10, seeds=None):
    return [logs.Log(None, seed=seed, measured_ms=ms, val_loss=float(loss))
            for seed, loss in zip(seeds or range(99), losses)]


def test_runs_are_compared_in_pairs_of_seeds_each_of_which_counts_once():
    a, b = np.random.default_rng(0).normal([[3.28], [3.27]], 0.01, (2, 10))
    ours, theirs = runs(b, 9), runs(a, 12)
    found = records.compare([*ours, *runs([9.9], seeds=[77])], theirs[::-1])
    assert found.difference == pytest.approx(b.mean() - a.mean())
    assert found.p_value() == pytest.approx(scipy.stats.ttest_rel(b, a).pvalue)
    # The mean is as many standard errors from 0 as the test's statistic says.
    statistic = scipy.stats.ttest_rel(b, a).statistic
    assert found.difference / found.error() == pytest.approx(statistic)
    assert (found.time, found.ratios) == (0.75, 10 * [0.75])
    assert records.compare(ours, runs([1.0], seeds=[77])) is None
    assert records.compare(runs([3.0]), runs([3.1])).p_value() is None
    assert records.compare(runs(a + 0.1), runs(a)).p_value() is None  # alike, but for rounding
    many = runs([3.1, 3.3, 3.0], seeds=[0, 0, 1])
    assert records.by_seed(many) == {0: (pytest.approx(3.2), 10), 1: (3.0, 10)}
    assert pages.spread(pages.losses_of(many)) == "3.1000 ± 0.1414 (2)"
