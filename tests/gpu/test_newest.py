"""What the steps to #92 have beside the model of the others: FP8 products of layers, and rows of a
table that are planned on the host, read and stepped by kernels for any number of them."""

import golden
import pytest
import torch
from conftest import REPO
from golden import load, make_model
from test_gpu import (
    build_optimizers,
    errors_of,
    losses_and_gradients,
    make_batch,
    nothing_compiled,  # noqa: F401 (a fixture)
    on_the_gpu,
    on_the_host,
    small,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
RECORD = REPO / "records" / "2026-08-30_92h_Fp8Products"
SIZES = dict(
    classes=240, model_dim=64, mlp_dim=96, channel_groups=4, ngram_rows=98, sweep_stride=7,
    sweep_margin=0, period_from=10, head_chunks=1,
)


# FP8 keeps 4 bits of a weight or activation, and 3 of a gradient: 3 to 6 % a rounding.
FP8_ERROR = 0.25  # of a gradient, some ten roundings deep
LOSS_ERROR = 0.01


def rows_of_table(cfg):
    first = torch.zeros(cfg.ngram_rows, cfg.model_dim)
    return golden.weights_of(golden.TABLE, first).bfloat16()


@on_the_host
def test_fp8_products_are_as_near_to_bf16s_as_the_cpus(tmp_path):
    """A step's loss and gradients, with the parent's products in bf16 beside them."""
    script = load(RECORD)
    cfg = small(script, tmp_path, **SIZES)
    cpu = make_model(script, cfg)
    gpu = on_the_gpu(script, cfg)
    for param, low in zip(cpu.parameters(), gpu.parameters()):
        param.data = param.data.to(low.dtype)
    batch = make_batch(cfg)
    batch.targets.clamp_(min=0)  # while training each token has a target
    ids, _ = script.candidates(batch.targets[0].numpy(), 0, 240, len(cpu.lm_head.weight), cfg)
    batch = script.Batch(*batch, classes=torch.from_numpy(ids)[None])
    table = rows_of_table(cfg)
    found = {}
    for name, model, use_fp8 in (("gpu", gpu, True), ("cpu", cpu, True), ("parent", cpu, False)):
        build_optimizers(script, model)
        model.ngram_table.state["rows"] = table.to(model.reach.device, copy=True)
        for module in model.modules():
            if isinstance(module, script.CausalSelfAttention | script.MLP):
                assert module.use_fp8 or model is cpu
                module.use_fp8 = use_fp8
        found[name] = losses_and_gradients(script, model, batch, 2)
    parent_losses, parent_grads = found["parent"]
    matrices = [name for name, x in parent_grads.items() if x.ndim >= 2]
    worst = {}
    for name in ("gpu", "cpu"):
        losses, grads = found[name]
        torch.testing.assert_close(losses, parent_losses, rtol=LOSS_ERROR, atol=0)
        errors = errors_of(grads, parent_grads)
        worst[name] = max(errors[matrix] for matrix in matrices)
    assert FP8_ERROR / 8 < worst["cpu"] < FP8_ERROR
    assert worst["gpu"] < 1.5 * worst["cpu"]


def test_rows_are_planned_read_and_stepped_as_on_the_cpu(tmp_path):
    """Of any number, without compiling anew. The table is bf16 on both."""
    script = load(RECORD)
    cfg = small(script, tmp_path, **SIZES)
    now = script.schedule(1, cfg)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (1, length), generator=generator).int() for length in (30, 70, 50)]
    noise = torch.randn(70, 2, cfg.model_dim, generator=generator)
    rows = {}
    for device in "cpu", "cuda":
        model = make_model(script, cfg).to(device)
        build_optimizers(script, model)
        table = model.ngram_table
        table.state["rows"] = rows_of_table(cfg).to(device, copy=True)
        with torch.compiler.set_stance("fail_on_recompile"):
            for inputs in tokens:
                batch = table.plan_batch(script.Batch(inputs.to(device), None, step=inputs))
                read = table.take(batch.reading)
                (read.float() * noise[: inputs.numel()].to(device)).sum().backward()
                table.keep_gradients()
                table.update(now, divisor=2)
                table.clear()
        rows[device] = dict(table.state, count=table.count)
    for name, x in rows["cpu"].items():
        torch.testing.assert_close(rows["cuda"][name].cpu(), x)
    assert rows["cpu"]["count"] == 3
