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
WEIGHTS = "logs/x/step-000006.pt"


@pytest.mark.parametrize(("flags", "variables", "named"), [
    (dict(run_id="a\nb"), {}, "--run_id a b: must be of letters, digits, "),
    (dict(device="cuda"), {}, "--device cuda: no GPU 0; use --device cpu"),
    (dict(preset="record", skip_layer=0), {},
     "--preset record: there is no CUDA device; use --preset pocket"),
    (dict(init="logs/y/none.pt"), {}, "logs/y/none.pt: no whole checkpoint (No such file"),
    (dict(resume="logs/x/none.pt"), {}, "logs/x/none.pt: no whole checkpoint (No such file"),
    (dict(resume="."), {}, ".: no whole checkpoint (Is a directory); name another"),
    ({}, dict(WORLD_SIZE="abc"), "WORLD_SIZE=abc: must be from 1 to 65536; start by torchrun"),
    ({}, dict(WORLD_SIZE="0"), "WORLD_SIZE=0: must be from 1 to 65536; start by torchrun"),
    ({}, dict(RANK="5"), "RANK=5: must be from 0 to 0; start by torchrun"),
    ({}, dict(LOCAL_RANK="abc"), "LOCAL_RANK=abc: must be from 0 to 0; start by torchrun"),
    ({}, dict(WORLD_SIZE="2"), "WORLD_SIZE=2: "), ({}, dict(WORLD_SIZE="2", RANK="0"), "torchrun"),
], ids=str)
def test_what_no_run_can_be_made_of(run, tmp_path, monkeypatch, flags, variables, named):
    """With nothing written. More flags are in test_hyperparameters.py."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run(**flags)
    assert named in one_error(result) and result.out == ""
    assert not (tmp_path / "logs").exists()


def test_a_process_ends_with_one_line_and_2(run_script):
    done = run_script(["--preset", "pocket", "--seq_lens", 100])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train_gpt.py: error: --seq_lens 100: must be multiples of 128\n"


def test_logs_folder_that_cannot_be_made_and_an_empty_log(run, tmp_path):
    (logs := tmp_path / "logs").write_text("")
    assert "logs" in one_error(run())
    logs.unlink()
    (logs / "x").mkdir(parents=True)
    (logs / "x" / "log.txt").touch()  # a disk that was full leaves it
    assert run().log.startswith(train_gpt.SCRIPT.read_text())


def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path):
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(save_every=2)
    before = files()
    taken = "--run_id x: logs/x/log.txt is there already; go on with its run by --resume auto, or"
    assert taken in one_error(run(save_every=2))
    assert "--val_tokens 10000" in one_error(run(val_tokens=10_000, save_every=2, resume="auto"))
    assert before == files()


MEMORY = "out of memory; raise --head_chunks, or lower --sequences_per_forward\n"


@pytest.mark.parametrize(("error", "ending"), [
    (MemoryError("Unable to allocate 745. GiB for an array\nwith shape (100,)"), MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0"), MEMORY),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), MEMORY),
    (RuntimeError("shapes do not match"), None),
], ids=["host", "GPU", "torch's host", "of the script's own"])
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


@pytest.mark.parametrize(("step", "value"), [(3, math.inf), (STEPS, math.nan)])
def test_a_validation_that_is_not_finite_ends_the_run(run, monkeypatch, value, step):
    """On the last step too, and without a result. NaN weights are in test_survival.py."""
    losses = iter([0.0, *[2.0] * (step // 3), value])  # the first one is the warm-up's
    monkeypatch.setattr(train_gpt, "validate", lambda *args: next(losses))
    result = run()
    assert f"step {step}: the validation loss is {value}" in one_error(result)
    assert "\n---\n" not in result.log and f"step:{step}/6 val_loss" not in result.log


# Threads


@pytest.mark.parametrize(("idle", "threads"), [
    (0.0, 1), (0.6, 1), (1.4, 1), (1.6, 2), (3.3, 3), (7.9, 8), (40.0, 8)])
def test_as_many_threads_as_cores_are_idle(monkeypatch, idle, threads):
    """Of 8 cores, by the time that they were idle in a while; one at least."""
    now = [100.0]
    clock = SimpleNamespace(sleep=lambda seconds: now.append(now[-1] + seconds))
    monkeypatch.setattr(train_gpt.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(train_gpt, "time", clock)
    monkeypatch.setattr(train_gpt, "idle_seconds", lambda: 7.0 + idle * now[-1])
    assert train_gpt.choose_threads() == 8, "OMP_NUM_THREADS decides where it is set"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert train_gpt.choose_threads() == threads


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux has it")
def test_idle_time_is_that_of_all_cores():
    text = Path("/proc/stat").read_text()
    ticks = map(int, re.findall(r"^cpu\d+(?: \d+){3} (\d+)", text, re.M))
    expected = sum(ticks) / os.sysconf("SC_CLK_TCK")
    assert train_gpt.idle_seconds() == pytest.approx(expected, rel=0, abs=5)



def test_a_run_tells_its_threads_and_a_resumed_one_takes_its_checkpoints(run, monkeypatch):
    """The number alone is looked at here: two real threads may share a core with other tests."""
    chosen = [1]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(train_gpt, "choose_threads", lambda: 2)
    first = run(save_every=2)
    assert ", 2 thread(s), " in first.out.splitlines()[0] and first.values["threads"] == "2"
    assert "\nthreads: 2\n" in first.log.partition("=" * 100)[2].partition("=" * 100)[0]
    monkeypatch.setattr(train_gpt, "choose_threads", lambda: 1)
    argv = ["--resume", "logs/x/step-000004.pt"]
    assert run(argv).values["threads"] == "1", "OMP_NUM_THREADS decides where it is set"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert run(argv).values["threads"] == "2"
    assert run(argv).values["threads"] == "2"
    assert chosen == [1, 2, 1, 2], "a number that holds already is not set: MKL would be slower"


# Whole files that do not fit


@pytest.fixture
def checkpoint(run):
    """The path of a checkpoint of step 4, whose head has left the embedding in step 6."""
    assert run(save_every=2).code == 0
    return Path("logs/x/step-000004.pt")


def test_resume_of_a_whole_file_that_does_not_fit_says_what(run, checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    for keys, value, named in [
        (["model", "lm_head.weight"], torch.zeros(3, 32), "size mismatch for lm_head.weight"),
        (["model", "blocks.0.attn.qkv_w"], None, "blocks.0.attn.qkv_w"),
        (["model"], {}, "lm_head.weight"),
        (["optimizers", "head"], None, "optimizer of head"),
        (["optimizers", "mlp", "mean"], None, "optimizer of mlp: 'mean'"),
        (["train_time_ms"], "a minute", "no whole checkpoint (TypeError"),
    ]:
        torch.save(changed(state, keys, value), checkpoint)
        line = one_error(run(["--resume", str(checkpoint)]))
        assert f"{checkpoint}: " in line and named in line
    torch.save(state, checkpoint)
    Path("tiny_train_000001.bin").unlink()
    line = one_error(run(["--resume", str(checkpoint), "--muon_lr", "0.06"]))
    assert line.endswith("; what differs: muon_lr 0.08, now 0.06; the training data\n")


# --init


def test_init_takes_weights_and_nothing_else(run, checkpoint, data_flags):
    """Moments and schedules begin anew, and an untied head stays untied."""
    theirs = train_gpt.load_checkpoint(WEIGHTS)["model"]
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
    assert tuned.code == 0 and "starting afresh" in tuned.out, tuned.err
    state = train_gpt.load_checkpoint("logs/tuned/step-000002.pt")
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
        "blocks.3.attn.qkv_w": dict(attention_pattern="LSL", value_embed_pattern="0.0"),
        "value_embeds.1.weight": dict(attention_pattern="LS.LL", value_embed_pattern="0..01"),
    }.items():
        line = one_error(run(run_id="y", init=checkpoint, **flags))
        assert f"{checkpoint}: " in line and named in line and "name another" in line
        assert not Path("logs/y").exists()
