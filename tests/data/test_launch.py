"""data/launch.py: a script that is interrupted; two ranks that fail, or wait for a signal."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO

# A rank ends as its flag says, or waits.
RANK = """import os, sys, time
if "--fail" in sys.argv: sys.exit(3)
if "--die" in sys.argv: os.abort()
os.write(1, b"a rank waits\\n")
time.sleep(600)
"""
# A signal comes when the first rank is started and torchrun has not noted it yet.
SIGNAL_WHILE_STARTING = """
import os, signal, subprocess, sys
if "--standalone" in sys.argv:
    start = subprocess.Popen.__init__
    def start_and_signal(self, args, **options):
        start(self, args, **options)
        if options.get("start_new_session"):
            os.kill(os.getpid(), signal.SIGTERM)
    subprocess.Popen.__init__ = start_and_signal
"""
TWO_RANKS = ["--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2"]
for_ranks = pytest.mark.skipif(sys.platform != "linux", reason="torchrun's ranks are for CUDA")


@pytest.fixture
def launch(tmp_path):
    """`launch(options, *flags)` starts a script with flags, by options of torchrun."""
    (tmp_path / "rank.py").write_text(RANK)

    def start(options, *flags, start=()):
        launcher = [*start, sys.executable, REPO / "data" / "launch.py"]
        return subprocess.Popen([*launcher, *options, tmp_path / "rank.py", *flags], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=os.environ | dict(PYTHONPATH=str(tmp_path)))

    return start


def check_end(run, code, lines=8):
    """No rank is left, which would hold the pipes open, and torchrun says little."""
    errors = run.communicate(timeout=60)[1]
    assert run.returncode == code
    assert "Traceback" not in errors and errors.count("\n") <= lines, errors


def test_a_script_by_itself_is_interrupted_in_one_line(launch):
    """As while it imports torch, before it catches anything itself."""
    check_end(launch([], "--fail"), 3, lines=0)
    run = launch([])
    assert run.stdout.readline() == "a rank waits\n"
    run.send_signal(signal.SIGINT)
    check_end(run, 130, lines=1)


@for_ranks
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [("--fail", 3), ("--die", 1)])
def test_the_exit_code_is_that_of_the_ranks(launch, flag, code):
    check_end(launch(TWO_RANKS, flag), code)


@for_ranks
@pytest.mark.slow
@pytest.mark.parametrize(("start", "number"), [([], signal.SIGINT), (["nohup"], signal.SIGTERM)])
def test_ranks_are_interrupted_without_a_traceback(launch, start, number):
    """Under nohup a closed terminal does not end them."""
    run = launch(TWO_RANKS, start=start)
    try:
        assert [run.stdout.readline() for _ in range(2)] == ["a rank waits\n"] * 2
        if start:
            run.send_signal(signal.SIGHUP)
            time.sleep(1.5)  # torchrun looks once a second
            assert run.poll() is None
        run.send_signal(number)
        check_end(run, 128 + number)
    finally:
        run.kill()


@for_ranks
@pytest.mark.slow
def test_a_signal_that_meets_torchrun_while_it_starts_leaves_no_rank(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_WHILE_STARTING)
    check_end(launch(TWO_RANKS), 128 + signal.SIGTERM)
