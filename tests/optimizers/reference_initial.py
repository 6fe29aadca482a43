"""The initialisations of the optimizer benchmark, as laws and as functions of given draws.

A law says what a parameter's entries are: `scale` times a standard normal draw, `scale` times a
draw uniform on ±1, or all of them `scale`. Gain signs are drawn apart from these.

- `new`: hidden matrices normal, everything of a projection zero, all biases zero.
- `old`: torch's defaults, uniform weights AND biases, then everything of a projection zero.
- `hyperball`: torch's defaults with factors; the projections' weights begin unlike zero.
- `hyperball_normal`: of result 37; also the head is drawn.
- `psgd`: of result 33; head and all biases keep torch's defaults.
- `depth`: `old`, with fc by depth. `line30`, `line44`: the same, and gains 1 ∓ α·signs.
"""

from typing import NamedTuple

import torch
from reference_model import count_layers, matrix_kind

HYPERBALL_FACTORS = {"attn.proj": 1.25, "mlp.fc": 1.5, "mlp.proj": 3.0}
DEPTH_DROP = 0.30
GAIN_SIGNS = {"line30": 0.14, "line44": 0.125}  # α
FIRST_PAIR = 6  # the block with which the antithetic pairs of line44 begin


class Law(NamedTuple):
    """What the entries of one parameter are at the start."""

    draw: str  # normal, uniform (on ±1) or constant
    scale: float


def laws(initial, shapes):
    """Name → Law. Gains of line30 and line44 are 1 here: `gain_signs` gives the rest."""
    return {name: _law(initial, name, shapes) for name in shapes}


def _law(initial, name, shapes):
    if name == "embed":
        return Law("normal", 1.0)
    if len(shapes[name]) == 1 and not name.endswith(".bias"):
        return Law("constant", 1.0)

    layer_name = name.removesuffix(".weight").removesuffix(".bias")
    fan_in = shapes[f"{layer_name}.weight"][1]
    bias = name.endswith(".bias")
    projection = layer_name == "head" or layer_name.endswith("proj")
    kind = matrix_kind(name)
    factor = HYPERBALL_FACTORS.get(kind, 1.0)

    if initial == "new":
        if bias or projection:
            return Law("constant", 0.0)
        return Law("normal", (0.33 / fan_in) ** 0.5)

    if initial == "hyperball_normal":
        if bias:
            return Law("constant", 0.0)
        return Law("normal", factor * (0.33 / fan_in) ** 0.5)

    if initial == "hyperball":
        if name == "head.weight" or bias and projection:
            return Law("constant", 0.0)
        return Law("uniform", factor / fan_in ** 0.5)

    if initial == "psgd":
        if kind is None:
            return Law("uniform", 1 / fan_in ** 0.5)
        return Law("normal", factor / (3 * fan_in) ** 0.5)

    assert initial in ("old", "depth", "line30", "line44"), initial
    if projection:
        return Law("constant", 0.0)
    if initial != "old" and kind == "mlp.fc":
        layer = int(name.split(".")[1])
        depth = layer / max(1, count_layers(shapes) - 1)
        return Law("uniform", (1 - DEPTH_DROP * depth) / fan_in ** 0.5)
    return Law("uniform", 1 / fan_in ** 0.5)


def initial_weights(initial, shapes, draw, signs=None):
    """Name → float64 tensor.

    draw(name, law, shape): the draws of one parameter, law being `normal` or `uniform`.
    signs: for line30 and line44 the vector of ±1 of each block, in order.
    """
    weights = {}
    for name, law in laws(initial, shapes).items():
        if law.draw == "constant":
            weights[name] = torch.full(shapes[name], law.scale, dtype=torch.float64)
        else:
            weights[name] = law.scale * draw(name, law.draw, shapes[name]).double()
    if initial in GAIN_SIGNS:
        for layer, sign in enumerate(signs):
            first, second = gains(sign, GAIN_SIGNS[initial])
            weights[f"blocks.{layer}.norm1"] = first
            weights[f"blocks.{layer}.norm2"] = second
    return weights


def gains(signs, strength):
    """The gains of a block's two norms, of one vector of signs."""
    signs = signs.double()
    return 1 - strength * signs, 1 + strength * signs


def antithetic_pair(bits, permutations):
    """The sign vectors of two neighbouring blocks, whose sums cancel in each slice.

    bits: (slices, size) draws of 0 and 1, of which only the counts are used.
    permutations: (slices, 2, size), of the first and the second vector.
    Each count is drawn half-way to the middle; a half is rounded to the even number.
    """
    first, second = [], []
    size = bits.shape[1]
    for drawn, (first_order, second_order) in zip(bits, permutations):
        middle = size // 2
        ones = round(middle + 0.5 * (int(drawn.sum()) - middle))  # Python rounds to even
        ones = min(max(ones, 0), size)
        first.append(_plus_then_minus(ones, size)[first_order])
        second.append(_plus_then_minus(size - ones, size)[second_order])
    return torch.cat(first), torch.cat(second)


def _plus_then_minus(ones, size):
    return torch.cat([torch.ones(ones), -torch.ones(size - ones)]).double()


def pair_seed(seed, block):
    """The seed of the generator from which the pair that begins at `block` is drawn."""
    return 0xA9170000 + 1009 * seed + 9176 * block


def draw_pair(generator, slices, size):
    """The draws of one pair in the published order: for each slice its bits, then two orders."""
    bits, permutations = [], []
    for _ in range(slices):
        bits.append(torch.randint(0, 2, (size,), generator=generator))
        first = torch.randperm(size, generator=generator)
        second = torch.randperm(size, generator=generator)
        permutations.append(torch.stack([first, second]))
    return torch.stack(bits), torch.stack(permutations)
