"""What goes wrong ends in one line and in 2: data, logs, memory, machines. And what depends on
more than flags: the weights that a run begins with, its threads, who started it.
"""

import dataclasses
import errno
import fcntl
import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny_runs
import torch
from conftest import REPO, final_values
from test_checkpoints import equal
from tiny_runs import FLAGS, STEPS, one_error, tiny, to_argv

import train_gpt

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures
WEIGHTS = "logs/x/step-000006.pt"


# ---- Data and logs ----


def test_one_file_for_both_data_and_a_folder_that_cannot_be_made(run, data_flags, tmp_path):
    (tmp_path / "link.bin").symlink_to("tiny_train_000000.bin")
    for same in data_flags["train_files"], "tiny_train_*.bin", "link.bin":
        line = one_error(run(val_files=same))
        assert "--val_files has a file of these, too" in line
    (tmp_path / "logs").symlink_to("nowhere")
    assert "'logs'" in one_error(run())
    (tmp_path / "nowhere" / "x" / "log.txt").mkdir(parents=True)
    assert "logs/x/log.txt" in one_error(run())


def test_a_run_says_what_its_length_and_its_data_do_not_allow(run, data_flags, tiny_shards):
    """What is counted in steps does not shrink; up to a step of each shard is skipped."""
    done = run(num_iterations=4, extension_steps=4, momentum_cooldown=3)
    assert f"\nthe training data begin again: {data_flags['train_files']}\n" in done.log
    said = re.findall("^--.* does not shrink .*$", done.log, re.M)
    assert said == ["--extension_steps 4 does not shrink with --num_iterations 4"]
    assert "\nup to 53% of --train_files may be skipped, " in done.log  # 2 of 1536 in 5800 tokens
    large = tiny_shards([40_000], name="large")
    done = run(run_id="y", train_files=large)
    for said in ("may be skipped", "does not shrink", "begin again"):
        assert said not in done.log.replace(train_gpt.SOURCE.decode(), "")


def test_too_few_data_are_refused_unless_they_may_repeat(monkeypatch, tiny_shards):
    cfg = dataclasses.replace(
        train_gpt.Hyperparameters(), val_files=tiny_shards([9], name="tiny_val"))
    monkeypatch.setattr(train_gpt, "planned_tokens", lambda cfg: [0, 9536 * 524_288])
    loader = SimpleNamespace(files=[], sizes=49 * [10**8])
    said = "the run trains on 4999610368 tokens, and these are 4900000000; add shards"
    with pytest.raises(train_gpt.UserError, match=said):
        train_gpt.check_data(cfg, loader, train_gpt.NEW_RUN)
    train_gpt.check_data(dataclasses.replace(cfg, repeat_data=True), loader, train_gpt.NEW_RUN)
    loader.sizes.append(10**8)
    train_gpt.check_data(cfg, loader, train_gpt.NEW_RUN)


def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path):
    """So does one of its name while another process runs it."""
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(save_every=2)
    before = files()
    assert "logs/x/step-000006.pt is there already" in one_error(run(save_every=2))
    again = dict(save_every=2, resume="auto")
    assert "--val_tokens must be below the 702 of" in one_error(run(val_tokens=702, **again))
    with open("logs/x/log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert "--run_id x: another process runs it now" in one_error(run(**again))
    assert before == files()

    def remove_saved():
        for path in Path("logs/x").glob("*.pt"):
            path.unlink()

    remove_saved()
    log = Path("logs/x/log.txt")
    whole = log.read_text()
    unfinished = whole.partition("\n---\n")[0]
    log.write_text(whole)
    assert "logs/x/log.txt is there already" in one_error(run(**again))
    assert "logs/x/log.txt is there already" in one_error(run()) and log.read_text() == whole
    for written in unfinished[:40_000], unfinished:  # as if it had been killed before it saved
        remove_saved()
        log.write_text(written)
        anew = run(**again)
        assert anew.code == 0 and anew.log.count(f"\nstep:1/{STEPS} ") == 1
        assert anew.log.startswith(train_gpt.SCRIPT.read_text())


def test_a_file_system_without_locks_is_trained_on_and_named(run, monkeypatch):
    error = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    done = run(num_iterations=1, val_every=0)
    assert done.code == 0 and done.err.count(f"no lock ({error}") == 1


def test_runs_without_a_name_that_begin_in_one_second_have_logs_of_their_own(run):
    for _ in range(2):
        done = run(run_id="", num_iterations=1, warmup_steps=0, head_chunks=2, target_loss=9)
        assert done.code == 0 and ": the target, 9.0, is reached\n" in done.out
    assert " in 2 chunk(s), logs/" in done.out
    assert len(list(Path("logs").iterdir())) == 2


# ---- Memory, weights, threads ----


def test_memory_that_runs_out_ends_in_a_line_and_a_fault_in_a_traceback(run, monkeypatch):
    said = "raise --head_chunks or --shorten, or lower --sequences_per_forward\n"
    for error in (
        MemoryError("Unable to allocate 745. GiB for an array\nwith shape (100,)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0"),
    ):
        monkeypatch.setattr(train_gpt, "build", Mock(side_effect=error))
        assert one_error(run()).endswith(said)
    monkeypatch.setattr(train_gpt, "build", Mock(side_effect=RuntimeError("shapes")))
    with pytest.raises(RuntimeError, match="shapes"):
        run()


def test_weights_that_an_update_makes_infinite_end_the_run(run):
    """They are seen in the next loss, and in the last validation."""
    assert "step:3/6 train_loss:nan; lower the learning rates" in one_error(run(muon_lr=2e9))
    line = one_error(run(muon_lr=2e9, num_iterations=2, run_id="y"))
    assert "step:2/2 val_loss:nan; lower the learning rates" in line


def test_a_resumed_run_takes_as_many_threads_as_its_checkpoint_if_it_can(run, monkeypatch):
    """The number alone is looked at here: two real threads may share a core with other tests."""
    chosen = [2]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    first = run(save_every=2)
    assert ", 2 thread(s), " in first.out and first.values["threads"] == "2"
    assert chosen == [2], "a new run obeys the environment and sets nothing"
    chosen.append(1)
    path = ["--resume", "logs/x/step-000004.pt"]
    assert ", 2 thread(s), " in run(path).out
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert ", 1 thread(s), " in run(path).out


@pytest.mark.slow
def test_init_takes_weights_trains_on_other_data_and_can_be_resumed(run, tiny_shards):
    """Moments and schedules start over, and an untied head stays untied. With --resume auto, it
    begins with the weights where there is nothing yet to go on from."""
    run(save_every=2)
    line = one_error(run(run_id="tuned", init=WEIGHTS, model_dim=64))
    assert f"{WEIGHTS}: does not fit" in line and "size mismatch for embed.weight: " in line
    assert not Path("logs/tuned").exists()
    assert "none.pt: no whole checkpoint" in one_error(run(run_id="tuned", init="none.pt"))
    line = one_error(run(["--resume", "auto", "--run_id", "x", "--init", WEIGHTS]))
    assert f"--init {WEIGHTS}: not as in the checkpoint; a resumed run may change" in line
    theirs = train_gpt.load_checkpoint(Path(WEIGHTS))["model"]
    other = dict(train_files=tiny_shards([5000], name="other", seed=9), seed=4, muon_lr=0.05)
    flags = dict(run_id="tuned", init=WEIGHTS, resume="auto", save_every=2) | other
    cfg = tiny(init=WEIGHTS)
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


# ---- The machine ----

# Imports the script, fails where that did more than import modules, then runs it.
PROCESS = """
import os, signal, sys
import torch.distributed as dist
handler = signal.getsignal(signal.SIGTERM)
import train_gpt
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)  # seconds of CPU
assert not dist.is_initialized() and not train_gpt.torch.cuda.is_initialized()
assert signal.getsignal(signal.SIGTERM) == handler and os.listdir() == []
sys.exit(train_gpt.main())
"""


def test_an_import_does_nothing_and_a_run_needs_no_utf8_and_no_home(data_flags, tmp_path):
    (tmp_path / "cwd").mkdir()
    variables = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", HOME="",
                     PYTHONPATH=str(REPO), PYTHONDONTWRITEBYTECODE="1",
                     PYTHONWARNINGS="error", PYTHONDEVMODE="1")
    flags = FLAGS | data_flags | dict(num_iterations=1, warmup_steps=0)
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *to_argv(flags)], cwd=tmp_path / "cwd",
        env=os.environ | variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    log = (tmp_path / "cwd" / "logs" / "x" / "log.txt").read_text("utf-8")
    assert final_values(log)["steps"] == "1"


def test_what_keeps_cuda_or_the_ranks_from_starting_is_told_in_its_own_words(run, monkeypatch):
    said = "The NVIDIA driver on your system is too old"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=RuntimeError(said)))
    assert f"1 rank(s) cannot start: {said}" in one_error(run(device="auto"))
    monkeypatch.setenv("LOCAL_RANK", "9")
    assert "--device auto: no GPU 9; use --device cpu" in one_error(run(device="auto"))
    error = RuntimeError("Unable to find interface for: [eth99]")  # GLOO_SOCKET_IFNAME
    monkeypatch.setattr(train_gpt.dist, "init_process_group", Mock(side_effect=error))
    for name, value in dict(WORLD_SIZE=2, RANK=1, LOCAL_RANK=1).items():
        monkeypatch.setenv(name, str(value))
    assert f"rank 1: 2 rank(s) cannot start: {error}" in one_error(run())
    monkeypatch.undo()


def test_ctrl_c_before_the_first_step_is_one_line_and_nothing_stays_frozen(run, monkeypatch):
    """Or torch 2.15's libraries would take the objects for leaks."""
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt.Run, "warm_up", Mock(side_effect=KeyboardInterrupt))
        stopped = run()
    assert (stopped.code, stopped.err) == (130, "train_gpt.py: error: interrupted\n")
    assert stopped.log.endswith("\nerror: interrupted\n")
    assert run(run_id="y", num_iterations=1).code == 0 and gc.get_freeze_count() == 0


def test_a_run_is_built_before_it_trains(run, monkeypatch):
    """Its log is opened, and weights change, once it is started."""
    monkeypatch.setattr(train_gpt.Run, "start", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(train_gpt, "train", Mock(side_effect=AssertionError))
    stopped = run()
    assert stopped.code == 130 and not Path("logs").exists()


@pytest.mark.parametrize("error, told", [
    (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed"), True),
    (RuntimeError("PytorchStreamReader failed reading /home/me/gloo/step-000100.pt"), False)])
def test_another_rank_is_blamed_for_what_gloo_says_alone(error, told):
    assert train_gpt.explain(error).startswith("another rank has ended") == told


@pytest.mark.slow
def test_masks_are_stored_while_a_model_is_compiled_for_validation_alone():
    from torch._inductor import ir

    with pytest.raises(RuntimeError), train_gpt.store_masks():
        assert ir.FlexibleLayout.allow_indexing
        raise RuntimeError
    assert not ir.FlexibleLayout.allow_indexing
