"""Schedules: exact against fractions for every step, and against the published record's steps."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from train_gpt import (
    PRESETS,
    Hyperparameters,
    lr_scale,
    muon_momentum,
    sequence_length,
    stage,
    target_weights,
    window_blocks,
    yarn,
)

RECORD = Hyperparameters(**PRESETS["record"])
POCKET = Hyperparameters(**PRESETS["pocket"])
# The steps at which the published run's long window grows, and to how many blocks (record #53).
PUBLISHED_GROWTH = {0: 3, 627: 7, 1254: 11, 1880: 13}
ROUNDING = 1e-12  # a few float64 operations


def scheduled(cfg):
    """Steps over which rates and windows change: those before the extension."""
    return max(1, cfg.num_iterations - cfg.extension_steps)


def third(step, cfg):
    """0, 1 or 2, the third of the schedules that a step is in, and 3 after them."""
    return min(3, math.floor(3 * Fraction(step, scheduled(cfg))))


@pytest.mark.parametrize("extension_steps", [0, 1, 40])
@pytest.mark.parametrize("num_iterations", [1, 9, 41, 200, 1770])
def test_stages_are_thirds_of_the_schedules_and_what_follows(num_iterations, extension_steps):
    cfg = replace(RECORD, num_iterations=num_iterations, extension_steps=extension_steps)
    for step in range(num_iterations + 1):
        assert stage(step, cfg) == third(step, cfg)
        assert window_blocks(step, cfg) == (3, 7, 11, 13)[third(step, cfg)]
    assert window_blocks(num_iterations, cfg) == 13


@pytest.mark.parametrize(
    "cfg", [RECORD, POCKET, replace(RECORD, num_iterations=7, extension_steps=2)]
)
def test_rate_has_a_peak_a_stage_falls_linearly_and_stays(cfg):
    floor, peaks = Fraction(str(cfg.final_lr_frac)), [int(x) for x in cfg.lr_stages.split()]
    for step in range(cfg.num_iterations + 1):
        progress = min(Fraction(1), Fraction(step, scheduled(cfg)))
        in_cooldown = min(Fraction(1), (1 - progress) / Fraction(str(cfg.cooldown_frac)))
        peak = Fraction(peaks[min(third(step, cfg), len(peaks) - 1)], 100)
        exact = in_cooldown * peak + (1 - in_cooldown) * floor
        assert lr_scale(step, cfg) == pytest.approx(float(exact), rel=ROUNDING)
    assert lr_scale(0, cfg) == 1
    at_the_end = {lr_scale(step, cfg) for step in range(scheduled(cfg), cfg.num_iterations + 1)}
    assert at_the_end == {0.1}


def test_rate_falls_over_the_last_fifty_five_hundredths():
    cfg = replace(RECORD, num_iterations=1040, lr_stages="100")
    assert [lr_scale(step, cfg) for step in (0, 300, 449)] == [1, 1, 1]
    assert lr_scale(451, cfg) < 1
    assert lr_scale(725, cfg) == pytest.approx(0.55, rel=ROUNDING)
    assert lr_scale(1000, cfg) == lr_scale(1039, cfg) == pytest.approx(0.1, rel=ROUNDING)


def test_rate_without_cooldown_is_the_stages():
    cfg = replace(RECORD, cooldown_frac=0)
    expected = {0: 1, 626: 1, 627: 1.52, 1253: 1.52, 1254: 1.73, 1919: 1.73}
    assert {step: lr_scale(step, cfg) for step in expected} == expected


def test_sequences_grow_at_the_published_steps():
    expected = {0: 16384, 626: 16384, 627: 32768, 1253: 32768, 1254: 49152, 1919: 49152}
    assert {step: sequence_length(step, RECORD) for step in expected} == expected
    assert {sequence_length(step, POCKET) for step in range(240)} == {POCKET.train_seq_len}


@pytest.mark.parametrize("stages", ["1", "3 2 1", "1 7 3", "5 5 5 9", "1 2000"])
def test_sequences_are_whole_blocks_and_never_longer_than_the_longest(stages):
    cfg = replace(RECORD, length_stages=stages, train_seq_len=1280)
    lengths = [sequence_length(step, cfg) for step in range(cfg.num_iterations + 1)]
    parts = [int(x) for x in stages.split()]
    for step, length in enumerate(lengths):
        part = parts[min(third(step, cfg), len(parts) - 1)]
        assert length % 128 == 0 and 0 <= length - 1280 * part / max(parts) < 128
    assert max(lengths) == 1280


@pytest.mark.parametrize("targets_ahead", [1, 2, 3])
def test_weights_of_further_targets_fade_out_one_in_each_third(targets_ahead):
    cfg = replace(RECORD, targets_ahead=targets_ahead)
    for step in range(cfg.num_iterations):
        thirds = 3 * Fraction(step, scheduled(cfg))
        left = [
            min(Fraction(1), targets_ahead - k - thirds) / 2**k for k in range(1, targets_ahead)
        ]
        exact = [1.0, *(float(x) for x in left if x > 0)]
        assert target_weights(step, cfg).tolist() == pytest.approx(exact, rel=1e-6)


def test_window_grows_at_the_published_steps():
    windows = [window_blocks(step, RECORD) for step in range(RECORD.num_iterations + 1)]
    growth = {step: windows[step] for step in range(1, len(windows))
              if windows[step] != windows[step - 1]}  # fmt: skip
    assert {0: windows[0]} | growth == PUBLISHED_GROWTH


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
    after, _ = yarn(627, RECORD)
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
    start, end, steps = Fraction("0.85"), Fraction("0.95"), RECORD.num_iterations
    for step in range(steps):
        frac = Fraction(min(step, 300), 300)
        if step > steps - 50:
            frac = Fraction(steps - step, 50)
        exact = start + frac * (end - start)
        assert muon_momentum(step, RECORD) == pytest.approx(float(exact), rel=ROUNDING)


def test_momentum_without_warmup_is_constant_until_it_falls():
    cfg = replace(RECORD, momentum_warmup=0)
    assert {muon_momentum(step, cfg) for step in range(1871)} == {0.95}
    assert muon_momentum(1871, cfg) < 0.95
    cfg = replace(cfg, momentum_cooldown=0)
    assert {muon_momentum(step, cfg) for step in range(1920)} == {0.95}


def test_schedules_depend_on_the_step_alone():
    schedules = (lr_scale, window_blocks, sequence_length, muon_momentum)
    steps = range(0, RECORD.num_iterations, 59)
    upward = [schedule(step, RECORD) for step in steps for schedule in schedules]
    downward = [schedule(step, RECORD) for step in reversed(steps) for schedule in schedules[::-1]]
    assert upward == downward[::-1]
