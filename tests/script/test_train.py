"""Whole runs of a tiny model in this process: losses, warm-up, log, console, after the run."""

import dataclasses
import hashlib
import math
import re
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import read_shard
from test_loader import read_tokens, steps_of
from tiny_runs import FLAGS, GROWING, STEPS, one_error, to_argv

import train_gpt
from train_gpt import Hyperparameters, parse_args, schedule

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures


@torch.no_grad()
def mean_loss(model, sequences, weights):
    """By the model's logits, in float64, each of the sequences alone, each target by its weight."""
    total = 0.0
    for tokens in torch.from_numpy(sequences):
        logits = model.logits(model.hidden(tokens[None, :-1]))[0].double().log_softmax(-1)
        for ahead, weight in enumerate(weights, start=1):
            for i in range(len(tokens) - ahead):
                total -= weight * logits[i, tokens[i + ahead]].item()
    return total / sequences[:, 1:].size


def test_each_steps_line_has_the_losses_of_its_tokens(run, tmp_path, tiny_shards, monkeypatch):
    """As computed from the weights before the step's update: the one that is minimised, and the
    next token's alone. The second and third of the tokens after each fade out in the last and the
    first of thirds of 5 steps."""
    lengths = [128, 128, 256, 256, 256, 256]
    tiny_shards([3200, 2700], document_tokens=100)
    steps = steps_of(read_tokens(tmp_path), 4, lengths, max_document_tokens=90)
    expected, next_token, accumulate = [], [], train_gpt.accumulate_gradients

    def accumulated(model, batches, now):
        tokens, thirds = steps[len(expected)], len(expected) / (5 / 3)
        weights = [1, 0.5 * max(0, min(1, 2 - thirds)), 0.25 * max(0, min(1, 1 - thirds))]
        model.eval()
        expected.append(mean_loss(model, tokens, weights))
        next_token.append(mean_loss(model, tokens, [1]))
        model.train()
        return accumulate(model, batches, now)

    monkeypatch.setattr(train_gpt, "accumulate_gradients", accumulated)
    result = run(warmup_steps=0, max_document_tokens=90, **GROWING)
    pattern = r"^step:(\d+)/6 train_loss:(\S+) next_token_loss:(\S+) train_time:"
    logged = re.findall(pattern, result.log, re.M)
    assert [int(step) for step, *_ in logged] == list(range(1, STEPS + 1))
    assert [float(loss) for _, loss, _ in logged] == pytest.approx(expected, abs=6e-5)
    assert max(expected) - min(expected) > 0.05
    assert [float(loss) for *_, loss in logged] == pytest.approx(next_token, abs=6e-5)
    assert next_token[0] < expected[0] and next_token[-1] == expected[-1]
    assert result.values["tokens"] == str(4 * sum(lengths))


def test_warm_up_leaves_no_trace_in_a_run_which_its_seed_decides(run):
    """Losses, weights and state are equal to the bit."""
    result, other = run(warmup_steps=3, **GROWING), run(warmup_steps=0, run_id="y", **GROWING)
    assert result.losses == other.losses and len(result.losses) == STEPS
    assert result.values["val_loss"] == other.values["val_loss"]
    for a, b in zip(result.optimizers, other.optimizers, strict=True):
        assert all(map(torch.equal, a.tensors(), b.tensors())), a.name
    assert run(seed=4, run_id="z", **GROWING).losses[1:] != result.losses[1:]


def test_each_stage_is_warmed_up_before_the_first_step(run, monkeypatch, data_flags):
    """By its first two steps, so that what is compiled is what it runs."""
    called, lengths = [], set()
    step_optimizers, accumulate = train_gpt.step_optimizers, train_gpt.accumulate_gradients

    def accumulated(model, batches, now):
        lengths.add((now.stage > 0, batches[0][0].size(1)))
        return accumulate(model, batches, now)

    def stepped(optimizers, now, divisor):
        called.append(now)
        step_optimizers(optimizers, now, divisor)

    monkeypatch.setattr(train_gpt, "accumulate_gradients", accumulated)
    monkeypatch.setattr(train_gpt, "step_optimizers", stepped)
    run(warmup_steps=2, **GROWING)
    cfg = parse_args(to_argv(FLAGS | data_flags | GROWING))
    warmed = [0, 1, 2, 3, 4, 5, 5, 6]
    assert called == [schedule(step, cfg) for step in [*warmed, *range(STEPS)]]
    assert lengths == {(False, 128), (True, 256)}


def test_the_clock_stops_for_validation_and_checkpoints(run, monkeypatch):
    """By a clock of the test's own: training takes seconds by its account, the others hours."""
    now = [0.0]

    def tick(seconds=1):
        now[0] += seconds
        return now[0]

    def slow(function, *args, **options):
        tick(10_000)
        return function(*args, **options)

    clock = types.SimpleNamespace(perf_counter=tick)
    monkeypatch.setattr(train_gpt, "time", clock)
    for name in ("validate", "write_checkpoint"):
        monkeypatch.setattr(train_gpt, name, partial(slow, getattr(train_gpt, name)))
    result = run(save_every=2)
    assert STEPS * 1000 <= int(result.values["train_time_ms"]) < 100 * 1000
    assert now[0] > 6 * 10_000


def test_the_log_has_source_facts_steps_and_results(run, data_flags, tmp_path):
    result = run(muon_lr=0.125, seed=7)
    source = train_gpt.SCRIPT.read_text()
    assert result.log.startswith(source)
    blank, facts, body = result.log.removeprefix(source).split("=" * 100 + "\n")
    assert blank == "\n"

    facts = dict(line.split(": ", 1) for line in facts.splitlines())
    flags = FLAGS | data_flags | {"muon_lr": 0.125, "seed": 7}
    values = vars(parse_args(to_argv(flags)))
    expected = {name: train_gpt.show(value) for name, value in values.items()}
    scored = read_shard(tmp_path / "tiny_val_000000.bin")
    expected |= dict(
        head_chunks="1", torch=torch.__version__, threads="1", head="fp32", world_size="1",
        val_digest=hashlib.sha256(scored).hexdigest()[:16],
        parameters=str(sum(x.numel() for x in result.model.parameters())))
    assert re.fullmatch(r".+ \(\w+, .+\)", facts.pop("device"))
    assert re.fullmatch("([0-9a-f]{40})?", facts.pop("commit"))
    assert len(facts.pop("train_digest")) == 16
    del expected["device"]
    assert facts == expected

    body, _, block = body.partition("\n---\n")
    loss = r"(\d+\.\d{4})(?: next_token_loss:\d+\.\d{4})?"
    pattern = rf"^step:(\d)/6 (val|train)_loss:{loss} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms$"
    found = re.findall(pattern, body, re.M)
    assert [f"{kind} {step}" for step, kind, *_ in found] == [
        "val 0", "train 1", "train 2", "train 3", "val 3", "train 4", "train 5", "train 6", "val 6"]
    assert float(found[0][2]) == pytest.approx(math.log(384), abs=0.01)
    times = [int(ms) for *_, ms, _ in found]
    assert times == sorted(times)
    for step, *_, ms, average in found[1:]:
        assert abs(float(average) * int(step) - int(ms)) <= 0.5 + 0.005 * int(step)

    values = result.values
    assert block.startswith("val_loss: ") and re.fullmatch(r"\d\.\d{6}", values["val_loss"])
    assert f"{float(values['val_loss']):.4f}" == found[-1][2]
    assert int(values["train_time_ms"]) > 0
    same = {name: facts[name] for name in ("parameters", "world_size", "torch", "seed", "threads")}
    same |= dict(steps=str(STEPS), tokens=str(STEPS * 4 * 128))
    assert same.items() <= values.items()
    assert int(values["peak_memory_mib"]) > 100  # torch alone takes more


def test_the_console_shows_each_tenth_of_the_run_and_the_validations(run):
    result = run(num_iterations=25, val_every=10, head_chunks=2, run_id="")
    shown = re.findall(r"^step:(\d+)/25 (train|val)_loss", result.out, re.M)
    tenths = [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]  # the first step with a tenth more behind it
    expected = [(step, "train") for step in tenths] + [(step, "val") for step in (0, 10, 20, 25)]
    assert sorted((int(step), kind) for step, kind in shown) == sorted(expected)
    assert "\r" not in result.out and "def " not in result.out
    summary = r"^.+ \(.+\), 1 thread\(s\), 1 rank\(s\), [\d,]+ parameters, .* in 2 chunk\(s\), "
    assert re.search(summary + r"logs/\d{8}-\d{6}\n", result.out, re.M)  # as none is given
    left = re.findall(r"^step:.* step_avg:\d+\.\d\dms left:(\d+)s$", result.out, re.M)
    assert len(left) == len(shown) and left[-1] == "0"
    assert not re.search("^step:.* left:", result.log, re.M)
    assert result.out.endswith(result.log.rpartition("\n---\n")[2])


def test_a_finished_run_is_evaluated_without_training_data(run, tmp_path, tiny_shards):
    """By a path, which makes a new log, or by run_id, with no other flag; or on other data."""
    first, path = run(save_every=4), "logs/x/step-000006.pt"
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
        assert "tiny_train_*.bin" in one_error(run([*argv, "--num_iterations", "8"]))

    other = ["--val_files", tiny_shards([300], name="other_val", seed=5), "--val_tokens", "256"]
    again = run(["--resume", path, *other])
    state = train_gpt.load_checkpoint(Path(path))
    model = train_gpt.GPT(Hyperparameters(**state["settings"])).eval()
    assert model.reach.tolist() == [256, 128], "loaded by hand, it has the last validation's"
    model.load_state_dict(state["model"])
    tokens = read_shard("other_val_000000.bin").astype(np.int64)
    expected = mean_loss(model, tokens[None, :257], [1])
    assert float(again.values["val_loss"]) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("target", "reached"), [(9.0, "reached"), (0.1, "not reached")])
def test_a_run_says_whether_its_target_was_reached(run, target, reached):
    assert f"\ntarget loss {target}: {reached}\n---\n" in run(target_loss=target).out


def test_a_finished_run_of_the_record_says_how_its_log_is_filed(capsys):
    cfg = train_gpt.parse_args([])
    log = train_gpt.Log(dataclasses.replace(cfg, run_id="y"), types.SimpleNamespace(rank=0))
    run = types.SimpleNamespace(
        cfg=cfg, log=log, val_loss=3.279, train_time_ms=1e5, last=1920, facts={}, val_digest="",
        plan=train_gpt.plan(cfg), ranks=types.SimpleNamespace(device=torch.device("cpu")))
    train_gpt.Run.finish(run)
    said = "target loss 3.28: reached\nto file it with its record: python records/ledger file "
    assert f"{said}logs/y/log.txt\n---\nval_loss: 3.279000\n" in capsys.readouterr().out
