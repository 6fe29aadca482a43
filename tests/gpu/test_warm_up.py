"""What a warm-up on a GPU leaves behind, by the order of what it asks for; nothing is computed."""

import gc
from types import SimpleNamespace

import torch

import train_gpt

FREE = 6 * 2**20  # bytes


def test_the_tuner_has_room_and_neither_the_peak_nor_the_collector_sees_the_warm_up(monkeypatch):
    """The tuner takes no more than the process once held: half of the free memory, from before the
    first kernel on. What the compiler leaves is collected, and then frozen."""
    asked = []

    def note(owner, name):
        monkeypatch.setattr(owner, name, lambda *args, **options: asked.append((name, args)))

    for name in ("accumulate_gradients", "step_optimizers", "validate"):
        note(train_gpt, name)
    note(torch, "empty")
    note(torch.cuda, "reset_peak_memory_stats")
    note(gc, "collect")
    note(gc, "freeze")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, 2 * FREE))
    cfg = train_gpt.parse_args(["--preset", "pocket"])
    run = SimpleNamespace(
        cfg=cfg, plan=train_gpt.plan(cfg), log=print, model=None, optimizers=[],
        last=cfg.num_iterations, loader=SimpleNamespace(next_step=lambda now: [None]),
        ranks=SimpleNamespace(device=torch.device("cuda"), world_size=1))
    train_gpt.Run.warm_up(run)
    monkeypatch.undo()
    names = [name for name, _ in asked]
    assert asked[0] == ("empty", (FREE // 2,))
    assert names.count("accumulate_gradients") == 4  # one in each stage that trains
    assert names[-4:] == ["validate", "reset_peak_memory_stats", "collect", "freeze"]
