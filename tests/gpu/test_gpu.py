"""What only a GPU can show: kernels against formulas, no waiting, no compiling after the warm-up.

    python -m pytest -m gpu

Without a GPU most run smaller on a host that stands in for one (host_gpu/), if asked for slow ones.
Each kernel that torch.compile makes for the card is run by Triton's interpreter then, and in fp32
the host's sums are those of the CPU in another order. A real GPU rounds other than the host does.
"""

import copy
import dataclasses
import re
import shutil
from pathlib import Path

import host_gpu
import pytest
import torch
from conftest import REPO, final_values
from golden import load, write_tables

import train_gpt
from train_gpt import BLOCK, Layer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def rows_of(length, script=train_gpt, **fields):
    """The record's rows of all stages with sequences of one length, by their fields."""
    def short(row):
        return dataclasses.replace(row, seq_len=length, **fields)

    cfg = script.Hyperparameters()
    return dict(
        stages=tuple(short(row) for row in cfg.stages),
        extension=short(cfg.extension),
        last_validation=short(cfg.last_validation),
    )


ON_HOST = torch.cuda.is_available() and "standing in for" in torch.cuda.get_device_name()
on_the_host = pytest.mark.skipif(not ON_HOST, reason="its sizes and tolerances are the host's")
SMALL = dataclasses.replace(
    train_gpt.Hyperparameters(), vocab_size=1000, eot_token=999, model_dim=256,
    layers=(
        Layer("L", table=0, skip=True),
        Layer("S"),
        Layer(None, saved=True),
        Layer("L", table=0),
    ),
    **rows_of(3072), val_seq_len=4096, val_tokens=8192, val_every=3, num_iterations=16,
    extension_steps=1, sequences_per_step=2, head_chunks=1,
    warmup_steps=2)  # Adam steps at the second
if ON_HOST:  # its kernels are interpreted
    SMALL = dataclasses.replace(
        SMALL, vocab_size=257, eot_token=256, vocab_multiple=16, model_dim=32, head_dim=16,
        layers=(Layer("L", table=0, skip=True, saved=True), Layer(None), Layer("S")),
        **rows_of(384), val_seq_len=256, val_tokens=256, num_iterations=5, sequences_per_step=1)
# Relative errors of a norm. bf16 keeps 8 bits: 0.4 % a rounding, some ten of which add up in a row.
BF16_ERROR = 0.03
FP32_RTOL = 1e-5  # sums of fp32 in another order
MUON_RTOL = 1e-3  # five quintic iterations amplify these


@pytest.fixture(autouse=True)
def nothing_compiled():
    if ON_HOST:
        host_gpu.use_card("sm_90")
    torch._dynamo.reset()


def relative_error(x, reference):
    x = x.detach().cpu().double()
    reference = reference.detach().cpu().double()
    return ((x - reference).norm() / reference.norm()).item()


def one_rank(script, device):
    """This process alone, without torchrun's variables."""
    ranks = object.__new__(script.Ranks)
    vars(ranks).update(rank=0, world_size=1, device=torch.device(device))
    return ranks


def make_model(script, cfg):
    """On the CPU, in fp32, no weight zero, so that each has a gradient."""
    model = script.GPT(cfg)
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


def on_the_gpu(script, model, cfg):
    """The same weights, prepared as the script does."""
    twin = script.GPT(cfg).to("cuda")
    twin.load_state_dict(model.state_dict())
    script.prepare(twin, cfg, torch.device("cuda", 0))
    return twin


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


def errors_of(grads, reference):
    """Relative, by name. A scalar's is of the largest scalar's: its sum's terms may cancel."""
    of_scalars = max(x.norm() for x in reference.values() if x.ndim < 2)
    errors = {}
    for name, x in reference.items():
        error = (grads[name].double() - x.double()).norm()
        errors[name] = (error / (x.norm() if x.ndim >= 2 else of_scalars)).item()
    return errors


def changes_by_noise(script, model, cfg, dtype=torch.float32):
    """How much each weight changes in steps on gradients of noise, with Newton-Schulz in dtype.

    The embedding is the head in the first two steps, then not, and Adam steps at odd ones.
    """
    model.zero_grad()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizers = script.build_optimizers(model, cfg, one_rank(script, model.reach.device))
    last = cfg.num_iterations // 2 * 2 - 1
    optimizers = [optimizer for optimizer in optimizers if hasattr(optimizer, "grads")]
    for step in (0, 1, last - 1, last):
        for optimizer in optimizers:
            if isinstance(optimizer, script.Muon):
                optimizer.dtype = dtype
            numel = optimizer.numel
            noise = torch.randn(numel, generator=torch.Generator().manual_seed(step))
            optimizer.grads[:numel] += noise.to(optimizer.grads)
        now = script.schedule(step, cfg)
        update = script.step_tied if now.tied else script.step_optimizers
        update(optimizers, now, divisor=2)
    assert not any(optimizer.grads.any() for optimizer in optimizers)
    return {name: (param - before[name]).cpu() for name, param in model.named_parameters()}


# ---- in few bits ------------------------------------------------------------


@pytest.mark.parametrize("fp8, chunks", [(False, 1), (True, 4)])
def test_a_step_in_few_bits_is_as_near_to_fp32_as_the_cpus_in_the_same(fp8, chunks, monkeypatch):
    """FlexAttention and compiled kernels may round elsewhere than the CPU's operators do, but no
    more often."""
    # The script's are those of the record's width.
    monkeypatch.setattr(train_gpt, "FP8_X_SCALE", 16.0)
    monkeypatch.setattr(train_gpt, "FP8_W_SCALE", 64.0)
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    cpu = make_model(train_gpt, SMALL)
    gpu = on_the_gpu(train_gpt, cpu, dataclasses.replace(SMALL, fp8_head=fp8))
    gpu.tokens_per_chunk = train_gpt.round_up(SMALL.stages[0].seq_len // chunks, 128)
    assert gpu.lm_head.use_fp8 == fp8
    same_types = copy.deepcopy(cpu)
    same_types.lm_head.use_fp8 = fp8
    types = {name: p.dtype for name, p in gpu.named_parameters()}
    for (name, low), reference in zip(same_types.named_parameters(), cpu.parameters()):
        low.data = low.data.to(types[name])
        reference.data = low.data.float()  # as the GPU has them
    batch = make_batch(SMALL)
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


def test_a_step_of_the_optimizers_is_as_near_to_fp32_as_the_cpus_in_bf16():
    runs = [("cuda", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float32)]
    cuda, low, reference = (
        changes_by_noise(train_gpt, make_model(train_gpt, SMALL).to(device), SMALL, dtype)
        for device, dtype in runs)
    for name, change in reference.items():
        # Small matrices have small singular values, which bf16 moves most.
        allowed = max(2 * BF16_ERROR, 1.5 * relative_error(low[name], change))
        assert relative_error(cuda[name], change) < allowed, name
        assert allowed < 0.15, name


# ---- in fp32, executed on the host: the root, and two records that have what the others brought --

TINY = dict(vars(SMALL), num_iterations=10, extension_steps=0, fp8_head=False)
SIZES = {  # what differs from TINY
    "train_gpt.py": dict(head_dim=32),
    "2026-07-13_PrefixTargets": dict(bigram_rows=97, bigram_width=24, sign_rows=32),
    "2026-08-30_92g_NgramTable": dict(
        ngram_rows=98, sign_rows=32, mlp_dim=96, channel_groups=4, model_dim=64, head_dim=32,
        sweep_stride=7, sweep_margin=0),
}
LAYERS = {  # a row each: the window, and its marks
    "2026-07-13_PrefixTargets": (
        ("L", dict(table=0, xsa=True, gate=True, skip=True, saved=True)),
        (None, dict()),
        ("L", dict(table=1, gate=True)),
    ),
    "2026-08-30_92g_NgramTable": (
        ("S", dict(table=0, bigram=True, skip=True)),
        ("P", dict(table=1, x0=True, bigram=True, mlps=0, saved=True)),
        (None, dict(takes_skip=True, mlps=2)),
        ("L", dict(table=0, gate=True)),
    ),
}
# Those of the record, in bf16 on sm_90: in fp32 torch would take blocks of 16, and minutes here.
BLOCKS = dict(BLOCK_M=128, BLOCK_N=64, BLOCK_M1=64, BLOCK_N1=128, BLOCK_M2=128, BLOCK_N2=64)


def small_record(name, folder):
    """The script, and its sizes. The folder has its prefixes and pairs."""
    script = train_gpt if name == "train_gpt.py" else load(REPO / "records" / name)
    cfg = script.Hyperparameters()
    write_tables(folder)
    tables = dict(prefix_file=str(folder / "prefixes.npy"), canonical_file="")
    sizes = TINY | tables | SIZES[name]
    fewer = dict(classes=240) if hasattr(cfg.stages[0], "classes") else {}  # of 272 ids
    sizes |= rows_of(384, script, **fewer)
    if name in LAYERS:
        rows = [script.Layer(window, **marks) for window, marks in LAYERS[name]]
        sizes["layers"] = tuple(rows)
    known = {name: value for name, value in sizes.items() if hasattr(cfg, name)}
    return script, dataclasses.replace(cfg, **known)


def in_fp32(script, model, cfg):
    """`on_the_gpu`, in fp32 throughout: what remains is the order of sums."""
    twin = on_the_gpu(script, model, cfg).float()
    twin.load_state_dict(model.state_dict())
    for block in twin.blocks:
        if block.attn is not None:
            block.attn.kernel_options = block.attn.kernel_options or BLOCKS
    return twin


def assert_same_step(script, gpu, cpu, batch, window):
    losses, grads = losses_and_gradients(script, gpu, batch, window)
    cpu_losses, cpu_grads = losses_and_gradients(script, cpu, batch, window)
    torch.testing.assert_close(losses, cpu_losses, rtol=FP32_RTOL, atol=0)
    assert grads.keys() == cpu_grads.keys()
    errors = errors_of(grads, cpu_grads)
    assert max(errors.values()) < FP32_RTOL, errors
    return losses


def without_classes(batch):
    """In validation a softmax is over all ids."""
    return dict(classes=None) if hasattr(batch, "classes") else {}


def assert_same_validation(script, gpu, cpu, batch):
    losses = []
    for model in gpu, cpu:
        model.eval()
        with torch.no_grad(), script.store_masks():
            now = script.schedule(model.cfg.num_iterations, model.cfg)
            losses.append(script.losses_of(model, on_device_of(model, batch), now).cpu())
        model.train()
    torch.testing.assert_close(*losses, rtol=FP32_RTOL, atol=0)


def assert_same_update(script, gpu, cpu, cfg):
    changes = changes_by_noise(script, gpu, cfg)
    for name, change in changes_by_noise(script, cpu, cfg).items():
        rtol = MUON_RTOL if name.startswith("blocks") and change.ndim >= 2 else FP32_RTOL
        assert change.any(), name
        assert relative_error(changes[name], change) < rtol, name


@on_the_host
@pytest.mark.parametrize("name", SIZES)
def test_a_step_in_fp32_is_that_of_the_cpu(name, tmp_path):
    """Forward, backward, validation, optimizers. The root's on a card of less shared memory, of two
    rows, in two chunks of the head; all windows take one graph."""
    script, cfg = small_record(name, tmp_path)
    rows = 1
    if script is train_gpt:
        host_gpu.use_card("sm_86")
        rows = 2
        cfg = dataclasses.replace(cfg, sequences_per_forward=rows)
    cpu = make_model(script, cfg)
    gpu = in_fp32(script, cpu, cfg)
    script.prepare(cpu, cfg, torch.device("cpu"))  # reads its tables
    if hasattr(cpu, "prefixes"):
        assert cpu.prefixes.max() > 0 and torch.equal(gpu.prefixes.cpu(), cpu.prefixes)
    if script is train_gpt:
        gpu.tokens_per_chunk = cfg.stages[0].seq_len
    batch = make_batch(cfg, rows)
    if hasattr(cfg.stages[0], "classes"):  # while training each token has a target then
        batch.targets.clamp_(min=0)
        tokens = batch.targets.numpy().clip(0)
        ids, _ = script.candidates(tokens[0], 0, 240, len(cpu.lm_head.weight), cfg)
        batch = script.Batch(*batch, classes=torch.from_numpy(ids)[None])
    if hasattr(cpu, "ngram_table"):
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(cfg.ngram_rows, cfg.model_dim, generator=generator)
        for model in cpu, gpu:
            script.build_optimizers(model, cfg, one_rank(script, model.reach.device))
            model.ngram_table.state["rows"] = table.to(model.reach.device, copy=True)
    losses = assert_same_step(script, gpu, cpu, batch, window=2)
    if script is train_gpt:
        assert gpu.blocks[0].attn.kernel_options == script.SMALL_TILES
        with torch.compiler.set_stance("fail_on_recompile"):
            others = assert_same_step(script, gpu, cpu, batch, window=1)
        assert not torch.equal(losses, others), "the window must matter"
    assert_same_validation(script, gpu, cpu, batch._replace(**without_classes(batch)))
    assert_same_update(script, gpu, cpu, cfg)


# ---- whole runs -------------------------------------------------------------


def test_steps_after_the_warm_up_neither_wait_nor_compile(monkeypatch, tmp_path, tiny_shards):
    """The script's own loop, from stage to stage, with validations between the steps."""
    monkeypatch.chdir(tmp_path)
    rows = rows_of(128)
    rows["stages"] = rows["stages"][2:]  # as few graphs as show it
    tokens = 2 * SMALL.num_iterations * SMALL.sequences_per_step * 128
    cfg = dataclasses.replace(
        SMALL, **rows,
        train_files=tiny_shards([tokens], eot=SMALL.eot_token),
        val_files=tiny_shards([SMALL.val_tokens + 1], name="tiny_val", eot=SMALL.eot_token))
    ranks = one_rank(train_gpt, "cuda")
    run = train_gpt.Run(cfg, ranks, train_gpt.NEW_RUN, may_exist=False)
    next_step = run.loader.next_step
    log_step = run.log_step

    def next_step_from_which_no_wait_is_allowed(now):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        return next_step(now)

    def log_step_to_which_no_wait_is_allowed(*args, **options):
        log_step(*args, **options)
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
    assert steps == cfg.num_iterations
    header = text.split("\n" + "=" * 100 + "\n", 2)[1]
    facts = dict(line.split(": ", 1) for line in header.splitlines())
    assert facts["device"] == torch.cuda.get_device_name()
    assert facts["gpus"] == str(torch.cuda.device_count())
    assert {"cuda", "driver", "nccl", "triton"} < facts.keys()


RUN = """--preset pocket --model_dim 32 --head_dim 32 --warmup_steps 1 --extension_steps 1
    --sequences_per_step 2 --sequences_per_forward 2
    --val_seq_len 256 --val_tokens 256 --val_every 2 --save_every 2"""
ROWS = rows_of(128, long_window=128, short_window=128, lr_factor=1.0, num_targets=1)
TWO_LAYERS = Layer("L", table=0, skip=True, saved=True), Layer("S")


@on_the_host
def test_a_checkpoint_is_resumed_to_the_bit_and_on_the_other_device(
        tmp_path, tiny_shards, monkeypatch, capsys):
    """Validated where it is resumed, it has the loss that it had where it was saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "POCKET", train_gpt.POCKET | ROWS | dict(layers=TWO_LAYERS))
    files = ["--train_files", tiny_shards([3000]),
             "--val_files", tiny_shards([300], name="tiny_val")]

    def val_losses(name, device, steps, *flags):
        words = [*RUN.split(), *files, "--run_id", name, "--device", device,
                 "--num_iterations", str(steps), *flags]
        assert train_gpt.main(words) == 0
        text = capsys.readouterr().out
        return dict(re.findall(r"^step:(\d+)/\d+ val_loss:([\d.]+)", text, re.MULTILINE))

    whole = val_losses("whole", "cuda", 4)
    assert list(whole) == ["0", "2", "4"]

    def from_there(name, checkpoint):
        """The flags of a run that goes on from another run's checkpoint."""
        Path("logs", name).mkdir()
        shutil.copy(checkpoint, Path("logs", name))
        return "--resume", "auto"

    at_two = from_there("again", "logs/whole/step-000002.pt")
    assert val_losses("again", "cuda", 4, *at_two) == {step: whole[step] for step in "24"}
    once, again = (
        torch.load(f"logs/{name}/step-000004.pt", map_location="cpu")["model"]
        for name in ("whole", "again"))
    assert all(torch.equal(again[name], x) for name, x in once.items())
    # bf16 rounds the embeddings and, in each layer, the activations: 0.4 % at most of each.
    moved = val_losses("moved", "cpu", 4, *from_there("moved", "logs/whole/step-000002.pt"))
    assert float(moved["2"]) == pytest.approx(float(whole["2"]), rel=2e-3)
    back = val_losses("back", "cuda", 4, *from_there("back", "logs/moved/step-000004.pt"))
    assert float(back["4"]) == pytest.approx(float(moved["4"]), rel=2e-3)


@pytest.mark.skipif(ON_HOST, reason="would take hours")
def test_300_steps_of_the_pocket_learn_on_the_gpu(pocket_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--preset", "pocket", "--device", "cuda", "--num_iterations", "300"]
    for name in ("train", "val"):
        flags += [f"--{name}_files", f"{pocket_data}/pocket_{name}_*.bin"]
    assert train_gpt.main(flags) == 0
    target = train_gpt.parse_args(["--preset", "pocket"]).target_loss
    assert float(final_values(capsys.readouterr().out)["val_loss"]) < 1.05 * target
