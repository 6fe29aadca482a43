"""Schedules of runs of odd lengths; tests/records hold the record's to published ones."""

from dataclasses import replace

import pytest

from train_gpt import parse_args, schedule


@pytest.mark.parametrize(("preset", "changes", "stages"), [
    ("record", dict(num_iterations=1), "04"),
    ("record", dict(num_iterations=9, extension_steps=0), "0001112224"),
    ("record", dict(num_iterations=5, extension_steps=4, momentum_cooldown=0), "033334"),
    ("pocket", dict(num_iterations=4, extension_steps=300), "03334")], ids=str)
def test_a_run_of_any_length_goes_through_its_stages(preset, changes, stages):
    """Thirds, then the extension, which may be longer than the run; 4 is the last validation."""
    cfg = replace(parse_args(["--preset", preset]), **changes)
    steps = [schedule(step, cfg) for step in range(cfg.num_iterations + 1)]
    assert [now.stage for now in steps] == list(map(int, stages))
    for now in steps:
        assert 0.1 <= now.lr_factor <= max(row.lr_factor for row in cfg.stages)
        assert cfg.muon_momentum >= now.momentum >= 0.85
        assert now.target_weights[0] == 1
    assert steps[-1].lr_factor == pytest.approx(0.1)
