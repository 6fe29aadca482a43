"""Some records validate more often in the last tenth of their run."""

from types import SimpleNamespace

import pytest

import train_gpt


@pytest.mark.parametrize("settings, steps", [
    (dict(val_every=30), [0, 30, 60, 90]),
    (dict(val_every=30, val_every_late=5), [0, 30, 60, 90, 95]),
    (dict(val_every=30, val_every_late=0), [0, 30, 60, 90]),
    (dict(val_every=0, val_every_late=5), [])])
def test_steps_that_are_validated(settings, steps):
    cfg = SimpleNamespace(num_iterations=100, **settings)
    assert [step for step in range(100) if train_gpt.is_validated(step, cfg)] == steps
