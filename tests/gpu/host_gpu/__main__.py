"""Run a script on the host GPU, an H100: python tests/gpu/host_gpu SCRIPT [ARGUMENT …]"""

import os
import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # tests/gpu, in place of this folder

import host_gpu  # noqa: E402


def main(argv: list[str]) -> None:
    if reason := host_gpu.obstacle():
        sys.exit(reason)
    if not argv:
        sys.exit(__doc__)
    host_gpu.install("sm_90")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
