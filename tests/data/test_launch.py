"""data/launch.py: a script that is interrupted; two ranks that fail, or wait for a signal."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import launch as launch_tool
import pytest
from conftest import REPO

# A rank ends as its flag says, or waits.
RANK = """import os, sys, time
if "--fail" in sys.argv: sys.exit(3)
if "--die" in sys.argv: os.abort()
if "--pass" in sys.argv: sys.exit()
os.write(1, f"a rank waits {os.getpid()}\\n".encode())
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
    assert run.stdout.readline().startswith("a rank waits")
    run.send_signal(signal.SIGINT)
    check_end(run, 130, lines=1)


def test_a_run_that_ends_well_is_followed_by_what_to_type_next(launch, monkeypatch):
    monkeypatch.setenv("RUN_SH_NEXT", "Next: type this.")
    assert launch([], "--pass").communicate(timeout=60)[0] == "Next: type this.\n"
    assert launch([], "--fail").communicate(timeout=60)[0] == ""


@pytest.mark.parametrize(("exitcodes", "words", "code", "said"), [
    ({0: 3}, "", 3, ""),
    ({0: 1, 1: -9}, "", 1, "run.sh: rank 1 was killed, .* with --run_id RUN --resume auto\n"),
    ({0: -9}, "--run_id=a", 1, "run.sh: rank 0 was killed, .* command with --resume auto\n"),
    ({1: -6}, "", 1, "")])
def test_the_exit_code_is_the_first_failures_and_who_was_killed_is_told(
    monkeypatch, capsys, exitcodes, words, code, said
):
    """With a stand-in for torchrun."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import errors

    failures = {rank: SimpleNamespace(exitcode=number) for rank, number in exitcodes.items()}
    failed = errors.ChildFailedError.__new__(errors.ChildFailedError)
    failed.failures = failures
    failed.get_first_failure = lambda: next(iter(failures.items()))

    def run(args):
        assert args.training_script == launch_tool.__file__
        raise failed

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setenv("RUN_SH_LAUNCHER", "")
    with contextlib.ExitStack() as after:
        for number in signal.SIGUSR1, signal.SIGXCPU:
            after.callback(signal.signal, number, signal.getsignal(number))
        with pytest.raises(SystemExit) as end:
            launch_tool.main([*TWO_RANKS, "rank.py", *words.split()])
    assert end.value.code == code
    assert re.fullmatch(said, capsys.readouterr().err)


@for_ranks
@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(launch):
    run = launch(TWO_RANKS)
    assert all(run.stdout.readline().startswith("a rank waits") for _ in range(2))
    run.kill()
    run.communicate(timeout=60)  # ends when no rank is left, which would hold the pipes open


@for_ranks
@pytest.mark.slow
def test_a_rank_that_is_killed_is_told(launch):
    run = launch(TWO_RANKS)
    os.kill(int(run.stdout.readline().split()[-1]), signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "was killed" in errors and "--resume auto" in errors and errors.count("\n") <= 8


@for_ranks
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [("--fail", 3), ("--die", 1)])
def test_the_exit_code_is_that_of_the_ranks(launch, flag, code):
    check_end(launch(TWO_RANKS, flag), code)


@for_ranks
@pytest.mark.slow
@pytest.mark.parametrize(("start", "number"), [([], signal.SIGINT), (["nohup"], signal.SIGTERM),
                                               ([], signal.SIGUSR1), ([], signal.SIGXCPU)])
def test_ranks_are_interrupted_without_a_traceback(launch, start, number):
    """Under nohup a closed terminal does not end them."""
    run = launch(TWO_RANKS, start=start)
    try:
        assert all(run.stdout.readline().startswith("a rank waits") for _ in range(2))
        if start:
            run.send_signal(signal.SIGHUP)
            time.sleep(1.5)  # torchrun looks once a second
            assert run.poll() is None
        run.send_signal(number)
        announced = number in (signal.SIGUSR1, signal.SIGXCPU)
        check_end(run, 128 + (signal.SIGTERM if announced else number))
    finally:
        run.kill()


@for_ranks
@pytest.mark.slow
def test_a_signal_that_meets_torchrun_while_it_starts_leaves_no_rank(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_WHILE_STARTING)
    check_end(launch(TWO_RANKS), 128 + signal.SIGTERM)
