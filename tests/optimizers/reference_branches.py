"""The update of one matrix of the results beside the record's line: 15, 18, 19, 21 … 35.

    update(state, weight, gradient, hyper, step) -> the new weight

Besides kind, lr, decay and mu, `hyper` has here: `tokens` of a step, `inputs` of the matrix in this
step as (tokens, columns), and `draw(what, shape)` for standard normal draws.
`calls` of a state counts the calls so far; a matrix without gradient is a call, too.
"""

import torch
from reference_parts import (
    adam_averages,
    aspect,
    decayed_step,
    descending_eigenvectors,
    hyperball_step,
    momentum,
    newton_schulz_step,
    orthonormal,
    polar,
    tall,
)
from reference_schedules import dynamic_power, virtual_share


def eye(size):
    """The identity, in float64."""
    return torch.eye(size, dtype=torch.float64)


def symmetric(matrix):
    """The symmetric part."""
    return 0.5 * (matrix + matrix.T)


def count(state):
    """Which call this is, from 1."""
    state["calls"] = state.get("calls", 0) + 1
    return state["calls"]


def descending(gram, epsilon):
    """Eigenvectors of a Gram matrix, columns by falling eigenvalue."""
    return descending_eigenvectors(symmetric(gram) + epsilon * eye(len(gram)))


# ---- 15: Newton-Muon ----


def newton_muon(state, weight, gradient, hyper, step):
    """The gradient times the damped inverse of its inputs' second moments, then Muon.

    mlp.proj has four blocks of inputs, each with an inverse of its own.
    """
    width = min(weight.shape)
    starts = range(0, weight.shape[1], width)
    if "moments" not in state:
        state["moments"] = [0.001 * eye(width) for _ in starts]
    if (step + 1) % 64 == 0:
        state["inverses"] = []
        for block, start in enumerate(starts):
            inputs = hyper.inputs[:, start:start + width]
            now = inputs.T @ inputs / hyper.tokens
            moments = torch.lerp(state["moments"][block], now, 0.05)
            state["moments"][block] = moments
            damping = 0.2 * moments.trace() / width + 1e-8
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments + damping * eye(width)))
            state["inverses"].append(inverse)
    if "inverses" in state:
        pieces = [gradient[:, start:start + width] @ inverse
                  for start, inverse in zip(starts, state["inverses"])]
        gradient = torch.cat(pieces, dim=1)
    u = momentum(state, gradient, hyper.mu)
    return decayed_step(weight, aspect(u) * polar(u), hyper.lr, hyper.decay)


# ---- 18: PMuon ----


def whitened_muon(state, weight, gradient, hyper, step):
    """The momentum, whitened on both sides by powers of its own Gram matrices, then Muon.

    The Gram matrices are those of Nesterov's momentum, not of the gradient.
    """
    u = momentum(state, gradient, hyper.mu)
    right = _whitener(state, "right", u.T @ u, hyper)
    left = _whitener(state, "left", u @ u.T, hyper)
    direction = aspect(u) * polar(left @ u @ right)
    return decayed_step(weight, direction, hyper.lr, hyper.decay)


def _whitener(state, side, gram, hyper):
    size = len(gram)
    state[side] = 0.95 * state.get(side, torch.zeros_like(gram)) + gram
    current = gram + 0.95 * state[side] + 1e-6 * eye(size)
    basis = state.get(f"{side}_basis")
    if basis is None:
        basis = orthonormal(hyper.draw(side, (size, size)))
    basis = orthonormal(current @ basis)
    state[f"{side}_basis"] = basis
    powers = (basis.T @ current @ basis).diagonal().clamp(min=1e-6) ** -0.3
    return basis @ powers.diag() @ basis.T * (size ** 0.5 / (powers.norm() + 1e-6))


# ---- 19, 25: KL-SOAP-H ----


def kl_soap(state, weight, gradient, hyper, step):
    """Adam in the bases of factors that whiten each other, on a ball. The first call moves nothing.

    The mean is carried over to the new bases; the mean square and the roots are not.
    """
    rows, columns = weight.shape
    if "left" not in state:
        state["left"] = gradient @ gradient.T / columns
        state["right"] = gradient.T @ gradient / rows
        state["left_basis"] = descending(state["left"], 1e-30)
        state["right_basis"] = descending(state["right"], 1e-30)
        state["left_roots"] = torch.full((rows,), 0.1 ** -0.5, dtype=torch.float64)
        state["right_roots"] = torch.full((columns,), 0.1 ** -0.5, dtype=torch.float64)
        state["mean"] = torch.zeros_like(weight)
        state["square"] = torch.zeros_like(weight)
        return weight

    left, right = state["left_basis"], state["right_basis"]
    turned = left.T @ gradient @ right
    state["mean"] = torch.lerp(state["mean"], turned, 1 - 0.95)
    state["square"] = torch.lerp(state["square"], turned.square(), 1 - 0.9)
    direction = left @ (state["mean"] / (state["square"].sqrt() + 1e-8)) @ right.T

    left_roots, right_roots = state["left_roots"], state["right_roots"]  # 1/√eigenvalue
    by_right = gradient @ right * right_roots
    by_left = gradient.T @ left * left_roots
    left_now = by_right @ by_right.T / columns
    right_now = by_left @ by_left.T / rows
    state["left"] = symmetric(torch.lerp(state["left"], left_now, 1 - 0.9))
    state["right"] = symmetric(torch.lerp(state["right"], right_now, 1 - 0.9))
    left_sizes = (turned * right_roots).square().mean(dim=1)
    right_sizes = (turned * left_roots[:, None]).square().mean(dim=0)
    state["left_roots"] = _moved_roots(left_roots, left_sizes)
    state["right_roots"] = _moved_roots(right_roots, right_sizes)

    mean = left @ state["mean"] @ right.T
    state["left_basis"] = orthonormal(state["left"] @ left)
    state["right_basis"] = orthonormal(state["right"] @ right)
    state["mean"] = state["left_basis"].T @ mean @ state["right_basis"]
    return hyperball_step(weight, direction, hyper.lr)


def _moved_roots(roots, sizes):
    """Inverse roots after their eigenvalues moved to `sizes` by a tenth; at most 4,000."""
    before = 1 / roots.square()
    before = torch.where(before.isfinite(), before, 0.0)
    after = torch.lerp(before, sizes, 1 - 0.9)
    found = (after.clamp(min=1e-30) ** -0.5).clamp(max=4000.0)
    return torch.where(found.isfinite(), found, 0.0)


# ---- 21, 35: Shampoo ----


def shampoo(state, weight, gradient, hyper, step):
    """Result 21: refreshed every 5 calls, inverse fourth roots with a small ε."""
    return _shampoo(state, weight, gradient, hyper, beta2=0.95, every=5, grafting=1e-10,
                    root=_inverse_root)


def shampoo_pseudo(state, weight, gradient, hyper, step):
    """Result 35: refreshed each call, pseudo-inverse roots; both sides, whatever its list says."""
    return _shampoo(state, weight, gradient, hyper, beta2=0.9, every=1, grafting=1e-15,
                    root=_pseudo_inverse_root)


def _shampoo(state, weight, gradient, hyper, beta2, every, grafting, root):
    rows, columns = weight.shape
    mean, square, calls = adam_averages(state, gradient, 0.9, beta2)
    left = state.get("left", torch.zeros(rows, rows, dtype=torch.float64))
    right = state.get("right", torch.zeros(columns, columns, dtype=torch.float64))
    state["left"] = torch.lerp(left, gradient @ gradient.T, 1 - beta2)
    state["right"] = torch.lerp(right, gradient.T @ gradient, 1 - beta2)
    unbiased = 1 - beta2 ** calls
    if calls % every == 0:
        state["left_root"] = root(state["left"] / unbiased)
        state["right_root"] = root(state["right"] / unbiased)

    mean = mean / (1 - 0.9 ** calls)
    direction = mean / ((square / unbiased).sqrt() + grafting)
    if calls >= every:
        left_root = state.get("left_root", eye(rows))
        right_root = state.get("right_root", eye(columns))
        found = left_root @ mean @ right_root
        direction = found * direction.norm() / (found.norm() + 1e-16)
    return weight - hyper.lr * (direction + hyper.decay * weight)


def _inverse_root(gram):
    epsilon = 1e-12
    values, vectors = torch.linalg.eigh(gram + epsilon * eye(len(gram)))
    if values[0] < epsilon:
        values = values - values[0] + epsilon
    return vectors @ (values ** -0.25).diag() @ vectors.T


def _pseudo_inverse_root(gram):
    values, vectors = torch.linalg.eigh(gram)
    powers = torch.where(values > 0, values.abs() ** -0.25, 0.0)
    return vectors @ powers.diag() @ vectors.T


# ---- 23: Muown ----

MUOWN_STEPS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    *[(1.8750, -1.2500, 0.3750)] * 5,
)


def muown(state, weight, gradient, hyper, step):
    """Each row is a radius, moved by Adam, times a direction, moved by Muon.

    Directions are kept at a virtual length that grows by a schedule, so that they turn less and
    less.
    """
    target = 2.496 * 3.33333333333 if hyper.kind == "mlp.proj" else 2.496
    if "radius" not in state:
        lengths = weight.norm(dim=1, keepdim=True)
        lengths = torch.where(lengths <= 1e-12, 0.33 ** 0.5, lengths)
        state["radius"] = state["first_virtual"] = lengths
    radius, first = state["radius"], state["first_virtual"]
    virtual = torch.lerp(first, torch.full_like(first, target), virtual_share(step))

    unit = weight / radius
    directions = unit * virtual
    radial = (gradient * unit).sum(dim=1, keepdim=True)
    tangential = radius / virtual * (gradient - unit * radial)
    before = state.get("momentum", torch.zeros_like(weight))
    state["momentum"] = 0.95 * before + tangential
    u = tangential + 0.95 * state["momentum"]
    scale = 0.2 * max(weight.shape) ** 0.5
    moved = directions - hyper.lr * scale * muown_polar(u)

    mean, square, calls = adam_averages(state, radial, 0.9, 0.95)
    unbiased_square = square / (1 - 0.95 ** calls)
    radius = radius - hyper.lr * (mean / (1 - 0.9 ** calls)) / (unbiased_square.sqrt() + 1e-8)
    state["radius"] = radius
    return radius * moved / moved.norm(dim=1, keepdim=True).clamp(min=1e-12)


def muown_polar(u):
    """The polar factor by the Polar Express's coefficients, without a safety factor."""
    x = u.T if tall(u) else u
    x = x / (x.norm() + 1e-7)
    for a, b, c in MUOWN_STEPS:
        x = newton_schulz_step(x, a, b, c)
    return x.T if tall(u) else x


# ---- 26: SinkSOAP ----


def sink_soap(state, weight, gradient, hyper, step):
    """Momentum in the Gram matrices' eigenbases, its energies balanced by ten Sinkhorn steps."""
    rows, columns = weight.shape
    u = momentum(state, gradient, hyper.mu)
    left = state.get("left", torch.zeros(rows, rows, dtype=torch.float64))
    right = state.get("right", torch.zeros(columns, columns, dtype=torch.float64))
    state["left"] = torch.lerp(left, gradient @ gradient.T, 1 - 0.95)
    state["right"] = torch.lerp(right, gradient.T @ gradient, 1 - 0.95)
    left_basis = descending(state["left"], 1e-8)
    right_basis = descending(state["right"], 1e-8)

    turned = left_basis.T @ u @ right_basis
    balanced = balance(turned)
    direction = left_basis @ balanced @ right_basis.T
    norm = min(rows, columns) ** 0.5 * max(1.0, rows / columns) ** 0.5
    direction = direction * norm / direction.norm().clamp(min=1e-8)
    if rows != columns:
        direction = _even(state, direction)
    return decayed_step(weight, direction, hyper.lr, hyper.decay)


def balance(matrix):
    """Scale rows and columns until each row, and each column, has about the same energy."""
    rows, columns = matrix.shape
    energy = matrix.square() + 1e-8
    by_row = torch.ones(rows, dtype=matrix.dtype)
    by_column = torch.ones(columns, dtype=matrix.dtype)
    for _ in range(10):
        by_row = (1 / rows) / (energy @ by_column + 1e-8)
        by_column = (1 / columns) / (energy.T @ by_row + 1e-8)
    return by_row.sqrt()[:, None] * matrix * by_column.sqrt()


def _even(state, direction):
    """NorMuon-lite, with the clamps of this result."""
    along = 1 if tall(direction) else 0
    norm = direction.norm().clamp(min=1e-10)
    now = direction.square().mean(dim=along, keepdim=True)
    state["variance"] = torch.lerp(state.get("variance", torch.zeros_like(now)), now, 1 - 0.95)
    direction = direction / state["variance"].sqrt().clamp(min=1e-10)
    return direction * norm / direction.norm().clamp(min=1e-10)


# ---- 27: SOAP-H ----


def soap_hyperball(state, weight, gradient, hyper, step):
    """SOAP on a ball: the momentum stays unturned, and so does the mean square."""
    if "left" not in state:
        state["left_basis"] = descending(gradient @ gradient.T, 1e-30)
        state["right_basis"] = descending(gradient.T @ gradient, 1e-30)
        state["left"] = torch.zeros_like(state["left_basis"])
        state["right"] = torch.zeros_like(state["right_basis"])
        state["mean"] = torch.zeros_like(weight)
        state["square"] = torch.zeros_like(weight)
    left, right = state["left_basis"], state["right_basis"]
    state["mean"] = torch.lerp(state["mean"], gradient, 1 - 0.95)
    state["left"] = torch.lerp(state["left"], gradient @ gradient.T, 1 - 0.9)
    state["right"] = torch.lerp(state["right"], gradient.T @ gradient, 1 - 0.9)
    turned = left.T @ gradient @ right
    state["square"] = torch.lerp(state["square"], turned.square(), 1 - 0.9)
    direction = (left.T @ state["mean"] @ right) / (state["square"].sqrt() + 1e-8)
    direction = left @ direction @ right.T
    state["left_basis"] = orthonormal(state["left"] @ left)
    state["right_basis"] = orthonormal(state["right"] @ right)
    return hyperball_step(weight, direction, hyper.lr)


# ---- 28: DynMuon ----


def dynamic_muon(state, weight, gradient, hyper, step):
    """Muon whose singular values get a power that falls from above to below zero.

    Of the mean gradient, with an undamped momentum.
    """
    mean = gradient / hyper.tokens
    state["momentum"] = 0.95 * state.get("momentum", torch.zeros_like(mean)) + mean
    u = mean + 0.95 * state["momentum"]
    power = dynamic_power(step, 3200)

    x = u.T if tall(u) else u
    size = x.norm() + 1e-7
    unit = x / size
    direction = polar(unit)
    if abs(power) >= 1e-12:
        half = power / 2
        excess = unit @ unit.T - eye(len(unit))
        factor = eye(len(unit)) + half * excess + 0.5 * half * (half - 1) * excess @ excess
        direction = factor @ direction * size ** power
    direction = direction.T if tall(u) else direction
    return decayed_step(weight, aspect(u) * direction, hyper.lr, hyper.decay)


# ---- 33: PSGD ----


def psgd(state, weight, gradient, hyper, step):
    """Both sides by triangular factors, fitted to the momentum with a random probe; on a ball.

    The gradient is that of the mean loss.
    """
    rows, columns = weight.shape
    if "left" not in state:
        size = (gradient ** 4).mean().clamp(min=1e-24) ** (-1 / 32)
        state["left"] = size * eye(rows)
        state["right"] = size * eye(columns)
    calls = count(state)
    before = state.get("mean", torch.zeros_like(weight))
    state["mean"] = torch.lerp(before, gradient, 1 - 0.95)
    mean = state["mean"] / (1 - 0.95 ** calls)
    probe = hyper.draw("probe", (rows, columns))
    noise = hyper.draw("noise", (rows, columns))
    noisy = mean + 2.0 ** -23 * mean.abs() * noise

    ratio = (state["right"].abs().max() / state["left"].abs().max()).sqrt()
    left = ratio * state["left"]
    right = state["right"] / ratio
    a = left @ noisy @ right.T
    b = torch.linalg.solve_triangular(left.T, probe, upper=False)
    b = torch.linalg.solve_triangular(right, b, upper=True, left=False)
    left_size = psgd_norm(a @ a.T + b @ b.T)
    right_size = psgd_norm(a.T @ a + b.T @ b)
    state["left"] = left - (a @ a.T - b @ b.T).triu() @ left / left_size
    state["right"] = right - (a.T @ a - b.T @ b).triu() @ right / right_size

    left_factor = state["left"].T @ state["left"]
    right_factor = state["right"].T @ state["right"]
    direction = left_factor @ mean @ right_factor
    norm = weight.norm()
    moved = weight - hyper.lr * direction * norm / (direction.norm() + 1e-10)
    return moved / (moved.norm() + 1e-10) * norm


def psgd_norm(matrix):
    """About the spectral norm of a symmetric matrix, from below: one power iteration."""
    size = matrix.abs().max()
    matrix = matrix / size
    x = matrix[:, matrix.square().sum(dim=0).argmax()]
    x = matrix @ x
    return size * (matrix @ (x / x.norm())).norm()
