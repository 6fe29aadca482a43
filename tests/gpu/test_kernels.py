"""The GPU path at the record's width, compiled for each card and counted where there is no GPU.

host_gpu/trace.py says how. Three layers have every kind of kernel that the record's eleven have;
the first stage has the most targets and the shortest sequences, the last the least of the one and
the most of the other. The first stage on sm_90 takes two minutes of one core and is marked `slow`.
All other traces are marked `cards`, those of the records after #53 among them:

    ./run.sh test -m cards
"""

import functools
import re
from pathlib import Path

import host_gpu
import pytest
import torch
from conftest import REPO
from host_gpu import cost
from host_gpu.trace import Trace, trace

import train_gpt

pytestmark = pytest.mark.skipif(host_gpu.obstacle() is not None, reason=str(host_gpu.obstacle()))

ROOT = Path(train_gpt.SCRIPT)
LATER = [path for path in sorted(REPO.glob("records/*/train_gpt.py"))
         if path.parent.name > "2025-12-22_MultiTokenPrediction"]
TRAINING = ("forward", "backward")


def few_layers_of(script: Path) -> list[str]:
    """The flags that leave a script three layers, with each kind of heads, tables and gates."""
    form = re.search(r"^LAYER_WORD = .*", script.read_text(), re.MULTILINE)[0]
    if "m?" in form:  # the steps to #92, of whose kinds of layers three do not hold all
        return ["--layers", "S0b:skip,P1eb-:saved,.sm,L2xg"]
    marks = "".join(mark for mark in (":skip", ":saved") if mark in form)
    gates = "g" if "g?" in form else ""
    first = "P" if "P" in form.partition("(")[2] else "S"
    xsa = "x" if "x?" in form else ""
    return ["--layers", f"{first}0{gates}{marks},.,L1{xsa}{gates}"]


@functools.cache
def few_layers(card: str, *flags: str, script=ROOT) -> Trace:
    return trace(card, *flags, *few_layers_of(script), script=script)


def first_stage(card: str, script=ROOT) -> Trace:
    phases = "train,validation,optimizers"
    return few_layers(card, "--stage", "0", "--phases", phases, "--binaries", script=script)


last_stage = functools.partial(few_layers, "sm_90", "--phases", "train,stages")
FIRST_STAGES = [
    pytest.param(functools.partial(first_stage, card), id=f"first-stage-{card}",
                 marks=pytest.mark.slow if card == "sm_90" else pytest.mark.cards)
    for card in host_gpu.CARDS]
FIRST_STAGES_LATER = [
    pytest.param(functools.partial(first_stage, card, script), marks=pytest.mark.cards,
                 id=f"{script.parent.name}-{card}")
    for script in LATER for card in host_gpu.CARDS]
LAST_STAGE = pytest.param(last_stage, id="last-stage-sm_90", marks=pytest.mark.cards)
every_stage = pytest.mark.parametrize("get_trace", [*FIRST_STAGES, LAST_STAGE])


def launches(found: Trace, *phases: str) -> list[dict]:
    return [x for x in found.launches if x["phase"] in phases]


def touching_logits(found: Trace, *phases: str) -> list[dict]:
    return [x for x in launches(found, *phases)
            if any(cost.is_logits(tensor, found.facts) for tensor in x["tensors"])]


# ---- graphs and kernels -----------------------------------------------------------------------


def assert_all_compile_and_fit(found: Trace):
    assert {x["name"] for x in found.binaries} == set(found.kernels)
    assert [x for x in found.binaries if "error" in x] == []
    limit = host_gpu.CARDS[found.card].shared_memory_per_block
    assert [x for x in found.binaries if x["shared"] > limit] == []


@pytest.mark.parametrize("get_trace", [*FIRST_STAGES, *FIRST_STAGES_LATER])
def test_a_script_takes_one_graph_a_stage_and_fits_each_card(get_trace):
    """Training's graph has two parts, forward and backward. The last validation has a graph of its
    own where it leaves tokens out, as from #91 on."""
    found = get_trace()
    assert found.breaks == []
    graphs = {part: n for part, n in found.graphs.items() if part != "optimizers"}
    validations = 2 if found.facts["masks_tokens"] else 1
    assert graphs == {"stage 0": 2, "within stages": 0, "validation": validations}
    assert_all_compile_and_fit(found)


@pytest.mark.cards
def test_stages_of_another_shape_take_a_graph_each_and_windows_none():
    """The window grows within the last, whose sequences are as long and whose target is one."""
    found = last_stage()
    assert found.breaks == []
    cfg = train_gpt.parse_args([])
    steps = [train_gpt.schedule(step, cfg) for step in range(cfg.num_iterations)]
    shapes = {(now.seq_len, len(now.target_weights)) for now in steps}
    expected = {f"stage {n}": 2 for n in range(len(shapes))} | {"within stages": 0}
    assert len(shapes) > 1 and found.graphs == expected


# ---- logits -------------------------------------------------------------------------------------


@every_stage
def test_logits_are_read_once_in_few_bits_and_by_compiled_kernels_alone(get_trace):
    """However many the targets. Backward, where they are read, their gradient is written: twice in
    FP8, as it is and transposed, or once in bf16."""
    found = get_trace()
    fp8 = found.facts["fp8"]
    assert fp8 == (host_gpu.CARDS[found.card].capability >= (8, 9))
    assert found.facts["targets"] == (3 if found.facts["stage"] == 0 else 1)
    logits = found.facts["tokens"] * found.facts["padded_vocab"]
    for phase, size in ("forward", 2), ("backward", 2 + (1 + 1 if fp8 else 2)):
        (kernel,) = [x for x in touching_logits(found, phase) if x["kind"] == "triton"]
        assert kernel["bytes"] == pytest.approx(size * logits, rel=1e-3)
    touching = touching_logits(found, *TRAINING, "validation")
    products = [x for x in touching if x["kind"] != "triton"]
    assert all(x["flop"] > 0 for x in products)
    assert len([x for x in products if x["phase"] != "validation"]) == 3  # y, grad_x, grad_w
    types = {tensor[0] for x in touching for tensor in x["tensors"]
             if cost.is_logits(tensor, found.facts)}
    assert types == ({"bfloat16", "float8_e5m2"} if fp8 else {"bfloat16"})


@pytest.mark.cards
@pytest.mark.parametrize("head_chunks", [2, 4, 8, 16])
def test_chunks_of_the_head_take_the_same_graphs_and_less_memory(head_chunks):
    found, whole = (few_layers("sm_90", "--phases", "train", "--head_chunks", str(n))
                    for n in (head_chunks, 1))
    assert found.breaks == []
    assert found.graphs == whole.graphs == {"stage 2": 2, "within stages": 0}
    assert found.facts["head_chunks"] == head_chunks
    logits = found.facts["tokens"] * found.facts["padded_vocab"]
    assert found.memory["kept"] < whole.memory["kept"] - 1.9 * logits


# ---- what one sequence takes ------------------------------------------------------------------


def weights_model() -> train_gpt.GPT:
    with torch.device("meta"):
        return train_gpt.GPT(train_gpt.parse_args(few_layers_of(ROOT)))


@pytest.mark.slow
def test_products_are_those_that_the_weights_ask_for():
    """For each token and weight 2 FLOP forward, and 4 backward, for the gradients of both; and of
    the smear's gate, 4 a token but the first. The rest of it is no product."""
    found = first_stage("sm_90")
    model = weights_model()
    products = sum(x["flop"] for x in launches(found, *TRAINING))
    tokens = found.facts["tokens"]
    weights = [model.lm_head.weight, *(p for p in model.blocks.parameters() if p.ndim >= 2)]
    smear = 4 * model.smear_gate.weight.numel() * (tokens - 1)
    assert products == 6 * tokens * sum(p.numel() for p in weights) + smear


@pytest.mark.slow
def test_newton_schulz_multiplies_in_bf16():
    products = [x for x in launches(first_stage("sm_90"), "optimizers") if x["flop"]]
    assert {dtype for x in products for dtype, _ in x["tensors"]} == {"bfloat16"}


@pytest.mark.slow
def test_state_is_weights_gradients_and_moments():
    """Adam has two moments of each weight, Muon one and a mean square of each row."""
    model = weights_model()
    expected = 0
    for name, p in model.named_parameters():
        itemsize = 2 if re.search("embed|gate|head", name) else 4
        if p.ndim >= 2 and name.startswith("blocks"):
            expected += itemsize * (3 * p.numel() + p.numel() // p.size(-1))
        elif p.ndim >= 2:
            expected += itemsize * 4 * p.numel()
    expected += sum(x.nbytes for x in model.buffers())
    assert first_stage("sm_90").memory["state"] == pytest.approx(expected, abs=1e4)  # the scalars


@pytest.mark.cards
def test_the_records_eleven_layers():
    found = trace("sm_90", "--phases", "train,validation", "--binaries")
    assert found.breaks == []
    assert found.graphs == {"stage 2": 2, "within stages": 0, "validation": 1}
    assert_all_compile_and_fit(found)
