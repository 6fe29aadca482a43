"""Each stage's own limit of documents; each parameter's one optimizer and its gradient there."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lineage import RECORDS, for_each, held_since, load, tiny_flags

WITH_FP8 = [record for record in RECORDS if "class FP8Product" in record.source]
# Where the head has sampled rows, a sum over them is between its product and its weight.
OF_ALL_ROWS = [record for record in WITH_FP8 if "def candidates" not in record.source]
ONE_RANK = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))


@held_since(77)
def test_documents_are_cut_to_the_limit_of_the_steps_own_stage(record, write_shard, tmp_path):
    """In a run whose sequences all have one length, so that no length tells the stage."""
    script = load(record.folder)
    record_cfg = script.Hyperparameters()
    eot = record_cfg.eot_token
    tokens = np.random.default_rng(0).integers(0, eot, size=240_000)
    tokens[::4000] = eot  # longer than all limits
    write_shard(tmp_path / "long_0.bin", tokens)
    rows = tuple(dataclasses.replace(row, seq_len=8192) for row in record_cfg.stages)
    cfg = script.parse_args([
        "--stages", script.show(rows), "--train_files", f"{tmp_path}/long_*.bin",
        "--sequences_per_step", "1", "--sequences_per_forward", "1"])
    loader = script.TokenLoader(cfg, ONE_RANK)

    limits, expected = {}, {}  # by stage
    for step in range(cfg.num_iterations):
        now = script.schedule(step, cfg)
        if now.stage not in limits:
            ((inputs, _),) = loader.next_step(now)
            starts = np.flatnonzero(inputs.numpy().reshape(-1) == eot)
            # The last document fills what is left of the sequence.
            (limits[now.stage],) = set(np.diff(starts).tolist())
            expected[now.stage] = limit_of(record.station, step)
    assert limits == expected and len(limits) == len(record_cfg.stages) - 1
    assert limits[0] < limits[1] <= max(limits.values()) < 4000


def limit_of(station, step):
    """The tokens of a document that a step has."""
    if hasattr(station, "stage_rows"):
        return station.stage_rows[station.stage(step)].max_document
    return station.max_document if station.stage(step) else station.first_document


def optimizers_of(param, optimizers):
    """The optimizers whose buffers hold it and its gradient."""
    def holds(buffer, tensor):
        start = buffer.data_ptr()
        return start <= tensor.data_ptr() < start + buffer.nbytes

    return [optimizer for optimizer in optimizers
            if holds(optimizer.weights, param) and holds(optimizer.grads, param.grad)]


def faults_of(model, optimizers) -> list[str]:
    """Parameters that are not in one optimizer, and whether some optimizer holds more than them."""
    faults = []
    for name, param in model.named_parameters():
        found = len(optimizers_of(param, optimizers)) if param.grad is not None else 0
        if found != 1:
            faults.append(f"{name} is in {found} optimizers")
    # A table's rows are in no parameter.
    held = sum(each.numel for each in optimizers if "rows" not in getattr(each, "state", ()))
    numbers = sum(param.numel() for param in model.parameters())
    if held != numbers:
        faults.append(f"the optimizers hold {held} numbers, the model {numbers}")
    return faults


def build(script):
    cfg = tiny_flags(script, model_dim=48, head_dim=8)  # in twelve channel groups from 92b on
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    return cfg, model


@for_each(RECORDS)
def test_each_parameter_is_in_one_optimizer(record):
    script = load(record.folder)
    cfg, model = build(script)
    assert faults_of(model, script.build_optimizers(model, cfg, ONE_RANK)) == []


@for_each(RECORDS)
def test_a_parameter_of_an_unknown_group_is_an_error(record):
    script = load(record.folder)
    cfg, model = build(script)
    list(model.parameters())[-1].group = "stray"
    with pytest.raises(KeyError, match="stray"):
        script.build_optimizers(model, cfg, ONE_RANK)


@for_each(RECORDS[-1:])
def test_a_parameter_in_two_places_and_another_in_none_are_found(record, monkeypatch):
    """What counting would not see, as both have one shape."""
    script = load(record.folder)
    cfg, model = build(script)
    params = list(model.parameters())
    twice, never = [block.mlp.c_fc for block in model.blocks[:2]]
    rows = [twice if param is never else param for param in params]
    with monkeypatch.context() as patch:
        patch.setattr(model, "parameters", lambda: iter(rows))
        optimizers = script.build_optimizers(model, cfg, ONE_RANK)
    assert faults_of(model, optimizers) == ["blocks.1.mlp.c_fc is in 0 optimizers"]


def strides_of(tensor):
    """Of the dimensions that have more than one entry; the stride of any other says nothing."""
    sizes = zip(tensor.shape, tensor.stride())
    return [stride for size, stride in sizes if size > 1]


def misplaced_gradients(script, cfg, model) -> list[str]:
    """Parameters whose gradient, after a backward pass, is no contiguous view of its optimizer's
    buffer, or arrived from autograd with other strides than that view."""
    optimizers = script.build_optimizers(model, cfg, ONE_RANK)
    views = {name: param.grad for name, param in model.named_parameters()}
    arrived = {name: [] for name in views}
    for name, param in model.named_parameters():
        # A hook sees the gradient before it is added to the buffer.
        param.register_hook(lambda grad, name=name: arrived[name].append(strides_of(grad)))
    tokens = torch.randint(0, cfg.eot_token, (2, 49), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1].int(), tokens[:, 1:].contiguous()
    script.accumulate_gradients(model, [batch], script.schedule(0, cfg))

    faults = []
    for name, param in model.named_parameters():
        is_view = param.grad is views[name] and len(optimizers_of(param, optimizers)) == 1
        if not (is_view and param.grad.is_contiguous()):
            faults.append(f"{name} has a gradient of its own")
        elif any(strides != strides_of(param.grad) for strides in arrived[name]):
            faults.append(f"{name} gets a gradient of strides {arrived[name]}")
    if not any(arrived.values()):
        faults.append("no gradient arrived")
    return faults


@for_each(RECORDS)
def test_each_gradient_arrives_with_the_strides_of_its_view(record):
    """Else the sum into the buffer would be of unlike layouts, a slow kernel for the head."""
    script = load(record.folder)
    assert misplaced_gradients(script, *build(script)) == []


@for_each(WITH_FP8)
def test_so_does_that_of_the_fp8_head(record):
    script = load(record.folder)
    cfg, model = build(script)
    model.lm_head.use_fp8 = True
    assert misplaced_gradients(script, cfg, model) == []


@for_each(OF_ALL_ROWS)
def test_a_transposed_gradient_of_the_fp8_head_is_found(record, monkeypatch):
    """As the head had it while its product was the transpose of a product."""
    script = load(record.folder)
    cfg, model = build(script)
    model.lm_head.use_fp8 = True
    backward = script.FP8Product.backward

    def transposed(ctx, grad):
        grad_x, grad_w = backward(ctx, grad)
        return grad_x, grad_w.T.contiguous().T

    monkeypatch.setattr(script.FP8Product, "backward", staticmethod(transposed))
    (fault,) = misplaced_gradients(script, cfg, model)
    assert fault.startswith("lm_head.weight gets a gradient of strides")
