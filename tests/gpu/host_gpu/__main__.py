"""Run a script on the host GPU: python tests/gpu/host_gpu [--card sm_90] SCRIPT [ARGUMENT …]"""

import os
import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # tests/gpu, in place of this folder

import host_gpu  # noqa: E402


def main(argv: list[str]) -> None:
    name = "sm_90"
    if argv[:1] == ["--card"]:
        _, name, *argv = argv
    if reason := host_gpu.obstacle():
        sys.exit(reason)
    if not argv or name not in host_gpu.CARDS:
        sys.exit(f"{__doc__}\ncards: {' '.join(host_gpu.CARDS)}")
    host_gpu.install(name)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
