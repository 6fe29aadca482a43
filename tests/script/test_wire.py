"""What a step sends from rank to rank, without any other rank."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tiny_runs import tiny

import train_gpt

RECORD = train_gpt.Hyperparameters()
TINY = tiny()
# Steps of the record, and the groups at rest in each: Adam steps at odd ones, the embedding is the
# head until step 1254, and most lambdas rest as the stages from 627, 1254 and 1880 begin.
ADAM = {"embed", "head", "value embeds", "smear gate", "x0 lambdas", "lambdas"}
STEPS = {0: ADAM, 1: {"embed"}, 627: {"embed", "lambdas"}, 1255: {"lambdas"}, 1295: set()}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_reduces_gradients_once_and_gathers_parameters_once(monkeypatch, step):
    """What rests sends nothing. All are under way before the first one is waited for."""
    events, sent = [], []

    def note(name):
        def begin(output, x, async_op):
            events.append(name)
            sent.append(x.data_ptr())
            return SimpleNamespace(wait=lambda: events.append("wait"))

        return begin

    monkeypatch.setattr(dist, "reduce_scatter_tensor", note("reduce"))
    monkeypatch.setattr(dist, "all_gather_into_tensor", note("gather"))
    model = train_gpt.GPT(TINY)
    optimizers = train_gpt.build_optimizers(model, TINY, SimpleNamespace(rank=7, world_size=8))
    now = train_gpt.schedule(step, RECORD)
    step_all = train_gpt.step_tied if now.tied else train_gpt.step_optimizers
    step_all(optimizers, now, 8)

    stepping = [o for o in optimizers if o.name not in STEPS[step]]
    n = len(stepping)
    assert events == ["reduce"] * n + ["wait", "gather"] * n + ["wait"] * n
    # The buffers themselves: a temporary tensor would be overwritten in mid-flight.
    expected = [o.grads for o in stepping] + [o.weights[o.mine] for o in stepping]
    assert sent == [x.data_ptr() for x in expected]
    for optimizer in optimizers:  # a rank has an eighth of the state
        assert 8 * optimizer.state["mean"].numel() == optimizer.grads.numel()
