"""data/fineweb.py with stand-ins for the hub's functions: what is fetched, what is not, and why."""

import contextlib
import hashlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fineweb as fineweb_tool
import huggingface_hub
import numpy as np
import pytest

VAL = "fineweb_val_000000.bin"
TRAIN = [f"fineweb_train_{index:06d}.bin" for index in range(1, 104)]


@pytest.fixture
def hub(tmp_path, write_shard, monkeypatch):
    """The hub's two functions, called as the library's are. They serve small shards."""
    files = {}
    for index, name in enumerate([VAL, *TRAIN]):
        files[name] = write_shard(tmp_path / "shard", range(100 + index)).read_bytes()

    def get_paths_info(self, repository, paths, *, repo_type, revision):
        if not hub.online:
            raise ConnectionError("no route\nto it")
        hub.asked.add((repository, repo_type, revision))
        found = []
        for name in paths:
            sha256 = hashlib.sha256(files[name]).hexdigest()
            lfs = SimpleNamespace(sha256=sha256) if hub.has_sums else None
            found.append(SimpleNamespace(path=name, lfs=lfs))
        return found[: hub.knows]

    def snapshot_download(repository, *, allow_patterns, local_dir, repo_type, revision):
        hub.asked.add((repository, repo_type, revision))
        hub.fetched += allow_patterns
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        for name in allow_patterns[: hub.sends]:
            if Path(local_dir, name).exists():  # the library takes it for fetched
                continue
            content = files[name][:-1] + b"?" if name == hub.damaged else files[name]
            Path(local_dir, name).write_bytes(content)

    hub = SimpleNamespace(files=files, asked=set(), fetched=[], damaged="", has_sums=True,
                          knows=None, sends=None)
    for owner, function in ((huggingface_hub.HfApi, get_paths_info),
                            (huggingface_hub, snapshot_download)):
        theirs = getattr(owner, function.__name__)
        stand_in = mock.create_autospec(theirs, side_effect=function)
        monkeypatch.setattr(owner, function.__name__, stand_in)
    return hub


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "fineweb10B"


@pytest.fixture
def fineweb(hub, folder, call_tool):
    """`fineweb(*args, online=True)` runs the script; what it printed, and the shards it fetched."""

    def run(*args, online=True, **options):
        hub.fetched, hub.online = [], online
        printed = call_tool(fineweb_tool, ["--out", folder, *args], folder.parent, **options)
        return printed, hub.fetched

    return run


def test_what_is_missing_is_fetched_at_one_revision_and_later_calls_need_no_network(
    hub, fineweb, folder
):
    printed, fetched = fineweb(2)
    assert fetched == [VAL, *TRAIN[:2]] and "3 shards whole, 303 tokens" in printed  # 100 to 102
    assert all((folder / name).read_bytes() == hub.files[name] for name in fetched)
    [(repository, repo_type, revision)] = hub.asked
    assert (repository, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
    assert re.fullmatch("[0-9a-f]{40}", revision)
    assert "3 shards whole" in fineweb(2, online=False)[0]
    assert fineweb()[1] == TRAIN[2:8]  # the default is eight


def test_shards_that_are_cut_or_no_shards_are_fetched_again_and_only_they(hub, fineweb, folder):
    fineweb(3)
    (folder / TRAIN[0]).write_bytes(hub.files[TRAIN[0]][:-2])
    (folder / TRAIN[1]).write_bytes(b"")
    (folder / TRAIN[2]).write_bytes(b"?" + hub.files[TRAIN[2]][1:])
    fineweb(3, online=False, refused=["ConnectionError: no route to it", "network", str(folder)])
    assert fineweb(3)[1] == TRAIN[:3]
    assert all((folder / name).read_bytes() == hub.files[name] for name in TRAIN[:3])


def spoil(path):
    """Change a token."""
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])


def test_the_content_of_a_shard_is_read_once_and_held_to_the_hubs_sha256(
    hub, fineweb, folder, monkeypatch
):
    """A copy is another file, and is read again."""
    fineweb(1)
    [sha256, file] = (folder / TRAIN[0]).with_suffix(".sha256").read_text().split(" ", 1)
    assert sha256 == hashlib.sha256(hub.files[TRAIN[0]]).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(fineweb_tool, "is_whole", None)  # nothing is read
        assert "2 shards whole" in fineweb(1, online=False)[0]
    spoil(folder / TRAIN[0])
    printed, fetched = fineweb(1)
    assert fetched == [TRAIN[0]] and f"{TRAIN[0]}: not whole, or not of the published" in printed
    copy = folder.rename(folder.parent / "copy")
    shutil.copytree(copy, folder, copy_function=shutil.copyfile)  # at another time
    assert f"{TRAIN[0]}: read once, and whole" in fineweb(1, online=False)[0]
    assert "read once" not in fineweb(1, online=False)[0]
    shutil.rmtree(folder)
    shutil.copytree(copy, folder, copy_function=shutil.copyfile)
    spoil(folder / TRAIN[0])
    fineweb(1, online=False, refused=["ConnectionError"])
    assert fineweb(1)[1] == [TRAIN[0]]


@pytest.mark.parametrize("has_note", [False, True])
def test_a_download_that_was_only_allocated_is_not_whole(hub, fineweb, folder, write_shard,
                                                         has_note):
    """It has its size, and zeros behind what has come."""
    tokens = np.random.default_rng(0).integers(0, 50_257, 100_000)
    whole = write_shard(folder.parent / "whole", tokens).read_bytes()
    hub.files[TRAIN[0]] = whole
    fineweb(1)
    path = folder / TRAIN[0]
    if not has_note:
        path.with_suffix(".sha256").unlink()
    with open(path, "wb") as file:
        file.write(whole[:50_000])
        file.truncate(len(whole))
    fineweb(1, online=False, refused=["ConnectionError"])
    printed, fetched = fineweb(1)
    assert fetched == [TRAIN[0]] and f"{path}: not whole" in printed and path.read_bytes() == whole


def test_a_folder_that_can_only_be_read_is_taken(hub, fineweb, folder, monkeypatch):
    fineweb(1)
    for note in folder.glob("*.sha256"):
        note.unlink()
        note.symlink_to("/nowhere/at/all")  # which cannot be written
    assert "2 shards whole" in fineweb(1, online=False)[0]


def test_a_download_that_is_not_what_was_published_is_not_kept_and_the_rest_is(
    hub, fineweb, folder
):
    hub.damaged = TRAIN[0]
    fineweb(3, refused=[TRAIN[0], "did not send it as published; run this again"])
    hub.damaged = ""
    assert fineweb(1)[1] == [TRAIN[0]]  # a bad download that stayed would be refused again
    assert sorted(path.name for path in folder.glob("*.bin")) == [TRAIN[0], VAL]
    assert (folder / ".incoming" / TRAIN[2]).exists()  # of the larger download
    fineweb(3)
    assert sorted(path.name for path in folder.glob("[!f]*")) == []  # .incoming is gone
    assert sorted(path.name for path in folder.glob("*.bin")) == [*TRAIN[:3], VAL]


def test_a_larger_download_that_was_cut_short_is_kept_for_the_call_that_goes_on(fineweb, folder):
    cut = folder / ".incoming" / ".cache" / "huggingface" / "download" / "a.incomplete"
    cut.parent.mkdir(parents=True)  # where the library keeps them
    cut.write_bytes(b"200 MB")
    fineweb(1)
    assert cut.read_bytes() == b"200 MB"
    cut.unlink()
    fineweb(2)
    assert not (folder / ".incoming").exists()


def test_another_hub_may_tell_no_sums_or_know_fewer_shards(hub, fineweb, folder):
    """What it sent is never deleted, but for what is no shard."""
    hub.has_sums = False
    assert "gives no sha256" in fineweb(1)[0]
    hub.has_sums, hub.knows = True, 1
    printed, fetched = fineweb(3)
    assert fetched == TRAIN[1:3] and f"{TRAIN[2]}: " in printed and "gives no sha256" in printed
    hub.sends = 1
    fineweb(5, refused=[f"{TRAIN[4]}: ", "did not send it as published", "HF_ENDPOINT"])
    assert (folder / TRAIN[3]).read_bytes() == hub.files[TRAIN[3]]
    hub.has_sums, hub.damaged = False, TRAIN[4]
    hub.files[TRAIN[4]] += b"?"
    fineweb(5, refused=[TRAIN[4], "run this again"])


def test_shards_that_another_process_has_fetched_meanwhile_are_taken(hub, fineweb, folder,
                                                                     monkeypatch):
    @contextlib.contextmanager
    def wait(held):
        held.mkdir()
        for name in VAL, *TRAIN[:2]:
            (held / name).write_bytes(hub.files[name])
        yield

    monkeypatch.setattr(fineweb_tool, "alone_in", wait)
    printed, fetched = fineweb(2, online=False)
    assert "3 shards whole" in printed and not fetched


def test_an_impossible_number_of_shards_is_one_line(fineweb, folder):
    fineweb(0, refused=["N is 0"])
    fineweb(104, refused=["N is 104"])
    assert not folder.exists()
