"""What a GPU computes: its kernels against the CPU path, in fp32 and in few bits.

    python -m pytest -m gpu

Without a GPU most run smaller on a host that stands in for one (host_gpu/), if asked for slow ones.
Each kernel that torch.compile makes for the card is run by Triton's interpreter then, and in fp32
the host's sums are those of the CPU in another order. A real GPU rounds other than the host does.
"""

import copy
import dataclasses
from types import SimpleNamespace

import golden
import host_gpu
import pytest
import torch
from conftest import REPO, final_values
from golden import load, make_model
from host_gpu.trace import few_layers_of

import train_gpt
from train_gpt import BLOCK

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ON_HOST = torch.cuda.is_available() and "standing in for" in torch.cuda.get_device_name()
on_the_host = pytest.mark.skipif(not ON_HOST, reason="its sizes and tolerances are the host's")
LENGTH = 3072
FEW_BITS = dict(model_dim=256, head_dim=128, vocab_size=1000, eot_token=999, vocab_multiple=128)
if ON_HOST:  # its kernels are interpreted
    LENGTH = 384
    FEW_BITS = dict(head_dim=16)
# Relative errors of a norm. bf16 keeps 8 bits: 0.4 % a rounding, some ten of which add up in a row.
BF16_ERROR = 0.03
FP32_RTOL = 1e-5  # sums of fp32 in another order
MUON_RTOL = 1e-3  # five quintic iterations amplify these
# Those of the record, in bf16 on sm_90: in fp32 torch would take blocks of 16, and minutes here.
BLOCKS = dict(BLOCK_M=128, BLOCK_N=64, BLOCK_M1=64, BLOCK_N1=128, BLOCK_M2=128, BLOCK_N2=64)


@pytest.fixture(autouse=True)
def nothing_compiled():
    if ON_HOST:
        host_gpu.use_card("sm_90")
    torch._dynamo.reset()


# ---- Two models and their batch ----------------------------------------------


def rows_of(length, script=train_gpt, **fields):
    """The record's rows of all stages with sequences of one length, by their fields.

    Fields that do not count in a row stay as they are: 0.
    """
    cfg = script.Hyperparameters()

    def changed(row, _):
        given = dict(seq_len=length, **fields)
        return dataclasses.replace(row, **{k: v for k, v in given.items() if getattr(row, k)})

    return golden.rows_of(cfg, changed, cfg)


def small(script, folder, length=LENGTH, classes=None, **changes):
    """The record's hyperparameters, of few layers that have all kinds of kernels."""
    golden.write_tables(folder)
    fields = dict(classes=classes) if classes else {}
    sizes = dict(head_dim=32, num_iterations=10, extension_steps=0, sequences_per_forward=1)
    return golden.tiny(script, folder, layers=few_layers_of(script), canonical_file="",
                       **rows_of(length, script, **fields), **sizes | changes)


def on_the_gpu(script, cfg):
    """The same model as on the CPU, prepared as the script does."""
    model = make_model(script, cfg).to("cuda")
    script.prepare(model, cfg, torch.device("cuda", 0))
    return model


def in_fp32(script, cfg):
    """`on_the_gpu`, in fp32 throughout: what remains is the order of sums."""
    model = on_the_gpu(script, dataclasses.replace(cfg, fp8_head=False)).float()
    model.load_state_dict(make_model(script, cfg).state_dict())
    for block in model.blocks:
        if block.attn is not None:
            block.attn.kernel_options = block.attn.kernel_options or BLOCKS
    return model


def make_batch(cfg, rows=1):
    """Of the first three blocks, the last has the begin of two documents, the others see one."""
    generator = torch.Generator().manual_seed(0)
    length = cfg.stages[0].seq_len
    tokens = torch.randint(cfg.eot_token, (rows, length + 1), generator=generator)
    tokens[:, [300, 340, *range(1000, length, 300)]] = cfg.eot_token
    targets = tokens[:, 1:].clone()
    targets[:, -3:] = -1
    return train_gpt.Batch(tokens[:, :-1].int(), targets)


def on_device_of(model, batch):
    """The batch on the model's device."""
    device = model.reach.device
    return type(batch)(*(x if x is None else x.to(device) for x in batch))


# ---- What they compute --------------------------------------------------------


def losses_and_gradients(script, model, batch, window):
    """Of all targets of a token, with a long window of so many blocks."""
    model.reach.copy_(BLOCK * torch.tensor([window, max(1, window // 2)]))
    model.zero_grad()
    batch = on_device_of(model, batch)
    losses = script.accumulate_gradients(model, [batch], script.schedule(0, model.cfg))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if hasattr(model, "ngram_table"):
        grads["rows"] = model.ngram_table.last_read[0].grad
    return losses.cpu(), {name: grad.cpu().clone() for name, grad in grads.items()}


def relative_error(x, reference):
    x = x.detach().cpu().double()
    reference = reference.detach().cpu().double()
    return ((x - reference).norm() / reference.norm()).item()


def errors_of(grads, reference):
    """Relative, by name. A scalar's is of the largest scalar's: its sum's terms may cancel."""
    of_scalars = max(x.norm() for x in reference.values() if x.ndim < 2)
    errors = {}
    for name, x in reference.items():
        error = (grads[name].double() - x.double()).norm()
        errors[name] = (error / (x.norm() if x.ndim >= 2 else of_scalars)).item()
    return errors


def build_optimizers(script, model):
    """Those of this process alone, without torchrun's variables."""
    ranks = SimpleNamespace(rank=0, world_size=1, device=model.reach.device)
    return script.build_optimizers(model, model.cfg, ranks)


def changes_by_noise(script, model, dtype=None):
    """How much each weight changes in steps on gradients of noise, with Newton-Schulz in dtype.

    The embedding is the head in the first two steps, then not, and Adam steps at odd ones.
    """
    model.zero_grad()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizers = [x for x in build_optimizers(script, model) if hasattr(x, "grads")]
    last = model.cfg.num_iterations // 2 * 2 - 1
    for step in (0, 1, last - 1, last):
        for optimizer in optimizers:
            if isinstance(optimizer, script.Muon):
                optimizer.dtype = dtype or optimizer.dtype
            numel = optimizer.numel
            noise = torch.randn(numel, generator=torch.Generator().manual_seed(step))
            optimizer.grads[:numel] += noise.to(optimizer.grads)
        now = script.schedule(step, model.cfg)
        update = script.step_tied if now.tied else script.step_optimizers
        update(optimizers, now, divisor=2)
    assert not any(optimizer.grads.any() for optimizer in optimizers)
    return {name: (param - before[name]).cpu() for name, param in model.named_parameters()}


# ---- In few bits --------------------------------------------------------------


def test_a_step_in_few_bits_is_as_near_to_fp32_as_the_cpus_in_the_same(tmp_path):
    """FlexAttention and compiled kernels may round elsewhere than the CPU's operators do, but no
    more often. The head is in four chunks, and in FP8 where the GPU has it."""
    cfg = small(train_gpt, tmp_path, head_chunks=4, **FEW_BITS)
    cpu = make_model(train_gpt, cfg)
    gpu = on_the_gpu(train_gpt, cfg)
    assert gpu.lm_head.use_fp8 == (torch.cuda.get_device_capability() >= (8, 9))
    same_types = copy.deepcopy(cpu)
    same_types.lm_head.use_fp8 = gpu.lm_head.use_fp8
    types = {name: p.dtype for name, p in gpu.named_parameters()}
    for (name, low), reference in zip(same_types.named_parameters(), cpu.parameters()):
        low.data = low.data.to(types[name])
        reference.data = low.data.float()  # as the GPU has them
    batch = make_batch(cfg)
    losses, grads = losses_and_gradients(train_gpt, gpu, batch, 2)
    low_losses, low_grads = losses_and_gradients(train_gpt, same_types, batch, 2)
    cpu_losses, cpu_grads = losses_and_gradients(train_gpt, cpu, batch, 2)
    allowed = 2 * (low_losses - cpu_losses).abs() + 1e-3 * cpu_losses
    assert ((losses - cpu_losses).abs() < allowed).all()
    errors = errors_of(grads, cpu_grads)
    low_errors = errors_of(low_grads, cpu_grads)
    for of_matrices in (True, False):
        names = [name for name, x in cpu_grads.items() if (x.ndim >= 2) == of_matrices]
        worst, low_worst = (max(each[name] for name in names) for each in (errors, low_errors))
        assert worst < 1.5 * low_worst, (errors, low_errors)


def test_a_step_of_the_optimizers_is_as_near_to_fp32_as_the_cpus_in_bf16(tmp_path):
    cfg = small(train_gpt, tmp_path, **FEW_BITS)
    runs = [("cuda", None), ("cpu", torch.bfloat16), ("cpu", torch.float32)]
    cuda, low, reference = (
        changes_by_noise(train_gpt, make_model(train_gpt, cfg).to(device), dtype)
        for device, dtype in runs)
    worst = 0
    for name, change in reference.items():
        # Small matrices have small singular values, which bf16 moves most.
        allowed = max(2 * BF16_ERROR, 1.5 * relative_error(low[name], change))
        assert relative_error(cuda[name], change) < allowed < 0.15, name
        worst = max(worst, relative_error(cuda[name], change))
    assert worst > MUON_RTOL, "Newton-Schulz is in bf16"


@pytest.mark.skipif(ON_HOST, reason="would take hours")
def test_300_steps_of_the_pocket_learn_on_the_gpu(pocket_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--preset", "pocket", "--device", "cuda", "--num_iterations", "300"]
    for name in ("train", "val"):
        flags += [f"--{name}_files", f"{pocket_data}/pocket_{name}_*.bin"]
    assert train_gpt.main(flags) == 0
    target = train_gpt.parse_args(["--preset", "pocket"]).target_loss
    assert float(final_values(capsys.readouterr().out)["val_loss"]) < 1.05 * target


# ---- In fp32, on the host: the root, and the record that has most of what the others brought ----


def assert_same_step(script, gpu, cpu, batch, window):
    losses, grads = losses_and_gradients(script, gpu, batch, window)
    cpu_losses, cpu_grads = losses_and_gradients(script, cpu, batch, window)
    torch.testing.assert_close(losses, cpu_losses, rtol=FP32_RTOL, atol=0)
    assert grads.keys() == cpu_grads.keys()
    errors = errors_of(grads, cpu_grads)
    assert max(errors.values()) < FP32_RTOL, errors
    return losses


def assert_same_update(script, gpu, cpu):
    changes = changes_by_noise(script, gpu, torch.float32)
    for name, change in changes_by_noise(script, cpu).items():
        rtol = MUON_RTOL if name.startswith("blocks") and change.ndim >= 2 else FP32_RTOL
        assert change.any(), name
        assert relative_error(changes[name], change) < rtol, name


@on_the_host
def test_a_step_of_the_root_in_fp32_is_that_of_the_cpu(tmp_path):
    """Forward, backward, validation, optimizers, on a card of less shared memory, of two rows, in
    two chunks of the head; all windows take one graph."""
    host_gpu.use_card("sm_86")
    script = train_gpt
    cfg = small(script, tmp_path, sequences_per_forward=2)
    cpu = make_model(script, cfg)
    gpu = in_fp32(script, cfg)
    assert gpu.blocks[0].attn.kernel_options == script.SMALL_TILES
    batch = make_batch(cfg, rows=2)
    losses = assert_same_step(script, gpu, cpu, batch, window=2)
    with torch.compiler.set_stance("fail_on_recompile"):
        others = assert_same_step(script, gpu, cpu, batch, window=1)
    assert not torch.equal(losses, others), "the window must matter"
    last = script.schedule(cfg.num_iterations, cfg)
    with torch.no_grad(), script.store_masks():
        losses = [script.losses_of(model.eval(), on_device_of(model, batch), last).cpu()
                  for model in (gpu, cpu)]
    torch.testing.assert_close(*losses, rtol=FP32_RTOL, atol=0)
    assert_same_update(script, gpu, cpu)


@on_the_host
@pytest.mark.cards
def test_a_step_of_92_in_fp32_is_that_of_the_cpu(tmp_path):
    script = load(REPO / "records" / "2026-08-30_92g_NgramTable")
    cfg = small(script, tmp_path, classes=240, model_dim=64, mlp_dim=96, channel_groups=4,
                ngram_rows=98, sweep_stride=7, sweep_margin=0, period_from=10, head_chunks=1)
    cpu = make_model(script, cfg)
    gpu = in_fp32(script, cfg)
    batch = make_batch(cfg)
    batch.targets.clamp_(min=0)  # while training each token has a target
    ids, _ = script.candidates(batch.targets[0].numpy(), 0, 240, len(cpu.lm_head.weight), cfg)
    batch = script.Batch(*batch, classes=torch.from_numpy(ids)[None])
    table = golden.weights_of(golden.TABLE, torch.zeros(cfg.ngram_rows, cfg.model_dim)).float()
    for model in cpu, gpu:
        build_optimizers(script, model)
        model.ngram_table.state["rows"] = table.to(model.reach.device, copy=True)
    assert_same_step(script, gpu, cpu, batch, window=2)
    assert_same_update(script, gpu, cpu)
