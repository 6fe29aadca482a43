"""What goes wrong ends in one line and in 2: data, checkpoints, memory, names. And what
depends on more than flags: the weights that a run begins with, its threads, its environment.
"""

import dataclasses
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
import torch
from test_checkpoints import changed
from tiny_runs import FLAGS, STEPS, one_error, to_argv

import train_gpt

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures
WEIGHTS = "logs/x/step-000006.pt"


@pytest.mark.parametrize(("words", "code", "said"), [
    (to_argv(FLAGS), 0, ""),
    (["--val_seq_len", "100"], 2, "train_gpt.py: error: --val_seq_len must be a multiple of 128; "
                                  "here it is 100\n"),
], ids=["run", "error"])
def test_a_process_ends_as_main_does_in_ascii_and_without_a_home_too(
    data_flags, tmp_path, words, code, said
):
    variables = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", HOME="")
    command = [sys.executable, train_gpt.SCRIPT, *words, *to_argv(data_flags)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True)
    assert (done.returncode, done.stderr) == (code, said.encode())


def test_one_file_for_both_data_and_a_folder_that_cannot_be_made(run, data_flags, tmp_path):
    line = one_error(run(val_files=data_flags["train_files"]))
    assert "--val_files has a file of these, too" in line
    (tmp_path / "logs").write_text("")
    assert "logs" in one_error(run())


def test_a_run_says_before_it_starts_that_it_would_repeat_its_data(run):
    """The preset record refuses, unless it is told to, and names the command that fetches more."""
    result = run()
    said = f"2700 tokens, read again as the run takes {4 * 128 * STEPS}"
    assert result.out.index(said) < result.out.index("step:")
    assert "the training data begin again" in result.log
    assert "read again" not in run(run_id="y", num_iterations=5).out
    cfg = dataclasses.replace(train_gpt.parse_args([]), val_files="tiny_val_*.bin")
    loader = SimpleNamespace(files=[], size=800_000_000, digest="", log=print)
    fetch = "fetch more: python data/fineweb.py 27, or --repeat_data true"
    with pytest.raises(train_gpt.UserError, match=fetch):
        train_gpt.check_data(cfg, loader, 2_673_868_800, "")
    train_gpt.check_data(dataclasses.replace(cfg, repeat_data=True), loader, 2_673_868_800, "")


def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path):
    """So does one of its name while another process runs it."""
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(save_every=2)
    before = files()
    taken = "--run_id x: logs/x/log.txt is there already; go on with its run by --resume auto, or"
    assert taken in one_error(run(save_every=2))
    again = dict(save_every=2, resume="auto")
    assert "--val_tokens 10000" in one_error(run(val_tokens=10_000, **again))
    with open("logs/x/log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert "--run_id x: another process runs it now" in one_error(run(**again))
    assert before == files()
    assert run(**again).code == 0, "the lock went with its owner"
    for path in Path("logs/x").glob("*.pt"):  # as if it had been killed before it saved
        path.unlink()
    anew = run(**again)
    assert anew.code == 0 and anew.log.count(f"\nstep:1/{STEPS} ") == 1
    assert anew.log.startswith(train_gpt.SCRIPT.read_text())


MEMORY = "out of memory; shorten the sequences or lower --sequences_per_forward\n"


@pytest.mark.parametrize(("error", "ending"), [
    (MemoryError("Unable to allocate 745. GiB for an array\nwith shape (100,)"), MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0"), MEMORY),
    (RuntimeError("shapes do not match"), None),
], ids=["host", "GPU", "of the script's own"])
def test_memory_that_runs_out_ends_in_a_line_and_faults_in_a_traceback(
    run, monkeypatch, error, ending
):
    def fail(*args):
        raise error

    monkeypatch.setattr(train_gpt, "train", fail)
    if ending:
        assert one_error(run()).endswith(ending)
    else:
        with pytest.raises(RuntimeError, match="shapes"):
            run()


def test_a_run_tells_its_threads_and_a_resumed_one_takes_its_checkpoints(run, monkeypatch):
    """The number alone is looked at here: two real threads may share a core with other tests."""
    chosen = [2]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    first = run(save_every=2)
    assert ", 2 thread(s), " in first.out and first.values["threads"] == "2"
    assert "\nthreads: 2\n" in first.log.partition("=" * 100)[2].partition("=" * 100)[0]
    chosen.append(1)
    assert run(["--resume", "logs/x/step-000004.pt"]).values["threads"] == "2"
    assert chosen == [2, 1, 2], "a new run obeys the environment and sets nothing"


@pytest.fixture
def checkpoint(run):
    """The path of a checkpoint of step 4, whose head has left the embedding in step 6."""
    assert run(save_every=2).code == 0
    return Path("logs/x/step-000004.pt")


def test_resume_of_a_whole_file_that_does_not_fit_says_what(run, checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    mean = state["optimizers"]["mlp"]["mean"]
    for keys, value, named in [
        (["model", "lm_head.weight"], torch.zeros(3, 32), "size mismatch for lm_head.weight"),
        (["optimizers", "head"], None, "does not fit ('head')"),
        # State of another length is neither cut nor padded.
        (["optimizers", "mlp", "mean"], torch.cat([mean, mean[:1]]), "does not fit (shape"),
    ]:
        torch.save(changed(state, keys, value), checkpoint)
        line = one_error(run(["--resume", str(checkpoint)]))
        assert f"{checkpoint}: " in line and named in line
    torch.save(state, checkpoint)
    line = one_error(run(["--resume", str(checkpoint), "--num_iterations", "3"]))
    assert f"--num_iterations 3: {checkpoint} is of a later step" in line


def test_init_takes_weights_and_nothing_else(run, checkpoint, data_flags):
    """Moments and schedules begin anew, and an untied head stays untied."""
    theirs = train_gpt.load_checkpoint(Path(WEIGHTS))["model"]
    assert not torch.equal(theirs["embed.weight"], theirs["lm_head.weight"])
    cfg = train_gpt.parse_args(to_argv(FLAGS | data_flags | dict(init=WEIGHTS)))
    model, optimizers = train_gpt.build(cfg, train_gpt.Ranks(cfg))
    assert model.state_dict().keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in model.state_dict().items())
    assert not any(x.any() for optimizer in optimizers for x in optimizer.state.values())


def test_init_trains_on_other_data_and_can_be_resumed(run, checkpoint, tiny_shards):
    """With --resume auto, it begins with the weights where there is nothing yet to go on from."""
    other = dict(train_files=tiny_shards([4000], name="other", seed=9), seed=4, muon_lr=0.05)
    flags = dict(run_id="tuned", init=WEIGHTS, resume="auto", save_every=2) | other
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


def test_init_names_what_does_not_fit(run, checkpoint):
    for named, flags in {
        "size mismatch for lm_head.weight": dict(model_dim=64),
        "value_embeds.1.weight": dict(layers="L0:skip,S,.:saved,L1"),
    }.items():
        line = one_error(run(run_id="y", init=checkpoint, **flags))
        assert f"{checkpoint}: " in line and named in line and "name another" in line
    assert "logs/none.pt: no such checkpoint" in one_error(run(run_id="y", init="logs/none.pt"))
    assert not Path("logs/y").exists()
