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
from conftest import PATIENCE, REPO, project_files

# A rank ends as its flag says, or waits.
RANK = """import os, sys, time
if "--fail" in sys.argv: sys.exit(3)
if "--die" in sys.argv: os.abort()
if "--pass" in sys.argv: sys.exit()
os.write(1, f"a rank waits {os.getpid()}\\n".encode())
time.sleep(600)
"""
for_ranks = pytest.mark.skipif(sys.platform != "linux", reason="torchrun's ranks are for CUDA")


@pytest.fixture
def launch(tmp_path):
    """`launch(ranks, *flags)` starts a script with flags."""
    (tmp_path / "rank.py").write_text(RANK)

    def start(ranks, *flags, start=()):
        launcher = [*start, sys.executable, REPO / "data" / "launch.py", str(ranks)]
        return subprocess.Popen([*launcher, tmp_path / "rank.py", *flags], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=os.environ | dict(PYTHONPATH=str(tmp_path)))

    return start


def check_end(run, code, lines=8):
    """No rank is left, which would hold the pipes open, and torchrun says little."""
    errors = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode == code
    assert "Traceback" not in errors and errors.count("\n") <= lines, errors


def test_a_script_by_itself_is_interrupted_in_one_line(launch):
    """As while it imports torch, before it catches anything itself."""
    check_end(launch(1, "--fail"), 3, lines=0)
    run = launch(1)
    assert run.stdout.readline().startswith("a rank waits")
    run.send_signal(signal.SIGINT)
    check_end(run, 130, lines=1)


def test_a_run_that_ends_well_is_followed_by_what_to_type_next(launch, monkeypatch):
    monkeypatch.setenv("RUN_SH_NEXT", "Next: type this.")
    assert launch(1, "--pass").communicate(timeout=PATIENCE)[0] == "Next: type this.\n"
    assert launch(1, "--fail").communicate(timeout=PATIENCE)[0] == ""


def test_all_that_starts_torchrun_takes_its_options_from_one_function():
    """Without the address it hangs for minutes where the machine's name is not to be resolved."""
    programs = [REPO / name for name in project_files() if name.endswith(".py")]
    starts = {path.name for path in programs if "\"--standalone\"" in path.read_text()}
    assert starts == {"launch.py"}
    options = launch_tool.torchrun_options(3)
    assert "--local-addr=127.0.0.1" in options and "--nproc_per_node=3" in options


@pytest.fixture
def torchrun(monkeypatch):
    """`torchrun(run)` puts `run` in its place, which is called with its arguments."""
    from torch.distributed import run as torchrun

    with contextlib.ExitStack() as after:
        for number in signal.SIGUSR1, signal.SIGXCPU:
            after.callback(signal.signal, number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN)  # else they would end the tests
        yield lambda run: monkeypatch.setattr(torchrun, "run", run)


@pytest.mark.parametrize(("exitcodes", "words", "code", "said"), [
    ({0: 3}, "", 3, ""),
    ({0: 1, 1: -9}, "", 1, "run.sh: rank 1 was killed, .* with --run_id RUN --resume auto\n"),
    ({0: -9}, "--run_id=a", 1, "run.sh: rank 0 was killed, .* command with --resume auto\n"),
    ({1: -6}, "", 1, "")])
def test_the_exit_code_is_the_first_failures_and_who_was_killed_is_told(
    torchrun, capsys, exitcodes, words, code, said
):
    from torch.distributed.elastic.multiprocessing import errors

    failures = {rank: SimpleNamespace(exitcode=number) for rank, number in exitcodes.items()}
    failed = errors.ChildFailedError.__new__(errors.ChildFailedError)
    failed.failures = failures
    failed.get_first_failure = lambda: next(iter(failures.items()))

    def run(args):
        assert args.training_script == launch_tool.__file__
        assert args.training_script_args == ["1", "rank.py", *words.split()]
        assert args.nproc_per_node == "2" and args.local_addr == "127.0.0.1"
        raise failed

    torchrun(run)
    with pytest.raises(SystemExit) as end:
        launch_tool.main(2, ["rank.py", *words.split()])
    assert end.value.code == code
    assert re.fullmatch(said, capsys.readouterr().err)


def test_signals_reach_torchrun(torchrun, monkeypatch):
    """Those by which a scheduler announces an end are taken for SIGTERM."""
    from torch.distributed.elastic.multiprocessing import api

    sent = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))

    def run(args):
        for number in signal.SIGUSR1, signal.SIGXCPU:
            signal.raise_signal(number)
        raise api.SignalException("told", signal.SIGTERM)

    torchrun(run)
    with pytest.raises(SystemExit) as end:
        launch_tool.main(2, ["rank.py"])
    assert end.value.code == 128 + signal.SIGTERM
    assert sent == 2 * [(os.getpid(), signal.SIGTERM)]


@pytest.mark.parametrize(("on_hangup", "handled"), [
    (signal.SIG_IGN, "SIGTERM,SIGINT"), (signal.SIG_DFL, None)])
def test_under_nohup_torchrun_leaves_a_hangup_alone(torchrun, monkeypatch, on_hangup, handled):
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "")  # so that it is put back
    monkeypatch.delenv("PET_SIGNALS_TO_HANDLE")
    signal.signal(signal.SIGHUP, on_hangup)
    seen = []
    torchrun(lambda args: seen.append(os.environ.get("PET_SIGNALS_TO_HANDLE")))
    launch_tool.main(2, ["rank.py"])
    assert seen == [handled]


@for_ranks
@pytest.mark.slow
def test_a_rank_that_is_killed_is_told(launch):
    run = launch(2)
    os.kill(int(run.stdout.readline().split()[-1]), signal.SIGKILL)
    _, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    assert "was killed" in errors and "--resume auto" in errors and errors.count("\n") <= 8


@for_ranks
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [("--fail", 3), ("--die", 1)])
def test_the_exit_code_is_that_of_the_ranks(launch, flag, code):
    check_end(launch(2, flag), code)


@for_ranks
@pytest.mark.slow
@pytest.mark.parametrize(("start", "number"), [([], signal.SIGINT), (["nohup"], signal.SIGTERM),
                                               ([], signal.SIGUSR1), ([], signal.SIGXCPU)])
def test_ranks_are_interrupted_without_a_traceback(launch, start, number):
    """Under nohup a closed terminal does not end them."""
    run = launch(2, start=start)
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
