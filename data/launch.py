"""Start a script as run.sh does: Ctrl-C while torch is imported is one line.

    launch.py SCRIPT [flags of the script]
    launch.py [options of torchrun] SCRIPT [flags of the script]

torchrun by itself would add 40 lines after an error or a signal. A run that ends well is followed
by the line in RUN_SH_NEXT.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


def end_with_parent() -> None:
    """Let this rank stop, as by SIGTERM, when its launcher is gone."""
    launcher = os.environ.pop("RUN_SH_LAUNCHER", None)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it was gone before
        sys.exit(143)


def tell_killed(failures: dict, words: list[str]) -> None:
    """Say which ranks were killed, since they cannot, and how to go on."""
    killed = [str(rank) for rank, failure in failures.items()
              if failure.exitcode == -signal.SIGKILL]
    if killed:
        given = any(word.split("=")[0] == "--run_id" for word in words)
        run_id = "" if given else "--run_id RUN "
        print(f"run.sh: rank {', '.join(killed)} was killed, as where memory runs out; a run that "
              f"saves goes on by the same command with {run_id}--resume auto", file=sys.stderr)


def run_ranks(words: list[str]) -> None:
    """Start the ranks by torchrun and end with the exit code of the first that failed."""
    from torch.distributed.elastic.multiprocessing import api, errors
    from torch.distributed.run import parse_args, run

    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which torchrun undoes
        os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    for announced in (signal.SIGUSR1, signal.SIGXCPU):  # by which schedulers announce an end
        signal.signal(announced, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    os.environ["RUN_SH_LAUNCHER"] = str(os.getpid())
    args = parse_args(words)
    args.training_script_args.insert(0, args.training_script)
    args.training_script = __file__  # which runs it in each rank
    try:
        run(args)
    except errors.ChildFailedError as error:
        tell_killed(error.failures, words)
        sys.exit(max(1, error.get_first_failure()[1].exitcode))
    except api.SignalException as told:
        # A rank that torchrun was about to start when the signal came
        with open("/proc/thread-self/children") as children:
            for child in children.read().split():
                os.kill(int(child), told.sigval)
        sys.exit(128 + told.sigval)


def run_script(words: list[str]) -> None:
    """Run a script in this process."""
    end_with_parent()
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


def main(words: list[str]) -> None:
    next_words = os.environ.pop("RUN_SH_NEXT", "")
    try:
        if words[0].startswith("-"):
            run_ranks(words)
        else:
            run_script(words)
    except SystemExit as end:
        if end.code:
            raise
    if next_words:
        print(next_words)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line is enough
            print("run.sh: interrupted", file=sys.stderr)
        sys.exit(130)
