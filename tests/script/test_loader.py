"""The loader against plain slicing of the shards, for any ranks; what it says of bad shards."""

import contextlib
import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import Hyperparameters, TokenLoader, UserError, main, read_val_tokens

CPU = torch.device("cpu")
VOCAB = 257
EOT = VOCAB - 1
TINY = dataclasses.replace(
    Hyperparameters(),
    vocab_size=VOCAB,
    eot_token=EOT,
    sequences_per_step=8,
    train_seq_len=128,
    sequences_per_forward=2,
)


def make_cfg(train_files, **changes):
    return dataclasses.replace(TINY, train_files=train_files, **changes)


def read_tokens(path):
    """The tokens by the format's description alone."""
    return np.frombuffer(path.read_bytes()[1024:], dtype="<u2").astype(np.int64)


def steps_of(shards, cfg):
    """The steps' tokens, for ever: contiguous, from one shard, with one target more."""
    size = cfg.sequences_per_step * cfg.train_seq_len
    while True:
        for tokens in shards:
            for start in range(0, len(tokens) - size, size):
                yield tokens[start : start + size + 1]


def make_loaders(cfg, world_size, said=None):
    say = said.append if said is not None else (lambda text: None)
    return [TokenLoader(cfg, rank, world_size, CPU, say) for rank in range(world_size)]


def joined_step(loaders):
    """All ranks' inputs and targets of one step, in the order of rank, forward pass and row."""
    batches = [batch for loader in loaders for batch in loader.next_step(128)]
    return [torch.cat([x.flatten() for x in part]).numpy() for part in zip(*batches, strict=True)]


@pytest.fixture
def three_shards(tiny_shards, tmp_path):
    """Shards of one step of 1024, of two and a rest, and of three less one token."""
    pattern = tiny_shards([1025, 2500, 3072])
    return pattern, [read_tokens(path) for path in sorted(tmp_path.glob("tiny_train_*.bin"))]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("sequences_per_forward", [1, 2, 3, 8])
def test_ranks_partition_each_step(three_shards, world_size, sequences_per_forward):
    pattern, shards = three_shards
    cfg = make_cfg(pattern, sequences_per_forward=sequences_per_forward)
    loaders, oracle = make_loaders(cfg, world_size), steps_of(shards, cfg)
    for expected in itertools.islice(oracle, 13):  # over each shard's end, and twice the data's
        inputs, targets = joined_step(loaders)
        np.testing.assert_array_equal(inputs, expected[:-1])
        np.testing.assert_array_equal(targets, expected[1:])


@pytest.mark.parametrize(("world_size", "per_forward"), [(1, 8), (2, 4), (4, 1), (8, 3)])
def test_a_rank_runs_rows_of_train_seq_len_at_most_so_many_at_once(
    three_shards, world_size, per_forward
):
    cfg = make_cfg(three_shards[0], sequences_per_forward=per_forward)
    for loader in make_loaders(cfg, world_size):
        batches = loader.next_step(128)
        assert len(batches) == loader.micro_steps
        assert sum(len(inputs) for inputs, _ in batches) == 8 // world_size
        for inputs, targets in batches:
            assert inputs.shape == targets.shape
            assert inputs.shape[0] <= per_forward
            assert inputs.shape[1] == 128
            assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("count", [1025, 1500, 2048, 2049])
def test_one_shard_begins_again(tiny_shards, tmp_path, count):
    cfg = make_cfg(tiny_shards([count]))
    said = []
    loaders = make_loaders(cfg, 2, said)
    oracle = steps_of([read_tokens(tmp_path / "tiny_train_000000.bin")], cfg)
    for expected in itertools.islice(oracle, 5):
        np.testing.assert_array_equal(joined_step(loaders)[0], expected[:-1])
    steps = (count - 1) // 1024
    assert len(said) == 2 * ((5 - 1) // steps), said


def test_the_end_of_the_data_is_said_with_its_epoch(three_shards):
    said = []
    (loader,) = make_loaders(make_cfg(three_shards[0]), 1, said)
    for _ in range(5):
        loader.next_step(128)
    assert said == []  # 1 + 2 + 2 steps
    loader.next_step(128)
    assert len(said) == 1 and re.search(r"end.*epoch 2 begins", said[0])
    for _ in range(5):
        loader.next_step(128)
    assert len(said) == 2 and "epoch 3 begins" in said[1]


@pytest.mark.parametrize("steps_before", range(12))
@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(1, 1), (2, 4), (4, 1)])
def test_state_goes_on_with_any_number_of_ranks(
    three_shards, steps_before, ranks_before, ranks_after
):
    cfg = make_cfg(three_shards[0])
    before = make_loaders(cfg, ranks_before)
    for _ in range(steps_before):
        joined_step(before)
    states = [loader.place for loader in before]
    assert all(state == states[0] for state in states)
    after = make_loaders(dataclasses.replace(cfg, sequences_per_forward=1), ranks_after)
    for loader in after:
        loader.seek(*states[0])
    for _ in range(7):
        expected, found = joined_step(before), joined_step(after)
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)
        assert before[0].place == after[0].place


def test_state_can_be_taken_back_to_an_earlier_place(three_shards):
    (loader,) = make_loaders(make_cfg(three_shards[0]), 1)
    joined_step([loader])
    state = loader.place
    first = [joined_step([loader])[0] for _ in range(9)]
    loader.seek(*state)
    again = [joined_step([loader])[0] for _ in range(9)]
    np.testing.assert_array_equal(first, again)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(257, 1500), min_size=1, max_size=4),
    world_size=st.sampled_from([1, 2]),
    steps=st.integers(1, 12),
)
def test_any_shards_give_the_same_stream(counts, world_size, steps, tmp_path_factory, write_shard):
    folder = tmp_path_factory.mktemp("shards")
    generator = np.random.default_rng(0)
    shards = [generator.integers(0, VOCAB, size=count) for count in counts]
    for index, tokens in enumerate(shards):
        write_shard(folder / f"{index}.bin", tokens)
    cfg = make_cfg(f"{folder}/*.bin", sequences_per_step=2)
    loaders = make_loaders(cfg, world_size)
    for expected in itertools.islice(steps_of(shards, cfg), steps):
        np.testing.assert_array_equal(joined_step(loaders)[1], expected[1:])


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("stride", [1, 3, 5, 1_000_003])
def test_a_stride_deals_the_sequences_of_a_shard_each_once(tiny_shards, world_size, stride):
    """Sequence k of the shard's N is the (k · stride mod N)-th, by the first such stride coprime
    to N, and N is a whole number of steps."""
    cfg = make_cfg(tiny_shards([10 * 1024 + 700]), sequence_stride=stride)
    tokens = train_gpt.read_shard(train_gpt.find_shards(cfg.train_files)[0], VOCAB).astype(int)
    count = 80
    used = stride
    while np.gcd(used, count) != 1:
        used += 1
    loaders = make_loaders(cfg, world_size)
    order = []
    for epoch in range(2):
        for step in range(10):
            rows = np.stack(joined_step(loaders), axis=-1).reshape(8, 128, 2)
            for k, row in enumerate(rows, start=8 * step):
                start = k * used % count * 128
                np.testing.assert_array_equal(row[:, 0], tokens[start : start + 128])
                np.testing.assert_array_equal(row[:, 1], tokens[start + 1 : start + 129])
                order.append((epoch, start // 128))
    assert sorted(order) == [(epoch, index) for epoch in range(2) for index in range(count)]


# Documents in sequences: the rules of the public records, one token at a time


def aligned_steps(shards, sequences, lengths):
    """Each sequence begins with the first document that begins `length` tokens or more after the
    beginning of the one before. A step needs its last sequence's successor to begin in the shard,
    and twice its tokens left in it. Each step has the next of the lengths."""
    length = next(lengths)
    while True:
        for tokens in shards:
            position = 0
            while position + 2 * sequences * length + 1 < len(tokens):
                rows, start = [], None
                for at in range(position, len(tokens)):
                    if tokens[at] == EOT and (start is None or at - start >= length):
                        if start is not None:
                            rows.append([tokens[i] for i in range(start, start + length + 1)])
                        start = at
                    if len(rows) == sequences:
                        break
                if len(rows) < sequences:
                    break
                position = start
                yield np.array(rows)
                length = next(lengths)


def packed_steps(shards, sequences, lengths, most):
    """Sequences are filled by the first `most` tokens of each document in turn; the rest of one
    that is cut is never used. What the shard's end leaves unfilled is dropped with its step. Each
    step has the next of the lengths."""
    length = next(lengths)
    while True:
        for tokens in shards:
            documents = []
            for token in tokens:
                if token == EOT:
                    documents.append([])
                if documents:
                    documents[-1].append(token)
            rows, row = [], []
            for document in documents:
                row += document[: min(most, length + 1 - len(row))]
                if len(row) == length + 1:
                    rows.append(row)
                    row = []
                if len(rows) == sequences:
                    yield np.array(rows)
                    rows, length = [], next(lengths)


CUTS = {
    "aligned": (dict(align_documents=True), aligned_steps),
    "packed": (dict(max_document_tokens=90), lambda *args: packed_steps(*args, 90)),
    "packed whole": (dict(max_document_tokens=9999), lambda *args: packed_steps(*args, 9999)),
}


def joined_rows(loaders, length):
    """All ranks' rows of one step, in the order of rank, forward pass and row: inputs, targets."""
    batches = [batch for loader in loaders for batch in loader.next_step(length)]
    return [torch.cat(part).numpy() for part in zip(*batches, strict=True)]


@pytest.fixture
def documents_in_shards(tiny_shards, tmp_path, write_shard):
    """Documents of 200 tokens on average, a shard that is barely a step, and one of documents that
    are half a sequence long, so that the next begins right where a sequence ends."""
    pattern = tiny_shards([5000, 4100, 7000, 1025])
    halves = np.arange(6000) % 250
    halves[20::64] = EOT
    write_shard(tmp_path / "tiny_train_000004.bin", halves)
    return pattern, [read_tokens(path) for path in sorted(tmp_path.glob("tiny_train_*.bin"))]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_documents_are_cut_as_a_loop_over_tokens_does(documents_in_shards, cut, world_size):
    (pattern, shards), (changes, oracle) = documents_in_shards, CUTS[cut]
    said = []
    loaders = make_loaders(make_cfg(pattern, **changes), world_size, said)
    for expected in itertools.islice(oracle(shards, 8, itertools.repeat(128)), 30):
        inputs, targets = joined_rows(loaders, 128)
        np.testing.assert_array_equal(inputs, expected[:, :-1])
        np.testing.assert_array_equal(targets, expected[:, 1:])
    assert any("epoch 3 begins" in line for line in said), "the data was gone through twice"


@pytest.mark.parametrize("cut", CUTS)
def test_each_sequence_begins_with_a_document(documents_in_shards, cut):
    (loader,) = make_loaders(make_cfg(documents_in_shards[0], **CUTS[cut][0]), 1)
    for _ in range(12):
        inputs, _ = joined_rows([loader], 128)
        assert (inputs[:, 0] == EOT).all()


def test_a_packed_document_ends_where_the_next_begins(documents_in_shards):
    """Also one that is cut: its last token's target is the end-of-text of the one after it."""
    (loader,) = make_loaders(make_cfg(documents_in_shards[0], max_document_tokens=90), 1)
    for _ in range(8):
        inputs, targets = joined_rows([loader], 128)
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        for row in inputs:
            starts = np.flatnonzero(row == EOT)
            assert np.diff(starts).max() <= 90 and len(row) - starts[-1] <= 90


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(1, 2), (4, 1)])
def test_documents_go_on_from_any_state(documents_in_shards, cut, ranks_before, ranks_after):
    cfg = make_cfg(documents_in_shards[0], **CUTS[cut][0])
    before, after = make_loaders(cfg, ranks_before), make_loaders(cfg, ranks_after)
    for _ in range(16):
        states = [loader.place for loader in before]
        assert all(state == states[0] for state in states)
        for loader in after:
            loader.seek(*states[0])
        expected, found = joined_rows(before, 128), joined_rows(after, 128)
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(1, 2), (2, 1)])
def test_sequences_grow_while_a_run_goes_on(documents_in_shards, cut, ranks_before, ranks_after):
    """Each step is also taken by other ranks, from the place of the one before."""
    (pattern, shards), (changes, oracle) = documents_in_shards, CUTS[cut]
    cfg = make_cfg(pattern, sequences_per_step=2, train_seq_len=384, **changes)
    before, after = make_loaders(cfg, ranks_before), make_loaders(cfg, ranks_after)
    lengths = [*[128] * 5, *[256] * 9, *[384] * 30]  # twice through the data
    steps = oracle(shards, 2, itertools.chain(lengths, [384]))
    for length, expected in zip(lengths, steps, strict=False):
        for loader in after:
            loader.seek(*before[0].place)
        for loaders in (before, after):
            inputs, targets = joined_rows(loaders, length)
            np.testing.assert_array_equal(inputs, expected[:, :-1])
            np.testing.assert_array_equal(targets, expected[:, 1:])
    assert before[0].place[0] > 5, "the second time through the five shards"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), cut=st.sampled_from(["aligned", "packed", "packed whole"]))
def test_any_documents_give_the_same_stream(data, cut, tmp_path_factory, write_shard):
    """Documents of any lengths, of one token too, shards that begin in one, changing lengths."""
    lengths = st.lists(st.integers(1, 400), min_size=3, max_size=30)
    folder, shards = tmp_path_factory.mktemp("shards"), []
    for index in range(data.draw(st.integers(1, 3))):
        head = data.draw(st.integers(0, 50))
        tokens = np.arange(head + 300) % EOT
        for length in data.draw(lengths):
            tokens = np.concatenate([tokens, [EOT], np.arange(length - 1) % EOT])
        shards.append(np.concatenate([tokens, np.arange(head)]))
        write_shard(folder / f"{index}.bin", shards[-1])
    changes, oracle = CUTS[cut]
    world_size = data.draw(st.sampled_from([1, 2]))
    cfg = make_cfg(f"{folder}/*.bin", sequences_per_step=2, **changes)
    loaders = make_loaders(cfg, world_size)
    if not any(True for _ in itertools.islice(one_epoch(oracle, shards), 1)):
        with pytest.raises(UserError, match="no shard has documents"):
            loaders[0].next_step(128)
        return
    for expected in itertools.islice(oracle(shards, 2, itertools.repeat(128)), 8):
        np.testing.assert_array_equal(joined_rows(loaders, 128)[0], expected[:, :-1])


def one_epoch(oracle, shards):
    """The steps of one time through the shards; the oracles themselves go round for ever."""
    class Ended(Exception):
        pass

    class Once(list):
        def __iter__(self):
            if self.begun:
                raise Ended
            self.begun = True
            return super().__iter__()

    once = Once(shards)
    once.begun = False
    with contextlib.suppress(Ended):
        yield from oracle(once, 2, itertools.repeat(128))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("documents", [0, 1])
def test_data_without_enough_documents_are_refused(tmp_path, write_shard, cut, documents):
    for index in range(2):
        tokens = np.arange(6000) % EOT
        tokens[: 5 * documents : 5] = EOT
        write_shard(tmp_path / f"{index}.bin", tokens)
    cfg = make_cfg(f"{tmp_path}/*.bin", **CUTS[cut][0])
    if documents and cut == "packed whole":
        cfg = dataclasses.replace(cfg, max_document_tokens=1000)
    (loader,) = make_loaders(cfg, 1)
    with pytest.raises(UserError, match=r"--train_files .*/\*\.bin: no shard has documents for a "
                                        r"step; lower --train_seq_len or --sequences_per_step"):
        loader.next_step(128)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--align_documents"], ["--max_document_tokens", 512]])
def test_documents_of_the_pocket_train(pocket_data, run_script, final_values, flags):
    done = run_script([
        "--preset", "pocket", "--device", "cpu", "--num_iterations", 5, "--val_tokens", 4096,
        *flags,
    ])
    assert done.returncode == 0, done.stderr
    assert final_values(done.stdout)["steps"] == "5"


# Files


def test_shards_are_taken_in_the_order_of_their_names(tmp_path, write_shard):
    for name, value in (("b_10", 3), ("b_02", 2), ("a_99", 1)):
        write_shard(tmp_path / f"{name}.bin", np.full(1025, value))
    (loader,) = make_loaders(make_cfg(f"{tmp_path}/*.bin"), 1)
    assert [int(joined_step([loader])[0][0]) for _ in range(3)] == [1, 2, 3]


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
    for val_tokens in (1, 299, 300, 500, 899):
        cfg = make_cfg("", val_files=f"{tmp_path}/v*.bin", val_tokens=val_tokens)
        np.testing.assert_array_equal(read_val_tokens(cfg), tokens[: val_tokens + 1])
    with pytest.raises(UserError, match=r"--val_tokens 900: .*v\*\.bin.* 900 tokens"):
        read_val_tokens(dataclasses.replace(cfg, val_tokens=900))


# Bad input: each case makes a bad shard of a good one and names what the one line has to hold.

GOOD = np.arange(2000) % VOCAB


def wrong_magic(path, write_shard):
    write_shard(path, GOOD, magic=20240801)
    return ["[20240801, 1], not [20240520, 1]"]


def wrong_version(path, write_shard):
    write_shard(path, GOOD, version=2)
    return ["[20240520, 2], not [20240520, 1]"]


def count_too_large(path, write_shard):
    write_shard(path, GOOD, count=2001)
    return ["2001", "5024"]


def count_too_small(path, write_shard):
    write_shard(path, GOOD, count=1999)
    return ["1999", "5024"]


def negative_count(path, write_shard):
    write_shard(path, GOOD, count=-1)
    return ["-1"]


def cut_off(path, write_shard):
    write_shard(path, GOOD)
    path.write_bytes(path.read_bytes()[:-1])
    return ["2000", "5023"]


def cut_off_header(path, write_shard):
    write_shard(path, GOOD)
    path.write_bytes(path.read_bytes()[:1000])
    return ["1000 bytes do not hold"]


def empty_file(path, write_shard):
    path.write_bytes(b"")
    return ["magic, version [0, 0]"]


def a_folder(path, write_shard):
    path.mkdir()
    return ["directory"]


def foreign_token(path, write_shard):
    tokens = GOOD.copy()
    tokens[[1234, 1500]] = 300, 400
    write_shard(path, tokens)
    return ["token 300", "position 1234", "--vocab_size 257"]


def too_short(path, write_shard):
    write_shard(path, GOOD[:1024])
    return ["1024", "--train_seq_len"]


BAD_SHARDS = [
    wrong_magic,
    wrong_version,
    count_too_large,
    count_too_small,
    negative_count,
    cut_off,
    cut_off_header,
    empty_file,
    a_folder,
    foreign_token,
    too_short,
]


def run_main(capsys, tmp_path, train_files, val_files):
    """main's exit code and line, once it is clear that it is one line and nothing was written."""
    flags = ["--preset", "pocket", "--device", "cpu", "--train_seq_len", "128"]
    flags += ["--sequences_per_step", "8"]
    files = ["--train_files", train_files, "--val_files", val_files, "--val_tokens", "1024"]
    before = sorted(tmp_path.rglob("*"))
    code = main([*flags, *files])
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", err), err
    assert sorted(tmp_path.rglob("*")) == before
    return code, err


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (spoil, place)
        for spoil in BAD_SHARDS
        for place in ("only training", "second training", "validation")
        # Found later, when the second shard's turn comes; said of --val_tokens instead.
        if (spoil, place) != (foreign_token, "second training")
        and (spoil, place) != (too_short, "validation")
    ],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_a_bad_shard_ends_in_one_line_and_2(
    spoil, place, capsys, tmp_path, write_shard, tiny_shards, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    train = tiny_shards([2000]) if place != "only training" else f"{tmp_path}/tiny_train_*.bin"
    val = tiny_shards([2000], name="tiny_val") if place != "validation" else f"{tmp_path}/bad.bin"
    name = {"validation": "bad.bin", "only training": "tiny_train_000000.bin"}
    bad = tmp_path / name.get(place, "tiny_train_000001.bin")
    words = spoil(bad, write_shard)
    code, line = run_main(capsys, tmp_path, train, val)
    assert code == 2
    assert all(word in line for word in [bad.name, *words]), line


def test_a_foreign_token_of_a_later_shard_is_said_when_its_turn_comes(tmp_path, write_shard):
    write_shard(tmp_path / "0.bin", GOOD)
    foreign_token(tmp_path / "1.bin", write_shard)
    (loader,) = make_loaders(make_cfg(f"{tmp_path}/*.bin"), 1)
    loader.next_step(128)
    with pytest.raises(UserError, match=r"1\.bin: token 300 at position 1234"):
        loader.next_step(128)


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("data/pocket/nothing_*.bin", "data/pocket.py"),
        ("data/fineweb10B/nothing_*.bin", "data/fineweb.py"),
        ("my/own/*.bin", "data/text.py"),
    ],
)
@pytest.mark.parametrize("kind", ["train", "val"])
def test_a_glob_without_files_names_the_command_that_makes_them(
    pattern, remedy, kind, capsys, tmp_path, tiny_shards, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    files = {kind: tiny_shards([2000], name=f"tiny_{kind}") for kind in ("train", "val")}
    files[kind] = pattern
    code, line = run_main(capsys, tmp_path, files["train"], files["val"])
    assert code == 2
    assert pattern in line and f"python {remedy}" in line


def test_too_few_validation_tokens_say_how_many_there_are(
    capsys, tmp_path, tiny_shards, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    train, val = tiny_shards([2000]), tiny_shards([1024], name="tiny_val")
    code, line = run_main(capsys, tmp_path, train, val)
    assert code == 2
    assert "--val_tokens 1024" in line and "1024 tokens" in line and "tiny_val_" in line


def test_a_number_of_ranks_that_does_not_divide_the_sequences(tiny_shards):
    with pytest.raises(UserError, match=r"--sequences_per_step 8: .*\b3\b"):
        make_loaders(make_cfg(tiny_shards([2000])), 3)


def test_only_the_first_rank_of_a_machine_speaks(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["--preset", "pocket", "--seed", "-1"]) == 2
    assert capsys.readouterr() == ("", "")
