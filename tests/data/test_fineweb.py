"""data/fineweb.py against a hub on the loopback address: what is fetched, what is not, and why."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "data" / "fineweb.py"
VAL = "fineweb_val_000000.bin"
TRAIN = [f"fineweb_train_{index:06d}.bin" for index in range(1, 104)]


class Hub(ThreadingHTTPServer):
    """A stand-in for huggingface.co that serves small shards and notes which were asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.requests, self.revisions = [], set()
        self.damage_next = 0  # so many downloads come with a flipped byte
        self.files = {}
        for index, name in enumerate([VAL, *TRAIN]):
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, 100 + index
            tokens = np.random.default_rng(index).integers(0, 50257, 100 + index)
            self.files[name] = header.tobytes() + tokens.astype("<u2").tobytes()

    @property
    def fetched(self):
        return [path for method, path in self.requests if method == "GET"]


class HubHandler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, body, **headers):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.requests.append(("POST", self.path))
        assert self.path.startswith("/api/datasets/kjj0/fineweb10B-gpt2/paths-info/"), self.path
        self.server.revisions.add(self.path.rpartition("/")[2])
        entries = []
        for name in re.findall(r"fineweb_\w+_\d{6}\.bin", form):
            content = self.server.files[name]
            sha256 = hashlib.sha256(content).hexdigest()
            entries.append({"type": "file", "path": name, "size": len(content), "oid": "0" * 40,
                            "lfs": {"oid": sha256, "size": len(content), "pointerSize": 134}})
        self.answer(json.dumps(entries).encode(), Content_Type="application/json")

    def do_GET(self):
        match = re.fullmatch(r"/datasets/kjj0/fineweb10B-gpt2/resolve/(\w+)/(\S+)", self.path)
        if not match:
            self.send_error(404)
            return
        revision, name = match.groups()
        self.server.revisions.add(revision)
        self.server.requests.append((self.command, name))
        content = self.server.files[name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": revision}
        if self.command == "GET" and self.server.damage_next:
            self.server.damage_next -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.answer(content, **headers)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def fineweb(hub, tmp_path):
    """`fineweb(*args, online=True)` runs the script; the shards land in tmp_path / 'fineweb'."""

    def run(*args, online=True):
        port = hub.server_address[1] if online else 1  # nothing listens on port 1
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, SCRIPT, "--out", tmp_path / "fineweb", *map(str, args)]
        hub.requests.clear()
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True,
                              text=True, timeout=120)

    return run


def files_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".bin")


def test_first_call_fetches_and_later_calls_need_no_network(hub, fineweb, tmp_path):
    folder = tmp_path / "fineweb"
    first = fineweb(2)
    assert first.returncode == 0, first.stderr
    assert hub.fetched == [VAL, *TRAIN[:2]]
    assert files_in(folder) == sorted([VAL, *TRAIN[:2]])
    for name in files_in(folder):
        assert (folder / name).read_bytes() == hub.files[name]
    assert not list(folder.glob(".partial*"))
    assert "3 shards whole, 303 tokens" in first.stdout  # 100 + 101 + 102
    # One revision, by its full hash, for the metadata and for the files.
    assert len(hub.revisions) == 1 and re.fullmatch("[0-9a-f]{40}", *hub.revisions)

    for online in (True, False):
        again = fineweb(2, online=online)
        assert again.returncode == 0, again.stderr
        assert hub.requests == []
        assert "3 shards whole" in again.stdout

    more = fineweb(3)
    assert more.returncode == 0, more.stderr
    assert hub.fetched == [TRAIN[2]]


def test_the_default_is_eight_training_shards(hub, fineweb, tmp_path):
    result = fineweb()
    assert result.returncode == 0, result.stderr
    assert files_in(tmp_path / "fineweb") == sorted([VAL, *TRAIN[:8]])


def test_damaged_shards_are_fetched_again_and_only_they(hub, fineweb, tmp_path):
    assert fineweb(4).returncode == 0
    damages = {
        "cut": lambda whole: whole[:-2],
        "longer": lambda whole: whole + b"\0\0",
        "flipped": lambda whole: whole[:1030] + bytes([whole[1030] ^ 4]) + whole[1031:],
        "empty": lambda whole: b"",
    }
    paths = [tmp_path / "fineweb" / name for name in TRAIN[:4]]
    for path, damage in zip(paths, damages.values()):
        path.write_bytes(damage(path.read_bytes()))
        assert path.read_bytes() != hub.files[path.name]

    result = fineweb(4, online=False)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "network" in result.stderr

    result = fineweb(4)
    assert result.returncode == 0, result.stderr
    assert hub.fetched == TRAIN[:4]
    assert f"{TRAIN[0]} (1,224 of 1,226 bytes)" in result.stdout
    assert f"{TRAIN[2]} (sha256 differs" in result.stdout
    for path in paths:
        assert path.read_bytes() == hub.files[path.name]


def test_a_damaged_download_is_repeated_and_never_kept(hub, fineweb, tmp_path):
    hub.damage_next = 1
    assert fineweb(1).returncode == 0
    assert hub.fetched == [VAL, VAL, TRAIN[0]]

    hub.damage_next = 10**6
    result = fineweb(2)
    assert result.returncode == 2
    last_line = result.stderr.splitlines()[-1]
    assert TRAIN[1] in last_line and "sha256" in last_line
    assert "Traceback" not in result.stderr
    assert files_in(tmp_path / "fineweb") == sorted([VAL, TRAIN[0]])


def test_a_damaged_manifest_is_asked_for_again(hub, fineweb, tmp_path):
    assert fineweb(1).returncode == 0
    (tmp_path / "fineweb" / "hub.json").write_text("{")
    assert fineweb(1).returncode == 0
    assert [method for method, _ in hub.requests] == ["POST"]


def test_without_a_network_one_line_says_what_to_do(hub, fineweb, tmp_path):
    result = fineweb(1, online=False)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "network" in result.stderr and "fineweb10B" in result.stderr
    assert files_in(tmp_path / "fineweb") == []


def test_shards_copied_from_elsewhere_are_accepted_offline_unchecked(hub, fineweb, tmp_path):
    folder = tmp_path / "fineweb"
    folder.mkdir()
    for name in (VAL, TRAIN[0]):
        (folder / name).write_bytes(hub.files[name])
    result = fineweb(1, online=False)
    assert result.returncode == 0, result.stderr
    assert "sha256 not checked" in result.stdout
    (folder / VAL).write_bytes(hub.files[VAL][:-2])
    result = fineweb(1, online=False)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and VAL in result.stderr


@pytest.mark.parametrize("number", ["0", "104", "many"])
def test_an_impossible_number_of_shards_is_one_line(fineweb, tmp_path, number):
    result = fineweb(number)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and number in result.stderr
    assert not (tmp_path / "fineweb").exists()
