"""What goes wrong ends in one line and in 2: data, checkpoints, memory, names. And what
depends on more than flags: the weights that a run begins with, its threads.
"""

import dataclasses
import fcntl
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny_runs
import torch
from test_checkpoints import equal
from tiny_runs import FLAGS, STEPS, TOKENS, one_error, to_argv

import train_gpt

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures
WEIGHTS = "logs/x/step-000006.pt"


def test_one_file_for_both_data_and_a_folder_that_cannot_be_made(run, data_flags, tmp_path):
    line = one_error(run(val_files=data_flags["train_files"]))
    assert "--val_files has a file of these, too" in line
    (tmp_path / "logs").write_text("")
    assert "logs" in one_error(run())


def test_a_run_says_before_it_starts_that_it_would_repeat_its_data(run):
    """The preset record refuses, unless it is told to, and names the command that fetches more."""
    result = run()
    said = f"4000 tokens, read again as the run takes {TOKENS}"
    assert result.out.index(said) < result.out.index("step:")
    assert "the training data begin again" in result.log
    cfg = dataclasses.replace(train_gpt.parse_args([]), val_files="tiny_val_*.bin")
    loader = SimpleNamespace(files=[], size=800_000_000, digest="", log=print)
    train_gpt.check_data(cfg, loader, 800_000_000, "")
    fetch = "fetch more: python data/fineweb.py 9, or --repeat_data true"
    with pytest.raises(train_gpt.UserError, match=fetch):
        train_gpt.check_data(cfg, loader, 800_000_001, "")
    train_gpt.check_data(dataclasses.replace(cfg, repeat_data=True), loader, 800_000_001, "")


def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path):
    """So does one of its name while another process runs it."""
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(save_every=2)
    before = files()
    taken = "--run_id x: logs/x/log.txt is there already; go on with its run by --resume auto, or"
    assert taken in one_error(run(save_every=2))
    again = dict(save_every=2, resume="auto")
    assert "--val_tokens 702" in one_error(run(val_tokens=702, **again))
    with open("logs/x/log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert "--run_id x: another process runs it now" in one_error(run(**again))
    assert before == files()
    for path in Path("logs/x").glob("*.pt"):  # as if it had been killed before it saved
        path.unlink()
    anew = run(**again)
    assert anew.code == 0 and anew.log.count(f"\nstep:1/{STEPS} ") == 1
    assert anew.log.startswith(train_gpt.SCRIPT.read_text())


def test_memory_that_runs_out_ends_in_a_line_and_a_fault_in_a_traceback(run, monkeypatch):
    said = "out of memory; shorten the sequences or lower --sequences_per_forward\n"
    for error in (
        MemoryError("Unable to allocate 745. GiB for an array\nwith shape (100,)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0"),
    ):
        monkeypatch.setattr(train_gpt, "build", Mock(side_effect=error))
        assert one_error(run()).endswith(said)
    monkeypatch.setattr(train_gpt, "build", Mock(side_effect=RuntimeError("shapes")))
    with pytest.raises(RuntimeError, match="shapes"):
        run()


def test_weights_that_an_update_makes_infinite_end_the_run(run):
    """They are seen in the next loss, and in the last validation."""
    assert "step 2: the loss is nan; lower the learning rates" in one_error(run(muon_lr=2e9))
    line = one_error(run(muon_lr=2e9, num_iterations=2, run_id="y"))
    assert "step:2/2 val_loss:nan; lower the learning rates" in line


def test_a_run_tells_its_threads_and_a_resumed_one_takes_its_checkpoints(run, monkeypatch):
    """The number alone is looked at here: two real threads may share a core with other tests."""
    chosen = [2]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    first = run(save_every=2)
    assert ", 2 thread(s), " in first.out and first.values["threads"] == "2"
    chosen.append(1)
    assert run(["--resume", "logs/x/step-000004.pt"]).values["threads"] == "2"
    assert chosen == [2, 1, 2], "a new run obeys the environment and sets nothing"


def test_init_takes_weights_trains_on_other_data_and_can_be_resumed(run, tiny_shards):
    """Moments and schedules begin anew, and an untied head stays untied. With --resume auto, it
    begins with the weights where there is nothing yet to go on from."""
    run(save_every=2)
    line = one_error(run(run_id="tuned", init=WEIGHTS, model_dim=64))
    assert f"{WEIGHTS}: does not fit" in line and "size mismatch for lm_head.weight" in line
    assert not Path("logs/tuned").exists()
    theirs = train_gpt.load_checkpoint(Path(WEIGHTS))["model"]
    other = dict(train_files=tiny_shards([4000], name="other", seed=9), seed=4, muon_lr=0.05)
    flags = dict(run_id="tuned", init=WEIGHTS, resume="auto", save_every=2) | other
    cfg = train_gpt.parse_args(to_argv(FLAGS | dict(init=WEIGHTS)))
    model, _ = train_gpt.build(cfg, train_gpt.Ranks(cfg))
    assert equal(dict(model.state_dict()), dict(theirs))
    tuned = run(**flags)
    assert tuned.code == 0, tuned.err
    state = train_gpt.load_checkpoint(Path("logs/tuned/step-000002.pt"))
    assert not torch.equal(state["model"]["embed.weight"], state["model"]["lm_head.weight"])
    assert state["optimizers"]["embed"]["count"] == state["optimizers"]["head"]["count"] == 1
    assert run(**flags).losses == [], "it goes on from its own end"
    Path(WEIGHTS).unlink()  # they are needed no more
    resumed = run(["--resume", "logs/tuned/step-000002.pt"])
    assert resumed.losses == tuned.losses[2:] and len(tuned.losses) == STEPS
    assert resumed.values["val_loss"] == tuned.values["val_loss"]
