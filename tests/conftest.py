"""What all tests share: one thread, the repository on the path, shards and ways to run scripts.

Where there is no CUDA device, a session of `-m gpu` has a stand-in for one (gpu/host_gpu/).
`--random-order SEED` shuffles the files, and the tests of each.
"""

import os

# Before torch is imported: sums are the same on every machine, and two cores do not fight.
os.environ["OMP_NUM_THREADS"] = "1"

import functools
import gc
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import host_gpu
import numpy as np
import pytest
import shards
from ledger.records import record_folders

REPO = Path(__file__).resolve().parent.parent
SCRIPTS = ["train_gpt.py", *(str(path.relative_to(REPO) / "train_gpt.py")
                             for path in record_folders(REPO / "records"))]
# Seconds after which what a test has started is said to hang. torchrun alone grants ranks 60 to
# end, and a virtual machine may stand still for as long.
PATIENCE = 300
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# nohup, for one, starts the tests with these ignored; what the tests start does not ignore them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# ---- How tests are run ----


def pytest_addoption(parser):
    parser.addoption("--random-order", type=int, metavar="SEED",
                     help="shuffle the files, and the tests of each")


def pytest_configure(config):
    """Install the stand-in before torch is imported; it cannot be undone."""
    if config.option.markexpr.startswith("gpu") and not host_gpu.obstacle():
        host_gpu.install("sm_90")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """A file's tests go to one worker, as they share what takes seconds to make.

    Golden runs share nothing, so each goes where there is room.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return nodeid if "test_golden.py" in nodeid else super()._split_scope(nodeid)

    if config.getoption("--random-order") is not None:
        config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(config, items):
    """Shuffle, if asked to; skip what is marked `gpu` where there is none."""
    seed = config.getoption("--random-order")
    if seed is not None:
        draw = random.Random(seed)
        places = {}
        for item in items:
            places.setdefault(item.path, draw.random())
        draw.shuffle(items)
        items.sort(key=lambda item: places[item.path])

    reason = host_gpu.obstacle() or "`-m gpu` alone runs it on a stand-in"
    for item in items:
        if item.get_closest_marker("gpu") and not sys.modules["torch"].cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device, {reason}"))


def pytest_collection_finish():
    gc.freeze()  # Python searches no cycles among all that is imported by now


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Put back what a run sets for its process: folder, handlers of signals, number of threads."""
    folder = Path.cwd()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return (yield)
    finally:
        os.chdir(folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)


# ---- Files ----


def project_files():
    """The names of the project's files, by git; without it, what needs them is skipped."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, text=True,
                            capture_output=True)
    names = listed.stdout.splitlines()
    if not names:
        pytest.skip(f"git lists no files of {REPO}", allow_module_level=True)
    return sorted(name for name in names if (REPO / name).is_file())


def copy_project(folder):
    """Copy the project's files into the folder, and link the data, which tests only read."""
    for name in project_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / name, folder / name)
    (folder / "data" / "pocket").symlink_to(REPO / "data" / "pocket")


# ---- Data ----


@pytest.fixture(scope="session")
def pocket_data():
    """The folder that holds pocket_train_*.bin and pocket_val_*.bin, built where it is missing."""
    subprocess.run([sys.executable, REPO / "data" / "pocket.py"], check=True, cwd=REPO)
    return REPO / "data" / "pocket"


@pytest.fixture(scope="session")
def write_shard():
    """`write_shard(path, tokens, ...)` writes a shard; magic, version and count may be wrong."""

    def write(path, tokens, magic=20240520, version=1, count=None):
        header = np.zeros(256, dtype="<i4")
        header[:3] = magic, version, len(tokens) if count is None else count
        path = Path(path)
        path.write_bytes(header.tobytes() + np.asarray(tokens).astype("<u2").tobytes())
        return path

    return write


def read_shard(path):
    """The tokens of a shard, its header held against the published layout."""
    header = np.fromfile(path, "<i4", 256)
    tokens = np.fromfile(path, "<u2", offset=1024)
    assert header.tolist() == [20240520, 1, len(tokens)] + 253 * [0]
    return tokens


@pytest.fixture(scope="session")
def gpt2():
    """tiktoken's encoding, which reads its files where TIKTOKEN_CACHE_DIR says."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"no network and no TIKTOKEN_CACHE_DIR with the gpt2 files: {error!r:.60}")


@pytest.fixture
def tiny_shards(tmp_path, write_shard):
    """`tiny_shards(counts, ...)` writes shards of seeded noise into tmp_path, in documents."""

    def make(counts, name="tiny_train", eot=256, document_tokens=200, seed=0):
        generator = np.random.default_rng(seed)
        for index, count in enumerate(counts):
            tokens = generator.integers(0, eot, size=count)
            tokens[generator.random(count) < 1 / document_tokens] = eot
            tokens[0] = eot
            write_shard(tmp_path / f"{name}_{index:06d}.bin", tokens)
        return str(tmp_path / f"{name}_*.bin")

    return make


# ---- Scripts ----


@functools.cache
def script_module(name):
    """The script of this name among SCRIPTS as a module."""
    return shards.load_script(REPO / name)


@pytest.fixture
def call_tool(tmp_path_factory, monkeypatch, capsys):
    """`call_tool(module, args, cwd)` runs an imported script of data/; what it printed. With
    `refused`, it has to end with code 2 and one line that has these parts."""

    def call(module, args, cwd, stdin=b"", refused=()):
        given = tmp_path_factory.mktemp("stdin") / "stdin"
        given.write_bytes(stdin)
        monkeypatch.chdir(cwd)
        code = 0
        with open(given) as opened, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", opened)
            patch.setattr(sys, "argv", [Path(module.__file__).name, *map(str, args)])
            try:
                module.run(module.main)
            except SystemExit as exit_:
                code = exit_.code or 0
        printed, errors = capsys.readouterr()
        assert (code, errors.count("\n")) == ((2, 1) if refused else (0, 0)), errors
        assert all(part in errors for part in refused), errors
        return printed

    return call


def final_values(text):
    """The block after the last `---` line as a dict of strings, empty where there is none."""
    block = text.rpartition("\n---\n")[2]
    return dict(re.findall(r"^(\w+): (.*)$", block, re.MULTILINE)) if block != text else {}
