"""A GPU's host never waits for it, checked without a GPU; its graphs and kernels in tests/gpu."""

from types import SimpleNamespace

import torch
from tiny_runs import tiny
from torch.nn.attention import flex_attention as flex

import train_gpt


def test_a_training_step_never_waits_for_the_device(monkeypatch):
    """By the attention of CUDA, on the meta device: its tensors have no values to wait for."""
    monkeypatch.setattr(flex, "_validate_device", lambda *qkv: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(train_gpt, "dense_mask", train_gpt.flex_mask)
    cfg = tiny(num_iterations=8, extension_steps=0, head_chunks=2)
    with torch.device("meta"):
        model = train_gpt.GPT(cfg)
        model.lm_head.use_fp8 = True
        optimizers = train_gpt.build_optimizers(model, cfg, SimpleNamespace(rank=0, world_size=1))
        for step in (0, 1, 7):  # Adam steps at odd ones; the head is tied, and not
            now = train_gpt.schedule(step, cfg)
            model.set_stage(now)
            tokens = torch.zeros(1, now.seq_len + 1, dtype=torch.int32)
            batch = tokens[:, :-1], tokens[:, 1:].long()
            train_gpt.accumulate_gradients(model, [batch], now)
            update = train_gpt.step_tied if now.tied else train_gpt.step_optimizers
            update(optimizers, now, 1)
