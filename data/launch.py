"""Start a script as run.sh does: Ctrl-C while torch is imported is one line.

    launch.py SCRIPT [flags of the script]
    launch.py [options of torchrun] SCRIPT [flags of the script]

torchrun by itself would add 40 lines after an error or a signal.
"""

import os
import runpy
import signal
import sys


def run_ranks(words: list[str]) -> None:
    """Start the ranks by torchrun and end with the exit code of the first that failed."""
    from torch.distributed.elastic.multiprocessing import api, errors
    from torch.distributed.run import parse_args, run

    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which torchrun undoes
        os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    args = parse_args(words)
    args.training_script_args.insert(0, args.training_script)
    args.training_script = __file__  # which runs it in each rank
    try:
        run(args)
    except errors.ChildFailedError as error:
        sys.exit(max(1, error.get_first_failure()[1].exitcode))
    except api.SignalException as told:
        # A rank that torchrun was about to start when the signal came
        with open("/proc/thread-self/children") as children:
            for child in children.read().split():
                os.kill(int(child), told.sigval)
        sys.exit(128 + told.sigval)


def main(words: list[str]) -> None:
    if words[0].startswith("-"):
        return run_ranks(words)
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line is enough
            print("run.sh: interrupted", file=sys.stderr)
        sys.exit(130)
