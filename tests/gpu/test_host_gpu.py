"""The GPU path executed without a GPU: losses, gradients, steps and whole runs against the CPU's.

Each kernel that torch.compile makes for the card is run by Triton's interpreter (host_gpu/), on a
model of three layers. A real GPU rounds other than the host does and has test_gpu.py.
"""

import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import socket
import sys

import host_gpu
import pytest
import torch
from conftest import REPO
from test_gpu import (
    ON_HOST,
    SMALL,
    changes_by_noise,
    errors_of,
    losses_and_gradients,
    make_batch,
    make_model,
    on_the_gpu,
    one_rank,
    relative_error,
    step_by_noise,
)

import train_gpt

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TINY = dataclasses.replace(SMALL, num_iterations=10, extension_steps=0, fp8_head=False)
# Those of the record, in bf16 on sm_90: in fp32 torch would take blocks of 16, and minutes here.
BLOCKS = dict(BLOCK_M=128, BLOCK_N=64, BLOCK_M1=64, BLOCK_N1=128, BLOCK_M2=128, BLOCK_N2=64)
FP32_RTOL = 1e-5  # sums of fp32 in another order
MUON_RTOL = 1e-3  # five quintic iterations amplify these


@pytest.fixture(autouse=True)
def on_the_host():
    """sm_90 and no compiled code at first."""
    if not ON_HOST:
        pytest.skip("its tolerances are the host's; test_gpu.py is for this GPU")
    host_gpu.use_card("sm_90")
    torch._dynamo.reset()


# ---- a step: loss, gradients, optimizers ------------------------------------


def in_fp32(model, cfg):
    """`on_the_gpu`, in fp32 throughout: what remains is the order of sums."""
    twin = on_the_gpu(model, cfg).float()
    twin.load_state_dict(model.state_dict())
    for block in twin.blocks:
        if block.attn is not None:
            block.attn.kernel_options = block.attn.kernel_options or BLOCKS
    return twin


def assert_same_step(gpu, cpu, batch, window):
    losses, grads = losses_and_gradients(gpu, batch, window)
    cpu_losses, cpu_grads = losses_and_gradients(cpu, batch, window)
    torch.testing.assert_close(losses, cpu_losses, rtol=FP32_RTOL, atol=0)
    assert grads.keys() == cpu_grads.keys()
    errors = errors_of(grads, cpu_grads)
    assert max(errors.values()) < FP32_RTOL, errors
    return losses


def assert_same_validation(gpu, cpu, batch, store_masks):
    losses = []
    for model in gpu, cpu:
        device = model.reach.device
        model.eval()
        with torch.no_grad(), store_masks(device):
            losses.append(model(*(x.to(device) for x in batch)).cpu())
        model.train()
    torch.testing.assert_close(*losses, rtol=FP32_RTOL, atol=0)


def assert_same_update(gpu, cpu, cfg):
    changes = changes_by_noise(gpu, cfg)
    for name, change in changes_by_noise(cpu, cfg).items():
        rtol = MUON_RTOL if name.startswith("blocks") and change.ndim >= 2 else FP32_RTOL
        assert change.any(), name
        assert relative_error(changes[name], change) < rtol, name


def test_a_step_in_fp32_is_that_of_the_cpu():
    """Forward, backward, validation, both optimizers: attention, norms, embeddings, head, loss."""
    cpu = make_model(TINY)
    gpu = in_fp32(cpu, TINY)
    assert_same_step(gpu, cpu, make_batch(TINY), window=2)
    assert_same_validation(gpu, cpu, make_batch(TINY), train_gpt.store_masks)
    assert_same_update(gpu, cpu, TINY)


def test_windows_chunks_rows_and_a_small_card_change_nothing():
    """A card of less shared memory, two rows, two head chunks; all windows take one graph."""
    host_gpu.use_card("sm_86")
    cfg = dataclasses.replace(TINY, head_dim=32, sequences_per_forward=2)
    cpu = make_model(cfg)
    gpu = in_fp32(cpu, cfg)
    assert gpu.blocks[0].attn.kernel_options == train_gpt.SMALL_TILES
    gpu.tokens_per_chunk = 384
    batch = make_batch(cfg, rows=2)
    losses = [assert_same_step(gpu, cpu, batch, window=1)]
    with torch.compiler.set_stance("fail_on_recompile"):
        losses.append(assert_same_step(gpu, cpu, batch, window=3))
    assert not torch.equal(*losses), "the window must matter, or the comparison says nothing"


# ---- whole runs -------------------------------------------------------------

STEPS = 4  # each of a stage of its own
ONE_TARGET = "1:128:128:128:1:1,0:128:128:128:1:1,0:128:128:128:1:1"
FLAGS = dict(
    preset="pocket", model_dim=32, head_dim=32, sequences_per_step=2, sequences_per_forward=2,
    stages="1:128:128:128:1:3,1:128:128:128:1:2," + ONE_TARGET,
    val_seq_len=256, val_tokens=256, val_every=2, save_every=2, warmup_steps=1,
    num_iterations=STEPS, extension_steps=1, run_id="x")


@pytest.fixture
def run(tmp_path, tiny_shards, monkeypatch, capsys):
    """`run(device, **flags)` runs main in tmp_path. It gives its exit code and the log as read."""
    sys.path.insert(0, str(REPO / "records"))
    from ledger.logs import read_log

    monkeypatch.chdir(tmp_path)
    data = dict(train_files=tiny_shards([3000]), val_files=tiny_shards([300], name="tiny_val"))

    def run_main(device, **flags):
        flags = FLAGS | data | flags | dict(device=device)
        code = train_gpt.main([word for k, v in flags.items() for word in (f"--{k}", str(v))])
        assert not capsys.readouterr().err
        return code, read_log(tmp_path / "logs" / flags["run_id"] / "log.txt")

    return run_main


def val_losses(log):
    return {step: loss for step, (loss, _) in log.val.items()}


def test_a_run_is_stopped_and_resumed_and_the_ledger_reads_it(run, monkeypatch):
    """It trains, validates, saves, stops, and goes on to the very same end."""

    def next_step_and_signal(loader, now):
        patch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        return loader.next_step(now)

    code, whole = run("cuda")
    assert code == 0
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt.TokenLoader, "next_step", next_step_and_signal)
        code, first = run("cuda", run_id="y")
    assert code == 1
    assert "\nstopped by a signal" in first.body
    code, both = run("cuda", run_id="y", resume="auto")
    assert code == 0
    assert "resumed at step:2" in both.body
    assert list(val_losses(whole)) == [0, 2, STEPS]
    assert val_losses(both) == val_losses(whole)
    assert both.final["val_loss"] == whole.final["val_loss"]
    assert whole.header["device"] == "host standing in for an H100", "no GPU's name in a log"
    assert float(whole.final["val_loss"]) == pytest.approx(val_losses(whole)[STEPS], abs=1e-4)


def test_a_checkpoint_of_one_device_is_resumed_on_the_other(run):
    """Validated where it is resumed, it has the loss that it had where it was saved."""
    run = functools.partial(run, stages=ONE_TARGET)  # one graph for all stages
    for saved_on, resumed_on in (("cpu", "cuda"), ("cuda", "cpu")):
        name = f"from-{saved_on}"
        code, saved = run(saved_on, run_id=name, num_iterations=2)
        assert code == 0
        path = f"logs/{name}/step-000002.pt"
        code, resumed = run(resumed_on, run_id=f"to-{resumed_on}", resume=path)
        assert code == 0
        assert "resumed at step:2" in resumed.body
        # bf16 rounds the embeddings and, in each layer, the activations: 0.4 % at most of each.
        assert val_losses(resumed)[2] == pytest.approx(val_losses(saved)[2], rel=2e-3)
        assert math.isfinite(val_losses(resumed)[STEPS])


# ---- two ranks --------------------------------------------------------------


def run_rank(rank, port, folder):
    """What each rank's process does: steps on gradients of its own, then it saves."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    ranks = train_gpt.Ranks(dataclasses.replace(TINY, device="cuda"))
    model = make_model(TINY).to(ranks.device)
    step_by_noise(train_gpt.build_optimizers(model, TINY, ranks), TINY, [rank])
    numbers = ranks.all_gather(torch.tensor([rank], device=ranks.device)).tolist()
    torch.save((numbers, ranks.world_size, model.cpu().state_dict()), folder / f"rank-{rank}")


def test_two_ranks_step_like_one_on_the_sum_of_their_gradients(tmp_path):
    """Each rank is a machine of its own with one GPU; gloo stands in for NCCL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(rank, port, tmp_path), daemon=True)
                 for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0]
    model = make_model(TINY).to("cuda")
    step_by_noise(train_gpt.build_optimizers(model, TINY, one_rank("cuda")), TINY, range(2))
    for rank in range(2):
        numbers, world_size, state = torch.load(tmp_path / f"rank-{rank}")
        assert (numbers, world_size) == ([[0], [1]], 2)
        for name, x in model.state_dict().items():
            assert relative_error(state[name], x) < FP32_RTOL, name
