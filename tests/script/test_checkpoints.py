"""Checkpoints on disk: found whole or not at all, kept, refused, written durably. In process."""

import dataclasses
import math
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny_runs
import torch
from tiny_runs import one_error, tiny

import train_gpt
from train_gpt import POCKET, UserError, find_checkpoint, write_checkpoint

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures
FOLDER = Path("logs/x")
OLDER, NEWEST = FOLDER / "step-000004.pt", FOLDER / "step-000006.pt"


def equal(value, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(value, expected)
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(equal(value[k], expected[k]) for k in value)
    return value == expected


def changed(state, keys, value):
    """The state with another value at a path of keys, or with nothing there for None."""
    first, *rest = keys.split(maxsplit=1)
    others = {key: each for key, each in state.items() if key != first}
    if rest:
        value = changed(state[first], rest[0], value)
    return others if value is None else others | {first: value}


@pytest.fixture
def state(run):
    """What a run has saved at its end, in its folder the last of three."""
    run(save_every=2)
    return torch.load(NEWEST, weights_only=True)


def assert_skipped(capsys, said="no whole checkpoint"):
    """`auto` names the newest one, skips it and takes the one before; its path is an error."""
    path, saved = find_checkpoint("auto", "x")
    assert path == str(OLDER) and saved["step"] == 4
    assert capsys.readouterr().err.startswith(f"skipped {NEWEST}: {said}")
    with pytest.raises(UserError, match=f"step-000006.pt: {said}"):
        find_checkpoint(str(NEWEST), "")


def test_damaged_files_are_skipped(state, capsys):
    """Empty, cut off, with a flipped bit, or with the offset of a part before the file."""
    content = NEWEST.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(state["model"]["lm_head.weight"].numpy().tobytes()) + 7] ^= 1
    for damaged in (b"", content[:-1], flipped):
        NEWEST.write_bytes(damaged)
        assert_skipped(capsys)
    for path in FOLDER.glob("*.pt"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="--resume auto: logs/x has no other; name another --run"):
        find_checkpoint("auto", "x")
    assert find_checkpoint("auto", "y") == ("", train_gpt.NEW_RUN)


def test_memory_that_runs_out_is_no_damage(state, monkeypatch):
    """The file may be whole."""
    monkeypatch.setattr(torch, "load", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        find_checkpoint("auto", "x")


class Malice:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_whole_files_with_odd_parts_are_skipped(state, capsys):
    """Whatever their checksums say: code is not run, and no default is taken."""
    for keys, value, said in (
        ("settings", None, "of another version of the script"),
        ("settings muon_lr", None, "of another version of the script"),
        ("data_digest", Malice(), "no whole checkpoint"),
    ):
        torch.save(changed(state, keys, value), NEWEST)
        assert_skipped(capsys, said)
    assert not Path("executed").exists()


def test_a_whole_file_that_does_not_fit_says_what(run, state, monkeypatch):
    mean = state["optimizers"]["mlp"]["mean"]
    for keys, value, named in (
        ("model lm_head.weight", torch.zeros(3, 32), "size mismatch for lm_head.weight"),
        ("optimizers head", None, "does not fit ('head')"),
        # State of another length is neither cut nor padded.
        ("optimizers mlp mean", torch.cat([mean, mean[:1]]), "does not fit (shape"),
        ("model", "text", "does not fit"),
        ("settings muon_lr", math.nan, "--muon_lr nan: not as in the checkpoint"),
    ):
        torch.save(changed(state, keys, value), NEWEST)
        line = one_error(run(["--resume", str(NEWEST)]))
        assert named in line and (f"{NEWEST}: " in line or "settings" in keys)
    line = one_error(run(["--resume", str(OLDER), "--num_iterations", "3"]))
    assert f"--num_iterations 3: {OLDER} is of a later step" in line


def test_a_resumed_run_has_the_tables_and_the_settings_before_shorten(run, state, monkeypatch):
    assert state["settings"] == dataclasses.asdict(tiny(save_every=2, head_chunks=1)) | {
        name: state["settings"][name] for name in ("train_files", "val_files")}
    longer = dataclasses.replace(POCKET["extension"], long_window=320)
    monkeypatch.setitem(POCKET, "extension", longer)
    line = one_error(run(["--resume", str(OLDER)]))
    assert "extension in train_gpt.py: not as in the checkpoint; a resumed run may" in line


def test_a_run_that_another_script_resumes_says_so(run, tmp_path, monkeypatch):
    """So that the ledger takes it for no run of either. Another run's log takes none of it."""
    run(save_every=2)
    NEWEST.unlink()
    whole = run(["--resume", str(OLDER)])
    assert f"\nresumed at step:4 from {OLDER}\n" in whole.log
    line = one_error(run(["--resume", str(OLDER), "--run_id", "y"]))
    assert f"--resume {OLDER}: not of --run_id y; leave --run_id out" in line
    monkeypatch.setattr(train_gpt, "SOURCE", train_gpt.SOURCE + b"# changed\n")
    mixed = run(["--resume", str(OLDER), "--run_id", "x"])
    assert f"\nresumed at step:4 from {OLDER}, which another script wrote\n" in mixed.log


def test_a_checkpoint_and_the_two_before_it_are_kept(run):
    """By their steps: a clock may go back, and later ones may be of another branch."""
    run(save_every=2, num_iterations=8)
    saved = sorted(FOLDER.glob("*.pt"))
    assert [path.name for path in saved] == [f"step-00000{step}.pt" for step in (4, 6, 8)]
    for path in saved:  # none is the newest by its time
        os.utime(path, (4e9, 4e9))
    steps = [2, 10, 12, 5]
    kept = [{2, 4, 6, 8}, {6, 8, 10}, {8, 10, 12}, {5, 8, 10, 12}]
    for step, others in zip(steps, kept):
        write_checkpoint(FOLDER / f"step-{step:06d}.pt", dict(step=step))
        assert {int(path.stem[5:]) for path in FOLDER.glob("*.pt")} == others


def test_a_checkpoint_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events, replace, fsync = [], Path.replace, os.fsync

    def synced(number):
        events.append(Path(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    def replaced(path, target):
        events.append(target)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_checkpoint(path := tmp_path / "step-000020.pt", dict(step=20))
    assert len(events) == 2 and events[0].parent == tmp_path and events[1] == path
