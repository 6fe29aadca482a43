"""Checkpoints on disk: found whole or not at all, kept, refused, written durably. In process."""

import dataclasses
import itertools
import math
import os
from pathlib import Path

import pytest
import torch

import train_gpt
from train_gpt import UserError, check_same_run, load_checkpoint, write_checkpoint

TINY = train_gpt.parse_args(
    """--preset pocket --model_dim 16 --head_dim 16 --attention_pattern L --value_embed_pattern 0
    --vocab_size 16 --eot_token 15 --val_seq_len 128 --num_iterations 100 --device cpu --run_id x
    --resume auto""".split())
DATA = "0123456789abcdef"


def make_state(cfg):
    """What a run of `cfg` saves at step 20, every tensor of it drawn from a normal distribution."""
    model = train_gpt.GPT(cfg)
    optimizers = train_gpt.build_optimizers(model, cfg, train_gpt.Ranks(cfg))
    generator = torch.Generator().manual_seed(0)
    for optimizer in optimizers:
        for x in optimizer.tensors():
            x.normal_(generator=generator)
    return dict(step=20, hyperparameters=dataclasses.asdict(cfg), data=DATA, threads=1,
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


def write(folder, state, step, keep=2):
    write_checkpoint(path := folder / f"step-0000{step}.pt", state | dict(step=step), keep)
    os.utime(path, (step, step))  # a clock may have the same time for two


@pytest.fixture
def folder(state, tmp_path):
    """With the checkpoints of steps 10 and 20."""
    write(tmp_path, state, 10)
    write(tmp_path, state, 20)
    return tmp_path


def find(folder):
    """The path found in the folder, and what was said about it."""
    said = []
    return train_gpt.newest_checkpoint(folder, said.append), "\n".join(said)


def assert_skipped(path):
    """`auto` names the newest one, skips it and takes the one before; its path is an error."""
    found, said = find(path.parent)
    assert found is not None and found.name == "step-000010.pt"
    assert said.startswith(f"skipped {path}: no whole checkpoint (")
    with pytest.raises(UserError, match="step-000020.pt: no whole checkpoint"):
        load_checkpoint(path)


# Whole or not


def test_what_is_saved_is_found_and_loaded(folder, state):
    path, said = find(folder)
    assert path.name == "step-000020.pt" and said == ""
    assert equal(load_checkpoint(path), state)


def test_damaged_files_are_skipped(folder, state):
    """Empty, cut off or with a flipped bit; more damage is in test_fuzz.py."""
    path = folder / "step-000020.pt"
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(state["model"]["lm_head.weight"].numpy().tobytes()) + 7] ^= 1
    for damaged in (b"", content[:1000], content[:-1], flipped):
        path.write_bytes(damaged)
        assert_skipped(path)
    (folder / "step-000010.pt").write_bytes(content[:-1])
    found, said = find(folder)
    assert found is None and "step-000010.pt" in said and "step-000020.pt" in said
    assert said.endswith(f"no checkpoint in {folder}: starting afresh")


class Malice:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


ODD = [  # where in a state, and a value that no run saves; None: nothing is there
    *itertools.product(["step"], ["x", None, -1, 2.5]),
    *itertools.product(["hyperparameters"], [None, [1], dict(no_such=1)]),
    *itertools.product(["model"], [None, "text"]), *itertools.product(["optimizers"], [None, [1]]),
    *itertools.product(["loader"], [None, (1, 2, 3), (0, -1)]),
    *itertools.product(["train_time_ms"], [None, "a minute", math.nan]),
    *itertools.product(["threads"], [None, 0]), ("data", Malice()),
    ("model lm_head.weight", torch.tensor([0, math.nan])),
    ("model backout_lambda", torch.tensor(-math.inf)),
    ("optimizers head square", torch.tensor([math.inf, 0])),
    ("optimizers mlp mean", torch.tensor([[0], [math.nan]]))]


@pytest.mark.parametrize("keys, value", ODD, ids=lambda part: str(part)[:20])  # no address
def test_whole_file_with_odd_parts_is_refused(folder, state, monkeypatch, keys, value):
    """Whatever its checksums say: code is not run, and what is not finite never taken."""
    monkeypatch.chdir(folder)
    torch.save(changed(state, keys.split(), value), folder / "step-000020.pt")
    assert_skipped(folder / "step-000020.pt")
    assert not Path("executed").exists()


# Written and kept


def test_newest_two_and_the_last_are_kept(folder, state):
    write(folder, state, 30)
    write(folder, state, 40)
    write(folder, state, 45, keep=3)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-0000{step}.pt" for step in (30, 40, 45)]
    # Also by a run that was resumed from an old one and has later ones in its folder
    write(folder, state, 12)
    assert load_checkpoint(folder / "step-000012.pt")


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
    write_checkpoint(path := tmp_path / "step-000020.pt", state, keep=2)
    assert events == [path.with_suffix(".tmp"), path]


# Of the same run

MAY_CHANGE = """num_iterations val_every save_every run_id resume warmup_steps head_chunks
    target_loss train_files device sequences_per_forward val_tokens val_files""".split()


@pytest.mark.parametrize("field", dataclasses.fields(TINY), ids=lambda field: field.name)
def test_other_mathematics_is_refused_by_name(state, field):
    """What leaves the mathematics alone may change."""
    value = getattr(TINY, field.name)
    other = {bool: not value, str: "else", tuple: (7, 9)}.get(field.type)
    other = value + 1 if other is None else other
    cfg = dataclasses.replace(TINY, **{field.name: other})
    if field.name in MAY_CHANGE:
        return check_same_run(state, cfg, DATA)
    with pytest.raises(UserError) as caught:
        check_same_run(state, cfg, DATA)
    differs = f"{field.name} {value!r}, now {other!r}"
    assert str(caught.value) == f"auto: of another run; what differs: {differs}"


def test_every_difference_is_named(state):
    cfg = dataclasses.replace(TINY, seed=1, muon_lr=0.06, num_iterations=19)
    with pytest.raises(UserError, match="seed 0, now 1; muon_lr 0.08, now 0.06; "
                                        "num_iterations, its step is 20; the training data"):
        check_same_run(state, cfg, "another")
    check_same_run(state, TINY, "")  # a finished run is evaluated without training data
