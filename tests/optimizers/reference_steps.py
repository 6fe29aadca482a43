"""Steps to a public result, which are this repository's own: each has some of the result's ideas.

STEPS has a Result for each of their labels. Nothing like them was published; they are put together
from the pieces of the results.
"""

from dataclasses import replace

from reference import (
    LINE_LOOK_AHEAD,
    RESULTS,
    SLOW_AUX,
    SPLIT_AUX,
    Result,
    falling,
    hyperball,
    of_line,
    plain,
    scaled,
)
from reference_branches import muown_polar, soap_hyperball
from reference_line import (
    MLP,
    TARGET,
    adam_hyperball,
    circuit_scaled,
    circuit_steps,
    contra_schatten,
    radial_brake,
    soap_everywhere,
    soap_everywhere_direction,
    soap_on_values,
    soap_trusted,
    soft_contra_direction,
)
from reference_parts import (
    aspect,
    blended,
    brake,
    decayed_step,
    floored,
    floored_rows,
    momentum,
    normuon_schatten,
    polar_schatten,
    soap_direction,
    soap_statistics,
    step_and_radius,
    trust,
)
from reference_schedules import contra_share, gate_bounds, momentum_schedule

# ---- To result 20 ----


def schatten_norms(state, weight, gradient, hyper, step):
    """Result 16 with Schatten-4 norms; contra stays."""
    u = momentum(state, gradient, hyper.mu)
    if hyper.kind in MLP:
        u = soap_direction(state, u)
    if hyper.kind == "attn.proj":
        found = soap_direction(state, u, floor=0.20)
        u = blended(u, found, trust(u, found, gradient, gate_bounds(step)))
    direction = aspect(u) * contra_schatten(u, polar_schatten(u), -0.2)
    direction = floored(normuon_schatten(state, direction), weight, 0.35)
    if hyper.kind in (*MLP, "attn.proj"):
        soap_statistics(state, gradient, step, every=10)
    return weight - hyper.lr * direction


def soap_values(state, weight, gradient, hyper, step):
    """SOAP on values in place of attn.proj."""
    return _soap_values(state, weight, gradient, hyper, step, share=-0.2, target=0.35)


def contra_fades(state, weight, gradient, hyper, step):
    """Contra fades by step 2,000; the floor of the later results."""
    share = contra_share(step, end=2000)
    return _soap_values(state, weight, gradient, hyper, step, share, TARGET)


def _soap_values(state, weight, gradient, hyper, step, share, target):
    u = soap_on_values(state, gradient, hyper)
    direction = aspect(u) * contra_schatten(u, polar_schatten(u), share)
    direction = floored(normuon_schatten(state, direction), weight, target)
    if hyper.kind in (*MLP, "attn.v"):
        soap_statistics(state, gradient, step, every=10)
    return weight - hyper.lr * direction


# ---- To results 29, 30, 41 ----


def brake_alone(state, weight, gradient, hyper, step):
    """Result 20 with the brake, and without the radius."""
    u = soap_on_values(state, gradient, hyper)
    direction = floored(brake(soft_contra_direction(state, u, step), weight), weight, TARGET)
    if hyper.kind in (*MLP, "attn.v"):
        soap_statistics(state, gradient, step, every=10)
    return weight - hyper.lr * direction


def pruned(state, weight, gradient, hyper, step):
    """Result 30 without Aurora."""
    u = soap_on_values(state, gradient, hyper)
    share = contra_share(step, end=2500)
    return _finish(state, weight, contra_schatten(u, polar_schatten(u), share), gradient, hyper,
                   step)


def _finish(state, weight, direction, gradient, hyper, step):
    direction = floored(brake(aspect(weight) * direction, weight), weight, TARGET)
    if hyper.kind in (*MLP, "attn.v"):
        soap_statistics(state, gradient, step, every=10)
    return step_and_radius(weight, direction, hyper.lr)


def partner_scale(states, weights, gradients, hypers, step):
    """Circuit-Muon without its gauge term."""
    return circuit_steps(circuit_scaled, states, weights, gradients, hypers, step)


# ---- To results 44 and 46 ----


def without_three(state, weight, gradient, hyper, step):
    """Result 40 without contra and Aurora."""
    u = soap_on_values(state, gradient, hyper)
    return _finish(state, weight, polar_schatten(u), gradient, hyper, step)


def soap_for_most(state, weight, gradient, hyper, step):
    """SOAP for all but attn.proj, with new bases in each step."""
    has_soap = hyper.kind != "attn.proj"
    u = momentum(state, gradient, hyper.mu)
    if has_soap:
        u = soap_direction(state, u)
    direction = floored(brake(aspect(u) * polar_schatten(u), weight), weight, TARGET)
    if has_soap:
        soap_statistics(state, gradient, step, every=1)
    return step_and_radius(weight, direction, hyper.lr)


def rows_floored(state, weight, gradient, hyper, step):
    """Result 46 without its decay."""
    direction = brake(soap_everywhere_direction(state, gradient, hyper, step), weight)
    weight = step_and_radius(weight, floored_rows(direction, weight, TARGET), hyper.lr)
    soap_statistics(state, gradient, step, every=1)
    return weight


# ---- To result 23 ----


def polar_express(state, weight, gradient, hyper, step):
    """Result 12 with other coefficients."""
    u = momentum(state, gradient, hyper.mu)
    return decayed_step(weight, aspect(u) * muown_polar(u), hyper.lr, hyper.decay)


SLOW = of_line(3020, 3105, radial_brake, aux=SLOW_AUX)
MOMENTUM = replace(SLOW, momentum=momentum_schedule(3020, 100))
LATE = of_line(2900, 2980, without_three, "line30", aux=SLOW_AUX,
               momentum=momentum_schedule(2900, 100), look_ahead=LINE_LOOK_AHEAD)

STEPS = {
    "o19a": hyperball(3125, soap_hyperball),
    "o20a": of_line(3040, 3105, soap_trusted),
    "o20b": of_line(3040, 3105, schatten_norms),
    "o20c": of_line(3040, 3105, soap_values),
    "o20d": of_line(3040, 3105, contra_fades),
    "o23a": plain(3350, "new", polar_express, lr=0.035, decay=0.025),
    "o29a": of_line(3040, 3105, brake_alone),
    "o30a": SLOW,
    "o30b": MOMENTUM,
    "o30c": replace(MOMENTUM, initial="depth"),
    "o30d": replace(MOMENTUM, initial="line30"),
    "o30e": of_line(3020, 3050, pruned, "line30", aux=SLOW_AUX,
                    momentum=momentum_schedule(3020, 100)),
    "o33a": Result(3400, "psgd", adam_hyperball, scaled(0.018, falling(3400, 1.0)),
                   RESULTS["o33"].aux_rate, of_mean_loss=True),
    "o41a": replace(RESULTS["o41"], update_pair=partner_scale),
    "o44a1": RESULTS["o40"],
    "o44a": LATE,
    "o44b1": replace(LATE, update=soap_for_most),
    "o44b": replace(LATE, update=soap_everywhere),
    "o44c": replace(LATE, update=soap_everywhere, aux=SPLIT_AUX),
    "o44d": replace(LATE, update=soap_everywhere, aux=SPLIT_AUX, initial="line44"),
    "o46a": replace(RESULTS["o46"], update=soap_everywhere),
    "o46b": replace(RESULTS["o46"], update=rows_floored),
}
