"""Ranks that agree, one branch of a run, data that suffice, the source that ran."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import rank_processes
import tiny_runs
import torch
from conftest import script_module
from test_survival import files, start  # noqa: F401 (fixtures)
from tiny_runs import one_error

import train_gpt

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures


# Faults: the second rank is started otherwise


def other_flags(words, rank):
    main = train_gpt.main
    if rank:
        train_gpt.main = lambda argv: main([*argv, *words])


def other_source(rank):
    if rank:
        train_gpt.SOURCE += b"# another commit\n"


def other_folder(folder, rank):
    if rank:
        os.chdir(folder)


@pytest.mark.parametrize("fault, named", [
    (partial(other_flags, ["--seed", "5"]), "--seed: rank 0 has 0, rank 1 has 5"),
    (partial(other_flags, ["--muon_lr", "0.3"]), "--muon_lr: rank 0 has 0.08, rank 1 has 0.3"),
    (other_source, "script: rank 0 has "),
])
def test_ranks_that_differ_do_not_start(start, fault, named):  # noqa: F811
    two = start(2, fault)
    assert two.wait() == [2, 2]
    assert f"ranks differ in {named}" in two.err() and two.err().count("\n") == 1
    assert not two.saved()


def test_ranks_with_other_data_do_not_start(start, tmp_path, tiny_shards):  # noqa: F811
    other = tiny_shards([9000], name="other_train", seed=3)
    two = start(2, partial(other_flags, ["--train_files", other]))
    assert two.wait() == [2, 2]
    assert "ranks differ in --train_files" in two.err()


def test_a_checkpoint_on_one_machine_alone_does_not_start(start, tmp_path):  # noqa: F811
    assert start(1, save_every=4).wait() == [0]
    (tmp_path / "elsewhere").mkdir()
    two = start(2, partial(other_folder, tmp_path / "elsewhere"), save_every=4, resume="auto")
    assert two.wait() == [2, 2]
    assert "ranks differ in --resume: rank 0 has logs/x/step-000010.pt" in two.err()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGXCPU])
def test_signals_of_schedulers_save_and_stop(start, number):  # noqa: F811
    stopped = start(1, partial(signal_at, 3, number), save_every=100)
    assert stopped.wait() == [1] and len(stopped.saved()) == 1


def signal_at(step, number, rank):
    def act(when, losses):
        if when == step:
            os.kill(os.getpid(), number)

    rank_processes.at_each_step(act)


def test_a_run_that_went_back_is_one_branch(run):
    """Later checkpoints of the branch that was left are kept under another name, and `auto` takes
    none of them."""
    run(save_every=2)
    back = ["--resume", "logs/x/step-000002.pt", "--run_id", "x", "--save_every", "100"]
    assert run(back).code == 0
    saved = sorted(path.name for path in Path("logs/x").glob("*.pt"))
    left = [name for name in saved if name.startswith("left-")]
    assert [name[-14:] for name in left] == ["step-000004.pt", "step-000006.pt"]
    log = Path("logs/x/log.txt").read_text()
    assert log.count(" is later than step 2: it is now logs/x/left-") == 2


def test_a_log_without_saves_is_kept_and_a_cut_line_ended(run):
    run(save_every=2, num_iterations=6)
    log = Path("logs/x/log.txt")
    unfinished = log.read_text().partition("\n---\n")[0]
    log.write_text(unfinished)  # cut in its last line
    run(["--resume", "logs/x/step-000004.pt", "--run_id", "x"])
    assert "\nresumed at step:4" in log.read_text()
    for path in Path("logs/x").glob("*.pt"):
        path.unlink()
    log.write_text("another source\n")
    assert run(resume="auto").code == 0
    (left,) = Path("logs/x").glob("left-*-log.txt")
    assert left.read_text() == "another source\n"
    assert f"its log is now {left}" in log.read_text()


def test_no_token_is_read_twice_and_what_was_trained_on_is_saved(run, tiny_shards):
    """Documents are cut, so shards with enough tokens do not suffice."""
    shards = tiny_shards([4200, 1500, 1500], name="few")
    line = one_error(run(train_files=shards, repeat_data="false", save_every=100))
    assert "the data end before the run; --repeat_data true, or fewer --num_iterations" in line
    saved = [int(path.stem[5:]) for path in Path("logs/x").glob("step-*.pt")]
    assert saved == [2]
    shards = tiny_shards([900], name="fewer")
    line = one_error(run(train_files=shards, repeat_data="false", run_id="y"))
    assert re.search(r"trains on \d+ tokens, and these are 900", line)


def test_a_longer_resume_counts_the_tokens_that_were_given(run):
    """The stages of the longer run are longer, too: it would have had other tokens before."""
    first = run(save_every=2)
    longer = run(["--resume", "logs/x/step-000006.pt", "--run_id", "x", "--num_iterations", "8"])
    more = [int(loader) for loader in re.findall(r"^tokens: (\d+)", longer.log, re.M)]
    assert more[0] == int(first.values["tokens"])
    assert more[1] == more[0] + 2 * 4 * 384


def test_shards_may_be_added_to_the_folder_of_a_run(run, tiny_shards, tmp_path):
    tiny_shards([6000, 6000])
    run(save_every=2, num_iterations=4)
    tiny_shards([6000, 6000, 6000])
    more = ["--resume", "logs/x/step-000004.pt", "--run_id", "x", "--num_iterations", "6"]
    assert run(more).code == 0


def test_a_checkpoint_of_another_version_is_told_as_that(run):
    run(save_every=2)
    path = Path("logs/x/step-000006.pt")
    state = torch.load(path, weights_only=True)
    for missing in ("tokens", "process_time_ms", "threads", "loader", "script"):
        other = {key: value for key, value in state.items() if key != missing}
        torch.save(other, path)
        line = one_error(run(["--resume", str(path), "--run_id", "x"]))
        assert "of another version of the script, of commit " in line
        assert f"it differs in {missing}; resume it with that version" in line
    again = run(save_every=2, resume="auto")
    assert again.code == 0 and again.err.startswith(f"skipped {path}: of another version")


def test_init_needs_weights_that_fit_and_nothing_else(run):
    run(save_every=6)
    state = torch.load("logs/x/step-000006.pt", weights_only=True)
    torch.save(dict(model=state["model"]), "weights.pt")
    assert run(run_id="tuned", init="weights.pt").code == 0


def test_the_log_has_the_source_that_was_imported(tmp_path, data_flags, monkeypatch, capsys):
    """The script is edited after it was started."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train_gpt.py"
    path.write_bytes(train_gpt.SOURCE)
    script = script_module(path)
    path.write_text("# edited\n")
    flags = tiny_runs.to_argv(tiny_runs.FLAGS | data_flags | dict(num_iterations=1))
    assert script.main(flags) == 0
    assert Path("logs/x/log.txt").read_bytes().startswith(train_gpt.SOURCE)


def test_the_source_is_read_before_torch_is_imported():
    source = train_gpt.SOURCE.decode()
    assert source.index("SOURCE = SCRIPT.read_bytes()") < source.index("import torch")
    assert source.index("SOURCE = SCRIPT.read_bytes()") < source.index("import numpy")


def test_the_warm_up_runs_all_that_a_run_runs(run, monkeypatch):
    """Tied and untied steps, steps of Adam and steps without, the last validation."""
    seen = set()
    for name in ("step_tied", "step_optimizers"):
        step = getattr(train_gpt, name)

        def noted(optimizers, now, divisor, name=name, step=step):
            rates = {optimizer.group.lr for optimizer in optimizers}
            seen.add((name, rates == {0.0}))
            return step(optimizers, now, divisor)

        monkeypatch.setattr(train_gpt, name, noted)
    assert run().code == 0
    assert seen == {(name, warms) for name in ("step_tied", "step_optimizers")
                    for warms in (True, False)}


def test_flags_that_messages_name_exist():
    """Of this script, or of data/fineweb.py."""
    names = {*vars(train_gpt.Hyperparameters()), "name", "help"}
    harness = train_gpt.SOURCE.decode().partition("# ==== Harness")[2]
    for flag in re.findall(r"--(\w+)", harness):
        assert flag in names, flag
