"""Record #28 and later ones against float64 oracles, by the public records' specification.

The scripts run in float64, their casts to fp32 left out, so that they have to agree to the digits
that float64 has. A script's weights are compared under the public names and shapes.
"""

import contextlib
import dataclasses
import functools
import importlib.util
from types import SimpleNamespace

import lineage_oracles as oracles
import numpy as np
import pytest
import torch
from conftest import REPO
from lineage_oracles import STATIONS

FOLDERS = {
    28: "2025-08-23_SparseAttnGate", 31: "2025-09-10_Yarn", 40: "2025-10-04_Backout",
    43: "2025-11-10_CautiousWD", 50: "2025-12-18_CautiousWDAdam",
    53: "2025-12-22_MultiTokenPrediction"}
EOT = 256
BLOCK = 16  # instead of the scripts' 128: as many blocks of fewer tokens
LENGTH = 6 * BLOCK
EXTENSION = 3  # steps of a tiny run after the schedules
EXACT = 1e-9  # of a step or gradient, relative: float64 through some ten matrix products and back


@functools.cache
def load(number, block=BLOCK):
    """The script of a public record, as a module with blocks of so many tokens."""
    path = REPO / "records" / FOLDERS[number] / "train_gpt.py"
    spec = importlib.util.spec_from_file_location(f"record_{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BLOCK = block
    return module


@pytest.fixture(params=FOLDERS)
def number(request):
    return request.param


@pytest.fixture
def script(number):
    return load(number)


def numbers(first):
    return pytest.mark.parametrize("number", [n for n in FOLDERS if n >= first])


@contextlib.contextmanager
def in_float64():
    """New tensors are float64, and no script casts them to fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self)
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
        freeze_steps=min(2, station.freeze_steps), val_seq_len=LENGTH, val_tokens=2 * LENGTH)
    own = dict(
        num_iterations=steps, extension=extension, vocab_size=272, block=BLOCK, max_document=clip,
        windows=(1, 2, 3, 4), final_window=5 if number >= 40 else 4, window_tokens=3 * BLOCK)
    flags = dict(
        num_iterations=steps + extension, extension_steps=extension, vocab_size=EOT + 1,
        vocab_multiple=16, max_document_tokens=clip, window_tokens=3 * BLOCK,
        long_windows=(1, 2, 3, 4, 5), short_windows=(1, 1, 1, 2), sequences_per_forward=1,
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


def first_layer(number):
    """The public number of the first block that is there; ours are counted from 0."""
    return oracles.layers_of(STATIONS[number])[0] if number >= 40 else 0


def public(number, model, of=lambda p: p.detach()):
    """Weights, or what `of` makes of each parameter, under the public names, in float64."""
    station, own = STATIONS[number], dict(model.named_parameters())
    x = {name: of(p).double().clone() for name, p in own.items()}
    first, layers = first_layer(number), len(model.blocks)
    weights = {name: x[name] for name in x if "embed" in name or name == "lm_head.weight"}
    scalars = torch.tensor(oracles.initial_scalars(station)).double()
    if all(of(p) is p.grad for p in own.values()):
        scalars = torch.zeros_like(scalars)
    where = oracles.scalar_indices(station)
    skips = x["skip_lambda"][None] if number >= 50 else x["skip_weights"]
    scalars[where["skip"][: len(skips)]] = skips
    if number >= 53:
        weights["x0_lambdas"] = torch.stack([x[f"blocks.{i}.x0_lambda"] for i in range(layers)])
    for i in range(layers):
        ours, theirs = f"blocks.{i}.", f"blocks.{i + first}."
        if number >= 53:
            scalars[where["a"][i]] = x[ours + "x_lambda"]
        else:
            both = torch.tensor([where["a"][i + first], where["b"][i + first]])
            scalars[both] = x[ours + "lambdas"]
        if ours + "attn.qkv_w" in x:
            both = torch.tensor([where["lambda0"][i + first], where["lambda1"][i + first]])
            scalars[both] = x[ours + "attn.lambdas"]
            matrices = torch.cat([x[ours + "attn.qkv_w"], x[ours + "attn.c_proj.weight"][None]])
            shape = oracles.parameter_shapes(station)[theirs + "attn.qkvo_w"]
            wide = (matrices.size(1) * shape[0] // 768, -1) if len(shape) == 2 else matrices.shape
            weights[theirs + "attn.qkvo_w"] = matrices.reshape(wide)
            gate = oracles.gate_name(station, i + first)
            weights[gate] = x[ours + "attn.attn_gate.weight"]
        for name in ("c_fc", "c_proj"):
            if ours + "mlp." + name in x:
                weights[theirs + "mlp." + name] = x[ours + "mlp." + name]
    if number >= 40:
        weights["smear_gate.weight"] = x["smear_gate.weight"]
        scalars[where["smear"][0]] = x["smear_lambda"]
        scalars[where["backout"][0]] = x["backout_lambda"]
    weights["scalars"] = scalars
    return weights


def batch_of(streams):
    """Inputs and targets, a row a stream, as a loader gives them."""
    inputs = np.stack([stream.inputs for stream in streams]).astype(np.int32)
    targets = np.stack([stream.targets for stream in streams])
    return torch.from_numpy(inputs), torch.from_numpy(targets)


# What a run begins with


def test_the_record_preset_is_the_published_configuration(number, script):
    station, cfg, first = STATIONS[number], script.Hyperparameters(), first_layer(number)
    assert cfg.num_iterations == oracles.total_steps(station)
    multipliers = oracles.ADAM_MULTIPLIERS[number]
    expected = dict(
        sequences_per_step=station.streams, attention_pattern=station.attention_pattern[first:],
        value_embed_pattern=station.value_embed_pattern[first:],
        embed_lr=pytest.approx(station.adam_lr * multipliers["value_embeds"]),
        head_lr=pytest.approx(station.adam_lr * multipliers["lm_head"]))
    same = "seq_lens val_seq_len val_tokens val_every attention_scale muon_lr cooldown_frac "
    same += "rope_base model_dim head_dim eot_token "
    if number == 28:
        expected |= dict(align_documents=True)
        same += "window_tokens"
    else:
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
    factors = script.FP8_X_SCALE, script.FP8_W_SCALE, script.FP8_GRAD_SCALE
    assert factors == pytest.approx([1 / x for x in station.fp8_divisors])


def test_parameters_begin_as_the_published_ones(number, script):
    station, cfg = tiny(number, model_dim=64)
    station = dataclasses.replace(station, model_dim=64)
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    found = public(number, model)
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
        if number == 28:
            assert now.window == windows(station, step)[0], step
        else:
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


def test_the_sequences_of_each_step_are_the_published_ones(number, script, tmp_path, write_shard):
    station, cfg = tiny(number)
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
        self.model = self.script.GPT(self.cfg).double()
        generator = torch.Generator().manual_seed(0)
        self.model.init_weights(generator)
        with torch.no_grad():  # no weight is zero, so that everything has a part
            for p in self.model.parameters():
                if p.ndim < 2:
                    p.uniform_(0.3, 1.2, generator=generator)
                elif not p.any():
                    p.normal_(std=0.1, generator=generator)
        self.ranks = self.script.Ranks(self.cfg)
        self.optimizers = self.script.build_optimizers(self.model, self.cfg, self.ranks)
        for optimizer in self.optimizers:
            optimizer.dtype = torch.float64
        self.weights = public(number, self.model)
        self.state = oracles.optimizer_state(self.station, self.weights)
        lengths = [oracles.seq_len(self.station, step) for step in range(steps + EXTENSION)]
        self.steps = oracles.streams_of(self.station, random_shards(3, 8_000), lengths)
        self.val_tokens = random_shards(1, 2_000, seed=5)[0]
        self.clock = SimpleNamespace(start=lambda: None, stop=lambda: None)
        self.loader = self.health = self

    def hold(self, what, of=lambda p: p.detach(), factor=1):
        """Weights, or what `of` makes of parameters, against the oracle's."""
        for name, found in public(self.number, self.model, of).items():
            if name != "embed.weight" or not oracles.tied(self.station, self.step):
                expected = torch.zeros(()) if what[name] is None else what[name]
                error = (found / factor - expected).norm()
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
        return [batch_of(part) for part in parts]

    def check(self, step, losses):
        assert step == self.step
        station, weights = self.station, self.weights
        grads = oracles.gradients(station, weights, self.streams, step)
        if self.number < 40 or step % 2 == 0:  # gradients are those of the step alone
            with torch.no_grad():
                loss = sum(oracles.training_loss(station, weights, s, step) for s in self.streams)
                tokens = len(self.streams) * oracles.seq_len(station, step)
                assert losses[0].item() == pytest.approx(loss.item() / tokens, rel=1e-12)
                tied = oracles.tied(station, step)
                head, embed = self.model.lm_head.weight.grad, self.model.embed.weight.grad
                head += tied * embed
                self.hold(grads, of=lambda p: p.grad, factor=len(self.streams))
                head -= tied * embed
        oracles.optimizer_step(station, weights, grads, self.state, step)

    def log_step(self, step, num_targets):
        targets = len(oracles.target_weights(self.station, self.step))
        assert (step, num_targets) == (self.step + 1, targets)
        self.step += 1


@pytest.mark.parametrize(("number", "steps"), [*((n, 5) for n in FOLDERS), (53, 7)])
def test_a_whole_run_takes_the_published_steps(number, steps):
    """The loop itself, every step of it: windows, losses, gradients, both optimizers, validation.

    Of 5 steps the embedding leaves the head at an even one, of 7 at an odd one.
    """
    with in_float64():
        run = HeldRun(number, steps)
        run.script.train(run, run.cfg)
        last = oracles.total_steps(run.station)
        assert run.step == last and run.validated == [4, last]
