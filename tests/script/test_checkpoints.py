"""Checkpoints on disk: found whole or not at all, kept, refused, written durably. In process."""

import contextlib
import dataclasses
import errno
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt

TINY = dataclasses.replace(
    train_gpt.Hyperparameters(**train_gpt.PRESETS["pocket"]), model_dim=32, head_dim=16,
    attention_pattern="LS", value_embed_pattern="0.", train_seq_len=128, val_seq_len=128,
    num_iterations=100, device="cpu", run_id="x", resume="auto")
DATA = [["train_0.bin", 5000, "3f"], ["train_1.bin", 4000, "a7"]]
KIB = 1024


@pytest.fixture(scope="module")
def ranks():
    return train_gpt.Ranks(TINY)


@pytest.fixture(scope="module")
def state(ranks):
    """What a run of TINY saves at step 20, every tensor of it drawn from a normal distribution."""
    model = train_gpt.GPT(TINY)
    optimizers = train_gpt.build_optimizers(model, TINY, ranks)
    generator = torch.Generator().manual_seed(0)
    for x in [o.weights for o in optimizers] + [x for o in optimizers for x in o.state.values()]:
        x.normal_(generator=generator)
    return dict(step=20, hyperparameters=dataclasses.asdict(TINY), data=DATA,
                loader=(1, 512), train_time_ms=1234.5, model=model.state_dict(),
                optimizers={o.name: o.full_state() for o in optimizers})


@pytest.fixture
def folder(tmp_path, state, ranks):
    """A folder with the checkpoints of steps 10 and 20."""
    for step in (10, 20):
        train_gpt.save_checkpoint(tmp_path, state | dict(step=step), ranks, keep=2)
    return tmp_path


class Lines:
    """In place of a log: its folder, and the lines that it is given."""

    def __init__(self, folder):
        self.folder, self.lines = folder, []

    def __call__(self, line):
        self.lines.append(line)


@pytest.fixture
def find(folder, ranks):
    """`find(resume="auto")` gives the path found in the folder, and what was said about it."""
    def find(resume="auto"):
        cfg, log = dataclasses.replace(TINY, resume=str(resume)), Lines(folder)
        return train_gpt.find_checkpoint(cfg, ranks, log), "\n".join(log.lines)

    return find


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def equal(value, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(value, expected)
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(equal(value[k], expected[k]) for k in value)
    return value == expected


# Whole or not


def test_what_is_saved_is_found_and_loaded(find, state):
    path, said = find()
    assert path.name == "step-000020.pt" and "skipped" not in said
    assert equal(train_gpt.load_checkpoint(path), state)
    train_gpt.check_same_run(path, state, TINY, DATA)


def assert_skipped(find, path):
    """`auto` names the newest one, skips it and takes the one before; its path is an error."""
    found, said = find()
    assert found is not None and found.name == "step-000010.pt"
    assert "step-000020.pt" in said
    with pytest.raises(train_gpt.UserError, match="step-000020.pt"):
        find(path)


def test_truncation_anywhere_is_found(find, folder):
    path = folder / "step-000020.pt"
    content = path.read_bytes()
    sizes = [*range(0, len(content), 64 * KIB), len(content) - 1]
    assert len(sizes) > 5
    for size in sizes:
        path.write_bytes(content[:size])
        assert_skipped(find, path)


def test_any_flipped_byte_of_the_state_is_found(find, folder):
    """Those of torch.save's padding, and of fields that say nothing of the content, do no harm."""
    path, random = folder / "step-000020.pt", np.random.default_rng(0)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        parts = [file.read(entry) for entry in file.infolist()]
    positions = [content.index(part) + random.integers(len(part)) for part in parts if part]
    assert len(positions) > 20
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << random.integers(8)
        path.write_bytes(flipped)
        assert_skipped(find, path)
    path.write_bytes(content)
    assert find()[0] == path


def test_nothing_whole_starts_afresh(find, folder):
    for path in folder.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    found, said = find()
    assert found is None
    assert "step-000010.pt" in said and "step-000020.pt" in said and "afresh" in said


@pytest.mark.parametrize("resume", ["step-000030.pt", ".", "/", "..", "missing/step-000010.pt"])
def test_path_that_is_no_checkpoint_is_an_error(find, folder, monkeypatch, resume):
    monkeypatch.chdir(folder)
    with pytest.raises(train_gpt.UserError, match="--resume"):
        find(resume)


def test_path_takes_an_older_checkpoint(find, folder):
    path = folder / "step-000010.pt"
    assert find(path)[0] == path


# Kept


def test_newest_two_and_the_last_are_kept(tmp_path, state, ranks):
    for step in (10, 20, 30, 40):
        train_gpt.save_checkpoint(tmp_path, state | dict(step=step), ranks, keep=2)
    train_gpt.save_checkpoint(tmp_path, state | dict(step=45), ranks, keep=3)
    assert names(tmp_path) == [f"step-0000{step}.pt" for step in (30, 40, 45)]


def test_checkpoint_just_written_is_kept(folder, state, ranks, find):
    """Also by a run that was resumed from an old one and has later ones in its folder."""
    train_gpt.save_checkpoint(folder, state | dict(step=12), ranks, keep=2)
    assert find(folder / "step-000012.pt")[0]


def test_stale_temporary_files_do_no_harm(folder, state, ranks, find):
    for name in ("step-000020.tmp", "step-000030.tmp"):
        (folder / name).write_bytes(b"half of it")
    assert find()[0].name == "step-000020.pt"
    train_gpt.save_checkpoint(folder, state | dict(step=30), ranks, keep=2)
    assert find()[0].name == "step-000030.pt"
    assert not (folder / "step-000030.tmp").exists()


# Written


def test_a_checkpoint_is_synced_before_it_gets_its_name(tmp_path, state, ranks, monkeypatch):
    events, replace, fsync = [], Path.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(
        ("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")))), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (events.append(
        ("replace", path, target)), replace(path, target)))
    train_gpt.save_checkpoint(tmp_path, state, ranks, keep=2)
    (sync, data), (move, source, target) = events
    assert (sync, move) == ("fsync", "replace")
    assert data == source != target and target.name == "step-000020.pt"


@pytest.mark.parametrize("failing", ["save", "fsync"])
def test_full_disk_leaves_earlier_checkpoints(folder, state, ranks, find, monkeypatch, failing):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {path: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(*{"save": (torch, "save"), "fsync": (os, "fsync")}[failing], fail)
        with pytest.raises(train_gpt.UserError, match="step-000030.pt.*No space left"):
            train_gpt.save_checkpoint(folder, state | dict(step=30), ranks, keep=2)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert find()[0].name == "step-000020.pt"


# Refused


DIFFERENT = dict(
    seed=1, muon_lr=0.06, model_dim=64, attention_pattern="LL", vocab_multiple=64, adam_every=3,
    train_seq_len=256, sequences_per_step=8, cooldown_frac=0.5, window_stages="1 2 2 2",
    backout_layer=1, final_window=2, extension_steps=5,
    final_lr_frac=0.2, logit_cap=15.0, momentum_warmup=10, num_iterations=19, skip_layer=1,
    length_stages="1 2", lr_stages="100 150", targets_ahead=2, freeze_steps=6, embed_std=0.1,
    smear_lr=1e-4, muon_decay=1.0, adam_decay=0.1,
    align_documents=True, max_document_tokens=512)
ALLOWED = dict(
    num_iterations=200, val_every=7, save_every=3, run_id="y", resume="step-000020.pt",
    warmup_steps=0, head_chunks=2, target_loss=3.0, train_files="elsewhere/*.bin",
    sequences_per_forward=2, val_tokens=1, val_files="else/*.bin")


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_mathematics_is_refused_by_name(state, name):
    cfg = dataclasses.replace(TINY, **{name: DIFFERENT[name]})
    assert getattr(cfg, name) != getattr(TINY, name)
    with pytest.raises(train_gpt.UserError) as caught:
        train_gpt.check_same_run(Path("step-000020.pt"), state, cfg, DATA)
    others = {field.name for field in dataclasses.fields(TINY)} - {name}
    said = str(caught.value)
    assert name in said and "step-000020.pt" in said
    if name != "num_iterations":
        assert repr(DIFFERENT[name]) in said and repr(getattr(TINY, name)) in said
    assert not [other for other in others if f" {other} " in said]


@pytest.mark.parametrize("name", ALLOWED)
def test_what_leaves_the_mathematics_alone_may_change(state, name):
    cfg = dataclasses.replace(TINY, **{name: ALLOWED[name]})
    assert getattr(cfg, name) != getattr(TINY, name)
    train_gpt.check_same_run(Path("step-000020.pt"), state, cfg, DATA)


def test_every_difference_is_named(state):
    cfg = dataclasses.replace(TINY, seed=1, muon_lr=0.06)
    with pytest.raises(train_gpt.UserError, match="(?s)(?=.*seed)(?=.*muon_lr)(?=.*data)"):
        train_gpt.check_same_run(Path("step-000020.pt"), state, cfg, DATA[:1])


@pytest.mark.parametrize("data", [
    DATA[:1], DATA[::-1], [*DATA, ["train_2.bin", 1, "00"]], [["train_0.bin", 5000, "40"], DATA[1]],
    [["train_0.bin", 5001, "3f"], DATA[1]], [["train_2.bin", 5000, "3f"], DATA[1]]])
def test_other_data_are_refused(state, data):
    with pytest.raises(train_gpt.UserError, match="data"):
        train_gpt.check_same_run(Path("step-000020.pt"), state, TINY, data)


def test_a_finished_run_asks_for_no_training_data(state):
    finished = state | dict(step=TINY.num_iterations)
    train_gpt.check_same_run(Path("step-000100.pt"), finished, TINY, None)
    with pytest.raises(train_gpt.UserError, match="seed 0, now 1"):
        other = dataclasses.replace(TINY, seed=1)
        train_gpt.check_same_run(Path("step-000100.pt"), finished, other, None)


class Malice:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("write", [
    lambda path: torch.save(dict(step=20, hyperparameters={}, data=Malice()), path),
    lambda path: torch.save(Malice(), path, _use_new_zipfile_serialization=False),
    lambda path: path.write_bytes(pickle.dumps(Malice())),
])
def test_pickle_that_runs_code_is_refused(folder, monkeypatch, write):
    """Whatever its checksums say: only the loading stands in its way."""
    monkeypatch.chdir(folder)
    path = folder / "step-000020.pt"
    write(path)
    with pytest.raises(train_gpt.UserError, match="step-000020.pt"):
        train_gpt.load_checkpoint(path)
    assert not Path("executed").exists()
    with contextlib.suppress(RuntimeError):
        torch.load(path, weights_only=False)
    assert Path("executed").exists(), "it was no threat at all"


@pytest.mark.parametrize("key, value", [
    ("step", "x"), ("step", None), ("hyperparameters", None), ("hyperparameters", [1]),
    ("model", None), ("optimizers", None), ("loader", None), ("data", None),
    ("train_time_ms", None)])
def test_state_without_or_with_odd_parts_is_refused(folder, state, key, value):
    """`None` is a part that is missing."""
    path = folder / "step-000020.pt"
    odd = {k: v for k, v in state.items() if k != key} | ({} if value is None else {key: value})
    torch.save(odd, path)
    with pytest.raises(train_gpt.UserError, match="step-000020.pt"):
        train_gpt.load_checkpoint(path)
