"""The model of the optimizer benchmark in float64: a function of a dictionary of weights.

The names of the weights, of block 0 in place of each, with their shapes at the published size:

    embed                    50304 × 768
    norm1, norm2             768            gains after the embedding, and before the head
    blocks.0.norm1, .norm2   768            gains before the attention, and before the MLP
    blocks.0.attn.q.weight   768 × 768      also attn.k, attn.v, attn.proj, each with its bias
    blocks.0.mlp.fc.weight   3072 × 768     and its bias
    blocks.0.mlp.proj.weight 768 × 3072     and its bias
    head.weight              50304 × 768    and head.bias

Sizes are those of the weights; only the head dimension has to be given.
"""

import torch

EPSILON = 2.0 ** -52  # of a root mean square: the machine epsilon of float64
ATTENTION_SCALE = 0.12
SOFT_CAP = 15.0
ROTARY_BASE = 1024.0

MATRIX_KINDS = ("attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc", "mlp.proj")


# ---- Names ----


def count_layers(weights):
    """The number of blocks."""
    return 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))


def shapes(layers, width, vocabulary, hidden=None):
    """Name → shape, in the order in which the benchmark's model registers its parameters."""
    hidden = 4 * width if hidden is None else hidden
    found = {"embed": (vocabulary, width), "norm1": (width,)}
    for layer in range(layers):
        block = f"blocks.{layer}"
        for kind in MATRIX_KINDS:
            rows = hidden if kind == "mlp.fc" else width
            columns = hidden if kind == "mlp.proj" else width
            found[f"{block}.{kind}.weight"] = (rows, columns)
            found[f"{block}.{kind}.bias"] = (rows,)
        found[f"{block}.norm1"] = (width,)
        found[f"{block}.norm2"] = (width,)
    found["norm2"] = (width,)
    found["head.weight"] = (vocabulary, width)
    found["head.bias"] = (vocabulary,)
    return found


def matrix_kind(name):
    """`attn.q` of `blocks.3.attn.q.weight`; None of what is not a hidden matrix."""
    if name.startswith("blocks.") and name.endswith(".weight"):
        return name.split(".", 2)[2].removesuffix(".weight")
    return None


def group(name):
    """The group of a parameter: a kind of matrix, `embed`, `head`, or one of three of vectors.

    The three are `gains`, `proj_biases` (those of attn.proj) and `biases` (all others).
    """
    if name == "embed":
        return "embed"
    if name == "head.weight":
        return "head"
    if name.endswith(".attn.proj.bias"):
        return "proj_biases"
    if name.endswith(".bias"):
        return "biases"
    return matrix_kind(name) or "gains"


# ---- Forward ----


def rms_norm(x):
    """x over its root mean square, along the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def rotate(x, base=ROTARY_BASE):
    """Rotate queries or keys by their position; half of the frequencies are zero.

    x: (rows, length, heads, head_dim).
    """
    length, head_dim = x.shape[1], x.shape[3]
    quarter = head_dim // 4
    turning = (1 / base) ** torch.linspace(0, 1, quarter, dtype=x.dtype)
    frequencies = torch.cat([turning, torch.zeros(quarter, dtype=x.dtype)])
    angles = torch.outer(torch.arange(length, dtype=x.dtype), frequencies)
    cosine = angles.cos()[:, None, :]
    sine = angles.sin()[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine + second * sine, second * cosine - first * sine], dim=-1)


def logits(weights, inputs, head_dim, seen=None, rotary_base=ROTARY_BASE):
    """Capped logits of each token.

    inputs: (rows, length) token ids. Each row is causal by itself, across documents.
    seen: a dictionary that takes the input of each hidden matrix, (rows, length, columns).
    Returns (rows, length, vocabulary).
    """
    def linear(name, x):
        if seen is not None:
            seen[f"{name}.weight"] = x.detach()
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    rows, length = inputs.shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = rms_norm(weights["embed"][inputs]) * weights["norm1"]
    width = x.shape[-1]
    heads = width // head_dim

    for layer in range(count_layers(weights)):
        block = f"blocks.{layer}"
        normed = rms_norm(x) * weights[f"{block}.norm1"]
        q = linear(f"{block}.attn.q", normed).view(rows, length, heads, head_dim)
        k = linear(f"{block}.attn.k", normed).view(rows, length, heads, head_dim)
        v = linear(f"{block}.attn.v", normed).view(rows, length, heads, head_dim)
        q = rotate(rms_norm(q), rotary_base)
        k = rotate(rms_norm(k), rotary_base)
        scores = ATTENTION_SCALE * torch.einsum("rihd,rjhd->rhij", q, k)
        shares = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("rhij,rjhd->rihd", shares, v).reshape(rows, length, width)
        x = x + linear(f"{block}.attn.proj", mixed)

        normed = rms_norm(x) * weights[f"{block}.norm2"]
        activated = linear(f"{block}.mlp.fc", normed).relu().square()
        x = x + linear(f"{block}.mlp.proj", activated)

    z = linear("head", rms_norm(x) * weights["norm2"])
    return SOFT_CAP * z / (z.square() + SOFT_CAP ** 2).sqrt()


def loss(weights, inputs, targets, head_dim, seen=None, rotary_base=ROTARY_BASE):
    """The SUM of the cross entropy over all tokens, in nats. targets: (rows, length)."""
    chances = logits(weights, inputs, head_dim, seen, rotary_base).log_softmax(dim=-1)
    return -chances.gather(-1, targets[..., None]).sum()


def gradients(weights, inputs, targets, head_dim, seen=None, rotary_base=ROTARY_BASE):
    """The loss, and the gradient of each weight, by name."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    total = loss(leaves, inputs, targets, head_dim, seen, rotary_base)
    found = torch.autograd.grad(total, list(leaves.values()))
    return total.item(), dict(zip(leaves, found))


def rows_of(tokens, length):
    """Inputs and targets of consecutive tokens, one more than the inputs: each (rows, length)."""
    return tokens[:-1].view(-1, length), tokens[1:].view(-1, length)
