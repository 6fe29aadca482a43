"""What a GPU needs of the script, checked without one: a graph a stage, a host that never waits.

FlexAttention has no backward pass on a CPU only because torch refuses it there; where that check is
lifted, the attention and the masks that CUDA takes are traced and computed as they are, slowly.
"""

import dataclasses
import itertools
import types

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from conftest import TINY_MODEL
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt

TINY = dataclasses.replace(
    train_gpt.Hyperparameters(), **TINY_MODEL, attention_pattern="L.S", value_embed_pattern="0..",
    skip_layer=0, seq_lens=(256, 512, 768), val_seq_len=640, num_iterations=8, extension_steps=0,
    long_windows=(1, 2, 3, 4, 5), short_windows=(1, 1, 2, 2, 3))
STEPS = (0, 2, 3, 6, 8)  # the first two of one stage, the last with a window of its own
SHAPES = 3  # of a forward pass: three, two and one targets; a third, two and all of the length
# Sums of fp32 in another order; by FP8, a value between two steps may round to the other one.
FP32_RTOL, FP8_RTOL = 1e-5, 1e-3


def as_the_kernel_sees(mask):
    """The same mask, its blocks' lists part of the predicate: a CPU asks it about every pair of
    tokens, the kernel only within the partial blocks; of a full one it sees all."""

    def listed(count, indices):
        blocks = torch.arange(indices.size(-1))
        first = torch.where(blocks < count[0, 0, :, None], indices[0, 0].long(), len(blocks))
        chosen = torch.zeros(len(blocks), len(blocks) + 1, dtype=torch.bool)
        return chosen.scatter(1, first, True)

    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)

    def seen(b, h, q, k):
        block = q // train_gpt.BLOCK, k // train_gpt.BLOCK
        return full[block] | (partial[block] & mask.mask_mod(b, h, q, k))

    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        BLOCK_SIZE=train_gpt.BLOCK, mask_mod=seen)


@pytest.fixture
def flex_everywhere(monkeypatch):
    """The attention of CUDA on a CPU."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *qkv: None)
    flex_mask = train_gpt.flex_mask
    monkeypatch.setattr(train_gpt, "dense_mask", lambda *args: as_the_kernel_sees(flex_mask(*args)))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_model(head_chunks=1, fp8=False):
    model = train_gpt.GPT(TINY)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.any() or "head" in name:  # before training they are zero, or nearly
                param.normal_(std=0.1, generator=generator)
        model.embed.weight.copy_(model.lm_head.weight)
    model.tokens_per_piece = max(TINY.seq_lens) // head_chunks
    model.lm_head.use_fp8 = fp8
    return model


def make_batch(length, seed=1):
    """One sequence as inputs and targets: two short documents, and one that exceeds the windows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TINY.eot_token, (1, length + 1), generator=generator)
    tokens[:, 50] = tokens[:, 100] = TINY.eot_token
    return tokens[:, :-1].int(), tokens[:, 1:].clone()


def gradients(model, now):
    """The loss of a training sequence, and its gradients."""
    model.zero_grad()
    losses = train_gpt.accumulate_gradients(model, [make_batch(now.seq_len)], now)
    return losses[0], {name: p.grad.clone() for name, p in model.named_parameters()}


def train_and_validate(model, step):
    """Loss and gradients of a training sequence, and the loss of a validation sequence."""
    now = train_gpt.schedule(step, TINY)
    model.set_stage(now.stage)
    loss, grads = gradients(model, now)
    with torch.no_grad():
        val_loss = model.eval()(*make_batch(TINY.val_seq_len, seed=2))
    model.train()
    return loss, val_loss, grads


# ---- one graph --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("head_chunks, fp8", [(1, True), (2, False)])
def test_a_stage_takes_one_graph_and_equals_the_dense_formula(
    flex_everywhere, monkeypatch, head_chunks, fp8
):
    """One graph for each shape of training, whatever the window and the targets' weights, and one
    for validation; a graph break is an error by `fullgraph`."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = make_model(head_chunks, fp8)
    compiled.compile(fullgraph=True, dynamic=False, backend=counter)
    results = {step: train_and_validate(compiled, step) for step in STEPS}
    assert counter.frame_count == SHAPES + 1

    monkeypatch.undo()
    eager = make_model(head_chunks, fp8)
    for step in STEPS:
        loss, val_loss, grads = train_and_validate(eager, step)
        flex_loss, flex_val_loss, flex_grads = results[step]
        rtol = FP8_RTOL if fp8 else FP32_RTOL
        torch.testing.assert_close(flex_loss, loss, rtol=rtol, atol=0)
        torch.testing.assert_close(flex_val_loss, val_loss, rtol=FP32_RTOL, atol=0)
        # A lambda's gradient is a sum of products that cancel: its error is that of the terms.
        of_scalars = max(grad.norm() for grad in grads.values() if grad.ndim < 2)
        eager.windows -= 1
        _, narrow_grads = gradients(eager, train_gpt.schedule(step, TINY))
        for name, grad in grads.items():
            error = (flex_grads[name] - grad).norm()
            assert error < 10 * rtol * (grad.norm() if grad.ndim > 1 else of_scalars), name
            if "0.attn.qkv" in name:  # or the comparison says nothing of the window
                assert (narrow_grads[name] - grad).norm() > 10 * rtol * grad.norm(), name


# ---- the host never waits ---------------------------------------------------


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
def test_a_training_step_never_waits_for_the_device(flex_everywhere, monkeypatch, fp8, head_chunks):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model = make_model(head_chunks, fp8)
    ranks = types.SimpleNamespace(rank=0, world_size=1)
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)
    before = [p.detach().clone() for p in model.parameters()]
    for steps in (range(2), range(6, 8)):  # Adam steps at the second; the head is tied, and not
        first = train_gpt.schedule(steps[0], TINY)
        model.set_stage(first.stage)
        batch = make_batch(first.seq_len)
        with NoHostWait():
            for step in steps:
                now = dataclasses.replace(train_gpt.schedule(step, TINY), frozen=False)
                train_gpt.accumulate_gradients(model, [batch], now)
                train_gpt.step_optimizers(optimizers, now, 1)
    changed = [not torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True)]
    assert all(changed), "nothing was trained"


class OnCuda(Tensor):
    """A CPU tensor that says it is on CUDA, as does all that is computed from it."""

    is_cuda = True


def test_health_is_read_one_step_late_on_cuda(monkeypatch):
    """While the host reads the news of a step, the GPU has the whole next one to do."""
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
    health = train_gpt.Health(types.SimpleNamespace(all_gather=lambda news: news[None]))
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
