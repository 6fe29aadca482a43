"""The records after #53 on the GPU path without a GPU: losses, gradients, steps are the CPU's.

As in test_host_gpu.py, whose models and tolerances these are, kernels are interpreted. Each thing
that a record brought is in one of the models: what the others brought, these three have too.
"""

import dataclasses

import pytest
import test_gpu
import test_host_gpu as host
from conftest import REPO
from lineage import load, some_prefixes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
on_the_host = host.on_the_host  # a fixture

# What differs from the sizes of the root's models.
SIZES = {
    "2026-01-07_PairedHeads": dict(layers=("P0:skip:saved", "L", ".")),
    "2026-04-08_HeadPairMuon": dict(
        layers=("P0:skip:saved", ".", "L1"), bigram_rows=97),
    "2026-07-13_PrefixTargets": dict(
        layers=("L0xg:skip:saved", ".", "L1g"), bigram_rows=97, bigram_width=24, sign_rows=32),
    "2026-08-30_92c_AnvilMuon": dict(
        layers=("S0b:skip", "P1eb-:saved", ".sm", "L0g"), bigram_rows=97, bigram_width=24,
        sign_rows=32, mlp_dim=96, channel_groups=4, model_dim=64, head_dim=32)}


@pytest.mark.parametrize("name", SIZES)
def test_a_step_in_fp32_is_that_of_the_cpu(name, monkeypatch):
    script = load(REPO / "records" / name, block=128)
    cfg = script.Hyperparameters()
    stages = tuple(dataclasses.replace(row, seq_len=384) for row in cfg.stages)
    sizes = vars(host.TINY) | dict(stages=stages) | SIZES[name]
    known = {name: value for name, value in sizes.items() if hasattr(cfg, name)}
    cfg = dataclasses.replace(cfg, **known)
    monkeypatch.setattr(test_gpu, "train_gpt", script)
    cpu = test_gpu.make_model(cfg)
    gpu = host.in_fp32(cpu, cfg)
    if hasattr(cpu, "prefixes"):
        cpu.read_tables()
        assert (cpu.prefixes[: cfg.vocab_size].numpy() == some_prefixes(cfg.vocab_size)).all()
        gpu.prefixes.copy_(cpu.prefixes)
    if hasattr(cpu, "forbidden"):  # masked, as a new model is in its last stage
        gpu.forbidden = cpu.forbidden.to(gpu.reach.device)
    host.assert_same_step(gpu, cpu, test_gpu.make_batch(cfg), window=2)
    host.assert_same_validation(gpu, cpu, test_gpu.make_batch(cfg), script.store_masks)
    host.assert_same_update(gpu, cpu, cfg)
