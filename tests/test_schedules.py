"""Schedules: exact against fractions for every step, and against the published record's steps."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

import train_gpt
from train_gpt import PRESETS, Hyperparameters, lr_scale, muon_momentum, window_blocks, yarn

RECORD = Hyperparameters(**PRESETS["record"])
POCKET = Hyperparameters(**PRESETS["pocket"])
# The steps at which the published run's long window grows, and to how many blocks (record #40).
PUBLISHED_GROWTH = {0: 3, 764: 7, 1528: 11, 2330: 13}
ROUNDING = 1e-12  # a few float64 operations


def scheduled(cfg):
    """Steps over which rates and windows change: those before the extension."""
    return max(1, cfg.num_iterations - cfg.extension_steps)


@pytest.mark.parametrize(
    "cfg", [RECORD, POCKET, replace(RECORD, num_iterations=7, extension_steps=2)]
)
def test_rate_is_stable_then_falls_linearly_and_stays(cfg):
    """It stays a ten thousandth of the way above the floor, as the published one."""
    floor = Fraction(str(cfg.final_lr_frac))
    for step in range(cfg.num_iterations + 1):
        progress = min(Fraction(9999, 10_000), Fraction(step, scheduled(cfg)))
        in_cooldown = min(Fraction(1), (1 - progress) / Fraction(str(cfg.cooldown_frac)))
        exact = floor + in_cooldown * (1 - floor)
        assert lr_scale(step, cfg) == pytest.approx(float(exact), rel=ROUNDING)
    assert lr_scale(0, cfg) == 1
    at_the_end = {lr_scale(step, cfg) for step in range(scheduled(cfg), cfg.num_iterations + 1)}
    assert len(at_the_end) == 1 and max(at_the_end) == pytest.approx(0.1, rel=3e-3)


def test_rate_falls_over_the_last_forty_five_hundredths():
    cfg = replace(RECORD, num_iterations=1040)
    assert [lr_scale(step, cfg) for step in (0, 300, 549)] == [1, 1, 1]
    assert lr_scale(551, cfg) < 1
    assert lr_scale(775, cfg) == pytest.approx(0.55, rel=ROUNDING)
    assert lr_scale(1000, cfg) == lr_scale(1039, cfg) == pytest.approx(0.1002, rel=ROUNDING)


def test_rate_without_cooldown_is_constant():
    cfg = replace(RECORD, cooldown_frac=0)
    assert {lr_scale(step, cfg) for step in range(RECORD.num_iterations)} == {1}


def test_window_grows_at_the_published_steps():
    windows = [window_blocks(step, RECORD) for step in range(RECORD.num_iterations + 1)]
    growth = {step: windows[step] for step in range(1, len(windows))
              if windows[step] != windows[step - 1]}  # fmt: skip
    assert {0: windows[0]} | growth == PUBLISHED_GROWTH


@pytest.mark.parametrize("extension_steps", [0, 1, 40])
@pytest.mark.parametrize("num_iterations", [1, 9, 41, 200, 1770])
def test_window_has_a_stage_for_each_third_and_one_for_the_last_validation(
    num_iterations, extension_steps
):
    cfg = replace(RECORD, num_iterations=num_iterations, extension_steps=extension_steps)
    for step in range(num_iterations):
        thirds = 3 * Fraction(step, max(1, num_iterations - extension_steps + 1))
        assert window_blocks(step, cfg) == (3, 7, 11)[min(2, math.floor(thirds))]
    assert window_blocks(num_iterations, cfg) == 13


@pytest.mark.parametrize("extension_steps", [0, 1, 240, 300])
def test_a_run_may_be_shorter_than_its_extension(extension_steps):
    cfg = replace(POCKET, extension_steps=extension_steps)
    scales = [lr_scale(step, cfg) for step in range(cfg.num_iterations + 1)]
    assert scales[0] == 1 and scales == sorted(scales, reverse=True)
    assert scales[-1] == pytest.approx(0.1, rel=3e-3)


def test_frequencies_follow_the_window_and_the_first_do_not():
    """YaRN: what turns 32 times in a window stays, what turns once at most keeps its angle at the
    window's end, as its frequency falls by the ratio of the windows."""
    first, scale = yarn(0, RECORD)
    assert first.tolist() == pytest.approx([1024 ** (-j / 31) for j in range(32)], rel=1e-6)
    assert scale == 0.1
    before, turns = first, 128 * 3 * first / (2 * math.pi)
    after, _ = yarn(764, RECORD)
    assert (turns > 32).any() and (turns < 1).any()
    assert after[turns > 32].equal(before[turns > 32])
    slowed = after[turns < 1] * 7
    assert slowed.tolist() == pytest.approx((before[turns < 1] * 3).tolist(), rel=1e-6)
    between = (turns > 1) & (turns < 32)
    ratios = (after / before)[between]
    assert ((ratios > 3 / 7) & (ratios < 1)).all() and (ratios.diff() < 0).all()


def test_the_scale_grows_with_the_log_of_the_window():
    expected, scales = 0.1, [yarn(step, RECORD)[1] for step in PUBLISHED_GROWTH]
    for (old, new), scale in zip(((3, 3), (3, 7), (7, 11), (11, 13)), scales, strict=True):
        expected *= 1 + 0.2 * math.log(new / old)
        assert scale == pytest.approx(expected, rel=ROUNDING)
    assert scales[-1] == pytest.approx(0.131778, rel=1e-5)


def test_windows_of_one_size_change_neither_frequencies_nor_scale():
    for step in (0, 100, POCKET.num_iterations):
        frequency, scale = yarn(step, POCKET)
        assert frequency.equal(yarn(0, POCKET)[0]) and scale == POCKET.attention_scale


def test_momentum_rises_linearly_stays_and_falls():
    """It stays a step short of its end, as the published one, and falls from the end."""
    start, end, steps = Fraction("0.85"), Fraction("0.95"), RECORD.num_iterations
    for step in range(steps):
        frac = Fraction(min(step, 299), 300)
        if step > steps - 50:
            frac = Fraction(steps - step, 50)
        exact = start + frac * (end - start)
        assert muon_momentum(step, RECORD) == pytest.approx(float(exact), rel=ROUNDING)


def test_momentum_without_warmup_is_constant_until_it_falls():
    cfg = replace(RECORD, momentum_warmup=0)
    assert {muon_momentum(step, cfg) for step in range(2281)} == {0.95}
    assert muon_momentum(2281, cfg) < 0.95
    cfg = replace(cfg, momentum_cooldown=0)
    assert {muon_momentum(step, cfg) for step in range(2330)} == {0.95}


def test_schedules_depend_on_the_step_alone():
    schedules = (train_gpt.lr_scale, train_gpt.window_blocks, train_gpt.muon_momentum)
    steps = range(0, RECORD.num_iterations, 59)
    upward = [schedule(step, RECORD) for step in steps for schedule in schedules]
    downward = [schedule(step, RECORD) for step in reversed(steps) for schedule in schedules[::-1]]
    assert upward == downward[::-1]
