"""What the steps to #92 have beside the model of the others: FP8 products of layers, and rows of a
table that are planned on the host, read and stepped by kernels for any number of them."""

import copy

import golden
import pytest
import torch
from conftest import REPO
from golden import load
from test_gpu import nothing_compiled, relative_error  # noqa: F401 (a fixture)
from test_run_state import table_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
RECORD = REPO / "records" / "2026-08-30_92j_Bf16Wire"  # it has all of them
# FP8 keeps 4 bits of a weight or activation, and 3 of a gradient: 3 to 6 % a rounding.
FP8_ERROR = 0.15  # of some three roundings


def test_fp8_products_are_as_near_to_bf16s_as_the_cpus(tmp_path):
    """Those of queries, keys and values, then of an MLP: outputs and gradients of all factors."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no FP8")
    script = load(RECORD)
    width = 64
    cfg = golden.tiny(script, tmp_path, model_dim=width, mlp_dim=96)
    generator = torch.Generator().manual_seed(0)
    mlp = script.MLP(cfg).bfloat16()
    with torch.no_grad():
        for param in mlp.parameters():
            param.normal_(std=width**-0.5, generator=generator)
    weight = width**-0.5 * torch.randn(width, width, generator=generator).bfloat16()
    x = script.norm(torch.randn(2, 64, width, generator=generator)).bfloat16()
    grad = (0.1 * torch.randn(x.shape, generator=generator)).bfloat16()  # QKV clips it at 1

    def computed(device, use_fp8):
        layer = copy.deepcopy(mlp).to(device)
        layer.use_fp8 = use_fp8
        factors = [each.to(device).requires_grad_() for each in (x.clone(), weight.clone())]

        def in_fp8(x, weight):
            return script.fp8_linear(x, weight, script.QKV_SCALES)

        def layers(x, weight):
            product = in_fp8 if use_fp8 else torch.nn.functional.linear
            return layer(script.norm(product(x, weight)))

        out = script.compile_on_gpu(layers, torch.device(device))(*factors)
        leaves = [*factors, *layer.parameters()]
        return [out, *torch.autograd.grad(out, leaves, grad.to(device))]

    parents = computed("cpu", False)
    for found, low, parent in zip(computed("cuda", True), computed("cpu", True), parents):
        error = relative_error(low, parent)
        assert FP8_ERROR / 8 < error < FP8_ERROR
        assert relative_error(found, parent) < 1.1 * error


def test_rows_are_planned_read_and_stepped_as_on_the_cpu():
    """Of any number, without compiling anew. The table is bf16 on both."""
    script = load(RECORD)
    now = script.schedule(1, script.Hyperparameters())
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (1, length), generator=generator).int() for length in (30, 70, 50)]
    noise = torch.randn(70, 2, 64, generator=generator)
    first = torch.randn(98, 64, generator=generator).bfloat16()
    rows = {}
    for device in "cpu", "cuda":
        table = table_of(script, len(first), 64, device)
        table.state["rows"] = first.to(device, copy=True)
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
