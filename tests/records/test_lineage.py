"""What the records begin with, their schedules and their data, against the oracles.

test_whole_runs.py compares whole runs. A record that is not public and has no station is not here.
"""

import inspect
import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lineage import (
    BLOCK,
    EOT,
    LENGTH,
    held_since,
    in_float64,
    load,
    tiny_flags,
    tiny_station,
)
from torch.nn.attention.flex_attention import BlockMask

SCHEDULES = dict(  # methods of a station, by the names of ours
    lr_factor="rate_factor", momentum="muon_momentum", seq_len="seq_len", tied="tied",
    target_weights="target_weights", frozen="scalars_frozen", prefix_weight="prefix_weight",
    event="event", classes="num_classes", max_document_tokens="document_limit")


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


def public(station, model, grads=False):
    """Weights, or gradients, under the public names, in float64. Our layers count from 0."""
    shapes = station.parameter_shapes()
    weights = {}
    for name, x in station.initial_scalars().items():
        if name in shapes:
            weights[name] = [x.double() * (not grads)]
    for name, p in model.named_parameters():
        x = (p.grad if grads else p.detach()).double().clone()
        block, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*)", name).groups()
        layer = int(block or 0) + station.layers()[0]
        if kind in station.our_scalars:
            first = layer if block else 0
            for of, values in zip(station.our_scalars[kind], x.view(-1, 1) if block else [x]):
                weights[of][0][first : first + values.numel()] = values
            continue
        for ours, theirs in station.our_weights.items():
            kind = re.sub(ours, theirs, kind)
        name = f"blocks.{layer}.{kind}" if block and kind not in shapes else kind
        weights.setdefault(name, []).append(x)
    for name, parts in weights.items():
        merged = torch.cat([part.flatten() for part in parts])
        missing = math.prod(shapes[name]) - len(merged) if name in shapes else 0
        if missing:  # of the last layer, which nothing reads: ours has no such parameters
            _, value = station.initial_distribution(name)
            merged = torch.cat([merged, merged.new_full((missing,), 0 if grads else value)])
            parts = [merged, merged]
        weights[name] = parts[0] if len(parts) == 1 else merged.view(shapes[name])
        if name in ("mudd_gate_w2", "mudd_gate_b2"):
            weights[name] = weights[name][rows_by_layer(station)]
        if name in ("mudd_w2", "mudd_b2", "mudd_w2g") and hasattr(station, "our_sources"):
            sources = weights[name][-len(station.our_sources) :]
            sources.copy_(sources[list(station.our_sources)])
    return weights


def rows_by_layer(station):
    """Where each row of the gates is in our script, which has them by layer and then by kind."""
    starts = {}
    for gates in station.gate_rows():
        for gate in sorted(gates, key=lambda gate: gate[1]):
            starts[gate] = sum(rows for _, _, rows, _ in starts)
    return [starts[gate] + row for gate in sum(station.gate_rows(), []) for row in range(gate[2])]


# What a run begins with


@held_since(5)
def test_the_record_preset_is_the_published_configuration(record):
    """In each flag that the station has by the same name, or in settings()."""
    station, script = record.station, load(record.folder)
    cfg = script.Hyperparameters()
    for name, found in vars(cfg).items():
        expected = station.settings().get(name, getattr(station, name, None))
        if expected is None or callable(expected):
            continue  # ours alone, or what the station computes of each step
        if isinstance(expected, float):
            expected = pytest.approx(expected)
        assert found == expected, name
    with torch.device("meta"):
        model = script.GPT(script.Hyperparameters())
    rows = len(model.embed.weight), len(model.lm_head.weight)
    assert rows == (station.table_rows, station.vocab_size)
    if station.parameters:
        assert sum(p.numel() for p in model.parameters()) == station.parameters


@held_since(5)
def test_parameters_begin_as_the_published_ones(record):
    station, script = tiny_station(record.station, model_dim=64), load(record.folder)
    model = script.GPT(tiny_flags(script, model_dim=64))
    model.init_weights(torch.Generator().manual_seed(0))
    found = public(station, model)
    shapes = station.parameter_shapes()
    shapes.pop("ngram_embed.weight", None)  # no parameter: each rank has a part of its rows
    assert {k: tuple(v.shape) for k, v in found.items()} == shapes
    for name, p in found.items():
        kind, size = station.initial_distribution(name)
        parts = list(p) if p.ndim == 3 else [p]
        if name.endswith("qkvo_w") and not station.draws_output:
            assert not parts.pop().any(), name
        for part in parts:
            if kind == "constant":
                assert (part.float() == torch.tensor(size)).all(), name
            elif kind == "uniform":
                assert size * 0.98 < part.abs().max() <= size * (1 + 1e-6), name
            else:
                assert part.std().item() == pytest.approx(size, rel=0.02), name


@held_since(62)
def test_tokens_read_the_published_rows_and_signs(record):
    """Of tables as long as the record's."""
    station, script = record.station, load(record.folder)
    tokens = np.random.default_rng(0).integers(0, 50_257, size=4096)
    tokens[[0, 1, 2, 7]] = 50_256, 0, 50_256, 50_256
    given, expected = torch.from_numpy(tokens)[None], station.rows_read(tokens)
    if not hasattr(station, "ngram_rows"):
        found = script.hash_bigrams(given, station.bigram_rows)
        assert found[0].tolist() == expected.tolist()
        return
    assert script.hash_bigrams(given, station.ngram_rows)[0].tolist() == expected["pairs"]
    assert script.hash_trigrams(given, station.ngram_rows)[0].tolist() == expected["threes"]
    found = script.hash_signs(given, station.sign_rows)
    assert tuple(x[0].tolist() for x in found) == station.sign_rows_read(tokens)


# Schedules


@held_since(5)
def test_schedules_are_the_published_ones_at_every_step(record):
    script, station = load(record.folder, block=128), record.station
    cfg = script.Hyperparameters()
    for step in range(cfg.num_iterations + 1):
        now, is_last = script.schedule(step, cfg), step == cfg.num_iterations
        expected = (station.validation_windows if is_last else station.training_windows)(step)
        if hasattr(now, "window"):  # the long one
            assert (now.window, max(1, now.window // 2)) == expected, step
        elif expected[0]:
            blocks = now.long_window / script.BLOCK, now.short_window / script.BLOCK
            assert blocks == expected, step
        if is_last:
            break
        values = vars(now)
        if getattr(now, "prefix_weight", 0):  # the last of the weights, too
            values = values | dict(target_weights=now.target_weights[:-1])
        for name, value in values.items():
            if name in SCHEDULES:
                expected = getattr(station, SCHEDULES[name])(step) or 0  # None: all classes
                assert value == pytest.approx(expected, rel=1e-12), (step, name)
        if hasattr(now, "adam_steps"):
            assert now.adam_steps == station.adam_steps(step)


@held_since(31)
def test_rotary_frequencies_and_scale_are_the_published_ones_in_each_stage(record):
    script, station = load(record.folder, block=128), record.station
    cfg = script.Hyperparameters()
    changes = [change for change, _, _ in station.window_changes]
    steps = 0, *changes, *(step - 1 for step in changes), cfg.num_iterations
    letters = [("L",), ("S",)] if hasattr(station, "scales") else [()]  # wide heads, narrow ones
    with in_float64():
        for step, letter in itertools.product(steps, letters):
            frequencies, scale = station.rotary(step, *letter)
            turning = sum(frequency > 0 for frequency in frequencies)
            found, found_scale = script.yarn(script.schedule(step, cfg).stage, cfg, *letter)
            np.testing.assert_allclose(found.numpy(), frequencies[:turning], rtol=1e-12)
            assert not any(frequencies[turning:])
            assert found_scale == pytest.approx(scale, rel=1e-12)


# Data and masks


@held_since(28)
def test_the_sequences_of_each_step_are_the_published_ones(record, tmp_path, write_shard):
    sizes, script = record.station.tiny, load(record.folder)
    count = record.station.run_length if hasattr(record.station, "stage_rows") else 5
    station = tiny_station(record.station, count, **sizes)
    shards = random_shards(3, size=9_000, seed=record.station.place)
    for index, tokens in enumerate(shards):
        write_shard(tmp_path / f"train_{index}.bin", tokens)
    files = str(tmp_path / "train_*.bin")
    cfg = tiny_flags(script, count, sequences_per_forward=1, train_files=files, **sizes)
    steps = [step * (count + 1) // 40 for step in range(40)]
    expected = list(station.streams_of_steps(shards, steps))
    assert len(expected) > 12
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    loader = script.TokenLoader(cfg, ranks)
    for step, streams in enumerate(expected):
        now = script.schedule(steps[step], cfg)
        for (inputs, targets), stream in zip(loader.next_step(now), streams, strict=True):
            assert inputs[0].tolist() == stream.inputs.tolist(), step
            assert targets[0].tolist() == stream.targets.tolist(), step


@held_since(18)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
def test_masks_of_a_gpu_see_what_the_published_ones_do(record, window):
    """Those of the CPU are in whole runs."""
    station, script = tiny_station(record.station), load(record.folder)
    generator = np.random.default_rng(window)
    tokens = generator.integers(0, EOT, size=(2, LENGTH))
    tokens[generator.random(tokens.shape) < 1 / 20] = EOT
    tokens[:, 0] = EOT
    docs = torch.from_numpy((tokens == EOT).cumsum().reshape(2, -1).astype(np.int32))
    expected = torch.block_diag(*(station.mask(row.numpy(), window) for row in docs)).bool()
    reach = torch.tensor(window, dtype=torch.int32)
    if "reach" in inspect.signature(script.flex_mask).parameters:  # in tokens
        reach = BLOCK * reach
    flex = script.flex_mask(docs, reach)
    S = docs.numel()
    i, j = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
    blocks = flex.to_dense()[0, 0].bool()
    full = BlockMask.from_kv_blocks(flex.full_kv_num_blocks, flex.full_kv_indices).to_dense()[0, 0]
    blocks, full = (torch.kron(x, torch.ones(BLOCK, BLOCK)).bool() for x in (blocks, full))
    assert torch.equal(blocks & (full | flex.mask_mod(0, 0, i, j)), expected)
    # No block is visited for nothing, and none is asked about that all of a block sees.
    for listed, of_block in ((blocks, torch.any), (full, torch.all)):
        by_block = expected.view(S // BLOCK, BLOCK, S // BLOCK, BLOCK).transpose(1, 2).flatten(2)
        assert torch.equal(listed[::BLOCK, ::BLOCK], of_block(by_block, dim=2))
