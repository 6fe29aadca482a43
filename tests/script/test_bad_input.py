"""What goes wrong ends in one line and in 2: flags, environment, checkpoints, NaN, memory. And what
depends on more than flags: the number of threads, the weights that a run begins with.
"""

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
import torch
from test_checkpoints import changed
from tiny_runs import FLAGS, STEPS, one_error, to_argv

import train_gpt

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures

# Flags and environment


@pytest.mark.parametrize(("flags", "named"), [
    (dict(long_windows=16777216), "--long_windows 16777216: must be from 1 to "),
    (dict(run_id="a\nb"), "--run_id a b: must be of letters, digits, "),
    (dict(device="cuda"), "--device cuda: no GPU 0; use --device cpu"),
    (dict(init="logs/y/step-000006.pt"), "logs/y/step-000006.pt: no whole checkpoint (No such"),
    (dict(resume="logs/x/step-00006.pt"), "logs/x/step-00006.pt: no whole checkpoint (No such"),
], ids=str)
def test_flags_that_no_run_can_be_made_of(run, tmp_path, monkeypatch, flags, named):
    """Before any memory is asked for, and with nothing written. More in test_hyperparameters.py."""
    if "init" not in flags:
        monkeypatch.setattr(train_gpt, "GPT", lambda cfg: pytest.fail("it was not refused"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run(**flags)
    assert named in one_error(result) and result.out == ""
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("variables", "named"), [
    (dict(WORLD_SIZE="abc"), "WORLD_SIZE=abc: must be from 1 to 65536; start by torchrun"),
    (dict(WORLD_SIZE="0"), "WORLD_SIZE=0: must be from 1 to 65536"),
    (dict(RANK="5"), "RANK=5: must be from 0 to 0; start by torchrun"),
    (dict(LOCAL_RANK="abc"), "LOCAL_RANK=abc: must be from 0 to 0"),
    (dict(WORLD_SIZE="2"), "WORLD_SIZE=2: "),
    (dict(WORLD_SIZE="2", RANK="0"), "WORLD_SIZE=2: "),
], ids=str)
def test_variables_of_torchrun_that_are_not_torchruns(run, tmp_path, monkeypatch, variables, named):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = one_error(run())
    assert named in line and "start by torchrun" in line
    assert not (tmp_path / "logs").exists()


def test_a_process_ends_with_one_line_and_2(run_script, tmp_path):
    done = run_script(["--preset", "pocket", "--seq_lens", 100])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train_gpt.py: error: --seq_lens 100: must be multiples of 128\n"
    assert list(tmp_path.iterdir()) == []


def test_logs_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "logs").write_text("")
    assert "logs" in one_error(run())


def test_an_empty_log_is_no_runs(run, tmp_path):
    """A disk that was full leaves it."""
    (tmp_path / "logs" / "x").mkdir(parents=True)
    (tmp_path / "logs" / "x" / "log.txt").touch()
    assert run().log.startswith(train_gpt.SCRIPT.read_text())


@pytest.mark.parametrize("resume", [{}, {"resume": "auto"}], ids=str)
def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path, resume):
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(save_every=2)
    before = files()
    line = one_error(run(val_tokens=10_000, save_every=2, **resume))
    taken = "--run_id x: logs/x/log.txt is there already; go on with its run by --resume auto, or"
    assert ("--val_tokens 10000" if resume else taken) in line
    assert before == files()


@pytest.mark.parametrize("error", [
    MemoryError(),
    MemoryError("Unable to allocate 745. GiB for an array\nwith shape (100,)"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate "
                 "memory: you tried to allocate 800000000000 bytes. Error code 12"),
], ids=lambda error: str(error)[:20])
def test_memory_that_runs_out_ends_in_a_line(run, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(train_gpt, "train", fail)
    remedy = "out of memory; raise --head_chunks, or lower --sequences_per_forward\n"
    assert one_error(run()).endswith(remedy)


def test_an_error_of_the_scripts_own_keeps_its_traceback(run, monkeypatch):
    def fail(*args):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(train_gpt, "train", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        run()


# NaN; an update that is not finite is in test_survival.py


@pytest.mark.parametrize(("step", "value"), [(3, math.inf), (STEPS, math.nan)])
def test_a_validation_that_is_not_finite_ends_the_run(run, monkeypatch, value, step):
    """On the last step too, and without a result."""
    losses = iter([0.0, *[2.0] * (step // 3), value])  # the first one is the warm-up's
    monkeypatch.setattr(train_gpt, "validate", lambda *args: next(losses))
    result = run()
    assert f"step {step}: the validation loss is {value}" in one_error(result)
    assert "\n---\n" not in result.log and f"step:{step}/6 val_loss" not in result.log


# Threads


@pytest.mark.parametrize(("idle", "threads"), [
    (0.0, 1), (0.4, 1), (0.6, 1), (1.4, 1), (1.6, 2), (3.3, 3), (7.9, 8), (40.0, 8)])
def test_as_many_threads_as_cores_are_idle(monkeypatch, idle, threads):
    """Of 8 cores, by the time that they were idle in a while; one at least."""
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(train_gpt.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(train_gpt, "idle_seconds", lambda: 7.0 + idle * now[0])
    assert train_gpt.choose_threads() == 8, "OMP_NUM_THREADS decides where it is set"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert train_gpt.choose_threads() == threads


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux has it")
def test_idle_time_is_that_of_all_cores():
    """As the cores' own lines add up to."""
    def by_core():
        text = Path("/proc/stat").read_text()
        ticks = sum(int(idle) for idle in re.findall(r"^cpu\d+(?: \d+){3} (\d+)", text, re.M))
        return ticks / os.sysconf("SC_CLK_TCK")

    before, found, after = by_core(), train_gpt.idle_seconds(), by_core()
    assert before - 1 <= found <= after + 1


def test_a_run_tells_its_threads_and_a_resumed_one_takes_its_checkpoints(run, monkeypatch):
    """The number alone is looked at here: two real threads may share a core with other tests."""
    number = [1]
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: number.__setitem__(0, threads))
    monkeypatch.setattr(torch, "get_num_threads", lambda: number[0])
    monkeypatch.setattr(train_gpt, "choose_threads", lambda: 2)
    first = run(save_every=2)
    assert ", 2 thread(s), " in first.out.splitlines()[0] and first.values["threads"] == "2"
    assert "\nthreads: 2\n" in first.log.partition("=" * 100)[2].partition("=" * 100)[0]
    monkeypatch.setattr(train_gpt, "choose_threads", lambda: 1)
    argv = ["--resume", "logs/x/step-000004.pt"]
    assert run(argv).values["threads"] == "1", "OMP_NUM_THREADS decides where it is set"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert run(argv).values["threads"] == "2"


# Whole files that do not fit


@pytest.fixture
def checkpoint(run):
    """The path of a checkpoint of step 4, whose head has left the embedding in step 6."""
    assert run(save_every=2).code == 0
    return Path("logs/x/step-000004.pt")


@pytest.mark.parametrize(("keys", "value", "named"), [
    (["model", "lm_head.weight"], torch.zeros(3, 32), "size mismatch for lm_head.weight"),
    (["model", "blocks.0.attn.qkv_w"], None, "blocks.0.attn.qkv_w"),
    (["model"], {}, "lm_head.weight"),
    (["optimizers", "head"], None, "optimizer of head"),
    (["optimizers", "mlp", "mean"], None, "optimizer of mlp: 'mean'"),
    (["train_time_ms"], "a minute", "no whole checkpoint (TypeError"),
])
def test_resume_of_a_whole_file_that_does_not_fit_says_what(run, checkpoint, keys, value, named):
    state = torch.load(checkpoint, weights_only=True)
    torch.save(changed(state, keys, value), checkpoint)
    line = one_error(run(["--resume", str(checkpoint)]))
    assert f"{checkpoint}: " in line and named in line


def test_resume_of_another_run_says_what_differs(run, checkpoint):
    with Path("tiny_train_000000.bin").open("r+b") as file:
        file.seek(1500)
        file.write(b"\0\0")
    line = one_error(run(["--resume", str(checkpoint), "--muon_lr", "0.06"]))
    assert line.endswith("; what differs: muon_lr 0.08, now 0.06; the training data\n")


# --init


def test_init_takes_weights_and_nothing_else(run, checkpoint, data_flags):
    """Moments and schedules begin anew, and an untied head stays untied."""
    path = checkpoint.with_name("step-000006.pt")
    theirs = train_gpt.load_checkpoint(path)["model"]
    assert not torch.equal(theirs["embed.weight"], theirs["lm_head.weight"])
    cfg = train_gpt.parse_args(to_argv(FLAGS | data_flags | dict(init=path)))
    model, optimizers = train_gpt.build(cfg, train_gpt.Ranks(cfg))
    assert model.state_dict().keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in model.state_dict().items())
    assert not any(x.any() for optimizer in optimizers for x in optimizer.state.values())
    assert not any(train_gpt.schedule(step, cfg).tied for step in range(STEPS))


def test_init_trains_on_other_data_and_can_be_resumed(run, checkpoint, tiny_shards):
    """With --resume auto, it begins with the weights where there is nothing yet to go on from."""
    path = checkpoint.with_name("step-000006.pt")
    other = dict(train_files=tiny_shards([4000], name="other", seed=9), seed=4, muon_lr=0.05)
    scratch = run(run_id="scratch", **other)
    flags = dict(run_id="tuned", init=path, resume="auto", save_every=2) | other
    tuned = run(**flags)
    assert tuned.code == 0 and "starting afresh" in tuned.out, tuned.err
    assert tuned.losses[0] != scratch.losses[0] and len(tuned.losses) == STEPS
    state = train_gpt.load_checkpoint("logs/tuned/step-000002.pt")
    assert not torch.equal(state["model"]["embed.weight"], state["model"]["lm_head.weight"])
    assert state["optimizers"]["embed"]["count"] == state["optimizers"]["head"]["count"] == 1
    assert run(**flags).losses == [], "it goes on from its own end"
    path.unlink()  # it is needed no more
    resumed = run(["--resume", "logs/tuned/step-000002.pt"])
    assert resumed.losses == tuned.losses[2:]
    assert resumed.values["val_loss"] == tuned.values["val_loss"]


@pytest.mark.parametrize(("flags", "named"), [
    (dict(model_dim=64), "size mismatch for lm_head.weight"),
    (dict(attention_pattern="LSL", value_embed_pattern="0.0"), "blocks.3.attn.qkv_w"),
    (dict(attention_pattern="LS.LL", value_embed_pattern="0..01"), "value_embeds.1.weight"),
], ids=str)
def test_init_names_what_does_not_fit(run, checkpoint, flags, named):
    line = one_error(run(run_id="y", init=checkpoint, **flags))
    assert f"{checkpoint}: " in line and named in line and "name another" in line
    assert not Path("logs/y").exists()
