"""The GPU path executed without a GPU: losses, gradients, steps and whole runs against the CPU's.

Each kernel that torch.compile makes for the card is run by Triton's interpreter (host_gpu/), on a
model of two layers. All run in one session of their own, beside the others; a real GPU rounds other
than the host does and has test_gpu.py.
"""

import copy
import dataclasses
import types

import pytest
import torch

import train_gpt

pytestmark = pytest.mark.gpu

TINY = dataclasses.replace(
    train_gpt.Hyperparameters(),
    vocab_size=257, eot_token=256, vocab_multiple=16, model_dim=32, head_dim=16,
    attention_pattern="LS", value_embed_pattern="0.", train_seq_len=384, val_seq_len=384,
    sequences_per_step=1, num_iterations=10, head_chunks=1, fp8_head=False,
)  # fmt: skip
FP32_RTOL = 1e-5  # sums of fp32 in another order


@pytest.fixture(autouse=True)
def on_the_host():
    if not torch.cuda.get_device_name().startswith("host standing in for "):
        pytest.skip("its tolerances are the host's; test_gpu.py is for this GPU")


def relative_error(x, reference):
    x, reference = x.detach().cpu().double(), reference.detach().cpu().double()
    return ((x - reference).norm() / reference.norm()).item()


def one_rank(device):
    return types.SimpleNamespace(rank=0, world_size=1, device=torch.device(device))


def make_model(cfg):
    """On the CPU, in fp32, no weight zero, so that each has a gradient."""
    model, generator = train_gpt.GPT(cfg), torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("c_proj.weight", "lm_head.weight")):
                param.normal_(std=param.size(-1) ** -0.5, generator=generator)
            elif param.ndim < 2:
                param.uniform_(0.3, 1.2, generator=generator)
    return model


def on_the_gpu(model, cfg):
    """The same weights, prepared as the script does."""
    torch._dynamo.reset()
    twin = train_gpt.GPT(cfg).to("cuda")
    twin.load_state_dict(model.state_dict())
    train_gpt.prepare_for_cuda(twin, cfg, torch.device("cuda", 0))
    return twin


def in_fp32(model, cfg):
    """`on_the_gpu`, in fp32 throughout: what remains is the order of sums."""
    twin = on_the_gpu(model, cfg).float()
    twin.load_state_dict(model.state_dict())
    return twin


def make_batch(cfg, rows=1, seed=0):
    """Inputs and targets: each row has documents that begin within blocks, and no last targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(cfg.eot_token, (rows, cfg.train_seq_len + 1), generator=generator)
    tokens[:, 300] = tokens[:, 340] = cfg.eot_token
    targets = tokens[:, 1:].clone()
    targets[:, -3:] = -1
    return tokens[:, :-1].int(), targets


def loss_and_gradients(model, batch, window):
    device = model.window.device
    model.window.fill_(window)
    model.zero_grad()
    loss = model(*(x.to(device) for x in batch)) / batch[1].numel()
    loss.backward()
    names = (name.removeprefix("_orig_mod.") for name, _ in model.named_parameters())
    return loss.item(), {n: p.grad.cpu().clone() for n, p in zip(names, model.parameters())}


def assert_same_step(gpu, cpu, batch, window):
    loss, grads = loss_and_gradients(gpu, batch, window)
    cpu_loss, cpu_grads = loss_and_gradients(cpu, batch, window)
    assert loss == pytest.approx(cpu_loss, rel=FP32_RTOL)
    errors = {name: relative_error(grads[name], grad) for name, grad in cpu_grads.items()}
    print(errors)
    assert max(errors.values()) < FP32_RTOL, errors


def test_a_step_in_fp32_is_that_of_the_cpu():
    import time
    t=time.time()
    cpu = make_model(TINY)
    gpu = in_fp32(cpu, TINY)
    assert_same_step(gpu, cpu, make_batch(TINY), window=2)
    print("step", time.time()-t, time.process_time())
    weights = {}
    for model in (gpu, cpu):
        device = next(model.parameters()).device
        optimizers = train_gpt.build_optimizers(model, TINY, one_rank(device))
        for optimizer in optimizers:
            if isinstance(optimizer, train_gpt.Muon):
                optimizer.dtype = torch.float32
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for optimizer in optimizers:
                optimizer.grads.copy_(torch.randn(optimizer.grads.shape, generator=generator))
            train_gpt.step_optimizers(optimizers, step, 2)
        weights[device.type]={n.replace("_orig_mod.", ""):p.detach().cpu() for n, p in model.named_parameters()}
    print({n: relative_error(weights["cuda"][n], w) for n, w in weights["cpu"].items()})
    print("optim", time.time()-t, time.process_time())
    from host_gpu import interpreter
    print(sum(interpreter.launches.values()), len(interpreter.launches), sum(interpreter.seconds.values()), interpreter.seconds.most_common(10))
    assert 0
