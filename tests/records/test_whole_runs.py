"""Whole small runs of the records, on one rank and on several, against the oracles.

The oracle runs first, from the script's first weights. Ranks are threads, each with a model and
optimizers of its own. Losses, weights, offsets of the sweeps and what validation finds are compared
as each step begins, and after the last one; on one rank the gradients, too, and on several the
optimizers' state with that of one.
"""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lineage import (
    EXACT,
    HELD,
    LENGTH,
    SIGNS,
    TABLE,
    for_each_slowly,
    held_since,
    in_float64,
    load,
    make_model,
    some_forbidden,
    some_prefixes,
    tiny_flags,
    tiny_station,
)
from test_lineage import public, random_shards


class OracleRun:
    """What a station does in a whole run: lists with an entry a step."""

    def __init__(self, station, weights):
        self.station = station
        self.losses, self.grads, self.weights, self.offsets = [], [], [], []
        self.validations, self.logged = {}, []
        steps = range(station.total_steps())
        self.streams = list(station.streams_of_steps(random_shards(3, 40_000), steps))
        self.val_tokens = random_shards(1, 2_000, seed=5)[0]
        state = station.optimizer_state(weights)
        for step, streams in enumerate(self.streams):
            self.note(weights)
            if step == 4:
                self.validate(weights, step)
            loss, grads = station.gradients(weights, streams, step)
            self.losses.append(loss / (station.seq_len(step) if station.summed_loss else 1))
            self.grads.append(waiting(grads, state, len(streams)))
            station.optimizer_step(weights, grads, state, step)
        station.finish(weights, state)
        self.note(weights)
        self.validate(weights, len(steps))

    def note(self, weights):
        self.weights.append({name: p.clone() for name, p in weights.items()})
        self.offsets.append(list(getattr(self.station, "offsets", None) or ()))

    def validate(self, weights, step):
        streams = self.station.validation_streams(self.val_tokens)
        self.validations[step] = self.station.validation_loss(weights, streams, step).item()
        if hasattr(self.station, "unmasked_loss") and step == self.station.total_steps():
            loss = self.station.unmasked_loss(weights, streams, step).item()
            self.logged = [f"val_loss without the mask of canonical tokens: {loss:.4f}"]


def waiting(grads, state, num_streams):
    """What the script's gradients are before a step: sums over streams, of all steps since the
    optimizer's last one."""
    found = {}
    for name, grad in grads.items():
        if grad is not None:
            found[name] = num_streams * (state[name].get("sum", 0.0) + grad)
    return found


class RankRun:
    """A rank's side of the script's training loop. It compares as it goes."""

    first_step = 0

    def __init__(self, script, cfg, model, dist=None, rank=0):
        self.script, self.cfg, self.model, self.rank = script, cfg, model, rank
        self.ranks, self.world_size = script.Ranks(cfg), dist.world_size if dist else 1
        if dist:
            self.ranks.rank, self.ranks.world_size = rank, dist.world_size
        self.optimizers = script.build_optimizers(model, cfg, self.ranks)
        for optimizer in self.optimizers:
            optimizer.dtype = torch.float64
            if hasattr(optimizer, "updates"):  # up to #28 all ranks gather them
                optimizer.updates = optimizer.updates.double()
        self.loader = self.health = self
        self.step, self.losses, self.states, self.validated = 0, [], {}, []
        self.rounding = 1e-12 if self.world_size == 1 else 1e-11

    def run(self, oracle, one=None):
        """The losses of all steps. one: the same run on one rank, of which the state is held."""
        self.oracle, self.one = oracle, one
        for table in self.tables():
            table.load_full_state(table.full_state() | dict(rows=oracle.weights[0][TABLE]))
        self.val_tokens = oracle.val_tokens[: oracle.station.val_tokens + 1]
        self.logged = []
        self.log = self.logged.append
        self.script.train(self, self.cfg)
        assert self.step == oracle.station.total_steps()
        assert self.validated == list(oracle.validations)
        assert self.logged == oracle.logged
        return self.losses

    def tables(self):
        """The optimizer of which each rank has a part of the rows, if there is one."""
        return [optimizer for optimizer in self.optimizers if "rows" in optimizer.state]

    def hold(self, what, found, expected):
        """All tensors by public names; of the embedding none while it is the head."""
        for name, x in found.items():
            if name in expected and not (name == "embed.weight" and self.is_tied()):
                y = expected[name].reshape(x.shape)
                error = (x - y).norm()
                assert error <= EXACT * y.norm() + 1e-12, (what, self.step, name)

    def is_tied(self):
        """As a step begins that follows tied ones, or in it."""
        station = self.oracle.station
        return station.tied(self.step) and self.step < station.total_steps()

    def pause(self, step, complete):
        oracle = self.oracle
        is_last = step == oracle.station.total_steps()
        assert self.step == step and complete == oracle.station.complete(step)
        found = public(oracle.station, self.model)
        for table in self.tables():
            found[TABLE] = table.full_state()["rows"].view_as(oracle.weights[step][TABLE])
        assert found.keys() == oracle.weights[step].keys()
        self.hold("weights", found, oracle.weights[step])
        if complete:
            self.states[step] = self.save_and_load()
            if self.one:
                self.hold("state", self.states[step], self.one.states[step])
        if hasattr(self.model, "offsets"):
            assert self.model.offsets.tolist() == oracle.offsets[step], step
        if step in oracle.validations:
            found = self.script.validate(self.model, self.val_tokens, self.cfg, self.ranks)
            assert found == pytest.approx(oracle.validations[step], rel=self.rounding)
            self.validated.append(step)
        return is_last

    def save_and_load(self):
        """The state of all ranks. It is loaded, too, as in a run that is resumed."""
        found = {}
        for optimizer in self.optimizers:
            whole = {key: x.clone() for key, x in optimizer.full_state().items()}
            for share in optimizer.state.values():
                share.zero_()
            optimizer.load_full_state(whole)
            for key, x in whole.items():
                found[optimizer.name, key] = x
        return found

    def next_step(self, now):
        """This rank's streams in their order. Steps differ in whether a forward pass has all of
        them or one, and in whether the head takes them in chunks."""
        assert now.seq_len == self.oracle.station.seq_len(self.step)
        self.model.tokens_per_chunk = 32 if self.step % 4 < 2 else 2 * LENGTH
        streams = self.oracle.streams[self.step]
        share = len(streams) // self.world_size
        mine = streams[self.rank * share : (self.rank + 1) * share]
        rows = share if self.step % 2 == 0 else 1
        passes = [mine[i : i + rows] for i in range(0, share, rows)]
        self.num_passes = len(passes)
        return [[torch.from_numpy(np.stack(x)) for x in zip(*each)] for each in passes]

    def check(self, step, losses):
        self.losses.append(losses[0].item())
        station = self.oracle.station
        if self.world_size > 1:
            return
        found = public(station, self.model, grads=True)
        if station.tied(step):
            found["lm_head.weight"] += found["embed.weight"]
        if not station.summed_loss:  # up to #24 the sum over passes of the mean of each
            factor = len(self.oracle.streams[step]) / self.num_passes
            found = {name: factor * x for name, x in found.items()}
        self.hold("gradients", found, self.oracle.grads[step])

    def log_step(self, step):
        self.step += 1
        assert self.step == step


class Exchange:
    """The collectives between ranks that are threads of this process, in place of torch's.

    What is asynchronous has its result where it is waited for, no sooner.
    """

    def __init__(self, world_size):
        self.world_size, self.mine, self.turn = world_size, threading.local(), threading.Lock()
        self.barrier, self.given = threading.Barrier(world_size, timeout=60), [None] * world_size

    def on_each_rank(self, function):
        """What function(rank) returns, by rank. One runs at a time, which is quicker than to let
        all of them contend for the interpreter."""
        def take_turns(rank):
            self.mine.rank = rank
            with self.turn:
                return function(rank)

        with ThreadPoolExecutor(self.world_size) as threads:
            return list(threads.map(take_turns, range(self.world_size)))

    def wait_for_all(self):
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def collect(self, x, async_op, put):
        """`put` what every rank has given at its same call."""
        self.wait_for_all()
        self.given[self.mine.rank] = copy.deepcopy(x)
        self.wait_for_all()
        handle = SimpleNamespace(wait=functools.partial(put, list(self.given)))
        return handle if async_op else handle.wait()

    def all_reduce(self, x, async_op=False):
        return self.collect(x, async_op, lambda parts: x.copy_(sum(parts)))

    def reduce_scatter_tensor(self, part, x, async_op=False):
        rank = self.mine.rank
        return self.collect(
            x, async_op, lambda parts: part.copy_(sum(parts).chunk(self.world_size)[rank]))

    def all_gather_into_tensor(self, whole, x, async_op=False):
        return self.collect(x, async_op, lambda parts: whole.copy_(torch.cat(parts)))

    def all_gather(self, rows, x, async_op=False):
        return self.collect(x, async_op, lambda parts: [r.copy_(p) for r, p in zip(rows, parts)])

    def all_to_all_single(self, out, x, output_split_sizes=None, input_split_sizes=None,
                          async_op=False):
        rank = self.mine.rank
        pieces = x.split(input_split_sizes or len(x) // self.world_size)

        def put(given):
            out.copy_(torch.cat([of_rank[rank] for of_rank in given]))

        return self.collect(pieces, async_op, put)


def num_ranks(record):
    """A step has as many streams. Five divide no number of the newest record's matrices."""
    return 5 if record == HELD[-1] else 2


def run_the_oracle(record):
    """From the first weights of a script, which are the same on all ranks."""
    script, station = load(record.folder), record.station
    model = make_model(script, tiny_config(record))
    streams = num_ranks(record)
    station = tiny_station(station, station.run_length, streams=streams, **station.tiny)
    for name in SIGNS:
        if hasattr(model, name):
            station.signs = getattr(model, name)
    station.prefixes = some_prefixes(station.vocab_size)
    station.forbidden = some_forbidden(station.vocab_size)
    weights = public(station, model)
    if TABLE in station.parameter_shapes():
        rows = torch.empty(station.parameter_shapes()[TABLE])
        weights[TABLE] = rows.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return OracleRun(station, weights)


def tiny_config(record):
    flags = record.station.tiny | dict(sequences_per_step=num_ranks(record))
    return tiny_flags(load(record.folder), record.station.run_length, **flags)


@for_each_slowly(HELD)
def test_a_whole_run_is_that_of_the_oracle(record, monkeypatch):
    script, cfg = load(record.folder), tiny_config(record)
    with in_float64():
        oracle = run_the_oracle(record)
        one = RankRun(script, cfg, make_model(script, cfg))
        losses = one.run(oracle)
        assert losses == pytest.approx(oracle.losses, rel=1e-12)
        dist = Exchange(num_ranks(record))
        monkeypatch.setattr(script, "dist", dist)

        def run(rank):
            return RankRun(script, cfg, make_model(script, cfg), dist, rank).run(oracle, one)

        losses = dist.on_each_rank(run)
        assert np.mean(losses, axis=0) == pytest.approx(oracle.losses, rel=1e-11)


@held_since("92f")
def test_candidates_are_those_of_the_oracle(record):
    """In a vocabulary of the record's size, with enough classes in the window, too few, and none
    wanted; from each new offset on."""
    script, station = load(record.folder), record.station
    cases = [(3000, 10_240), (9000, 10_240), (64, 64), (1, 24_576)]
    for offset, (count, wanted) in zip((0, 44_016, 50_303, 7), cases, strict=True):
        targets = np.random.default_rng(count).permutation(50_257)[:count]
        for _ in range(3):
            found, new = script.candidates(
                torch.from_numpy(targets), torch.tensor(offset), wanted, station.vocab_size)
            expected, offset = station.candidates(targets, offset, wanted)
            assert found.tolist() == expected and int(new) == offset
    swept = [20_011 * k % 50_304 for k in range(30_000)]
    found, new = script.candidates(torch.tensor(swept), torch.tensor(0), 32_768, 50_304)
    assert (found.tolist(), int(new)) == station.candidates(swept, 0, 32_768)
