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
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir
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
    1255: {"lambdas"}, UNTIED: set(), 1919: {"lambdas"},
}
# Everything in torch.distributed that sends tensors, and which argument it sends.
COLLECTIVES = dict(
    all_reduce=0, broadcast=0, reduce=0, send=0, isend=0, all_gather=1, gather=0, scatter=0,
    all_gather_into_tensor=1, reduce_scatter_tensor=1, reduce_scatter=1, all_to_all=1,
    all_to_all_single=1, all_gather_object=1, broadcast_object_list=0, barrier=None)


class Wire:
    """What one rank handed to collectives, in order: name, elements, bytes."""

    def __init__(self, monkeypatch):
        self.calls, self.works, self.tensors, self.waited = [], [], [], 0
        for name, index in COLLECTIVES.items():
            monkeypatch.setattr(dist, name, self.wrap(name, index, getattr(dist, name)))

    def wrap(self, name, index, collective):
        def counted(*args, **kwargs):
            assert index is not None, f"{name} sends what this test cannot count"
            sent = args[index]
            self.calls.append((name, sent.numel(), sent.nbytes))
            self.tensors += [x.data_ptr() for x in args[: index + 1]]
            work = collective(*args, **kwargs)
            if kwargs.get("async_op"):
                work = Work(self)
                self.works.append(weakref.ref(work))
            if name == "reduce_scatter_tensor":
                work.output, _ = args
                work.output.fill_(torch.nan)
            return work

        return counted

    def bytes(self, name):
        return sum(nbytes for called, _, nbytes in self.calls if called == name)


class Work:
    """The handle of an asynchronous collective. Gradients are no numbers until it is waited for."""

    def __init__(self, wire):
        self.wire, self.waited, self.output = wire, False, None

    def wait(self):
        self.wire.waited += not self.waited
        self.waited = True
        if self.output is not None:
            self.output.fill_(0.5)


@pytest.fixture
def one_of(monkeypatch):
    """`one_of(world_size, rank)` makes this process one rank among so many fake ones."""
    init = dist.init_process_group

    def start(world_size, rank=0):
        for key, value in dict(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=0).items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: init(
            "fake", store=FakeStore(), rank=rank, world_size=world_size))
        monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(FakeStore(), rank, world_size)]))
        return train_gpt.Ranks(TINY)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(cfg):
    """As on CUDA: embeddings, head and gates in bf16, all else in fp32."""
    model = train_gpt.GPT(cfg)
    gates = [block.attn.attn_gate for block in model.blocks if block.attn]
    for module in (model.embed, *model.value_embeds, model.lm_head, model.smear_gate, *gates):
        module.weight = torch.nn.Parameter(module.weight.bfloat16())
    return model


def padded_bytes(model, world_size):
    """By arithmetic alone: bytes of each group, padded to whole units on each rank.

    Muon's units are matrices of a shape and a type, Adam's are numbers.
    """
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
    train_gpt.step_optimizers(optimizers, train_gpt.schedule(step, RECORD), world_size)

    expected, resting = padded_bytes(model, world_size), STEPS[step]
    sent = sum(expected[kind] for kind in expected.keys() - resting)
    assert wire.bytes("reduce_scatter_tensor") == sent
    assert wire.bytes("all_gather_into_tensor") == sent / world_size  # this rank's share
    names = [name for name, *_ in wire.calls]
    stepping = len(optimizers) - len(resting)
    assert names == ["reduce_scatter_tensor"] * stepping + ["all_gather_into_tensor"] * stepping
    assert wire.waited == len(wire.works) == 2 * stepping, "each has ended when the step has"
    assert all(o.weights.isfinite().all() for o in optimizers), "by gradients that have arrived"
    # Each rank hands out one row: two losses and a signal, all in fp32.
    assert news == [("all_gather_into_tensor", 3, 12)]


def test_collectives_get_buffers_that_live_as_long_as_the_optimizer(one_of, monkeypatch):
    """A tensor freed before its collective has ended is overwritten in mid-flight."""
    optimizers = train_gpt.build_optimizers(make_model(TINY), TINY, one_of(2))
    wire = Wire(monkeypatch)
    owned = [x.untyped_storage() for o in optimizers for x in (o.weights, o.grads, o.grad)]

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


def test_a_restarted_group_does_not_find_the_addresses_of_dead_ranks(monkeypatch):
    """torchrun keeps its store from attempt to attempt."""
    kept, stores = dist.HashStore(), []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(kept, 0, 2)]))
        monkeypatch.setattr(dist, "init_process_group",
                            lambda backend, store, **_: stores.append(store))
        train_gpt.Ranks(TINY)
    stores[0].set("address", "of a rank that is dead now")
    assert stores[0].check(["address"]) and not stores[1].check(["address"])


# What is chosen for a GPU


@pytest.fixture
def pretend_gpu(monkeypatch):
    """`pretend_gpu(capability, shared_kib, memory_gb)` lets torch.cuda describe such a GPU."""
    def pretend(capability=(9, 0), shared_kib=227, memory_gb=84.0):
        properties = types.SimpleNamespace(
            shared_memory_per_block_optin=shared_kib * 1024, total_memory=int(memory_gb * 1e9))
        for name, value in dict(
            get_device_capability=capability, get_device_properties=properties, device_count=1,
            set_device=None, is_bf16_supported=capability >= (8, 0),
        ).items():
            monkeypatch.setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unchanged")
    return pretend


def prepared(**changes):
    """The record's model as it is built for the GPU at hand, without weights."""
    cfg = dataclasses.replace(RECORD, **changes)
    ranks = types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cuda", 0))
    with torch.device("meta"):
        model = train_gpt.GPT(cfg)
    model.init_weights = lambda generator: None
    model.compile = lambda **flags: vars(model).update(flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", lambda device: torch.default_generator)
        patch.setattr(train_gpt, "GPT", lambda cfg: model)
        patch.setattr(train_gpt, "build_optimizers", lambda *args: [])
        train_gpt.build(cfg, ranks)
    assert model.dynamic is False, "compiled for the shapes that come, or not at all"
    return model


@pytest.mark.parametrize("card, capability, shared_kib, memory_gb, chunks, fp8, small", [
    ("H200", (9, 0), 227, 151, 1, True, False),
    ("H100", (9, 0), 227, 84, 1, True, False),
    ("B200", (10, 0), 227, 192, 1, True, False),
    ("A100", (8, 0), 163, 41.5, 2, False, False),
    ("3090", (8, 6), 99, 24.8, 3, False, True),
    ("4090", (8, 9), 99, 24.8, 3, True, True),
    ("4080", (8, 9), 99, 16, 5, True, True),
    ("3060", (8, 6), 99, 12, 6, False, True),
])
def test_what_a_card_gets(
    pretend_gpu, card, capability, shared_kib, memory_gb, chunks, fp8, small
):
    """Logits of 80 GB cards are one piece, as published. A smaller card takes as many as needed,
    one with little shared memory small blocks in the backward pass.
    """
    pretend_gpu(capability, shared_kib, memory_gb)
    model = prepared()
    assert model.head_chunks == chunks
    assert chunks - 1 < 49152 / model.tokens_per_piece <= chunks
    assert model.tokens_per_piece % 128 == 0
    assert (model.lm_head.use_fp8, model.head_type) == (fp8, "fp8" if fp8 else "bf16")
    options = train_gpt.SMALL_TILES if small else None
    assert all(block.attn.kernel_options == options for block in model.blocks if block.attn)

    given = prepared(head_chunks=3, fp8_head=False)
    assert (given.head_chunks, given.tokens_per_piece) == (3, 16384)
    assert (given.lm_head.use_fp8, given.head_type) == (False, "bf16")


def test_embeddings_head_and_gates_are_bf16(pretend_gpu):
    pretend_gpu()
    kinds = {name: param.dtype for name, param in prepared().named_parameters()}
    assert {name for name, dtype in kinds.items() if dtype == torch.bfloat16} == {
        "embed.weight", *(f"value_embeds.{i}.weight" for i in range(3)), "lm_head.weight",
        "smear_gate.weight", *(f"blocks.{i}.attn.attn_gate.weight" for i in range(11) if i != 6)}


def test_a_gpu_without_bf16_is_refused_in_one_line(pretend_gpu, capsys):
    pretend_gpu(capability=(7, 5))
    assert train_gpt.main(["--preset", "pocket", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "train_gpt.py: error: --device cuda: this GPU has no bf16; use --device cpu\n")


# Where compiled kernels are kept


@pytest.mark.parametrize(("environment", "folder"), [
    (dict(HOME="home", XDG_CACHE_HOME=""), "home/.cache/train_gpt"),
    (dict(HOME="home", XDG_CACHE_HOME="caches"), "caches/train_gpt"),
    (dict(HOME="home", TORCHINDUCTOR_CACHE_DIR="elsewhere"), "elsewhere"),
])
def test_compile_caches_are_kept_in_the_users_cache(monkeypatch, tmp_path, environment, folder):
    """Temporary folders do not survive a reboot. A folder that is given is kept."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "is put back after the test")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    for name, path in environment.items():
        monkeypatch.setenv(name, str(tmp_path / path) if path else "")
    monkeypatch.setattr(train_gpt, "run_script", lambda argv: 0)
    assert train_gpt.main([]) == 0
    assert Path(cache_dir()) == tmp_path / folder
