"""Checkpoints on disk: found whole or not at all, kept, refused, written durably. In process."""

import contextlib
import dataclasses
import errno
import functools
import math
import os
import zipfile
from pathlib import Path

import numpy as np
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


@pytest.fixture
def folder(state, tmp_path):
    """With the checkpoints of steps 10 and 20."""
    for step in (10, 20):
        write_checkpoint(path := tmp_path / f"step-0000{step}.pt", state | dict(step=step), keep=2)
        os.utime(path, (step, step))  # a clock may have the same time for both
    return tmp_path


def find(folder, resume="auto"):
    """The path found in the folder, and what was said about it."""
    said = []
    cfg = dataclasses.replace(TINY, resume=str(resume))
    return train_gpt.find_checkpoint(cfg, folder, said.append), "\n".join(said)


def assert_skipped(path):
    """`auto` names the newest one, skips it and takes the one before; its path is an error."""
    found, said = find(path.parent)
    assert found is not None and found.name == "step-000010.pt"
    assert said.startswith(f"skipped {path}: no whole checkpoint (")
    with pytest.raises(UserError, match="step-000020.pt: no whole checkpoint"):
        find(path.parent, path)


# Whole or not


def test_what_is_saved_is_found_and_loaded(folder, state):
    path, said = find(folder)
    assert path.name == "step-000020.pt" and said == ""
    assert equal(load_checkpoint(path), state)
    check_same_run(state, TINY, DATA)
    older = folder / "step-000010.pt"
    assert find(folder, older) == (older, "")


def test_a_file_that_is_cut_off_or_has_a_flipped_bit_is_found(folder):
    """Not those of torch.save's padding, or of fields that say nothing of the content."""
    path, random = folder / "step-000020.pt", np.random.default_rng(0)
    content = path.read_bytes()
    damaged = [content[:size] for size in (*range(0, len(content), 1000), len(content) - 1)]
    with zipfile.ZipFile(path) as file:
        parts = [file.read(entry) for entry in file.infolist()]
    for part in filter(None, parts):
        flipped = bytearray(content)
        flipped[content.index(part) + random.integers(len(part))] ^= 1 << random.integers(8)
        damaged.append(flipped)
    assert len(damaged) > 50
    for each in damaged:
        path.write_bytes(each)
        assert_skipped(path)


def test_nothing_whole_starts_afresh(folder):
    for path in folder.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    found, said = find(folder)
    assert found is None
    assert "step-000010.pt" in said and "step-000020.pt" in said
    assert said.endswith(f"no checkpoint in {folder}: starting afresh")


@pytest.mark.parametrize("resume", ["step-000030.pt", ".", "/", "..", "missing/step-000010.pt"])
def test_path_that_is_no_checkpoint_says_why(folder, monkeypatch, resume):
    monkeypatch.chdir(folder)
    reason = "No such file or directory" if "step" in resume else "Is a directory"
    with pytest.raises(UserError) as caught:
        find(folder, resume)
    assert str(caught.value) == f"{resume}: no whole checkpoint ({reason}); name another"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("keys", [
    ("model", "lm_head.weight"), ("model", "backout_lambda"), ("optimizers", "head", "square"),
    ("optimizers", "mlp", "mean")], ids=str)
def test_checkpoint_that_is_not_finite_is_never_taken(folder, state, keys, value):
    tensor = functools.reduce(dict.__getitem__, keys, state).clone()
    tensor.view(-1)[-1] = value
    torch.save(changed(state, keys, tensor), folder / "step-000020.pt")
    assert_skipped(folder / "step-000020.pt")


@pytest.mark.parametrize("key, value", [
    ("step", "x"), ("step", None), ("step", -1), ("step", 2.5), ("hyperparameters", None),
    ("hyperparameters", [1]), ("hyperparameters", dict(no_such=1)), ("model", None),
    ("model", "text"), ("optimizers", None), ("optimizers", [1]), ("loader", None),
    ("loader", (1, 2, 3)), ("loader", (0, -1)), ("train_time_ms", None),
    ("train_time_ms", "a minute"), ("train_time_ms", math.nan), ("threads", None), ("threads", 0)])
def test_whole_file_without_or_with_odd_parts_is_refused(folder, state, key, value):
    torch.save(changed(state, [key], value), folder / "step-000020.pt")
    assert_skipped(folder / "step-000020.pt")


class Malice:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_pickle_that_runs_code_is_refused(folder, monkeypatch):
    """Whatever its checksums say: only the loading stands in its way."""
    monkeypatch.chdir(folder)
    path = folder / "step-000020.pt"
    torch.save(dict(step=20, hyperparameters={}, data=Malice()), path)
    assert_skipped(path)
    assert not Path("executed").exists()
    with contextlib.suppress(RuntimeError):
        torch.load(path, weights_only=False)
    assert Path("executed").exists(), "it was no threat at all"


# Written and kept


def test_newest_two_and_the_last_are_kept(folder, state):
    for step, keep in ((30, 2), (40, 2), (45, 3)):
        write_checkpoint(path := folder / f"step-0000{step}.pt", state | dict(step=step), keep)
        os.utime(path, (step, step))
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-0000{step}.pt" for step in (30, 40, 45)]


def test_checkpoint_just_written_is_kept(folder, state):
    """Also by a run that was resumed from an old one and has later ones in its folder."""
    write_checkpoint(folder / "step-000012.pt", state | dict(step=12), keep=2)
    assert find(folder, folder / "step-000012.pt")[0]


def test_stale_temporary_files_do_no_harm(folder, state):
    """But for a folder of that name."""
    for name in ("step-000020.tmp", "step-000030.tmp"):
        (folder / name).write_bytes(b"half of it")
    assert find(folder)[0].name == "step-000020.pt"
    write_checkpoint(folder / "step-000030.pt", state | dict(step=30), keep=2)
    assert find(folder)[0].name == "step-000030.pt"
    assert not (folder / "step-000030.tmp").exists()
    (folder / "step-000040.tmp").mkdir()
    with pytest.raises(UserError, match="step-000040.pt: not written"):
        write_checkpoint(folder / "step-000040.pt", state | dict(step=40), keep=2)


def test_a_checkpoint_is_synced_before_it_gets_its_name(tmp_path, state, monkeypatch):
    events, replace, fsync = [], Path.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(
        ("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")))), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (events.append(
        ("replace", path, target)), replace(path, target)))
    write_checkpoint(tmp_path / "step-000020.pt", state, keep=2)
    (sync, data), (move, source, target) = events
    assert (sync, move) == ("fsync", "replace")
    assert data == source != target and target.name == "step-000020.pt"


@pytest.mark.parametrize("owner, name", [(torch, "save"), (os, "fsync"), (Path, "replace")])
def test_write_that_fails_leaves_earlier_checkpoints(folder, state, monkeypatch, owner, name):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(UserError, match="step-000030.pt: not written .*No space left"):
        write_checkpoint(folder / "step-000030.pt", state | dict(step=30), keep=2)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# Of the same run


ALLOWED = dict(
    num_iterations=200, val_every=7, save_every=3, run_id="y", resume="step-000020.pt",
    warmup_steps=0, head_chunks=2, target_loss=3.0, train_files="elsewhere/*.bin", device="auto",
    sequences_per_forward=2, val_tokens=1, val_files="else/*.bin")
REFUSED = [each for each in dataclasses.fields(TINY) if each.name not in ALLOWED]


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: field.name)
def test_other_mathematics_is_refused_by_name(state, field):
    value = getattr(TINY, field.name)
    other = {bool: not value, str: "else", tuple: (7, 9)}.get(field.type)
    other = value + 1 if other is None else other
    with pytest.raises(UserError) as caught:
        check_same_run(state, dataclasses.replace(TINY, **{field.name: other}), DATA)
    said = str(caught.value)
    assert said == (f"auto: of another run; what differs: {field.name} {value!r}, now {other!r}")


@pytest.mark.parametrize("name", ALLOWED)
def test_what_leaves_the_mathematics_alone_may_change(state, name):
    cfg = dataclasses.replace(TINY, **{name: ALLOWED[name]})
    assert cfg != TINY
    check_same_run(state, cfg, DATA)


def test_every_difference_is_named(state):
    cfg = dataclasses.replace(TINY, seed=1, muon_lr=0.06, num_iterations=19)
    with pytest.raises(UserError, match="seed 0, now 1; muon_lr 0.08, now 0.06; "
                                        "num_iterations, its step is 20; the training data"):
        check_same_run(state, cfg, "another")


def test_a_finished_run_asks_for_no_training_data(state):
    finished = state | dict(step=TINY.num_iterations)
    check_same_run(finished, TINY, "")
    with pytest.raises(UserError, match="seed 0, now 1"):
        check_same_run(finished, dataclasses.replace(TINY, seed=1), "")
