"""The loader against loops over tokens, for any ranks; what it says of bad shards."""

import dataclasses
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import read_shard
from lineage_oracles import packed_streams
from tiny_runs import one_error

import train_gpt
from train_gpt import Hyperparameters, TokenLoader, UserError

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures

VOCAB = 257
EOT = VOCAB - 1
TINY = dataclasses.replace(
    Hyperparameters(), vocab_size=VOCAB, eot_token=EOT, sequences_per_step=8,
    sequences_per_forward=2, max_document_tokens=0)


def make_loaders(train_files, world_size=1, place=(0, 0), **changes):
    cfg = dataclasses.replace(TINY, train_files=str(train_files), **changes)
    common = dict(world_size=world_size, device=torch.device("cpu"))
    ranks = [SimpleNamespace(rank=rank, **common) for rank in range(world_size)]
    return [TokenLoader(cfg, each, *place) for each in ranks]


def assert_step(loaders, expected):
    """All ranks' rows of one step are (sequences, length + 1), in the order of the ranks."""
    now = SimpleNamespace(seq_len=expected.shape[1] - 1)
    batches = []
    for loader in loaders:
        mine = loader.next_step(now)
        assert sum(len(inputs) for inputs, _ in mine) == len(expected) // len(loaders)
        assert all(len(inputs) <= loader.cfg.sequences_per_forward for inputs, _ in mine)
        batches += mine
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
    np.testing.assert_array_equal(inputs, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])


def packed_steps(folder, sequences, lengths, limit):
    """The steps of some lengths, each (sequences, length + 1), from the shards over and over, of
    documents of at most so many tokens."""
    paths = sorted(folder.glob("tiny_train_*.bin"))
    shards = itertools.cycle([read_shard(path).astype(np.int64) for path in paths])
    limits = [limit] * len(lengths)
    steps = packed_streams(shards, lengths, sequences, EOT, limits)
    return [np.array([[*row.inputs, row.targets[-1]] for row in step]) for step in steps]


@pytest.mark.parametrize(("world_size", "per_forward", "later", "limit"), [
    (1, 3, 8, 9999), (4, 1, 2, 90)])
def test_ranks_share_the_steps_that_a_loop_over_documents_gives(
    tmp_path, write_shard, world_size, per_forward, later, limit
):
    """Sequences grow while the run goes on; other ranks take each step too, from its place. Shards
    begin in a document, one has none, and in one some are of a single token."""
    chance = np.random.default_rng(0)
    for index, count in enumerate([10_000, 6144, 9000, 6145]):
        tokens = chance.integers(0, EOT, count)
        tokens[chance.random(count) < [0.005, 0, 0.005, 0.01][index]] = EOT
        if index == 2:
            tokens[700:703] = EOT
        write_shard(tmp_path / f"tiny_train_{index}.bin", tokens)
    files = tmp_path / "tiny_train_*.bin"
    changes = dict(max_document_tokens=limit, sequences_per_forward=per_forward)
    loaders = make_loaders(files, world_size, **changes)
    for expected in packed_steps(tmp_path, 8, [128] * 9 + [256] * 9 + [384] * 18, limit):
        assert all(loader.place == loaders[0].place for loader in loaders)
        others = make_loaders(files, later, loaders[0].place, **changes)
        assert_step(loaders, expected)
        assert_step(others, expected)
        assert others[0].place == loaders[0].place
    assert loaders[0].place[0] > 4, "the second time through the four shards"


@pytest.mark.parametrize(("stride", "of_80", "of_24"), [(1, 1, 1), (5, 7, 5)])
def test_without_documents_a_stride_deals_each_sequence_once(
    tiny_shards, tmp_path, stride, of_80, of_24
):
    """Sequence k is the (k · stride modulo N)-th of the shard's N, by the first stride from the
    given one on that is coprime to N: 80 sequences of 128, 24 of 384, which begin at a multiple.
    For 88 of 128 there is one token too few."""
    files = tiny_shards([88 * 128])
    loaders = make_loaders(files, world_size=4, sequence_stride=stride)
    tokens = read_shard(tmp_path / "tiny_train_000000.bin")
    steps = [(first, of_80, 80, 128) for first in [*range(0, 80, 8)] * 2 + [0]]
    for first, used, count, length in [*steps, (3, of_24, 24, 384)]:
        starts = [k * used % count * length for k in range(first, first + 8)]
        assert_step(loaders, np.array([tokens[start:][: length + 1] for start in starts]))


def test_a_glob_is_looked_for_here_then_in_the_repository_and_sorted(
    tmp_path, monkeypatch, write_shard
):
    theirs = [write_shard(tmp_path / f"{name}.bin", [1]) for name in ("b_10", "b_02", "a_99")]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(train_gpt, "SCRIPT", tmp_path / "records" / "one" / "train_gpt.py")
    monkeypatch.chdir(here)
    assert train_gpt.find_shards("*.bin") == theirs[::-1]
    write_shard(here / "y.bin", [1])
    assert train_gpt.find_shards("*.bin") == [Path("y.bin")]


def test_the_digest_tells_names_and_sizes_apart(tmp_path, write_shard):
    """Also where the first MiB, of which it is beside these, is the same."""
    def digest(count, name):
        write_shard(tmp_path / name, np.zeros(count))
        (loader,) = make_loaders(tmp_path / name)
        return loader.digest

    first = digest(600_000, "0.bin")
    others = digest(600_001, "0.bin"), digest(600_000, "1.bin")
    assert first == digest(600_000, "0.bin") and first not in others


GOOD = np.arange(2000) % VOCAB
FOREIGN = np.where(np.arange(2000) == 1234, 400, GOOD)
NO_SHARD = "no whole shard of version 1; make or fetch it again"
FIRST, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"


@pytest.mark.parametrize(("name", "how", "named"), [
    (FIRST, dict(magic=20240801), NO_SHARD),
    (SECOND, dict(count=2001), NO_SHARD),
    (VAL, 5023, NO_SHARD),
    (FIRST, dict(tokens=FOREIGN), "has token 400; raise --vocab_size 257"),
    (VAL, dict(tokens=FOREIGN), "has token 400; raise --vocab_size 257")])
def test_a_bad_shard_ends_in_one_line_and_2(run, tmp_path, write_shard, name, how, named):
    """Written with something wrong, or cut off after some bytes; no log is begun."""
    bad = tmp_path / name
    if isinstance(how, dict):
        write_shard(bad, **dict(tokens=GOOD) | how)
    else:
        bad.write_bytes(write_shard(bad, GOOD).read_bytes()[:how])
    line = one_error(run())
    assert str(bad) in line and named in line
    assert not (tmp_path / "logs").exists()


def test_a_glob_without_files_names_the_commands_that_make_them(run, tmp_path):
    """A folder or a fifo is no file."""
    os.mkfifo(tmp_path / "a_fifo")
    for flags in (dict(train_files="a_fifo"), dict(val_files="my/own/*.bin")):
        line = one_error(run(**flags))
        assert repr(*flags.values()) in line and "python data/pocket.py" in line


def test_shards_without_documents_for_a_step(run):
    said = "no shard has documents for a step; shorten the sequences or lower --sequences_per_step"
    assert said in one_error(run(max_document_tokens=2))


def test_a_number_of_ranks_that_does_not_divide_the_sequences(tiny_shards):
    with pytest.raises(UserError, match=r"--sequences_per_step 8: the 3 ranks must divide it"):
        make_loaders(tiny_shards([2000]), 3)
