"""Checkpoints on disk: found whole or not at all, kept, refused, written durably. In process."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO

import train_gpt
from train_gpt import UserError, load_checkpoint, write_checkpoint

TINY = train_gpt.parse_args(
    """--preset pocket --model_dim 16 --head_dim 16 --attention_pattern L --value_embed_pattern 0
    --vocab_size 16 --eot_token 15 --val_seq_len 128 --num_iterations 100 --device cpu
    --run_id x""".split())
DATA = "0123456789abcdef"


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
    settings = {name: train_gpt.show(value) for name, value in dataclasses.asdict(cfg).items()}
    return dict(step=20, settings=settings, data=DATA, threads=1,
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


def loaded(state):
    """The state as it is once it is loaded."""
    return state | dict(settings=dataclasses.asdict(TINY))


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
def find(capsys):
    """`find(folder)`: the path that is found there, its state, and what was said about it."""
    def find_in(folder):
        return *train_gpt.newest_checkpoint(folder), capsys.readouterr().err

    return find_in


def assert_skipped(path, find):
    """`auto` names the newest one, skips it and takes the one before; its path is an error."""
    found, state, said = find(path.parent)
    assert Path(found).name == "step-000010.pt" and state["step"] == 10
    assert said.startswith(f"skipped {path}: no whole checkpoint of this script (")
    with pytest.raises(UserError, match="step-000020.pt: no whole checkpoint"):
        load_checkpoint(path)


# Whole or not


def test_what_is_saved_is_found_and_loaded(folder, state, find):
    path, found, said = find(folder)
    assert path == str(folder / "step-000020.pt") and said == ""
    assert equal(found, loaded(state))


def test_damaged_files_are_skipped(folder, state, find):
    """Empty, cut off or with a flipped bit; more damage is in test_fuzz.py."""
    path = folder / "step-000020.pt"
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(state["model"]["lm_head.weight"].numpy().tobytes()) + 7] ^= 1
    for damaged in (b"", content[:1000], content[:-1], flipped):
        path.write_bytes(damaged)
        assert_skipped(path, find)
    (folder / "step-000010.pt").write_bytes(content[:-1])
    found, new, said = find(folder)
    assert (found, new) == ("", train_gpt.NEW_RUN)
    assert "step-000010.pt" in said and "step-000020.pt" in said


def test_a_flipped_bit_is_seen_without_asserts_too(folder, state):
    """Under `python -O`, which leaves them out."""
    path = folder / "step-000020.pt"
    content = bytearray(path.read_bytes())
    content[content.index(state["model"]["lm_head.weight"].numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)
    code = f"import train_gpt, pathlib; train_gpt.load_checkpoint(pathlib.Path({str(path)!r}))"
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=REPO, text=True,
                          capture_output=True)
    assert "UserError" in done.stderr and "is damaged" in done.stderr


def test_a_fifo_or_a_folder_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match="no such checkpoint"):
            load_checkpoint(path)


class Malice:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


ODD = [  # where in a state, and a value that no run saves; None: nothing is there
    *itertools.product(["settings"], [None, [1], dict(no_such="1")]),
    *itertools.product(["settings muon_lr"], [None, "fast", "nan", "-1"]),  # no default is taken
    *itertools.product(["settings seed"], ["False", "1.5"]),
    *itertools.product(["settings seq_lens"], ["", "128.0"]),
    *itertools.product(["model"], [None, "text"]), *itertools.product(["optimizers"], [None, [1]]),
    ("data", Malice()),
    ("model backout_lambda", torch.tensor(1)), ("optimizers head mean", torch.zeros(9, dtype=bool)),
    ("model lm_head.weight", torch.tensor([0, math.nan])),
    ("model backout_lambda", torch.tensor(-math.inf)),
    ("optimizers head square", torch.tensor([math.inf, 0])),
    ("optimizers mlp mean", torch.tensor([[0], [math.nan]]))]


@pytest.mark.parametrize("keys, value", ODD, ids=lambda part: str(part)[:20])  # no address
def test_whole_file_with_odd_parts_is_refused(folder, state, monkeypatch, find, keys, value):
    """Whatever its checksums say: code is not run, and what is not finite never taken."""
    monkeypatch.chdir(folder)
    torch.save(changed(state, keys.split(), value), folder / "step-000020.pt")
    assert_skipped(folder / "step-000020.pt", find)
    assert not Path("executed").exists()


# Written and kept


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
