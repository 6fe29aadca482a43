"""The oracles of the public records against what those records publish, and cases done by hand.

Published steps, switches and values are written here once more, as numbers. Of the formulas, each
piece that a library has is held to the library's: torch's Adam, Muon, attention, cross-entropy.
"""

import dataclasses
import itertools
import math

import lineage_oracles
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lineage_oracles import (
    STATIONS,
    adam_steps,
    aligned_streams,
    attention,
    copy_step,
    dense_mask,
    documents_of,
    gradients,
    initial_distribution,
    initial_parameters,
    initial_scalars,
    is_muon,
    key_offset,
    logits_of,
    long_window,
    matrices,
    mlp,
    muon_momentum,
    normalized,
    optimizer_state,
    optimizer_step,
    orthogonalize,
    packed_streams,
    parameter_shapes,
    rate,
    rate_factor,
    rms_norm,
    rotary,
    scalar_indices,
    scalars_frozen,
    seq_len,
    smeared,
    split_step,
    stage,
    streams_of,
    target_weights,
    tied,
    total_steps,
    total_tokens,
    training_loss,
    training_step,
    training_windows,
    turned,
    validation_loss,
    validation_steps,
    validation_streams,
    validation_windows,
)

EOT = 0


@pytest.fixture(params=STATIONS)
def number(request):
    return request.param


def tiny(number, **changes):
    """A station of the same layers and schedules, with blocks of 4 tokens and a width of 32."""
    station = STATIONS[number]
    changes = dict(
        streams=2, eot_token=EOT, vocab_size=24, model_dim=32, head_dim=16, mlp_ratio=2, block=4,
        seq_lens=tuple(length // 1024 for length in station.seq_lens), max_document=20,
        val_seq_len=64, val_tokens=128,
    ) | changes  # fmt: skip
    return dataclasses.replace(station, **changes)


def small(number, **changes):
    """A tiny station of four layers."""
    changes = dict(
        attention_pattern="LS.L", mlp_pattern="MMMM", value_embed_pattern="01.1",
        skips=((2, 1), (3, 0)) if number < 50 else ((3, 0),),
        backout_layer=2 if number >= 40 else None,
    ) | changes  # fmt: skip
    return tiny(number, **changes)


def random_shard(seed, count, document=12):
    """Tokens below 24, a document of `document` tokens or so; the first token belongs to none."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 24, size=count)
    tokens[generator.random(count) < 1 / document] = EOT
    tokens[0] = 1
    return tokens


def random_parameters(station, seed=0):
    """Weights of which none is zero, so that everything has a part in the loss."""
    generator = torch.Generator().manual_seed(seed)
    weights = initial_parameters(station, generator)
    for name, p in weights.items():
        if name == "scalars" or name == "x0_lambdas":
            p += 0.3 + 0.5 * torch.rand(p.shape, generator=generator, dtype=p.dtype)
        else:
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return weights


def random_step(station, step, seed=0):
    """The streams of one step of random documents."""
    return next(streams_of(station, [random_shard(seed, 2000)], [seq_len(station, step)]))


def changes_of(values):
    """(index, value) of each that is not the one before it."""
    pairs = enumerate(itertools.pairwise(values), 1)
    return [(index, after) for index, (before, after) in pairs if before != after]


# The published run


def test_steps_and_tokens_are_those_published():
    assert {n: total_steps(s) for n, s in STATIONS.items()} == {
        28: 1695, 31: 1670, 40: 2330, 43: 2245, 50: 2090, 53: 1920,
    }  # fmt: skip
    tokens = {n: total_tokens(s) for n, s in STATIONS.items()}
    assert [round(tokens[n] / 1e6, 1) for n in (28, 31, 40, 43)] == [666.5, 656.7, 610.8, 588.5]
    assert tokens[50] == 552_992_768
    assert tokens[53] == 508_428_288


def test_validations_are_where_losses_are_published(number):
    steps = validation_steps(STATIONS[number])
    assert steps[:2] == ([0, 125] if number <= 31 else [0, 250])
    assert steps[-2:] == {
        28: [1625, 1695], 31: [1625, 1670], 40: [2250, 2330], 43: [2000, 2245], 50: [2000, 2090],
        53: [1750, 1920],
    }[number]  # fmt: skip


def test_the_batch_grows_at_the_published_steps():
    for number, first, second in ((50, 684, 1367), (53, 627, 1254)):
        station = STATIONS[number]
        lengths = [seq_len(station, step) for step in range(total_steps(station))]
        assert lengths[0] * station.streams == 131_072
        assert changes_of(lengths) == [(first, 32_768), (second, 49_152)]
    for number, length in ((28, 49_152), (31, 49_152), (40, 32_768), (43, 32_768)):
        station = STATIONS[number]
        assert {seq_len(station, s) for s in range(total_steps(station))} == {length}


GROWTH = [126, 252, 377, 503, 628, 754, 879, 1005, 1131, 1256, 1382, 1507, 1633]
WINDOWS = {  # the long window, and the steps from which on it has another
    28: (1, [(step, blocks) for blocks, step in enumerate(GROWTH, 2)]),
    31: (3, [(557, 7), (1114, 11), (1670, 13)]),
    40: (3, [(764, 7), (1528, 11), (2330, 13)]),
    43: (3, [(735, 7), (1470, 11), (2205, 13)]),
    50: (3, [(684, 7), (1367, 11), (2050, 13)]),
    53: (3, [(627, 7), (1254, 11), (1880, 13)]),
}


def test_windows_grow_at_the_published_steps(number):
    station, (first, changes) = STATIONS[number], WINDOWS[number]
    last = total_steps(station)
    windows = [long_window(station, step) for step in range(last + 1)]
    assert windows[0] == first
    assert changes_of(windows) == changes
    shorts = dict(training_windows(station, step) for step in range(last))
    if number == 28:
        assert shorts[1] == 1 and shorts[14] == 7
    else:
        assert shorts == {3: 1, 7: 3, 11: 5} | ({13: 6} if number >= 43 else {})
    for step in range(last):
        assert validation_windows(station, step) == training_windows(station, step)
    at_last = {28: (14, 7), 31: (13, 6)}.get(number, (20, 6))
    assert validation_windows(station, last) == at_last


def test_yarn_gives_the_published_frequencies_and_scales():
    station = STATIONS[31]
    initial, scale = rotary(station, 0)
    exact = [1024 ** (-j / 31) for j in range(32)] + [0.0] * 32
    np.testing.assert_allclose(initial, exact, rtol=1e-14)
    assert initial[31] == 9.765625e-4 and scale == 0.1
    checks = {  # by step: frequencies by index, and the scale
        557: ({3: 0.504225, 4: 0.356011, 5: 0.254507, 6: 0.184221, 31: 4.18527e-4}, 0.116946),
        1114: ({6: 0.171840, 7: 0.114783, 31: 2.66335e-4}, 0.127518),
        1670: ({7: 0.111207, 31: 2.25361e-4}, 0.131778),
    }
    for step, (expected, expected_scale) in checks.items():
        before, _ = rotary(station, step - 1)
        frequencies, scale = rotary(station, step)
        for index, value in expected.items():
            assert frequencies[index] == pytest.approx(value, rel=5e-6)
            assert before[index] > frequencies[index]
        assert frequencies[:3] == initial[:3]
        assert frequencies[32:] == [0.0] * 32
        assert scale == pytest.approx(expected_scale, abs=5e-7)


def test_yarn_follows_the_long_window_alone(number):
    station = STATIONS[number]
    last = total_steps(station)
    for step, _ in WINDOWS[number][1]:
        assert (rotary(station, step) != rotary(station, step - 1)) == (number >= 31)
    expected = rotary(STATIONS[31], 1670) if number >= 31 else (rotary(station, 0)[0], 0.12)
    assert rotary(station, last) == expected


def test_rates_fall_from_the_published_steps(number):
    station = STATIONS[number]
    factors = [rate_factor(station, step) for step in range(total_steps(station))]
    begins = {28: 933, 31: 835, 40: 1260, 43: 1103, 50: 923, 53: 846}[number]
    peak = {50: 1.51, 53: 1.52}.get(number, 1.0)
    # At 1670 / 2 and 0.45 · 1880 steps the line begins at its highest.
    falls = begins + (number in (31, 53))
    assert factors[begins - 1] == pytest.approx(peak, abs=1e-12)
    assert factors[falls] < peak - 1e-5
    if number <= 43:
        assert factors[:begins] == [1.0] * begins
        assert all(b <= a for a, b in itertools.pairwise(factors))
    else:
        first, second = WINDOWS[number][1][:2]
        assert factors[: first[0]] == [1.0] * first[0]
        assert factors[first[0] : begins] == [peak] * (begins - first[0])
        jumps = [s for s, (a, b) in enumerate(itertools.pairwise(factors), 1) if b > a]
        assert jumps == [first[0], second[0]]
        x = second[0] / station.num_iterations
        left = (1 - x) / 0.55
        highest = {50: 1.93, 53: 1.73}[number]
        assert factors[second[0]] == pytest.approx(highest * left + 0.1 * (1 - left))
    at_last = {40: 0.1002, 43: 0.10018, 50: 0.1, 53: 0.1}.get(number)
    if at_last:
        np.testing.assert_allclose(factors[station.num_iterations :], [at_last] * 40, atol=1e-12)
    assert rate_factor(station, station.num_iterations) == pytest.approx(at_last or 0.1)


def test_momentum_has_the_published_plateaus(number):
    station = STATIONS[number]
    momenta = [muon_momentum(station, step) for step in range(total_steps(station))]
    assert momenta[0] == 0.85
    assert momenta[150] == pytest.approx(0.9)
    falls = {40: 2280, 43: 2195, 50: 2040, 53: 1870}.get(number, len(momenta) - 1)
    plateau = 0.949667 if number == 40 else 0.95
    np.testing.assert_allclose(momenta[300 : falls + 1], plateau, atol=5e-7)
    if number >= 40:
        np.testing.assert_allclose(momenta[falls + 1], 0.948)
        np.testing.assert_allclose(momenta[-1], 0.852)


def test_target_weights_are_the_published_ones():
    station = STATIONS[53]
    assert target_weights(station, 0) == [1.0, 0.5, 0.25]
    lengths = [len(target_weights(station, step)) for step in range(1920)]
    assert changes_of(lengths) == [(627, 2), (1254, 1)]
    assert target_weights(station, 313) == pytest.approx([1.0, 0.5, 0.25 * (1 - 939 / 1880)])
    assert target_weights(station, 627)[1] == pytest.approx(0.5, abs=1e-3)
    assert target_weights(station, 940) == pytest.approx([1.0, 0.25])
    assert 0 < target_weights(station, 1253)[1] < 1e-3
    assert target_weights(STATIONS[50], 0) == [1.0]


def test_the_scalars_rest_at_the_published_steps():
    station = STATIONS[53]
    frozen = [step for step in range(1920) if scalars_frozen(station, step)]
    assert frozen == [*range(627, 667), *range(1254, 1294), *range(1880, 1920)]
    steps = [s for s in range(1920) if adam_steps(station, s) and s not in frozen]
    assert [min(s for s in steps if s >= begin) for begin in (627, 1254)] == [667, 1295]
    assert max(steps) == 1879
    assert not any(scalars_frozen(STATIONS[50], step) for step in range(2090))


def test_adam_steps_at_all_steps_and_later_at_odd_ones(number):
    found = [adam_steps(STATIONS[number], step) for step in range(4)]
    assert found == ([True] * 4 if number <= 31 else [False, True] * 2)


def test_the_head_is_the_embedding_until_the_published_step():
    station = STATIONS[53]
    assert (split_step(station), copy_step(station)) == (1254, 1253)
    assert tied(station, 1253) and not tied(station, 1254)
    odd = dataclasses.replace(station, num_iterations=7)
    assert (split_step(odd), copy_step(odd)) == (5, 3)
    assert not tied(STATIONS[50], 0) and copy_step(STATIONS[50]) == -1


# Streams


def found_streams(steps):
    """Steps as lists of (inputs, targets, boundaries), all lists."""
    return [[(list(s.inputs), list(s.targets), s.boundaries) for s in step] for step in steps]


def marked(count, begins):
    """Tokens 100, 101, …, but for EOT at the given positions."""
    tokens = np.arange(100, 100 + count)
    tokens[begins] = EOT
    return tokens


def test_aligned_streams_begin_with_documents_by_hand():
    # Two streams of 4 tokens a step. 3 is passed over, less than 4 after 1; so is 8 after 6.
    tokens = marked(40, [1, 3, 6, 8, 11, 15, 17, 21, 39])
    steps = found_streams(aligned_streams([tokens], [4] * 2, 2, EOT))
    assert steps == [
        [([EOT, 102, EOT, 104], [102, EOT, 104, 105], [0, 2, 4]),
         ([EOT, 107, EOT, 109], [107, EOT, 109, 110], [0, 2, 4])],
        [([EOT, 112, 113, 114], [112, 113, 114, EOT], [0, 4]),
         ([EOT, 116, EOT, 118], [116, EOT, 118, 119], [0, 2, 4])],
    ]  # fmt: skip


def test_aligned_streams_without_enough_documents_are_an_error():
    steps = aligned_streams([marked(40, [1, 6, 11, 15, 21, 39])], [4] * 9, 2, EOT)
    next(steps)
    with pytest.raises(ValueError, match="beginnings in 16 tokens, a step has 2"):
        list(steps)


def test_aligned_streams_leave_the_end_of_a_shard():
    begins = [0, 5, 10, 15, 20, 25]
    long, longer = marked(27, begins), marked(28, begins)
    # The second step begins at 10 and looks at 10 … 25: of 27 tokens that leaves no one more.
    for shard, count in ((long, 1), (longer, 2)):
        assert len(found_streams(aligned_streams([shard], [4] * 9, 2, EOT))) == count
    both = found_streams(aligned_streams([long, longer], [4] * 9, 2, EOT))
    alone = found_streams(aligned_streams([longer], [4] * 9, 2, EOT))
    assert both == alone[:1] + alone


@pytest.mark.parametrize("seed", range(5))
def test_aligned_streams_are_found_one_at_a_time_too(seed):
    """As fewer ranks do it: a start at a time, in a window that shrinks by what is consumed."""
    tokens, streams, length = random_shard(seed, 3000, document=6), 4, 25
    steps = list(aligned_streams([tokens], itertools.repeat(length), streams, EOT))
    position, reach = 0, 2 * streams * length
    for step in steps:
        end = position + reach
        for stream in step:
            inside = position + np.flatnonzero(tokens[position:end] == EOT)
            position = int(inside[inside >= inside[0] + length][0])
            np.testing.assert_array_equal(stream.inputs, tokens[inside[0] :][:length])
            np.testing.assert_array_equal(stream.targets, tokens[inside[0] + 1 :][:length])
            documents = np.cumsum(stream.inputs == EOT) - 1
            np.testing.assert_array_equal(documents_of(stream.boundaries), documents)
    assert len(steps) > 5 and position + reach + 1 >= len(tokens)


def test_packed_streams_clip_documents_by_hand():
    # Two streams of 5 tokens, documents of at most 4. The first token belongs to none.
    tokens = marked(30, [1, 4, 10, 13, 15, 16, 26])
    steps = found_streams(packed_streams([tokens], [5] * 9, 2, EOT, 4))
    assert steps == [
        # 1 … 3 and 4 … 6 of 4 … 9, then 10 … 12, 13 … 14 and the one token of 15, that is
        # only a target: an empty document.
        [([EOT, 102, 103, EOT, 105], [102, 103, EOT, 105, 106], [0, 3, 5]),
         ([EOT, 111, 112, EOT, 114], [111, 112, EOT, 114, EOT], [0, 3, 5, 5])],
        # 16 … 19 clipped; then 26 … 27: the next stream lacks documents, so nothing of the step.
    ]  # fmt: skip


def test_packed_streams_drop_a_step_that_a_shard_cannot_fill():
    short = marked(20, [0, 3, 6, 9, 12, 15])  # 3 documents a stream, so one step and a half
    long = marked(30, [2, 5, 8, 11, 14, 17, 20, 23, 26])
    steps = found_streams(packed_streams([short, long, short], [6] * 9, 2, EOT, 4))
    assert [step[0][0][1] for step in steps] == [101, 103, 101]
    assert [step[0][1][-1] for step in steps] == [EOT] * 3
    nothing = marked(50, [])
    assert found_streams(packed_streams([nothing, short], [6] * 9, 2, EOT, 4)) == steps[:1]
    assert found_streams(packed_streams([nothing], [6], 2, EOT, 4)) == []


@pytest.mark.parametrize("seed", range(5))
def test_packed_streams_are_clipped_documents_one_after_another(seed):
    tokens, limit, lengths = random_shard(seed, 4000, document=15), 20, [16] * 9 + [32] * 9
    documents = [d[:limit] for d in np.split(tokens, np.flatnonzero(tokens == EOT))[1:]]
    assert max(map(len, documents)) == limit
    steps = list(packed_streams([tokens], lengths, 3, EOT, limit))
    assert len(steps) == len(lengths)
    for length, step in zip(lengths, steps):
        for stream in step:
            count = 1 + int(np.argmax(np.cumsum([len(d) for d in documents]) > length))
            packed, documents = np.concatenate(documents[:count])[: length + 1], documents[count:]
            np.testing.assert_array_equal(stream.inputs, packed[:-1])
            np.testing.assert_array_equal(stream.targets, packed[1:])
            numbers = np.cumsum(stream.inputs == EOT) - 1
            np.testing.assert_array_equal(documents_of(stream.boundaries), numbers)
            assert np.diff(stream.boundaries).max() <= limit


def test_validation_streams_are_consecutive():
    station = tiny(31, val_seq_len=4, val_tokens=8)
    first, second = validation_streams(station, marked(9, [0, 3, 6]))
    assert list(first.inputs) == [EOT, 101, 102, EOT] and first.targets[-1] == 104
    assert first.boundaries == [0, 0, 3, 4] and second.boundaries == [0, 2, 4]
    assert list(documents_of(second.boundaries)) == [0, 0, 1, 1]


# Masks


def seen(station, documents, window):
    return dense_mask(station, np.array(documents), window).int().tolist()


def test_masks_by_hand():
    one = [0] * 5
    assert seen(tiny(28, block=2), one, 1) == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert seen(tiny(31, block=2), one, 1) == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    for number in (28, 31):
        assert seen(tiny(number, block=2), [0, 0, 0, 1, 1], 2) == [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 0, 0, 1, 0],
            [0, 0, 0, 1, 1],
        ]


def test_masks_are_those_of_a_loop(number):
    station, window = tiny(number), 2
    documents = np.cumsum(random_shard(number, 40) == EOT)
    mask = dense_mask(station, documents, window)
    for i, j in np.ndindex(40, 40):
        near = i // 4 - j // 4 <= 1 if number == 28 else i - j <= 8
        assert mask[i, j].item() == (j <= i and documents[i] == documents[j] and near)


# Parameters


def test_parameters_have_the_published_shapes(number):
    shapes = parameter_shapes(STATIONS[number])
    V = 50_304
    assert shapes["embed.weight"] == shapes["lm_head.weight"] == (V, 768)
    assert shapes["value_embeds.2.weight"] == (V, 768)
    assert shapes["scalars"] == ({50: 48, 53: 40}.get(number, 64),)
    layers = {name: {n for n in shapes if n.endswith(name)} for name in ("qkvo_w", "c_fc")}
    assert {name: len(of) for name, of in layers.items()} == {
        "qkvo_w": 11 if number <= 31 else 10,
        "c_fc": 12 if number == 28 else 11,
    }
    hidden = (768, 3072) if number < 50 else (3072, 768)
    qkvo = {28: (4, 768, 768), 31: (4, 768, 768)}.get(number, hidden)
    assert {shapes[name] for name in layers["qkvo_w"]} == {qkvo}
    assert {shapes[name] for name in layers["c_fc"]} == {hidden}
    assert shapes["blocks.2.mlp.c_proj"] == hidden
    assert shapes[f"blocks.2.attn.{'dampen' if number == 28 else 'attn_gate'}.weight"] == (6, 12)
    assert ("smear_gate.weight" in shapes) == (number >= 40)
    assert shapes.get("x0_lambdas") == ((11,) if number == 53 else None)
    assert any(name.startswith("blocks.0.") for name in shapes) == (number not in (40, 43))


def test_scalars_begin_as_published(number):
    half = [0.5] * 24
    expected = {
        28: [1.0] * 12 + [1.0, 0.0] * 12 + half + [1.0] * 4,
        40: [-1.5] * 12 + [1.0, 0.0] * 12 + half + [0.0, 0.5, 1.0, 1.0],
        50: [1.1] * 11 + [0.0] * 11 + [0.5, 1.0] * 11 + [0.0, 0.5, -1.5, 1.0],
        53: [1.1] * 11 + [0.5, 1.0] * 11 + [0.0, 0.5, -1.5] + [1.0] * 4,
    }
    expected |= {31: expected[28], 43: expected[40]}
    assert initial_scalars(STATIONS[number]) == expected[number]


def test_matrices_begin_as_published(number):
    station = STATIONS[number]
    kinds = {name: initial_distribution(station, name) for name in parameter_shapes(station)}
    normal = {name: std for name, (kind, std) in kinds.items() if kind == "normal"}
    tables = {f"value_embeds.{i}.weight": 1.0 for i in range(3)} if number < 50 else {}
    head = {"embed.weight": 0.005, "lm_head.weight": 0.005} if number == 53 else {"embed.weight": 1}
    assert normal == tables | head
    uniform = {name.rpartition(".")[2]: b for name, (kind, b) in kinds.items() if kind == "uniform"}
    assert uniform == pytest.approx(
        {"qkvo_w": 0.0625 if number == 53 else 0.03125, "c_fc": 0.03125}
    )
    weights = initial_parameters(tiny(number), torch.Generator().manual_seed(0))
    Q, K, V, O = matrices("qkvo_w", weights["blocks.2.attn.qkvo_w"])  # noqa: E741
    assert not O.any() and all(x.abs().min() > 0 for x in (Q, K, V))
    qkvo = weights["blocks.2.attn.qkvo_w"]
    if number >= 50:
        assert torch.equal(qkvo[32:64], K)
    if number in (40, 43):
        assert torch.equal(qkvo[1, :32], Q[4])


# The model


def test_what_turns_is_a_rotation():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    frequencies = [1.0, 0.3, 0.1, 0.02, 0.0, 0.0, 0.0, 0.0]
    angle = torch.outer(torch.arange(5.0).double(), torch.tensor(frequencies, dtype=torch.float64))
    rotated = torch.complex(x[:, :8], x[:, 8:]) * torch.polar(torch.ones_like(angle), -angle)
    found = turned(x, frequencies)
    torch.testing.assert_close(found, torch.cat([rotated.real, rotated.imag], dim=1))
    still = [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(found[:, still], x[:, still])


def test_the_key_offset_takes_what_does_not_turn_from_the_token_before():
    k = torch.arange(24.0).view(3, 8)
    assert key_offset(k).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 2, 3, 12, 13, 6, 7],
        [16, 17, 10, 11, 20, 21, 14, 15],
    ]


def test_smear_takes_the_unsmeared_neighbour():
    station = tiny(40)
    weights = random_parameters(station)
    e = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mu, gate = weights["scalars"][60], weights["smear_gate.weight"][0]
    expected = [e[0]]
    for t in range(1, 6):
        expected.append(e[t] + mu * torch.sigmoid(gate @ e[t, :12]) * e[t - 1])
    torch.testing.assert_close(smeared(station, weights, e), torch.stack(expected))


@pytest.mark.parametrize(("number", "layer"), [(28, 1), (50, 1), (50, 3)])
def test_attention_is_that_of_torch(number, layer):
    """One layer's, heads at once, by scaled_dot_product_attention."""
    station = tiny(number)
    weights, T = random_parameters(station), 24
    generator = torch.Generator().manual_seed(0)
    u, e = torch.randn(2, T, 32, generator=generator, dtype=torch.float64)
    mask = dense_mask(station, np.arange(T) // 10, 1)
    frequencies, scale = rotary(station, 700)
    found = attention(station, weights, layer, u, e, mask, frequencies, scale)
    indices, scalars = scalar_indices(station), weights["scalars"]
    lambda0, lambda1 = (scalars[indices[f"lambda{i}"][layer]] for i in (0, 1))
    W = weights[f"blocks.{layer}.attn.qkvo_w"].reshape(4, 32, 32)
    q, k, v = ((u @ w.T).view(T, 2, 16).transpose(0, 1) for w in W[:3])
    e = e.view(T, 2, 16).transpose(0, 1)
    v = lambda0 * v + (lambda1 * e if number == 28 else e)
    shape = (16,)
    # Since #50 the norm sees q and k a factor of lambda0 larger: its epsilon is that less.
    eps = station.norm_eps / (1 if number == 28 else lambda0.item() ** 2)
    q, k = (F.rms_norm(x, shape, eps=eps) for x in (q, k))
    q, k = (torch.stack([turned(head, frequencies) for head in x]) for x in (q, k))
    if layer == 3:  # the first of #50 with a long window
        k = torch.stack([key_offset(head) for head in k])
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    gate = weights[f"blocks.{layer}.attn.{'dampen' if number == 28 else 'attn_gate'}.weight"]
    y = y * torch.sigmoid(u[:, :12] @ gate.T).T[:, :, None]
    expected = y.transpose(0, 1).flatten(1) @ W[3].T * (1 if number == 28 else lambda1)
    torch.testing.assert_close(found, expected)


def test_the_mlp_is_that_of_torch(number):
    """Of its two matrices, each of the shape of the other, the first is (in, hidden) up to #43."""
    station = tiny(number)
    weights = random_parameters(station)
    c_fc, c_proj = (weights[f"blocks.2.mlp.{name}"] for name in ("c_fc", "c_proj"))
    u = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if number <= 43:
        assert c_fc.shape == c_proj.shape == (32, 64)
        expected = F.linear(F.relu(F.linear(u, c_fc.T)).square(), c_proj)
    else:
        assert c_fc.shape == c_proj.shape == (64, 32)
        expected = F.linear(F.relu(F.linear(u, c_fc)).square(), c_proj.T)
    torch.testing.assert_close(mlp(station, weights, 2, u), expected)


def test_layers_are_joined_as_published(number, monkeypatch):
    """With noise for what attention and MLPs give: the published order of all that is around."""
    station = tiny(number)
    weights, (long, short) = random_parameters(station), (4, 2)
    tokens = np.random.default_rng(0).integers(24, size=(T := 30))
    documents = np.zeros(T, dtype=np.int64)
    noise = torch.randn(2, 12, T, 32, generator=torch.Generator().manual_seed(0)).double()
    inputs, tables, longs = {}, {}, set()

    def noisy_attention(station, weights, layer, u, value_embed, seen, *rotary):
        inputs["attention", layer] = u
        if value_embed is not None:
            tables[layer] = value_embed
        if torch.equal(seen, dense_mask(station, documents, long)):
            longs.add(layer)
        else:
            assert torch.equal(seen, dense_mask(station, documents, short))
        return noise[0, layer]

    def noisy_mlp(station, weights, layer, u):
        inputs["mlp", layer] = u
        return noise[1, layer]

    monkeypatch.setattr(lineage_oracles, "attention", noisy_attention)
    monkeypatch.setattr(lineage_oracles, "mlp", noisy_mlp)
    found = logits_of(station, weights, tokens, documents, (long, short), [], 1.0, number == 53)

    def n(x):
        return F.rms_norm(x, (32,), eps=2.0**-23)

    def layer(i, x, a, b):
        x = a * x + b * x0
        if i != (6 if number >= 50 else 7):
            torch.testing.assert_close(inputs.pop(("attention", i)), n(x))
            x = x + noise[0, i]
        if (number, i) != (31, 0):
            torch.testing.assert_close(inputs.pop(("mlp", i)), n(x))
            x = x + noise[1, i]
        return x

    s, stack = weights["scalars"], []
    e = weights["lm_head.weight" if number == 53 else "embed.weight"][tokens]
    x = x0 = n(e if number <= 31 else smeared(station, weights, e))
    if number <= 31:
        for i in range(12):
            if i >= 6:
                x = x + s[i - 6] * stack.pop()
            x = layer(i, x, s[12 + 2 * i], s[13 + 2 * i])
            if i < 6:
                stack.append(x)
    elif number <= 43:
        for i in range(1, 12):
            if 6 <= i <= 10:
                x = x + torch.sigmoid(s[i - 6]) * stack.pop()
            x = layer(i, x, s[12 + 2 * i], s[13 + 2 * i])
            if i <= 5:
                stack.append(x)
            if i == 8:
                backout = x
        x = x - s[61] * backout
    else:
        beta, kappa = (s[45], s[46]) if number == 50 else (s[34], s[35])
        b = s[11:22] if number == 50 else weights["x0_lambdas"]
        for i in range(11):
            if i == 6:
                x = x + torch.sigmoid(kappa) * stack[3]
            x = layer(i, x, s[i], b[i])
            stack.append(x)
        x = x - beta * stack[7]
    assert not inputs
    expected = 30 * torch.sigmoid(n(x) @ weights["lm_head.weight"].T / 7.5)
    torch.testing.assert_close(found, expected)
    assert longs == {28: {0, 4, 11}, 31: {0, 4, 11}, 40: {4, 11}, 43: {4, 11}}.get(number, {3, 10})
    early = {0: 0, 1: 1, 2: 2, 9: 0, 10: 1, 11: 2}
    late = {1: 1, 2: 2, 9: 0, 10: 1, 11: 2}
    published = {28: early, 31: early, 40: late, 43: late}
    published = published.get(number, {0: 1, 1: 2, 8: 0, 9: 1, 10: 2})
    assert tables.keys() == published.keys()
    for i, table in published.items():
        assert torch.equal(tables[i], weights[f"value_embeds.{table}.weight"][tokens])


@pytest.mark.parametrize("number", [n for n in STATIONS if n != 53])
def test_a_head_of_zeros_begins_at_the_published_loss(number):
    station = small(number, vocab_size=50_304, model_dim=16, seq_lens=(16,))
    weights = initial_parameters(station, torch.Generator().manual_seed(0))
    stream = random_step(station, 0)[0]
    with torch.no_grad():
        loss = training_loss(station, weights, stream, 0).item() / 16
        mean = validation_loss(station, weights, [stream], 0).item()
    assert loss == pytest.approx(math.log(50_304), rel=1e-12)
    assert mean == pytest.approx(10.8258, abs=5e-5)


def test_a_tied_head_begins_at_its_own_published_loss():
    """10.8367, above ln 50304. What layers do is nothing as long as they project to zero.

    Logits of random targets have half of the cap as their mean, and the log of the sum of all
    is nearly the same for every token.
    """
    station = dataclasses.replace(
        STATIONS[53], attention_pattern="..", mlp_pattern="MM", value_embed_pattern="..",
        mlp_ratio=1, skips=(), backout_layer=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    small = dataclasses.replace(station, vocab_size=1)
    weights = initial_parameters(small, generator)
    head = torch.randn(station.vocab_size, station.model_dim, generator=generator)
    weights["lm_head.weight"] = 0.005 * head.double()
    tokens = torch.randint(station.vocab_size, (16,), generator=generator)
    documents = np.zeros(16, dtype=np.int64)
    frequencies, scale = rotary(station, 0)
    z = logits_of(station, weights, tokens, documents, (3, 1), frequencies, scale, True)
    assert z.logsumexp(-1).mean().item() - 15 == pytest.approx(10.8367, abs=1e-3)


def test_the_training_loss_sums_and_the_validation_loss_averages(number):
    station = small(number)
    weights, step = random_parameters(station), 1400  # of #53: but one target
    streams = random_step(station, step)
    sums, means = [], []
    for stream in streams:
        for windows, losses, reduction in (
            (training_windows(station, step), sums, "sum"),
            (validation_windows(station, step), means, "mean"),
        ):
            z = logits_of(
                station, weights, stream.inputs, documents_of(stream.boundaries), windows,
                *rotary(station, step), tied(station, step),
            )  # fmt: skip
            losses.append(F.cross_entropy(z, torch.tensor(stream.targets), reduction=reduction))
    found = [training_loss(station, weights, stream, step) for stream in streams]
    torch.testing.assert_close(torch.stack(found), torch.stack(sums))
    found = validation_loss(station, weights, streams, step)
    torch.testing.assert_close(found, torch.stack(means).mean())


def test_further_targets_count_by_their_weights():
    station, step = tiny(53), 200
    weights, stream = random_parameters(station), random_step(tiny(53), 0)[0]
    z = logits_of(
        station, weights, stream.inputs, documents_of(stream.boundaries),
        training_windows(station, step), *rotary(station, step), True,
    )  # fmt: skip
    logs, y, expected = z.log_softmax(-1), stream.targets, 0.0
    for t in range(len(y)):
        expected -= logs[t, y[t]]
        if t + 1 < len(y):
            expected -= 0.5 * logs[t, y[t + 1]]
        if t + 2 < len(y):
            expected -= 0.25 * (1 - 600 / 1880) * logs[t, y[t + 2]]
    torch.testing.assert_close(training_loss(station, weights, stream, step), expected)


def test_no_token_sees_a_later_one_nor_another_document(number):
    """But that since #40 smear shows the first token of a document the one before it."""
    station = small(number)
    weights = random_parameters(station)
    inputs = np.random.default_rng(0).integers(1, 24, size=30)
    inputs[[0, 12]] = EOT
    documents = documents_of([0, 12, 30])

    def logits(tokens, step):
        frequencies, scale = rotary(station, step)
        windows = training_windows(station, step)
        return logits_of(station, weights, tokens, documents, windows, frequencies, scale, False)

    for step in (0, 1400):
        before = logits(inputs, step)
        changed = inputs.copy()
        changed[20] = inputs[20] % 23 + 1
        same = (logits(changed, step) - before).abs().amax(1) < 1e-12
        assert same.tolist()[:21] == [True] * 20 + [False]
        for position in (10, 11):
            changed = inputs.copy()
            changed[position] = inputs[position] % 23 + 1
            same = (logits(changed, step) - before).abs().amax(1) < 1e-12
            # The key offset of #50 shows what a layer made of the whole document before.
            leaks = number >= 50 or (number >= 40 and position == 11)
            assert same[12:].all().item() == (not leaks)
            assert not same[position]


@pytest.mark.parametrize("step", [0, 1500])
def test_gradients_are_of_all_that_has_a_part(number, step):
    station = tiny(number)
    weights = random_parameters(station)
    grads = gradients(station, weights, random_step(station, step), step)
    unused = {"embed.weight"} if tied(station, step) else set()
    assert {name for name, grad in grads.items() if grad is None} == unused
    for name in grads.keys() - unused:
        assert grads[name].shape == weights[name].shape
        assert grads[name].isfinite().all() and grads[name].any(), name
    dead = (grads["scalars"] == 0).nonzero().flatten().tolist()
    n, indices = len(station.attention_pattern), scalar_indices(station)
    no_attention = [i for i, kind in enumerate(station.attention_pattern) if kind == "."]
    no_table = [i for i, kind in enumerate(station.value_embed_pattern) if kind == "."]
    expected = {indices["lambda0"][i] for i in no_attention}
    expected |= {indices["lambda1"][i] for i in (no_table if number < 50 else no_attention)}
    if number < 50:
        expected |= set(indices["skip"][{28: 6, 31: 6}.get(number, 5) :])
    if number in (40, 43):
        expected |= {indices["a"][0], indices["b"][0]}
    used = sum(len(where) for where in indices.values())
    expected |= set(range(used, len(grads["scalars"])))
    assert set(dead) == expected
    assert n == (11 if number >= 50 else 12)


def test_gradients_are_slopes(number):
    """Of the mean over streams of the summed loss, along a random direction."""
    station, step = small(number, attention_scale=0.5), 650
    weights, streams = random_parameters(station), random_step(station, step)
    generator = torch.Generator().manual_seed(1)
    grads = gradients(station, weights, streams, step)
    way = {name: torch.randn(p.shape, generator=generator).double() for name, p in weights.items()}

    def loss(size):
        moved = {name: p + size * way[name] for name, p in weights.items()}
        return sum(training_loss(station, moved, stream, step).item() for stream in streams) / 2

    slope = sum((grads[name] * way[name]).sum().item() for name in way if grads[name] is not None)
    assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-5)


# Optimizers


def only(weights, *names):
    """The weights of these names alone: an optimizer takes any of them."""
    return {name: weights[name] for name in names}


def random_grads(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator).double() for n, p in weights.items()}


def test_rates_are_those_published(number):
    station = STATIONS[number]
    rates = {name: rate(station, name, shape) for name, shape in parameter_shapes(station).items()}
    embed = 0.008 if number == 53 else 0.6
    assert rates["embed.weight"] == pytest.approx(embed)
    assert rates["value_embeds.1.weight"] == pytest.approx(0.6)
    assert rates["lm_head.weight"] == 0.008 and rates["scalars"] == 0.04
    muon = {28: 0.05, 31: 0.05, 40: 0.06, 43: 0.03}.get(number, 0.023)
    gate = f"blocks.2.attn.{'dampen' if number == 28 else 'attn_gate'}.weight"
    names = ("blocks.2.attn.qkvo_w", "blocks.2.mlp.c_fc", "blocks.2.mlp.c_proj", gate)
    multipliers = {43: (1, 2, 1, 1), 50: (2, 2, 4, 1), 53: (2, 2, 4, 1)}.get(number, (1, 1, 1, 1))
    assert [rates[name] / muon for name in names] == pytest.approx(multipliers)
    if number >= 40:
        expected = 0.008 * 0.01 if number == 53 else muon
        assert rates["smear_gate.weight"] == pytest.approx(expected)
        assert is_muon(station, "smear_gate.weight") == (number != 53)
    if number == 53:
        assert rates["x0_lambdas"] == 0.04


def test_adam_is_that_of_torch_but_for_its_epsilon(number):
    """With none, and no decay; since #40 each second step, by the sum of two steps' gradients."""
    station = tiny(number, adam_eps=0.0, adam_decay=0.0)
    names = ["lm_head.weight", "value_embeds.1.weight", "scalars"]
    weights, others, optimizers = only(random_parameters(station), *names), {}, []
    for name, p in weights.items():
        others[name] = torch.nn.Parameter(p.clone())
        betas = station.scalar_betas if name == "scalars" else station.adam_betas
        lr = rate(station, name, p.shape)
        optimizers.append(torch.optim.Adam([others[name]], lr=lr, betas=betas, eps=0.0))
    state = optimizer_state(station, weights)
    for step in range(6):
        grads = random_grads(weights, step)
        optimizer_step(station, weights, grads, state, step)
        for name, p in others.items():
            p.grad = grads[name] if p.grad is None else p.grad + grads[name]
        if number < 40 or step in (1, 3, 5):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, p in others.items():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-12, atol=1e-12)
    assert state["scalars"]["count"] == (6 if number < 40 else 3)


def test_adam_adds_its_epsilon_outside_of_the_correction():
    station, name = tiny(28), "lm_head.weight"
    weights = only(random_parameters(station), name)
    before, state = weights[name].clone(), optimizer_state(station, weights)
    optimizer_step(station, weights, {name: torch.full_like(before, 1e-10)}, state, 0)
    change = 0.008 * 0.05**0.5 / 0.2 * 0.2e-10 / (0.05**0.5 * 1e-10 + 1e-10)
    torch.testing.assert_close(before - weights[name], torch.full_like(before, change))


def test_cautious_adam_decays_where_the_step_shrinks_a_weight():
    embed_lr = 0.6
    for number in (50, 53):
        station, name = tiny(number, adam_eps=0.0), "value_embeds.1.weight"
        weights = only(random_parameters(station), name, "scalars")
        grads = random_grads(weights, 0)
        weights[name].fill_(2.0)
        weights[name][0] = -2.0
        grads[name].fill_(1.0)
        state = optimizer_state(station, weights)
        for step in (0, 1):
            optimizer_step(station, weights, grads, state, step)
        found = weights[name][:2, 0].tolist()
        # The first of Adam's steps is of the size of the rate, whatever the gradient.
        expected = [-2 - embed_lr, 2 - embed_lr - embed_lr**2 * 0.005 * 2]
        assert found == pytest.approx(expected, rel=1e-12)
        weights["scalars"].fill_(2.0)
        grads["scalars"].fill_(1.0)
        optimizer_step(station, weights, grads, optimizer_state(station, weights), 1)
        torch.testing.assert_close(weights["scalars"], torch.full_like(weights["scalars"], 1.96))


def test_muon_is_that_of_torch():
    """Whose iteration is computed in bf16: an error of 2^-8 that each iteration may make larger."""
    station = tiny(28)
    names = ["blocks.2.mlp.c_fc", "blocks.2.attn.dampen.weight"]
    weights = only(random_parameters(station), *names)
    others = {name: torch.nn.Parameter(p.float()) for name, p in weights.items()}
    before = {name: weights[name].clone() for name in names}
    lr = station.muon_lr
    theirs = torch.optim.Muon(list(others.values()), lr=lr, weight_decay=0.0, momentum=0.95)
    state = optimizer_state(station, weights)
    for step in (400, 401, 402):
        grads = random_grads(weights, step)
        optimizer_step(station, weights, grads, state, step)
        for name, p in others.items():
            p.grad = grads[name].float()
        theirs.step()
    for name in names:
        found, expected = (x - before[name] for x in (weights[name], others[name].detach()))
        assert (found - expected).norm() < 0.03 * expected.norm(), name


@pytest.mark.parametrize(("number", "low", "high"), [(28, 0.6, 1.25), (40, 0.85, 1.15)])
@pytest.mark.parametrize("shape", [(32, 32), (32, 64), (64, 32), (1, 12)])
def test_what_is_orthogonalized_is_nearly_so(number, low, high, shape):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    U, s, V = torch.linalg.svd(u, full_matrices=False)
    s = torch.linspace(0.05, 1, len(s)).double()  # no direction is too small for five iterations
    found = orthogonalize(STATIONS[number], U @ torch.diag(s) @ V)
    values = torch.diag(U.T @ found @ V.T)
    assert low < values.min() and values.max() < high
    torch.testing.assert_close(U @ torch.diag(values) @ V, found)


@pytest.mark.parametrize(("number", "axis"), [(43, 0), (50, 1), (53, 1)])
def test_norm_muon_makes_columns_or_rows_of_one_size_and_keeps_the_norm(number, axis):
    generator, state = torch.Generator().manual_seed(0), dict(second=0.0)
    U, other = torch.randn(2, 6, 12, generator=generator).double()
    found = normalized(STATIONS[number], U, state)
    size = found.norm(dim=axis)
    torch.testing.assert_close(size, torch.full_like(size, (U.norm() / len(size) ** 0.5).item()))
    found = normalized(STATIONS[number], other, state)
    assert found.norm().item() == pytest.approx(other.norm().item())
    second = 0.05 * (0.95 * U**2 + other**2).mean(axis)
    ratio = found.norm(dim=axis) / other.norm(dim=axis) * second.sqrt()
    torch.testing.assert_close(ratio, torch.full_like(ratio, ratio[0].item()))


def test_cautious_muon_decays_where_the_step_shrinks_a_weight():
    """A gate of one head that sees one channel: its update is a number of the gradient's sign."""
    for number, lr in ((43, 0.03), (50, 0.023), (53, 0.023)):
        station = tiny(number, model_dim=16, gate_inputs=1)
        name = "blocks.1.attn.attn_gate.weight"
        for weight, grad in itertools.product((2.0, -2.0), (1.0, -1.0)):
            weights = {name: torch.full((1, 1), weight, dtype=torch.float64)}
            grads = {name: torch.full((1, 1), grad, dtype=torch.float64)}
            # Of the first momentum, 0.85, the mean has 0.15 of the gradient.
            nesterov = grad * (1 + 0.85 * (0.15 - 1))
            size = orthogonalize(station, torch.tensor([[nesterov]], dtype=torch.float64)).item()
            assert 0.9 < size * grad < 1.1
            decay = lr * 1.2 * weight if weight * grad > 0 else 0.0
            optimizer_step(station, weights, grads, optimizer_state(station, weights), 0)
            assert weights[name].item() == pytest.approx(weight - lr * (size + decay), rel=1e-12)


def test_each_matrix_of_attention_is_orthogonalized_by_itself(number):
    station = tiny(number, muon_decay=0.0)
    name = "blocks.2.attn.qkvo_w"
    weights = only(random_parameters(station), name)
    grads = random_grads(weights, 0)
    of_grads = matrices(name, grads[name])
    of_grads[1].zero_()
    of_grads[3].mul_(1000)
    before = [x.clone() for x in matrices(name, weights[name])]
    optimizer_step(station, weights, grads, optimizer_state(station, weights), 0)
    changes = [x - y for x, y in zip(matrices(name, weights[name]), before)]
    sizes = [x.norm().item() / rate(station, name, weights[name].shape) for x in changes]
    assert sizes[1] == 0
    assert [sizes[i] for i in (0, 2, 3)] == pytest.approx([32**0.5] * 3, rel=0.25)


def test_the_schedules_and_ties_of_53_in_a_short_run():
    """N = 12, E = 2: windows change at 4, 8 and 12, the head is split off at 8."""
    station = tiny(53, num_iterations=12, extension=2, freeze_steps=2)
    assert [stage(station, s) for s in range(14)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    adam = [n for n in parameter_shapes(station) if not is_muon(station, n)]
    weights = only(random_parameters(station), "blocks.0.mlp.c_fc", *adam)
    state = optimizer_state(station, weights)
    moved = {}
    for step in range(14):
        before = {name: p.clone() for name, p in weights.items()}
        optimizer_step(station, weights, random_grads(weights, step), state, step)
        moved[step] = {name for name, p in weights.items() if not torch.equal(p, before[name])}
        if step == 7:
            assert torch.equal(weights["embed.weight"], weights["lm_head.weight"])
            assert state["embed.weight"]["count"] == state["lm_head.weight"]["count"] == 4
    by_name = {name: [s for s in moved if name in moved[s]] for name in weights}
    assert by_name["lm_head.weight"] == by_name["x0_lambdas"] == [1, 3, 5, 7, 9, 11, 13]
    assert by_name["smear_gate.weight"] == by_name["value_embeds.0.weight"] == [*range(1, 14, 2)]
    assert by_name["scalars"] == [1, 3, 7, 11]  # frozen at 4, 5, 8, 9, 12 and 13
    assert by_name["embed.weight"] == [7, 9, 11, 13]  # of which 7 is the copy
    assert by_name["blocks.0.mlp.c_fc"] == [*range(14)]
    assert state["embed.weight"]["count"] == state["lm_head.weight"]["count"] == 7
    assert not torch.equal(weights["embed.weight"], weights["lm_head.weight"])


def test_what_is_frozen_is_forgotten():
    """The step after the freeze of 4 … 6 is that of one gradient, of 7 alone."""
    station = tiny(53, num_iterations=12, extension=2, freeze_steps=3, scalar_betas=(0.0, 0.0))
    weights = only(random_parameters(station), "scalars", "embed.weight", "lm_head.weight")
    state = optimizer_state(station, weights)
    grads = {step: random_grads(weights, step) for step in range(8)}
    for step in range(8):
        mean = state["scalars"]["mean"]
        optimizer_step(station, weights, grads[step], state, step)
        if 4 <= step < 7:
            assert not state["scalars"]["sum"].any()
            assert torch.equal(state["scalars"]["mean"], mean)
            assert state["scalars"]["count"] == 2
    torch.testing.assert_close(state["scalars"]["mean"], grads[7]["scalars"])


def test_a_head_split_off_at_an_odd_step_takes_the_last_tied_gradient_alone():
    station = tiny(53, num_iterations=7, extension=2, adam_betas=(0.0, 0.0))
    assert (split_step(station), copy_step(station)) == (5, 3)
    weights = only(random_parameters(station), "embed.weight", "lm_head.weight")
    state = optimizer_state(station, weights)
    grads = {step: random_grads(weights, step) for step in range(6)}
    for step in range(6):
        optimizer_step(station, weights, grads[step], state, step)
    both = [grads[4]["lm_head.weight"] + grads[5]["lm_head.weight"], grads[5]["embed.weight"]]
    torch.testing.assert_close(state["lm_head.weight"]["mean"], both[0])
    torch.testing.assert_close(state["embed.weight"]["mean"], both[1])


def test_a_run_lowers_the_loss(number):
    """A few steps on the same stream, some in each stage of the schedules."""
    station = small(
        number, num_iterations=6, extension=2, streams=1, freeze_steps=0, seq_lens=(24,)
    )
    weights = initial_parameters(station, torch.Generator().manual_seed(0))
    state, streams = optimizer_state(station, weights), random_step(station, 0)
    before = validation_loss(station, weights, streams, 0).item()
    for step in range(total_steps(station)):
        training_step(station, weights, state, streams, step)
    after = validation_loss(station, weights, streams, total_steps(station)).item()
    assert after < 0.9 * before


def test_a_norm_has_its_epsilon_within_the_mean():
    x = torch.tensor([[3.0, 4.0], [1e-4, 0.0]], dtype=torch.float64)
    expected = F.rms_norm(x, (2,), eps=2.0**-23)
    torch.testing.assert_close(rms_norm(x, 2.0**-23), expected)
    assert expected[1, 0] < 0.3
