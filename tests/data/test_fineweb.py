"""data/fineweb.py with a stand-in for the hub: what is fetched, what is not, and why."""

import hashlib
import re
from pathlib import Path
from unittest import mock

import fineweb as fineweb_tool
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.hf_api import RepoFile

VAL = "fineweb_val_000000.bin"
TRAIN = [f"fineweb_train_{index:06d}.bin" for index in range(1, 104)]


def flip_last(content):
    return content[:-1] + bytes([content[-1] ^ 4])


@pytest.fixture
def hub(tmp_path, write_shard, monkeypatch):
    """What the script takes for HfApi, called as the library's is; it serves small shards."""
    hub = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    hub.files, hub.damage_next, hub.asked = {}, 0, set()  # so many downloads are damaged
    for index, name in enumerate([VAL, *TRAIN]):
        tokens = np.random.default_rng(index).integers(0, 50257, 100 + index)
        hub.files[name] = write_shard(tmp_path / "shard", tokens).read_bytes()

    def get_paths_info(repository, paths, *, repo_type, revision):
        hub.asked.add((repository, repo_type, revision))
        for name in paths:
            size, sha256 = len(hub.files[name]), hashlib.sha256(hub.files[name]).hexdigest()
            yield RepoFile(path=name, size=size, oid="0" * 40,
                           lfs={"size": size, "oid": sha256, "pointerSize": 134})

    def hf_hub_download(repository, name, *, repo_type, revision, local_dir):
        hub.asked.add((repository, repo_type, revision))
        hub.damage_next -= 1
        path, content = Path(local_dir, name), hub.files[name]
        path.write_bytes(flip_last(content) if hub.damage_next >= 0 else content)
        return str(path)

    hub.get_paths_info.side_effect = get_paths_info
    hub.hf_hub_download.side_effect = hf_hub_download
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "fineweb"


@pytest.fixture
def fineweb(hub, folder, call_tool, monkeypatch):
    """`fineweb(*args, online=True)` runs the script; what it printed, and the shards it fetched."""

    def run(*args, online=True, **options):
        hub.reset_mock()
        with monkeypatch.context() as patch:
            if not online:
                patch.setattr(hub.get_paths_info, "side_effect", ConnectionError("no route\nto it"))
            printed = call_tool(fineweb_tool, ["--out", folder, *args], folder.parent, **options)
        fetched = [call.args[1] for call in hub.hf_hub_download.mock_calls]
        assert online or not fetched
        return printed, fetched

    return run


def files_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".bin")


def test_first_call_fetches_and_later_calls_need_no_network(hub, fineweb, folder):
    printed, fetched = fineweb(2)
    assert fetched == [VAL, *TRAIN[:2]] and files_in(folder) == sorted(fetched)
    assert all((folder / name).read_bytes() == hub.files[name] for name in fetched)
    assert not list(folder.glob(".partial*"))
    assert "3 shards whole, 303 tokens" in printed  # 100 + 101 + 102
    # One revision, by its full hash, for the metadata and for the files.
    [(repository, repo_type, revision)] = hub.asked
    assert (repository, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
    assert re.fullmatch("[0-9a-f]{40}", revision)
    assert "3 shards whole" in fineweb(2)[0] and not hub.mock_calls
    (folder / "hub.json").write_text("{")  # what the hub said is asked for again
    assert fineweb(2)[1] == [] and hub.get_paths_info.call_count == 1
    assert fineweb()[1] == TRAIN[2:8]  # the default is eight


def test_damaged_shards_are_fetched_again_and_only_they(hub, fineweb, folder):
    fineweb(4)
    damages = [lambda whole: whole[:-2], lambda whole: whole + b"\0\0", flip_last, lambda _: b""]
    for name, damage in zip(TRAIN, damages):
        (folder / name).write_bytes(damage(hub.files[name]))
    fineweb(4, online=False, refused=["network"])
    printed, fetched = fineweb(4)
    assert fetched == TRAIN[:4]
    assert f"{TRAIN[0]} (1,224 of 1,226 bytes)" in printed
    assert f"{TRAIN[2]} (sha256 differs" in printed
    assert all((folder / name).read_bytes() == hub.files[name] for name in TRAIN[:4])


def test_a_damaged_download_is_repeated_and_never_kept(hub, fineweb, folder):
    hub.damage_next = 1
    assert fineweb(1)[1] == [VAL, VAL, TRAIN[0]]
    hub.damage_next = 10**6
    fineweb(2, refused=[TRAIN[1], "sha256"])
    assert files_in(folder) == sorted([VAL, TRAIN[0]])


def test_shards_copied_from_elsewhere_are_accepted_offline_unchecked(hub, fineweb, folder):
    fineweb(1, online=False, refused=["network", "fineweb10B"])
    assert files_in(folder) == []
    for name in (VAL, TRAIN[0]):
        (folder / name).write_bytes(hub.files[name])
    assert "sha256 not checked" in fineweb(1, online=False)[0]
    (folder / VAL).write_bytes(hub.files[VAL][:-2])
    fineweb(1, online=False, refused=[VAL])


@pytest.mark.parametrize("number", ["0", "104", "many"])
def test_an_impossible_number_of_shards_is_one_line(fineweb, folder, number):
    fineweb(number, refused=[number])
    assert not folder.exists()
