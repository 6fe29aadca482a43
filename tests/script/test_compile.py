"""What a GPU needs of the script, checked without one: a host that never waits.

Graphs and kernels are looked at in tests/gpu.
"""

import dataclasses
import types

import pytest
import torch
from test_model import make_model, random_tokens
from tiny_runs import tiny
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt

TINY = tiny(stages="1:256:128:128:1:3,1:512:256:128:1.5:2,1:768:384:256:1.7:1,"
                   "0:768:512:256:1.7:1,0:768:640:384:1.7:1",
            val_seq_len=640, num_iterations=8, extension_steps=0)


class HostWait(Exception):
    """The host asked for a value that a GPU would still be computing."""


class NoHostWait(TorchDispatchMode):
    """Raises HostWait at operations that make the host wait, whatever the device: a new tensor of
    several Python numbers is a copy that waits, and an index by a mask has to be counted."""

    supports_higher_order_operators = True
    waiting = set("""_local_scalar_dense item is_nonzero equal nonzero masked_select unique_dim
        _unique2 unique_consecutive bincount lift_fresh lift_fresh_copy""".split())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        masks = args[1] if name in ("index", "index_put_", "index_put") else ()
        by_mask = any(x is not None and x.dtype == torch.bool for x in masks)
        if name.startswith("lift_fresh") and args[0].ndim == 0:
            return func(*args, **(kwargs or {}))
        if name in self.waiting or by_mask:
            raise HostWait(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fp8, head_chunks", [(True, 1), (False, 2)])
def test_a_training_step_never_waits_for_the_device(monkeypatch, fp8, head_chunks):
    """By the attention of CUDA, by plain operations; a CPU refuses gradients, which it has."""
    monkeypatch.setattr(flex, "_validate_device", lambda *qkv: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(train_gpt, "dense_mask", train_gpt.flex_mask)
    model = make_model(TINY)
    model.tokens_per_chunk = 768 // head_chunks
    model.lm_head.use_fp8 = fp8
    ranks = types.SimpleNamespace(rank=0, world_size=1)
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)
    before = [p.detach().clone() for p in model.parameters()]
    for steps in (range(2), range(6, 8)):  # Adam steps at the second; the head is tied, and not
        first = train_gpt.schedule(steps[0], TINY)
        model.set_stage(first)
        tokens = random_tokens(1, first.seq_len + 1, seed=0)
        batch = tokens[:, :-1], tokens[:, 1:].long()
        update = train_gpt.step_tied if first.tied else train_gpt.step_optimizers
        with NoHostWait():
            for step in steps:
                now = dataclasses.replace(train_gpt.schedule(step, TINY), frozen=False)
                train_gpt.accumulate_gradients(model, [batch], now)
                update(optimizers, now, 1)
    changed = [not torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True)]
    assert all(changed), "nothing was trained"
