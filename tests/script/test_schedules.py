"""Schedules against fractions at every step; tests/records hold the record's to published ones."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from train_gpt import Hyperparameters, at_stage, parse_args, schedule, stage_of, yarn

RECORD = Hyperparameters()
POCKET = parse_args(["--preset", "pocket"])
ROUNDING = 1e-12  # a few float64 operations


def scheduled(cfg):
    """Steps over which rates and windows change: those before the extension."""
    return max(1, cfg.num_iterations - cfg.extension_steps)


def third(step, cfg):
    """0, 1 or 2, the third of the schedules that a step is in, 3 after them, 4 at the end."""
    if step == cfg.num_iterations:
        return 4
    return min(3, math.floor(3 * Fraction(step, scheduled(cfg))))


def each_step(cfg):
    return [(step, schedule(step, cfg)) for step in range(cfg.num_iterations + 1)]


@pytest.mark.parametrize("extension_steps", [0, 1, 40])
@pytest.mark.parametrize("num_iterations", [1, 9, 41, 200, 1770])
def test_stages_are_thirds_of_the_schedules_and_what_follows(num_iterations, extension_steps):
    cfg = replace(RECORD, num_iterations=num_iterations, extension_steps=extension_steps)
    for step, now in each_step(cfg):
        assert now.stage == stage_of(step, cfg) == third(step, cfg)


@pytest.mark.parametrize(("values", "expected"), [
    ((7,), [7, 7, 7, 7, 7]), ((1, 2), [1, 2, 2, 2, 2]), ((1, 2, 3, 4, 5), [1, 2, 3, 4, 5])])
def test_the_last_entry_of_a_short_tuple_holds_on(values, expected):
    assert [at_stage(values, stage) for stage in range(5)] == expected


@pytest.mark.parametrize(
    "cfg", [RECORD, POCKET, replace(RECORD, num_iterations=7, extension_steps=2)]
)
def test_rate_has_a_peak_a_stage_falls_linearly_and_stays(cfg):
    for step, now in each_step(cfg):
        progress = min(Fraction(1), Fraction(step, scheduled(cfg)))
        in_cooldown = min(Fraction(1), (1 - progress) / Fraction(str(cfg.cooldown_frac)))
        peaks = [Fraction(str(factor)) for factor in cfg.lr_factors]
        peak = peaks[min(third(step, cfg), len(peaks) - 1)]
        exact = in_cooldown * peak + (1 - in_cooldown) * Fraction("0.1")
        assert now.lr_factor == pytest.approx(float(exact), rel=ROUNDING)
        assert step > 0 or now.lr_factor == 1
        assert step < scheduled(cfg) or now.lr_factor == 0.1


@pytest.mark.parametrize("targets_ahead", [1, 2, 3])
def test_weights_of_further_targets_fade_out_one_in_each_third(targets_ahead):
    cfg = replace(RECORD, targets_ahead=targets_ahead)
    for step, now in each_step(cfg)[:-1]:
        thirds = 3 * Fraction(step, scheduled(cfg))
        exact = [1.0]
        for ahead in range(1, targets_ahead):
            left = min(Fraction(1), targets_ahead - ahead - thirds) / 2**ahead
            if left > 0:
                exact.append(float(left))
        assert now.target_weights == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("extension_steps", [0, 1, 240, 300])
def test_a_run_may_be_shorter_than_its_extension(extension_steps):
    cfg = replace(POCKET, extension_steps=extension_steps)
    factors = [now.lr_factor for _, now in each_step(cfg)]
    assert factors[0] == 1 and factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(0.1, rel=3e-3)


@pytest.mark.parametrize("cfg", [RECORD, POCKET], ids=["record", "pocket"])
def test_the_head_is_tied_for_two_thirds_and_lambdas_rest_where_a_stage_begins(cfg):
    steps = range(1, cfg.num_iterations)
    starts = [step for step in steps if third(step, cfg) != third(step - 1, cfg)]
    for step, now in each_step(cfg)[:-1]:
        assert now.adam_rests == (step % 2 == 0)
        assert now.tied == (third(step, cfg) < 2)
        assert now.frozen == any(0 <= step - start < cfg.freeze_steps for start in starts)
    assert not schedule(0, replace(cfg, init="weights.pt")).tied


def test_windows_of_one_size_change_neither_frequencies_nor_scale():
    for stage in range(5):
        frequency, scale = yarn(stage, POCKET)
        assert frequency.equal(yarn(0, POCKET)[0]) and scale == POCKET.attention_scale


@pytest.mark.parametrize("cooldown", [50, 0])
def test_momentum_rises_linearly_stays_and_falls(cooldown):
    cfg = replace(RECORD, momentum_cooldown=cooldown)
    start, end, steps = Fraction("0.85"), Fraction("0.95"), cfg.num_iterations
    for step, now in each_step(cfg)[:-1]:
        frac = Fraction(min(step, 300), 300)
        if step > steps - cooldown:
            frac = Fraction(steps - step, cooldown)
        exact = start + frac * (end - start)
        assert now.momentum == pytest.approx(float(exact), rel=ROUNDING)
