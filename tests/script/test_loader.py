"""The loader against loops over tokens, for any ranks; what it says of bad shards."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import Hyperparameters, TokenLoader, UserError, main, read_val_tokens

VOCAB = 257
EOT = VOCAB - 1
TINY = dataclasses.replace(
    Hyperparameters(), vocab_size=VOCAB, eot_token=EOT, sequences_per_step=8, seq_lens=(128,),
    sequences_per_forward=2, max_document_tokens=0)


def make_cfg(train_files, **changes):
    return dataclasses.replace(TINY, train_files=train_files, **changes)


def make_loaders(cfg, world_size=1, said=None, place=(0, 0)):
    said = [] if said is None else said
    ranks = [SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
             for rank in range(world_size)]
    return [TokenLoader(cfg, each, said.append, *place) for each in ranks]


def next_rows(loaders, length=128):
    """All ranks' inputs and targets of one step, in the order of rank, forward pass and row."""
    batches = [batch for loader in loaders for batch in loader.next_step(length)]
    return [torch.cat(part).numpy() for part in zip(*batches, strict=True)]


def assert_step(loaders, expected):
    inputs, targets = next_rows(loaders, expected.shape[1] - 1)
    np.testing.assert_array_equal(inputs, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])


# Oracles: all steps of one time through a shard. A step of the lengths has (sequences, length + 1).


def consecutive(tokens, sequences, lengths):
    """One sequence after the other, with one target more; a longer one begins at its multiple."""
    position = 0
    while True:
        length = lengths[0]
        while position % length:
            position += 1
        if position + sequences * length > (len(tokens) - 1) // (sequences * length) * (
                sequences * length):
            return
        starts = range(position, position + sequences * length, length)
        yield np.array([tokens[i : i + length + 1] for i in starts])
        position += sequences * length


def packed(most, tokens, sequences, lengths):
    """Filled by the first `most` tokens of each document in turn; the rest of one that is cut is
    never used. What the shard's end leaves unfilled is dropped with its step."""
    documents = []
    for token in tokens:
        if token == EOT:
            documents.append([])
        if documents:
            documents[-1].append(token)
    rows, row = [], []
    for document in documents:
        row += document[: min(most, lengths[0] + 1 - len(row))]
        if len(row) == lengths[0] + 1:
            rows.append(row)
            row = []
        if len(rows) == sequences:
            yield np.array(rows)
            rows = []


CUTS = {
    "consecutive": (0, consecutive),
    "packed": (90, lambda *args: packed(90, *args)),
    "packed whole": (9999, lambda *args: packed(9999, *args)),
}


def steps_of(cut, shards, sequences, lengths):
    """The steps of some lengths, from the shards over and over; [] where there are none."""
    lengths, found = list(lengths), []
    for epoch in itertools.count():
        for tokens in shards:
            for step in CUTS[cut][1](tokens, sequences, lengths):
                found.append(step)
                del lengths[0]  # the oracle has the rest of the list
                if not lengths:
                    return found
        if not found or epoch > 50:
            return found


def read_tokens(folder):
    """The shards' tokens by the format's description alone."""
    paths = sorted(folder.glob("tiny_train_*.bin"))
    return [np.frombuffer(path.read_bytes()[1024:], "<u2").astype(np.int64) for path in paths]


@pytest.fixture
def shards(tiny_shards, tmp_path, write_shard):
    """Documents of 200 tokens on average; shards of some steps, of barely one, and one of documents
    half a sequence long, so that the next begins right where a sequence ends."""
    pattern = tiny_shards([5000, 3072, 4500, 1025])
    halves = np.arange(6000) % 250
    halves[20::64] = EOT
    write_shard(tmp_path / "tiny_train_000004.bin", halves)
    return pattern, read_tokens(tmp_path)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("world_size", "per_forward"), [(1, 8), (1, 3), (2, 2), (4, 1), (8, 3)])
def test_ranks_share_the_steps_that_a_loop_over_tokens_gives(shards, cut, world_size, per_forward):
    cfg = make_cfg(shards[0], max_document_tokens=CUTS[cut][0], sequences_per_forward=per_forward)
    said = []
    loaders = make_loaders(cfg, world_size, said)
    for expected in steps_of(cut, shards[1], 8, [128] * 36):
        assert_step(loaders, expected)
    epochs = range(2, 2 + len(said) // world_size)
    assert said and said[::world_size] == [f"data: epoch {epoch} begins" for epoch in epochs]
    for loader in loaders:
        batches = loader.next_step(128)
        assert sum(len(inputs) for inputs, _ in batches) == 8 // world_size
        for inputs, targets in batches:
            assert inputs.shape == targets.shape == (len(inputs), 128)
            assert len(inputs) <= per_forward
            assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(1, 2), (2, 1)])
def test_any_ranks_go_on_from_any_place(shards, cut, ranks_before, ranks_after):
    """Sequences grow while the run goes on; other ranks take each step too, from its place."""
    cfg = make_cfg(shards[0], sequences_per_step=2, seq_lens=(128, 256, 384),
                   max_document_tokens=CUTS[cut][0])
    before = make_loaders(cfg, ranks_before)
    for expected in steps_of(cut, shards[1], 2, [*[128] * 5, *[256] * 9, *[384] * 30]):
        assert all(loader.place == before[0].place for loader in before)
        after = make_loaders(cfg, ranks_after, place=before[0].place)
        assert_step(before, expected)
        assert_step(after, expected)
    assert before[0].place == after[0].place
    assert before[0].place[0] > 5, "the second time through the five shards"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), cut=st.sampled_from(list(CUTS)), world_size=st.sampled_from([1, 2]))
def test_any_shards_give_the_same_stream(data, cut, world_size, tmp_path_factory, write_shard):
    """Documents of any lengths, of one token too, and shards that begin in one."""
    folder, shards = tmp_path_factory.mktemp("shards"), []
    for index in range(data.draw(st.integers(1, 3))):
        tokens = np.arange(data.draw(st.integers(257, 350))) % EOT
        for length in data.draw(st.lists(st.integers(1, 400), min_size=3, max_size=30)):
            tokens = np.concatenate([tokens, [EOT], np.arange(length - 1) % EOT])
        shards.append(tokens)
        write_shard(folder / f"{index}.bin", tokens)
    cfg = make_cfg(f"{folder}/*.bin", sequences_per_step=2, max_document_tokens=CUTS[cut][0])
    loaders = make_loaders(cfg, world_size)
    expected = steps_of(cut, shards, 2, [128] * 8)
    if not expected:
        with pytest.raises(UserError, match="no shard has documents"):
            loaders[0].next_step(128)
    for step in expected:
        assert_step(loaders, step)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("stride", [1, 3, 5, 1_000_003])
def test_a_stride_deals_the_sequences_of_a_shard_each_once(tiny_shards, world_size, stride):
    """Sequence k of the shard's N is the (k · stride mod N)-th, by the first such stride coprime
    to N, and N is a whole number of steps."""
    cfg = make_cfg(tiny_shards([10 * 1024 + 700]), sequence_stride=stride)
    tokens = train_gpt.read_shard(train_gpt.find_shards(cfg.train_files)[0], VOCAB).astype(int)
    count, used = 80, stride
    while np.gcd(used, count) != 1:
        used += 1
    loaders = make_loaders(cfg, world_size)
    order = []
    for first in [*range(0, count, 8)] * 2:
        starts = [k * used % count * 128 for k in range(first, first + 8)]
        assert_step(loaders, np.array([tokens[start : start + 129] for start in starts]))
        order += starts
    assert sorted(order) == sorted([index * 128 for index in range(count)] * 2)


# Files


def test_shards_are_taken_in_the_order_of_their_names(tmp_path, write_shard):
    for name, value in (("b_10", 3), ("b_02", 2), ("a_99", 1)):
        write_shard(tmp_path / f"{name}.bin", np.full(1025, value))
    loaders = make_loaders(make_cfg(f"{tmp_path}/*.bin"))
    assert [next_rows(loaders)[0][0, 0] for _ in range(3)] == [1, 2, 3]


def test_a_relative_glob_is_looked_for_here_and_then_in_the_repository(
    tmp_path, monkeypatch, write_shard
):
    repository, here = tmp_path / "repository", tmp_path / "here"
    for folder in (repository, here):
        folder.mkdir()
    theirs = write_shard(repository / "x.bin", [1])
    monkeypatch.setattr(train_gpt, "ROOT", repository)
    monkeypatch.chdir(here)
    assert train_gpt.find_shards("*.bin") == [theirs]
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
    def digest(name, parts, *edits):
        (tmp_path / name).mkdir()
        for index, part in enumerate(parts):
            path = write_shard(tmp_path / name / f"{index}.bin", part)
            for at in edits:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(b"\7\0")
            edits = ()
        return make_loaders(make_cfg(f"{tmp_path}/{name}/*.bin"))[0].digest

    parts = [np.zeros(600_000), np.ones(1100)]
    first = digest("first", parts)
    assert len(first) == 16 and first == digest("moved", parts)
    others = [digest("swapped", parts[::-1]), digest("fewer", parts[:1]),
              digest("edited", parts, 2**20 - 2), digest("longer", [np.zeros(600_001), parts[1]])]
    assert len({first, *others}) == 5
    assert digest("late", parts[:1], 2**20) == others[1], "what lies behind the first MiB"


# Bad input


GOOD = np.arange(2000) % VOCAB
FOREIGN = np.where(GOOD == 0, 1, GOOD)
FOREIGN[[1234, 1500]] = 300, 400
NO_SHARD = "not a shard of version 1; make or fetch it again"
BAD_SHARDS = {  # what is written, and what the line has to hold
    "wrong magic": (dict(magic=20240801), NO_SHARD),
    "wrong version": (dict(version=2), NO_SHARD),
    "count too large": (dict(count=2001), "5024 bytes do not hold 2001 tokens"),
    "count too small": (dict(count=1999), "5024 bytes do not hold 1999 tokens"),
    "negative count": (dict(count=-1), "do not hold -1 tokens"),
    "count that wraps": (dict(count=2000 - 2**31), "do not hold -2147481648 tokens"),
    "cut off": (-1, "5023 bytes do not hold 2000 tokens"),
    "cut off header": (1000, NO_SHARD),
    "empty": (0, NO_SHARD),
    "a folder": (None, "cannot be read (Is a directory)"),
    "a foreign token": (dict(tokens=FOREIGN), "token 300 at position 1234; raise --vocab_size 257"),
    "too short": (dict(tokens=GOOD[:1024]), "1024 tokens, a step takes 1024 and one more; lower"),
}


def spoil(path, write_shard, how):
    if how is None:
        path.mkdir()
    elif isinstance(how, dict):
        write_shard(path, **dict(tokens=GOOD) | how)
    else:
        path.write_bytes(write_shard(path, GOOD).read_bytes()[:how])


@pytest.fixture
def one_line(capsys, tmp_path, monkeypatch, tiny_shards):
    """`one_line(train_files, val_files)` gives main's error; it is one line, nothing is written."""
    monkeypatch.chdir(tmp_path)

    def run(train_files, val_files):
        before = sorted(tmp_path.rglob("*"))
        code = main(["--preset", "pocket", "--device", "cpu", "--seq_lens", "128",
                     "--sequences_per_step", "8", "--val_tokens", "1024", "--val_seq_len", "128",
                     "--train_files", str(train_files), "--val_files", str(val_files)])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", err), err
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return run


PLACES = ["only training", "second training", "validation"]
LATER = [("a foreign token", "second training"), ("too short", "validation")]  # tests below


@pytest.mark.parametrize(
    ("case", "place"), sorted({*itertools.product(BAD_SHARDS, PLACES)} - {*LATER}))
def test_a_bad_shard_ends_in_one_line_and_2(
    case, place, one_line, tmp_path, write_shard, tiny_shards
):
    names = ["tiny_train_000000.bin", "tiny_train_000001.bin", "bad.bin"]
    bad = tmp_path / names[PLACES.index(place)]
    if place != "only training":
        tiny_shards([2000])
    val = bad if place == "validation" else tiny_shards([2000], name="tiny_val")
    spoil(bad, write_shard, BAD_SHARDS[case][0])
    line = one_line(tmp_path / "tiny_train_*.bin", val)
    assert f"{bad}: " in line and BAD_SHARDS[case][1] in line


def test_a_foreign_token_of_a_later_shard_is_said_when_its_turn_comes(tmp_path, write_shard):
    write_shard(tmp_path / "0.bin", GOOD)
    write_shard(tmp_path / "1.bin", FOREIGN)
    (loader,) = make_loaders(make_cfg(f"{tmp_path}/*.bin"))
    loader.next_step(128)
    with pytest.raises(UserError, match=r"1\.bin: token 300 at position 1234"):
        loader.next_step(128)


@pytest.mark.parametrize(("pattern", "remedy"), [
    ("data/pocket/nothing_*.bin", "data/pocket.py"),
    ("data/fineweb10B/nothing_*.bin", "data/fineweb.py"),
    ("my/own/*.bin", "data/text.py"),
])
def test_a_glob_without_files_names_the_command_that_makes_them(
    pattern, remedy, one_line, tiny_shards
):
    good = tiny_shards([2000])
    for files in ((pattern, good), (good, pattern)):
        line = one_line(*files)
        assert pattern in line and f"python {remedy}" in line


def test_too_few_validation_tokens_say_how_many_there_are(one_line, tiny_shards):
    line = one_line(tiny_shards([2000]), tiny_shards([1024], name="tiny_val"))
    assert "--val_tokens 1024" in line and "1024 tokens" in line and "tiny_val_" in line


def test_a_number_of_ranks_that_does_not_divide_the_sequences(tiny_shards):
    with pytest.raises(UserError, match=r"--sequences_per_step 8: the 3 ranks must divide it"):
        make_loaders(make_cfg(tiny_shards([2000])), 3)
