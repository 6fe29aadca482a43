"""What a warm-up on a GPU leaves behind, by the order of what it asks for; nothing is computed."""

import gc
from types import SimpleNamespace

import pytest
import torch

import train_gpt

FREE = 6 * 2**20  # bytes


@pytest.fixture
def asked(monkeypatch):
    """What the warm-up of the pocket asks for, in order."""
    asked = []

    def note(owner, name):
        monkeypatch.setattr(owner, name, lambda *args, **options: asked.append((name, args)))

    for name in ("to_batch", "accumulate_gradients", "step_optimizers", "validate"):
        note(train_gpt, name)
    note(torch, "empty")
    note(torch.cuda, "reset_peak_memory_stats")
    note(gc, "collect")
    note(gc, "freeze")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, 2 * FREE))
    cfg = train_gpt.parse_args(["--preset", "pocket"])
    run = SimpleNamespace(
        cfg=cfg, plan=train_gpt.plan(cfg), log=print, model=None, optimizers=[],
        loader=SimpleNamespace(per_forward=1),
        ranks=SimpleNamespace(device=torch.device("cuda"), world_size=1))
    train_gpt.Run.warm_up(run)
    monkeypatch.undo()
    return asked


def test_the_tuner_has_half_of_the_free_memory_for_its_copies(asked):
    """It takes no more than the process once held: from before the first kernel on."""
    assert asked[0] == ("empty", (FREE // 2,))


def test_the_peak_is_counted_from_the_end_of_the_warm_up_on(asked):
    names = [name for name, _ in asked]
    assert names.count("accumulate_gradients") == 4  # one in each stage that trains
    assert "validate" not in names[names.index("reset_peak_memory_stats"):]


def test_what_the_compiler_leaves_is_collected_and_then_frozen(asked):
    assert [name for name, _ in asked[-2:]] == ["collect", "freeze"]
