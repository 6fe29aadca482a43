"""data/fineweb.py against a hub on the loopback address: what is fetched, what is not, and why."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import REPO

SCRIPT = REPO / "data" / "fineweb.py"
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
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "fineweb"


@pytest.fixture
def fineweb(hub, folder):
    """`fineweb(*args, online=True)` runs the script, the shards go to `folder`; what it printed.

    With `refused`, the run has to end with code 2 and a last line that has these parts; without a
    network that line is the only one.
    """

    def run(*args, online=True, refused=()):
        port = hub.server_address[1] if online else 1  # nothing listens on port 1
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(folder.parent / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, SCRIPT, "--out", folder, *map(str, args)]
        hub.requests.clear()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == (2 if refused else 0), done.stderr
        assert "Traceback" not in done.stderr
        if refused:
            lines = done.stderr.splitlines()
            assert online or len(lines) == 1
            assert all(part in lines[-1] for part in refused), done.stderr
        return done.stdout

    return run


def files_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".bin")


def test_first_call_fetches_and_later_calls_need_no_network(hub, fineweb, folder):
    printed = fineweb(2)
    assert hub.fetched == [VAL, *TRAIN[:2]]
    assert files_in(folder) == sorted(hub.fetched)
    for name in files_in(folder):
        assert (folder / name).read_bytes() == hub.files[name]
    assert not list(folder.glob(".partial*"))
    assert "3 shards whole, 303 tokens" in printed  # 100 + 101 + 102
    # One revision, by its full hash, for the metadata and for the files.
    assert len(hub.revisions) == 1 and re.fullmatch("[0-9a-f]{40}", *hub.revisions)

    for online in (True, False):
        assert "3 shards whole" in fineweb(2, online=online)
        assert hub.requests == []
    fineweb(3)
    assert hub.fetched == [TRAIN[2]]
    fineweb()  # the default is eight
    assert hub.fetched == TRAIN[3:8]


def test_damaged_shards_are_fetched_again_and_only_they(hub, fineweb, folder):
    fineweb(4)
    paths = [folder / name for name in TRAIN[:4]]
    cut, longer, flipped, empty = (path.read_bytes() for path in paths)
    paths[0].write_bytes(cut[:-2])
    paths[1].write_bytes(longer + b"\0\0")
    paths[2].write_bytes(flipped[:1030] + bytes([flipped[1030] ^ 4]) + flipped[1031:])
    paths[3].write_bytes(b"")
    fineweb(4, online=False, refused=["network"])

    printed = fineweb(4)
    assert hub.fetched == TRAIN[:4]
    assert f"{TRAIN[0]} (1,224 of 1,226 bytes)" in printed
    assert f"{TRAIN[2]} (sha256 differs" in printed
    assert [path.read_bytes() for path in paths] == [cut, longer, flipped, empty]


def test_a_damaged_download_is_repeated_and_never_kept(hub, fineweb, folder):
    hub.damage_next = 1
    fineweb(1)
    assert hub.fetched == [VAL, VAL, TRAIN[0]]

    hub.damage_next = 10**6
    fineweb(2, refused=[TRAIN[1], "sha256"])
    assert files_in(folder) == sorted([VAL, TRAIN[0]])


def test_a_damaged_manifest_is_asked_for_again(hub, fineweb, folder):
    fineweb(1)
    (folder / "hub.json").write_text("{")
    fineweb(1)
    assert [method for method, _ in hub.requests] == ["POST"]


def test_without_a_network_one_line_says_what_to_do(fineweb, folder):
    fineweb(1, online=False, refused=["network", "fineweb10B"])
    assert files_in(folder) == []


def test_shards_copied_from_elsewhere_are_accepted_offline_unchecked(hub, fineweb, folder):
    folder.mkdir()
    for name in (VAL, TRAIN[0]):
        (folder / name).write_bytes(hub.files[name])
    assert "sha256 not checked" in fineweb(1, online=False)
    (folder / VAL).write_bytes(hub.files[VAL][:-2])
    fineweb(1, online=False, refused=[VAL])


@pytest.mark.parametrize("number", ["0", "104", "many"])
def test_an_impossible_number_of_shards_is_one_line(fineweb, folder, number):
    fineweb(number, online=False, refused=[number])
    assert not folder.exists()
