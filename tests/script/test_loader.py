"""The loader against loops over tokens, for any ranks; what it says of bad shards."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import read_shard
from tiny_runs import one_error

import train_gpt
from train_gpt import Hyperparameters, Place, TokenLoader, UserError

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures

VOCAB = 257
EOT = VOCAB - 1
TINY = dataclasses.replace(
    Hyperparameters(), vocab_size=VOCAB, eot_token=EOT, sequences_per_step=8,
    sequences_per_forward=2, max_document_tokens=0, repeat_data=True)


def make_loaders(train_files, world_size=1, place=(), **changes):
    cfg = dataclasses.replace(TINY, train_files=str(train_files), **changes)
    common = dict(world_size=world_size, device=torch.device("cpu"))
    ranks = [SimpleNamespace(rank=rank, **common) for rank in range(world_size)]
    return [TokenLoader(cfg, each, Place(*place), print) for each in ranks]


def assert_step(loaders, expected):
    """All ranks' rows of one step are (sequences, length + 1), in the order of the ranks."""
    now = SimpleNamespace(seq_len=expected.shape[1] - 1)
    batches = []
    for loader in loaders:
        given = loader.tokens_given
        mine = loader.next_step(now)
        assert sum(len(inputs) for inputs, _ in mine) == len(expected) // len(loaders)
        assert all(len(inputs) <= loader.cfg.sequences_per_forward for inputs, _ in mine)
        assert loader.tokens_given - given == expected[:, 1:].size
        batches += mine
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
    np.testing.assert_array_equal(inputs, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])


def packed_steps(folder, sequences, lengths, limit):
    """The steps of some lengths, each (sequences, length + 1), from the shards over and over:
    documents one after another, of each at most so many tokens; what a row cuts off is left. A step
    that a shard cannot fill is made of the next one."""
    paths = sorted(folder.glob("tiny_train_*.bin"))
    lengths = list(lengths)
    for path in itertools.cycle(paths):
        documents = []
        for token in read_shard(path).tolist():
            if token == EOT:
                documents.append([])
            if documents:  # what stands before the first one is left
                documents[-1].append(token)
        while lengths:
            rows = [[] for _ in range(sequences)]
            for row in rows:
                while documents and len(row) <= lengths[0]:
                    row += documents.pop(0)[: min(limit, lengths[0] + 1 - len(row))]
            if len(rows[-1]) <= lengths[0]:
                break
            lengths.pop(0)
            yield np.array(rows)
        if not lengths:
            return


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


def test_without_documents_sequences_come_in_order(tiny_shards, tmp_path):
    """80 sequences of 128, twice, as for 88 there is one token too few; then some of 384."""
    loaders = make_loaders(tiny_shards([88 * 128]), world_size=4)
    tokens = read_shard(tmp_path / "tiny_train_000000.bin")
    steps = [(first, 128) for first in [*range(0, 80 * 128, 8 * 128)] * 2 + [0]]
    for first, length in [*steps, (8 * 128, 384)]:
        starts = [first + k * length for k in range(8)]
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


def test_the_digest_tells_names_sizes_and_any_part_of_the_content_apart(tmp_path, write_shard):
    """Of files larger than what is read of them."""
    def digest(count=600_000, name="0.bin", changed=slice(0)):
        tokens = 1 + np.arange(count) % 250
        tokens[changed] = 251
        write_shard(tmp_path / name, tokens)
        (loader,) = make_loaders(tmp_path / name)
        return loader.digests[-1]

    others = [digest(600_001), digest(name="1.bin")]
    others += [digest(changed=slice(start, start + 40_000)) for start in range(0, 600_000, 40_000)]
    assert len({digest(), *others}) == 1 + len(others)
    assert digest() == digest()


def test_a_place_has_the_digest_of_what_was_read_before_it(tiny_shards):
    files = tiny_shards([3000, 3000])
    (two,) = make_loaders(files)
    tiny_shards([3000, 3000, 3000])
    (three,) = make_loaders(files)
    for shard in range(2):
        assert two.digest_at(Place(shard)) == three.digest_at(Place(shard)) == two.digests[shard]
    assert two.digest_at(Place(5)) == two.digests[-1] != three.digest_at(Place(5))


@pytest.mark.parametrize("first, last", [(0, 1), (0.5, 0.6), (0.9, 1)])
def test_a_shard_with_a_hole_is_refused(tmp_path, write_shard, first, last):
    """Its size is right: a download took the room, and was cut off."""
    tokens = 1 + np.arange(1_000_000) % 250
    tokens[int(first * len(tokens)) : int(last * len(tokens))] = 0
    write_shard(tmp_path / "0.bin", tokens)
    with pytest.raises(UserError, match="0.bin: only zeros from byte "):
        make_loaders(tmp_path / "0.bin")


@pytest.mark.parametrize("sequences, most, taken", [(8, 6, 4), (64, 48, 32), (8, 5, 4), (3, 9, 3)])
def test_a_pass_has_as_many_sequences_as_may_be(tiny_shards, sequences, most, taken):
    (loader,) = make_loaders(
        tiny_shards([20_000]), sequences_per_step=sequences, sequences_per_forward=most)
    assert (loader.per_forward, loader.passes) == (taken, sequences // taken)


def test_validation_tokens_do_not_keep_their_shard_in_memory(tiny_shards):
    cfg = dataclasses.replace(TINY, val_files=tiny_shards([5000]), val_tokens=100)
    tokens = train_gpt.read_val_tokens(cfg)
    assert len(tokens) == 101 and tokens.base is None


GOOD = np.arange(2000) % VOCAB
FOREIGN = np.where(np.arange(2000) == 1234, 400, GOOD)
NO_SHARD = "no whole shard of version 1; make or fetch it again"
FIRST, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"


@pytest.mark.parametrize(("name", "how", "named"), [
    (FIRST, dict(magic=20240801), NO_SHARD),
    (SECOND, dict(count=2001), NO_SHARD),
    (VAL, 5023, NO_SHARD),
    (FIRST, dict(tokens=FOREIGN), "has token 400, not below --vocab_size 257"),
    (VAL, dict(tokens=FOREIGN), "has token 400, not below --vocab_size 257")])
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


def test_what_the_loader_lacks_is_told_in_one_line(run, tmp_path, tiny_shards):
    """A folder is no shard. Short documents never fill a step."""
    (tmp_path / "folder.bin").mkdir()
    for name in ("train_files", "val_files"):
        line = one_error(run(**{name: "my/own/*.bin"}))
        assert "'my/own/*.bin'" in line and "make the data first" in line
        assert "folder.bin" in one_error(run(**{name: "folder.bin"}))
    line = one_error(run(max_document_tokens=2))
    assert "no shard has the documents of a step, which begin with --eot_token 256; lower" in line
    with pytest.raises(UserError, match="--sequences_per_step must be a multiple of 3 ranks"):
        make_loaders(tiny_shards([2000]), 3)
