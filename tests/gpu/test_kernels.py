"""The GPU path at the record's width, compiled for each card and counted where there is no GPU.

host_gpu/trace.py says how. Three layers have every kind of kernel that the record's eleven have. On
sm_90 its first stage takes two minutes of one core and is marked `slow`. All other traces are
marked `cards`, those of the records after #53 among them.
"""

import dataclasses
import functools
import math
import re
from pathlib import Path

import host_gpu
import pytest
import torch
from conftest import REPO
from host_gpu import cost
from host_gpu.trace import Trace, few_layers_of, trace

import train_gpt

pytestmark = pytest.mark.skipif(host_gpu.obstacle() is not None, reason=str(host_gpu.obstacle()))

ROOT = Path(train_gpt.SCRIPT)
TRAINING = "forward", "backward"
SCRIPTS = [ROOT]
for path in sorted(REPO.glob("records/*/train_gpt.py")):
    if path.parent.name > "2025-12-22_MultiTokenPrediction":
        SCRIPTS.append(path)
EACH_ON_EACH_CARD = []
for script in SCRIPTS:
    for card in host_gpu.CARDS:
        mark = pytest.mark.slow if (script, card) == (ROOT, "sm_90") else pytest.mark.cards
        name = f"{script.relative_to(REPO).parent.name}-{card}"
        EACH_ON_EACH_CARD.append(pytest.param(script, card, marks=mark, id=name))


@functools.cache
def first_stage(script: Path, card: str) -> Trace:
    """It has the most targets and the shortest sequences."""
    phases = "train,validation,optimizers"
    return trace(card, "--stage", "0", "--phases", phases, "--binaries", "--few_layers",
                 script=script)


def bytes_of(dtype: str, shape: list[int]) -> int:
    return getattr(torch, dtype).itemsize * math.prod(shape)


def launches(found: Trace, *phases: str) -> list[dict]:
    return [x for x in found.launches if x["phase"] in phases]


# ---- graphs and kernels -----------------------------------------------------------------------


def assert_one_graph_a_phase_fits(found: Trace, card: str):
    """Training's graph has two parts, forward and backward."""
    assert found.breaks == []
    assert (found.graphs["forward"], found.graphs["validation"]) == (2, 1)
    launched = {x["name"] for x in found.launches if x["kind"] == "triton"}
    assert launched <= {x["name"] for x in found.binaries}
    limit = host_gpu.CARDS[card].shared_memory_per_block
    assert max(x["shared"] for x in found.binaries) <= limit


@pytest.mark.parametrize("script, card", EACH_ON_EACH_CARD)
def test_a_script_compiles_for_a_card_and_fits_it(script, card):
    assert_one_graph_a_phase_fits(first_stage(script, card), card)


@pytest.mark.cards
def test_the_records_eleven_layers():
    found = trace("sm_90", "--phases", "train,validation", "--binaries")
    assert_one_graph_a_phase_fits(found, "sm_90")


# ---- what a trace counts, by hand ----------------------------------------------------------------


@pytest.mark.parametrize("card, fp8", [
    pytest.param("sm_90", True, marks=pytest.mark.slow),
    pytest.param("sm_80", False, marks=pytest.mark.cards)])
def test_logits_are_read_once_in_few_bits_and_by_compiled_kernels_alone(card, fp8):
    """However many the targets. Backward, where they are read, their gradient is written: twice in
    FP8, as it is and transposed, or once in bf16."""
    found = first_stage(ROOT, card)
    assert found.facts["targets"] == 3
    logits = found.facts["tokens"] * found.facts["padded_vocab"]
    types, products = set(), []
    for phase, size in ("forward", 2), ("backward", 2 + (1 + 1 if fp8 else 2)):
        kernels = []
        for x in launches(found, phase):
            of_logits = [dtype for dtype, shape in x["tensors"]
                         if cost.is_logits([dtype, shape], found.facts)]
            types.update(of_logits)
            if of_logits and x["kind"] == "triton":
                kernels.append(x)
            elif of_logits:
                products.append(x)
        assert len(kernels) == 1
        assert kernels[0]["bytes"] == pytest.approx(size * logits, rel=1e-3)
    assert len(products) == 3 and all(x["flop"] > 0 for x in products)  # y, grad_x, grad_w
    assert types == ({"bfloat16", "float8_e5m2"} if fp8 else {"bfloat16"})


@pytest.mark.slow
def test_kernels_move_what_a_count_by_hand_says():
    """Of a buffer that is sliced, that is changed in place, and that threads add to at once."""
    found = first_stage(ROOT, "sm_90")
    tokens, dim = found.facts["tokens"], found.facts["model_dim"]
    ids = ["int32", [1, tokens]]
    queries_keys_values = ["bfloat16", [tokens, 3 * dim]]
    table = ["float32", [found.facts["padded_vocab"], dim]]
    sliced, added_to, stepped = set(), set(), set()
    for x in launches(found, *TRAINING):
        if ids in x["tensors"] and queries_keys_values in x["tensors"]:
            sliced.add(x["bytes"])  # values, rows of a table, their sums
        if ids in x["tensors"] and table in x["tensors"]:
            read = [bytes_of(*tensor) for tensor in x["tensors"] if tensor != table]
            added_to.add(x["bytes"] - sum(read))
    head = ["bfloat16", [table[1][0] * dim]]
    for x in launches(found, "optimizers"):
        if x["tensors"].count(head) > 2:
            stepped.add(x["bytes"])
    assert sliced == {4 * tokens + 3 * 2 * tokens * dim}
    assert added_to == {2 * 4 * tokens * dim}  # sums read and written
    # Gradient, weights, two moments and scalars are read, and all but gradient and scalars written.
    assert stepped == {(4 + 3) * bytes_of(*head) + 12}


@pytest.mark.cards
def test_chunks_of_the_head_take_the_same_graphs_and_less_memory():
    whole, found = (
        trace("sm_90", "--phases", "train", "--head_chunks", chunks, "--few_layers")
        for chunks in "18")
    assert found.breaks == []
    assert found.graphs == whole.graphs == {"forward": 2}
    assert found.facts["head_chunks"] == 8
    logits = found.facts["tokens"] * found.facts["padded_vocab"]
    assert found.memory["kept"] < whole.memory["kept"] - 1.9 * logits


@pytest.mark.slow
def test_products_and_state_are_those_that_the_weights_ask_for():
    """For each token and weight 2 FLOP forward, and 4 backward, for the gradients of both; and of
    the smear's gate, 4 a token but the first. The rest of it is no product. Adam has two moments of
    each weight, Muon one and a mean square of each row, and multiplies in bf16."""
    found = first_stage(ROOT, "sm_90")
    with torch.device("meta"):
        layers = few_layers_of(train_gpt)
        model = train_gpt.GPT(dataclasses.replace(train_gpt.Hyperparameters(), layers=layers))
    tokens = found.facts["tokens"]
    flop = 4 * model.smear_gate.weight.numel() * (tokens - 1)
    state = sum(x.nbytes for x in model.buffers())
    for name, p in model.named_parameters():
        itemsize = 2 if re.search("embed|gate|head", name) else 4
        of_muon = p.ndim >= 2 and name.startswith("blocks")
        if of_muon or name == "lm_head.weight":
            flop += 6 * tokens * p.numel()
        if of_muon:
            state += itemsize * (3 * p.numel() + p.numel() // p.size(-1))
        elif p.ndim >= 2:
            state += itemsize * 4 * p.numel()
    assert sum(x["flop"] for x in launches(found, *TRAINING)) == flop
    assert found.memory["state"] == pytest.approx(state, abs=1e4)  # the scalars
    products = [x for x in launches(found, "optimizers") if x["flop"]]
    assert {dtype for x in products for dtype, _ in x["tensors"]} == {"bfloat16"}
