"""One function for each result of the record's line and of Muon's: the update of one matrix.

    update(state, weight, gradient, hyper, step) -> the new weight

`hyper` has what the result's table says of this matrix and step: kind (`attn.q` …), lr, decay, mu.
Result 41 updates values and projection of an attention together, by `update_pair`.
"""

import torch
from reference_parts import (
    adam,
    adam_direction,
    aspect,
    blended,
    brake,
    contra,
    decayed_step,
    even_rows_polar,
    floored,
    floored_rows,
    hyperball_step,
    inner,
    momentum,
    newton_schulz_step,
    normuon,
    normuon_schatten,
    normuon_variance,
    polar,
    polar_schatten,
    schatten4,
    soap_direction,
    soap_statistics,
    step_and_radius,
    tall,
    trust,
)
from reference_schedules import contra_share, gate_bounds, soft_share

MLP = ("mlp.fc", "mlp.proj")

# ---- Muon and what is one idea away from it ----


def adamw(state, weight, gradient, hyper, step):
    """Result 2."""
    return adam(state, weight, gradient, hyper.lr, 0.9, 0.95, 1e-10, hyper.decay)


def adam_hyperball(state, weight, gradient, hyper, step):
    """Result 4: Adam's direction, on a ball."""
    direction = adam_direction(state, gradient, 0.9, 0.95, 1e-8)
    return hyperball_step(weight, direction, hyper.lr)


def muon(state, weight, gradient, hyper, step):
    """Results 1, 3, 6, 12, 36; with hyper.mu = 0 result 22; within a look-ahead result 39."""
    u = momentum(state, gradient, hyper.mu)
    return decayed_step(weight, aspect(u) * polar(u), hyper.lr, hyper.decay)


def muon_hyperball(state, weight, gradient, hyper, step):
    """Results 5 and 37."""
    u = momentum(state, gradient, hyper.mu)
    return hyperball_step(weight, aspect(u) * polar(u), hyper.lr)


def muon_squared(state, weight, gradient, hyper, step):
    """Result 7: the momentum over the root of the mean square of the raw gradient."""
    u = momentum(state, gradient, hyper.mu)
    before = state.get("square", torch.zeros_like(gradient))
    state["square"] = torch.lerp(before, gradient.square(), 1 - 0.95)
    u = u / (state["square"].sqrt() + 1e-10)
    return decayed_step(weight, aspect(u) * polar(u), hyper.lr, hyper.decay)


def normuon_hyperball(state, weight, gradient, hyper, step):
    """Results 8 and 13: NorMuon without its renorm, as the ball does that."""
    u = momentum(state, gradient, hyper.mu)
    direction = aspect(u) * polar(u)
    direction = direction / normuon_variance(state, direction).clamp(min=1e-10).sqrt()
    return hyperball_step(weight, direction, hyper.lr)


def normuon_decayed(state, weight, gradient, hyper, step):
    """Result 10."""
    u = momentum(state, gradient, hyper.mu)
    direction = normuon(state, aspect(u) * polar(u))
    return decayed_step(weight, direction, hyper.lr, hyper.decay)


def normuon_floored(state, weight, gradient, hyper, step):
    """Result 9: NorMuon with the u/w floor in place of decay."""
    u = momentum(state, gradient, hyper.mu)
    direction = floored(normuon(state, aspect(u) * polar(u)), weight, 0.35)
    return weight - hyper.lr * direction


def contra_muon(state, weight, gradient, hyper, step):
    """Results 11 and 24."""
    u = momentum(state, gradient, hyper.mu)
    return weight - hyper.lr * _contra_direction(state, weight, u)


def _contra_direction(state, weight, u):
    """Newton–Schulz, contra, aspect, NorMuon-lite, floor."""
    direction = contra(polar(u), u)
    return floored(normuon(state, aspect(u) * direction), weight, 0.35)


def aurora(state, weight, gradient, hyper, step):
    """Result 17: rows of one length by Aurora, and no NorMuon-lite."""
    u = momentum(state, gradient, hyper.mu)
    rows, columns = u.shape
    direction = polar(u) if rows == columns else even_rows_polar(u, polar, 2, 0.5)
    direction = floored(aspect(u) * contra(direction, u), weight, 0.35)
    return weight - hyper.lr * direction


# ---- SOAP within the line ----


def soap_mlp(state, weight, gradient, hyper, step):
    """Result 14: SOAP on the MLPs, refreshed every ten steps."""
    u = momentum(state, gradient, hyper.mu)
    if hyper.kind in MLP:
        u = soap_direction(state, u, norm=torch.Tensor.norm, old_epsilon=True)
    weight = weight - hyper.lr * _contra_direction(state, weight, u)
    if hyper.kind in MLP:
        soap_statistics(state, gradient, step, every=10)
    return weight


def soap_trusted(state, weight, gradient, hyper, step):
    """Result 16: on attn.proj too, with a floor under the denominator and a gate of trust."""
    u = momentum(state, gradient, hyper.mu)
    if hyper.kind in MLP:
        u = soap_direction(state, u, norm=torch.Tensor.norm)
    if hyper.kind == "attn.proj":
        found = soap_direction(state, u, floor=0.20, norm=torch.Tensor.norm)
        mixed = u + trust(u, found, gradient, gate_bounds(step)) * (found - u)
        u = mixed * u.norm().clamp(min=1e-8) / mixed.norm().clamp(min=1e-8)
    weight = weight - hyper.lr * _contra_direction(state, weight, u)
    if hyper.kind in (*MLP, "attn.proj"):
        soap_statistics(state, gradient, step, every=10)
    return weight


def soap_on_values(state, gradient, hyper):
    """Momentum, and SOAP on MLPs and values, of results 20 to 41."""
    u = momentum(state, gradient, hyper.mu)
    if hyper.kind in MLP:
        return soap_direction(state, u)
    if hyper.kind == "attn.v":
        return blended(u, soap_direction(state, u, floor=0.55, blend=0.95), 1.0)
    return u


def contra_schatten(u, found, share):
    """The polar factor with a (negative) share of the normed momentum, at its own norm."""
    norm = schatten4(found)
    mixed = found + share * u / schatten4(u)
    return mixed * norm / schatten4(mixed)


# Of X₀ … X₁₁, as the singular values pass through Newton–Schulz.
SOFT_WEIGHTS = (
    0.1091613623, 0.07085664498, 0.05210528973, 0.05457295795, 0.05011334061, 0.03334622198,
    0.05022104481, 0.1053727358, 0.1187323776, 0.1185061091, 0.1185059576, 0.1185059576,
)


def soft_polar(u):
    """Soft-Muon: a mean of the iterates of Newton–Schulz, so that singular values stay apart."""
    x = u.T if tall(u) else u
    x = x / schatten4(x, 1e-7)
    found = torch.zeros_like(x)
    for share in SOFT_WEIGHTS:
        found = found + share * x
        x = newton_schulz_step(x)
    return found.T if tall(u) else found


def soft_contra_direction(state, u, step):
    """Of results 20 and 29: contra that fades, then a soft share, then NorMuon-lite."""
    found = polar_schatten(u)
    norm = schatten4(found)
    mixed = contra_schatten(u, found, contra_share(step, end=2000))
    soft = soft_polar(u)
    soft = soft * norm / schatten4(soft)
    direction = mixed + soft_share(step) * (soft - mixed)
    direction = direction * norm / schatten4(direction)
    return normuon_schatten(state, aspect(u) * direction)


TARGET = 0.3825  # of the u/w floor from result 20 on


def soft_muon(state, weight, gradient, hyper, step):
    """Result 20."""
    u = soap_on_values(state, gradient, hyper)
    direction = floored(soft_contra_direction(state, u, step), weight, TARGET)
    weight = weight - hyper.lr * direction
    if hyper.kind in (*MLP, "attn.v"):
        soap_statistics(state, gradient, step, every=10)
    return weight


def radial_brake(state, weight, gradient, hyper, step):
    """Result 29: the brake before the floor, and the radius after the step."""
    u = soap_on_values(state, gradient, hyper)
    direction = floored(brake(soft_contra_direction(state, u, step), weight), weight, TARGET)
    weight = step_and_radius(weight, direction, hyper.lr)
    if hyper.kind in (*MLP, "attn.v"):
        soap_statistics(state, gradient, step, every=10)
    return weight


def _aurora_direction(state, gradient, hyper, step):
    """Of results 30 to 41, with the aspect factor, before the brake."""
    u = soap_on_values(state, gradient, hyper)
    if hyper.kind == "mlp.proj":
        found = even_rows_polar(u, polar_schatten, 3, 0.25)
    else:
        found = polar_schatten(u)
    return aspect(u) * contra_schatten(u, found, contra_share(step, end=2500))


def _aurora_finish(state, weight, direction, gradient, hyper, step):
    direction = floored(brake(direction, weight), weight, TARGET)
    weight = step_and_radius(weight, direction, hyper.lr)
    if hyper.kind in (*MLP, "attn.v"):
        soap_statistics(state, gradient, step, every=10)
    return weight


def aurora_proj(state, weight, gradient, hyper, step):
    """Results 30 and 40: Aurora on mlp.proj; no NorMuon-lite, no soft share."""
    direction = _aurora_direction(state, gradient, hyper, step)
    return _aurora_finish(state, weight, direction, gradient, hyper, step)


def circuit_pair(states, weights, gradients, hypers, step):
    """Result 41, of attn.v and attn.proj of one block, in this order; the rest as result 40."""
    return circuit_steps(circuit, states, weights, gradients, hypers, step)


def circuit_steps(couple, states, weights, gradients, hypers, step):
    """Both directions, then what `couple` makes of them, then both steps."""
    directions = [_aurora_direction(state, gradient, hyper, step)
                  for state, gradient, hyper in zip(states, gradients, hypers)]
    directions = couple(*weights, *directions, hypers[0].head_dim)
    return [_aurora_finish(*parts, step)
            for parts in zip(states, weights, directions, gradients, hypers)]


CIRCUIT_DAMPING = 1e-3  # λ


def heads_of(value, head_dim):
    """A head has head_dim rows of the values' weight, and the same columns of the projection's."""
    return [slice(start, start + head_dim) for start in range(0, len(value), head_dim)]


def circuit_scaled(value, proj, value_direction, proj_direction, head_dim):
    """Each head's directions over the size of its partner, at each matrix's norm."""
    norms = value_direction.norm(), proj_direction.norm()
    value_direction, proj_direction = value_direction.clone(), proj_direction.clone()

    def over_size(part):
        mean_square = part.norm() ** 2 / head_dim
        return (mean_square + CIRCUIT_DAMPING).clamp(min=1e-12) ** -0.5

    for head in heads_of(value, head_dim):
        value_direction[head] *= over_size(proj[:, head])
        proj_direction[:, head] *= over_size(value[head])
    value_direction *= norms[0] / value_direction.norm().clamp(min=1e-12)
    proj_direction *= norms[1] / proj_direction.norm().clamp(min=1e-12)
    return value_direction, proj_direction


def circuit(value, proj, value_direction, proj_direction, head_dim):
    """The same, and then the gauge term: a head's two matrices do not drift apart in size."""
    value_direction, proj_direction = circuit_scaled(
        value, proj, value_direction, proj_direction, head_dim)
    for head in heads_of(value, head_dim):
        ours, theirs = value[head], proj[:, head]
        sizes = ours.norm() ** 2 + theirs.norm() ** 2 + 2 * head_dim * CIRCUIT_DAMPING
        difference = (inner(ours, value_direction[head])
                      - inner(theirs, proj_direction[:, head]))
        gauge = difference / sizes.clamp(min=1e-12)
        value_direction[head] -= gauge * ours
        proj_direction[:, head] += gauge * theirs
    return value_direction, proj_direction


# ---- SOAP on everything ----


def soap_everywhere_direction(state, gradient, hyper, step):
    """Momentum, SOAP, gate and polar factor of results 44 to 46."""
    u = momentum(state, gradient, hyper.mu)
    found = soap_direction(state, u)
    if hyper.kind in MLP:
        u = found
    elif hyper.kind == "attn.proj":
        u = blended(u, found, trust(u, found, gradient, gate_bounds(step)))
    else:
        u = blended(u, found, 1.0)
    return aspect(u) * polar_schatten(u)


def soap_everywhere(state, weight, gradient, hyper, step):
    """Results 44 and 45."""
    direction = brake(soap_everywhere_direction(state, gradient, hyper, step), weight)
    weight = step_and_radius(weight, floored(direction, weight, TARGET), hyper.lr)
    soap_statistics(state, gradient, step, every=1)
    return weight


CAUTIOUS_DECAY = 0.025


def row_floor(state, weight, gradient, hyper, step):
    """Result 46: a floor for each row, and decay where the step shrinks the weight."""
    direction = brake(soap_everywhere_direction(state, gradient, hyper, step), weight)
    direction = floored_rows(direction, weight, TARGET)
    shrinks = (direction * weight > 0).double()
    weight = step_and_radius(weight, direction, hyper.lr)
    weight = weight * (1 - hyper.lr * CAUTIOUS_DECAY * shrinks)
    soap_statistics(state, gradient, step, every=1)
    return weight
