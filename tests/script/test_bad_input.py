"""What goes wrong ends in one line and in 2: flags, data, checkpoints, NaN, memory. And what
depends on more than flags: the weights that a run begins with, its threads, its environment.
"""

import dataclasses
import fcntl
import math
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


@pytest.mark.parametrize(("flags", "named"), [
    (dict(run_id="a\nb"), "--run_id must be of letters, digits, "),
    (dict(device="cuda"), "--device cuda: no GPU 0; use --device cpu"),
    (dict(preset="record", skip_layer=0),
     "--preset record: there is no CUDA device; use --preset pocket"),
    (dict(init="logs/y/none.pt"), "logs/y/none.pt: no such checkpoint; give its path"),
    (dict(resume="logs/x/none.pt"), "logs/x/none.pt: no such checkpoint; give its path"),
    (dict(resume="."), ".: no such checkpoint; give its path"),
], ids=str)
def test_what_no_run_can_be_made_of(run, tmp_path, monkeypatch, flags, named):
    """With nothing written. More flags are in test_hyperparameters.py."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run(**flags)
    assert named in one_error(result) and "step:" not in result.out
    assert not (tmp_path / "logs").exists()


def test_a_process_ends_with_one_line_and_2(run_script):
    done = run_script(["--preset", "pocket", "--seq_lens", 100])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("train_gpt.py: error: --seq_lens and val_seq_len must be multiples of "
                           "128; here it is 100\n")


def test_logs_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "logs").write_text("")
    assert "logs" in one_error(run())


def test_two_runs_of_one_name_at_once_are_refused(run, tmp_path):
    """By a lock on the log, which the system takes away with the process."""
    run(save_every=2)
    with open("logs/x/log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        line = one_error(run(save_every=2, resume="auto"))
        assert "--run_id x: another process runs it now" in line
    assert run(save_every=2, resume="auto").code == 0


def test_one_file_as_training_and_validation_data_is_refused(run, data_flags):
    line = one_error(run(val_files=data_flags["train_files"]))
    assert "--val_files has a file of these, too" in line


def test_a_run_says_before_it_starts_that_it_would_repeat_its_data(run):
    """The preset record refuses, unless it is told to, and names the command that fetches more."""
    result = run()
    tokens = 4 * 128 * STEPS
    assert result.out.index("2700 tokens, read again as the run takes") < result.out.index("step:")
    assert f"the run takes {tokens}" in result.out
    assert "the training data begin again" in result.log
    assert "read again" not in run(run_id="y", num_iterations=5).out
    cfg = dataclasses.replace(train_gpt.parse_args([]), val_files="tiny_val_*.bin")
    loader = SimpleNamespace(files=[], size=800_000_000, digest="", log=print)
    fetch = "fetch more: python data/fineweb.py 27, or --repeat_data true"
    with pytest.raises(train_gpt.UserError, match=fetch):
        train_gpt.check_data(cfg, loader, 2_673_868_800, "")
    train_gpt.check_data(dataclasses.replace(cfg, repeat_data=True), loader, 2_673_868_800, "")


@pytest.mark.parametrize("variables", [
    dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"), dict(HOME="")], ids=str)
def test_an_ascii_locale_and_no_home_are_no_hindrance(data_flags, tmp_path, variables):
    argv = to_argv(FLAGS | data_flags)
    for words in (["--help"], argv):
        done = subprocess.run([sys.executable, train_gpt.SCRIPT, *words], cwd=tmp_path,
                              env=os.environ | variables, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_script_in_any_folder_finds_data_above_it(tmp_path, monkeypatch):
    """Also one in the root folder, which has no folder above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "x_0.bin").touch()
    monkeypatch.chdir(tmp_path / "data")
    monkeypatch.setattr(train_gpt, "SCRIPT", tmp_path / "records" / "one" / "train_gpt.py")
    assert train_gpt.find_shards("data/a/x_*.bin") == [tmp_path / "data" / "a" / "x_0.bin"]
    monkeypatch.setattr(train_gpt, "SCRIPT", Path("/train_gpt.py"))
    with pytest.raises(train_gpt.UserError, match="no file matches"):
        train_gpt.find_shards("data/a/none_*.bin")


def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path):
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(save_every=2)
    before = files()
    taken = "--run_id x: logs/x/log.txt is there already; go on with its run by --resume auto, or"
    assert taken in one_error(run(save_every=2))
    assert "--val_tokens 10000" in one_error(run(val_tokens=10_000, save_every=2, resume="auto"))
    assert before == files()


MEMORY = "out of memory; lower --seq_lens or --sequences_per_forward\n"


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


@pytest.mark.parametrize(("step", "value"), [(3, math.inf), (STEPS, math.nan)])
def test_a_validation_that_is_not_finite_ends_the_run(run, monkeypatch, value, step):
    """On the last step too, and without a result. NaN weights are in test_survival.py."""
    losses = iter([0.0, *[2.0] * (step // 3), value])  # the first one is the warm-up's
    monkeypatch.setattr(train_gpt, "validate", lambda *args: next(losses))
    result = run()
    said = f"step:{step}/6 val_loss:{value:.4f}; lower the learning rates"
    assert said in one_error(result)
    assert "\n---\n" not in result.log and f"step:{step}/6 val_loss" not in result.log


# Threads


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


# Whole files that do not fit


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
        (["model", "blocks.0.attn.qkv_w"], None, "blocks.0.attn.qkv_w"),
        (["model"], {}, "lm_head.weight"),
        (["optimizers", "head"], None, "does not fit ('head')"),
        (["optimizers", "mlp", "mean"], None, "does not fit ('mean')"),
        # State of another length is neither cut nor padded.
        (["optimizers", "mlp", "mean"], mean[:-1], "does not fit (shape"),
        (["optimizers", "mlp", "mean"], torch.cat([mean, mean[:1]]), "does not fit (shape"),
    ]:
        torch.save(changed(state, keys, value), checkpoint)
        line = one_error(run(["--resume", str(checkpoint)]))
        assert f"{checkpoint}: " in line and named in line
    torch.save(state, checkpoint)
    line = one_error(run(["--resume", str(checkpoint), "--muon_lr", "0.06"]))
    assert "--muon_lr 0.06: the checkpoint has 0.08; a resumed run may change num_iter" in line
    line = one_error(run(["--resume", str(checkpoint), "--num_iterations", "3"]))
    assert f"--num_iterations 3: {checkpoint} is of a later step" in line
    Path("tiny_train_000001.bin").unlink()
    line = one_error(run(["--resume", str(checkpoint)]))
    assert line.endswith(f"not the data of {checkpoint}\n")


def test_saved_state_has_its_true_length(run, checkpoint):
    state = torch.load(checkpoint, weights_only=True)["optimizers"]
    cfg = train_gpt.parse_args(to_argv(FLAGS))
    model = train_gpt.GPT(cfg)
    for group in train_gpt.parameter_groups(model, cfg):
        size = sum(param.numel() for param in group.params)
        assert len(state[group.name]["mean"]) == size


# --init


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
        "blocks.3.attn.qkv_w": dict(attention_pattern="LSL", value_embed_pattern="0.0"),
        "value_embeds.1.weight": dict(attention_pattern="LS.LL", value_embed_pattern="0..01"),
    }.items():
        line = one_error(run(run_id="y", init=checkpoint, **flags))
        assert f"{checkpoint}: " in line and named in line and "name another" in line
        assert not Path("logs/y").exists()
