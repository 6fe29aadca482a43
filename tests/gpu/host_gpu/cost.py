"""Times of what a trace has counted, by a simple model: modelled from generated code, not measured.

Each launch takes as long as the slowest of three would alone: the memory with its bytes, the matrix
units with its FLOP, a launch of a tiny kernel. There is nothing between two launches. `RATES` is
all that is assumed; a read that does not go along the memory costs what another does. A launch's
group comes from its name, which Inductor makes of the operators that it fuses.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict

from host_gpu.trace import EXACT_SUMS, Trace


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a GPU does in a second, of work like ours."""

    bandwidth: float  # bytes of its memory
    bf16: float  # FLOP of products of activations and weights
    fp8: float  # FLOP of such in FP8
    newton_schulz: float  # FLOP of batches of small square products in bf16
    attention: float  # FLOP that attention's kernels execute
    bus: float  # bytes that a GPU sends to the others of its node, in a ring
    fp32: float  # FLOP of products in fp32
    qr: float  # FLOP of QR in fp32, one matrix after another


def by_data_sheet(bandwidth, bf16, fp8, fp32) -> Rates:
    """Rates that are the same shares of a card's data sheet as the H100's are of its own.

    Memory: 0.9, what copies reach. bf16: 0.68 of 989 TFLOP/s, as a large product reaches 0.8 within
    the power limit, and one of these shapes 0.85 of that. FP8: 1.6 of bf16, nanochat's log of
    2026-01-13 (this head: 16.95 to 10.31 ms). Newton-Schulz: an estimate. Attention:
    FlashAttention-3's paper has 273 to 378 TFLOP/s for Triton on an H100, head dimension 128,
    causal. Bus: rings in NCCL's tests on eight H100. fp32, without TF32: an estimate. QR: what the
    published #45 of the ladder by steps leaves for it, which takes 2,215 ms a step on one GH200.
    """
    share = bf16 / 989.4e12
    return Rates(bandwidth=bandwidth * 3.0 / 3.35, bf16=share * 672e12, fp8=fp8 / 1979e12 * 1075e12,
                 newton_schulz=share * 400e12, attention=share * 330e12, bus=370e9,
                 fp32=0.75 * fp32, qr=fp32 / 66.9e12 * 1.75e12)


# NVIDIA's data sheets: dense FLOP with sums in fp32. The A100 has no FP8.
RATES = {
    "h100": by_data_sheet(3.35e12, 989.4e12, 1979e12, 66.9e12),
    "a100": by_data_sheet(1555e9, 312e12, 312e12, 19.5e12),  # of 40 GB
    "a40": by_data_sheet(696e9, 149.7e12, 149.7e12, 37.4e12),
    "rtx4090": by_data_sheet(1008e9, 165.2e12, 330.3e12, 82.6e12),
    "rtx4060ti": by_data_sheet(288e9, 44.1e12, 88.3e12, 22.1e12),
    "rtx4070": by_data_sheet(504e9, 58.3e12, 116.6e12, 29.1e12),
    "rtx4060": by_data_sheet(272e9, 30.2e12, 60.5e12, 15.1e12)}
SLOW_SUMS = 1.15  # FP8 matmuls with exact sums take so much longer, 1.1 to 1.2: pytorch/ao, 2377
FLOOR = 2e-6  # seconds of a kernel that has almost nothing to do: an estimate, for all cards
RATES["gh200"] = dataclasses.replace(RATES["h100"], bandwidth=3.6e12)  # 0.9 of 4 TB/s
RATES["h200"] = dataclasses.replace(RATES["h100"], bandwidth=4.3e12)  # 0.9 of 4.8 TB/s

GROUPS = (  # the first whose pattern is in the launch's name
    ("attention", r"^triton_tem"),
    ("FP8 matmuls", r"aten(\.|::)_scaled_mm"),
    ("bf16 matmuls", r"aten(\.|::)(badd|add)?b?mm"),
    ("wire", r"nccl"),
    ("attention", r"flash_attention"),
    ("attention", r"flex_attention"),  # sums that its backward pass begins with
)


def is_logits(tensor: list, stage: dict) -> bool:
    """Whether a [type, shape] has the size of a chunk's logits. A gradient of the head has not."""
    shape = tensor[1]
    return math.prod(shape) >= stage["head_tokens"] * stage["width"] and (
        stage["width"] in shape or len(shape) == 1)


def group_of(launch: dict, stage: dict) -> str:
    if not launch["flop"] and any(is_logits(x, stage) for x in launch["tensors"]):
        return "loss"
    if launch["kind"] == "triton" and any(dtype.startswith("float8")
                                          for dtype, _ in launch["tensors"]):
        return "FP8 copies"
    return group_of_name(launch["name"])


def group_of_name(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "other")


def groups_by_name(trace: Trace) -> dict:
    """Groups of the kernels whose names do not tell them, for a profile of a GPU."""
    found = {}
    for name, facts in trace.facts["stages"].items():
        for launch in trace.launches:
            group = group_of(launch, facts)
            if launch["phase"] == f"pass of {name}" and group in ("loss", "FP8 copies"):
                found[launch["name"]] = group
    return found


def flop_of_attention(launch: dict, model_dim: int, pairs: float) -> float:
    """Of a FlexAttention kernel, for a layer of mean size, in pairs of blocks: 2 products forward,
    and 7 backward, as the scores and their gradients are computed for the keys' gradients and for
    the queries'."""
    products = 7 if "backward" in launch["name"] else 2
    return 2 * products * model_dim * pairs * 128**2


@dataclasses.dataclass
class Stage:
    """What a stage's steps cost, in ms: a pass by groups, and what follows the passes of a step."""

    steps: int
    tokens: int  # of a pass
    passes: int  # of a step on this rank
    groups: dict  # of a pass, the slowest first
    update_ms: float  # optimizers, on a mean step
    wire_ms: float

    @property
    def pass_ms(self) -> float:
        return sum(self.groups.values())

    @property
    def step_ms(self) -> float:
        return self.passes * self.pass_ms + self.update_ms + self.wire_ms  # nothing overlaps


def milliseconds(launch: dict, rates: Rates, flop=None, rate=None) -> float:
    """Of one launch, with the FLOP and the rate of its group where they are not its own."""
    if launch["kind"] == "wire":  # in a ring, which a sum goes round twice
        ranks = int(launch["phase"].split()[-1])
        rounds = 2 if "all_reduce" in launch["name"] else 1
        return 1000 * rounds * (ranks - 1) / ranks * launch["bytes"] / rates.bus
    flop = launch["flop"] if flop is None else flop
    if "linalg_qr" in launch["name"]:
        rate = rates.qr
    elif flop and is_in_fp32(launch):
        rate = rates.fp32
    elif "flash_attention" in launch["name"]:  # of which half is not masked
        flop, rate = flop / 2, rates.attention
    flop *= SLOW_SUMS if launch["name"].endswith(EXACT_SUMS) else 1
    rate = rate or (rates.fp8 if "_scaled_mm" in launch["name"] else rates.bf16)
    return 1000 * max(launch["bytes"] / rates.bandwidth, flop / rate, FLOOR)


def is_in_fp32(launch: dict) -> bool:
    """Whether it multiplies fp32, with no TF32."""
    return bool(launch["tensors"]) and {dtype for dtype, _ in launch["tensors"]} == {"float32"}


def price(trace: Trace, rates: Rates, ranks: int) -> list[Stage]:
    """What the noted stages cost one rank of so many, whose steps were traced."""
    by_phase = defaultdict(list)
    for launch in trace.launches:
        by_phase[launch["phase"]].append(launch)
    found = []
    for name, facts in trace.facts["stages"].items():
        launches = by_phase[f"pass of {name}"]
        of_flex = [x["name"].startswith("triton_tem") for x in launches]
        layers = sum(is_flex and "backward" not in x["name"]
                     for is_flex, x in zip(of_flex, launches))
        groups = Counter()
        for is_flex, launch in zip(of_flex, launches):
            flop, rate, group = None, None, group_of(launch, facts)
            if group == "attention":
                rate = rates.attention
            if is_flex:
                flop = flop_of_attention(launch, trace.facts["model_dim"],
                                         facts["block_pairs"] / layers)
            groups[group] += milliseconds(launch, rates, flop, rate)
        times = Counter()  # of a mean step, by the kind of launch
        for launch in by_phase[f"update of {name} on {ranks}"]:
            kind = "wire" if launch["kind"] == "wire" else "update"
            times[kind] += milliseconds(launch, rates, rate=rates.newton_schulz)
        found.append(Stage(
            facts["steps"], facts["tokens"], facts["step_tokens"] // facts["tokens"] // ranks,
            dict(groups.most_common()), times["update"] / trace.facts["period"],
            times["wire"] / trace.facts["period"]))
    return found


def averages_ms(trace: Trace, rates: Rates, ranks: int) -> float:
    """Of all averages that a run takes."""
    total = 0.0
    for launch in trace.launches:
        for name, steps in trace.facts["averages"].items():
            if launch["phase"] == f"average {name} on {ranks}":
                total += steps * milliseconds(launch, rates)
    return total


def run_ms(trace: Trace, rates: Rates, ranks: int) -> float:
    """Of a run whose stages were all traced."""
    steps = sum(each.steps * each.step_ms for each in price(trace, rates, ranks))
    return steps + averages_ms(trace, rates, ranks)
