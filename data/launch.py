"""torchrun as run.sh starts it: after an error or a signal it would add 40 lines of its own.

    launch.py [options of torchrun] SCRIPT [flags of the script]
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import api, errors
from torch.distributed.run import parse_args, run


def main() -> None:
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which torchrun undoes
        os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    try:
        run(parse_args(sys.argv[1:]))
    except errors.ChildFailedError as error:
        sys.exit(max(1, error.get_first_failure()[1].exitcode))
    except api.SignalException as told:
        # A rank that torchrun was about to start when the signal came
        with open("/proc/thread-self/children") as children:
            for child in children.read().split():
                os.kill(int(child), told.sigval)
        sys.exit(128 + told.sigval)


if __name__ == "__main__":
    main()
