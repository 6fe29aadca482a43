"""The cards that the host can stand in for, and what of them decides which kernels are made."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU as torch, Inductor and Triton ask about it.

    Sizes in bytes. Shared memory and threads: CUDA C++ Programming Guide, "Technical
    Specifications per Compute Capability"; the other numbers: NVIDIA's data sheet of the card.
    """

    model: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int  # at most, where the kernel opts in
    threads_per_multiprocessor: int
    memory: int

    @property
    def name(self) -> str:
        """What torch.cuda.get_device_name says: never to be taken for the card itself."""
        return f"host standing in for NVIDIA {self.model}"

    @property
    def arch(self) -> int:
        """The compute capability as Triton writes it, 90 for sm_90."""
        return 10 * self.capability[0] + self.capability[1]


KIB, GIB = 2**10, 2**30
CARDS = {
    "sm_80": Card("A100", (8, 0), 108, 163 * KIB, 2048, 80 * GIB),
    "sm_86": Card("RTX 3090", (8, 6), 82, 99 * KIB, 1536, 24 * GIB),
    "sm_89": Card("RTX 4090", (8, 9), 128, 99 * KIB, 1536, 24 * GIB),
    "sm_90": Card("H100", (9, 0), 132, 227 * KIB, 2048, 80 * GIB),
    "sm_100": Card("B200", (10, 0), 148, 227 * KIB, 2048, 180 * GIB),
    "sm_120": Card("RTX 5090", (12, 0), 170, 99 * KIB, 1536, 32 * GIB)}
