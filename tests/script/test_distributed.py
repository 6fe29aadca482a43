"""A run on three gloo ranks against that on one: losses, weights, optimizer state, validation."""

import re

import numpy as np
import pytest
import rank_processes
import torch
from rank_processes import start_run
from tiny_runs import FLAGS, STEPS

import train_gpt

files = rank_processes.files  # a fixture

# Ranks sum in another order than one process does, and steps make some 10^5 times as much of the
# difference, since Muon brings what is next to nothing up to size. The runs compute in float64, in
# which that is about 1e-11 of a loss, and anything but rounding would show.
LOSS_RTOL, STATE_RTOL = 1e-9, 1e-6
MODEL = FLAGS | dict(
    save_every=STEPS, val_tokens=1000, sequences_per_step=6, sequence_stride=5)


def in_float64(rank):
    """Have main() compute in float64."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    build = train_gpt.build

    def build_in_float64(cfg, ranks):
        model, optimizers = build(cfg, ranks)
        for optimizer in optimizers:
            optimizer.dtype = torch.float64  # Muon's
        return model, optimizers

    train_gpt.build = build_in_float64


@pytest.fixture(scope="module")
def runs(tmp_path_factory, files):
    """The run on one rank and that on three."""
    runs = []
    for size in (1, 3):
        runs.append(start_run(tmp_path_factory.mktemp("run"), MODEL | files, size, in_float64))
    for run in runs:
        assert not any(run.wait()), run.err()
    return runs


def test_three_ranks_compute_what_one_does(runs):
    """In validation 4 sequences, of which the last is short; the last rank has none."""
    one, three = runs
    losses = one.mean_losses()
    assert len(losses) == STEPS
    np.testing.assert_allclose(three.mean_losses(), losses, rtol=LOSS_RTOL)
    val_losses = [re.findall(r"val_loss:\s?([\d.]+)", run.log()) for run in runs]
    expected, found = np.array(val_losses, float)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)  # last decimal

    expected, found = (run.state(STEPS) for run in runs)
    parts = dict(model=(found["model"], expected["model"]))
    for name, state in expected["optimizers"].items():
        parts[name] = found["optimizers"][name], state
    for part, (tensors, expected_tensors) in parts.items():
        for name, x in expected_tensors.items():
            error = (tensors[name] - x).norm()
            assert error <= STATE_RTOL * x.norm() + 1e-15, (part, name)


def test_rank_0_alone_tells_the_mean_loss_of_all_ranks(runs):
    _, run = runs
    assert run.out(0) and not run.out(1) and not run.out(2)
    logged = re.findall(r"^step:\d+/6 train_loss:(\S+) ", run.log(), re.M)
    mean = run.mean_losses()
    np.testing.assert_allclose([float(loss) for loss in logged], mean, rtol=0, atol=6e-5)
    first = [loss for _, loss in run.losses(0)]
    assert max(abs(np.subtract(first, mean))) > 1e-3, "one rank's is another number"
