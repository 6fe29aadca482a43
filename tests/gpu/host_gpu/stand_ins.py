"""The stand-ins of torch.cuda and of Triton's driver, by card.

Each group says who asks. They are put in place after `import torch` and before Dynamo and Inductor
are imported, which copy what they need of torch.cuda when they are.
"""

import contextlib
import os
import types

from host_gpu import library
from host_gpu.cards import CARDS, Card

card: Card | None = None  # what the device is now


def install(name: str = "sm_90", execute: bool = True) -> None:
    """Make torch find one CUDA device, the card of that name in CARDS. It cannot be undone.

    execute: Triton's kernels are run, by its interpreter. Else they can be compiled only.
    Raises RuntimeError where torch is imported already, or device.cpp does not compile.
    """
    os.environ["TRITON_INTERPRET"] = "1" if execute else "0"  # read when Triton is imported
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(library.cache_folder() / "inductor"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool's processes have no GPU
    library.load()
    stand_in_for_torch_cuda()
    stand_in_for_c_functions()
    use_card(name)
    stand_in_for_triton_driver()
    from torch._inductor import config

    # Before sm_90 Inductor times whether products of odd sizes, as gates have, shall be padded.
    # From sm_90 on it does not pad them, as they wait for memory; here it never does.
    config.shape_padding = False
    if execute:
        from host_gpu import interpreter

        interpreter.install()


def use_card(name: str) -> None:
    """Let the device be this card of CARDS from now on; compile anew what is to be for it."""
    global card
    card = CARDS[name]
    from torch._dynamo import device_interface
    from torch._inductor import codecache
    from torch._inductor.runtime.hints import DeviceProperties

    DeviceProperties.create.cache_clear()
    codecache.CacheBase.get_system.cache_clear()  # part of the keys of Inductor's caches
    device_interface.caching_worker_device_properties["cuda"] = [properties()]


def properties(device=None) -> types.SimpleNamespace:
    """What torch.cuda.get_device_properties gives, as far as anybody asks."""
    return types.SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1],
        total_memory=card.memory, multi_processor_count=card.multiprocessors,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=card.shared_memory_per_block,
        shared_memory_per_multiprocessor=card.shared_memory_per_block + 2**10,
        max_threads_per_multi_processor=card.threads_per_multiprocessor,
        max_threads_per_block=1024, regs_per_multiprocessor=2**16, warp_size=32,
        L2_cache_size=50 * 2**20,
        gcnArchName="")  # AMD's


class Stream:
    """The only stream. All that is asked of it is done already: the host computes in order."""

    stream_id = cuda_stream = device_index = 0

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or Event()


class Event:
    """torch.cuda.Event of work that is done already."""

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


def stand_in_for_torch_cuda() -> None:
    """What the script, torch's own Python and Inductor ask of torch.cuda."""
    import torch
    from torch.utils import collect_env

    def nothing():  # a new function each time: Dynamo wants to tell them apart
        return lambda *args, **kwargs: None

    stream, cuda = Stream(), torch.cuda
    stream.device = torch.device("cuda", 0)
    # Is a device there, how many, which one: Ranks and everybody else.
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda._lazy_init = nothing()
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = nothing()
    cuda.device = type("device", (contextlib.nullcontext,), {})  # the one is current always
    cuda._DeviceGuard = type("DeviceGuard", (contextlib.nullcontext,), {})
    cuda._exchange_device = lambda index: 0
    cuda._maybe_exchange_device = lambda index: 0
    # What it is: prepare_for_cuda, machine_facts, Inductor's choice of kernels and their shapes.
    cuda.get_device_properties = properties
    cuda.get_device_capability = lambda device=None: card.capability
    cuda.get_device_name = lambda device=None: card.name
    cuda.is_bf16_supported = lambda including_emulation=True: card.capability >= (8, 0)
    cuda.is_tf32_supported = lambda: card.capability >= (8, 0)
    cuda.mem_get_info = lambda device=None: (2**20, card.memory)  # free memory: little
    cuda.max_memory_allocated = lambda device=None: 0  # nobody counts
    cuda.reset_peak_memory_stats = nothing()
    # Order of the work: Health, the benchmarks, generated wrapper code.
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = lambda device=None: stream
    cuda.synchronize = nothing()
    cuda.set_sync_debug_mode = nothing()
    # Random numbers are the CPU's (device.cpp), which torch saves, restores and seeds by itself.
    cuda.manual_seed_all = nothing()
    cuda.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    cuda.set_rng_state = nothing()
    # Pinning asks CUDA for other memory; all memory of the host is as good here.
    torch.Tensor.pin_memory = lambda self, device=None: self
    # Inductor compares versions of CUDA; the text is that of torch 2.13's build for it.
    torch.version.cuda = torch.version.cuda or "13.0"
    # For the log's header. There is no driver.
    collect_env.get_nvidia_driver_version = lambda run: "none: the host stands in"


def stand_in_for_c_functions() -> None:
    """What generated code and Dynamo import from torch's C++, and a CPU build lacks."""
    import torch

    def empty_strided_cuda(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    torch._C._cuda_getDeviceCount = lambda: 1  # that it is there says that torch has CUDA
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = empty_strided_cuda


def stand_in_for_triton_driver() -> None:
    """It names the card that kernels are compiled for, and launches none."""
    import torch
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    def device_properties(device):
        return dict(max_shared_mem=card.shared_memory_per_block, warpSize=32, max_num_regs=2**16,
                    multiprocessor_count=card.multiprocessors)

    triton.runtime.driver.set_active(types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=device_properties),
        get_current_target=lambda: GPUTarget("cuda", card.arch, 32),
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True))
    triton_helpers.set_driver_to_gpu = lambda: None  # Inductor would look for a real one
