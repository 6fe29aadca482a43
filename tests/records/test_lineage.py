"""Record #28 and later ones against float64 oracles, by the public records' specification.

The scripts run in float64, their casts to fp32 left out, so that they have to agree to the digits
that float64 has. A script's weights are compared under the public names and shapes.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math

import lineage_oracles as oracles
import numpy as np
import pytest
import torch
from conftest import REPO

FOLDERS = {
    28: "2025-08-23_SparseAttnGate",
    31: "2025-09-10_Yarn",
    40: "2025-10-04_Backout",
    43: "2025-11-10_CautiousWD",
    50: "2025-12-18_CautiousWDAdam",
    53: "2025-12-22_MultiTokenPrediction",
    53.1: "2026-11-22_KeyOffset",  # ours, after #53
}
STATIONS = oracles.STATIONS | {
    53.1: dataclasses.replace(oracles.STATIONS[53], offset_layers="LS")
}
NUMBERS = list(FOLDERS)
EOT = 256
BLOCK = 16  # instead of the scripts' 128: as many blocks of fewer tokens
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


def record(number, block=BLOCK):
    """The configuration that a record was measured with."""
    script = load(number, block)
    return script.Hyperparameters(**script.PRESETS["record"])


@pytest.fixture(params=NUMBERS)
def number(request):
    return request.param


@pytest.fixture
def script(number):
    return load(number)


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


# Sizes

EXTENSION = 3  # steps of a tiny run after the schedules


def tiny(number, block=BLOCK, steps=10, **changes):
    """Station and hyperparameters of a model that takes milliseconds; its pattern is the record's.

    Windows of 1, 2 and 3 blocks, 4 at the end and 5 in the last validation, of sequences of 6, or
    of 2, 4 and 6 where batches grow. `steps` are those of the schedules, no multiple of 3.
    """
    station = STATIONS[number]
    length, clip = 6 * block, 3 * block // 2
    extension = EXTENSION if station.extension else 0
    sizes = dict(model_dim=32, head_dim=16, eot_token=EOT, momentum_warmup=4)
    sizes |= dict(freeze_steps=min(1, station.freeze_steps))
    lengths = tuple(length * x // station.seq_lens[-1] for x in station.seq_lens)
    own = dict(
        num_iterations=steps, extension=extension, seq_lens=lengths, vocab_size=272, block=block,
        windows=(1, 2, 3, 4), final_window=5 if number >= 40 else 4, window_tokens=3 * block,
        momentum_cooldown=2, max_document=clip, val_seq_len=length, val_tokens=2 * length, **sizes,
    )  # fmt: skip
    flags = dict(
        num_iterations=steps + extension, extension_steps=extension, train_seq_len=length,
        vocab_size=EOT + 1, vocab_multiple=16, window_stages="1 2 3 4", final_window=5,
        window_tokens=3 * block, momentum_cooldown=2, val_seq_len=length, val_tokens=2 * length,
        sequences_per_forward=2, device="cpu", **sizes,
    )  # fmt: skip
    if number >= 31:
        flags["max_document_tokens"] = clip
    cfg = record(number)
    flags = {k: v for k, v in (flags | changes).items() if hasattr(cfg, k)}
    return dataclasses.replace(station, **own), dataclasses.replace(cfg, **flags)


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


def write_shards(write_shard, folder, shards, name="train"):
    for index, tokens in enumerate(shards):
        write_shard(folder / f"{name}_{index:03d}.bin", tokens)
    return str(folder / f"{name}_*.bin")


def first_layer(number):
    """The public number of the first block that is there; ours are counted from 0."""
    return oracles.layers_of(STATIONS[number])[0] if number >= 40 else 0


def public(number, model, of=lambda p: p.detach()):
    """Weights, or what `of` makes of each parameter, under the public names, in float64."""
    station, own = STATIONS[number], dict(model.named_parameters())
    x = {name: of(p).double().clone() for name, p in own.items()}
    first = first_layer(number)
    layers = len(model.blocks)
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
            gate = "dampen" if number == 28 else "attn_gate"
            weights[theirs + f"attn.{gate}.weight"] = x[ours + "attn.attn_gate.weight"]
        for name in ("c_fc", "c_proj"):
            if ours + "mlp." + name in x:
                weights[theirs + "mlp." + name] = x[ours + "mlp." + name]
    if number >= 40:
        weights["smear_gate.weight"] = x["smear_gate.weight"]
        scalars[where["smear"][0]] = x["smear_lambda"]
        scalars[where["backout"][0]] = x["backout_lambda"]
    weights["scalars"] = scalars
    return weights


def make(number, seed=0, **changes):
    """Station, script, hyperparameters, and in float64 a model with no weight at zero."""
    station, cfg = tiny(number, **changes)
    script = load(number)
    model = script.GPT(cfg).double()
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p.uniform_(0.3, 1.2, generator=generator)
            elif not p.any():
                p.normal_(std=0.1, generator=generator)
    return station, script, cfg, model


def batch_of(streams):
    """Inputs and targets, a row a stream, as a loader gives them."""
    inputs = np.stack([stream.inputs for stream in streams]).astype(np.int32)
    targets = np.stack([stream.targets for stream in streams])
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def loss_of(script, model, step, pair):
    """The summed loss of two streams in a training step."""
    if not hasattr(script, "target_weights"):
        return model(*batch_of(pair))
    return model(*batch_of(pair), script.target_weights(step, model.cfg))


def lengths_of(station, count=None):
    """Tokens of each stream of the steps of a run, or of so many of its first ones."""
    steps = range(oracles.total_steps(station) if count is None else count)
    return [oracles.seq_len(station, step) for step in steps]


def set_window(script, model, step):
    """What the training loop does before a step."""
    if hasattr(model, "set_window"):
        model.set_window(step)
    else:
        model.window.fill_(script.window_blocks(step, model.cfg))


# The published configuration


def test_the_record_preset_is_the_published_configuration(number):
    station, cfg = STATIONS[number], record(number)
    assert cfg.num_iterations == oracles.total_steps(station)
    if len(station.seq_lens) == 1:
        step_tokens = cfg.sequences_per_step * cfg.train_seq_len
        assert step_tokens * cfg.num_iterations == oracles.total_tokens(station)
    first = first_layer(number)
    expected = dict(
        sequences_per_step=8,
        train_seq_len=station.seq_lens[-1],
        val_seq_len=station.val_seq_len,
        val_tokens=station.val_tokens,
        val_every=station.val_every,
        attention_pattern=station.attention_pattern[first:],
        value_embed_pattern=station.value_embed_pattern[first:],
        attention_scale=station.attention_scale,
        align_documents=number == 28,
        max_document_tokens=0 if number == 28 else station.max_document,
        muon_lr=station.muon_lr,
        adam_beta1=station.adam_betas[0],
        adam_beta2=station.adam_betas[1],
        adam_eps=station.adam_eps,
        cooldown_frac=station.cooldown_frac,
        final_lr_frac=station.final_lr_frac,
        momentum_warmup=station.momentum_warmup,
    )
    if number == 31:
        expected["mlp_pattern"] = station.mlp_pattern
    if number >= 31:
        expected["window_stages"] = " ".join(map(str, station.windows))
    if number >= 40:
        expected |= dict(
            backout_layer=station.backout_layer - first,
            final_window=station.final_window,
            extension_steps=station.extension,
            momentum_cooldown=station.momentum_cooldown,
            adam_every=2,
        )
    if number >= 43:
        expected |= dict(muon_decay=station.muon_decay)
    if number >= 50:
        expected |= dict(skip_layer=station.skips[0][1], adam_decay=station.adam_decay)
    if number >= 53:
        expected |= dict(freeze_steps=station.freeze_steps, embed_std=station.embed_std)
    assert {name: getattr(cfg, name) for name in expected} == expected
    rates = dict(embed_lr="value_embeds", head_lr="lm_head", scalar_lr="scalars")
    if number >= 53:
        rates |= dict(smear_lr="smear_gate")
    for field, name in rates.items():
        multiplier = oracles.ADAM_MULTIPLIERS[station.number][name]
        assert getattr(cfg, field) == pytest.approx(station.adam_lr * multiplier)
    factors = cfg.fp8_x_scale, cfg.fp8_w_scale, cfg.fp8_grad_scale
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
    cfg = record(number, block=128)
    for step in range(cfg.num_iterations):
        assert script.lr_scale(step, cfg) == pytest.approx(
            oracles.rate_factor(station, step), rel=1e-12), step  # fmt: skip
        assert script.muon_momentum(step, cfg) == pytest.approx(
            oracles.muon_momentum(station, step), rel=1e-12), step  # fmt: skip
        if len(station.seq_lens) > 1:
            assert script.sequence_length(step, cfg) == oracles.seq_len(station, step), step
        if number >= 53:
            with in_float64():
                found = script.target_weights(step, cfg).tolist()
            assert found == pytest.approx(oracles.target_weights(station, step), rel=1e-12), step
            assert (script.stage(step, cfg) < 2) == oracles.tied(station, step), step
    for step in range(cfg.num_iterations + 1):
        assert script.window_blocks(step, cfg) == oracles.long_window(station, step), step


def test_scalars_rest_at_the_beginning_of_each_stage_of_the_published_run():
    """Every step of #53: where a gradient of one moves them, and by how many steps' sum."""
    script, station, cfg = load(53), STATIONS[53], record(53)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = script.Adam("scalars", [p], 1.0, cfg, script.Ranks(record(53)))
    pending = 0
    for step in range(cfg.num_iterations):
        before = p.item()
        optimizer.grads.fill_(1.0)
        optimizer.update(step, 1)
        frozen = oracles.scalars_frozen(station, step)
        moves = oracles.adam_steps(station, step) and not frozen
        assert (p.item() != before) == moves, step
        pending = 0 if frozen or moves else pending + 1
        assert optimizer.state["sum"].item() == pending, step


@pytest.mark.parametrize("number", [n for n in NUMBERS if n >= 31])
def test_rotary_frequencies_and_scale_are_the_published_ones_in_each_stage(number):
    script, station = load(number, block=128), STATIONS[number]
    cfg = record(number, block=128)
    changes = [change for change, _, _ in oracles.window_changes(station)]
    with in_float64():
        for step in (0, *changes, *(s - 1 for s in changes), cfg.num_iterations):
            frequencies, scale = oracles.rotary(station, step)
            found, found_scale = script.yarn(step, cfg)
            turning = station.head_dim // 4
            np.testing.assert_allclose(found.numpy(), frequencies[:turning], rtol=1e-12)
            assert not any(frequencies[turning:])
            assert found_scale == pytest.approx(scale, rel=1e-12)


# Streams


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sequence_k_of_a_step_is_that_of_the_published_rank_k(
    number, script, ranks, tmp_path, write_shard
):
    station, cfg = tiny(number, sequences_per_forward=1)
    shards = random_shards(3, size=9_000, seed=int(number))
    pattern = write_shards(write_shard, tmp_path, shards)
    cfg = dataclasses.replace(cfg, train_files=pattern)
    lengths = lengths_of(station, 40) if number >= 40 else [6 * BLOCK] * 40
    expected = list(oracles.streams_of(station, shards, lengths))
    assert len(expected) > 12
    loaders = [script.TokenLoader(cfg, r, ranks, torch.device("cpu")) for r in range(ranks)]
    for step, streams in enumerate(expected):
        batches = [batch for loader in loaders for batch in loader.next_step(lengths[step])]
        for k, ((inputs, targets), stream) in enumerate(zip(batches, streams, strict=True)):
            assert inputs[0].tolist() == stream.inputs.tolist(), (step, k)
            assert targets[0].tolist() == stream.targets.tolist(), (step, k)
            begins = (inputs[0] == EOT).nonzero().flatten().tolist()
            assert begins == [b for b in stream.boundaries[:-1] if b < lengths[step] and (
                b or inputs[0, 0] == EOT)], (step, k)  # fmt: skip


# The model


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
def test_masks_see_what_the_published_ones_do(number, script, window):
    generator = np.random.default_rng(window)
    tokens = generator.integers(0, EOT, size=(2, 6 * BLOCK))
    tokens[generator.random(tokens.shape) < 1 / 20] = EOT
    tokens[:, 0] = EOT
    docs = torch.from_numpy((tokens == EOT).cumsum().reshape(2, -1).astype(np.int32))
    station, _ = tiny(number)
    rows = [oracles.dense_mask(station, d.numpy(), window) for d in docs]
    expected = torch.block_diag(*rows).bool()
    given = docs.flatten() if number == 28 else docs
    reach = torch.tensor(window, dtype=torch.int32)
    flex = script.flex_mask(given, reach)
    S = docs.numel()
    i, j = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
    blocks = flex.to_dense()[0, 0].bool().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    full = torch.zeros(S // BLOCK, S // BLOCK, dtype=torch.bool)
    for row in range(S // BLOCK):
        full[row, flex.full_kv_indices[0, 0, row, : flex.full_kv_num_blocks[0, 0, row]].long()] = 1
    full = full.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert torch.equal(blocks & (full | flex.mask_mod(0, 0, i, j)), expected)
    dense = script.dense_mask(given, reach)[:, 0] == 0
    found = torch.zeros(S, S + dense.size(-1), dtype=torch.bool)
    before = dense.size(-1) - BLOCK
    for row, seen in enumerate(dense):  # columns are shifted by what is before the first token
        found[row * BLOCK : (row + 1) * BLOCK, row * BLOCK : row * BLOCK + before + BLOCK] = seen
    assert torch.equal(found[:, before : before + S], expected)


def steps_to_try(number):
    return [0, 4, 8] if number < 40 else [0, 4, 8, 10]


@pytest.mark.parametrize("step", [0, 4, 8, 10])
def test_loss_and_gradients_are_the_published_ones(number, step):
    if step not in steps_to_try(number):
        pytest.skip("the record has no such step")
    with in_float64():
        station, script, cfg, model = make(number, head_chunks=3 if step == 4 else 1)
        streams = next(iter(oracles.streams_of(station, random_shards(1, 8_000), [6 * BLOCK])))[:4]
        if not oracles.tied(station, step):
            model.embed.weight.data += 0.01  # what was one matrix no longer is
        weights = public(number, model)
        expected = oracles.gradients(station, weights, streams, step)
        loss = sum(oracles.training_loss(station, weights, s, step) for s in streams).item()
        set_window(script, model, step)
        found = 0.0
        for pair in (streams[:2], streams[2:]):
            pair_loss = loss_of(script, model, step, pair)
            pair_loss.backward()
            found += pair_loss.item()
        assert found == pytest.approx(loss, rel=1e-12)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = public(number, model, of=lambda p: p.grad)
        if oracles.tied(station, step):
            grads["lm_head.weight"] += grads["embed.weight"]
            grads["embed.weight"].zero_()
        for name, grad in expected.items():
            grad = torch.zeros_like(weights[name]) if grad is None else grad
            error = (grads[name] / 4 - grad).norm()
            assert error <= EXACT * grad.norm() + 1e-12, name


@pytest.mark.parametrize("chunks", [1, 3])
def test_validation_is_the_published_one(number, chunks):
    with in_float64():
        station, script, cfg, model = make(number, head_chunks=chunks)
        tokens = random_shards(1, 2_000, seed=5)[0]
        streams = oracles.validation_streams(station, tokens)
        weights = public(number, model)
        for step in (0, oracles.total_steps(station)):
            expected = oracles.validation_loss(station, weights, streams, step).item()
            set_window(script, model, step)
            found = script.validate(model, tokens[: station.val_tokens + 1], cfg, script.Ranks(cfg))
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("number", "steps"), [*((n, 10) for n in NUMBERS), (53, 11)])
def test_a_whole_run_takes_the_published_steps(number, steps):
    """Every step of a run: windows, batches, rates, both optimizers, and what each remembers.

    Of 10 steps the embedding leaves the head at an odd one, of 11 at an even one.
    """
    with in_float64():
        station, script, cfg, model = make(number, steps=steps)
        optimizers = script.build_optimizers(model, cfg, script.Ranks(cfg))
        for optimizer in optimizers:
            optimizer.dtype = torch.float64
        weights = public(number, model)
        state = oracles.optimizer_state(station, weights)
        batches = oracles.streams_of(station, random_shards(3, 8_000), lengths_of(station))
        for step, streams in enumerate(batches):
            oracles.training_step(station, weights, state, streams[:2], step)
            set_window(script, model, step)
            loss_of(script, model, step, streams[:2]).backward()
            script.step_optimizers(optimizers, step, 2)
            for name, found in public(number, model).items():
                if name == "embed.weight" and oracles.tied(station, step + 1):
                    weights[name].copy_(weights["lm_head.weight"])  # what it is to begin with
                error = (found - weights[name]).norm()
                assert error <= EXACT * weights[name].norm(), f"step {step}: {name}"
        assert step == oracles.total_steps(station) - 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [28, 40, 53])  # whose loops differ; a minute each
def test_a_run_by_the_script_ends_at_the_loss_of_the_oracle(
    number, tmp_path, write_shard, run_script, final_values
):
    """The loop itself, in fp32, from the script's own initial weights, on 1 rank and on 2."""
    station, cfg = tiny(number, block=128)
    script, shards = load(number), random_shards(2, 60_000, seed=7)
    train = write_shards(write_shard, tmp_path, shards)
    val = write_shards(write_shard, tmp_path, random_shards(1, 5_000, seed=8), "val")
    names = {f.name for f in dataclasses.fields(cfg)} - {"preset", "fp8_head"}
    changed = {k for k in names if getattr(cfg, k) != getattr(script.Hyperparameters(), k)}
    flags = [x for k in sorted(changed) for x in (f"--{k}", getattr(cfg, k))]
    data = {"train_files": train, "val_files": val, "warmup_steps": 0, "preset": "pocket"}
    kept = names & script.PRESETS["pocket"].keys() - changed - data.keys()
    flags += [x for k in sorted(kept) for x in (f"--{k}", getattr(cfg, k))]
    flags += [x for k in data for x in (f"--{k}", data[k])]
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(cfg.seed))
    weights = public(number, model)
    state = oracles.optimizer_state(station, weights)
    batches = oracles.streams_of(station, shards, lengths_of(station))
    for step, streams in enumerate(batches):
        oracles.training_step(station, weights, state, streams, step)
    tokens = np.fromfile(tmp_path / "val_000.bin", "<u2")[512:]
    streams = oracles.validation_streams(station, tokens)
    expected = oracles.validation_loss(station, weights, streams, step + 1).item()
    start = math.log(272)
    assert abs(expected - start) > 0.02, "a run that changes nothing shows nothing"
    for ranks in (1, 2):
        done = run_script(flags, ranks, script=REPO / "records" / FOLDERS[number] / "train_gpt.py")
        assert done.returncode == 0, done.stderr
        found = float(final_values(done.stdout)["val_loss"])
        # Adam makes whole steps of the rounding errors that lambdas have for gradients at first.
        assert found == pytest.approx(expected, abs=2e-3 + 0.02 * abs(expected - start))
