"""Bytes on the wire, bytes in memory, and what the script chooses for a GPU, without any GPU.

Collectives go through torch's fake process group, which says at once that all is done: the sizes of
what would be sent are those of one rank among N, and nothing needs N processes.
"""

import dataclasses
import gc
import math
import types
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_gpt

RECORD = train_gpt.Hyperparameters()
TINY = dataclasses.replace(
    RECORD, device="cpu", vocab_size=257, eot_token=256, model_dim=32, head_dim=16,
    attention_pattern="LS.", value_embed_pattern="0.1", skip_layer=0, backout_layer=1,
    seq_lens=(256,), val_seq_len=256)
# Steps of the record, and the groups at rest in each: Adam steps at odd ones, the embedding is the
# head until step 1254, and most lambdas rest as the stages from 627, 1254 and 1880 begin.
ADAM = {"embed", "head", "value embeds", "smear gate", "x0 lambdas", "lambdas"}
TIED, UNTIED = 1, 1295
STEPS = {
    0: ADAM, TIED: {"embed"}, 627: {"embed", "lambdas"}, 1252: ADAM, 1253: {"embed"},
    1255: {"lambdas"}, UNTIED: set(), 1919: {"lambdas"}}
# What in torch.distributed sends tensors; a step calls none but these two.
REDUCE, GATHER = "reduce_scatter_tensor", "all_gather_into_tensor"
OTHERS = """all_reduce broadcast reduce send isend all_gather gather scatter reduce_scatter barrier
    all_to_all all_to_all_single all_gather_object broadcast_object_list""".split()


class Wire:
    """What one rank handed to collectives, in order: name and bytes."""

    def __init__(self, monkeypatch):
        self.calls, self.works, self.tensors, self.waited = [], [], [], 0
        for name in (REDUCE, GATHER):
            monkeypatch.setattr(dist, name, self.wrap(name, getattr(dist, name)))
        for name in OTHERS:
            monkeypatch.setattr(dist, name, None)

    def wrap(self, name, collective):
        def counted(output, sent, **kwargs):
            self.calls.append((name, sent.nbytes))
            self.tensors += [output.data_ptr(), sent.data_ptr()]
            work = collective(output, sent, **kwargs)
            if kwargs.get("async_op"):
                work = Work(self, output if name == REDUCE else None)
                self.works.append(weakref.ref(work))
            return work

        return counted

    def bytes(self, name):
        return sum(nbytes for called, nbytes in self.calls if called == name)


class Work:
    """The handle of an asynchronous collective. Gradients are no numbers until it is waited for."""

    def __init__(self, wire, gradients):
        self.wire, self.waited, self.gradients = wire, False, gradients
        if gradients is not None:
            gradients.fill_(torch.nan)

    def wait(self):
        self.wire.waited += not self.waited
        self.waited = True
        if self.gradients is not None:
            self.gradients.fill_(0.5)


@pytest.fixture
def one_of(monkeypatch):
    """`one_of(world_size, rank)` makes this process one rank among so many fake ones."""
    init = dist.init_process_group

    def start(world_size, rank=0):
        for key, value in dict(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=0).items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: init(
            "fake", store=FakeStore(), rank=rank, world_size=world_size))
        return train_gpt.Ranks(TINY)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(cfg):
    """As on CUDA: embeddings, head and gates in bf16, all else in fp32."""
    model = train_gpt.GPT(cfg)
    gates = [block.attn.attn_gate for block in model.blocks if block.attn]
    tables = model.value_embeds.values()
    for module in (model.embed, *tables, model.lm_head, model.smear_gate, *gates):
        module.weight = torch.nn.Parameter(module.weight.bfloat16())
    return model


def padded_bytes(model, world_size):
    """By arithmetic alone: bytes of each group, padded to whole units on each rank: matrices of a
    shape and a type of Muon's, numbers of Adam's."""
    adam = {"lm_head": "head", "value_embeds": "value embeds", "smear_gate": "smear gate"}
    counts, total = Counter(), Counter()
    for name, param in model.named_parameters():
        kind, unit = name.partition(".")[0], ()
        group = adam.get(kind, kind)
        if name.startswith("blocks.") and param.ndim >= 2:
            group, unit = "muon", param.shape[-2:]
        elif "lambda" in name:
            group = "x0 lambdas" if "x0_lambda" in name else "lambdas"
        size = math.prod(unit)
        counts[group, unit, size * param.element_size()] += param.numel() // size
    for (group, _, nbytes), count in counts.items():
        total[group] += math.ceil(count / world_size) * world_size * nbytes
    return total


# Bytes on the wire


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_step_reduces_gradients_once_and_gathers_parameters_once(
    one_of, monkeypatch, world_size, step
):
    """What rests sends nothing; the head takes the tied embedding's gradients along."""
    ranks = one_of(world_size, rank=world_size - 1)
    model = make_model(TINY)
    model.init_weights(torch.Generator())
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)
    monkeypatch.setattr(train_gpt.signal, "signal", lambda *args: None)
    health = train_gpt.Health(ranks)
    wire = Wire(monkeypatch)
    health.check(0, torch.ones(2))
    news, wire.calls = wire.calls, []
    now = train_gpt.schedule(step, RECORD)
    step_all = train_gpt.step_tied if now.tied else train_gpt.step_optimizers
    step_all(optimizers, now, world_size)

    expected, resting = padded_bytes(model, world_size), STEPS[step]
    sent = sum(expected[kind] for kind in expected.keys() - resting)
    assert wire.bytes(REDUCE) == sent
    assert wire.bytes(GATHER) == sent / world_size  # this rank's share
    stepping = len(optimizers) - len(resting)
    assert [name for name, _ in wire.calls] == [REDUCE] * stepping + [GATHER] * stepping
    assert wire.waited == len(wire.works) == 2 * stepping, "each has ended when the step has"
    assert all(o.weights.isfinite().all() for o in optimizers), "by gradients that have come"
    assert news == [(GATHER, 12)], "two losses and a signal in fp32"


def test_collectives_get_buffers_that_live_as_long_as_the_optimizer(one_of, monkeypatch):
    """A tensor freed before its collective has ended is overwritten in mid-flight."""
    optimizers = train_gpt.build_optimizers(make_model(TINY), TINY, one_of(2))
    wire = Wire(monkeypatch)
    owned = [x.untyped_storage() for o in optimizers for x in (o.weights, o.grads, o.my_grad)]

    def lives(pointer):
        return any(x.data_ptr() <= pointer < x.data_ptr() + x.nbytes() for x in owned)

    for optimizer in optimizers:
        optimizer.reduce()
    gc.collect()
    assert len(wire.works) == len(optimizers) and wire.waited == 0, "waited for too early"
    assert all(work() for work in wire.works)
    for optimizer in optimizers:
        optimizer.update(train_gpt.schedule(UNTIED, RECORD), 2)
    gc.collect()
    gathers = wire.works[len(optimizers) :]
    assert wire.waited == len(gathers) == len(optimizers), "each reduction, and no gathering yet"
    assert all(work() and not work().waited for work in gathers)
    assert all(map(lives, wire.tensors)), "a temporary tensor was sent"


# What is chosen for a GPU


@pytest.fixture
def build_on(monkeypatch):
    """`build_on(...)`: the record's model without weights, as it is built for such a GPU."""
    def build(capability=(9, 0), shared_kib=227, memory_gb=84.0, **changes):
        properties = types.SimpleNamespace(
            shared_memory_per_block_optin=shared_kib * 1024, total_memory=int(memory_gb * 1e9))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        cfg = dataclasses.replace(RECORD, **changes)
        with torch.device("meta"):
            model = train_gpt.GPT(cfg)
        model.init_weights = lambda generator: None
        model.compile = lambda **flags: vars(model).update(flags)
        ranks = types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cuda", 0))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "Generator", lambda device: torch.default_generator)
            patch.setattr(train_gpt, "GPT", lambda cfg: model)
            patch.setattr(train_gpt, "build_optimizers", lambda *args: [])
            train_gpt.build(cfg, ranks)
        assert model.dynamic is False, "compiled for the shapes that come, or not at all"
        return model

    return build


@pytest.mark.parametrize("capability, shared_kib, memory_gb, chunks, fp8, small", [
    ((9, 0), 227, 84, 1, True, False), ((10, 0), 227, 192, 1, True, False),
    ((8, 0), 163, 41.5, 2, False, False), ((8, 6), 99, 24.8, 3, False, True),
    ((8, 9), 99, 16, 5, True, True), ((8, 6), 99, 12, 6, False, True),
], ids=["H100", "B200", "A100", "3090", "4080", "3060"])
def test_what_a_card_gets(build_on, capability, shared_kib, memory_gb, chunks, fp8, small):
    """Logits of 80 GB cards are one piece, as published. A smaller card takes as many as needed,
    one with little shared memory small blocks in the backward pass.
    """
    model = build_on(capability, shared_kib, memory_gb)
    assert model.head_chunks == chunks
    assert chunks - 1 < 49152 / model.tokens_per_piece <= chunks
    assert model.tokens_per_piece % 128 == 0
    assert (model.lm_head.use_fp8, model.head_type) == (fp8, "fp8" if fp8 else "bf16")
    options = train_gpt.SMALL_TILES if small else None
    assert all(block.attn.kernel_options == options for block in model.blocks if block.attn)


def test_flags_decide_the_heads_pieces_and_type_and_embeddings_head_and_gates_are_bf16(build_on):
    model = build_on(head_chunks=3, fp8_head=False)
    assert (model.head_chunks, model.tokens_per_piece) == (3, 16384)
    assert (model.lm_head.use_fp8, model.head_type) == (False, "bf16")
    kinds = {name: param.dtype for name, param in model.named_parameters()}
    assert {name for name, dtype in kinds.items() if dtype == torch.bfloat16} == {
        "embed.weight", *(f"value_embeds.{i}.weight" for i in range(3)), "lm_head.weight",
        "smear_gate.weight", *(f"blocks.{i}.attn.attn_gate.weight" for i in range(11) if i != 6)}
