"""What a step asks of a GPU and of the wire between them, without any."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tiny_runs import tiny
from torch.nn.attention import flex_attention as flex

import train_gpt

RECORD = train_gpt.Hyperparameters()
TINY = tiny()
# Steps of the record, and the groups at rest in each: Adam steps at odd ones, the embedding is the
# head until step 1254, and most lambdas rest as the stages from 627, 1254 and 1880 begin.
ADAM = {"embed", "head", "value embeds", "smear gate", "x0 lambdas", "lambdas"}
STEPS = {0: ADAM, 1: {"embed"}, 627: {"embed", "lambdas"}, 1255: {"lambdas"}, 1295: set()}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_reduces_gradients_once_and_gathers_parameters_once(monkeypatch, step):
    """What rests sends nothing. All are under way before the first one is waited for, since these
    collectives say at once that they are."""
    events, sent = [], []

    def collective(name):
        def begin(output, x, async_op):
            events.append(name)
            sent.append(x)
            if name == "reduce":
                output.fill_(torch.nan)  # no numbers until it is waited for
            return SimpleNamespace(wait=lambda: end(output))

        def end(output):
            events.append("wait")
            if name == "reduce":
                output.fill_(0.5)

        return begin

    monkeypatch.setattr(dist, "reduce_scatter_tensor", collective("reduce"))
    monkeypatch.setattr(dist, "all_gather_into_tensor", collective("gather"))
    model = train_gpt.GPT(TINY)
    model.init_weights(torch.Generator())
    optimizers = train_gpt.build_optimizers(model, TINY, SimpleNamespace(rank=7, world_size=8))
    now = train_gpt.schedule(step, RECORD)
    step_all = train_gpt.step_tied if now.tied else train_gpt.step_optimizers
    step_all(optimizers, now, 8)

    stepping = [o for o in optimizers if o.name not in STEPS[step]]
    n = len(stepping)
    assert events == ["reduce"] * n + ["wait", "gather"] * n + ["wait"] * n
    assert all(o.weights.isfinite().all() for o in optimizers), "by gradients that have come"
    # The buffers themselves: a temporary tensor would be overwritten in mid-flight.
    expected = [o.grads.data_ptr() for o in stepping]
    expected += [o.weights[o.mine].data_ptr() for o in stepping]
    assert [x.data_ptr() for x in sent] == expected
    for optimizer in optimizers:  # a rank has an eighth of the state
        assert 8 * optimizer.state["mean"].numel() == optimizer.grads.numel()


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
            batch = train_gpt.Batch(tokens[:, :-1], tokens[:, 1:].long())
            train_gpt.accumulate_gradients(model, [batch], now)
            update = train_gpt.step_tied if now.tied else train_gpt.step_optimizers
            update(optimizers, now, 1)
