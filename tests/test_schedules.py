"""Schedules: exact against fractions for every step, and against the published record's steps."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

import train_gpt
from train_gpt import BLOCK, PRESETS, Hyperparameters, lr_scale, muon_momentum, window_blocks

RECORD = Hyperparameters()
POCKET = Hyperparameters(**PRESETS["pocket"])
# The steps at which the published run's long window grows by a block (record #21).
PUBLISHED_GROWTH = [132, 263, 394, 525, 656, 787, 918, 1049, 1181, 1312, 1443, 1574, 1705]
ROUNDING = 1e-12  # a few float64 operations


@pytest.mark.parametrize("cfg", [RECORD, POCKET, replace(RECORD, num_iterations=7)])
def test_rate_is_stable_then_falls_linearly(cfg):
    n, floor = cfg.num_iterations, Fraction(str(cfg.final_lr_frac))
    for step in range(n + 1):
        in_cooldown = min(Fraction(1), (1 - Fraction(step, n)) / Fraction(str(cfg.cooldown_frac)))
        exact = floor + in_cooldown * (1 - floor)
        assert lr_scale(step, cfg) == pytest.approx(float(exact), rel=ROUNDING)
    assert lr_scale(0, cfg) == 1
    assert lr_scale(n, cfg) == pytest.approx(float(floor), rel=ROUNDING)


def test_rate_falls_over_the_last_two_fifths():
    cfg = replace(RECORD, num_iterations=1000)
    assert [lr_scale(step, cfg) for step in (0, 300, 600)] == [1, 1, 1]
    assert lr_scale(601, cfg) < 1
    assert lr_scale(800, cfg) == pytest.approx(0.55, rel=ROUNDING)
    assert lr_scale(1000, cfg) == pytest.approx(0.1, rel=ROUNDING)


def test_rate_without_cooldown_is_constant():
    cfg = replace(RECORD, cooldown_frac=0)
    assert {lr_scale(step, cfg) for step in range(RECORD.num_iterations)} == {1}


def test_window_grows_at_the_published_steps_from_128_to_1792_tokens():
    windows = [window_blocks(step, RECORD) for step in range(RECORD.num_iterations + 1)]
    growth = [step for step in range(1, len(windows)) if windows[step] != windows[step - 1]]
    assert growth == PUBLISHED_GROWTH
    assert (windows[0] * BLOCK, windows[-1] * BLOCK) == (128, 1792)
    assert windows == sorted(windows)


@pytest.mark.parametrize("window_tokens", [0, 1, 127, 128, 129, 256, 1728, 5000])
@pytest.mark.parametrize("num_iterations", [1, 9, 200, 1770])
def test_window_is_linear_rounded_up_to_blocks_and_at_least_one(window_tokens, num_iterations):
    cfg = replace(RECORD, window_tokens=window_tokens, num_iterations=num_iterations)
    for step in range(num_iterations + 1):
        exact = math.ceil(Fraction(window_tokens * step, num_iterations * BLOCK))
        assert window_blocks(step, cfg) == max(1, exact)


def test_momentum_rises_linearly_then_stays():
    for step in range(RECORD.num_iterations + 1):
        frac = min(Fraction(1), Fraction(step, 300))
        exact = Fraction("0.85") + frac * (Fraction("0.95") - Fraction("0.85"))
        assert muon_momentum(step, RECORD) == pytest.approx(float(exact), rel=ROUNDING)


def test_momentum_without_warmup_is_constant():
    cfg = replace(RECORD, momentum_warmup=0)
    assert {muon_momentum(step, cfg) for step in range(400)} == {0.95}


def test_schedules_depend_on_the_step_alone():
    schedules = (train_gpt.lr_scale, train_gpt.window_blocks, train_gpt.muon_momentum)
    steps = range(0, RECORD.num_iterations, 59)
    upward = [schedule(step, RECORD) for step in steps for schedule in schedules]
    downward = [schedule(step, RECORD) for step in reversed(steps) for schedule in schedules[::-1]]
    assert upward == downward[::-1]
