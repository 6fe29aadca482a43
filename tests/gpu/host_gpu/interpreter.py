"""Triton's interpreter, made fit for the kernels that Inductor writes.

What it lacks, and what is put in its place:

- bf16 is cut off instead of rounded, products of bf16 and FP8 multiply the bits: torch converts
  (other arithmetic on them is Inductor's in fp32, or it would be on the bits, too);
- libdevice, the maths that Inductor calls, is empty: NumPy's functions;
- arguments are copied to the host and back, the language is patched at every launch: neither.
"""

import math
import types

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NARROW = {  # floats that NumPy has not: their bits, in the interpreter's arrays
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8)}
LIBDEVICE = dict(  # what our kernels call
    abs=np.abs, cos=np.cos, erf=lambda x: torch.from_numpy(x).erf().numpy(), exp=np.exp,
    floor=np.floor, isinf=np.isinf, isnan=np.isnan, log=np.log, pow=np.power,
    rsqrt=lambda x: 1 / np.sqrt(x), sin=np.sin, sqrt=np.sqrt, tanh=np.tanh)

MOST_ROWS, MOST_ELEMENTS = 2**7, 2**14  # of a block, with and without a reduction of its rows


def install() -> None:
    """Put everything into Triton's interpreter and Inductor's launcher. It cannot be undone."""
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = lambda self, x, type, rounding: cast(self, x, type)
    InterpreterBuilder.create_dot = dot
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *args: None
    executor.__call__ = np.errstate(all="ignore")(executor.__call__)  # of lanes that are masked
    for name, function in LIBDEVICE.items():
        setattr(libdevice, name, elementwise(function))
    patch_language_once()
    take_the_largest_blocks()


# ---- Numbers ----------------------------------------------------------------


def unpack(handle: TensorHandle) -> np.ndarray:
    """The values: those of narrow floats as fp32."""
    if handle.dtype.scalar not in NARROW:
        return handle.data
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    return bits.view(NARROW[handle.dtype.scalar][0]).float().numpy()


def pack(values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """The values rounded to the type, as torch rounds: to the nearest, ties to even."""
    if dtype not in NARROW:
        return TensorHandle(values.astype(interpreter._get_np_dtype(dtype)), dtype)
    float_type, bits_type = NARROW[dtype]
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(float_type)
    return TensorHandle(rounded.view(bits_type).numpy(), dtype)


def cast(self, handle: TensorHandle, dtype: tl.dtype) -> TensorHandle:
    return pack(unpack(handle), dtype.scalar)


def dot(self, a, b, accumulator, input_precision, max_num_imprecise_acc) -> TensorHandle:
    """a @ b + accumulator, in fp32 as tensor cores do it; TF32 is not rounded to."""
    product = unpack(a).astype(np.float32) @ unpack(b).astype(np.float32)
    total = product.astype(accumulator.data.dtype) + accumulator.data
    return TensorHandle(total, accumulator.dtype.scalar)


def elementwise(function):
    """A function of libdevice by NumPy's. Booleans are its int32, as in CUDA's C."""

    def call(*arguments, **kwargs):
        tensors = [interpreter.interpreter_semantic.to_tensor(x) for x in arguments]
        first = tensors[0]
        values = function(*(unpack(x.handle) for x in tensors))
        dtype = tl.int32 if values.dtype == bool else first.dtype
        return as_tensor(pack(values, dtype))

    return call


def as_tensor(handle: TensorHandle) -> tl.tensor:
    """As kernels see it; an array of no dimensions, and of one element in none, is a scalar."""
    if handle.data.ndim == 0:
        return tl.tensor(TensorHandle(handle.data.reshape(1), handle.dtype), handle.dtype)
    return tl.tensor(handle, tl.block_type(handle.dtype, list(handle.data.shape)))


# ---- Launches ---------------------------------------------------------------


def patch_language_once() -> None:
    """The interpreter patches triton.language at each launch, and each call within one."""
    language = types.SimpleNamespace(__globals__=dict(tl=tl, core=tl.core))
    interpreter._patch_lang(language)
    interpreter._patch_lang = lambda function: types.SimpleNamespace(restore=lambda: None)


def take_the_largest_blocks() -> None:
    """Of the configurations that a GPU would be timed with, take that of the fewest programs: all
    compute the same. Where a power of two more of whole rows fits into a block, a block has these:
    XBLOCK is open, and one that divides the rows needs no mask that may have been left out."""
    from torch._inductor.runtime.hints import HeuristicType
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    run = CachingAutotuner.run

    def elements(config: triton.Config) -> int:
        return math.prod(size for name, size in config.kwargs.items() if name.endswith("BLOCK"))

    def run_the_largest(self, *args, **kwargs):
        if not getattr(self, "largest", False):
            self.largest = True
            self.configs = [config] = [max(self.configs, key=elements)]
            rows = dict(zip(self.fn.arg_names, args)).get("xnumel", 0)
            pointwise = self.heuristic_type == HeuristicType.POINTWISE
            block = math.gcd(rows, MOST_ELEMENTS if pointwise else MOST_ROWS)
            if "XBLOCK" in config.kwargs and "YBLOCK" not in config.kwargs:
                config.kwargs["XBLOCK"] = max(block, config.kwargs["XBLOCK"])
        return run(self, *args, **kwargs)

    CachingAutotuner.run = run_the_largest
