"""The lineage: how small its steps are, and what each record has above the banner.

Every script is imported as it is. What it is held to, the published figures and formulas, is
written here once more: the formulas in float64, a sequence, a head and a matrix at a time. Those
of the records from SparseAttnGate on are in lineage_oracles.py and test_lineage.py. The harness
below the banner is the root's, and is tested there.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO
from test_lineage import in_float64

sys.path[:0] = [str(REPO / "records"), str(REPO / "tests" / "script")]

import test_style  # noqa: E402
from ledger import table  # noqa: E402

FOLDERS = sorted(path.parent for path in (REPO / "records").glob("*/train_gpt.py"))
SOURCES = [(folder / "train_gpt.py").read_text() for folder in FOLDERS]
LINEAGE = [
    "ModernArch", "UntieEmbed", "SoftCap", "Fp8LmHead", "BatchSize", "ShardedOptimizers",
    "SparseAttnGate", "Yarn", "Backout", "CautiousWD", "CautiousWDAdam", "MultiTokenPrediction"]
NUMBERS = range(1, len(LINEAGE) + 1)
EARLY = NUMBERS[:6]  # the records whose formulas stand here
BANNER = "\n# ==== Harness"
BLOCK, EOT = 128, 256
FP32_EPS = 2.0**-23  # what the norm adds to the mean square of fp32
BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits


@functools.cache
def load(number):
    """The script of record 1, 2, … as a module."""
    path = FOLDERS[number - 1] / "train_gpt.py"
    spec = importlib.util.spec_from_file_location(f"record{number}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its source is
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=NUMBERS, ids=LINEAGE)
def number(request):
    return request.param


@pytest.fixture
def script(number):
    return load(number)


def records(numbers):
    """Parametrises a test over some of the records alone."""
    return pytest.mark.parametrize("number", numbers, ids=[LINEAGE[n - 1] for n in numbers])


def since(first):
    return records(NUMBERS[first - 1 :])


early = records(EARLY)


def test_each_record_names_its_parent_in_claim_and_docstring():
    assert [folder.name.partition("_")[2] for folder in FOLDERS] == LINEAGE
    claims = table.find_records(REPO / "records")
    parents = [None, *(folder.name for folder in FOLDERS[:-1])]
    assert [(record.folder.name, record.claim["parent"]) for record in claims] == [
        (folder.name, parent) for folder, parent in zip(FOLDERS, parents, strict=True)]
    for number, parent in zip(NUMBERS, parents, strict=True):
        first = f"\nParent: {parent}. Change: " if parent else "\nParent: none. "
        assert first in load(number).__doc__


def test_below_the_banner_all_records_have_the_bytes_of_the_root():
    root = (REPO / "train_gpt.py").read_text()
    assert root == SOURCES[-1]
    for folder, source in zip(FOLDERS, SOURCES):
        assert source.count(BANNER) == 1
        assert source.partition(BANNER)[2] == root.partition(BANNER)[2], folder


@records(NUMBERS[1:])
def test_a_step_of_the_lineage_is_small(number):
    """By `diff`, whose lines are fewest; SoftCap stands for two months of public records."""
    pair = [folder / "train_gpt.py" for folder in FOLDERS[number - 2 : number]]
    lines = subprocess.run(["diff", *pair], text=True, capture_output=True).stdout
    changed = re.findall("^[<>]", lines, re.M)
    assert 0 < len(changed) <= (350 if LINEAGE[number - 1] == "SoftCap" else 150)


def test_no_record_is_dense(number, monkeypatch):
    tree = test_style.ast.parse(SOURCES[number - 1])
    nodes = list(test_style.ast.walk(tree))
    for name, value in dict(SOURCE=SOURCES[number - 1], TREE=tree, NODES=nodes).items():
        monkeypatch.setattr(test_style, name, value)
    found = test_style.measures.__wrapped__()  # not the root's, which are kept
    assert {name: found[name] for name, most in test_style.MOST.items() if found[name] > most} == {}
    assert all(found[name] >= least for name, least in test_style.LEAST.items())


def test_each_place_of_a_docstrings_map_is_there(script):
    rows = script.__doc__.partition("\nTechnique ")[2].splitlines()[1:]
    assert len(rows) >= 5
    for row in rows:
        for place in re.split("  +", row)[1].split(", "):
            assert functools.reduce(getattr, place.split("."), script), row


@pytest.mark.parametrize("preset", ["record", "pocket"])
def test_a_step_can_be_dealt_to_1_2_4_or_8_ranks(script, preset):
    assert script.parse_args(["--preset", preset]).sequences_per_step % 8 == 0


PUBLISHED = {  # field: its value in each early record, None where it has no such field
    "num_iterations": (5100, 4578, 1390, 1395, 1770, 1770),
    "sequences_per_step": (512, 512, 8, 8, 8, 8),
    "seq_lens": ((1024,), (1024,), (65_536,), (65_536,), (49_152,), (49_152,)),
    "val_seq_len": (1024, 1024, 65_536, 65_536, 262_144, 262_144),
    "sequences_per_forward": (64, 64, 1, 1, 1, 1),
    "val_tokens": (10_485_760,) * 6,
    "val_every": (125,) * 6,
    "vocab_size": (50_257,) * 6,
    "eot_token": (50_256,) * 6,
    "model_dim": (768,) * 6,
    "head_dim": (128,) * 6,
    "num_layers": (12, 12, None, None, None, None),
    "attention_pattern": (None, None, *["LLLLLLL.LLLL"] * 2, *["LSSSLSS.SSSL"] * 2),
    "value_embed_pattern": (None, None, *["012......012"] * 4),
    "attention_scale": (None, None, None, None, 0.12, 0.12),
    "rope_base": (10_000, 10_000, 1024, 1024, 1024, 1024),
    "embed_lr": (0.0036, 0.3, 0.6, 0.6, 0.6, 0.6),
    "head_lr": (None, 0.002, 0.008, 0.008, 0.008, 0.008),
    "muon_lr": (0.00036, 0.02, 0.05, 0.05, 0.05, 0.05),
    "muon_momentum": (0.95,) * 6,
    # Of the model made of it
    "embedding_rows": (50_304, 50_304, 50_304, 50_257, 50_257, 50_257),
    "head_rows": (50_304,) * 6,
    "parameters": (123_568_128, 162_201_600, 275_742_772, *[275_598_388] * 3),
    "attention_layers": (12, 12, 11, 11, 11, 11)}
LAST = [  # the attention window grows by a block of 128 tokens at these steps, from one block
    132, 263, 394, 525, 656, 787, 918, 1049, 1181, 1312, 1443, 1574, 1705]
GROWTH = {
    3: [103, 206, 309, 412, 515, 618, 721, 824, 927, 1030, 1133, 1236, 1339],
    4: [104, 207, 311, 414, 517, 621, 724, 827, 931, 1034, 1137, 1241, 1344], 5: LAST, 6: LAST}


def published_rate_scale(number, step):
    """Constant, then a straight line: to 0 over the last steps, later to 0.1 over two fifths."""
    steps = PUBLISHED["num_iterations"][number - 1]
    left = (steps - step) / {1: 1450, 2: 1308}.get(number, 0.4 * steps)
    floor = 0.1 if number >= 4 else 0.0
    return floor + (1 - floor) * min(1.0, left)


def published_momentum(number, step):
    frac = min(1.0, step / 300)
    return 0.95 if number <= 2 else (1 - frac) * 0.85 + frac * 0.95


@early
def test_the_record_preset_is_the_published_configuration(number, script):
    cfg = script.Hyperparameters()
    with torch.device("meta"):
        model = script.GPT(cfg)
    of_model = {
        "embedding_rows": len(model.embed.weight), "head_rows": len(model.lm_head.weight),
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention_layers": sum(block.attn is not None for block in model.blocks)}
    found = {name: of_model.get(name, getattr(cfg, name, None)) for name in PUBLISHED}
    assert found == {name: values[number - 1] for name, values in PUBLISHED.items()}


@early
def test_rates_momentum_and_windows_follow_the_published_schedules(number, script):
    cfg = script.Hyperparameters()
    found = [script.schedule(step, cfg) for step in range(cfg.num_iterations + 1)]
    for step, now in enumerate(found):
        expected = [published_rate_scale(number, step), published_momentum(number, step)]
        assert [now.lr_factor, now.momentum] == pytest.approx(expected, abs=1e-12)
        assert (now.seq_len,) == cfg.seq_lens
    if number in GROWTH:
        windows = [now.window for now in found]
        assert windows[0] == 1
        changes = [(step, after - before) for step, (before, after)
                   in enumerate(itertools.pairwise(windows), 1) if after != before]
        assert changes == [(step, 1) for step in GROWTH[number]]


LENGTH = 3 * BLOCK  # a window of two blocks hides something, of one more
# In units of a gradient's largest entry: fp32 sums in another order through five layers and back,
# those for a lambda of some 10,000 products that cancel.
FP32 = 1e-4


def tiny(script, **changes):
    """A model of the record's kind that takes milliseconds; what belongs to a record is kept."""
    cfg = script.Hyperparameters()
    layers = {"num_layers": 5, "attention_pattern": "LL.LL", "value_embed_pattern": "01.01"}
    if "S" in getattr(cfg, "attention_pattern", ""):
        layers["attention_pattern"] = "LS.SL"
    layers |= {"mlp_pattern": ".MMMM", "skip_layer": 1, "backout_layer": 3}
    changes = dict(
        vocab_size=EOT + 1, eot_token=EOT, vocab_multiple=16, model_dim=32, head_dim=16,
        seq_lens=(LENGTH,), val_seq_len=LENGTH, sequences_per_forward=2, device="cpu", **layers,
    ) | changes
    return dataclasses.replace(cfg, **{k: v for k, v in changes.items() if hasattr(cfg, k)})


def make_model(script, cfg, seed=0):
    """A model with no weight at zero, so that everything in it matters."""
    model = script.GPT(cfg)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lambda" in name or name == "skip_weights":
                param.uniform_(0.3, 1.2, generator=generator)
            elif name.endswith(("c_proj.weight", "c_proj", "gate.weight", "lm_head.weight")):
                param.normal_(std=0.1, generator=generator)
            elif name == "embed.weight":
                param.normal_(generator=generator)
    return model


def random_batch(seed, rows=2, length=LENGTH):
    """Inputs of several documents a row, the first begun before it, and targets, some of them -1"""
    generator = np.random.default_rng(seed)
    inputs, targets = generator.integers(0, EOT, size=(2, rows, length))
    inputs[generator.random(inputs.shape) < 1 / 90] = EOT
    targets[generator.random(targets.shape) < 1 / 10] = -1
    assert (inputs == EOT).sum(1).min() > 1
    return torch.from_numpy(inputs.astype(np.int32)), torch.from_numpy(targets)


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + FP32_EPS).sqrt()


def rotary_tables(number, model, length):
    """The model's cosines and sines, (T, pairs), in float64, after they are held to the formula.

    1, 2: all pairs turn, slower by a constant factor each down to almost 1/10000; kept in bf16.
    Later: half of the pairs turn, the last at 1/1024 of the first one's frequency; kept in fp32.
    """
    pairs = model.cfg.head_dim // 2
    if number <= 2:
        frequency = [10_000 ** (-i / pairs) for i in range(pairs)]
    else:
        quarter = pairs // 2
        frequency = [1024 ** (-i / (quarter - 1)) for i in range(quarter)] + [0] * quarter
    angle = np.outer(np.arange(length), frequency)
    tables = []
    for found, exact in zip(model.rotary[:, :length, 0], (np.cos(angle), np.sin(angle))):
        assert found.dtype == (torch.bfloat16 if number <= 2 else torch.float32)
        rounding = BF16_STEP * np.abs(exact) if number <= 2 else 0
        # Of the exponent, which ln 10000 multiplies, the power, the product and the cosine.
        error = (12 * angle + 1) * 2.0**-24
        assert (np.abs(found.double().numpy() - exact) <= rounding + error).all()
        tables.append(found.double())
    return tables


def naive_attention(q_THK, k_THK, v_THK, seen_TT, scale):
    """Softmax over what each token sees, one head at a time."""
    heads = []
    for q, k, v in zip(*(x.unbind(1) for x in (q_THK, k_THK, v_THK)), strict=True):
        scores = (scale * q @ k.T).masked_fill(~seen_TT, -math.inf)
        heads.append(scores.softmax(-1) @ v)
    return torch.cat(heads, -1)


def seen_by(number, tokens, window):
    """(T, T): no later token; since record 3 none of another document or beyond the window."""
    i, j = np.indices((len(tokens), len(tokens)))
    seen = j <= i
    if number >= 3:
        document = np.cumsum(tokens.numpy() == EOT)
        seen &= (document[i] == document[j]) & (i // BLOCK - j // BLOCK < window)
    return torch.from_numpy(seen)


def naive_logits(number, W, tokens, window, tables, cfg):
    """Logits (T, V) of one sequence by the formulas of the public record, of weights by name."""
    cos, sin = (table[:, None] for table in tables)
    heads, scale = cfg.model_dim // cfg.head_dim, 0.12 if number >= 5 else cfg.head_dim**-0.5
    layers = 1 + max(int(name.split(".")[1]) for name in W if name.startswith("blocks."))
    pattern, values = "L" * layers, "." * layers
    if number >= 3:
        pattern, values = cfg.attention_pattern, cfg.value_embed_pattern
    windows = {"L": window, "S": max(1, window // 2)}
    seen = {letter: seen_by(number, tokens, windows[letter]) for letter in windows}

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    tokens = tokens.long()
    x = W["embed.weight"][tokens]
    x0 = x = rms(x) if number >= 2 else x
    skips = []
    for layer in range(layers):
        name = f"blocks.{layer}"
        if number >= 3:
            if layer >= layers - layers // 2:
                x = x + W["skip_weights"][layer - (layers - layers // 2)] * skips.pop()
            x = W[f"{name}.lambdas"][0] * x + W[f"{name}.lambdas"][1] * x0
        if pattern[layer] != ".":
            matrices = (W[f"{name}.attn.qkv_w"] if number >= 5
                        else [W[f"{name}.attn.c_{letter}.weight"] for letter in "qkv"])
            q, k, v = ((rms(x) @ w.T).unflatten(-1, (heads, -1)) for w in matrices)
            q, k = (rms(turned(x)) if number == 1 else turned(rms(x)) for x in (q, k))
            if number >= 3:
                v = W[f"{name}.attn.lambdas"][0] * v
            if values[layer] != ".":
                table = W[f"value_embeds.{values[layer]}.weight"]
                v = v + W[f"{name}.attn.lambdas"][1] * table[tokens].view_as(v)
            y = naive_attention(q, k, v, seen[pattern[layer]], scale)
            x = x + y @ W[f"{name}.attn.c_proj.weight"].T
        hidden = (rms(x) @ W[f"{name}.mlp.c_fc.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ W[f"{name}.mlp.c_proj.weight"].T
        if layer < layers // 2:
            skips.append(x)
    logits = rms(x) @ W["embed.weight" if number == 1 else "lm_head.weight"].T
    if number <= 2:
        return logits
    return 15 * torch.tanh(logits / 15) if number == 3 else 30 * torch.sigmoid(logits / 7.5)


@pytest.mark.parametrize(  # since record 5, half of one block is one block for the short window
    ("number", "window"), [(1, 3), (2, 3), (3, 2), (4, 2), (5, 1), (5, 2), (6, 1), (6, 2)])
def test_loss_and_gradients_are_those_of_the_published_formulas(number, script, window):
    cfg = tiny(script)
    model = make_model(script, cfg)
    if number >= 3:
        model.set_window(window)
    inputs, targets = random_batch(window)
    W = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    assert all(w.any() for w in W.values())
    tables = rotary_tables(number, model, LENGTH)
    logits = torch.stack([naive_logits(number, W, row, window, tables, cfg) for row in inputs])
    logs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -(logs * (targets >= 0)).sum()
    expected.backward()
    model.tokens_per_piece = LENGTH if window == 2 else 2 * LENGTH  # of the head, two pieces or one
    loss = model(inputs, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, param in model.named_parameters():
        exact = W[name].grad
        error = (param.grad.double() - exact).abs().max() / exact.abs().max()
        assert error < FP32, f"{name}: {error:.1e}"


def test_the_norm_adds_the_epsilon_of_its_day(number, script):
    """2^-7 to the mean square of bf16, 2^-23 to that of fp32; since record 5, 2^-23 to both."""
    generator = torch.Generator().manual_seed(0)
    # Rows of all sizes: in the smallest, the epsilon is nearly all there is.
    x = torch.randn(200, 64, generator=generator) * torch.logspace(-5, 1, 200)[:, None]
    for dtype, eps in ((torch.bfloat16, 2.0**-7 if number <= 4 else 2.0**-23),
                       (torch.float32, 2.0**-23)):
        given = x.to(dtype)
        exact = given.double()
        exact /= (exact.square().mean(-1, keepdim=True) + eps).sqrt()
        found = script.norm(given)
        assert found.dtype == dtype
        rounding = BF16_STEP if dtype == torch.bfloat16 else 4 * FP32_EPS
        assert ((found.double() - exact).abs() <= 1.01 * rounding * exact.abs()).all()


def fp8_scales(number):
    """Published factors of the head's input, its weights and its gradient, before their casts."""
    early = {4: [2, 2**5, 2**29], 5: [2, 2**9, 2**19], 6: [2, 2**9, 2**19]}
    late = [448 / 100, 448 / 1.5, 448 / 0.75] if number == 12 else [448 / 768**0.5, 2**9, 448]
    return early.get(number, late)


@since(4)
def test_the_head_takes_fp8_with_the_published_scales_while_training(number, script):
    scales = [script.FP8_X_SCALE, script.FP8_W_SCALE, script.FP8_GRAD_SCALE]
    assert scales == pytest.approx(fp8_scales(number))
    model = make_model(script, tiny(script))
    owner = model if number == 4 else model.lm_head
    owner.use_fp8 = True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(EOT, (64,), generator=generator)
    w = model.lm_head.weight

    def rounded(x, scale):
        limited = (x.detach().float() * scale).clamp(-448, 448)
        return limited.to(torch.float8_e4m3fn).double() / scale

    def loss(logits):  # up to 6 the mean over a forward pass of the record, of which these are 64
        tokens = script.Hyperparameters().seq_lens[0] if number in EARLY else 1
        return F.cross_entropy(logits, targets, reduction="sum") / tokens

    training = model.logits(x)
    found = torch.autograd.grad(loss(training), [x, w])
    plain = model.eval().logits(x)
    products = rounded(x, scales[0]) @ rounded(w, scales[1]).T
    exact = x.double() @ w.bfloat16().double().T
    for logits, raw in ((training, products), (plain, exact)):
        # The raw logits are rounded to bf16, and no slope of the cap is above one.
        bound = BF16_STEP * raw.abs() + 1e-5
        assert ((logits.double() - 30 * torch.sigmoid(raw / 7.5)).abs() <= bound).all()
    assert not torch.allclose(training, plain, atol=1e-3)
    expected = torch.autograd.grad(loss(30 * torch.sigmoid(exact / 7.5)), [x, w])
    for grad, exact in zip(found, expected, strict=True):
        error = (grad.double() - exact.double()).norm() / exact.double().norm()
        assert 0 < error < 2.0**-3  # largest relative error of rounding to e5m2


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["A100", "H100"])
def test_what_a_record_asks_of_a_gpu(number, script, capability, monkeypatch):
    """Types, FP8 and attention kernels, of a GPU that torch.cuda pretends to have."""
    properties, calls = SimpleNamespace(shared_memory_per_block_optin=227 * 1024), {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{kind}_sdp",
                            functools.partial(calls.__setitem__, kind))
    cfg = script.Hyperparameters()
    with torch.device("meta"):
        model = script.GPT(cfg)
    model.compile = lambda **kwargs: calls.update(kwargs)
    head = script.prepare_for_cuda(model, cfg, torch.device("cuda", 0))
    no_other = dict(flash=False, mem_efficient=False) if number == 2 else {}
    assert calls == dict(dynamic=False) | no_other  # cuDNN's attention is left
    bf16 = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    expected = {"embed.weight", *(f"value_embeds.{i}.weight" for i in range(3))}
    if number >= 9:
        expected |= {"lm_head.weight", "smear_gate.weight"}
        expected |= {f"blocks.{i}.attn.attn_gate.weight" for i in range(11) if i != 6}
    assert bf16 == (expected if number >= 3 else set())
    takes_fp8 = number >= 4 and capability == (9, 0)
    assert head == ("fp8" if takes_fp8 else "bf16")
    if number >= 4:
        assert (model if number == 4 else model.lm_head).use_fp8 == takes_fp8


@records([1, 2])
def test_the_first_records_run_in_bf16_by_autocast(number, script, monkeypatch):
    """Here on the CPU: the weights stay fp32, queries and keys are bf16, the loss is fp32 again."""
    cfg = script.parse_args(["--preset", "pocket"])
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    model.compile = lambda **kwargs: None
    seen, rotate = set(), script.rotate

    def noted(x, *angles):
        seen.add(x.dtype)
        return rotate(x, *angles)

    monkeypatch.setattr(script, "rotate", noted)
    tokens = torch.arange(128)[None]
    before = model(tokens.int(), tokens)
    assert script.prepare_for_cuda(model, cfg, torch.device("cpu")) == "bf16"
    loss = model(tokens.int(), tokens)
    assert seen == {torch.float32, torch.bfloat16} and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(before.item(), rel=0.01)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@early
def test_every_matrix_begins_with_the_published_distribution(number, script):
    model = script.GPT(tiny(script, model_dim=128, num_layers=2))
    model.init_weights(torch.Generator().manual_seed(0))
    for name, param in model.named_parameters():
        x, fan_in = param.detach(), param.size(-1)
        if name == "embed.weight" and number == 1 or name.endswith(
            ("q.weight", "k.weight", "v.weight", "qkv_w", "c_fc.weight")
        ):
            bound = (1 if number <= 3 else math.sqrt(3) * 0.5) / math.sqrt(fan_in)
            assert bound * 0.99 < x.abs().max() <= bound * (1 + 1e-6), name
            assert x.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02), name
        elif "embed" in name:
            assert x.std().item() == pytest.approx(1, rel=0.02), name
        elif name.endswith(("c_proj.weight", "lm_head.weight")):
            assert not x.any(), name
        elif name == "skip_weights":
            assert (x == 1).all()
        else:
            assert x.tolist() == ([0.5, 0.5] if "attn" in name else [1, 0]), name


def published_rate(number, name, p):
    """Which optimizer a parameter has, and its rate before any schedule."""
    if name.startswith("blocks.") and p.ndim >= 2:
        return "muon", {1: 0.1 * 0.0036, 2: 0.02}.get(number, 0.05)
    if p.ndim < 2:
        return "adam", 0.04
    if name == "lm_head.weight":
        return "adam", 0.002 if number == 2 else 0.008
    return "adam", {1: 0.0036, 2: 0.3}.get(number, 0.6)


# In units of the rate: Newton-Schulz takes an error of fp32 up to 3.4445^5 times as far, and record
# 1 multiplies what it gives by up to √128.
FP32_STEP = 1e-4


def newton_schulz(G):
    """Five published steps on one matrix, in float64."""
    X = (G.T if G.size(0) > G.size(1) else G) / (G.norm() + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


def muon_change(number, grad, memory, step):
    """Change of one matrix in units of the rate. Its momentum, in `memory`, is changed in place."""
    momentum, (rows, columns) = published_momentum(number, step), grad.shape
    if number <= 2:  # a sum of gradients
        memory.mul_(momentum).add_(grad)
        update = newton_schulz(grad + momentum * memory)
    else:  # a mean of gradients
        memory.mul_(momentum).add_((1 - momentum) * grad)
        update = newton_schulz((1 - momentum) * grad + momentum * memory)
    return -update * (max(rows, columns) if number == 1 else max(1, rows / columns)) ** 0.5


def adam_change(number, grad, mean, square, count):
    """Change in units of the rate, after `count` steps with this one; mean and square in place."""
    beta1, eps = (0.9 if number <= 2 else 0.8), (1e-8 if number <= 4 else 1e-10)
    mean.mul_(beta1).add_((1 - beta1) * grad)
    square.mul_(0.95).add_(0.05 * grad**2)
    return -(mean / (1 - beta1**count)) / ((square / (1 - 0.95**count)).sqrt() + eps)


def random_grads(model, seed):
    """Gradients of all sizes down to those of Adam's eps and of Newton-Schulz's, zeros among them.

    Matrices as a whole differ in size too: to those near 1e-7, sum and mean are not the same.
    """
    generator, grads = torch.Generator().manual_seed(seed), {}
    for index, (name, p) in enumerate(model.named_parameters()):
        rows = torch.rand([*p.shape[:1], *[1] * (p.ndim - 1)], generator=generator)
        size = 10.0 ** (-10 * rows if "embed" in name or "head" in name else -2 * (index % 5))
        kept = torch.rand(p.shape, generator=generator) > 0.1
        grads[name] = size * kept * torch.randn(p.shape, generator=generator)
    return grads


def matrices(x):
    """The matrices of a stack, or the one there is."""
    return x if x.ndim == 3 else x[None]


@early
def test_steps_are_those_of_the_published_formulas(number, script):
    cfg = tiny(script)
    model = make_model(script, cfg)
    optimizers = script.build_optimizers(model, cfg, script.Ranks(cfg))
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    means = {name: torch.zeros_like(w) for name, w in weights.items()}
    squares = {name: torch.zeros_like(w) for name, w in weights.items()}
    # Two steps at the start, one in the middle of the momentum's warm-up, one in the cooldown.
    for count, step in enumerate((0, 1, 150, cfg.num_iterations - 100), 1):
        scale = published_rate_scale(number, step)
        for name, grad in random_grads(model, step).items():
            param = model.get_parameter(name)
            param.grad += 4 * grad
            grad, kind, rate = grad.double(), *published_rate(number, name, param)
            if kind == "adam":
                change = adam_change(number, grad, means[name], squares[name], count)
            else:
                stack = zip(matrices(grad), matrices(means[name]), strict=True)
                change = torch.stack([muon_change(number, *pair, step) for pair in stack])
            weights[name] += rate * scale * change.view_as(grad)
        script.step_optimizers(optimizers, script.schedule(step, cfg), 4)
        for name, param in model.named_parameters():
            _, rate = published_rate(number, name, param)
            bound = count * FP32_EPS * weights[name].abs() + FP32_STEP * rate
            error = (param.detach().double() - weights[name]).abs()
            assert (error <= bound).all(), f"step {step}: {name}"
            assert not param.grad.any()


@early
def test_gradients_are_of_mean_losses(number, script):
    """Of each forward pass; since SparseAttnGate of sums, as is held to the oracles."""
    cfg = tiny(script)
    model, other = make_model(script, cfg), make_model(script, cfg)
    batches = [random_batch(seed, rows=1) for seed in range(2)]
    losses = script.accumulate_gradients(model, batches, script.schedule(0, cfg))
    mean = sum(other(*batch) / batch[1].numel() for batch in batches)
    mean.backward()
    assert losses.tolist() == [pytest.approx(mean.item() / 2)]
    for param, expected in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(param.grad, expected.grad)


class Exchange:
    """The collectives between ranks that are threads of this process, in place of torch's.

    What is asynchronous has its result where it is waited for, no sooner.
    """

    def __init__(self, world_size):
        self.world_size, self.mine = world_size, threading.local()
        self.barrier, self.given = threading.Barrier(world_size, timeout=60), [None] * world_size

    def collect(self, x, async_op, put):
        """`put` what every rank has given at its same call."""
        self.barrier.wait()
        self.given[self.mine.rank] = x.clone()
        self.barrier.wait()
        handle = SimpleNamespace(wait=functools.partial(put, list(self.given)))
        return handle if async_op else handle.wait()

    def all_reduce(self, x, async_op=False):
        return self.collect(x, async_op, lambda parts: x.copy_(sum(parts)))

    def reduce_scatter_tensor(self, part, x, async_op=False):
        rank = self.mine.rank
        return self.collect(
            x, async_op, lambda parts: part.copy_(sum(parts).chunk(self.world_size)[rank]))

    def all_gather_into_tensor(self, whole, x, async_op=False):
        return self.collect(x, async_op, lambda parts: whole.copy_(torch.cat(parts)))

    def all_gather(self, rows, x, async_op=False):
        return self.collect(x, async_op, lambda parts: [r.copy_(p) for r, p in zip(rows, parts)])


def steps_of_a_rank(script, cfg, steps, state=None, rank=0, dist=None):
    """Weights by name and the whole state after some steps, from a whole state if one is given."""
    ranks = script.Ranks(cfg)
    if dist:
        ranks.rank, ranks.world_size, dist.mine.rank = rank, dist.world_size, rank
    model = make_model(script, cfg).double()
    optimizers = script.build_optimizers(model, cfg, ranks)
    for optimizer in optimizers:
        optimizer.dtype = torch.float64
        if state:
            optimizer.load_full_state(state[optimizer.name])
    for step in steps:
        for name, grad in random_grads(model, step).items():
            # An eighth of each entry from a rank, from one five eighths: no rounding.
            most = torch.arange(grad.numel()).view_as(grad) % 4 == rank
            model.get_parameter(name).grad += grad * (1 / 8 + 1 / 2 * most if dist else 1)
        script.step_optimizers(optimizers, script.schedule(step, cfg), 1)
    return dict(model.named_parameters()), {o.name: o.full_state() for o in optimizers}


def test_ranks_together_step_as_one_does(number, script, monkeypatch):
    """Four, which do not divide the MLP's matrices, from the state of one, which takes theirs."""
    cfg, dist = tiny(script), Exchange(4)
    with in_float64():
        _, state = steps_of_a_rank(script, cfg, range(2))
        weights, whole = steps_of_a_rank(script, cfg, range(2, 4), state)
        with monkeypatch.context() as patch, ThreadPoolExecutor(4) as threads:
            patch.setattr(script, "dist", dist)
            found = [threads.submit(steps_of_a_rank, script, cfg, range(2, 4), state, rank, dist)
                     for rank in range(4)]
        for future in found:
            for name, weight in future.result()[0].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-9, atol=1e-12)
            _, taken = steps_of_a_rank(script, cfg, [], future.result()[1])
            for name, values in taken.items():
                torch.testing.assert_close(values, whole[name], rtol=1e-9, atol=1e-12)


def test_it_trains_two_steps_of_the_pocket(
    number, script, pocket_data, tmp_path, monkeypatch, capsys, final_values
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script.signal, "signal", lambda *args: None)  # the tests keep theirs
    flags = "--preset pocket --device cpu --num_iterations 2 --warmup_steps 0 --val_tokens 4096"
    assert script.main([*flags.split(), "--save_every", "2", "--run_id", "two"]) == 0
    values, log = final_values(capsys.readouterr().out), (tmp_path / "logs/two/log.txt").read_text()
    assert log.startswith(SOURCES[number - 1]) and final_values(log) == values
    assert re.findall(r"^step:(\d)/2 (\w+):", log, re.M) == [
        ("1", "train_loss"), ("2", "train_loss"), ("2", "val_loss")]
    assert (values["steps"], values["tokens"]) == ("2", "4096")
    assert 3 < float(values["val_loss"]) < (7 if number == 1 else math.log(272))
    state = script.load_checkpoint(tmp_path / "logs/two/step-000002.pt")
    model = script.GPT(script.Hyperparameters(**state["hyperparameters"]))
    model.load_state_dict(state["model"])
    groups = script.parameter_groups(model, model.cfg)
    assert state["step"] == 2
    assert list(state["optimizers"]) == [group.name for group in groups if group.params]
