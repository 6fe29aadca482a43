"""What all tests share: one thread, the repository on the path, shards and a way to run the script.

Fixtures, each explained where it is defined:

    pocket_data         the folder of the pocket's shards, built once where it is missing
    build_once          build something that costs seconds once for all workers of a session
    call_tool           run a script of data/ in this process
    write_shard         write any tokens, or a deliberately wrong header, as a shard
    tiny_shards         write small synthetic shards and get the glob that finds them
    run_script          run train_gpt.py in a process of its own, or under torchrun
    final_values        read the `key: value` block that a run ends with

Tests marked `gpu` run on a stand-in for a GPU (gpu/host_gpu/) where there is no CUDA device.
"""

import os

# Before torch is imported: sums are the same on every machine, and two cores do not fight.
os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import fcntl
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import host_gpu
import numpy as np
import pytest
from host_gpu.session import HostGpuSession, is_for_gpu

REPO = Path(__file__).resolve().parent.parent
MOST_WORKERS = 8  # each holds torch, and some tests start processes of their own
KEPT_TOGETHER = {  # files whose tests go to one worker, as they share what takes seconds to make
    "test_gpu.py": "the device",
    "test_host_gpu.py": "the device",
}
TINY_MODEL = dict(  # of bytes, for any number of layers
    vocab_size=257, eot_token=256, model_dim=32, head_dim=16, backout_layer=0
)  # fmt: skip

# Whoever starts the tests may ignore these, as nohup does; what the tests start does not.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """A worker for each core that this process may use."""
    may_use = getattr(os, "sched_getaffinity", None)
    cores = len(may_use(0)) if may_use else os.cpu_count()
    return min(cores, MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deal tests out by file, as pytest tears fixtures down, and some files together."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0].rpartition("/")[2]
            return KEPT_TOGETHER.get(file, file)

    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """Where torch finds no CUDA device, run what is marked `gpu` on a host GPU, or skip it."""
    gpu_items = list(filter(is_for_gpu, items))
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    if obstacle := host_gpu.obstacle():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device, {obstacle}"))
    else:
        config.pluginmanager.register(HostGpuSession())
        items.sort(key=is_for_gpu)  # they are run beside the others, which need not wait


@pytest.fixture(scope="session")
def build_once(tmp_path_factory):
    """`build_once(name, build)` returns a folder that build(folder) has filled.

    The first worker that asks for the name builds it, and the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of the whole session

    def folder_of(name, build):
        folder, whole = base / "built" / name, base / "built" / f"{name}.whole"
        folder.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                build(folder)
                whole.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def pocket_data():
    """The folder that holds pocket_train_*.bin and pocket_val_*.bin, as a Path.

    The repository's own data/pocket is used; data/pocket.py returns at once where it is whole.
    """
    subprocess.run([sys.executable, REPO / "data" / "pocket.py"], check=True, cwd=REPO)
    return REPO / "data" / "pocket"


@pytest.fixture
def call_tool(tmp_path_factory, monkeypatch, capsys):
    """`call_tool(module, args, cwd, stdin=b"")` runs a script of data/ as its command would.

    `module` is the imported script. Returns a namespace with returncode, stdout and stderr.
    """

    def call(module, args, cwd, stdin=b""):
        given = tmp_path_factory.mktemp("stdin") / "stdin"
        given.write_bytes(stdin)
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", [Path(module.__file__).name, *map(str, args)])
        handler, code = signal.getsignal(signal.SIGTERM), 0
        with open(given) as opened, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", opened)
            try:
                module.run(module.main)
            except SystemExit as exit_:
                code = exit_.code or 0
            finally:
                signal.signal(signal.SIGTERM, handler)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call


@pytest.fixture(scope="session")
def write_shard():
    """`write_shard(path, tokens, magic=, version=, count=)` writes one shard and returns its path.

    A shard is 256 int32 (magic 20240520, version 1, number of tokens, zeros), then the tokens as
    uint16. The keywords make it wrong on purpose; `count` is the number of tokens by default.
    """

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


@pytest.fixture
def tiny_shards(tmp_path, write_shard):
    """`tiny_shards(counts, ...)` writes one shard a count into tmp_path and returns their glob.

    The tokens are seeded noise in [0, eot); each shard begins with `eot`, and further documents
    begin after a random length with mean `document_tokens`.

        train = tiny_shards([5000, 3000])                   # '.../tiny_train_*.bin'
        val = tiny_shards([2048], name="tiny_val", seed=1)
    """

    def make(counts, name="tiny_train", eot=256, document_tokens=200, seed=0):
        generator = np.random.default_rng(seed)
        for index, count in enumerate(counts):
            tokens = generator.integers(0, eot, size=count)
            tokens[generator.random(count) < 1 / document_tokens] = eot
            tokens[0] = eot
            write_shard(tmp_path / f"{name}_{index:06d}.bin", tokens)
        return str(tmp_path / f"{name}_*.bin")

    return make


@pytest.fixture
def run_script(tmp_path):
    """`run_script(args, nproc=1, cwd=tmp_path, env=None, timeout=120, script=…)` runs train_gpt.py,
    or the script of a record.

    `args` is a list, each entry made a string. One process runs it plainly, more than one run it
    under torchrun on this machine, all with one thread a process. `env` adds to the environment.
    The run's logs/ land in `cwd`. Returns a CompletedProcess with stdout and stderr as text;
    what it started is killed when `timeout` (seconds) is over, and TimeoutExpired raised.
    """

    def run(args, nproc=1, cwd=tmp_path, env=None, timeout=120, script=REPO / "train_gpt.py"):
        launcher = [sys.executable]
        if nproc > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command = [*launcher, str(script), *map(str, args)]
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            # torchrun's workers are in the same group: none may outlive the test.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run


@pytest.fixture(scope="session")
def final_values():
    """`final_values(text)` reads the block after the last `---` line as a dict of strings."""

    def read(text):
        block = text.rpartition("\n---\n")[2]
        assert block != text, f"no line of --- in:\n{text}"
        pairs = (line.partition(": ") for line in block.splitlines())
        return {key: value for key, separator, value in pairs if separator}

    return read
