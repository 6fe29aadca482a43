"""What only a GPU can show: kernels against formulas, no waiting, no compiling after the warm-up.

    python -m pytest -m gpu

Without a GPU most run smaller on a host that stands in for one (host_gpu/), if asked for slow ones.
"""

import copy
import dataclasses
import importlib.metadata
import re

import pytest
import torch
from conftest import final_values
from torch.utils import collect_env

import train_gpt
from train_gpt import BLOCK

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def stages_of(length):
    """The record's rows with sequences of one length."""
    rows = train_gpt.Hyperparameters().stages
    return tuple(dataclasses.replace(row, seq_len=length) for row in rows)


ON_HOST = torch.cuda.is_available() and "standing in" in torch.cuda.get_device_name()
SMALL = dataclasses.replace(
    train_gpt.Hyperparameters(), vocab_size=1000, eot_token=999, model_dim=256,
    layers=("L0:skip", "S", ".:saved", "L0"), stages=stages_of(3072),
    val_seq_len=4096, val_tokens=8192, val_every=3, num_iterations=16, extension_steps=1,
    sequences_per_step=2, head_chunks=1, warmup_steps=2)  # Adam steps at the second
if ON_HOST:  # its kernels are interpreted
    SMALL = dataclasses.replace(
        SMALL, vocab_size=257, eot_token=256, vocab_multiple=16, model_dim=32, head_dim=16,
        layers=("L0:skip:saved", ".", "S"), stages=stages_of(384), val_seq_len=256,
        val_tokens=256, num_iterations=5, sequences_per_step=1)
# Relative error of a norm. bf16 keeps 8 bits: 0.4 % a rounding, some ten of which add up in a row.
BF16_ERROR = 0.03


def relative_error(x, reference):
    x = x.detach().cpu().double()
    reference = reference.detach().cpu().double()
    return ((x - reference).norm() / reference.norm()).item()


def one_rank(device):
    """This process alone, without torchrun's variables."""
    ranks = object.__new__(train_gpt.Ranks)
    vars(ranks).update(rank=0, world_size=1, device=torch.device(device))
    return ranks


def make_model(cfg):
    """On the CPU, in fp32, no weight zero, so that each has a gradient."""
    model = train_gpt.GPT(cfg)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim < 2:
                param.uniform_(0.3, 1.2, generator=generator)
            elif name in ("embed.weight", "lm_head.weight"):
                param.mul_(20)
            elif not param.any():
                size = param.size(0) if name.endswith("mlp.c_proj") else param.size(1)
                param.normal_(std=size**-0.5, generator=generator)
    return model


def on_the_gpu(model, cfg):
    """The same weights, prepared as the script does."""
    torch._dynamo.reset()
    twin = train_gpt.GPT(cfg).to("cuda")
    twin.load_state_dict(model.state_dict())
    train_gpt.prepare_for_cuda(twin, cfg, torch.device("cuda", 0))
    return twin


def make_batch(cfg, rows=1):
    """Of the first three blocks, the last has the begin of two documents, the others see one."""
    generator = torch.Generator().manual_seed(0)
    length = cfg.stages[0].seq_len
    tokens = torch.randint(cfg.eot_token, (rows, length + 1), generator=generator)
    tokens[:, [300, 340, *range(1000, length, 300)]] = cfg.eot_token
    targets = tokens[:, 1:].clone()
    targets[:, -3:] = -1
    return tokens[:, :-1].int(), targets


def losses_and_gradients(model, batch, window):
    """Of three targets a token, with a long window of so many blocks."""
    model.reach.copy_(BLOCK * torch.tensor([window, max(1, window // 2)]))
    model.zero_grad()
    batch = [x.to(model.reach.device) for x in batch]
    losses = train_gpt.accumulate_gradients(model, [batch], train_gpt.schedule(0, model.cfg))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses.cpu(), {name: grad.cpu().clone() for name, grad in grads.items()}


def errors_of(grads, reference):
    """Relative, by name. A scalar's is of the largest scalar's: its sum's terms may cancel."""
    of_scalars = max(x.norm() for x in reference.values() if x.ndim < 2)
    errors = {}
    for name, x in reference.items():
        error = (grads[name].double() - x.double()).norm()
        errors[name] = (error / (x.norm() if x.ndim >= 2 else of_scalars)).item()
    return errors


@pytest.mark.parametrize("fp8, chunks", [(False, 1), (False, 4), (True, 1)])
def test_a_step_in_few_bits_is_as_near_to_fp32_as_the_cpus_in_the_same(fp8, chunks, monkeypatch):
    """FlexAttention and compiled kernels may round elsewhere than the CPU's operators do, but no
    more often."""
    # The script's are those of the record's width.
    monkeypatch.setattr(train_gpt, "FP8_X_SCALE", 16.0)
    monkeypatch.setattr(train_gpt, "FP8_W_SCALE", 64.0)
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    cpu = make_model(SMALL)
    gpu = on_the_gpu(cpu, dataclasses.replace(SMALL, fp8_head=fp8))
    gpu.tokens_per_chunk = train_gpt.round_up(SMALL.stages[0].seq_len // chunks, 128)
    assert gpu.lm_head.use_fp8 == fp8
    same_types = copy.deepcopy(cpu)
    same_types.lm_head.use_fp8 = fp8
    types = {name: p.dtype for name, p in gpu.named_parameters()}
    for (name, low), reference in zip(same_types.named_parameters(), cpu.parameters()):
        low.data = low.data.to(types[name])
        reference.data = low.data.float()  # as the GPU has them
    batch = make_batch(SMALL)
    losses, grads = losses_and_gradients(gpu, batch, 2)
    low_losses, low_grads = losses_and_gradients(same_types, batch, 2)
    cpu_losses, cpu_grads = losses_and_gradients(cpu, batch, 2)
    allowed = 2 * (low_losses - cpu_losses).abs() + 1e-3 * cpu_losses
    assert ((losses - cpu_losses).abs() < allowed).all()
    errors = errors_of(grads, cpu_grads)
    low_errors = errors_of(low_grads, cpu_grads)
    for of_matrices in (True, False):
        names = [name for name, x in cpu_grads.items() if (x.ndim >= 2) == of_matrices]
        worst, low_worst = (max(each[name] for name in names) for each in (errors, low_errors))
        assert worst < 1.5 * low_worst, (errors, low_errors)


def test_steps_after_the_warm_up_neither_wait_nor_compile(monkeypatch, tmp_path, tiny_shards):
    """The script's own loop, through all stages, with validations between the steps. What the
    log's header tells of CUDA, its driver and its libraries is asked here a second time."""
    monkeypatch.chdir(tmp_path)
    tokens = 2 * SMALL.num_iterations * SMALL.sequences_per_step * SMALL.stages[0].seq_len
    cfg = dataclasses.replace(
        SMALL,
        train_files=tiny_shards([tokens], eot=SMALL.eot_token),
        val_files=tiny_shards([SMALL.val_tokens + 1], name="tiny_val", eot=SMALL.eot_token))
    ranks = one_rank("cuda")
    torch._dynamo.reset()
    run = train_gpt.Run(cfg, ranks, train_gpt.Log(cfg, ranks), train_gpt.NEW_RUN)
    next_step = run.loader.next_step
    log_step = run.log_step

    def next_step_from_which_no_wait_is_allowed(now):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        return next_step(now)

    def log_step_to_which_no_wait_is_allowed(*args):
        log_step(*args)
        torch.cuda.set_sync_debug_mode("default")

    run.loader.next_step = next_step_from_which_no_wait_is_allowed
    run.log_step = log_step_to_which_no_wait_is_allowed
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            train_gpt.train(run, cfg)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not run.stopped
    run.finish()
    text = run.log.path.read_text()
    steps = text.count(" train_loss:")
    assert steps == cfg.num_iterations - 1, "all but the first, which is told one step late"
    header = text.split("\n" + "=" * 100 + "\n", 2)[1]
    facts = dict(line.split(": ", 1) for line in header.splitlines())
    assert facts["device"] == torch.cuda.get_device_name()
    assert facts["gpus"] == str(torch.cuda.device_count())
    assert facts["cuda"] == torch.version.cuda
    assert facts["driver"] == collect_env.get_nvidia_driver_version(collect_env.run)
    assert re.findall(r"\d+", facts["nccl"]) == [str(n) for n in torch.cuda.nccl.version()]
    assert facts["triton"] == importlib.metadata.version("triton")


def step_by_noise(optimizers, cfg, ranks=(0,)):
    """Steps on gradients of noise, which is summed over these ranks.

    The embedding is the head in the first two steps, then not, and Adam steps at odd ones.
    """
    last = cfg.num_iterations // 2 * 2 - 1
    for step in (0, 1, last - 1, last):
        for optimizer in optimizers:
            numel = min(optimizer.numel, len(optimizer.grads))  # an n-gram table's has none
            for rank in ranks:
                generator = torch.Generator().manual_seed(2 * step + rank)
                noise = torch.randn(numel, generator=generator)
                optimizer.grads[:numel] += noise.to(optimizer.grads)
        now = train_gpt.schedule(step, cfg)
        update = train_gpt.step_tied if now.tied else train_gpt.step_optimizers
        update(optimizers, now, divisor=2)
    assert not any(optimizer.grads.any() for optimizer in optimizers)


def changes_by_noise(model, cfg, dtype=torch.float32):
    """How much each weight changes in such steps, with Newton-Schulz in dtype."""
    model.zero_grad()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizers = train_gpt.build_optimizers(model, cfg, one_rank(model.reach.device))
    for optimizer in optimizers:
        if isinstance(optimizer, train_gpt.Muon):
            optimizer.dtype = dtype
    step_by_noise(optimizers, cfg)
    return {name: (param - before[name]).cpu() for name, param in model.named_parameters()}


def test_a_step_of_the_optimizers_is_as_near_to_fp32_as_the_cpus_in_bf16():
    runs = [("cuda", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float32)]
    cuda, low, reference = (
        changes_by_noise(make_model(SMALL).to(device), SMALL, dtype) for device, dtype in runs)
    for name, change in reference.items():
        # Small matrices have small singular values, which bf16 moves most.
        allowed = max(2 * BF16_ERROR, 1.5 * relative_error(low[name], change))
        assert relative_error(cuda[name], change) < allowed, name
        assert allowed < 0.15, name


@pytest.mark.skipif(ON_HOST, reason="would take hours")
def test_300_steps_of_the_pocket_learn_on_the_gpu(pocket_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--preset", "pocket", "--device", "cuda", "--num_iterations", "300"]
    for name in ("train", "val"):
        flags += [f"--{name}_files", f"{pocket_data}/pocket_{name}_*.bin"]
    assert train_gpt.main(flags) == 0
    target = train_gpt.parse_args(["--preset", "pocket"]).target_loss
    assert float(final_values(capsys.readouterr().out)["val_loss"]) < 1.05 * target
