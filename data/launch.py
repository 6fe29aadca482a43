"""Start a script in this process, or on several ranks of this machine by torchrun.

    launch.py RANKS SCRIPT [flags of the script]

Ctrl-C while torch is imported is one line, and so is an error, after which torchrun by itself
would add 40. A run that ends well is followed by the line in RUN_SH_NEXT.
"""

import os
import runpy
import signal
import sys


def torchrun_options(ranks: int) -> list[str]:
    """torchrun's options for the ranks of one machine.

    Without the address it waits for minutes where the machine's own name is not to be resolved.
    """
    return ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={ranks}"]


def tell_killed(failures: dict, words: list[str]) -> None:
    """Say which ranks were killed, since they cannot, and how to go on."""
    killed = [str(rank) for rank, failure in failures.items()
              if failure.exitcode == -signal.SIGKILL]
    if killed:
        given = any(word.split("=")[0] == "--run_id" for word in words)
        run_id = "" if given else "--run_id RUN "
        print(f"run.sh: rank {', '.join(killed)} was killed, as where memory runs out; a run that "
              f"saves goes on by the same command with {run_id}--resume auto", file=sys.stderr)


def run_ranks(ranks: int, words: list[str]) -> None:
    """Start the ranks and end with the exit code of the first that failed."""
    from torch.distributed.elastic.multiprocessing import api, errors
    from torch.distributed.run import parse_args, run

    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which torchrun undoes
        os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    for announced in (signal.SIGUSR1, signal.SIGXCPU):  # by which schedulers announce an end
        signal.signal(announced, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        run(parse_args([*torchrun_options(ranks), __file__, "1", *words]))
    except errors.ChildFailedError as error:
        tell_killed(error.failures, words)
        sys.exit(max(1, error.get_first_failure()[1].exitcode))
    except api.SignalException as told:
        sys.exit(128 + told.sigval)


def run_script(words: list[str]) -> None:
    """Run a script in this process."""
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


def main(ranks: int, words: list[str]) -> None:
    next_words = os.environ.pop("RUN_SH_NEXT", "")
    try:
        if ranks > 1:
            run_ranks(ranks, words)
        else:
            run_script(words)
    except SystemExit as end:
        if end.code:
            raise
    if next_words:
        print(next_words)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line is enough
            print("run.sh: interrupted", file=sys.stderr)
        sys.exit(130)
