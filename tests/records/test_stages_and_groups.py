"""Each stage's own limit of documents; each parameter's one optimizer."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lineage import RECORDS, for_each, held_since, load, tiny_flags

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
    cfg = tiny_flags(script)
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
