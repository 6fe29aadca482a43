"""The GPU path executed without a GPU: losses, gradients, steps and whole runs against the CPU's.

Each kernel that torch.compile makes for the card is run by Triton's interpreter (host_gpu/), on a
model of three layers. All run in one session of their own, beside the others; a real GPU rounds
other than the host does and has test_gpu.py.
"""

import copy
import dataclasses
import functools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from conftest import REPO

import train_gpt

pytestmark = pytest.mark.gpu

TINY = dataclasses.replace(
    train_gpt.Hyperparameters(),
    vocab_size=257, eot_token=256, vocab_multiple=16, model_dim=32, head_dim=16,
    attention_pattern="L.S", value_embed_pattern="0..", skip_layer=0, backout_layer=0,
    train_seq_len=384, val_seq_len=384, sequences_per_step=1, num_iterations=10, extension_steps=0,
    head_chunks=1, fp8_head=False, embed_std=0.1,
    fp8_x_scale=16.0, fp8_w_scale=64.0,  # the record's are those of its width
)  # fmt: skip
# Those of the record, in bf16 on sm_90: in fp32 torch would take blocks of 16, and minutes here.
BLOCKS = dict(BLOCK_M=128, BLOCK_N=64, BLOCK_M1=64, BLOCK_N1=128, BLOCK_M2=128, BLOCK_N2=64)
FP32_RTOL = 1e-5  # sums of fp32 in another order
MUON_RTOL = 1e-3  # five quintic iterations amplify these
FAULT = 0.01  # the least change of a gradient that is to be found


@pytest.fixture(autouse=True)
def on_the_host():
    """sm_90 and no compiled code at first."""
    if not torch.cuda.get_device_name().startswith("host standing in for "):
        pytest.skip("its tolerances are the host's; test_gpu.py is for this GPU")
    use_card("sm_90")
    torch._dynamo.reset()


def use_card(name):
    import host_gpu

    host_gpu.use_card(name)


def relative_error(x, reference):
    x, reference = x.detach().cpu().double(), reference.detach().cpu().double()
    return ((x - reference).norm() / reference.norm()).item()


def one_rank(device):
    return types.SimpleNamespace(rank=0, world_size=1, device=torch.device(device))


# ---- the instrument itself --------------------------------------------------


def test_the_interpreter_rounds_reduces_and_scans_as_torch_does():
    """Kernels made of what it lacks by itself; on the CPU the same functions are not compiled."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(8, 64, generator=generator)

    def rounded(x):
        types = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
        return [x.to(dtype) for dtype in types]

    def computed(x):
        return x.var(-1), x.argmax(-1), x.cumsum(-1), x.exp().log1p(), x.softmax(-1), x.rsqrt()

    compiled = torch.compile(lambda x: (rounded(x), computed(x)), dynamic=False)
    bits, values = compiled(x.cuda())
    for found, reference in zip(bits, rounded(x)):
        assert torch.equal(found.cpu().float(), reference.float())
    for found, reference in zip(values, computed(x)):
        torch.testing.assert_close(found.cpu(), reference, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_accesses_outside_of_the_memory_are_errors_and_new_memory_is_nan():
    from host_gpu.interpreter import Bounds

    x = torch.ones(8, device="cuda")
    y = torch._C._dynamo.guards._empty_strided_cuda((3,), (1,), torch.float32)
    assert y.isnan().all()
    bounds = Bounds("kernel", [x, 3])
    addresses = np.array([x.data_ptr() + 4 * i for i in range(9)], np.uint64)
    bounds.check("reads", addresses[:8], np.ones(8, bool), 4)
    bounds.check("reads", addresses, np.arange(9) < 8, 4)
    for outside, width in ((addresses, 4), (addresses[:8], 8), (addresses - np.uint64(4), 4)):
        with pytest.raises(IndexError, match="kernel reads outside"):
            bounds.check("reads", outside, np.ones(len(outside), bool), width)


# ---- a step: loss, gradients, optimizers ------------------------------------


def make_model(cfg):
    """On the CPU, in fp32, no weight zero, so that each has a gradient."""
    model, generator = train_gpt.GPT(cfg), torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim < 2:
                param.uniform_(0.3, 1.2, generator=generator)
            elif not param.any():
                size = param.size(0) if name.endswith("mlp.c_proj") else param.size(1)
                param.normal_(std=size**-0.5, generator=generator)
    return model


def on_the_gpu(model, cfg):
    """The same weights, prepared as the script does."""
    twin = train_gpt.GPT(cfg).to("cuda")
    twin.load_state_dict(model.state_dict())
    train_gpt.prepare_for_cuda(twin, cfg, torch.device("cuda", 0))
    return twin


def in_fp32(model, cfg):
    """`on_the_gpu`, in fp32 throughout: what remains is the order of sums."""
    twin = on_the_gpu(model, cfg).float()
    twin.load_state_dict(model.state_dict())
    twin.kernel_options = twin.kernel_options or BLOCKS
    return twin


def make_batch(cfg, rows=1):
    """Inputs, targets, and weights of three a token: two documents begin within the last block, and
    the last has no targets.

    The blocks before it are of one document, so that some are seen whole.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(cfg.eot_token, (rows, cfg.train_seq_len + 1), generator=generator)
    tokens[:, 300] = tokens[:, 340] = cfg.eot_token
    targets = tokens[:, 1:].clone()
    targets[:, -3:] = -1
    return tokens[:, :-1].int(), targets, train_gpt.target_weights(0, cfg)


def plain(name):
    return name.removeprefix("_orig_mod.")


def set_window(model, window):
    """Of so many blocks, in the layers of the long window; the tables stay as they are."""
    model.windows.copy_(torch.tensor([window, max(1, window // 2)]))


def loss_and_gradients(model, batch, window):
    device = model.windows.device
    set_window(model, window)
    model.zero_grad()
    loss = model(*(x.to(device) for x in batch))
    loss.backward()
    return loss.item(), {plain(n): p.grad.cpu().clone() for n, p in model.named_parameters()}


def errors_of(grads, reference):
    """Relative errors by name. A scalar's gradient is a sum of terms that may nearly cancel, and
    its error is that of the terms: it is held to the largest of the scalars'."""
    of_scalars = max(x.norm() for x in reference.values() if x.ndim < 2)
    sizes = {name: x.norm() if x.ndim >= 2 else of_scalars for name, x in reference.items()}
    return {n: ((grads[n].double() - x.double()).norm() / sizes[n]).item()
            for n, x in reference.items()}  # fmt: skip


def assert_same_step(gpu, cpu, batch, window):
    loss, grads = loss_and_gradients(gpu, batch, window)
    cpu_loss, cpu_grads = loss_and_gradients(cpu, batch, window)
    assert loss == pytest.approx(cpu_loss, rel=FP32_RTOL)
    errors = errors_of(grads, cpu_grads)
    assert max(errors.values()) < FP32_RTOL, errors
    return loss


OPTIMIZER_STEPS = 0, 1, 8, 9  # Adam's at the second; the head is tied, then not, and scalars rest


def changes_by_noise(model, cfg):
    """How much each weight changed in steps on gradients of noise, in fp32."""
    device = model.windows.device
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = train_gpt.build_optimizers(model, cfg, one_rank(device))
    for optimizer in optimizers:
        if isinstance(optimizer, train_gpt.Muon):
            optimizer.dtype = torch.float32
    for step in OPTIMIZER_STEPS:
        for optimizer in optimizers:
            optimizer.grads[: optimizer.numel] = noise_gradients(optimizer, 0, step)
        train_gpt.step_optimizers(optimizers, step, 2)
        assert not any(optimizer.grads.any() for optimizer in optimizers)
    return {plain(n): p.detach() - before[n] for n, p in model.named_parameters()}


def noise_gradients(optimizer, rank, step):
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(optimizer.numel, generator=generator)


@pytest.mark.slow
def test_a_step_in_fp32_is_that_of_the_cpu():
    """Forward, backward and both optimizers: attention, norms, embeddings, head and loss."""
    cpu = make_model(TINY)
    gpu = in_fp32(cpu, TINY)
    assert_same_step(gpu, cpu, make_batch(TINY), window=2)
    changes, cpu_changes = changes_by_noise(gpu, TINY), changes_by_noise(cpu, TINY)
    for name, change in cpu_changes.items():
        matrix = name.startswith("blocks") and change.ndim >= 2
        rtol = MUON_RTOL if matrix else FP32_RTOL
        assert relative_error(changes[name], change) < rtol, name


def test_uncompiled_the_model_is_that_of_the_cpu():
    """As for what is no training: of any length, by dense masks."""
    cpu = make_model(TINY).eval()
    gpu, inputs = train_gpt.GPT(TINY).to("cuda").eval(), make_batch(TINY)[0][:, :333]
    gpu.load_state_dict(cpu.state_dict())
    with torch.no_grad():
        logits = [model.logits(model.hidden(inputs.to(model.windows.device)))
                  for model in (gpu, cpu)]  # fmt: skip
    assert logits[0].shape == (1, 333, 272)
    assert relative_error(*logits) < FP32_RTOL


@pytest.mark.slow
def test_windows_chunks_rows_and_a_small_card_change_nothing():
    """A card of less shared memory, two rows, two head chunks; all windows take one graph."""
    use_card("sm_86")
    cfg = dataclasses.replace(TINY, head_dim=32, sequences_per_forward=2, head_chunks=2)
    cpu = make_model(cfg)
    gpu = in_fp32(cpu, cfg)
    assert gpu.kernel_options, "a small card has options of its own, or this tests nothing"
    batch = make_batch(cfg, rows=2)
    losses = [assert_same_step(gpu, cpu, batch, window=1)]
    with torch.compiler.set_stance("fail_on_recompile"):
        losses.append(assert_same_step(gpu, cpu, batch, window=3))
    assert losses[0] != losses[1], "the window must matter, or the comparison says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_step_in_few_bits_is_as_near_to_fp32_as_the_cpus_in_the_same(fp8):
    """Kernels may round elsewhere than the CPU's operators do, but no more often."""
    cfg = dataclasses.replace(TINY, fp8_head=fp8)
    cpu = make_model(cfg)
    gpu = on_the_gpu(cpu, cfg)
    assert (gpu.lm_head.fp8_scales is not None) == fp8
    same_types = copy.deepcopy(cpu)
    same_types.lm_head.fp8_scales = gpu.lm_head.fp8_scales
    types = {plain(name): p.dtype for name, p in gpu.named_parameters()}
    for (name, low), reference in zip(same_types.named_parameters(), cpu.parameters()):
        low.data = low.data.to(types[name])
        reference.data = low.data.float()  # as the GPU has them
    batch = make_batch(cfg)
    loss, grads = loss_and_gradients(gpu, batch, 2)
    low_loss, low_grads = loss_and_gradients(same_types, batch, 2)
    cpu_loss, cpu_grads = loss_and_gradients(cpu, batch, 2)
    assert abs(loss - cpu_loss) < 2 * abs(low_loss - cpu_loss) + 1e-3 * cpu_loss
    errors, low_errors = errors_of(grads, cpu_grads), errors_of(low_grads, cpu_grads)
    for kind in ("matrices", "scalars"):
        names = [n for n, x in cpu_grads.items() if (x.ndim >= 2) == (kind == "matrices")]
        assert max(errors[n] for n in names) < 1.5 * max(low_errors[n] for n in names), (
            errors, low_errors)  # fmt: skip


# ---- attention and FP8 products alone, and faults in them -------------------


def attention_error(flex_mask, window):
    """Relative error of the gradients of q, k, v, in fp32: compiled flex against dense masks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, y_grad = torch.randn(4, 1, TINY.train_seq_len, 1, 16, generator=generator).unbind()
    inputs, *_ = make_batch(TINY)
    docs = (inputs == TINY.eot_token).cumsum(1, dtype=torch.int32) + 1

    def attention(q, k, v, docs, window, build):
        mask = build(docs, window)
        return train_gpt.attend(q, k, v, mask=mask, scale=0.3, kernel_options=BLOCKS)

    gradients = []
    for device, build in (("cuda", flex_mask), ("cpu", train_gpt.dense_mask)):
        compute = torch.compile(attention, dynamic=False) if device == "cuda" else attention
        leaves = [x.to(device).requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
        blocks = torch.tensor(window, dtype=torch.int32, device=device)
        compute(*leaves, docs.to(device), blocks, build).backward(y_grad.to(device))
        gradients.append(torch.stack([x.grad.cpu() for x in leaves]))
    return relative_error(*gradients)


def window_off_by_one(docs, window):
    return train_gpt.flex_mask(docs, window + 1)


def full_blocks_forget_causality(docs, window):
    """The list of full blocks also has the block of the query itself."""
    mask = train_gpt.flex_mask(docs, window)
    own = torch.arange(mask.kv_indices.size(-1), dtype=torch.int32, device=docs.device)
    count, indices = mask.full_kv_num_blocks, mask.full_kv_indices
    position = torch.arange(indices.size(-1), device=docs.device)
    indices = torch.where(position == count[..., None], own[:, None], indices)
    return train_gpt.BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, count + 1, indices,
        BLOCK_SIZE=train_gpt.BLOCK, mask_mod=mask.mask_mod,
    )  # fmt: skip


@pytest.mark.slow
def test_faults_of_the_masks_are_found():
    assert attention_error(train_gpt.flex_mask, window=2) < FP32_RTOL
    assert attention_error(window_off_by_one, window=2) > FAULT
    assert attention_error(full_blocks_forget_causality, window=2) > FAULT


def fp8_head_error():
    """The larger relative error, of output and gradients, of a compiled FP8 product."""
    generator = torch.Generator().manual_seed(0)
    head = train_gpt.CastedLinear(32, 64)
    x, y_grad = torch.randn(128, 32, generator=generator), torch.randn(128, 64, generator=generator)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    results = []
    for device in ("cuda", "cpu"):
        twin, leaf = copy.deepcopy(head).to(device), x.to(device, torch.bfloat16).requires_grad_()
        if device == "cuda":
            twin.fp8_scales = (16.0, 16.0, 16.0)
            twin.compile(dynamic=False)
        y = twin(leaf)
        y.backward(y_grad.to(y))
        results.append([y, leaf.grad, twin.weight.grad])
    return max(relative_error(*pair) for pair in zip(*results))


@pytest.mark.slow
def test_a_wrong_fp8_scale_is_found(monkeypatch):
    assert fp8_head_error() < 0.1
    torch._dynamo.reset()
    scaled_mm = torch._scaled_mm

    def wrongly_scaled_mm(a, b, scale_a, *args, **kwargs):
        return scaled_mm(a, b, 2 * scale_a, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", wrongly_scaled_mm)
    assert fp8_head_error() > 0.5


# ---- validation -------------------------------------------------------------


@pytest.mark.slow
def test_validation_is_that_of_the_cpu():
    """Two sequences, the last of which is short."""
    cpu = make_model(TINY)
    gpu = in_fp32(cpu, TINY)
    tokens = np.random.default_rng(0).integers(TINY.vocab_size, size=500).astype(np.uint16)
    losses = []
    for model, device in ((gpu, "cuda"), (cpu, "cpu")):
        set_window(model, 2)
        ranks = train_gpt.Ranks(dataclasses.replace(TINY, device=device))
        losses.append(train_gpt.validate(model, tokens, TINY, ranks))
    assert losses[0] == pytest.approx(losses[1], rel=FP32_RTOL)


# ---- whole runs -------------------------------------------------------------

STEPS = 4  # each of a stage of its own
FLAGS = dict(
    preset="pocket", model_dim=32, head_dim=32, sequences_per_step=2, sequences_per_forward=2,
    train_seq_len=128, val_seq_len=256, val_tokens=250, val_every=2, save_every=2, warmup_steps=1,
    num_iterations=STEPS, extension_steps=1, run_id="x",
)  # fmt: skip


@pytest.fixture
def run(tmp_path, tiny_shards, monkeypatch, capsys):
    """`run(device, **flags)` runs main in tmp_path; its exit code and the log's new lines."""
    monkeypatch.chdir(tmp_path)
    data = dict(train_files=tiny_shards([3000]), val_files=tiny_shards([300], name="tiny_val"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run_main(device, **flags):
        flags = FLAGS | data | flags | dict(device=device)
        log = tmp_path / "logs" / flags["run_id"] / "log.txt"
        before = len(log.read_text()) if log.exists() else 0
        code = train_gpt.main([w for k, v in flags.items() for w in (f"--{k}", str(v))])
        assert not capsys.readouterr().err
        return code, log.read_text()[before:].rpartition("=" * 100)[2]

    yield run_main
    for number, handler in handlers.items():
        signal.signal(number, handler)


def val_losses(text):
    found = re.findall(r"^step:(\d+)/\d+ val_loss:([\d.]+)", text, re.M)
    return {int(step): float(loss) for step, loss in found}


def stop_in_step(monkeypatch, number):
    """SIGTERM while the data of that step are read."""
    next_step, steps = train_gpt.TokenLoader.next_step, iter(range(STEPS + 1))

    def next_step_or_signal(self, length):
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_step(self, length)

    monkeypatch.setattr(train_gpt.TokenLoader, "next_step", next_step_or_signal)


@pytest.mark.slow
def test_a_run_is_stopped_and_resumed_and_the_ledger_reads_it(
    run, tmp_path, monkeypatch, final_values
):
    """It trains, validates, saves, stops, and goes on to the very same end."""
    sys.path.insert(0, str(REPO / "records"))
    import ledger

    code, whole = run("cuda")
    assert code == 0
    with monkeypatch.context() as patch:
        stop_in_step(patch, 1)
        code, first = run("cuda", run_id="y")
    assert code == 128 + signal.SIGTERM and "stopped at step:" in first
    code, second = run("cuda", run_id="y", resume="auto")
    assert code == 0 and "resumed at step:" in second
    assert list(val_losses(whole)) == [0, 2, STEPS]
    assert val_losses(first) | val_losses(second) == val_losses(whole)
    assert final_values(second)["val_loss"] == final_values(whole)["val_loss"]

    log = ledger.read_log(tmp_path / "logs" / "x" / "log.txt")
    assert log.header["device"] == "host standing in for an H100", "no GPU's name in a log"
    assert float(log.final["val_loss"]) == pytest.approx(val_losses(whole)[STEPS], abs=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_one_device_is_resumed_on_the_other(run):
    """Validated where it is resumed, it has the loss that it had where it was saved."""
    run = functools.partial(run, targets_ahead=1)  # one graph for all stages
    for saved_on, resumed_on in (("cpu", "cuda"), ("cuda", "cpu")):
        name = f"from-{saved_on}"
        code, saved = run(saved_on, run_id=name, num_iterations=2)
        assert code == 0
        path = f"logs/{name}/step-000002.pt"
        code, resumed = run(resumed_on, run_id=f"to-{resumed_on}", resume=path)
        assert code == 0 and "resumed at step:2" in resumed
        # bf16 rounds the embeddings and, in each layer, the activations: 0.4 % at most of each.
        assert val_losses(resumed)[2] == pytest.approx(val_losses(saved)[2], rel=2e-3)
        assert math.isfinite(val_losses(resumed)[STEPS])


# ---- two ranks --------------------------------------------------------------


def run_rank(path):
    """What each rank's process does: steps on gradients of its own, then it saves."""
    device = torch.device("cuda", 0)
    ranks = train_gpt.Ranks(dataclasses.replace(TINY, device="cuda", sequences_per_step=2))
    model = make_model(TINY).to(device)
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)
    for step in OPTIMIZER_STEPS:
        for optimizer in optimizers:
            optimizer.grads[: optimizer.numel] = noise_gradients(optimizer, ranks.rank, step)
        train_gpt.step_optimizers(optimizers, step, 2)
    ranks.check_parity(2, model)
    name = ranks.broadcast(f"of rank {ranks.rank}")
    state = {name: x.cpu() for name, x in model.state_dict().items()}
    torch.save((name, ranks.world_size, state), f"{path}-{ranks.rank}")


@pytest.mark.slow
def test_two_ranks_step_like_one_on_the_sum_of_their_gradients(tmp_path):
    """Each rank is a machine of its own with one GPU; gloo stands in for NCCL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, REPO / "tests" / "gpu" / "host_gpu", __file__, tmp_path / "rank"]
    group = dict(WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    processes = [
        subprocess.Popen(
            command, env=os.environ | group | dict(RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    model = make_model(TINY).to("cuda")
    optimizers = train_gpt.build_optimizers(model, TINY, one_rank("cuda"))
    for step in OPTIMIZER_STEPS:
        for optimizer in optimizers:
            parts = (noise_gradients(optimizer, rank, step) for rank in range(2))
            optimizer.grads.copy_(sum(parts))
        train_gpt.step_optimizers(optimizers, step, 2)
    for rank in range(2):
        name, world_size, state = torch.load(f"{tmp_path}/rank-{rank}")
        assert (name, world_size) == ("of rank 0", 2)
        for name, x in model.state_dict().items():
            assert relative_error(state[name], x) < FP32_RTOL, name


if __name__ == "__main__":
    run_rank(sys.argv[1])
