"""The records against float64 oracles, by the public records' specification.

The scripts run in float64, their casts to fp32 left out, so that they have to agree to the digits
that float64 has. A script's weights are compared under the public names and shapes.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import re
import sys
from types import SimpleNamespace

import lineage_oracles as oracles
import numpy as np
import pytest
import torch
from conftest import REPO
from lineage_oracles import STATIONS

PATHS = sorted((REPO / "records").glob("*/train_gpt.py"))
PARAMETERS = {  # published
    5: 123_568_128, 8: 162_201_600, 18: 275_742_772, 19: 275_598_388, 21: 275_598_388,
    24: 275_598_388}
EOT = 256
BLOCK = 16  # instead of the scripts' 128: as many blocks of fewer tokens
LENGTH = 6 * BLOCK
EXTENSION = 3  # steps of a tiny run after the schedules
EXACT = 1e-9  # of a step or gradient, relative: float64 through some ten matrix products and back


@functools.cache
def load(number, block=BLOCK):
    """The script of a public record, as a module with blocks of so many tokens."""
    path = PATHS[list(STATIONS).index(number)]
    spec = importlib.util.spec_from_file_location(f"record_{number}_{block}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its source is
    spec.loader.exec_module(module)
    module.BLOCK = block
    return module


@pytest.fixture(params=STATIONS)
def number(request):
    return request.param


@pytest.fixture
def script(number):
    return load(number)


def numbers(first):
    return pytest.mark.parametrize("number", [n for n in STATIONS if n >= first])


@contextlib.contextmanager
def in_float64(number=53):
    """New tensors are float64, and not cast to fp32, nor the angles of #5 and #8 to bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self)
        if number < 18:
            patch.setattr(torch.Tensor, "bfloat16", lambda self: self)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def tiny(number, steps=5, **changes):
    """Station and hyperparameters of a model that takes milliseconds; its pattern is the record's.

    Windows of 1, 2 and 3 blocks, 4 at the end and 5 in the last validation, of sequences of 6, or
    of 2, 4 and 6 where batches grow. `steps` are those of the schedules, no multiple of 3.
    """
    station, cfg = STATIONS[number], load(number).Hyperparameters()
    clip, extension = 3 * BLOCK // 2, EXTENSION if station.extension else 0
    seq_lens = tuple(LENGTH * length // station.seq_lens[-1] for length in station.seq_lens)
    both = dict(
        seq_lens=seq_lens, model_dim=32, head_dim=16, eot_token=EOT, momentum_cooldown=2,
        freeze_steps=min(2, station.freeze_steps), val_seq_len=LENGTH, val_tokens=3 * LENGTH)
    own = dict(
        num_iterations=steps, extension=extension, vocab_size=272, block=BLOCK, max_document=clip,
        table_rows=EOT + 1 if station.table_rows % 128 else 272, windows=(1, 2, 3, 4),
        final_window=5 if number >= 40 else 4, window_tokens=3 * BLOCK,
        norm_eps=2.0 ** (-23 if number >= 21 else -52))
    flags = dict(
        num_iterations=steps + extension, extension_steps=extension, vocab_size=EOT + 1,
        vocab_multiple=16, max_document_tokens=clip, window_tokens=3 * BLOCK,
        long_windows=(1, 2, 3, 4, 5), short_windows=(1, 1, 1, 2), sequences_per_forward=2,
        device="cpu")
    flags = {k: v for k, v in (both | flags | changes).items() if hasattr(cfg, k)}
    return dataclasses.replace(station, **both | own), dataclasses.replace(cfg, **flags)


def random_shards(count, size, seed=0):
    """Shards of documents of 1 to some 75 tokens; the first has a part of one before them."""
    generator = np.random.default_rng(seed)
    shards = []
    for _ in range(count):
        tokens = generator.integers(0, EOT, size=size)
        at = np.cumsum(generator.integers(1, generator.choice([4, 20, 75], size=size)))
        tokens[at[at < size]] = EOT
        shards.append(tokens.astype(np.uint16))
    return shards


def first_layer(station):
    """The public number of the first block that is there; ours are counted from 0."""
    return oracles.layers_of(station)[0] if station.number >= 40 else 0


SCALARS = {  # where they are, by our names of a layer's, or of the model's
    "lambdas": ("a", "b"), "x_lambda": ("a",), "attn.lambdas": ("lambda0", "lambda1"),
    "skip_weights": ("skip",), "skip_lambda": ("skip",), "smear_lambda": ("smear",),
    "backout_lambda": ("backout",)}
RENAMED = {  # patterns of ours, which several may have
    r"(mlp.*)\.weight": r"\1", r"attn\.(qkv_w|c_.*)": "attn.qkvo_w", "x0_lambda": "x0_lambdas"}


def public(station, model, grads=False):
    """Weights, or gradients, under the public names, in float64."""
    where, shapes = oracles.scalar_indices(station), oracles.parameter_shapes(station)
    scalars = torch.tensor(oracles.initial_scalars(station)).double() * (not grads)
    weights = {"scalars": [scalars]} if "scalars" in shapes else {}
    for name, p in model.named_parameters():
        x = (p.grad if grads else p.detach()).double().clone()
        block, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*)", name).groups()
        layer = int(block or 0) + first_layer(station)
        if kind in SCALARS:
            places = [where[of] for of in SCALARS[kind]]
            scalars[[of[layer] for of in places] if block else places[0][: x.numel()]] = x
            continue
        for ours, theirs in RENAMED.items():
            kind = re.sub(ours, theirs, kind)
        name = f"blocks.{layer}.{kind}" if block and kind != "x0_lambdas" else kind
        weights.setdefault(name, []).append(x)
    for name, parts in weights.items():
        merged = torch.cat([part.flatten() for part in parts])
        weights[name] = parts[0] if len(parts) == 1 else merged.view(shapes[name])
    return weights


def make_model(script, cfg):
    """A model in which no weight is zero, so that everything has a part."""
    model, generator = script.GPT(cfg), torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p.uniform_(0.3, 1.2, generator=generator)
            elif not p.any():
                p.normal_(std=0.1, generator=generator)
    return model


def batch_of(streams):
    """Inputs and targets, a row a stream, as a loader gives them."""
    inputs = np.stack([stream.inputs for stream in streams]).astype(np.int32)
    targets = np.stack([stream.targets for stream in streams])
    return torch.from_numpy(inputs), torch.from_numpy(targets)


# What a run begins with


def test_the_record_preset_is_the_published_configuration(number, script):
    station, cfg = STATIONS[number], script.Hyperparameters()
    first, multipliers = first_layer(station), oracles.ADAM_MULTIPLIERS[number]
    assert cfg.num_iterations == oracles.total_steps(station)
    embed_lr = station.adam_lr * multipliers["value_embeds" if number >= 18 else "embed"]
    expected = dict(
        sequences_per_step=station.streams, sequences_per_forward=1 if number >= 18 else 64,
        vocab_size=50_257, embed_lr=pytest.approx(embed_lr))
    same = "seq_lens val_seq_len val_tokens val_every muon_lr cooldown_frac rope_base model_dim "
    same += "head_dim eot_token "
    if number >= 8:
        expected |= dict(head_lr=pytest.approx(station.adam_lr * multipliers["lm_head"]))
    if number >= 18:
        expected |= dict(attention_pattern=station.attention_pattern[first:])
        expected |= dict(value_embed_pattern=station.value_embed_pattern[first:])
    if number >= 21:
        same += "attention_scale "
    if number == 28:
        expected |= dict(align_documents=True)
    if 18 <= number <= 28:
        same += "window_tokens"
    if number >= 31:
        shorts = tuple(max(1, window // 2) for window in station.windows)
        last = (station.final_window,) if number >= 40 else ()
        expected |= dict(long_windows=station.windows + last, short_windows=shorts)
        expected |= dict(max_document_tokens=station.max_document)
    if number == 31:
        same += "mlp_pattern"
    if number >= 40:
        expected |= dict(backout_layer=station.backout_layer - first)
        expected |= dict(extension_steps=station.extension)
        same += "momentum_cooldown "
    if number >= 50:
        expected |= dict(skip_layer=station.skips[0][1], lr_factors=station.rate_stages)
    if number >= 53:
        same += "freeze_steps"
    expected |= {name: getattr(station, name) for name in same.split()}
    assert {name: getattr(cfg, name) for name in expected} == expected
    with torch.device("meta"):
        model = script.GPT(cfg)
    rows = len(model.embed.weight), len(model.lm_head.weight)
    assert rows == (station.table_rows, station.vocab_size)
    if number in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[number]


def test_parameters_begin_as_the_published_ones(number, script):
    station, cfg = tiny(number, model_dim=64)
    station = dataclasses.replace(station, model_dim=64)
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    found = public(station, model)
    assert {k: tuple(v.shape) for k, v in found.items()} == oracles.parameter_shapes(station)
    for name, p in found.items():
        if name == "scalars":
            assert p.float().equal(torch.tensor(oracles.initial_scalars(station)))
            continue
        kind, size = oracles.initial_distribution(station, name)
        parts = oracles.matrices(name, p)
        if name.endswith("qkvo_w"):
            assert not parts.pop().any()
        for part in parts:
            if kind == "zero":
                assert not part.any(), name
            elif kind == "uniform":
                assert size * 0.98 < part.abs().max() <= size * (1 + 1e-6), name
            else:
                assert part.std().item() == pytest.approx(size, rel=0.02), name


# Schedules


def test_schedules_are_the_published_ones_at_every_step(number):
    script, station = load(number, block=128), STATIONS[number]
    cfg = script.Hyperparameters()
    for step in range(cfg.num_iterations + 1):
        now, is_last = script.schedule(step, cfg), step == cfg.num_iterations
        windows = oracles.validation_windows if is_last else oracles.training_windows
        if 18 <= number <= 28:
            assert now.window == windows(station, step)[0], step
        elif number >= 31:
            tuples = (cfg.long_windows, cfg.short_windows)
            found = tuple(script.at_stage(values, now.stage) for values in tuples)
            assert found == windows(station, step), step
        if is_last:
            break
        expected = [oracles.rate_factor(station, step), oracles.muon_momentum(station, step)]
        assert [now.lr_factor, now.momentum] == pytest.approx(expected, rel=1e-12), step
        assert now.seq_len == oracles.seq_len(station, step), step
        if number >= 40:
            assert now.adam_rests != oracles.adam_steps(station, step), step
        if number >= 53:
            expected = oracles.target_weights(station, step)
            assert now.target_weights == pytest.approx(expected, rel=1e-12), step
            assert now.tied == oracles.tied(station, step), step
            assert now.frozen == oracles.scalars_frozen(station, step), step


@numbers(31)
def test_rotary_frequencies_and_scale_are_the_published_ones_in_each_stage(number):
    script, station = load(number, block=128), STATIONS[number]
    cfg = script.Hyperparameters()
    changes = [change for change, _, _ in oracles.window_changes(station)]
    turning = station.head_dim // 4
    with in_float64():
        for step in (0, *changes, *(s - 1 for s in changes), cfg.num_iterations):
            frequencies, scale = oracles.rotary(station, step)
            found, found_scale = script.yarn(script.schedule(step, cfg).stage, cfg)
            np.testing.assert_allclose(found.numpy(), frequencies[:turning], rtol=1e-12)
            assert not any(frequencies[turning:])
            assert found_scale == pytest.approx(scale, rel=1e-12)


# Data and masks


@numbers(28)
def test_the_sequences_of_each_step_are_the_published_ones(number, script, tmp_path, write_shard):
    station, cfg = tiny(number, sequences_per_forward=1)
    shards = random_shards(3, size=9_000, seed=number)
    for index, tokens in enumerate(shards):
        write_shard(tmp_path / f"train_{index}.bin", tokens)
    cfg = dataclasses.replace(cfg, train_files=str(tmp_path / "train_*.bin"))
    lengths = [oracles.seq_len(station, step // 6) for step in range(40)]
    expected = list(oracles.streams_of(station, shards, lengths))
    assert len(expected) > 12
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    loader = script.TokenLoader(cfg, ranks)
    for step, (length, streams) in enumerate(zip(lengths, expected)):
        for (inputs, targets), stream in zip(loader.next_step(length), streams, strict=True):
            assert inputs[0].tolist() == stream.inputs.tolist(), step
            assert targets[0].tolist() == stream.targets.tolist(), step


@numbers(18)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
def test_masks_see_what_the_published_ones_do(number, script, window):
    generator = np.random.default_rng(window)
    tokens = generator.integers(0, EOT, size=(2, LENGTH))
    tokens[generator.random(tokens.shape) < 1 / 20] = EOT
    tokens[:, 0] = EOT
    docs = torch.from_numpy((tokens == EOT).cumsum().reshape(2, -1).astype(np.int32))
    station, _ = tiny(number)
    rows = [oracles.dense_mask(station, row.numpy(), window) for row in docs]
    expected = torch.block_diag(*rows).bool()
    reach = torch.tensor(window, dtype=torch.int32)
    flex = script.flex_mask(docs, reach)
    S = docs.numel()
    i, j = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
    blocks = flex.to_dense()[0, 0].bool()
    full = torch.zeros_like(blocks)
    for row, count in enumerate(flex.full_kv_num_blocks[0, 0]):
        full[row, flex.full_kv_indices[0, 0, row, :count].long()] = True
    blocks, full = (torch.kron(x, torch.ones(BLOCK, BLOCK)).bool() for x in (blocks, full))
    assert torch.equal(blocks & (full | flex.mask_mod(0, 0, i, j)), expected)
    dense = script.dense_mask(docs, reach)[:, 0] == 0
    before = dense.size(-1) - BLOCK
    found = torch.zeros(S, before + S, dtype=torch.bool)
    for row, seen in enumerate(dense):  # columns are shifted by what is before the first token
        found[row * BLOCK : (row + 1) * BLOCK, row * BLOCK :][:, : before + BLOCK] = seen
    assert torch.equal(found[:, before:], expected)


# Training


class HeldRun:
    """What a training loop works with, by which each of its steps is held to the oracle's."""

    first_step = 0

    def __init__(self, number, steps):
        self.number = number
        self.station, self.cfg = tiny(number, steps, sequences_per_step=2)
        self.station = dataclasses.replace(self.station, streams=2)
        self.script, self.step, self.validated = load(number), 0, []
        self.model = make_model(self.script, self.cfg)
        self.ranks = self.script.Ranks(self.cfg)
        self.optimizers = self.script.build_optimizers(self.model, self.cfg, self.ranks)
        for optimizer in self.optimizers:
            optimizer.dtype = torch.float64
            if hasattr(optimizer, "updates"):
                optimizer.updates = optimizer.updates.double()
        self.weights = public(self.station, self.model)
        self.state = oracles.optimizer_state(self.station, self.weights)
        lengths = [oracles.seq_len(self.station, step) for step in range(steps + EXTENSION)]
        self.steps = oracles.streams_of(self.station, random_shards(3, 8_000), lengths)
        self.val_tokens = random_shards(1, 2_000, seed=5)[0]
        self.clock = SimpleNamespace(start=lambda: None, stop=lambda: None)
        self.loader = self.health = self

    def hold(self, what, grads=False, factor=1):
        """Weights, or gradients, against the oracle's."""
        found, tied = public(self.station, self.model, grads), oracles.tied(self.station, self.step)
        if grads and tied:
            found["lm_head.weight"] += found["embed.weight"]
        for name, x in found.items():
            if name != "embed.weight" or not tied:
                expected = torch.zeros(()) if what[name] is None else what[name]
                error = (x / factor - expected).norm()
                assert error <= EXACT * expected.norm() + 1e-12, (self.step, name)

    def validation_is_due(self, step):
        return step in (4, self.cfg.num_iterations)

    def validate(self, step):
        self.hold(self.weights)
        streams = oracles.validation_streams(self.station, self.val_tokens)
        expected = oracles.validation_loss(self.station, self.weights, streams, step).item()
        tokens = self.val_tokens[: self.station.val_tokens + 1]
        found = self.script.validate(self.model, tokens, self.cfg, self.ranks)
        assert found == pytest.approx(expected, rel=1e-12)
        self.validated.append(step)

    def checkpoint_is_due(self, step, complete):
        # Gradients are left over where Adam has not stepped.
        assert complete == (self.number < 40 or step % 2 == 0)
        return False

    def is_asked_to_stop(self, step, complete):
        return False

    def next_step(self, length):
        self.hold(self.weights)
        assert length == oracles.seq_len(self.station, self.step)
        self.model.tokens_per_piece = 64 if self.step % 4 < 2 else 2 * LENGTH
        self.streams = next(self.steps)
        together = self.step % 2 == 0  # in one forward pass
        parts = [self.streams] if together else [[stream] for stream in self.streams]
        # Sums of all streams' gradients, up to #24 of means over each pass
        self.factor = len(self.streams) if self.number >= 28 else len(parts)
        return [batch_of(part) for part in parts]

    def check(self, step, losses):
        assert step == self.step
        station, weights = self.station, self.weights
        grads = oracles.gradients(station, weights, self.streams, step)
        if self.number < 40 or step % 2 == 0:  # gradients are those of the step alone
            with torch.no_grad():
                loss = sum(oracles.training_loss(station, weights, s, step) for s in self.streams)
                tokens = len(self.streams)
                if self.number >= 28:
                    tokens *= oracles.seq_len(station, step)
                assert losses[0].item() == pytest.approx(loss.item() / tokens, rel=1e-12)
                self.hold(grads, grads=True, factor=self.factor)
        oracles.optimizer_step(station, weights, grads, self.state, step)

    def log_step(self, step, num_targets):
        targets = len(oracles.target_weights(self.station, self.step))
        assert (step, num_targets) == (self.step + 1, targets)
        self.step += 1


@pytest.mark.parametrize(("number", "steps"), [*((n, 5) for n in STATIONS), (53, 7)])
def test_a_whole_run_takes_the_published_steps(number, steps):
    """The loop itself, every step of it: windows, losses, gradients, both optimizers, validation.

    Of 5 steps the embedding leaves the head at an even one, of 7 at an odd one.
    """
    with in_float64(number):
        run = HeldRun(number, steps)
        run.script.train(run, run.cfg)
        last = oracles.total_steps(run.station)
        assert run.step == last and run.validated == [4, last]
