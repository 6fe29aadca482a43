"""Runs on 1 to 4 gloo ranks against each other: losses, optimizer state, parameters, validation.

Each rank is a process, forked from a server that has imported torch once.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.forkserver
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPO

import train_gpt
from train_gpt import parse_args, validate

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["test_distributed"])

STEPS, WORLD_SIZES = 12, (1, 2, 3, 4)
# Ranks sum in another order than one process does, and steps make some 10^5 times as much of the
# difference, since Muon brings what is next to nothing up to size. The runs compute in float64, in
# which that is about 1e-11 of a loss, and anything but rounding would show.
LOSS_RTOL, STATE_RTOL = 1e-9, 1e-6
FLAGS = f"""--preset pocket --device cpu --model_dim 32 --head_dim 16 --attention_pattern L.S
    --value_embed_pattern 0.0 --backout_layer 1 --sequences_per_step 12 --seq_lens 128,256
    --sequences_per_forward 4 --num_iterations {STEPS} --val_every 4 --val_tokens 1500
    --val_seq_len 256 --warmup_steps 1 --run_id x --sequence_stride 5 --vocab_multiple 128
    --embed_lr 0.6 --cooldown_frac 0.4 --freeze_steps 2 --long_windows 1,2
    --lr_factors 0.8,1.0""".split()  # stages begin at steps 3, 6 and 8


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run_rank(rank, world_size, port, folder, flags):
    """One rank's process: main() in float64, then what it had goes into a file."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    os.chdir(folder)
    torch.set_num_threads(1)
    losses, built = [], {}
    check, build = train_gpt.Health.check, train_gpt.build
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double

    def checked(self, step, both):
        losses.append(both[0].item())
        check(self, step, both)

    def noted(cfg, ranks):
        built["model"], built["optimizers"] = build(cfg, ranks)
        for optimizer in built["optimizers"]:
            optimizer.dtype = torch.float64  # Muon's
        return built["model"], built["optimizers"]

    train_gpt.Health.check, train_gpt.build = checked, noted
    with open(f"out-{rank}", "w") as out, contextlib.redirect_stdout(out):
        code = train_gpt.main(flags)
    optimizers = built["optimizers"]
    found = {
        "losses": losses,
        "model": built["model"].state_dict(),
        "numel": {o.name: o.numel for o in optimizers},
        "owned": {o.name: (o.mine.start, o.mine.stop) for o in optimizers},
        "columns": {o.name: getattr(o, "batch", [1])[-1] for o in optimizers},
        "state": {o.name: o.state for o in optimizers},
        "full_state": {o.name: o.full_state() for o in optimizers},
    }
    torch.save(found, f"found-{rank}.pt")
    sys.exit(code)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, write_shard):
    """{world size: (what each rank found, the log's end)} of runs on the same data."""
    with pytest.MonkeyPatch.context() as patch:  # the server finds this file and the script
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.forkserver.ensure_running()
    data, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    # Text of a kind, so that there is something to learn; 3 short and 2 long steps of the first
    # and 3 of the second shard, then again.
    for name, count in (("train_0", 14_000), ("train_1", 10_000), ("val_0", 1700)):
        tokens = generator.choice(257, size=count, p=np.arange(257) / np.arange(257).sum())
        write_shard(data / f"{name}.bin", tokens)
    flags = [*FLAGS, "--train_files", f"{data}/train_*.bin", "--val_files", f"{data}/val_*.bin"]
    started, results = {}, {}
    for world_size in WORLD_SIZES:  # all at once
        folder, port = tmp_path_factory.mktemp(f"ranks-{world_size}"), free_port()
        processes = [FORKS.Process(target=run_rank, args=(rank, world_size, port, folder, flags))
                     for rank in range(world_size)]
        for process in processes:
            process.start()
        started[world_size] = folder, processes
    for world_size, (folder, processes) in started.items():
        for process in processes:
            process.join(120)
            process.kill()
        assert [process.exitcode for process in processes] == [0] * world_size
        found = [torch.load(folder / f"found-{rank}.pt") for rank in range(world_size)]
        log = (folder / "logs" / "x" / "log.txt").read_text().rpartition("=" * 100)[2]
        out = [(folder / f"out-{rank}").read_text() for rank in range(world_size)]
        results[world_size] = SimpleNamespace(ranks=found, log=log, out=out)
    return results


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_any_number_of_ranks_has_the_losses_of_one(runs, world_size):
    one = runs[1].ranks[0]["losses"]
    many = np.mean([rank["losses"] for rank in runs[world_size].ranks], axis=0)
    assert len(one) == STEPS
    assert one[-1] < one[0] - 0.1, "something is learnt, so that losses depend on the steps before"
    np.testing.assert_allclose(many, one, rtol=LOSS_RTOL)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_any_number_of_ranks_has_the_validation_losses_of_one(runs, world_size):
    """6 sequences of which the last is short: 2 ranks have 3 each, 4 ranks have 2, 2, 1, 1."""
    read = [re.findall(r"val_loss:\s?([\d.]+)", runs[n].log) for n in (1, world_size)]
    assert [len(losses) for losses in read] == [STEPS // 4 + 2] * 2
    one, many = ([float(x) for x in losses] for losses in read)
    np.testing.assert_allclose(many, one, rtol=0, atol=1e-6)  # the last has that many decimals


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_log_has_the_training_loss_of_all_ranks(runs, world_size):
    """The mean over the ranks, whose shares of a step are equal."""
    log = runs[world_size].log
    logged = re.findall(r"^step:(\d+)/12 train_loss:(\S+) (?:next|train_time)", log, re.M)
    assert [int(step) for step, _ in logged] == list(range(1, STEPS + 1))
    ranks = [rank["losses"] for rank in runs[world_size].ranks]
    expected = [sum(losses) / world_size for losses in zip(*ranks, strict=True)]
    np.testing.assert_allclose([float(loss) for _, loss in logged], expected, rtol=0, atol=6e-5)
    if world_size > 1:
        assert max(abs(np.subtract(ranks[0], expected))) > 1e-3, "one rank's is another number"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_are_bit_identical_on_all_ranks(runs, world_size):
    first, *others = (rank["model"] for rank in runs[world_size].ranks)
    for other in others:
        for name, x in first.items():
            assert torch.equal(x, other[name]), name
    for name, x in runs[1].ranks[0]["model"].items():
        difference = (first[name] - x).norm() / x.norm().clamp_min(1e-9)
        assert difference < STATE_RTOL, name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_optimizer_state_is_disjoint_and_sums_to_the_whole(runs, world_size):
    ranks = runs[world_size].ranks
    for name, numel in ranks[0]["numel"].items():
        owned = [rank["owned"][name] for rank in ranks]
        starts, stops = zip(*owned, strict=True)
        assert starts == (0, *stops[:-1]) and stops[-1] >= numel
        for key, full in ranks[0]["full_state"][name].items():
            parts = [rank["state"][name][key] for rank in ranks]
            if parts[0].ndim:
                # An entry an element, or, of the mean squares of Muon's updates, one a row.
                a_row = ranks[0]["columns"][name] if key == "square" else 1
                assert [part.numel() * a_row for part in parts] == [b - a for a, b in owned]
                assert torch.equal(torch.cat(parts).flatten(), full)
                assert not full[numel // a_row :].any(), "padding stays zero"
                full = full[: numel // a_row]
            expected = runs[1].ranks[0]["full_state"][name][key]
            assert (full - expected).norm() <= STATE_RTOL * expected.norm(), (name, key)

    def memory(rank):
        return sum(x.numel() for state in rank["state"].values() for x in state.values())

    for rank in ranks:  # up to a matrix or a scalar more in each optimizer
        assert memory(rank) < 1.3 * memory(runs[1].ranks[0]) / world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_only_rank_0_speaks(runs, world_size):
    log = runs[world_size].log
    assert [bool(out) for out in runs[world_size].out] == [rank == 0 for rank in range(world_size)]
    assert f"\nworld_size: {world_size}\n" in log
    epochs = re.findall(r"epoch \d", log)
    assert epochs == re.findall(r"epoch \d", runs[1].log) and "epoch 2" in epochs


# Validation, each rank in turn in this process


class TokenCounter(torch.nn.Module):
    """In place of a model: notes what it is asked, and its loss is the sum of the targets."""

    def __init__(self):
        super().__init__()
        self.pairs = []

    def forward(self, inputs, targets):
        assert not self.training and not torch.is_grad_enabled()
        counted = targets != -1
        self.pairs += zip(inputs[counted].tolist(), targets[counted].tolist(), strict=True)
        return targets[counted].sum().float()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("val_tokens", [1, 128, 1000, 1024, 1025, 1536, 5000])
def test_validation_counts_every_token_once(world_size, val_tokens):
    cfg = dataclasses.replace(
        parse_args(["--preset", "pocket"]), val_tokens=val_tokens, val_seq_len=256)
    tokens = np.arange(val_tokens + 1, dtype=np.uint16)  # each one tells its position
    pairs, totals = [], []
    for rank in range(world_size):
        model = TokenCounter().train()
        ranks = SimpleNamespace(
            rank=rank, world_size=world_size, device=torch.device("cpu"),
            all_gather=lambda x: x[None],
        )
        totals.append(validate(model, tokens, cfg, ranks) * val_tokens)
        assert model.training, "as it was before"
        pairs += model.pairs
    assert sorted(pairs) == [(i, i + 1) for i in range(val_tokens)]
    assert sum(totals) / val_tokens == pytest.approx((val_tokens + 1) / 2, rel=1e-9)


# Whole runs under torchrun


@pytest.mark.slow
def test_two_processes_agree_with_one_on_every_validation_of_a_pocket_run(
    pocket_data, run_script, tmp_path
):
    # One process adds up the halves of a batch that two processes have.
    flags = """--preset pocket --device cpu --num_iterations 60 --val_every 15
        --val_tokens 16384 --sequences_per_forward 8 --muon_lr 0.02""".split()
    losses = []
    for nproc in (1, 2):
        done = run_script(flags, nproc=nproc, timeout=300)
        assert done.returncode == 0, done.stderr
        decimals = re.findall(r"val_loss:(\d)\.(\d{4}) ", done.stdout)
        losses.append([int("".join(digits)) for digits in decimals])  # in units of 1e-4
    one, two = losses
    assert len(one) == len(two) == 5
    assert one[-1] < one[0] - 20_000
    # Gradients of head and embedding are added in another order, and differ in the last bits of
    # fp32. Polar Express, whose first iteration takes small singular values by eight, hands on more
    # of them than Newton-Schulz did; at the pocket's own rate, four times as high, they grow.
    np.testing.assert_allclose(two, one, rtol=0, atol=20)


@pytest.mark.slow
def test_two_nodes_train(tiny_shards, tmp_path, final_values):
    train, val = tiny_shards([7000]), tiny_shards([1700], name="tiny_val")
    flags = [*FLAGS, "--num_iterations", "3", "--train_files", train, "--val_files", val]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two",
        "--local-addr=127.0.0.1", str(REPO / "train_gpt.py"), *flags,
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    nodes = []
    for name in ("a", "b"):  # each with its own current folder, as on two machines
        (tmp_path / name).mkdir()
        nodes.append(
            subprocess.Popen(
                command,
                cwd=tmp_path / name,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    logs = list(tmp_path.glob("*/logs/x/log.txt"))
    assert len(logs) == 1, "one of the nodes has rank 0, and it alone writes"
    values = final_values(logs[0].read_text())
    assert (values["world_size"], values["steps"]) == ("2", "3")
