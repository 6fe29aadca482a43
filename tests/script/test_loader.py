"""The loader against loops over tokens, for any ranks; what it says of bad shards."""

import dataclasses
import itertools
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import read_shard
from lineage_oracles import packed_streams
from tiny_runs import one_error

import train_gpt
from train_gpt import Hyperparameters, TokenLoader, UserError, read_val_tokens

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures

VOCAB = 257
EOT = VOCAB - 1
SHORT = SimpleNamespace(seq_len=128)  # all that the loader asks of a schedule
TINY = dataclasses.replace(
    Hyperparameters(), vocab_size=VOCAB, eot_token=EOT, sequences_per_step=8,
    sequences_per_forward=2, max_document_tokens=0)


def make_cfg(train_files, **changes):
    return dataclasses.replace(TINY, train_files=train_files, **changes)


def make_loaders(cfg, world_size=1, place=(0, 0)):
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
        batches += mine
    for inputs, targets in batches:
        assert len(inputs) <= loaders[0].cfg.sequences_per_forward
        assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
    inputs, targets = (torch.cat(part).numpy() for part in zip(*batches, strict=True))
    np.testing.assert_array_equal(inputs, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])


def consecutive(shards, lengths, sequences):
    """One sequence after the other, with one target more; a longer one begins at its multiple."""
    tokens, position = (), 0
    for length in lengths:
        position = math.ceil(position / length) * length
        size = sequences * length
        while position + size > (len(tokens) - 1) // size * size:
            tokens, position = next(shards), 0
        yield [tokens[i : i + length + 1] for i in range(position, position + size, length)]
        position += size


def steps_of(shards, sequences, lengths, max_document_tokens=0):
    """The steps of some lengths, each (sequences, length + 1), from the shards over and over."""
    shards = itertools.cycle(shards)
    if not max_document_tokens:
        return list(map(np.array, consecutive(shards, lengths, sequences)))
    limits = [max_document_tokens] * len(lengths)
    steps = packed_streams(shards, lengths, sequences, EOT, limits)
    return [np.array([[*row.inputs, row.targets[-1]] for row in step]) for step in steps]


def read_tokens(folder):
    return [read_shard(path).astype(np.int64) for path in sorted(folder.glob("tiny_train_*.bin"))]


@pytest.mark.parametrize(("world_size", "per_forward", "later", "document"), [  # tokens, at most
    (1, 3, 8, 0), (2, 2, 1, 9999), (4, 1, 2, 90), (8, 3, 1, 90)])
def test_ranks_share_the_steps_that_a_loop_over_tokens_gives(
    tmp_path, write_shard, world_size, per_forward, later, document
):
    """Sequences grow while the run goes on; other ranks take each step too, from its place. Shards
    begin in a document; one has none, one has some of a single token, and in one the next document
    begins right where a sequence ends."""
    chance = np.random.default_rng(0)
    for index, count in enumerate([10_000, 6144, 9000, 6145, 12_000]):
        tokens = chance.integers(0, EOT, count)
        tokens[chance.random(count) < [0.005, 0, 0.005, 0.01, 0][index]] = EOT
        tokens[{2: slice(700, 703), 4: slice(20, None, 64)}.get(index, [])] = EOT
        write_shard(tmp_path / f"tiny_train_{index}.bin", tokens)
    cfg = make_cfg(f"{tmp_path}/tiny_train_*.bin", max_document_tokens=document,
                   sequences_per_forward=per_forward)
    loaders = make_loaders(cfg, world_size)
    steps = steps_of(read_tokens(tmp_path), 8, [128] * 9 + [256] * 9 + [384] * 18, document)
    for expected in steps:
        assert all(loader.place == loaders[0].place for loader in loaders)
        others = make_loaders(cfg, later, place=loaders[0].place)
        assert_step(loaders, expected)
        assert_step(others, expected)
        assert others[0].place == loaders[0].place
    assert loaders[0].place[0] > 5, "the second time through the five shards"


def test_shards_without_a_document_for_a_step(tmp_path, write_shard):
    write_shard(tmp_path / "0.bin", np.arange(2000) % EOT)
    (loader,) = make_loaders(make_cfg(f"{tmp_path}/*.bin", max_document_tokens=90))
    with pytest.raises(UserError, match="no shard has documents for a step; shorten the "):
        loader.next_step(SHORT)


@pytest.mark.parametrize("stride", [1, 5, 1_000_003])
def test_a_stride_deals_the_sequences_of_a_shard_each_once(tiny_shards, tmp_path, stride):
    """Sequence k of the shard's N is the (k · stride mod N)-th, by the first such stride coprime
    to N, and N is a whole number of steps."""
    cfg = make_cfg(tiny_shards([10 * 1024 + 700]), sequence_stride=stride)
    (tokens,) = read_tokens(tmp_path)
    count, used = 80, stride
    while np.gcd(used, count) != 1:
        used += 1
    loaders = make_loaders(cfg, world_size=4)
    order = []
    for first in [*range(0, count, 8)] * 2:
        starts = [k * used % count * 128 for k in range(first, first + 8)]
        assert_step(loaders, np.array([tokens[start : start + 129] for start in starts]))
        order += starts
    assert sorted(order) == sorted([index * 128 for index in range(count)] * 2)


def test_a_glob_is_looked_for_here_then_in_the_repository_and_sorted(
    tmp_path, monkeypatch, write_shard
):
    repository, here = tmp_path / "repository", tmp_path / "here"
    for folder in (repository, here):
        folder.mkdir()
    theirs = [write_shard(repository / f"{name}.bin", [1]) for name in ("b_10", "b_02", "a_99")]
    monkeypatch.setattr(train_gpt, "SCRIPT", repository / "records" / "one" / "train_gpt.py")
    monkeypatch.chdir(here)
    assert train_gpt.find_shards("*.bin") == theirs[::-1]
    write_shard(here / "y.bin", [1])
    assert [path.name for path in train_gpt.find_shards("*.bin")] == ["y.bin"]


def test_validation_tokens_are_the_first_ones_and_one_more(tmp_path, write_shard):
    tokens = np.random.default_rng(0).integers(0, VOCAB, size=900)
    for index, part in enumerate(np.split(tokens, [300, 301, 800])):
        write_shard(tmp_path / f"v{index}.bin", part)
    cfg = make_cfg("", val_files=f"{tmp_path}/v*.bin")
    for count in (1, 299, 300, 500, 899):
        found = read_val_tokens(dataclasses.replace(cfg, val_tokens=count))
        np.testing.assert_array_equal(found, tokens[: count + 1])
    with pytest.raises(UserError, match=r"--val_tokens 900: .* 900 tokens .*v\*\.bin"):
        read_val_tokens(dataclasses.replace(cfg, val_tokens=900))


def test_the_digest_tells_data_apart(tmp_path, write_shard):
    """By names, sizes and first MiB of the shards; where the folder lies does not matter."""
    def digest(folder, parts, edit=None, stem=""):
        (tmp_path / folder).mkdir()
        for index, part in enumerate(parts):
            write_shard(tmp_path / folder / f"{stem}{index}.bin", part)
        if edit:
            with (tmp_path / folder / "0.bin").open("r+b") as file:
                file.seek(edit)
                file.write(b"\7\0")
        return make_loaders(make_cfg(f"{tmp_path}/{folder}/*.bin"))[0].digest

    parts = [np.zeros(600_000), np.ones(1100)]
    first = digest("first", parts)
    assert len(first) == 16 and first == digest("moved", parts) == digest("late", parts, 2**20)
    others = [digest("swapped", parts[::-1]), digest("fewer", parts[:1]),
              digest("edited", parts, 2**20 - 2), digest("longer", [np.zeros(600_001), parts[1]]),
              digest("renamed", parts, stem="a")]
    assert len({first, *others}) == 6


GOOD = np.arange(2000) % VOCAB
FOREIGN = np.where(GOOD == 0, 1, GOOD)
FOREIGN[[1234, 1500]] = 300, 400
NO_SHARD = "no whole shard of version 1; make or fetch it again"
FIRST, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"


@pytest.mark.parametrize(("name", "how", "named"), [
    (FIRST, dict(magic=20240801), NO_SHARD), (SECOND, dict(count=2001), NO_SHARD),
    (FIRST, dict(count=-1), NO_SHARD), (SECOND, dict(count=2000 - 2**31), NO_SHARD),
    (VAL, 5023, NO_SHARD), (VAL, 8, NO_SHARD),
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


def test_a_foreign_token_of_a_later_shard_is_said_when_its_turn_comes(tmp_path, write_shard):
    write_shard(tmp_path / "0.bin", GOOD)
    write_shard(tmp_path / "1.bin", FOREIGN)
    (loader,) = make_loaders(make_cfg(f"{tmp_path}/*.bin"))
    loader.next_step(SHORT)
    with pytest.raises(UserError, match=r"1\.bin: has token 400"):
        loader.next_step(SHORT)


@pytest.mark.parametrize("pattern", ["my/own/*.bin", "a_fifo"])
@pytest.mark.parametrize("flag", ["train_files", "val_files"])
def test_a_glob_without_files_names_the_commands_that_make_them(run, tmp_path, flag, pattern):
    """A folder or a fifo is no file."""
    os.mkfifo(tmp_path / "a_fifo")
    line = one_error(run(**{flag: pattern}))
    assert repr(pattern) in line and "python data/pocket.py" in line


def test_a_number_of_ranks_that_does_not_divide_the_sequences(tiny_shards):
    with pytest.raises(UserError, match=r"--sequences_per_step 8: the 3 ranks must divide it"):
        make_loaders(make_cfg(tiny_shards([2000])), 3)
