"""Whole runs of a tiny model in this process: losses, warm-up, log, console, sample, bad input."""

import dataclasses
import gc
import math
import re
import signal
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from train_gpt import PRESETS, Hyperparameters, main, parse_args, sample, warm_up

STEPS, STEP_TOKENS, VOCAB_PADDED = 6, 512, 384
VAL_STEPS = [0, 3, 6]
FLAGS = {
    "preset": "pocket",
    "device": "cpu",
    "model_dim": 32,
    "head_dim": 16,
    "attention_pattern": "LS.L",
    "value_embed_pattern": "0..0",
    "vocab_multiple": 128,
    "window_tokens": 256,
    "sequences_per_step": 4,
    "train_seq_len": 128,
    "sequences_per_forward": 2,
    "num_iterations": STEPS,
    "val_every": 3,
    "val_tokens": 700,
    "val_seq_len": 256,
    "warmup_steps": 1,
    "momentum_warmup": 4,
    "sequence_stride": 1,
    "embed_lr": 0.6,
    "sample_tokens": 0,
    "run_id": "x",
}


def to_argv(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture(autouse=True)
def as_before():
    """A run takes over signals, freezes what is alive and seeds the generator: undo that."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    state = torch.get_rng_state()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_rng_state(state)
    gc.unfreeze()


@pytest.fixture
def data_flags(tiny_shards):
    return {
        "train_files": tiny_shards([1600, 1100]),  # 3 + 2 steps, then the second epoch
        "val_files": tiny_shards([701], name="tiny_val", seed=1),
    }


@pytest.fixture
def run(data_flags, tmp_path, monkeypatch, capsys):
    """`run(**flags)` runs main in tmp_path; exit code, exact losses, model, optimizers, output."""
    monkeypatch.chdir(tmp_path)

    def run_main(**flags):
        result = SimpleNamespace(losses=[])
        with pytest.MonkeyPatch.context() as patch:
            check, build = train_gpt.Health.check, train_gpt.build_optimizers

            def checked(self, step, loss, grads):
                result.losses.append(loss.item())
                check(self, step, loss, grads)

            def noted(model, cfg, ranks):
                result.model, result.optimizers = model, build(model, cfg, ranks)
                return result.optimizers

            patch.setattr(train_gpt.Health, "check", checked)
            patch.setattr(train_gpt, "build_optimizers", noted)
            flags = FLAGS | data_flags | flags
            result.code = main(to_argv(flags))
        result.out, result.err = capsys.readouterr()
        log = tmp_path / "logs" / str(flags["run_id"]) / "log.txt"
        result.log = log.read_text() if log.exists() else ""
        block = result.log.rpartition("\n---\n")[2]
        result.values = dict(re.findall(r"^(\w+): (.*)$", block, re.M))
        return result

    return run_main


def weights(result):
    return {name: x.clone() for name, x in result.model.state_dict().items()}


# Losses


def test_the_same_seed_gives_the_same_losses_to_the_bit(run):
    first, again, other = run(seed=3), run(seed=3, run_id="y"), run(seed=4, run_id="z")
    assert first.code == 0 and len(first.losses) == STEPS
    assert first.losses == again.losses
    assert first.values["val_loss"] == again.values["val_loss"]
    assert first.losses[1:] != other.losses[1:]
    assert all(torch.equal(x, weights(again)[name]) for name, x in weights(first).items())


def test_losses_begin_at_the_log_of_the_padded_vocabulary_and_fall(run):
    result = run(num_iterations=8, val_every=0)  # more learn the noise by heart
    assert result.losses[0] == pytest.approx(math.log(VOCAB_PADDED), rel=1e-6)
    assert result.losses[-1] < result.losses[0] - 0.3
    assert float(result.values["val_loss"]) < math.log(VOCAB_PADDED)


@pytest.fixture
def in_float64(monkeypatch):
    """Runs compute in float64, in which steps do not blow rounding up to what could be an error."""
    init = train_gpt.Muon.__init__

    def muon_in_float64(self, *args):
        init(self, *args)
        self.dtype = torch.float64

    monkeypatch.setattr(train_gpt.Muon, "__init__", muon_in_float64)
    monkeypatch.setattr(train_gpt.Ranks, "check_parity", lambda *args: None)  # knows no float64
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_sequences_run_at_once_or_accumulated_have_the_same_losses(run):
    whole, parts = run(sequences_per_forward=4), run(sequences_per_forward=1, run_id="y")
    assert len(whole.losses) == STEPS and whole.losses != parts.losses
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-10)


@pytest.mark.parametrize("steps", [1, 3])
def test_warm_up_leaves_no_trace_in_a_run(run, steps):
    without, warmed = run(warmup_steps=0), run(warmup_steps=steps, run_id="y")
    assert without.losses == warmed.losses
    assert without.values["val_loss"] == warmed.values["val_loss"]
    assert all(torch.equal(x, weights(warmed)[name]) for name, x in weights(without).items())


def test_warm_up_puts_everything_back(data_flags):
    _, cfg = parse_args(to_argv(FLAGS | data_flags | {"warmup_steps": 3}))
    ranks = train_gpt.Ranks(cfg)
    model = train_gpt.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizers = train_gpt.build_optimizers(model, cfg, ranks)
    loader = train_gpt.TokenLoader(cfg, 0, 1, ranks.device)
    with torch.no_grad():  # state that a warm-up could not leave as it is by chance
        for optimizer in optimizers:
            for x in optimizer.state.values():
                x.uniform_(0.5, 1.5)

    def everything():
        state = [x.clone() for x in model.state_dict().values()]
        state += [x.clone() for o in optimizers for x in (o.weights, o.grads, *o.state.values())]
        return [*state, torch.get_rng_state(), torch.tensor(list(loader.state().values()))]

    before, stepped = everything(), []
    with pytest.MonkeyPatch.context() as patch:
        step = train_gpt.step_optimizers
        patch.setattr(
            train_gpt, "step_optimizers", lambda *args: (step(*args), stepped.append(everything()))
        )
        warm_up(model, optimizers, loader.per_forward, cfg, optimizers[0].ranks)
    assert len(stepped) == 3 and not torch.equal(stepped[0][0], before[0]), "it does run steps"
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert model.training


# Log and console


def test_the_log_begins_with_the_source_and_what_was_used(run, data_flags):
    result = run(muon_lr=0.125)
    source = train_gpt.SCRIPT.read_text()
    assert result.log.startswith(source)
    blank, facts, _ = result.log.removeprefix(source).split("=" * 100 + "\n")
    assert blank == "\n"
    facts = dict(line.split(": ", 1) for line in facts.splitlines())
    used = FLAGS | data_flags | {"muon_lr": 0.125}
    cfg = dataclasses.replace(
        Hyperparameters(**PRESETS["pocket"]), **{k: v for k, v in used.items() if k != "preset"}
    )
    assert facts.pop("device").startswith("cpu ("), "the model of the processor, too"
    assert facts.pop("head_chunks") == "1", "what it came to by itself"
    for name, value in dataclasses.asdict(cfg).items():
        assert facts.get(name, str(value)) == str(value), name
    left_out = {field.name for field in dataclasses.fields(cfg)} - set(facts)
    assert left_out == {"device", "head_chunks"}
    assert facts["torch"] == torch.__version__
    assert facts["preset"] == "pocket" and facts["world_size"] == "1"


def test_the_log_has_a_line_for_each_step_and_validation(run):
    result = run()
    body = result.log.rpartition("=" * 100 + "\n")[2].partition("\n---\n")[0]
    pattern = r"step:(\d+)/6 (?:val_loss:(\d+\.\d{4}) )?train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    lines = [line for line in body.splitlines() if line.startswith("step:")]
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    expected = []
    for step in range(STEPS + 1):
        expected += [(step, False)] * (step > 0) + [(step, True)] * (step in VAL_STEPS)
    assert [(int(step), val is not None) for step, val, _, _ in found] == expected
    assert found[0][1] == f"{math.log(VOCAB_PADDED):.4f}"
    times = [int(ms) for _, _, ms, _ in found]
    assert times == sorted(times)
    for step, _, ms, average in found[1:]:
        assert abs(float(average) * int(step) - int(ms)) <= 0.5 + 0.005 * int(step)


def test_the_log_ends_with_the_results(run):
    result = run(seed=7)
    values = result.values
    assert list(values)[0] == "val_loss"
    assert set(values) == set(
        """val_loss train_time_ms steps tokens tokens_per_second parameters peak_memory_mib
        world_size device torch seed""".split()
    )
    assert re.fullmatch(r"\d\.\d{6}", values["val_loss"])
    last = re.findall(r"val_loss:(\S+)", result.log)[-1]
    assert f"{float(values['val_loss']):.4f}" == last
    assert values["steps"] == str(STEPS) and values["tokens"] == str(STEPS * STEP_TOKENS)
    assert values["parameters"] == str(sum(x.numel() for x in weights(result).values()))
    assert (values["seed"], values["world_size"]) == ("7", "1")
    assert 50 < int(values["peak_memory_mib"]) < 100_000
    rate = 1000 * STEPS * STEP_TOKENS / max(1, int(values["train_time_ms"]))
    assert int(values["tokens_per_second"]) == pytest.approx(rate, rel=0.05)
    assert result.log.endswith(f"{list(values)[-1]}: {list(values.values())[-1]}\n")


def test_the_console_shows_the_validations_and_no_other_step(run):
    result = run()
    steps = re.findall(r"^step:(\d+)/6 (val_loss)?", result.out, re.M)
    assert steps == [(str(step), "val_loss") for step in VAL_STEPS]
    assert "\r" not in result.out and "def " not in result.out
    assert result.out.endswith(result.log.rpartition("\n---\n")[2])


def test_a_terminal_has_one_live_line(run, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    result = run()
    live = re.findall(r"step (\d)/6, loss (\d+\.\d{4}), \S+ tokens/s, \d+ s left", result.out)
    assert [int(step) for step, _ in live] == list(range(1, STEPS + 1))
    assert [float(loss) for _, loss in live] == pytest.approx(result.losses, abs=1e-4)
    assert all("\n" not in part for part in re.findall(r"step \d/6, (.*?)s left", result.out, re.S))
    assert "s left" not in result.log.rpartition("=" * 100)[2]


def test_the_log_says_where_the_data_begin_again(run):
    result = run()
    lines = result.log.rpartition("=" * 100)[2].splitlines()
    (index,) = [index for index, line in enumerate(lines) if "epoch 2" in line]
    assert lines[index + 1].startswith("step:6/6 ")  # the sixth step is the first of that epoch


def test_run_ids_are_made_where_none_is_given(run, tmp_path):
    for _ in range(2):
        run(run_id="")
    names = [path.parent.name for path in (tmp_path / "logs").glob("*/log.txt")]
    assert len(names) == 2
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", name) for name in names)


def test_the_clock_stops_for_validation(run, monkeypatch):
    """By a clock of the test's own: training takes seconds by its account, validation hours."""
    now, validate = [0.0], train_gpt.validate

    def tick():
        now[0] += 1
        return now[0]

    def long_validation(*args):
        now[0] += 10_000
        return validate(*args)

    clock = types.SimpleNamespace(perf_counter=tick, strftime=lambda *args: "now")
    monkeypatch.setattr(train_gpt, "time", clock)
    monkeypatch.setattr(train_gpt, "validate", long_validation)
    result = run()
    assert STEPS * 1000 <= int(result.values["train_time_ms"]) < 100 * 1000
    assert now[0] > 3 * 10_000


# Sample


def test_a_sample_continues_the_prompt(run):
    result = run(sample_tokens=30, prompt="def f")
    text = result.log.partition("\nsample:\n")[2]
    assert text.lstrip().startswith("def f")
    assert len(text.rpartition("\n---\n")[0].strip()) > len("def f")
    assert "sample:\n" in result.out
    assert "sample:" not in run(run_id="y").log.rpartition("=" * 100)[2]


def test_sampling_follows_the_model_token_by_token():
    """A model that is sure: after token i comes i + 1, until end-of-text."""
    cfg = dataclasses.replace(Hyperparameters(**PRESETS["pocket"]), sample_tokens=9, prompt="ab")
    seen = []

    class Sure:
        def eval(self):
            return self

        def hidden(self, tokens):
            seen.append(tokens[0].tolist())
            return tokens[..., None].float()

        def logits(self, x):
            following = torch.where(x == ord("e"), 256, x + 1).long()
            return 1000 * torch.nn.functional.one_hot(following[..., 0], 384).float()

    text = sample(Sure(), cfg, torch.device("cpu"))
    assert text == "abcde"
    assert [row[:3] for row in seen[:1]] == [[256, *b"ab"]]
    assert all(len(row) % 128 == 0 for row in seen)


# Bad input


def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path):
    run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = run(val_tokens=10_000)
    assert result.code == 2
    assert re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", result.err)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_foreign_token_met_while_training_ends_the_run_with_its_log(run, tmp_path, write_shard):
    generator = np.random.default_rng(0)
    write_shard(tmp_path / "t_0.bin", generator.integers(0, 257, 1600))
    write_shard(tmp_path / "t_1.bin", generator.integers(0, 300, 1600))
    result = run(train_files=f"{tmp_path}/t_*.bin")
    assert result.code == 2
    assert re.fullmatch(r"train_gpt\.py: error: [^\n]*t_1\.bin[^\n]+\n", result.err)
    assert "step:3/6 val_loss" in result.log


def test_a_process_ends_with_one_line_and_2(run_script, tmp_path):
    done = run_script(["--preset", "pocket", "--train_seq_len", 100])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train_gpt.py: error: --train_seq_len 100: must be a multiple of 128\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_sequences_say_so_once(run_script, tmp_path):
    done = run_script(["--preset", "pocket", "--sequences_per_step", 3], nproc=2)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("train_gpt.py: error:")]
    assert len(said) == 1
    assert re.search(r"--sequences_per_step 3: .*\b2\b", said[0])
    assert not Path(tmp_path / "logs").exists()
