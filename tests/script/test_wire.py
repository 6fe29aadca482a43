"""Bytes on the wire, bytes in memory, and what the script chooses for a GPU, without any GPU.

Collectives go through torch's fake process group, which says at once that all is done: the sizes of
what would be sent are those of one rank among N, and nothing needs N processes.
"""

import dataclasses
import gc
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_gpt

RECORD = train_gpt.Hyperparameters()
TINY = dataclasses.replace(
    RECORD,
    vocab_size=257, eot_token=256, model_dim=32, head_dim=16, attention_pattern="LS.",
    value_embed_pattern="0.1", skip_layer=0, backout_layer=1, seq_lens=(256,), val_seq_len=256,
)
# Steps of the record, and the groups at rest in each: Adam steps at odd ones, the embedding is the
# head until step 1254, and most lambdas rest as the stages from 627, 1254 and 1880 begin.
ADAM = {"embed", "head", "value embeds", "smear gate", "x0 lambdas", "lambdas"}
RESTING, TIED, UNTIED = 2, 1, 1295
STEPS = {
    0: ADAM,
    TIED: {"embed"},
    627: {"embed", "lambdas"},
    1252: ADAM,
    1253: {"embed"},
    1255: {"lambdas"},
    UNTIED: set(),
    1919: {"lambdas"},
}
# Everything in torch.distributed that sends tensors, and which argument it sends.
COLLECTIVES = dict(
    all_reduce=0, broadcast=0, reduce=0, send=0, isend=0, all_gather=1, gather=0, scatter=0,
    all_gather_into_tensor=1, reduce_scatter_tensor=1, reduce_scatter=1, all_to_all=1,
    all_to_all_single=1, all_gather_object=1, broadcast_object_list=0, barrier=None,
)


class Wire:
    """What one rank handed to collectives, in order: name, elements, bytes."""

    def __init__(self, monkeypatch):
        self.calls, self.works, self.tensors = [], [], []
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
                work = Work(work)
                self.works.append(weakref.ref(work))
            return work

        return counted

    def bytes(self, name):
        return sum(nbytes for called, _, nbytes in self.calls if called == name)


class Work:
    """The handle of an asynchronous collective, which counts how often it was waited for."""

    def __init__(self, work):
        self.work, self.waits = work, 0

    def wait(self):
        self.waits += 1
        return self.work.wait()


@pytest.fixture
def one_of(monkeypatch):
    """`one_of(world_size, rank)` makes this process one rank among so many fake ones."""

    def start(world_size, rank=0):
        for key, value in dict(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=0).items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setattr(
            dist,
            "init_process_group",
            lambda backend, **_: init("fake", store=FakeStore(), rank=rank, world_size=world_size),
        )
        monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(FakeStore(), rank, world_size)]))
        return train_gpt.Ranks(dataclasses.replace(TINY, device="cpu"))

    init = dist.init_process_group
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


def padded_bytes(cfg, model, world_size):
    """By arithmetic alone: bytes of each kind of parameter, padded to whole units on each rank."""
    names = {"lm_head": "head", "value_embeds": "value embeds", "smear_gate": "smear gate"}
    matrices, gates, elements = {}, {}, dict.fromkeys(ADAM, 0)
    for name, param in model.named_parameters():
        if name.startswith("blocks.") and param.ndim >= 2:
            stack = param.numel() // param.shape[-2:].numel()
            shapes = gates if "gate" in name else matrices
            shapes[param.shape[-2:]] = shapes.get(param.shape[-2:], 0) + stack
        elif "x0_lambda" in name:
            elements["x0 lambdas"] += param.numel()
        elif "lambda" in name:
            elements["lambdas"] += param.numel()
        else:
            kind = name.partition(".")[0]
            elements[names.get(kind, kind)] += param.numel()

    def up(count):
        return -(-count // world_size) * world_size

    muon = sum(4 * up(count) * shape.numel() for shape, count in matrices.items())
    muon += sum(2 * up(count) * shape.numel() for shape, count in gates.items())
    sizes = {kind: 4 if kind in ("x0 lambdas", "lambdas") else 2 for kind in ADAM}
    return dict(muon=muon) | {kind: sizes[kind] * up(elements[kind]) for kind in ADAM}


# ---- bytes on the wire ------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_step_reduces_gradients_once_and_gathers_parameters_once(
    one_of, monkeypatch, world_size, step
):
    """What rests sends nothing; the head takes the tied embedding's gradients along."""
    ranks = one_of(world_size, rank=world_size - 1)
    model = make_model(TINY)
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)
    monkeypatch.setattr(train_gpt.signal, "signal", lambda *args: None)
    health = train_gpt.Health(ranks)
    wire = Wire(monkeypatch)
    health.check(0, torch.ones(2))
    news, wire.calls = wire.calls, []
    train_gpt.step_optimizers(optimizers, train_gpt.schedule(step, RECORD), world_size)

    expected, resting = padded_bytes(TINY, model, world_size), STEPS[step]
    sent = sum(expected[kind] for kind in expected.keys() - resting)
    assert wire.bytes("reduce_scatter_tensor") == sent
    assert wire.bytes("all_gather_into_tensor") == sent / world_size  # this rank's share
    names = [name for name, *_ in wire.calls]
    stepping = len(optimizers) - len(resting)
    assert names == ["reduce_scatter_tensor"] * stepping + ["all_gather_into_tensor"] * stepping
    # Each rank hands out one row: two losses and a signal, all in fp32.
    assert news == [("all_gather_into_tensor", 3, 12)]


@pytest.mark.parametrize(
    ("step", "tables"), [(RESTING, 0), (TIED, 4), (UNTIED, 5)], ids=["resting", "tied", "untied"]
)
def test_the_records_bytes_on_the_wire(one_of, monkeypatch, step, tables):
    """The record's shapes as fake tensors, which have sizes and no data.

    Published: 40 attention matrices of 768x768, 22 MLP matrices of 768x3072, 10 gates of 6x12 and
    one of 1x12, 3 tables of values and a head of 50304x768, which is the embedding until it is a
    table of its own; of lambdas 11 of x, 11 of x0, 20 of weights and 3 of skip, smear and backout.
    """
    ranks = one_of(8)
    done = types.SimpleNamespace(wait=lambda: None)
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: done)
    with FakeTensorMode():
        model = make_model(RECORD)
        optimizers = train_gpt.build_optimizers(model, RECORD, ranks)
        wire = Wire(monkeypatch)
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: None)
        train_gpt.step_optimizers(optimizers, train_gpt.schedule(step, RECORD), 8)
    matrices, lambdas = (40 * 768 + 22 * 3072) * 768, 11 + 11 + 20 + 3
    least = 4 * matrices + 2 * 10 * 6 * 12  # Muon's
    if step != RESTING:
        least += 4 * lambdas + 2 * (12 + tables * 50304 * 768)
    reduced = wire.bytes("reduce_scatter_tensor")
    assert wire.bytes("all_gather_into_tensor") == reduced / 8
    # Padding to whole matrices a rank costs at most two of the MLP's and 6 gates, to whole entries
    # 7 of the gate that smears and 7 of both kinds of lambdas.
    most = 4 * 2 * 768 * 3072 + 2 * (6 * 6 * 12 + 7) + 4 * 2 * 7
    assert least <= reduced <= least + most


def test_collectives_get_buffers_that_live_as_long_as_the_optimizer(one_of, monkeypatch):
    """A tensor freed before its collective has ended is overwritten in mid-flight."""
    ranks = one_of(2)
    optimizers = train_gpt.build_optimizers(make_model(TINY), TINY, ranks)
    wire = Wire(monkeypatch)
    owned = [x.untyped_storage() for o in optimizers for x in (o.weights, o.grads, o.grad)]

    def lives(pointer):
        return any(x.data_ptr() <= pointer < x.data_ptr() + x.nbytes() for x in owned)

    for optimizer in optimizers:
        optimizer.reduce()
    gc.collect()
    reduces = [work() for work in wire.works]
    assert len(reduces) == len(optimizers)
    assert all(work is not None and work.waits == 0 for work in reduces), "waited for too early"
    for optimizer in optimizers:
        optimizer.update(train_gpt.schedule(UNTIED, RECORD), 2)
    gc.collect()
    assert all(work.waits for work in reduces), "gradients used before they have arrived"
    gathers = [work() for work in wire.works[len(optimizers) :]]
    assert len(gathers) == len(optimizers)
    assert all(work is not None and work.waits == 0 for work in gathers), "waited for too early"
    assert all(map(lives, wire.tensors)), "a temporary tensor was sent"


@pytest.mark.parametrize("step", [TIED, UNTIED])
def test_every_collective_has_ended_when_the_step_has(one_of, monkeypatch, step):
    ranks = one_of(2)
    optimizers = train_gpt.build_optimizers(make_model(TINY), TINY, ranks)
    wire = Wire(monkeypatch)
    kept, wrapped = [], Work.__init__
    monkeypatch.setattr(
        Work, "__init__", lambda self, work: (kept.append(self), wrapped(self, work))[1]
    )
    train_gpt.step_optimizers(optimizers, train_gpt.schedule(step, RECORD), 2)
    assert len(kept) == len(wire.works) == 2 * (len(optimizers) - len(STEPS[step]))
    assert all(work.waits for work in kept)


@pytest.mark.parametrize("step", [TIED, UNTIED])
def test_an_update_takes_the_gradient_that_arrived(one_of, monkeypatch, step):
    """The network delivers when it is waited for; what is there before is no number."""
    ranks = one_of(2)
    model = make_model(TINY)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)

    def late(output, sent, async_op):
        output.fill_(float("nan"))
        return types.SimpleNamespace(wait=lambda: output.copy_(sent[: len(output)]))

    monkeypatch.setattr(dist, "reduce_scatter_tensor", late)
    for optimizer in optimizers:
        optimizer.grads.normal_(generator=torch.Generator().manual_seed(0))
    train_gpt.step_optimizers(optimizers, train_gpt.schedule(step, RECORD), 2)
    assert all(o.weights.isfinite().all() for o in optimizers)


# ---- memory of the optimizer ------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 8])
def test_optimizer_state_of_a_rank_falls_as_one_over_ranks(one_of, world_size):
    with FakeTensorMode():
        sizes = []
        for ranks in (types.SimpleNamespace(rank=0, world_size=1), one_of(world_size)):
            model = make_model(RECORD)
            optimizers = train_gpt.build_optimizers(model, RECORD, ranks)
            sizes.append(sum(x.nbytes for o in optimizers for x in o.state.values()))
        padding = sum(padded_bytes(RECORD, model, world_size).values())
        unpadded = sum(padded_bytes(RECORD, model, 1).values())
    whole, share = sizes
    assert whole / world_size <= share <= whole / world_size * padding / unpadded * 1.05


# ---- what is chosen for a GPU -----------------------------------------------


@pytest.fixture
def pretend_gpu(monkeypatch):
    """`pretend_gpu(capability, shared_kib, memory_gb)` lets torch.cuda describe such a GPU."""

    def pretend(capability=(9, 0), shared_kib=227, memory_gb=84.0):
        properties = types.SimpleNamespace(
            shared_memory_per_block_optin=shared_kib * 1024, total_memory=int(memory_gb * 1e9)
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda *args: None)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **kwargs: capability >= (8, 0))

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


@pytest.mark.parametrize(
    "memory_gb, chunks", [(151, 1), (84, 1), (41.5, 2), (24.8, 3), (16, 5), (12, 6)],
    ids=["H200", "80GB", "40GB", "24GB", "16GB", "12GB"],
)
def test_the_head_is_cut_into_pieces_that_fit(pretend_gpu, memory_gb, chunks):
    """Logits of 80 GB cards are one piece, as published. A smaller card takes as many as needed."""
    pretend_gpu(memory_gb=memory_gb)
    model = prepared()
    assert model.head_chunks == chunks
    assert chunks - 1 < 49152 / model.tokens_per_piece <= chunks
    assert model.tokens_per_piece % 128 == 0
    given = prepared(head_chunks=3)
    assert (given.head_chunks, given.tokens_per_piece) == (3, 16384)


@pytest.mark.parametrize(
    "capability, fp8",
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)],
    ids=["A100", "3090", "4090", "H100", "B200"],
)
def test_the_head_takes_fp8_where_the_gpu_has_it(pretend_gpu, capability, fp8):
    pretend_gpu(capability)
    for model, expected in ((prepared(), fp8), (prepared(fp8_head=False), False)):
        assert model.lm_head.use_fp8 == expected
        assert model.head_type == ("fp8" if expected else "bf16")


@pytest.mark.parametrize(
    "shared_kib, small", [(99, True), (163, False), (227, False)], ids=["4090", "A100", "H100"]
)
def test_little_shared_memory_gets_small_blocks_in_the_backward_pass(
    pretend_gpu, shared_kib, small
):
    pretend_gpu(shared_kib=shared_kib)
    tiles = train_gpt.SMALL_TILES
    for block in prepared().blocks:
        if block.attn:
            assert block.attn.kernel_options == (tiles if small else None)
    # The kernels cut a mask's blocks of 128 into whole tiles, and tiles into whole tiles.
    assert set(tiles) <= set(torch.nn.attention.flex_attention.FlexKernelOptions.__annotations__)
    assert all(train_gpt.BLOCK % tile == 0 for tile in tiles.values())
    assert tiles["BLOCK_N1"] % tiles["BLOCK_M1"] == tiles["BLOCK_M2"] % tiles["BLOCK_N2"] == 0


def test_embeddings_head_and_gates_are_bf16(pretend_gpu):
    pretend_gpu()
    kinds = {name: param.dtype for name, param in prepared().named_parameters()}
    assert {name for name, dtype in kinds.items() if dtype == torch.bfloat16} == {
        "embed.weight", *(f"value_embeds.{i}.weight" for i in range(3)), "lm_head.weight",
        "smear_gate.weight", *(f"blocks.{i}.attn.attn_gate.weight" for i in range(11) if i != 6),
    }


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.startswith("train_gpt.py: error: ") and error.count("\n") == 1
    return error


def test_a_gpu_without_bf16_is_refused_in_one_line(pretend_gpu, capsys):
    pretend_gpu(capability=(7, 5))
    assert train_gpt.main(["--preset", "pocket", "--device", "cuda"]) == 2
    error = one_line(capsys)
    assert "--device cuda" in error and "bf16" in error and "--device cpu" in error


def test_out_of_memory_names_what_to_lower(monkeypatch, capsys):
    def run_script(argv):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.21 GiB.\nSecond line")

    monkeypatch.setattr(train_gpt, "run_script", run_script)
    assert train_gpt.main([]) == 2
    error = one_line(capsys)
    assert "out of memory; raise --head_chunks, or lower --sequences_per_forward" in error


# ---- where compiled kernels are kept -----------------------------------------


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        (dict(HOME="home", XDG_CACHE_HOME=""), "home/.cache/train_gpt"),
        (dict(HOME="home", XDG_CACHE_HOME="caches"), "caches/train_gpt"),
        (dict(HOME="home", TORCHINDUCTOR_CACHE_DIR="elsewhere"), "elsewhere"),
    ],
)
def test_compile_caches_are_kept_in_the_users_cache(monkeypatch, tmp_path, environment, folder):
    """Temporary folders do not survive a reboot. A folder that is given is kept."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "is put back after the test")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    for name, path in environment.items():
        monkeypatch.setenv(name, str(tmp_path / path) if path else "")
    monkeypatch.setattr(train_gpt, "run_script", lambda argv: 0)
    assert train_gpt.main([]) == 0
    assert Path(cache_dir()) == tmp_path / folder
