"""Whole runs of a tiny model in this process: losses, warm-up, log, console, after the run."""

import hashlib
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import read_shard
from test_loader import packed_steps
from tiny_runs import FLAGS, STEPS, TOKENS, one_error, tiny

import train_gpt

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures


@torch.no_grad()
def mean_loss(model, sequences):
    """By the model's logits, in float64, each of the sequences alone."""
    total = 0.0
    for tokens in torch.from_numpy(sequences):
        logits = model.logits(model.hidden(tokens[None, :-1]))[0].double().log_softmax(-1)
        for i in range(len(tokens) - 1):
            total -= logits[i, tokens[i + 1]].item()
    return total / sequences[:, 1:].size


def loaded(path):
    """The model of a checkpoint, as a script of one's own would load it."""
    state = train_gpt.load_checkpoint(Path(path))
    cfg = train_gpt.shorten(train_gpt.hyperparameters({}, state["settings"]))
    model = train_gpt.GPT(cfg).eval()
    model.load_state_dict(state["model"])
    return model


@pytest.mark.slow
def test_warm_up_leaves_no_trace_in_a_run_which_its_seed_decides(run, monkeypatch):
    """Losses, weights and state are equal to the bit. Each stage is warmed up by its first steps,
    so that what is compiled is what it runs."""
    called = []
    step_optimizers = train_gpt.step_optimizers

    def stepped(optimizers, now, divisor):
        called.append(now)
        step_optimizers(optimizers, now, divisor)

    monkeypatch.setattr(train_gpt, "step_optimizers", stepped)
    result = run(warmup_steps=2)
    warmed = [0, 1, 2, 3, 4, 5, 5, 4, 5]
    assert called == [train_gpt.schedule(step, tiny()) for step in [*warmed, *range(STEPS)]]

    other = run(warmup_steps=0, run_id="y")
    assert result.losses == other.losses and len(result.losses) == STEPS
    assert result.values["val_loss"] == other.values["val_loss"]
    for a, b in zip(result.optimizers, other.optimizers, strict=True):
        assert all(map(torch.equal, a.tensors(), b.tensors())), a.name
    assert run(seed=4, run_id="z").losses[1:] != result.losses[1:]


def test_a_warm_up_restores_all_that_its_steps_change(run, monkeypatch):
    """Also gradients that wait for the next step, and what model and loader note of a stage."""
    seen = []

    def traces(run):
        tensors = [x.clone() for each in run.optimizers for x in (each.grads, *each.tensors())]
        objects = vars(run.model) | vars(run.loader)
        objects |= {each.name: each.group for each in run.optimizers}
        return tensors, objects

    def warm_up(run, warm_up=train_gpt.Run.warm_up):
        before, objects = traces(run)
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt, "train", train_and_note)
            warm_up(run)
        after, later = traces(run)
        assert all(map(torch.equal, before, after))
        assert [name for name in objects.keys() | later.keys()
                if objects.get(name) is not later.get(name)] == []
        raise KeyboardInterrupt  # the run itself is not looked at here

    def train_and_note(run, cfg, train=train_gpt.train):
        train(run, cfg)
        seen.append(any(each.grads.any() for each in run.optimizers))

    monkeypatch.setattr(train_gpt.Run, "warm_up", warm_up)
    assert run(warmup_steps=1, num_iterations=5).code == 130  # Adam rests at the last step
    assert seen[-1], "some gradients must wait"


def test_the_clock_stops_for_validation_and_checkpoints(run, monkeypatch):
    """By a clock of the test's own, on which gradients take a second, the others hours."""
    now = [0.0]

    def takes(name, seconds):
        function = getattr(train_gpt, name)

        def call(*args):
            now[0] += seconds
            return function(*args)

        monkeypatch.setattr(train_gpt, name, call)

    takes("accumulate_gradients", 1)
    takes("validate", 10_000)
    takes("write_checkpoint", 10_000)
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0] / 2)
    monkeypatch.setattr(train_gpt, "time", clock)
    values = run(save_every=2).values
    assert values["train_time_ms"] == str(1000 * STEPS)
    assert values["process_time_ms"] == str(500 * STEPS)


@pytest.mark.parametrize("last, shown", [
    (25, [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]), (6, [1, 2, 3, 4, 5, 6])])
def test_the_console_has_a_line_for_each_tenth_of_a_run_and_the_time_that_is_left(last, shown):
    run, shown_there, log = object.__new__(train_gpt.Run), {}, []
    run.cfg = tiny(num_iterations=last)
    run.tokens_before = [512 * step for step in range(last + 1)]

    def note(text, left, console):
        log.append(text)
        if console:
            shown_there[len(log)] = left

    run.log = note
    for step in range(1, last + 1):
        run.log_losses(step, 2000.0 * step, train_loss=1.0)
    assert shown_there == {step: f" left:{2 * (last - step)}s" for step in shown}
    assert log[-1] == (f"step:{last}/{last} train_loss:1.0000 train_time:{2000 * last}ms "
                       "step_avg:2000.00ms tokens_per_s:256")


def test_the_time_that_is_left_is_counted_by_tokens():
    """Later steps have more of them: a second for 1,000, then for 3,000 in each of two steps."""
    run, left = object.__new__(train_gpt.Run), []
    run.cfg = tiny(num_iterations=3)
    run.tokens_before = [0, 1000, 4000, 7000]
    run.log = lambda text, more, console: left.append(more)
    run.log_losses(1, 1000.0, train_loss=1.0)
    assert left == [" left:6s"]


def test_the_log_has_source_facts_steps_and_results(run, data_flags, tmp_path):
    changes = dict(muon_lr=0.125, seed=7, save_every=2, target_loss=0.1)
    result = run(**changes)
    source = train_gpt.SCRIPT.read_text()
    blank, facts, body = result.log.removeprefix(source).split("=" * 100 + "\n")
    assert result.log.startswith(source) and blank == "\n"

    facts = dict(line.split(": ", 1) for line in facts.splitlines())
    values = vars(tiny(**FLAGS | data_flags | changes))
    expected = {name: str(value) for name, value in values.items()}
    scored = np.concatenate([read_shard(path) for path in sorted(tmp_path.glob("tiny_val_*"))])
    expected |= dict(
        head_chunks="1", torch=torch.__version__, threads="1", world_size="1",
        planned_tokens=str(TOKENS), val_digest=hashlib.sha256(scored[:701]).hexdigest()[:16],
        parameters=str(sum(x.numel() for x in result.model.parameters())))
    assert re.fullmatch(r".+ \(\w+, .+\)", facts.pop("device"))
    assert len(facts.pop("train_digest")) == 16
    del expected["device"]
    assert facts == expected

    body, _, block = body.partition("\n---\n")
    loss = r"(\d+\.\d{4})(?: next_token_loss:(\d+\.\d{4}))?"
    pattern = (rf"^step:(\d)/6 (val|train)_loss:{loss} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms "
               r"tokens_per_s:(\d+)$")
    found = re.findall(pattern, body, re.M)
    assert [f"{kind} {step}" for step, kind, *_ in found] == [
        "val 0", "train 1", "train 2", "train 3", "val 3", "train 4", "train 5", "train 6", "val 6"]
    assert float(found[0][2]) == pytest.approx(math.log(384), abs=0.01)
    behind = train_gpt.planned_tokens(tiny())
    for step, *_, ms, average, rate in found[1:]:
        assert abs(float(average) * int(step) - int(ms)) <= 0.5 + 0.005 * int(step)
        assert abs(int(rate) * int(ms) / 1000 / behind[int(step)] - 1) < 0.5 / int(ms) + 1e-3
    # A step's losses are those before its update.
    third = [*packed_steps(tmp_path, 4, [128, 128, 256], 256)][2]
    model = loaded("logs/x/step-000002.pt")
    model.set_stage(train_gpt.schedule(2, model.cfg))
    assert float(found[3][3]) == pytest.approx(mean_loss(model, third), abs=6e-5)

    values = result.values
    assert block.startswith("val_loss: ") and re.fullmatch(r"\d\.\d{6}", values["val_loss"])
    assert f"{float(values['val_loss']):.4f}" == found[-1][2]
    same = {name: facts[name] for name in ("parameters", "world_size", "torch", "seed", "threads")}
    same |= dict(steps=str(STEPS), tokens=str(TOKENS))
    assert same.items() <= values.items()
    assert ": the target, 0.1, is not reached\n" in result.out


def test_a_finished_run_is_evaluated_without_training_data(run, tmp_path, tiny_shards):
    """By a path, which makes a new log, or by run_id, with no other flag; or on other data."""
    first, path = run(save_every=4), "logs/x/step-000006.pt"
    saved = Path(path).stat().st_mtime_ns
    for shard in tmp_path.glob("tiny_train_*"):
        shard.unlink()
    for argv in (["--resume", path], ["--resume", "auto", "--run_id", "x"]):
        again = run(argv)
        assert (again.code, again.err, again.losses) == (0, "", [])
        for key in ("val_loss", "steps", "tokens", "seed", "parameters"):
            assert again.values[key] == first.values[key]
        assert f"resumed at step:6 from {path}\n" in again.log
        assert again.log.startswith(train_gpt.SCRIPT.read_text())
        assert again.log.startswith(first.log) == ("x" in argv)
        assert "of a later stage" in one_error(run([*argv, "--num_iterations", "8"]))
    assert Path(path).stat().st_mtime_ns == saved, "it is not saved again"

    other = ["--val_files", tiny_shards([300], name="other_val", seed=5), "--val_tokens", "256"]
    again = run(["--resume", path, *other])
    tokens = read_shard("other_val_000000.bin").astype(np.int64)
    expected = mean_loss(loaded(path), tokens[None, :257])
    assert float(again.values["val_loss"]) == pytest.approx(expected, abs=2e-6)


