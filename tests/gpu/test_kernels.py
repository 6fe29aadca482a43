"""The GPU path at the record's width, compiled for each card and counted where there is no GPU.

host_gpu/trace.py says how. Three layers have every kind of kernel that the record's eleven have. On
sm_90 its first stage takes a minute of one core and is marked `slow`. All other traces are marked
`cards`, those of the records after #53 among them.
"""

import dataclasses
import functools
import re
from pathlib import Path

import host_gpu
import pytest
import torch
from host_gpu.trace import Trace, few_layers_of, trace
from record_folders import RECORDS, source

import train_gpt

pytestmark = pytest.mark.skipif(host_gpu.obstacle() is not None, reason=str(host_gpu.obstacle()))

ROOT = Path(train_gpt.SCRIPT)
SCRIPTS = {"root": ROOT}
for record in RECORDS:  # those by steps came later
    if record.name > "2025-12-22_MultiTokenPrediction":
        SCRIPTS[record.name] = record / "train_gpt.py"
EACH_ON_EACH_CARD = []
for name, script in SCRIPTS.items():
    for card in host_gpu.CARDS:
        mark = pytest.mark.slow if (name, card) == ("root", "sm_90") else pytest.mark.cards
        EACH_ON_EACH_CARD.append(pytest.param(script, card, marks=mark, id=f"{name}-{card}"))


@functools.cache
def first_stage(script: Path, card: str) -> Trace:
    """It has the most targets and the shortest sequences."""
    return trace(script, card=card, noted=[0], validation=True, binaries=True,
                 few_layers=True)


@pytest.mark.parametrize("script, card", EACH_ON_EACH_CARD)
def test_a_script_compiles_for_a_card_and_fits_it(script, card):
    """A graph a phase, of kernels whose blocks the card's shared memory holds."""
    found = first_stage(script, card)
    leaves_graph = script != ROOT and "torch.compiler.disable" in source(script.parent)
    assert leaves_graph or found.breaks == []
    passes = [name for name in found.graphs if name.startswith(("pass", "validation"))]
    assert len(passes) > 1 and {found.graphs[name] for name in passes} == {1}
    launched = {x["name"] for x in found.launches if x["kind"] == "triton"}
    assert launched and launched <= found.shared.keys()
    assert max(found.shared.values()) <= host_gpu.CARDS[card].shared_memory_per_block


@pytest.mark.slow
def test_products_and_state_are_those_that_the_weights_ask_for():
    """For each token and weight 2 FLOP forward, and 4 backward, for the gradients of both; and of
    the smear's gate, 4 a token but the first. The rest of it is no product. Adam has two moments of
    each weight, Muon one and a mean square of each row."""
    found = first_stage(ROOT, "sm_90")
    with torch.device("meta"):
        layers = few_layers_of(train_gpt)
        model = train_gpt.GPT(dataclasses.replace(train_gpt.Hyperparameters(), layers=layers))
    tokens = found.facts["stages"]["0"]["tokens"]
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
    assert sum(x["flop"] for x in found.launches if x["phase"] == "pass of 0") == flop
    assert found.memory["state"] == pytest.approx(state, abs=1e4)  # the scalars
