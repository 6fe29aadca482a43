"""Bytes on the wire, bytes in memory, and what the script chooses for a GPU, without any GPU.

Collectives say at once that they are under way: the sizes of what would be sent are those of one
rank among N, and nothing needs N processes.
"""

import math
import types
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tiny_runs import tiny

import train_gpt

RECORD = train_gpt.Hyperparameters()
TINY = tiny()
# Steps of the record, and the groups at rest in each: Adam steps at odd ones, the embedding is the
# head until step 1254, and most lambdas rest as the stages from 627, 1254 and 1880 begin.
ADAM = {"embed", "head", "value embeds", "smear gate", "x0 lambdas", "lambdas"}
STEPS = {
    0: ADAM, 1: {"embed"}, 627: {"embed", "lambdas"}, 1252: ADAM, 1253: {"embed"},
    1255: {"lambdas"}, 1295: set(), 1919: {"lambdas"}}
# What in torch.distributed sends tensors; a step calls none but these two.
REDUCE, GATHER = "reduce_scatter_tensor", "all_gather_into_tensor"
OTHERS = """all_reduce broadcast reduce send isend all_gather gather scatter reduce_scatter barrier
    all_to_all all_to_all_single all_gather_object broadcast_object_list""".split()


class Wire:
    """In place of collectives. What one rank handed to them and waited for, in order."""

    def __init__(self, monkeypatch):
        self.events, self.tensors = [], []
        monkeypatch.setattr(dist, "init_process_group", lambda **options: None)
        for name in (REDUCE, GATHER):
            monkeypatch.setattr(dist, name, self.collective(name))
        for name in OTHERS:
            monkeypatch.setattr(dist, name, None)

    def collective(self, name):
        def begin(output, sent, async_op=False):
            self.events.append((name, sent.nbytes))
            self.tensors += [output, sent]
            if async_op and name == REDUCE:
                output.fill_(torch.nan)  # no numbers until it is waited for
            return types.SimpleNamespace(wait=lambda: end(output))

        def end(output):
            self.events.append(("wait", 0))
            if name == REDUCE:
                output.fill_(0.5)

        return begin

    def bytes(self, name):
        return sum(nbytes for event, nbytes in self.events if event == name)


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


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_step_reduces_gradients_once_and_gathers_parameters_once(monkeypatch, world_size, step):
    """What rests sends nothing; the head takes the tied embedding's gradients along. All are under
    way before the first one is waited for."""
    wire = Wire(monkeypatch)
    variables = dict(RANK=world_size - 1, WORLD_SIZE=world_size, LOCAL_RANK=0)
    for key, value in dict(variables, MASTER_ADDR="127.0.0.1").items():
        monkeypatch.setenv(key, str(value))
    ranks, model = train_gpt.Ranks(TINY), train_gpt.GPT(TINY)
    for module in (model.embed, model.value_embeds, model.lm_head, model.smear_gate):
        module.bfloat16()  # as on CUDA
    model.init_weights(torch.Generator())
    expected = padded_bytes(model, world_size)
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)
    monkeypatch.setattr(train_gpt.signal, "signal", lambda *args: None)
    train_gpt.LossExchange(ranks).check(0, torch.ones(2))
    assert wire.events == [(GATHER, 12)], "two losses and a signal in fp32"
    wire.events.clear()
    wire.tensors.clear()
    now = train_gpt.schedule(step, RECORD)
    step_all = train_gpt.step_tied if now.tied else train_gpt.step_optimizers
    step_all(optimizers, now, world_size)

    sent = sum(expected[kind] for kind in expected.keys() - STEPS[step])
    assert wire.bytes(REDUCE) == sent
    assert wire.bytes(GATHER) == sent / world_size  # this rank's share
    n = len(optimizers) - len(STEPS[step])
    order = [REDUCE] * n + ["wait", GATHER] * n + ["wait"] * n
    assert [event for event, _ in wire.events] == order
    assert all(o.weights.isfinite().all() for o in optimizers), "by gradients that have come"
    # A tensor freed before its collective has ended is overwritten in mid-flight.
    owned = set()
    for optimizer in optimizers:
        for buffer in (optimizer.weights, optimizer.grads, optimizer.my_grad):
            owned.add(buffer.untyped_storage().data_ptr())
    for tensor in wire.tensors:
        assert tensor.untyped_storage().data_ptr() in owned, "a temporary tensor was sent"


H100 = ((9, 0), 227, 84)  # compute capability, KiB of shared memory, GB of memory


@pytest.mark.parametrize("card, flags, chunks, head", [
    (H100, {}, 1, "fp8"), (H100, dict(head_chunks=3, fp8_head=False), 3, "bf16"),
    (((8, 0), 163, 41.5), {}, 2, "bf16"), (((8, 9), 99, 16), {}, 8, "fp8"),
], ids=["H100", "flags", "A100", "4080"])
def test_what_a_card_gets(monkeypatch, card, flags, chunks, head):
    """Logits of 80 GB cards are one chunk, as published. A smaller card takes as many as needed,
    one with little shared memory small blocks in the backward pass. Flags go before. The records'
    tests hold the types of the weights."""
    capability, shared_kib, memory_gb = card
    properties = types.SimpleNamespace(
        shared_memory_per_block_optin=shared_kib * 1024, total_memory=int(memory_gb * 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(train_gpt.Ranks, "__init__", lambda self, cfg: vars(self).update(
        rank=0, world_size=1, device=device))
    words = ["--run_id=x", *(f"--{name}={value}" for name, value in flags.items())]
    built = []
    monkeypatch.setattr(train_gpt, "Run", lambda cfg, *args: built.append(cfg))
    with pytest.raises(AttributeError):  # it is no run
        train_gpt.run_script(words)
    (cfg,) = built
    with torch.device("meta"):
        model = train_gpt.GPT(cfg)
    model.compile = lambda **options: vars(model).update(options)
    train_gpt.prepare_for_cuda(model, cfg, device)
    assert model.dynamic is False, "compiled for the shapes that come, or not at all"
    assert cfg.head_chunks == chunks
    assert chunks - 1 < 49152 / model.tokens_per_chunk <= chunks
    assert model.tokens_per_chunk % 128 == 0
    assert model.lm_head.use_fp8 == (head == "fp8")
    options = train_gpt.SMALL_TILES if shared_kib == 99 else None
    assert all(block.attn.kernel_options == options for block in model.blocks if block.attn)
