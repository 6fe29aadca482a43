"""Several ranks compute what one does: whole tiny runs in float64, of each kind of optimizers.

Ranks are threads, each with a model and optimizers of its own. torch's collectives are replaced by
ones that hand tensors from thread to thread.
"""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PATIENCE
from golden import TinyRun, in_float64, load, shrink_blocks, tiny, write_tables
from record_folders import NEWEST, RECORDS, for_each_slowly, one_of_each_kind

EXACT = 1e-9  # of a tensor, relative: float64 through some steps
# What knows of ranks. The harness does, too, and all records share it.
KINDS = one_of_each_kind(
    RECORDS, "ReplicatedOptimizer", "ShardedOptimizer", "NgramTable", "step_optimizers",
    r"\w+\(MatrixOptimizer")


class Exchange:
    """The collectives between threads, in place of torch.distributed.

    What is asynchronous has its result where it is waited for, no sooner.
    """

    def __init__(self, world_size):
        self.world_size = world_size
        self.mine = threading.local()
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(world_size, timeout=PATIENCE)
        self.given = [None] * world_size

    def on_each_rank(self, function):
        """What function(rank) returns, by rank. One runs at a time: weights are made by patches."""
        def take_turns(rank):
            self.mine.rank = rank
            with self.turn:
                try:
                    return function(rank)
                except BaseException:
                    self.barrier.abort()  # else the others would wait
                    raise

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

    def reduce_scatter_tensor(self, out, x, async_op=False):
        rank = self.mine.rank

        def put(parts):
            out.copy_(sum(parts).chunk(self.world_size)[rank])

        return self.collect(x, async_op, put)

    def all_gather_into_tensor(self, out, x, async_op=False):
        return self.collect(x, async_op, lambda parts: out.copy_(torch.cat(parts)))

    def all_gather(self, rows, x, async_op=False):
        return self.collect(x, async_op, lambda parts: torch._foreach_copy_(rows, parts))

    def all_to_all_single(self, out, x, sizes_out=None, sizes=None, async_op=False):
        rank = self.mine.rank
        pieces = x.split(sizes or len(x) // self.world_size)

        def put(parts):
            out.copy_(torch.cat([pieces[rank] for pieces in parts]))

        return self.collect(pieces, async_op, put)


class RankRun(TinyRun):
    """A rank's run, of a module of its own. Each of its forward passes has one sequence."""

    def __init__(self, record, folder, count, rank=0, exchange=None):
        script = load(record)
        shrink_blocks(script)
        make_ranks = script.Ranks

        def of_this_rank(cfg):
            ranks = make_ranks(cfg)
            ranks.rank = rank
            ranks.world_size = exchange.world_size if exchange else 1
            return ranks

        script.Ranks = of_this_rank
        script.dist = exchange
        super().__init__(script, tiny(script, folder, sequences_per_step=count))

    def batches(self, rows):
        num_sequences = len(rows[0])
        parts = zip(*(np.split(array, num_sequences) for array in rows))
        batches = [self.script.to_batch(type(rows)(*part), self.ranks.device) for part in parts]
        share = num_sequences // self.ranks.world_size
        return batches[self.ranks.rank * share :][:share]

    def state(self):
        """Weights and the optimizers' state of all ranks, by name."""
        found = self.weights()
        for optimizer in self.optimizers:
            for key, value in optimizer.full_state().items():
                found[f"{optimizer.name}, {key}"] = value
        return {name: value.clone() for name, value in found.items()}


@for_each_slowly(KINDS)
def test_ranks_compute_what_one_does(record, tmp_path):
    """On two of them; of the newest record on three, which do not divide its matrices and rows."""
    count = 3 if record == NEWEST else 2
    write_tables(tmp_path)
    exchange = Exchange(count)

    def run(rank):
        mine = RankRun(record, tmp_path, count, rank, exchange)
        mine.train()
        return mine, mine.state()

    with in_float64():
        one = RankRun(record, tmp_path, count)
        one.train()
        expected = one.state()
        found = exchange.on_each_rank(run)
    for rank, (mine, state) in enumerate(found):
        assert mine.validations == pytest.approx(one.validations, rel=1e-11)
        for name, value in state.items():
            error = (value - expected[name]).norm()
            assert error <= EXACT * expected[name].norm() + 1e-12, (rank, name)
    losses = np.mean([mine.losses for mine, _ in found], axis=0)
    assert losses == pytest.approx(np.array(one.losses), rel=1e-11)
