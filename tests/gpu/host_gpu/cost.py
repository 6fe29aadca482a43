"""Times of what a trace has counted, by a simple model: modelled from generated code, not measured.

Each launch takes as long as the slower of two would alone: the memory with its bytes, or the matrix
units with its FLOP. There is nothing between two launches. `RATES` is all that is assumed; a read
that does not go along the memory costs what another does. A launch's group comes from its name,
which Inductor makes of the operators that it fuses.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict

from host_gpu.trace import Trace


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a GPU does in a second, of work like ours."""

    bandwidth: float  # bytes of its memory
    bf16: float  # FLOP of products of activations and weights
    fp8: float  # FLOP of such in FP8
    newton_schulz: float  # FLOP of batches of small square products in bf16
    attention: float  # FLOP that FlexAttention's kernels execute
    bus: float  # bytes that a GPU sends to the others of its node, in a ring


def by_data_sheet(bandwidth, bf16, fp8) -> Rates:
    """Rates that are the same shares of a card's data sheet as the H100's are of its own.

    Memory: 0.9, what copies reach. bf16: 0.68 of 989 TFLOP/s, as a large product reaches 0.8 within
    the power limit, and one of these shapes 0.85 of that. FP8: 1.6 of bf16, nanochat's log of
    2026-01-13 (this head: 16.95 to 10.31 ms). Newton-Schulz: an estimate. Attention:
    FlashAttention-3's paper has 273 to 378 TFLOP/s for Triton on an H100, head dimension 128,
    causal. Bus: rings in NCCL's tests on eight H100.
    """
    share = bf16 / 989.4e12
    return Rates(bandwidth=bandwidth * 3.0 / 3.35, bf16=share * 672e12, fp8=fp8 / 1979e12 * 1075e12,
                 newton_schulz=share * 400e12, attention=share * 330e12, bus=370e9)


# NVIDIA's data sheets: dense FLOP with sums in fp32. The A100 has no FP8.
RATES = {
    "h100": by_data_sheet(3.35e12, 989.4e12, 1979e12),
    "a100": by_data_sheet(1555e9, 312e12, 312e12),  # of 40 GB
    "rtx4090": by_data_sheet(1008e9, 165.2e12, 330.3e12),
    "rtx4060ti": by_data_sheet(288e9, 44.1e12, 88.3e12),
    "rtx4070": by_data_sheet(504e9, 58.3e12, 116.6e12),
    "rtx4060": by_data_sheet(272e9, 30.2e12, 60.5e12)}
RATES["h200"] = dataclasses.replace(RATES["h100"], bandwidth=4.3e12)  # 0.9 of 4.8 TB/s

GROUPS = (  # the first whose pattern is in the launch's name
    ("the script's own operators, unseen within", r"^(?!aten\.|triton_)"),
    ("attention", r"^triton_tem"),
    ("FP8 products", r"aten\._scaled_mm"),
    ("bf16 products", r"aten\.(badd)?b?mm"),
    ("attention", r"flex_attention"),  # sums that its backward pass begins with
)


def is_logits(tensor: list, facts: dict) -> bool:
    """Whether a [type, shape] has the size of a chunk's logits. A gradient of the head has not."""
    return math.prod(tensor[1]) >= facts["head_tokens"] * facts["padded_vocab"]


def group_of(launch: dict, facts: dict) -> str:
    if launch["kind"] == "wire":
        return "on the wire"
    if launch["phase"].startswith("optimizers"):
        return launch["phase"]
    if not launch["flop"] and any(is_logits(x, facts) for x in launch["tensors"]):
        return "softcap, cross-entropy, FP8 copies"
    for group, pattern in GROUPS:
        if re.search(pattern, launch["name"]):
            return group
    return "other"


def flop_of_attention(launch: dict, facts: dict, layers: int) -> float:
    """Of a FlexAttention kernel, for a layer of mean size: 2 products forward, and 7 backward, as
    the scores and their gradients are computed for the keys' gradients and for the queries'."""
    products = 7 if "backward" in launch["name"] else 2
    pairs = facts["block_pairs"] / layers * 128**2
    return 2 * products * facts["model_dim"] * pairs


def price(trace: Trace, rates: Rates) -> list[tuple[str, str, Counter]]:
    """Of each launch the phase, the group and what it costs in a pass: launches, bytes, flop and
    ms. An optimizer's are the mean of its steps."""
    facts = trace.facts
    of_flex = [x["name"] for x in trace.launches
               if x["phase"] == "train" and x["name"].startswith("triton_tem")]
    layers = sum("backward" not in name for name in of_flex)
    priced = []
    for launch in trace.launches:
        group = group_of(launch, facts)
        flop = launch["flop"]
        rate = rates.fp8 if "_scaled_mm" in launch["name"] else rates.bf16
        share = 1
        if group.startswith("optimizers"):
            rate = rates.newton_schulz
        if launch["phase"].startswith("optimizers"):
            share = 1 / facts["optimizer_steps"]
        if group == "attention":
            rate = rates.attention
            if launch["name"] in of_flex:
                flop = flop_of_attention(launch, facts, layers)
        seconds = max(launch["bytes"] / rates.bandwidth, flop / rate)
        if launch["kind"] == "wire":  # in a ring, which a sum goes round twice
            ranks = int(re.search(r"\d+", launch["phase"])[0])
            rounds = 2 if "all_reduce" in launch["name"] else 1
            seconds = rounds * (ranks - 1) / ranks * launch["bytes"] / rates.bus
        costs = dict(launches=1, bytes=launch["bytes"], flop=flop, ms=1000 * seconds)
        costs = Counter({name: share * x for name, x in costs.items()})
        priced.append((launch["phase"], group, costs))
    return priced


def by_group(priced: list) -> dict[str, Counter]:
    """Of a forward and backward pass, the slowest group first."""
    groups = defaultdict(Counter)
    for phase, group, costs in priced:
        if phase == "train":
            groups[group].update(costs)
    return dict(sorted(groups.items(), key=lambda item: -item[1]["ms"]))


def step_ms(priced: list, facts: dict, ranks: int) -> tuple[float, int, float]:
    """Of a step of one rank of so many, whose optimizers were traced: milliseconds of a pass, how
    many there are, and milliseconds of the optimizers and the wire."""
    times = Counter()
    for phase, _, costs in priced:
        times[phase] += costs["ms"]
    passes = facts["step_tokens"] // facts["tokens"] // ranks
    return times["train"], passes, times[f"optimizers of {ranks}"]
