"""The lineage: what its scripts share, how small its steps are, and each record's mathematics.

Every script is imported as it is. What it is held to, the published figures and formulas, is
written here once more: the formulas in float64, a sequence, a head and a matrix at a time. Those
of the records from SparseAttnGate on are in lineage_oracles.py and test_lineage.py.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO

import train_gpt

sys.path.insert(0, str(REPO / "records"))

import ledger

FOLDERS = sorted(path.parent for path in (REPO / "records").glob("*/train_gpt.py"))
SCRIPTS = [*(folder / "train_gpt.py" for folder in FOLDERS[:-1]), REPO / "train_gpt.py"]
SOURCES = [path.read_text() for path in SCRIPTS]
LINEAGE = [
    "ModernArch", "UntieEmbed", "SoftCap", "Fp8LmHead", "BatchSize", "ShardedOptimizers",
    "SparseAttnGate", "Yarn", "Backout", "CautiousWD", "CautiousWDAdam", "MultiTokenPrediction",
    "KeyOffset",
]  # fmt: skip
EARLY = range(1, 7)  # the records whose formulas stand here
FROZEN = ["Data", "Distributed and logging", "Checkpoints", "Validation"]
BLOCK, EOT = 128, 256
FP32_EPS = 2.0**-23  # what the norm adds to the mean square of fp32
BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits


@functools.cache
def load(number):
    """The script of record 1, 2, … as a module."""
    if number == len(SCRIPTS):
        return train_gpt
    spec = importlib.util.spec_from_file_location(f"record{number}", SCRIPTS[number - 1])
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its source is
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=range(1, len(LINEAGE) + 1), ids=LINEAGE)
def number(request):
    return request.param


@pytest.fixture
def script(number):
    return load(number)


def records(numbers):
    """Parametrises a test over some of the records alone."""
    return pytest.mark.parametrize("number", numbers, ids=[LINEAGE[n - 1] for n in numbers])


def since(first):
    return records(range(first, len(LINEAGE) + 1))


early = records(EARLY)


# What the scripts share


def test_the_lineage_is_whole_and_in_order():
    names = [folder.name.partition("_")[2] for folder in FOLDERS]
    assert names[: len(LINEAGE)] == LINEAGE


def test_frozen_sections_are_the_same_bytes_in_every_record():
    parts = [ledger.sections(source, by_banner=True) for source in SOURCES]
    for title in FROZEN:
        texts = ["\n".join(line for _, line in part[title]) for part in parts]
        assert texts[-1].count("\n") > 20
        for path, text in zip(SCRIPTS, texts, strict=True):
            assert text == texts[-1], f"{path}: {title}"


def test_sections_come_in_one_order_and_say_which_are_frozen():
    orders = [list(ledger.banners(source.split("\n")).values()) for source in SOURCES]
    assert all(order == orders[-1] for order in orders)
    for source in SOURCES:
        marked = re.findall(r"^# ---- (.*) \(the same in every record\) -+$", source, re.M)
        assert marked == FROZEN


@pytest.mark.parametrize("child", range(2, len(SCRIPTS) + 1))
def test_a_step_of_the_lineage_is_small(child):
    diff = ledger.diff_sources(*SOURCES[child - 2 : child])
    most = {2: 80, 3: 350, 5: 120, 13: 60}.get(child, 150)  # 3: two months of public ones
    assert 0 < diff["added"] + diff["removed"] <= most


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_lines_have_at_most_100_columns(path):
    lines = path.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 100] == []


@pytest.mark.parametrize("child", range(2, len(SCRIPTS) + 1))
def test_a_docstring_names_the_parent(child):
    assert f"\nParent: {FOLDERS[child - 2].name}. Change: " in load(child).__doc__


def test_the_pocket_presets_have_one_width_depth_and_number_of_tokens(script):
    cfg, newest = (x.Hyperparameters(**x.PRESETS["pocket"]) for x in (script, train_gpt))
    layers = getattr(cfg, "num_layers", None) or len(cfg.attention_pattern)
    assert layers == len(newest.attention_pattern)
    for name in ("model_dim", "head_dim", "mlp_ratio", "vocab_size", "val_tokens", "target_loss"):
        assert getattr(cfg, name) == getattr(newest, name), name
    tokens, expected = (
        x.num_iterations * x.sequences_per_step * x.train_seq_len for x in (cfg, newest)
    )
    assert tokens == expected


@pytest.mark.parametrize("preset", ["record", "pocket"])
def test_a_step_can_be_dealt_to_1_2_4_or_8_ranks(script, preset):
    assert script.Hyperparameters(**script.PRESETS[preset]).sequences_per_step % 8 == 0


# The published configuration

PUBLISHED = {  # field: its value in each early record, None where it has no such field
    "num_iterations": (5100, 4578, 1390, 1395, 1770, 1770),
    "sequences_per_step": (512, 512, 8, 8, 8, 8),
    "train_seq_len": (1024, 1024, 65_536, 65_536, 49_152, 49_152),
    "val_seq_len": (1024, 1024, 65_536, 65_536, 262_144, 262_144),
    "sequences_per_forward": (64, 64, 1, 1, 1, 1),
    "val_tokens": (10_485_760,) * 6,
    "val_every": (125,) * 6,
    "vocab_size": (50_257,) * 6,
    "eot_token": (50_256,) * 6,
    "model_dim": (768,) * 6,
    "head_dim": (128,) * 6,
    "mlp_ratio": (4,) * 6,
    "num_layers": (12, 12, None, None, None, None),
    "attention_pattern": (None, None, *["LLLLLLL.LLLL"] * 2, *["LSSSLSS.SSSL"] * 2),
    "value_embed_pattern": (None, None, *["012......012"] * 4),
    "attention_scale": (None, None, None, None, 0.12, 0.12),
    "rope_base": (10_000, 10_000, 1024, 1024, 1024, 1024),
    "logit_cap": (None, None, 15, 30, 30, 30),
    "logit_slope": (None, None, None, 7.5, 7.5, 7.5),
    "fp8_x_scale": (None, None, None, 2, 2, 2),
    "fp8_w_scale": (None, None, None, 2**5, 2**9, 2**9),
    "fp8_grad_scale": (None, None, None, 2**29, 2**19, 2**19),
    "embed_lr": (0.0036, 0.3, 0.6, 0.6, 0.6, 0.6),
    "head_lr": (None, 0.002, 0.008, 0.008, 0.008, 0.008),
    "scalar_lr": (None, None, 0.04, 0.04, 0.04, 0.04),
    "muon_lr": (0.00036, 0.02, 0.05, 0.05, 0.05, 0.05),
    "adam_beta1": (0.9, 0.9, 0.8, 0.8, 0.8, 0.8),
    "adam_beta2": (0.95,) * 6,
    "adam_eps": (1e-8, 1e-8, 1e-8, 1e-8, 1e-10, 1e-10),
    "ns_steps": (5,) * 6,
    "momentum_start": (None, None, 0.85, 0.85, 0.85, 0.85),
    "muon_momentum": (0.95,) * 6,
    "momentum_warmup": (None, None, 300, 300, 300, 300),
    "final_lr_frac": (0, 0, 0, 0.1, 0.1, 0.1),
    # Of the model made of it
    "embedding_rows": (50_304, 50_304, 50_304, 50_257, 50_257, 50_257),
    "head_rows": (50_304,) * 6,
    "parameters": (123_568_128, 162_201_600, 275_742_772, *[275_598_388] * 3),
    "attention_layers": (12, 12, 11, 11, 11, 11),
}
LAST = [  # the attention window grows by a block of 128 tokens at these steps, from one block
    132, 263, 394, 525, 656, 787, 918, 1049, 1181, 1312, 1443, 1574, 1705,
]  # fmt: skip
GROWTH = {
    3: [103, 206, 309, 412, 515, 618, 721, 824, 927, 1030, 1133, 1236, 1339],
    4: [104, 207, 311, 414, 517, 621, 724, 827, 931, 1034, 1137, 1241, 1344],
    5: LAST,
    6: LAST,
}


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
    cfg = script.Hyperparameters(**script.PRESETS["record"])
    with torch.device("meta"):
        model = script.GPT(cfg)
    of_model = {
        "embedding_rows": len(model.embed.weight),
        "head_rows": len(model.lm_head.weight),
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention_layers": sum(block.attn is not None for block in model.blocks),
    }
    found = {name: of_model.get(name, getattr(cfg, name, None)) for name in PUBLISHED}
    assert found == {name: values[number - 1] for name, values in PUBLISHED.items()}


@early
def test_rates_and_momentum_follow_the_published_schedules(number, script):
    cfg = script.Hyperparameters()
    steps = range(cfg.num_iterations + 1)
    expected = [published_rate_scale(number, step) for step in steps]
    np.testing.assert_allclose([script.lr_scale(s, cfg) for s in steps], expected, atol=1e-12)
    if number >= 3:
        expected = [published_momentum(number, step) for step in steps]
        np.testing.assert_allclose([script.muon_momentum(s, cfg) for s in steps], expected)


@pytest.mark.parametrize("number", GROWTH)
def test_the_window_grows_at_the_published_steps(number, script):
    cfg = script.Hyperparameters()
    windows = [script.window_blocks(step, cfg) for step in range(cfg.num_iterations)]
    assert windows[0] == 1
    growth = [(step, after - before) for step, (before, after)
              in enumerate(itertools.pairwise(windows), 1) if after != before]
    assert growth == [(step, 1) for step in GROWTH[number]]


# The model

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
        train_seq_len=LENGTH, val_seq_len=LENGTH, sequences_per_forward=2, device="cpu", **layers,
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
    for table, exact in ((model.cos, np.cos(angle)), (model.sin, np.sin(angle))):
        assert table.dtype == (torch.bfloat16 if number <= 2 else torch.float32)
        found = table[:length, 0].double()
        rounding = BF16_STEP * np.abs(exact) if number <= 2 else 0
        # Of the exponent, which ln 10000 multiplies, the power, the product and the cosine.
        error = (12 * angle + 1) * 2.0**-24
        assert (np.abs(found.numpy() - exact) <= rounding + error).all()
        tables.append(found)
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
    ("number", "window"), [(1, 3), (2, 3), (3, 2), (4, 2), (5, 1), (5, 2), (6, 1), (6, 2)]
)
def test_loss_and_gradients_are_those_of_the_published_formulas(number, script, window):
    cfg = tiny(script)
    model = make_model(script, cfg)
    if number >= 3:
        model.window.fill_(window)
    inputs, targets = random_batch(window)
    W = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    assert all(w.any() for w in W.values())
    tables = rotary_tables(number, model, LENGTH)
    logits = torch.stack([naive_logits(number, W, row, window, tables, cfg) for row in inputs])
    logs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -(logs * (targets >= 0)).sum()
    expected.backward()
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
                       (torch.float32, 2.0**-23)):  # fmt: skip
        given = x.to(dtype)
        exact = given.double()
        exact /= (exact.square().mean(-1, keepdim=True) + eps).sqrt()
        found = script.norm(given)
        assert found.dtype == dtype
        rounding = BF16_STEP if dtype == torch.bfloat16 else 4 * FP32_EPS
        assert ((found.double() - exact).abs() <= 1.01 * rounding * exact.abs()).all()


def published_names(number):
    """Names of the weights in the state that the public #18, #19 and #21 save."""
    names = ["embed.weight", *(f"value_embeds.embed.{i}.weight" for i in range(3))]
    for layer in range(12):
        block = f"blocks.{layer}"
        names += [f"{block}.lambdas", f"{block}.mlp.c_fc.weight", f"{block}.mlp.c_proj.weight"]
        if layer != 7:
            matrices = ["c_q.weight", "c_k.weight", "c_v.weight"] if number <= 4 else ["qkv_w"]
            names += [f"{block}.attn.{x}" for x in (*matrices, "lambdas", "c_proj.weight")]
    return [*names, "skip_weights", "lm_head.weight"]


@records(EARLY[2:])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
@pytest.mark.parametrize("later", [False, True], ids=["embed.N", "N"])
def test_weights_load_under_their_published_names(number, script, prefix, later):
    """Tables were `value_embeds.embed.N` up to #21, and `value_embeds.N` afterwards."""
    record = script.Hyperparameters()
    cfg = tiny(script, attention_pattern=record.attention_pattern,
               value_embed_pattern=record.value_embed_pattern)  # fmt: skip
    model, other = make_model(script, cfg, seed=0), make_model(script, cfg, seed=1).state_dict()
    own = [x.replace("value_embeds.embed.", "value_embeds.") for x in published_names(number)]
    assert sorted(own) == sorted(other)
    given = own if later else published_names(number)
    model.load_state_dict({prefix + x: other[name] for x, name in zip(given, own, strict=True)})
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, other[name]), name


@since(3)
def test_the_cap_is_computed_in_the_published_type(number, script):
    """tanh in the head's own, the sigmoid in fp32; both give fp32."""
    model = make_model(script, tiny(script)).bfloat16()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    raw = F.linear(x, model.lm_head.weight)
    with torch.no_grad():
        logits = model.logits(x)
    assert raw.dtype == torch.bfloat16 and logits.dtype == torch.float32
    if number == 3:
        expected, rounding = 15 * torch.tanh(raw.double() / 15), 3 * BF16_STEP  # three operations
        assert torch.equal(logits, logits.bfloat16().float())
    else:
        expected, rounding = 30 * torch.sigmoid(raw.double() / 7.5), 1e-6
    torch.testing.assert_close(logits.double(), expected, rtol=rounding, atol=0)


def fp8_scales(number):
    """Published factors of the head's input, its weights and its gradient, before their casts."""
    if number in EARLY:
        return [PUBLISHED[f"fp8_{x}_scale"][number - 1] for x in ("x", "w", "grad")]
    return [448 / 768**0.5, 2**9, 448] if number <= 11 else [448 / 100, 448 / 1.5, 448 / 0.75]


@since(4)
def test_the_head_takes_fp8_with_the_published_scales_while_training(number, script):
    record, cfg = script.Hyperparameters(), tiny(script)
    model = make_model(script, cfg)
    owner = model if number == 4 else model.lm_head
    owner.fp8_scales = record.fp8_x_scale, record.fp8_w_scale, record.fp8_grad_scale
    assert owner.fp8_scales == pytest.approx(fp8_scales(number))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(EOT, (64,), generator=generator)
    w = model.lm_head.weight

    def rounded(x, scale):
        limited = (x.detach().float() * scale).clamp(-448, 448)
        return limited.to(torch.float8_e4m3fn).double() / scale

    def loss(logits):  # up to 6 the mean over a forward pass of the record, of which these are 64
        tokens = record.train_seq_len if number in EARLY else 1
        return F.cross_entropy(logits, targets, reduction="sum") / tokens

    training = model.logits(x)
    found = torch.autograd.grad(loss(training), [x, w])
    plain = model.eval().logits(x)
    x_scale, w_scale, _ = fp8_scales(number)
    products = rounded(x, x_scale) @ rounded(w, w_scale).T
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


@pytest.mark.parametrize("preset", ["record", "pocket"])
@since(4)
def test_gradients_of_the_head_fit_into_fp8(number, script, preset):
    """With respect to a logit, a sum of losses has at most 1, their mean 1 / the tokens."""
    cfg = script.Hyperparameters(**script.PRESETS[preset])
    for world_size in (1, 2, 4, 8):
        sequences = min(cfg.sequences_per_forward, cfg.sequences_per_step // world_size)
        tokens = sequences * cfg.train_seq_len if number in EARLY else 1
        largest = cfg.fp8_grad_scale / tokens
        fits = largest <= torch.finfo(torch.float8_e5m2).max
        assert fits or not cfg.fp8_head, f"on {world_size} ranks"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["A100", "H100"])
def test_what_a_record_asks_of_a_gpu(number, script, capability, monkeypatch):
    """Types, FP8 and attention kernels, of a GPU that torch.cuda pretends to have."""
    memory, calls = 80 * 10**9, {}
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (memory, memory))
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{kind}_sdp",
                            functools.partial(calls.__setitem__, kind))
    cfg = script.Hyperparameters()
    with torch.device("meta"):
        model = script.GPT(cfg)
    model.compile = lambda **kwargs: calls.update(kwargs)
    script.prepare_for_cuda(model, cfg, torch.device("cuda", 0))
    no_other = dict(flash=False, mem_efficient=False) if number == 2 else {}
    assert calls == dict(dynamic=False) | no_other  # cuDNN's attention is left
    bf16 = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    expected = {"embed.weight", *(f"value_embeds.{i}.weight" for i in range(3))}
    if number >= 9:
        expected |= {"lm_head.weight", "smear_gate.weight"}
        expected |= {f"blocks.{i}.attn.attn_gate.weight" for i in range(11) if i != 6}
    assert bf16 == (expected if number >= 3 else set())
    assert model.head_chunks == 1
    if number >= 4:
        scales = (model if number == 4 else model.lm_head).fp8_scales
        if capability == (9, 0):
            assert scales == pytest.approx(fp8_scales(number))
        else:
            assert scales is None


# The first loss


def test_tied_weights_begin_at_the_published_loss():
    """Record 1 sees each token's own row in its head: ln(exp(√768 · |row|) + the others)."""
    script = load(1)
    cfg = dataclasses.replace(script.Hyperparameters(), num_layers=1)
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    inputs, targets = np.random.default_rng(0).integers(0, cfg.vocab_size, size=(2, 256))
    with torch.no_grad():
        logits = model.logits(model.hidden(torch.from_numpy(inputs.astype(np.int32))[None])[0])
        losses = F.cross_entropy(logits, torch.from_numpy(targets), reduction="none")
    standard_error = losses.std().item() / math.sqrt(len(losses))
    assert standard_error < 0.05
    assert losses.mean().item() == pytest.approx(16.0058, abs=4 * standard_error)


@records(range(2, 12))
def test_a_head_of_zeros_begins_at_the_log_of_the_padded_vocabulary(number, script):
    record = script.Hyperparameters()
    cfg = tiny(
        script, vocab_size=record.vocab_size, eot_token=record.eot_token, vocab_multiple=128
    )
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    inputs, _ = random_batch(0, rows=1, length=BLOCK)
    with torch.no_grad():
        loss = model(inputs, inputs.long()).item() / BLOCK
        logits = model.logits(model.hidden(inputs)[0, :2])
    assert loss == pytest.approx(math.log(50_304), rel=1e-6)
    assert loss == pytest.approx(10.8258, abs=5e-5)
    assert (logits == (15 if number >= 4 else 0)).all()


def test_a_tied_head_of_small_numbers_begins_at_the_published_loss():
    """10.8367, above ln 50304: the cap's half is the mean logit of a target, and the log of the
    sum of all is nearly the same for every token."""
    script = load(12)
    record = script.Hyperparameters()
    cfg = tiny(script, vocab_size=record.vocab_size, eot_token=record.eot_token, vocab_multiple=128,
               model_dim=record.model_dim, head_dim=record.head_dim)  # fmt: skip
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    inputs, _ = random_batch(0, rows=1, length=BLOCK)
    with torch.no_grad():
        logits = model.logits(model.hidden(inputs)[0, :16]).double()
    assert logits.logsumexp(-1).mean().item() - 15 == pytest.approx(10.8367, abs=1e-3)


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


# A step


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


def state_of(param, optimizers, key):
    """A parameter's part of its optimizer's state."""
    for o in optimizers:
        start = (param.data_ptr() - o.weights.data_ptr()) // o.weights.element_size()
        if 0 <= start < o.numel:
            return o.full_state()[key][start : start + param.numel()].view_as(param)
    raise AssertionError("a parameter of no optimizer")


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
        script.step_optimizers(optimizers, step, 4)
        for name, param in model.named_parameters():
            _, rate = published_rate(number, name, param)
            bound = count * FP32_EPS * weights[name].abs() + FP32_STEP * rate
            error = (param.detach().double() - weights[name]).abs()
            assert (error <= bound).all(), f"step {step}: {name}"
            assert not param.grad.any()
    for name, mean in means.items():
        found = state_of(model.get_parameter(name), optimizers, "mean").double()
        assert (found - mean).norm() < 1e-6 * mean.norm(), name


# Checkpoints


def trained(script, cfg, seeds, model=None, optimizers=None):
    """Model and optimizers after a step for each seed's gradients."""
    model = model or make_model(script, cfg)
    optimizers = optimizers or script.build_optimizers(model, cfg, script.Ranks(cfg))
    for seed in seeds:
        for name, grad in random_grads(model, seed).items():
            model.get_parameter(name).grad += grad
        script.step_optimizers(optimizers, seed, 1)
    return model, optimizers


def test_a_checkpoint_goes_on_to_the_bit(script, tmp_path):
    cfg = tiny(script, resume="auto", run_id="run")
    ranks, data = script.Ranks(cfg), [["train.bin", 1000, "3f"]]
    model, optimizers = trained(script, cfg, range(3))
    script.save_checkpoint(tmp_path, ranks=ranks, keep=2, state=dict(
        step=3, hyperparameters=dataclasses.asdict(cfg), data=data, train_time_ms=1.5,
        loader=(0, 384), model=model.state_dict(),
        optimizers={o.name: o.full_state() for o in optimizers}))
    path = script.find_checkpoint(cfg, ranks, SimpleNamespace(folder=tmp_path))
    state = script.load_checkpoint(path)
    script.check_same_run(path, state, cfg, data)
    other = make_model(script, cfg, seed=1)
    others = script.build_optimizers(other, cfg, ranks)
    other.load_state_dict(state["model"])
    for optimizer in others:
        optimizer.load_full_state(state["optimizers"][optimizer.name])
    trained(script, cfg, range(3, 6), model, optimizers)
    trained(script, cfg, range(3, 6), other, others)
    for name, x in model.state_dict().items():
        assert torch.equal(x, other.state_dict()[name]), name


def test_ranks_take_their_parts_of_the_state_of_one(number, script):
    """Of Adam in records 1 to 5 every rank has all, of Muon since record 2 its whole matrices."""
    cfg, world_size = tiny(script), 3  # which divides neither matrices nor scalars
    _, optimizers = trained(script, cfg, range(2))
    whole = {o.name: o.full_state() for o in optimizers}
    parts = {name: [] for name in whole}
    for rank in range(world_size):
        ranks = SimpleNamespace(rank=rank, world_size=world_size)
        for optimizer in script.build_optimizers(make_model(script, cfg), cfg, ranks):
            optimizer.load_full_state(whole[optimizer.name])
            parts[optimizer.name].append(optimizer)
    for name, owners in parts.items():
        sharded = number >= 6 or number >= 2 and isinstance(owners[0], script.Muon)
        for key, expected in whole[name].items():
            if not owners[0].state[key].ndim:
                continue
            found, numel = torch.cat([o.state[key].flatten() for o in owners]), len(expected)
            if sharded:
                assert torch.equal(found[:numel], expected) and not found[numel:].any()
            else:
                assert torch.equal(found, expected.repeat(world_size))
        if isinstance(owners[0], script.Muon) and sharded:
            assert owners[0].state["mean"].numel() % owners[0].shape.numel() == 0
        for o in owners:
            if "step" in o.state:
                assert o.state["step"] == (2 if number < 9 else 1)  # of two, Adam took the second


# The scripts as a user runs them


def test_a_wrong_flag_ends_in_one_line_and_2(script, capsys):
    assert script.main(["--preset", "pocket", "--train_seq_len", "100"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("train_gpt.py: error: --train_seq_len 100:") and err.count("\n") == 1
    assert "multiple of 128" in err


def checkpoint(folder, step):
    return torch.load(folder / f"step-{step:06d}.pt", weights_only=True)


@pytest.mark.slow
@records([1, 2, 6, 9, 12])  # whose optimizers have another state, or divide it in another way
def test_it_trains_on_one_rank_and_two_and_resumes(
    number, pocket_data, tmp_path, run_script, final_values
):
    path, folders = SCRIPTS[number - 1], [tmp_path / "logs" / name for name in ("one", "two")]
    losses = []

    def run(nproc, *flags):
        flags = ["--preset", "pocket", "--device", "cpu", "--num_iterations", 3, "--val_tokens",
                 4096, "--save_every", 1, *flags]  # fmt: skip
        if number >= 3:  # at first a lambda's gradient is but rounding, of which Adam makes a step
            flags += ["--scalar_lr", 0]
        if number >= 9:  # so that the three steps are of three stages
            flags += ["--extension_steps", 0]
        done = run_script(flags, nproc, timeout=240, script=path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for nproc, folder in enumerate(folders, 1):
        out = run(nproc, "--run_id", folder.name)
        log = (folder / "log.txt").read_text()
        assert log.startswith(path.read_text())
        for text in (out, log):
            values = final_values(text)
            assert (values["steps"], values["world_size"]) == ("3", str(nproc))
        losses.append(float(values["val_loss"]))
        steps = re.findall(r"^step:(\d+)/3 ", log, re.M)
        assert steps == ["1", "2", "3", "3"], "each step, and the last one's validation"
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    whole, other = (checkpoint(folder, 3) for folder in folders)
    assert whole["optimizers"].keys() == other["optimizers"].keys()
    for name, state in whole["optimizers"].items():
        one, two = (x["mean"].double() for x in (state, other["optimizers"][name]))
        # Not closer: while projections are zero, a lambda's gradient is but rounding errors, of
        # which Adam makes a whole step. A part in a wrong place, or a sum not divided, gives one.
        assert one.shape == two.shape and (one - two).norm() <= 0.1 * one.norm(), name

    for step in (2, 3):
        (folders[0] / f"step-{step:06d}.pt").unlink()
    out = run(1, "--run_id", "one", "--resume", "auto")
    assert "resumed at step:1 " in out
    assert float(final_values(out)["val_loss"]) == losses[0]
    again = checkpoint(folders[0], 3)
    states = [{"model": x["model"], **x["optimizers"]} for x in (whole, again)]
    for part, expected in states[0].items():
        for name, x in expected.items():
            assert torch.equal(x, states[1][part][name]), f"{part}: {name}"
