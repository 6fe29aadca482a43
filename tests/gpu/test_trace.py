"""The bytes of compiled kernels as a trace counts them, beside counts by hand.

As a script it compiles each function for a card that is not there and prints its kernels' bytes.
"""

import json
import os
import subprocess
import sys

import host_gpu
import pytest

ROWS = 256 * 64  # elements
TABLE = 1024 * 64
BYTES_BY_HAND = {
    # Zeros; ids and gradients read, and as many sums read and written; all read and written as bf16
    "embedding_gradient": [4 * TABLE, 8 * 256 + 2 * ROWS + 2 * 4 * ROWS, 4 * TABLE + 2 * TABLE],
    "add_to_a_slice": [3 * 4 * ROWS // 2],
    # The product is read, and never written, though it is an argument that may be.
    "argument_left_as_it_is": [2 * ROWS + 2 * 6 * 256 + 4 * ROWS]}


@pytest.mark.slow
@pytest.mark.skipif(host_gpu.obstacle() is not None, reason=str(host_gpu.obstacle()))
def test_kernels_move_what_a_count_by_hand_says(tmp_path):
    environment = os.environ | dict(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == BYTES_BY_HAND


def embedding_gradient(grad, ids):
    return torch.ops.aten.embedding_dense_backward(grad, ids, 1024, -1, False)


def add_to_a_slice(x, y):
    x[:128].add_(y)


def argument_left_as_it_is(a, w, factors):
    x = a @ w
    for factor in factors.unbind(-1):  # so many that torch would store what comes of them
        x = x * factor[:, None]
    return (x + x.sum(-1, keepdim=True)).float()


if __name__ == "__main__":
    host_gpu.install("sm_90", execute=False)
    import torch
    from host_gpu import trace
    from torch._subclasses.fake_tensor import FakeTensorMode

    notes = trace.Notes()
    trace.stand_in_for_launches(notes)
    trace.stand_in_for_tensors(notes)
    bf16, fp32, int64 = torch.bfloat16, torch.float32, torch.int64
    arguments = {
        embedding_gradient: [(256, 64, bf16), (256, int64)],
        add_to_a_slice: [(256, 64, fp32), (128, 64, fp32)],
        argument_left_as_it_is: [(256, 64, bf16), (64, 64, bf16), (256, 6, bf16)]}
    counted = {}
    for function, described in arguments.items():
        with FakeTensorMode():
            tensors = [torch.empty(shape, dtype=dtype, device="cuda")
                       for *shape, dtype in described]
            compiled = torch.compile(function, dynamic=False)
            compiled(*tensors)
            notes.launches, notes.phase = [], "now"
            compiled(*tensors)
            notes.phase = None
        counted[function.__name__] = [x["bytes"] for x in notes.launches]
    print(json.dumps(counted))
