"""A run on three gloo ranks against that on one: losses, weights, optimizer state, validation."""

import os
import re

import numpy as np
import pytest
import torch
from rank_processes import start_run
from tiny_runs import FLAGS, GROWING, to_argv

import train_gpt

STEPS = 12
# Ranks sum in another order than one process does, and steps make some 10^5 times as much of the
# difference, since Muon brings what is next to nothing up to size. The runs compute in float64, in
# which that is about 1e-11 of a loss, and anything but rounding would show.
LOSS_RTOL, STATE_RTOL = 1e-9, 1e-6
MODEL = FLAGS | GROWING | dict(  # stages begin at steps 3, 6 and 8
    num_iterations=STEPS, extension_steps=4, freeze_steps=2, val_every=4, val_tokens=1500,
    sequences_per_step=12, sequences_per_forward=4, sequence_stride=5, cooldown_frac=0.4)


def in_float64(rank):
    """Have main() compute in float64, and leave in a file what this rank has at its end."""
    os.environ["LOCAL_RANK"] = "0"  # as on nodes of one process each
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    build, train = train_gpt.build, train_gpt.train

    def build_in_float64(cfg, ranks):
        model, optimizers = build(cfg, ranks)
        for optimizer in optimizers:
            optimizer.dtype = torch.float64  # Muon's
        return model, optimizers

    def train_then_save(run, cfg):
        train(run, cfg)
        torch.save(dict(
            model=run.model.state_dict(),
            state_size=sum(x.numel() for o in run.optimizers for x in o.state.values()),
            full_state={f"{o.name} {key}": x for o in run.optimizers
                        for key, x in o.full_state().items()},
        ), f"found-{rank}.pt")

    train_gpt.build, train_gpt.train = build_in_float64, train_then_save


@pytest.fixture(scope="module")
def runs(tmp_path_factory, write_shard):
    """The run on one rank and that on three, with their `val_losses` and `found` of each rank."""
    data, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    # Text of a kind, so that there is something to learn; 3 short and 2 long steps of the first
    # and 3 of the second shard, then again.
    for name, count in (("train_0", 14_000), ("train_1", 10_000), ("val_0", 1700)):
        tokens = generator.choice(257, size=count, p=np.arange(257) / np.arange(257).sum())
        write_shard(data / f"{name}.bin", tokens)
    files = dict(train_files=f"{data}/train_*.bin", val_files=f"{data}/val_*.bin")
    flags = to_argv(MODEL | files)
    runs = [start_run(tmp_path_factory.mktemp("run"), flags, size, in_float64) for size in (1, 3)]
    for run in runs:
        assert not any(run.wait()), run.err()
        run.found = [torch.load(path) for path in sorted(run.cwd.glob("found-*.pt"))]
        run.val_losses = [float(x) for x in re.findall(r"val_loss:\s?([\d.]+)", run.log())]
    return runs


def test_three_ranks_have_the_losses_of_one(runs):
    """In validation 6 sequences, of which the last is short; the last rank has none."""
    one, three = runs
    losses = one.mean_losses()
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1, "so that losses depend on the steps before"
    np.testing.assert_allclose(three.mean_losses(), losses, rtol=LOSS_RTOL)
    assert len(one.val_losses) == STEPS // 4 + 2
    np.testing.assert_allclose(three.val_losses, one.val_losses, rtol=0, atol=1e-6)  # last decimal


def test_rank_0_alone_tells_the_training_loss_of_all_ranks(runs):
    """The mean over the ranks, whose shares of a step are equal."""
    _, run = runs
    assert run.out(0) and not run.out(1) and not run.out(2)
    assert "\nworld_size: 3\n" in run.log()
    logged = re.findall(r"^step:\d+/12 train_loss:(\S+) (?:next|train_time)", run.log(), re.M)
    mean = run.mean_losses()
    np.testing.assert_allclose([float(loss) for loss in logged], mean, rtol=0, atol=6e-5)
    first = [loss for _, loss in run.losses(0)]
    assert max(abs(np.subtract(first, mean))) > 1e-3, "one rank's is another number"


def test_weights_are_bit_identical_on_all_ranks_and_the_state_is_shared_out(runs):
    (one,), ranks = (run.found for run in runs)
    for rank in ranks:
        for name, x in rank["model"].items():
            assert torch.equal(x, ranks[0]["model"][name]), name
            error = (x - one["model"][name]).norm()
            assert error <= STATE_RTOL * one["model"][name].norm() + 1e-15, name
        # Up to a matrix or a scalar more in each optimizer
        assert rank["state_size"] < 1.3 * one["state_size"] / 3
        for name, expected in one["full_state"].items():
            error = (rank["full_state"][name] - expected).norm()
            assert error <= STATE_RTOL * expected.norm(), name
