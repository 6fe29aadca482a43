"""What only a GPU can show: kernels against formulas, no waiting, no compiling after the warm-up.

    python -m pytest -m gpu

Without a GPU most run smaller on a host that stands in for one (host_gpu/), if asked for slow ones.
"""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ON_HOST = torch.cuda.is_available() and "standing in" in torch.cuda.get_device_name()
SMALL = dataclasses.replace(
    train_gpt.Hyperparameters(**train_gpt.PRESETS["record"]),
    vocab_size=1000, eot_token=999, model_dim=256, head_dim=128, attention_pattern="LS.L",
    value_embed_pattern="0..0", skip_layer=0, backout_layer=2, train_seq_len=3 * 1024,
    val_seq_len=4096, num_iterations=16, extension_steps=1, sequences_per_step=1, head_chunks=1,
    embed_std=0.02,
)  # fmt: skip
if ON_HOST:  # its kernels are interpreted
    SMALL = dataclasses.replace(
        SMALL, model_dim=64, head_dim=32, attention_pattern="L.S", value_embed_pattern="0..",
        backout_layer=0, train_seq_len=384, val_seq_len=512, num_iterations=5,
    )  # fmt: skip
held_to_more = pytest.mark.skipif(ON_HOST, reason="test_host_gpu.py holds the host to more")
# Relative error of a norm. bf16 keeps 8 bits: 0.4 % a rounding, some ten of which add up in a row;
# e5m2 keeps 3 bits of a gradient: 12 % a rounding, which average out over a sum of many.
BF16_ERROR, FP8_ERROR = 0.03, 0.1


def relative_error(x, reference):
    return ((x.float() - reference.float()).norm() / reference.float().norm()).item()


def one_rank(device):
    """This process alone, without torchrun's variables."""
    ranks = object.__new__(train_gpt.Ranks)
    ranks.rank, ranks.world_size, ranks.device = 0, 1, torch.device(device)
    return ranks


def make_model(device, cfg=SMALL):
    """The same weights on every device, none of them zero."""
    model = train_gpt.GPT(cfg)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for param in model.parameters():
            if not param.any():
                param.normal_(std=0.02, generator=generator)
    return model.to(device)


def prepared_model(cfg=SMALL):
    torch._dynamo.reset()
    model = make_model("cuda", cfg)
    train_gpt.prepare_for_cuda(model, cfg, torch.device("cuda", torch.cuda.current_device()))
    return model


def make_batch(device, length=SMALL.train_seq_len, seed=0):
    """One sequence of documents of some 300 tokens, as inputs and targets."""
    random = np.random.default_rng(seed)
    tokens = random.integers(SMALL.eot_token, size=(1, length + 1))
    tokens[random.random(tokens.shape) < 1 / 300] = SMALL.eot_token
    tokens = torch.from_numpy(tokens).to(device)
    return tokens[:, :-1].int(), tokens[:, 1:].contiguous()


def loss_and_gradients(model, batch, step=0):
    """Of three targets a token."""
    model.set_window(step)
    loss = model(*batch, train_gpt.target_weights(0, SMALL, batch[0].device))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("window", [1, 3, 13, 20])
def test_compiled_flex_attention_equals_the_dense_formula(window):
    torch._dynamo.reset()
    generator = torch.Generator("cuda").manual_seed(0)
    length, heads = SMALL.train_seq_len, SMALL.model_dim // SMALL.head_dim
    shape = 1, length, heads, SMALL.head_dim
    qkv = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(3)]
    inputs, _ = make_batch("cuda")
    docs = (inputs == SMALL.eot_token).cumsum(1, dtype=torch.int32) + 1
    gradient = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    position = torch.arange(length, device="cuda")
    distance = position[:, None] - position
    seen = (docs[0, :, None] == docs[0]) & (distance >= 0)
    seen &= distance <= window * train_gpt.BLOCK
    options, blocks = kernel_options(), torch.tensor(window, dtype=torch.int32, device="cuda")

    def flex(q, k, v, docs, window):
        return train_gpt.attend(
            q, k, v, mask=train_gpt.flex_mask(docs, window), scale=0.12, kernel_options=options
        )

    def dense(q, k, v):
        q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
        scores = (0.12 * q @ k.mT).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    results = []
    for attention in (lambda *x: torch.compile(flex, dynamic=False)(*x, docs, blocks), dense):
        leaves = [x.clone().requires_grad_() for x in qkv]
        y = attention(*leaves)
        y.backward(gradient.to(y.dtype))
        results.append([y.detach(), *(x.grad for x in leaves)])
    for x, reference in zip(*results, strict=True):
        assert relative_error(x, reference) < BF16_ERROR


def kernel_options():
    """What this GPU gets, by the script itself."""
    return prepared_model().kernel_options


@held_to_more
@pytest.mark.parametrize("head_chunks", [1, 4])
def test_one_step_is_nearly_that_of_the_cpu(head_chunks):
    """bf16, FlexAttention and the compiler against fp32 and dense masks."""
    cfg = dataclasses.replace(SMALL, fp8_head=False, head_chunks=head_chunks)
    loss, grads = loss_and_gradients(prepared_model(cfg), make_batch("cuda"))
    cpu_loss, cpu_grads = loss_and_gradients(make_model("cpu"), make_batch("cpu"))
    assert loss == pytest.approx(cpu_loss, rel=2e-3)
    for name, grad in cpu_grads.items():
        if grad.ndim >= 2:  # lambdas have gradients that are small sums of large terms
            # Errors of the layers above add up.
            assert relative_error(grads[name].cpu(), grad) < 3 * BF16_ERROR, name


@held_to_more
def test_the_fp8_head_is_near_the_bf16_head():
    fp8_model = prepared_model()
    if fp8_model.lm_head.fp8_scales is None:
        pytest.skip("this GPU has no FP8")
    loss, grads = loss_and_gradients(fp8_model, make_batch("cuda"))
    bf16_model = prepared_model(dataclasses.replace(SMALL, fp8_head=False))
    bf16_loss, bf16_grads = loss_and_gradients(bf16_model, make_batch("cuda"))
    assert loss == pytest.approx(bf16_loss, rel=5e-3)
    # The published scales are those of the record's width.
    x = torch.randn(256, 768, device="cuda").bfloat16()
    w = torch.randn(1024, 768, device="cuda") * 0.02
    scales = SMALL.fp8_x_scale, SMALL.fp8_w_scale, SMALL.fp8_grad_scale
    out = train_gpt.FP8Product.apply(x, w, *scales)
    assert relative_error(out, F.linear(x.float(), w)) < FP8_ERROR
    assert all(grads[name].isfinite().all() for name in bf16_grads)


@contextlib.contextmanager
def no_waiting():
    """Torch raises an error where the host would wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_planted_wait_is_found():
    x = torch.ones((), device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        x.item()


def test_steps_after_the_warm_up_neither_wait_nor_compile(monkeypatch):
    """All stages, validation between the steps, the loop's own calls in its own order."""
    monkeypatch.setattr(train_gpt.signal, "signal", lambda *args: None)
    model, ranks = prepared_model(), one_rank("cuda")
    optimizers = train_gpt.build_optimizers(model, SMALL, ranks)
    health = train_gpt.Health(ranks, ["loss", *(o.name for o in optimizers)])
    val_batch = make_batch("cuda", SMALL.val_seq_len, seed=1)

    def step(number, batch):
        loss = model(*batch, train_gpt.target_weights(number, SMALL, ranks.device))
        loss.backward()
        health.check(number, loss.detach(), [o.grads for o in optimizers])
        train_gpt.step_optimizers(optimizers, number, 1)

    def validate():
        with torch.no_grad():
            model.eval()(*val_batch)
        model.train()

    cfg = dataclasses.replace(SMALL, warmup_steps=2)  # Adam steps at the second
    stages = [train_gpt.stage(number, SMALL) for number in range(SMALL.num_iterations)]
    for stage in sorted(set(stages)):
        train_gpt.warm_up(model, optimizers, 1, stages.index(stage), cfg, ranks)
    with torch.compiler.set_stance("fail_on_recompile"):
        for number, stage in enumerate(stages):
            if number == stages.index(stage):
                model.set_window(number)  # it waits, four times in a run
            batch = make_batch("cuda", train_gpt.sequence_length(number, SMALL))
            with no_waiting():
                step(number, batch)
        model.set_window(SMALL.num_iterations)
        validate()
    health.read()
    assert math.isfinite(health.loss)


def test_a_step_of_the_optimizers_is_nearly_that_of_the_cpu():
    steps = {}
    for device in ("cpu", "cuda"):
        model = make_model(device)
        before = [p.detach().clone() for p in model.parameters()]
        optimizers = train_gpt.build_optimizers(model, SMALL, one_rank(device))
        generator = torch.Generator().manual_seed(1)
        # Adam takes both gradients at the second; the head is tied to the embedding, then not.
        for step in (0, 1, SMALL.num_iterations - 2, SMALL.num_iterations - 1):
            for optimizer in optimizers:
                noise = torch.randn(optimizer.grads.shape, generator=generator)
                optimizer.grads.copy_(noise)
            train_gpt.step_optimizers(optimizers, step, 1)
        steps[device] = [
            (p.detach() - x).cpu() for p, x in zip(model.parameters(), before, strict=True)
        ]
    for cuda, cpu in zip(steps["cuda"], steps["cpu"], strict=True):
        # Five iterations of Polar Express in bf16 against fp32.
        assert relative_error(cuda, cpu) < 2 * BF16_ERROR


@pytest.mark.skipif(ON_HOST, reason="would take hours")
def test_300_steps_of_the_pocket_learn_on_the_gpu(run_script, pocket_data, final_values):
    run = run_script(
        ["--preset", "pocket", "--device", "cuda", "--num_iterations", 300,
         "--train_files", pocket_data / "pocket_train_*.bin",
         "--val_files", pocket_data / "pocket_val_*.bin"],
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    target = train_gpt.PRESETS["pocket"]["target_loss"]
    assert float(final_values(run.stdout)["val_loss"]) < 1.05 * target
