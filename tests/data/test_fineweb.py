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

VAL = "fineweb_val_000000.bin"
TRAIN = [f"fineweb_train_{index:06d}.bin" for index in range(1, 104)]


class Hub(BaseHTTPRequestHandler):
    """A stand-in for huggingface.co that serves its server's files and notes what it was asked."""

    def log_message(self, *args):
        pass

    def answer(self, body, headers):
        self.send_response(200)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        path, _, revision = self.path.rpartition("/")
        assert path == "/api/datasets/kjj0/fineweb10B-gpt2/paths-info", path
        self.server.requests.append(("POST", revision, path))
        entries = []
        for name in re.findall(r"fineweb_\w+_\d{6}\.bin", form):
            content = self.server.files[name]
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content),
                   "pointerSize": 134}
            entries.append({"type": "file", "path": name, "size": len(content), "oid": "0" * 40,
                            "lfs": lfs})
        self.answer(json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def do_GET(self):
        path, _, name = self.path.rpartition("/")
        path, _, revision = path.rpartition("/")
        assert path == "/datasets/kjj0/fineweb10B-gpt2/resolve", path
        self.server.requests.append((self.command, revision, name))
        content = self.server.files[name]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        if self.command == "GET" and self.server.damage_next:
            self.server.damage_next -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.answer(content, {"ETag": etag, "X-Repo-Commit": revision})

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, write_shard):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests, server.files = [], {}
    server.damage_next = 0  # so many downloads come with a flipped byte
    for index, name in enumerate([VAL, *TRAIN]):
        tokens = np.random.default_rng(index).integers(0, 50257, 100 + index)
        server.files[name] = write_shard(tmp_path / "shard", tokens).read_bytes()
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
    """`fineweb(*args, online=True)` runs the script; what it printed, and the shards it fetched.

    With `refused`, the run has to end with code 2 and a last line that has these parts; without a
    network that line is the only one.
    """

    def run(*args, online=True, refused=()):
        port = hub.server_address[1] if online else 1  # nothing listens on port 1
        env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1",
                            "HF_HOME": str(folder.parent / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, REPO / "data" / "fineweb.py", "--out", folder, *map(str, args)]
        hub.requests.clear()
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == (2 if refused else 0), done.stderr
        lines = done.stderr.splitlines()
        assert "Traceback" not in done.stderr and (online or len(lines) <= 1)
        assert all(part in lines[-1] for part in refused), done.stderr
        return done.stdout, [name for method, _, name in hub.requests if method == "GET"]

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
    assert re.fullmatch("[0-9a-f]{40}", *{revision for _, revision, _ in hub.requests})
    for online in (True, False):
        assert "3 shards whole" in fineweb(2, online=online)[0] and hub.requests == []
    (folder / "hub.json").write_text("{")  # what the hub said is asked for again
    assert fineweb(2)[1] == [] and [method for method, *_ in hub.requests] == ["POST"]
    assert fineweb()[1] == TRAIN[2:8]  # the default is eight


def test_damaged_shards_are_fetched_again_and_only_they(hub, fineweb, folder):
    fineweb(4)
    cut, longer, flipped, empty = (hub.files[name] for name in TRAIN[:4])
    damaged = [cut[:-2], longer + b"\0\0", flipped[:-1] + bytes([flipped[-1] ^ 4]), b""]
    for name, content in zip(TRAIN, damaged):
        (folder / name).write_bytes(content)
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
    fineweb(number, online=False, refused=[number])
    assert not folder.exists()
