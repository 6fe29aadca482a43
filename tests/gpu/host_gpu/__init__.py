"""A GPU made of the host: the GPU path of the script, compiled and executed where there is no GPU.

Torch is told, before it is imported, that a CUDA device is there. Its memory is the host's and its
operators are the CPU's (device.cpp); `torch.cuda` and Triton's driver answer as one of the cards
would (stand_ins.py, cards.py); so Dynamo, AOTAutograd and Inductor make the very kernels that the
card would get, and Triton's interpreter, made fit for them, executes these (interpreter.py).

`install` comes before torch is imported and cannot be undone, so it lives in processes of its own,
as those of `pytest -m gpu`.

What it shows: that the path runs, what it computes, in which graphs and kernels. What it does not:
any time, where the host would wait, a GPU's rounding of matrix products, races, streams, shared
memory, NCCL. Its name, "host standing in for NVIDIA H100", is in every log that is made on it.
"""

from host_gpu.cards import CARDS
from host_gpu.library import obstacle
from host_gpu.stand_ins import install, use_card

__all__ = ["CARDS", "install", "obstacle", "use_card"]
