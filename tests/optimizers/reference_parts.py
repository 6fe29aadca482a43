"""The pieces from which the updates of one matrix are made, in float64.

`state` is a dictionary of one matrix, empty before its first call; a piece that has a state keeps
it there under its own name.

A rule that all of these follow, since bases of matrices of less than full rank hang on the last
bit: an average moves by torch.lerp with the weight 1 − β, never by a written-out 0.1, and the
Gram matrices are `G @ G.T` and `G.T @ G`.
"""

import torch

# ---- Norms and shapes ----


def tall(matrix):
    """Whether it has more rows than columns."""
    return matrix.shape[0] > matrix.shape[1]


def aspect(matrix):
    """√max(1, rows/columns): 2 for mlp.fc, 1 for the others."""
    rows, columns = matrix.shape
    return max(1.0, rows / columns) ** 0.5


def inner(a, b):
    """The sum of the products of entries."""
    return (a * b).sum()


def schatten4(matrix, least=1e-10):
    """The Schatten-4 norm: the fourth root of the sum of the singular values' fourth powers."""
    gram = matrix.T @ matrix if tall(matrix) else matrix @ matrix.T
    return gram.norm().sqrt().clamp(min=least)


def cosine(a, b):
    """Of the angle between two matrices."""
    return inner(a, b) / (a.norm() * b.norm()).clamp(min=1e-8)


# ---- Adam ----


def adam_averages(state, gradient, beta1, beta2):
    """Move the means of the gradient and of its square; count the call."""
    zero = torch.zeros_like(gradient)
    state["calls"] = state.get("calls", 0) + 1
    state["mean"] = torch.lerp(state.get("mean", zero), gradient, 1 - beta1)
    state["square"] = beta2 * state.get("square", zero) + (1 - beta2) * gradient.square()
    return state["mean"], state["square"], state["calls"]


def adam_direction(state, gradient, beta1, beta2, epsilon):
    """m̂ / (√v̂ + ε), with bias corrections."""
    mean, square, calls = adam_averages(state, gradient, beta1, beta2)
    unbiased_mean = mean / (1 - beta1 ** calls)
    unbiased_square = square / (1 - beta2 ** calls)
    return unbiased_mean / (unbiased_square.sqrt() + epsilon)


def adam(state, weight, gradient, lr, beta1, beta2, epsilon, decay, corrected=True):
    """AdamW: decay first, then the step. Not corrected, the averages are taken as they are."""
    weight = weight * (1 - lr * decay)
    if corrected:
        return weight - lr * adam_direction(state, gradient, beta1, beta2, epsilon)
    mean, square, _ = adam_averages(state, gradient, beta1, beta2)
    return weight - lr * mean / (square.sqrt() + epsilon)


# ---- Momentum and polar factor ----


def momentum(state, gradient, mu):
    """Nesterov's: m ← m + (1 − μ)(g − m); returns g + μ(m − g)."""
    before = state.get("momentum", torch.zeros_like(gradient))
    state["momentum"] = torch.lerp(before, gradient, 1 - mu)
    return torch.lerp(gradient, state["momentum"], mu)


def newton_schulz(x):
    """Twelve steps towards singular values of 1. x: rows ≤ columns, singular values up to 1."""
    for _ in range(12):
        x = newton_schulz_step(x)
    return x


def newton_schulz_step(x, a=2.0, b=-1.5, c=0.5):
    """X ← aX + (bA + cA²)X, with A = XXᵀ."""
    gram = x @ x.T
    return a * x + (b * gram + c * gram @ gram) @ x


def polar(u):
    """Muon's direction O(u), without the aspect factor."""
    x = u.T if tall(u) else u
    x = newton_schulz(x / (x.norm() + 1e-7))
    return x.T if tall(u) else x


def polar_schatten(u):
    """O(u) with the Schatten-4 norm in place of Frobenius's, of result 20 and later."""
    x = u.T if tall(u) else u
    x = newton_schulz(x / schatten4(x, 1e-7))
    return x.T if tall(u) else x


def even_rows_polar(u, normed_polar, rounds, exponent):
    """Aurora: O(D·u) with D such that the rows of a tall matrix come out equally long."""
    x = u if tall(u) else u.T
    rows, columns = x.shape
    scales = 1 / x.norm(dim=1, keepdim=True).clamp(min=1e-7)
    for _ in range(rounds - 1):
        lengths = normed_polar(scales * x).square().sum(dim=1, keepdim=True).clamp(min=1e-14)
        scales = scales * ((columns / rows) / lengths) ** exponent
    found = normed_polar(scales * x)
    return found if tall(u) else found.T


# ---- Variance, floor, ball ----


def normuon_variance(state, u, beta=0.95):
    """The moving mean square of each row (of each column, where there are fewer rows)."""
    along = 1 if u.shape[0] >= u.shape[1] else 0
    now = u.square().mean(dim=along, keepdim=True)
    state["variance"] = torch.lerp(state.get("variance", torch.zeros_like(now)), now, 1 - beta)
    return state["variance"]


def normuon(state, u):
    """NorMuon-lite: rows of one size, at the Frobenius norm of before."""
    norm = u.norm()
    u = u / normuon_variance(state, u).clamp(min=1e-10).sqrt()
    return u * norm / u.norm().clamp(min=1e-10)


def normuon_schatten(state, u, beta=0.95):
    """NorMuon-lite at the Schatten-4 norm of before."""
    norm = schatten4(u)
    u = u / normuon_variance(state, u, beta).clamp(min=1e-10).sqrt()
    return u * norm / schatten4(u)


def floored(u, weight, target):
    """u, lengthened where its norm is less than `target` times the weight's."""
    weight_norm = weight.norm().clamp(min=1e-8)
    norm = u.norm().clamp(min=1e-8)
    if norm / weight_norm < target:
        return u * (target * weight_norm / norm)
    return u


def floored_rows(u, weight, target):
    """The same for each row by itself."""
    weight_norms = weight.norm(dim=1, keepdim=True).clamp(min=1e-8)
    norms = u.norm(dim=1, keepdim=True).clamp(min=1e-8)
    return u * (target * weight_norms / norms).clamp(min=1)


def hyperball_step(weight, direction, lr):
    """A step relative to the weight's norm, and back to that norm."""
    norm = weight.norm()
    moved = weight - lr * direction * norm / direction.norm().clamp(min=1e-10)
    return moved * norm / moved.norm().clamp(min=1e-10)


def decayed_step(weight, direction, lr, decay):
    """W ← (1 − lr·decay)W, and then W ← W − lr·D."""
    return weight * (1 - lr * decay) - lr * direction


# ---- Contra ----


def over_spectral_norm(u):
    """u over its greatest singular value, as five power iterations find it."""
    epsilon = 1e-10
    right = torch.ones(u.shape[1], dtype=u.dtype) / u.shape[1] ** 0.5
    for _ in range(5):
        left = u @ right
        left = left / left.norm().clamp(min=epsilon)
        right = u.T @ left
        right = right / right.norm().clamp(min=epsilon)
    return u / (u @ right).norm().clamp(min=epsilon)


def contra(direction, u):
    """Less a fifth of the normed momentum, at the direction's norm."""
    mixed = direction - 0.2 * over_spectral_norm(u)
    return mixed * direction.norm() / mixed.norm().clamp(min=1e-10)


# ---- SOAP ----


def descending_eigenvectors(matrix):
    """Columns by falling eigenvalue."""
    return torch.linalg.eigh(matrix)[1].flip(1).contiguous()


def orthonormal(matrix):
    """The Q factor of a reduced QR factorisation, signs as they come."""
    return torch.linalg.qr(matrix)[0].contiguous()


def schatten4_of_soap(matrix):
    """The Schatten-4 norm with SOAP's least value."""
    return schatten4(matrix, 1e-8)


def soap_direction(state, u, floor=0.0, blend=1.0, norm=schatten4_of_soap, old_epsilon=False):
    """Adam's denominator in the bases of the gradients' Gram matrices, at the norm of u.

    Without bases yet, u as it is. old_epsilon: √V + 1e-8 as result 14 has it.
    """
    if "left_basis" not in state:
        return u
    left, right = state["left_basis"], state["right_basis"]
    turned = left.T @ u @ right
    state["second"] = torch.lerp(state["second"], turned.square(), 1 - 0.9)

    if old_epsilon:
        denominator = state["second"].sqrt() + 1e-8
    else:
        denominator = state["second"].clamp(min=1e-16).sqrt()
    if floor > 0:
        least = (floor * denominator.square().mean().sqrt()).clamp(min=1e-8)
        denominator = torch.maximum(denominator, least)

    found = left @ (turned / denominator) @ right.T
    if blend != 1:
        found = blend * found + (1 - blend) * u
    return found * norm(u) / norm(found).clamp(min=1e-8)


def soap_statistics(state, gradient, step, every):
    """After the step of its matrix: move the Gram matrices, and refresh the bases now and then.

    The first call takes eigenvectors; later ones refresh where the step is a multiple of `every`.
    """
    rows, columns = gradient.shape
    if "left" not in state:
        state["left"] = torch.zeros(rows, rows, dtype=gradient.dtype)
        state["right"] = torch.zeros(columns, columns, dtype=gradient.dtype)
        state["second"] = torch.zeros_like(gradient)
    state["left"] = torch.lerp(state["left"], gradient @ gradient.T, 1 - 0.9)
    state["right"] = torch.lerp(state["right"], gradient.T @ gradient, 1 - 0.9)

    if "left_basis" not in state:
        tiny_left = 1e-30 * torch.eye(rows, dtype=gradient.dtype)
        tiny_right = 1e-30 * torch.eye(columns, dtype=gradient.dtype)
        state["left_basis"] = descending_eigenvectors(state["left"] + tiny_left)
        state["right_basis"] = descending_eigenvectors(state["right"] + tiny_right)
    elif step % every == 0:
        order, state["left_basis"] = _refreshed(state["left"], state["left_basis"])
        state["second"] = state["second"][order]
        order, state["right_basis"] = _refreshed(state["right"], state["right_basis"])
        state["second"] = state["second"][:, order]


def _refreshed(gram, basis):
    """The order of the old columns by their share, and the new basis: one step of QR iteration."""
    shares = (basis.T @ gram @ basis).diagonal()
    order = shares.argsort(descending=True)
    return order, orthonormal(gram @ basis[:, order])


def blended(u, found, share):
    """u moved towards what SOAP found, at the Schatten-4 norm of u."""
    mixed = u + (found - u) * share
    return mixed * schatten4(u, 1e-8) / schatten4(mixed, 1e-8)


def trust(u, found, gradient, bounds):
    """How much of SOAP's direction is taken: less where it turns away from momentum or gradient."""
    agreement = ((cosine(found, u) - 0.2) / 0.8).clamp(0, 1)
    kept = (cosine(found, gradient) / cosine(u, gradient).clamp(min=1e-8)).clamp(0, 1)
    least, most = bounds
    return (agreement * kept).clamp(0, 1).clamp(min=least).clamp(max=most)


# ---- The line's last pieces ----


def brake(u, weight):
    """Half of what makes the weight longer is taken away."""
    share = inner(u, weight) / inner(weight, weight).clamp(min=1e-12)
    radial = share * weight
    return (u - radial) + (0.5 if share < 0 else 1.0) * radial


def step_and_radius(weight, u, lr):
    """The step, and then the norm that the radial part alone would give."""
    norm = weight.norm().clamp(min=1e-8)
    radius = (norm - lr * inner(u, weight) / norm).clamp(min=1e-8)
    moved = weight - lr * u
    return moved * radius / moved.norm().clamp(min=1e-8)
