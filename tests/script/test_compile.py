"""What a GPU needs of the script, checked without one: a host that never waits.

Graphs and kernels are looked at in tests/gpu.
"""

import dataclasses
import itertools
import types

import pytest
import torch
from test_model import OnCuda, make_model, random_tokens
from tiny_runs import tiny
from torch import Tensor
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


def test_health_is_read_one_step_late_on_cuda(monkeypatch):
    """While the host reads what is pending of a step, the GPU has the whole next one to do."""
    calls, numbers = [], itertools.count()

    def record_event():
        number = next(numbers)
        calls.append(f"record {number}")
        return types.SimpleNamespace(synchronize=lambda: calls.append(f"wait {number}"))

    def copy(rows, device, non_blocking=False):
        assert device == "cpu" and non_blocking
        calls.append("copy")
        return rows.as_subclass(Tensor)

    monkeypatch.setattr(train_gpt.signal, "signal", lambda *args: None)
    stream = types.SimpleNamespace(record_event=record_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(OnCuda, "to", copy)
    health = train_gpt.LossExchange(types.SimpleNamespace(all_gather=lambda row: row[None]))
    first, second, bad = torch.tensor([[5, 3], [4, 2], [torch.inf, 1]]).as_subclass(OnCuda)
    with NoHostWait():
        health.check(0, first)
    health.told_to_stop = True
    health.check(1, second)
    assert calls == ["copy", "record 0", "copy", "record 1", "wait 0"]
    assert (health.losses, health.stopping) == ([5.0, 3.0], False)
    health.check(2, bad)
    assert (health.losses, health.stopping) == ([4.0, 2.0], True)
    with pytest.raises(train_gpt.UserError, match="step 2: the loss is inf; lower"):
        health.read()
    assert calls[-1] == "wait 2"
