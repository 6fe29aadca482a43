"""Whole runs of a tiny model in this process: losses, warm-up, log, console, bad input."""

import dataclasses
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from train_gpt import PRESETS, Hyperparameters, main, parse_args, warm_up

STEPS, STEP_TOKENS, VOCAB_PADDED = 6, 512, 384
VAL_STEPS = [0, 3, 6]
STAGE_STARTS = [0, 2, 4, 5]  # thirds of 5 steps, then the extension
GROWING = dict(train_seq_len=256, length_stages="1 2")  # from step 2 on
FLAGS = {
    "preset": "pocket",
    "device": "cpu",
    "model_dim": 32,
    "head_dim": 16,
    "attention_pattern": "LS.L",
    "value_embed_pattern": "0..0",
    "vocab_multiple": 128,
    "backout_layer": 2,
    "window_stages": "1 2 2 2",  # from step 2 on, two blocks
    "final_window": 2,
    "extension_steps": 1,
    "freeze_steps": 1,
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
    "run_id": "x",
}


def to_argv(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture(autouse=True)
def as_before():
    """A run takes over signals, freezes what is alive and seeds the generator: undo that."""
    handlers = {number: signal.getsignal(number) for number in train_gpt.Health.SIGNALS}
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
    """`run(**flags)` runs main in tmp_path; exit code, exact losses, model, optimizers, output.

    `run(argv=[...])` runs it with these words and no other flag.
    """
    monkeypatch.chdir(tmp_path)

    def run_main(argv=None, **flags):
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
            result.code = main(argv or to_argv(FLAGS | data_flags | flags))
        result.out, result.err = capsys.readouterr()
        folder = re.search(r"piece\(s\), (logs/.+)$", result.out, re.M)
        result.log = Path(folder[1], "log.txt").read_text() if folder else ""
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
    # The next token, half of the second and a quarter of the third, of those that a sequence has;
    # the head begins as small numbers.
    targets = 1 + 0.5 * 127 / 128 + 0.25 * 126 / 128
    assert result.losses[0] == pytest.approx(math.log(VOCAB_PADDED) * targets, rel=2e-3)
    assert result.losses[-1] < math.log(VOCAB_PADDED) - 0.3, "of the next token alone"
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
    whole = run(sequences_per_forward=4, **GROWING)
    parts = run(sequences_per_forward=1, run_id="y", **GROWING)
    assert len(whole.losses) == STEPS and whole.losses != parts.losses
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-10)


@pytest.mark.parametrize("steps", [1, 3])
def test_warm_up_leaves_no_trace_in_a_run(run, steps):
    without = run(warmup_steps=0, **GROWING)
    warmed = run(warmup_steps=steps, run_id="y", **GROWING)
    assert without.losses == warmed.losses
    assert without.values["val_loss"] == warmed.values["val_loss"]
    assert all(torch.equal(x, weights(warmed)[name]) for name, x in weights(without).items())


def noting(forward, lengths):
    """`forward` of a model, which notes the lengths of the sequences that it is trained on."""

    def of_length(inputs, targets, weights=None):
        if weights is not None:
            lengths.add(inputs.size(1))
        return forward(inputs, targets, weights)

    return of_length


def test_each_stage_is_warmed_up_before_the_first_step(run, monkeypatch):
    """The steps from its beginning on, so that what is compiled is what it runs."""
    called = []
    step_optimizers = train_gpt.step_optimizers
    monkeypatch.setattr(train_gpt, "step_optimizers", lambda optimizers, step, divisor: (
        called.append(step), step_optimizers(optimizers, step, divisor)))  # fmt: skip
    run(warmup_steps=2)
    warmed, trained = called[:-STEPS], called[-STEPS:]
    assert sorted(warmed) == sorted([*STAGE_STARTS, *(step + 1 for step in STAGE_STARTS)])
    assert trained == list(range(STEPS))


@pytest.mark.parametrize("first", STAGE_STARTS)
def test_warm_up_puts_everything_back(data_flags, first):
    cfg = parse_args(to_argv(FLAGS | data_flags | GROWING | {"warmup_steps": 3}))
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
        return [*state, torch.get_rng_state(), torch.tensor(loader.place)]

    before, stepped, lengths = everything(), [], set()
    with pytest.MonkeyPatch.context() as patch:
        step = train_gpt.step_optimizers
        patch.setattr(
            train_gpt, "step_optimizers", lambda *args: (step(*args), stepped.append(everything()))
        )
        patch.setattr(model, "forward", noting(model.forward, lengths))
        warm_up(model, optimizers, loader.per_forward, first, cfg, optimizers[0].ranks)
    assert lengths == {128 if first == 0 else 256}, "those of the stage's sequences"
    head = list(model.state_dict()).index("lm_head.weight")
    assert len(stepped) == 3 and not torch.equal(stepped[-1][head], before[head]), "it runs steps"
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
    cfg = dataclasses.replace(Hyperparameters(**PRESETS["pocket"]), **used)
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
    pattern = (
        r"step:(\d+)/6 (val|train)_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    )
    lines = [line for line in body.splitlines() if line.startswith("step:")]
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    expected = []
    for step in range(STEPS + 1):
        expected += [(step, "train")] * (step > 0) + [(step, "val")] * (step in VAL_STEPS)
    assert [(int(step), kind) for step, kind, *_ in found] == expected
    assert float(found[0][2]) == pytest.approx(math.log(VOCAB_PADDED), abs=0.01)
    times = [int(ms) for *_, ms, _ in found]
    assert times == sorted(times)
    for step, *_, ms, average in found[1:]:
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


def test_the_console_shows_each_tenth_of_the_run_and_the_validations(run):
    result = run(num_iterations=25, val_every=10, target_loss=9)
    shown = re.findall(r"^step:(\d+)/25 (train|val)_loss", result.out, re.M)
    tenths = [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]  # the first step with a tenth more behind it
    expected = [(step, "train") for step in tenths] + [(step, "val") for step in (0, 10, 20, 25)]
    assert sorted((int(step), kind) for step, kind in shown) == sorted(expected)
    assert "\r" not in result.out and "def " not in result.out
    assert result.out.endswith(result.log.rpartition("\n---\n")[2])


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


# After the run


@pytest.fixture
def finished(run, tmp_path):
    """A run that has ended, the path of its last checkpoint, and no training data any more."""
    first = run(save_every=4)
    assert first.code == 0
    for path in tmp_path.glob("tiny_train_*"):
        path.unlink()
    return first, "logs/x/step-000006.pt"


SAME = ["val_loss", "steps", "tokens", "seed", "parameters"]


@pytest.mark.parametrize("by", ["path", "run_id"])
def test_a_finished_run_is_evaluated_with_no_other_flag(run, finished, by):
    first, path = finished
    argv = ["--resume", path] if by == "path" else ["--resume", "auto", "--run_id", "x"]
    again = run(argv)
    assert (again.code, again.err, again.losses) == (0, "", [])
    assert [again.values[key] for key in SAME] == [first.values[key] for key in SAME]
    assert f"resumed at step:6 from {path}\n" in again.log
    assert again.log.startswith(train_gpt.SCRIPT.read_text())
    assert again.log.startswith(first.log) == (by == "run_id"), "a path alone makes a new log"


def naive_validation(model, tokens, length):
    """Mean cross-entropy of the tokens, one sequence after another."""
    total, tokens = 0.0, torch.from_numpy(tokens.astype(np.int64))
    for start in range(0, len(tokens) - 1, length):
        part = tokens[start : start + length + 1]
        logits = model.logits(model.hidden(part[None, :-1]))[0].double()
        total += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def test_a_finished_run_takes_other_validation_data(run, finished, tiny_shards):
    other = tiny_shards([2000], name="other_val", seed=5)
    again = run(["--resume", finished[1], "--val_files", other, "--val_tokens", "300"])
    assert again.code == 0, again.err
    tokens = train_gpt.read_shard(train_gpt.find_shards(other)[0], 257)[:301]
    expected = naive_validation(again.model.eval(), tokens, 256)
    assert float(again.values["val_loss"]) == pytest.approx(expected, abs=2e-6)


def test_a_model_made_from_a_checkpoint_attends_with_the_runs_last_window(run, finished):
    state = torch.load(finished[1], weights_only=True)
    model = train_gpt.GPT(Hyperparameters(**state["hyperparameters"]))
    assert model.windows.tolist() == [2, 1]
    model.load_state_dict(state["model"])
    tokens = torch.randint(256, (1, 256), generator=torch.Generator().manual_seed(0)).int()
    with torch.no_grad():
        trained, loaded = (m.logits(m.hidden(tokens)) for m in (finished[0].model, model))
    assert torch.equal(trained, loaded)


def test_more_steps_of_a_finished_run_do_ask_for_its_data(run, finished):
    result = run(["--resume", finished[1], "--num_iterations", "8"])
    assert result.code == 2 and "tiny_train_*.bin" in result.err


# The training loss


def steps_of(paths, lengths):
    """Each step's 4 sequences of its length, as they follow one another in a shard's whole steps
    of that length, from the shards over and over: (4, length + 1)."""
    shards = [train_gpt.read_shard(path, 257).astype(np.int64) for path in paths]
    index, position = 0, 0
    for length in lengths:
        while True:
            tokens = shards[index % len(shards)]
            while position % length:
                position += 1
            if position + 4 * length <= (len(tokens) - 1) // (4 * length) * 4 * length:
                break
            index, position = index + 1, 0
        starts = range(position, position + 4 * length, length)
        yield torch.from_numpy(np.stack([tokens[i : i + length + 1] for i in starts]))
        position += 4 * length


@torch.no_grad()
def mean_loss(model, sequences, weights):
    """By the model's logits, in float64, each of the sequences alone, each target by its weight."""
    total = 0.0
    for tokens in sequences:
        logits = model.logits(model.hidden(tokens[None, :-1]))[0].double().log_softmax(-1)
        for ahead, weight in enumerate(weights, start=1):
            for i in range(len(tokens) - ahead):
                total -= weight * logits[i, tokens[i + ahead]].item()
    return total / sequences[:, 1:].numel()


@pytest.mark.parametrize("flags", [{}, GROWING], ids=["even", "growing"])
def test_each_steps_line_has_the_loss_of_its_tokens(run, data_flags, monkeypatch, flags):
    """As computed from the weights before the step's update.

    The second and third of the tokens after each lose their part in the loss over the last and the
    first of thirds of 5 steps.
    """
    expected, build = [], train_gpt.build
    lengths = [128 if flags == {} or step < 2 else 256 for step in range(STEPS)]
    steps = list(steps_of(train_gpt.find_shards(data_flags["train_files"]), lengths))

    def noted(cfg, ranks):
        model, optimizers = build(cfg, ranks)
        check = train_gpt.Health.check

        def checked(self, step, loss, grads):
            model.eval()
            thirds = step / (5 / 3)
            second, third = (0.5 * min(1, 2 - thirds), 0.25 * min(1, 1 - thirds))
            expected.append(mean_loss(model, steps[step], [1, max(0, second), max(0, third)]))
            model.train()
            check(self, step, loss, grads)

        monkeypatch.setattr(train_gpt.Health, "check", checked)
        return model, optimizers

    monkeypatch.setattr(train_gpt, "build", noted)
    result = run(**flags)
    logged = re.findall(r"^step:(\d+)/6 train_loss:(\S+) ", result.log, re.M)
    assert [int(step) for step, _ in logged] == list(range(1, STEPS + 1))
    assert [float(loss) for _, loss in logged] == pytest.approx(expected, abs=6e-5)
    assert max(expected) - min(expected) > 0.05
    assert result.values["tokens"] == str(4 * sum(lengths))


# Memory


@pytest.mark.parametrize(
    ("sequences", "pieces"), [(1, 1), (5, 1), (6, 2), (11, 4), (41, 8), (400, 16)]
)
def test_a_cpus_head_comes_in_pieces_of_at_most_a_gibibyte(sequences, pieces):
    """32 bytes for each of 128 x 50304 logits a sequence: five take 0.96 GiB, 41 take 7.9 GiB."""
    cfg = dataclasses.replace(
        Hyperparameters(**PRESETS["pocket"]), sequences_per_forward=sequences, val_seq_len=256,
        vocab_size=50257, vocab_multiple=128,
    )  # fmt: skip
    with torch.device("meta"):
        model = train_gpt.GPT(cfg)
    assert train_gpt.choose_head_chunks(model, cfg, torch.device("cpu")) == pieces


@pytest.mark.usefixtures("in_float64")
def test_pieces_on_a_cpu_leave_the_losses_as_they_are(run, monkeypatch):
    flags = dict(val_every=0, num_iterations=3)
    whole = run(**flags)
    monkeypatch.setattr(train_gpt, "choose_head_chunks", lambda *args: 2)
    parts = run(**flags, run_id="y")
    assert (whole.model.head_chunks, parts.model.head_chunks) == (1, 2)
    assert "head in 1 piece(s)" in whole.out and "head in 2 piece(s)" in parts.out
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-10)
    assert parts.values["val_loss"] == whole.values["val_loss"]


# Bad input


@pytest.mark.parametrize("resume", [False, True])
def test_a_bad_run_leaves_the_log_of_a_good_one_alone(run, tmp_path, resume):
    run(save_every=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = run(val_tokens=10_000, save_every=3, **({"resume": "auto"} if resume else {}))
    assert result.code == 2
    assert re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", result.err)
    assert ("--val_tokens 10000" in result.err) == resume
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def one_error(result):
    assert result.code == 2 and result.out == ""
    assert re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", result.err), result.err
    return result.err


def test_a_run_id_that_is_taken_names_both_ways_out(run):
    run()
    line = one_error(run())
    assert "--run_id x: logs/x/log.txt is there already" in line
    assert "--resume auto" in line and "another --run_id" in line


def test_a_mistyped_path_is_not_there_and_not_damaged(run, tmp_path):
    line = one_error(run(resume="logs/x/step-00006.pt"))
    assert "--resume logs/x/step-00006.pt: there is no such file; name another" in line
    assert not (tmp_path / "logs").exists()


OUT_OF_MEMORY = (
    "out of memory; raise --head_chunks, or lower --sequences_per_forward\n"
)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"model_dim": 100_000}, OUT_OF_MEMORY),
        ({"mlp_ratio": 10**9}, OUT_OF_MEMORY),
        ({"val_seq_len": 128 * 10**11}, OUT_OF_MEMORY),
        ({"sequences_per_step": 10**6}, "lower --train_seq_len"),
        ({"train_seq_len": 128 * 10**7}, "lower --train_seq_len"),
    ],
)
def test_sizes_that_no_machine_has_end_in_a_line(run, flags, named):
    assert named in one_error(run(**flags))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 745. GiB for an array\nwith shape (100,)"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 800000000000 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ],
)
def test_memory_that_runs_out_ends_in_a_line(run, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(train_gpt, "train", fail)
    line = one_error(run())
    assert OUT_OF_MEMORY in line


def test_an_error_of_the_scripts_own_keeps_its_traceback(run, monkeypatch):
    def fail(*args):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(train_gpt, "train", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        run()


def test_more_sequences_at_once_than_there_are_is_as_many_as_there_are(run):
    many, all_of_them = run(sequences_per_forward=10**6), run(sequences_per_forward=4, run_id="y")
    assert many.code == 0 and many.losses == all_of_them.losses


INTERRUPTED = """
import sys
from importlib.abc import MetaPathFinder
class Mark(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            open("importing", "w").close()
sys.meta_path.insert(0, Mark())
"""


def test_ctrl_c_while_torch_is_imported_ends_without_a_traceback(tmp_path):
    """sitecustomize, which Python imports before the script, tells when the import begins."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, train_gpt.SCRIPT, "--preset", "pocket"], cwd=tmp_path, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        while not (tmp_path / "importing").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")
    assert not (tmp_path / "logs").exists()


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
