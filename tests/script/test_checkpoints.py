"""Checkpoints on disk: found whole or not at all, kept, refused, written durably. In process."""

import math
import os
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny

import train_gpt
from train_gpt import UserError, load_checkpoint, newest_checkpoint, write_checkpoint

TINY = tiny(preset="pocket", model_dim=16, vocab_multiple=16, vocab_size=16, eot_token=15)


def make_state(cfg):
    """What a run of `cfg` saves at step 20, every tensor of it drawn from a normal distribution.

    Its settings are text in the file, and values once it is loaded.
    """
    model = train_gpt.GPT(cfg)
    optimizers = train_gpt.build_optimizers(model, cfg, train_gpt.Ranks(cfg))
    generator = torch.Generator().manual_seed(0)
    for optimizer in optimizers:
        for x in optimizer.tensors():
            x.normal_(generator=generator)
    settings = {name: train_gpt.show(value) for name, value in vars(cfg).items()}
    return dict(step=20, settings=settings, data="0123456789abcdef", threads=1,
                loader=(1, 512), train_time_ms=1234.5, model=model.state_dict(),
                optimizers={o.name: o.full_state() for o in optimizers})


def equal(value, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(value, expected)
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(equal(value[k], expected[k]) for k in value)
    return value == expected


def changed(state, keys, value):
    """The state with another value at a path of keys, or with nothing there for None."""
    first, *rest = keys
    others = {key: each for key, each in state.items() if key != first}
    if rest:
        value = changed(state[first], rest, value)
    return others if value is None else others | {first: value}


@pytest.fixture(scope="module")
def state():
    return make_state(TINY)


def write(folder, state, step):
    write_checkpoint(path := folder / f"step-0000{step}.pt", state | dict(step=step))
    os.utime(path, (step, step))  # a clock may have the same time for two


@pytest.fixture
def folder(state, tmp_path):
    """With the checkpoints of steps 10 and 20."""
    write(tmp_path, state, 10)
    write(tmp_path, state, 20)
    return tmp_path


@pytest.fixture
def assert_skipped(folder, capsys):
    """`auto` names the newest one, skips it and takes the one before; its path is an error."""
    def check():
        path = folder / "step-000020.pt"
        found, state = newest_checkpoint(folder)
        assert Path(found).name == "step-000010.pt" and state["step"] == 10
        said = f"skipped {path}: no whole checkpoint of this script ("
        assert capsys.readouterr().err.startswith(said)
        with pytest.raises(UserError, match="step-000020.pt: no whole checkpoint"):
            load_checkpoint(path)

    return check


def test_what_is_saved_is_found_and_loaded(folder, state, capsys):
    path, found = newest_checkpoint(folder)
    assert path == str(folder / "step-000020.pt") and capsys.readouterr().err == ""
    assert equal(found, state | dict(settings=vars(TINY)))


def test_damaged_files_are_skipped(folder, state, assert_skipped, capsys):
    """Empty, cut off or with a flipped bit."""
    path = folder / "step-000020.pt"
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(state["model"]["lm_head.weight"].numpy().tobytes()) + 7] ^= 1
    for damaged in (b"", content[:-1], flipped):
        path.write_bytes(damaged)
        assert_skipped()
    (folder / "step-000010.pt").write_bytes(content[:-1])
    assert newest_checkpoint(folder) == ("", train_gpt.NEW_RUN)
    said = capsys.readouterr().err
    assert "step-000010.pt" in said and "step-000020.pt" in said


class Malice:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


ODD = [  # where in a state, and a value that no run saves; None: nothing is there
    ("settings", None), ("settings", [1]), ("settings", dict(no_such="1")),
    ("settings muon_lr", None),  # no default is taken
    ("settings muon_lr", "nan"), ("settings seed", "1.5"), ("settings stages", ""),
    ("model", None), ("model", "text"), ("optimizers", [1]), ("data", Malice()),
    ("model backout_lambda", torch.tensor(1)), ("optimizers head mean", torch.zeros(9, dtype=bool)),
    ("model lm_head.weight", torch.tensor([0, math.nan])),
    ("model backout_lambda", torch.tensor(-math.inf)),
    ("optimizers head square", torch.tensor([math.inf, 0])),
    ("optimizers mlp mean", torch.tensor([[0], [math.nan]]))]


@pytest.mark.parametrize("keys, value", ODD, ids=lambda part: str(part)[:20])  # no address
def test_whole_file_with_odd_parts_is_refused(
    folder, state, monkeypatch, assert_skipped, keys, value
):
    """Whatever its checksums say: code is not run, and what is not finite never taken."""
    monkeypatch.chdir(folder)
    torch.save(changed(state, keys.split(), value), folder / "step-000020.pt")
    assert_skipped()
    assert not Path("executed").exists()


def test_the_newest_three_are_kept(folder, state):
    write(folder, state, 30)
    write(folder, state, 40)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-0000{step}.pt" for step in (20, 30, 40)]
    # Also by a run that was resumed from an old one and has later ones in its folder
    path = folder / "step-000012.pt"
    write_checkpoint(path, state | dict(step=12))
    assert load_checkpoint(path)["step"] == 12


def test_a_checkpoint_is_synced_before_it_gets_its_name(tmp_path, state, monkeypatch):
    events, replace, fsync = [], Path.replace, os.fsync

    def synced(number):
        events.append(Path(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    def replaced(path, target):
        events.append(target)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_checkpoint(path := tmp_path / "step-000020.pt", state)
    assert events == [path.with_suffix(".tmp"), path]
