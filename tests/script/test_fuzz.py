"""Whatever bytes a shard or a checkpoint is made of: one clean error, or what was meant."""

import struct
import tracemalloc
import zipfile

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_checkpoints import TINY, equal, make_state

import train_gpt

FUZZ = settings(max_examples=200, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture])
VOCAB = 257
HEADER = struct.Struct("<3i1012x")  # magic, version, number of tokens


def edits(first_bytes):
    """Lists of what to overwrite, insert, remove or cut off; half of it in the first bytes."""
    places = st.integers(0, first_bytes - 1) | st.integers(0, 10**6)
    each = st.tuples(places, st.integers(0, 8) | st.just(2**30), st.binary(max_size=8))
    return st.lists(each, min_size=1, max_size=4)


def edited(content, changes):
    content = bytearray(content)
    for place, length, new in changes:
        at = place % max(1, len(content))
        content[at : at + length] = new
    return bytes(content)


def tokens_of(content):
    """The tokens of a shard's bytes by the format's own words, or None where it is none."""
    if len(content) < HEADER.size:
        return None
    magic, version, count = HEADER.unpack(content[: HEADER.size])
    body = content[HEADER.size :]
    if (magic, version) != (20240520, 1) or len(body) != 2 * count:
        return None
    tokens = list(struct.unpack(f"<{count}H", body))
    return tokens if all(token < VOCAB for token in tokens) else None


@FUZZ
@given(tokens=st.lists(st.integers(0, VOCAB + 1), max_size=40), edits=st.just([]) | edits(12),
       count=st.none() | st.integers(-(2**31), 2**31 - 1))
@example([1], [], 2**31 - 1)
@example([1], [], 1 - 2**31)  # twice it, as an int32, is 2
def test_shards(tmp_path, tokens, edits, count):
    """The tokens of a shard as a list, or a clean error that names it."""
    count = len(tokens) if count is None else count
    content = HEADER.pack(20240520, 1, count) + struct.pack(f"<{len(tokens)}H", *tokens)
    content = edited(content, edits)
    path = tmp_path / "shard.bin"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        assert train_gpt.read_shard(path, VOCAB).tolist() == tokens_of(content)
    except train_gpt.UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        assert tokens_of(content) is None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small checkpoint. Its pickle, which says what the rest means, lies in the first 4 KiB."""
    path = tmp_path_factory.mktemp("checkpoint") / "step-000020.pt"
    train_gpt.write_checkpoint(path, make_state(TINY))
    return path


@pytest.mark.parametrize("checksums", [True, False])
@FUZZ
@given(edits=edits(4096))
def test_checkpoints(tmp_path, written, checksums, edits):
    """What was written, as an edit that no checksum finds changes nothing; or a clean error, also
    without the checksums in the way, and `--resume auto` does not take it."""
    path = tmp_path / "step-000020.pt"
    path.write_bytes(edited(written.read_bytes(), edits))
    state = None
    with pytest.MonkeyPatch.context() as patch:
        if not checksums:
            patch.setattr(zipfile.ZipFile, "testzip", lambda file: None)
        found, _ = train_gpt.newest_checkpoint(tmp_path)
        try:
            state = train_gpt.load_checkpoint(path)
            train_gpt.hyperparameters({}, state["settings"])
        except train_gpt.UserError as error:
            assert str(path) in str(error)
        assert found == (str(path) if state else "")
    path.unlink()
    if checksums:
        assert state is None or equal(state, train_gpt.load_checkpoint(written))
