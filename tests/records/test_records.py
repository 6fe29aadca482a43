"""What the oracles in float64 leave out: types, FP8, and where gradients are."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO
from lineage import (
    BF16_STEP,
    BLOCK,
    EOT,
    RECORDS,
    for_each,
    held_since,
    load,
    make_model,
    tiny_flags,
)
from lineage_oracles import kind_of

FP32_EPS = 2.0**-23  # what the norm adds to the mean square of fp32
load = functools.partial(load, block=128)


@pytest.fixture(params=RECORDS, ids=lambda record: record.name)
def record(request):
    return request.param


@pytest.fixture
def script(record):
    return load(record.folder)


def test_each_place_of_a_docstrings_map_is_there(script):
    rows = script.__doc__.partition("\nTechnique ")[2].splitlines()[1:]
    assert len(rows) >= 5
    for row in rows:
        for place in re.split("  +", row)[1].split(", "):
            assert functools.reduce(getattr, place.split("."), script), row


def test_the_pocket_presets_have_one_width_depth_and_number_of_tokens(script):
    cfg, root = (x.parse_args(["--preset", "pocket"]) for x in (script, load(REPO)))
    depth = getattr(cfg, "num_layers", None) or len(cfg.layers)
    assert depth == len(root.layers)
    same = """model_dim head_dim vocab_size eot_token val_tokens val_files train_files target_loss
        num_iterations sequences_per_step""".split()
    assert [getattr(cfg, x) for x in same] == [getattr(root, x) for x in same]
    for sequences in (cfg.sequences_per_step, script.Hyperparameters().sequences_per_step):
        assert sequences % 8 == 0, "for 1, 2, 4 or 8 ranks"


@held_since(5)
def test_the_norm_adds_the_epsilon_of_its_day(record, script):
    """To the mean square of bf16 2^-7, to that of fp32 2^-23; since #21 to both."""
    generator = torch.Generator().manual_seed(0)
    # Rows of all sizes: in the smallest, the epsilon is nearly all there is.
    x = torch.randn(200, 64, generator=generator)
    x *= torch.logspace(-5, 1, 200)[:, None]
    for dtype, eps in ((torch.bfloat16, 2.0**-7), (torch.float32, 2.0**-23)):
        given = x.to(dtype)
        exact = given.double()
        mean_square = exact.square().mean(-1, keepdim=True)
        exact /= (mean_square + (record.station.norm_eps or eps)).sqrt()
        found = script.norm(given)
        assert found.dtype == dtype
        rounding = BF16_STEP if dtype == torch.bfloat16 else 4 * FP32_EPS
        error = (found.double() - exact).abs()
        assert (error <= 1.01 * rounding * exact.abs()).all()


@held_since(19)
def test_the_head_takes_fp8_with_the_published_scales_while_training(record, script):
    station = record.station
    scales = [script.FP8_X_SCALE, script.FP8_W_SCALE, script.FP8_GRAD_SCALE]
    assert scales == pytest.approx([1 / divisor for divisor in station.fp8_divisors])
    model = make_model(script, tiny_flags(script))
    model.lm_head.use_fp8 = True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(EOT, (64,), generator=generator)
    w = model.lm_head.weight
    # Up to #24 the loss is the mean over a forward pass of the record, these are 64 tokens of it.
    tokens = 1 if station.summed_loss else script.plan(script.Hyperparameters()).longest

    def grads_of(logits):
        loss = F.cross_entropy(logits, targets, reduction="sum") / tokens
        return torch.autograd.grad(loss, [x, w])

    def rounded(x, scale):
        limited = (x.detach().float() * scale).clamp(-448, 448)
        return limited.to(torch.float8_e4m3fn).double() / scale

    training, plain = model.logits(x), model.eval().logits(x)
    products = rounded(x, scales[0]) @ rounded(w, scales[1]).T
    exact = x.double() @ w.bfloat16().double().T
    for logits, raw in ((training, products), (plain, exact)):
        # The raw logits are rounded to bf16, and no slope of the cap is above one.
        bound = BF16_STEP * raw.abs() + 1e-5
        assert ((logits.double() - station.capped(raw)).abs() <= bound).all()
    assert not torch.allclose(training, plain, atol=1e-3)
    for grad, expected in zip(grads_of(training), grads_of(station.capped(exact))):
        error = (grad.double() - expected.double()).norm() / expected.double().norm()
        assert 0 < error < 2.0**-3  # largest relative error of rounding to e5m2


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["A100", "H100"])
@held_since(5)
def test_what_a_record_asks_of_a_gpu(record, script, capability, monkeypatch):
    """Types and FP8, of a GPU that torch.cuda pretends to have."""
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
    cfg = script.Hyperparameters()
    with torch.device("meta"):
        model = script.GPT(cfg)
    model.compile = lambda **kwargs: None
    script.prepare_for_cuda(model, cfg, torch.device("cuda", 0))
    for name, p in model.named_parameters():
        assert (p.dtype == torch.bfloat16) == (kind_of(name) in record.station.bf16), name
    in_fp8 = bool(record.station.fp8_divisors) and capability == (9, 0)
    assert getattr(model.lm_head, "use_fp8", False) == in_fp8


@for_each(RECORDS[:2])
def test_the_first_records_run_in_bf16_by_autocast(record, script, monkeypatch):
    """Here on the CPU: the weights stay fp32, queries and keys are bf16, the loss is fp32 again."""
    cfg = script.parse_args(["--preset", "pocket"])
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    model.compile = lambda **kwargs: None
    seen = set()
    rotate = script.rotate

    def note(x, *args):
        seen.add(x.dtype)
        return rotate(x, *args)

    monkeypatch.setattr(script, "rotate", note)
    tokens = torch.arange(128)[None]
    before = model(tokens.int(), tokens)
    script.prepare_for_cuda(model, cfg, torch.device("cpu"))
    loss = model(tokens.int(), tokens)
    assert seen == {torch.float32, torch.bfloat16} and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(before.item(), rel=0.01)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def strides_of(tensor):
    """Of the dimensions that have more than one entry; the stride of any other says nothing."""
    sizes = zip(tensor.shape, tensor.stride())
    return [stride for size, stride in sizes if size > 1]


def test_each_gradient_arrives_with_the_strides_of_its_view(record):
    """In the buffer of its optimizer. Else the sum would be of unlike layouts, which is slow."""
    script = load(record.folder, block=BLOCK)
    hold_gradients(script, use_fp8=False)
    if hasattr(script, "FP8Product"):
        hold_gradients(script, use_fp8=True)


def hold_gradients(script, use_fp8):
    cfg = tiny_flags(script, model_dim=48, head_dim=8)  # in twelve channel groups from 92b on
    model = make_model(script, cfg)
    model.lm_head.use_fp8 = use_fp8
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    optimizers = script.build_optimizers(model, cfg, ranks)
    views = {name: p.grad for name, p in model.named_parameters()}
    arrived = {name: [] for name in views}
    for name, p in model.named_parameters():
        # A hook sees the gradient before it is added to the buffer.
        p.register_hook(lambda grad, name=name: arrived[name].append(strides_of(grad)))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, cfg.eot_token, (2, 49), generator=generator)
    batch = tokens[:, :-1].int(), tokens[:, 1:].contiguous()
    script.accumulate_gradients(model, [batch], script.schedule(0, cfg))
    for name, p in model.named_parameters():
        buffers = [optimizer.grads.untyped_storage().data_ptr() for optimizer in optimizers]
        assert p.grad is views[name] and p.grad.is_contiguous(), name
        assert buffers.count(p.grad.untyped_storage().data_ptr()) == 1, name
        assert all(strides == strides_of(p.grad) for strides in arrived[name]), name
    assert any(arrived.values())
