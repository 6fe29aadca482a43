"""Schedules of any lengths against fractions; tests/records hold the record's to published ones."""

from dataclasses import replace
from fractions import Fraction

import pytest

from train_gpt import parse_args, schedule, yarn

POCKET = parse_args(["--preset", "pocket"])


@pytest.mark.parametrize(("preset", "changes"), [
    ("record", {}),
    ("record", dict(num_iterations=1)),
    ("record", dict(num_iterations=9, extension_steps=0, targets_ahead=2)),
    ("record", dict(num_iterations=41)),  # one step before the extension
    ("record", dict(num_iterations=1770, extension_steps=1, momentum_cooldown=0, targets_ahead=1)),
    ("pocket", {}),
    ("pocket", dict(extension_steps=300)),  # more than there are
], ids=str)
def test_each_step_has_the_schedule_that_fractions_give(preset, changes):
    """Thirds, then the extension, each with its own peak; stage 4 is the last validation."""
    cfg = replace(parse_args(["--preset", preset]), **changes)
    scheduled = max(1, cfg.num_iterations - cfg.extension_steps)
    stages = [min(3, 3 * step // scheduled) for step in range(cfg.num_iterations)]
    assert schedule(cfg.num_iterations, cfg).stage == 4
    for step, stage in enumerate(stages):
        now = schedule(step, cfg)
        assert now.stage == stage
        assert now.seq_len == [*cfg.seq_lens, *[cfg.seq_lens[-1]] * 3][stage]
        assert now.adam_rests == (step % 2 == 0)
        assert now.tied == (stage < 2)
        assert not schedule(step, replace(cfg, init="weights.pt")).tied
        assert now.frozen == (stage != stages[max(0, step - cfg.freeze_steps)])

        progress = min(Fraction(1), Fraction(step, scheduled))
        high = min(Fraction(1), (1 - progress) / Fraction(str(cfg.cooldown_frac)))
        peak = Fraction(str([*cfg.lr_factors, *[cfg.lr_factors[-1]] * 3][stage]))
        assert now.lr_factor == pytest.approx(float(high * peak + (1 - high) / 10), rel=1e-12)
        high = Fraction(min(step, 300), 300)
        if step >= 300 and cfg.num_iterations - step < cfg.momentum_cooldown:
            high = Fraction(cfg.num_iterations - step, cfg.momentum_cooldown)
        momentum = float(high) * cfg.muon_momentum + float(1 - high) * 0.85
        assert now.momentum == pytest.approx(momentum, rel=1e-12)
        weights = [min(Fraction(1), cfg.targets_ahead - ahead - 3 * progress) / 2**ahead
                   for ahead in range(1, cfg.targets_ahead)]
        expected = [1.0, *(float(weight) for weight in weights if weight > 0)]
        assert now.target_weights == pytest.approx(expected, rel=1e-6)


def test_windows_of_one_size_change_neither_frequencies_nor_scale():
    for stage in range(5):
        frequency, scale = yarn(stage, POCKET)
        assert frequency.equal(yarn(0, POCKET)[0]) and scale == POCKET.attention_scale
