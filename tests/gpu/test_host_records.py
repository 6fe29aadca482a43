"""The records after #53 on the GPU path without a GPU: loss and gradients are those of the CPU.

As in test_host_gpu.py, whose models and tolerances these are, kernels are interpreted.
"""

import dataclasses

import pytest
import test_host_gpu as host
from conftest import REPO
from lineage import load, some_prefixes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
on_the_host = host.on_the_host  # a fixture

# What differs from the sizes of the root's models; all that a record has new is in them.
SIZES = {
    "2026-01-07_PairedHeads": dict(attention_pattern="PL."),
    "2026-02-03_ValueTables": dict(
        attention_pattern="PL.", value_embed_pattern="01.", bigram_rows=97),
    "2026-04-08_HeadPairMuon": dict(
        attention_pattern="P.L", value_embed_pattern="0.1", bigram_rows=97,
        max_document_tokens=(0,)),
    "2026-07-13_PrefixTargets": dict(
        attention_pattern="L.L", value_embed_pattern="0.1", xsa_pattern="X..", gate_pattern="G.G",
        bigram_rows=97, bigram_width=24, sign_rows=32, max_document_tokens=(0,))}


@pytest.mark.parametrize("name", SIZES)
def test_a_step_in_fp32_is_that_of_the_cpu(name, monkeypatch):
    script = load(REPO / "records" / name, block=128)
    sizes = dataclasses.asdict(host.TINY)
    sizes.pop("freeze_steps")
    cfg = script.Hyperparameters(**sizes | SIZES[name])
    monkeypatch.setattr(host, "train_gpt", script)
    monkeypatch.setattr(host, "TINY", cfg)
    cpu = host.make_model(cfg)
    gpu = host.in_fp32(cpu, cfg)
    if hasattr(cpu, "prefixes"):
        assert (cpu.prefixes[: cfg.vocab_size].numpy() == some_prefixes(cfg.vocab_size)).all()
        gpu.prefixes.copy_(cpu.prefixes)
    host.assert_same_step(gpu, cpu, host.make_batch(cfg), window=2)
