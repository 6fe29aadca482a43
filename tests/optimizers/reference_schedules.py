"""Schedules of the optimizer benchmark: rates, momenta and shares at each step.

A step counts from 0 and is that of the update: step t makes weights t + 1 of weights t.
"""


def flat_then_linear(step, total, cooldown):
    """1, and in the last `cooldown` of the run linearly to 0."""
    progress = step / total
    if progress < 1 - cooldown:
        return 1.0
    return (1 - progress) / cooldown


# ---- PowerCool, of the line from result 20 on ----

POWER = 1.2
FIRST_RATE = {"embed": 0.3, "head": 1 / 320, "vector": 0.01, "matrix": 0.0375}
POWER_FACTOR = {
    "embed": 4.976805410800738e-05,
    "head": 5.184172302917436e-07,
    "vector": 1.6589351369335795e-06,
    "matrix": 3.3169534699576625e-06,
}


def power_cool(step, end, group):
    """The rate of a group, of FIRST_RATE's four; `end` is the step at which it is zero."""
    return min(FIRST_RATE[group], POWER_FACTOR[group] * max(0, end - step) ** POWER)


# ---- Momentum ----


def constant_momentum(step):
    """0.95."""
    return 0.95


def momentum_schedule(total, cooldown):
    """From 0.85 up to 0.95 in 300 steps; down again by 0.1 in the last `cooldown` of `total`."""
    def momentum(step):
        if step < 300:
            return 0.85 + 0.1 * step / 300
        if step > total - cooldown:
            return 0.95 - 0.1 * (step - (total - cooldown)) / cooldown
        return 0.95
    return momentum


# ---- Shares that change ----


def clip(x, low=0.0, high=1.0):
    """x, no less than `low` and no more than `high`."""
    return min(max(x, low), high)


def contra_share(step, end):
    """How much of the normed momentum joins the direction: from −0.2 up to 0 at `end`."""
    return -0.2 * (1 - min(1.0, step / end))


def soft_share(step):
    """How much of the soft direction is taken in results 20 and 29."""
    return min(0.80, clip((step - 2500) / 510))


def gate_bounds(step):
    """The least and the most that a trust gate may be."""
    if step < 1375:
        return 0.45, 0.85
    if step < 1625:
        return 0.45 * (1625 - step) / 250, 0.85
    return 0.0, 1.0


def dynamic_power(step, total):
    """The power of the singular values in result 28: from 0.12 down to −0.25."""
    from math import exp
    return -0.25 + 0.5 / (1 + exp((step / total - 0.04) / 0.04))


def virtual_share(step):
    """How far the virtual lengths of result 23 have gone.

    They are made at the end of the step before, so they are one step late.
    """
    return (max(step - 1, 0) / 3164) ** 1.2
