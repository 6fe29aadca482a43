"""The records after #53 on the GPU path without a GPU: losses, gradients, steps are the CPU's.

As in test_host_gpu.py, whose models and tolerances these are, kernels are interpreted. What the
records brought to a GPU is in one of these two, paired heads and Muon by pairs of heads too.
"""

import dataclasses

import pytest
import test_gpu
import test_host_gpu as host
import torch
from conftest import REPO
from lineage import load, some_prefixes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
on_the_host = host.on_the_host  # a fixture

# What differs from the sizes of the root's models.
SIZES = {
    "2026-07-13_PrefixTargets": dict(
        layers=("L0xg:skip:saved", ".", "L1g"), bigram_rows=97, bigram_width=24, sign_rows=32),
    "2026-08-30_92g_NgramTable": dict(
        layers=("S0b:skip", "P1eb-:saved", ".sm", "L0g"), ngram_rows=98, sign_rows=32, mlp_dim=96,
        channel_groups=4, model_dim=64, head_dim=32, sweep_stride=7, sweep_margin=0)}


@pytest.mark.parametrize("name", SIZES)
def test_a_step_in_fp32_is_that_of_the_cpu(name, monkeypatch):
    script = load(REPO / "records" / name, block=128)
    cfg = script.Hyperparameters()
    known = {name: value for name, value in (vars(host.TINY) | SIZES[name]).items()
             if hasattr(cfg, name)}
    row = dict(seq_len=384)
    if hasattr(cfg.stages[0], "classes"):
        row["classes"] = 240  # of 272 ids
    known["stages"] = tuple(dataclasses.replace(each, **row) for each in cfg.stages)
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
    inputs, targets = test_gpu.make_batch(cfg)
    if "classes" in row:  # while training each token has a target then
        targets.clamp_(min=0)
    if hasattr(cpu, "ngram_table"):
        give_rows(script, cfg, cpu, gpu)
    host.assert_same_step(gpu, cpu, (inputs, targets), window=2)
    if hasattr(cpu, "ngram_table"):
        assert_same_rows(script, cfg, cpu, gpu)
    host.assert_same_validation(gpu, cpu, (inputs, targets), script.store_masks)
    host.assert_same_update(gpu, cpu, cfg)


def give_rows(script, cfg, *models):
    """The same rows in each model's n-gram table, in fp32."""
    rows = torch.randn(cfg.ngram_rows, cfg.model_dim, generator=torch.Generator().manual_seed(0))
    for model in models:
        device = model.reach.device
        script.build_optimizers(model, cfg, test_gpu.one_rank(device))
        model.ngram_table.state["rows"] = rows.to(device, copy=True)


def assert_same_rows(script, cfg, cpu, gpu):
    """After a step of the rows that the last training batch read."""
    before = cpu.ngram_table.state["rows"].clone()
    for model in cpu, gpu:
        model.ngram_table.keep_gradients()
        model.ngram_table.update(script.schedule(1, cfg), divisor=1)
    changes = [model.ngram_table.state["rows"].cpu() - before for model in (cpu, gpu)]
    assert changes[0].any()
    assert test_gpu.relative_error(*reversed(changes)) < host.FP32_RTOL
