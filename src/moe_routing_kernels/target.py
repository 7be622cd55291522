"""The GPU that kernels run on or are compiled for: vendor, architecture, counts. Imports torch only where the device is asked."""

import functools
import re
from typing import TYPE_CHECKING, NamedTuple

from moe_routing_kernels.errors import bad

if TYPE_CHECKING:
    import torch

_NAMED = "what a GPU is called, such as sm_80, sm_90a or sm_100a"
_KIB, _GIB = 2**10, 2**30


class Target(NamedTuple):
    """A GPU, or a CPU. A tuple, whose hash costs little: choices are looked up by it in every call."""

    vendor: str  # nvidia or amd; empty for a CPU
    arch: str  # as compilers call it: sm_90a, gfx942; cpu
    multiprocessors: int
    shared_memory: int  # bytes that a thread block may have
    memory: int  # bytes

    @classmethod
    def here(cls, device: "torch.device | None" = None) -> "Target":
        """The target of a device (None: the current GPU); the CPU where that is none, or where there is no GPU."""
        import torch

        if (device is not None and device.type != "cuda") or not torch.cuda.is_available():
            return CPU
        index = None if device is None else device.index
        return of_device(torch.cuda.current_device() if index is None else index)

    @classmethod
    def of(cls, arch: str) -> "Target":
        """A GPU of an architecture such as sm_90a that need not be here, with the counts of `_DOCUMENTED`.

        An architecture that is not listed has the counts of the newest listed one before it. Raises `UserError` for any other name.
        """
        known = [listed for listed in _DOCUMENTED if _capability(listed) <= _capability(arch)]
        if not known:
            raise bad("arch", arch, _NAMED)
        counts, shared, memory = _DOCUMENTED[max(known, key=_capability)]
        return cls("nvidia", arch, counts, shared * _KIB, memory * _GIB)

    @classmethod
    def named(cls, arch: str) -> "Target":
        """The GPU that is here where it is of this architecture, so that what is compiled ahead is what runs; else as `of`."""
        here = cls.here()
        return here if here.arch == arch else cls.of(arch)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of a GPU by NVIDIA: (9, 0) of sm_90a; (0, 0) of any other target."""
        return _capability(self.arch)

    @property
    def generation(self) -> str:
        """The architecture without its suffix, as measured layers have it: ``sm_90``, ``gfx942`` or ``cpu``."""
        return "sm_{}{}".format(*self.capability) if self.vendor == "nvidia" else self.arch


# By architecture: multiprocessors, KiB of shared memory of a thread block, GiB of memory, of the card that most users have; from NVIDIA's
# data sheets and the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
_DOCUMENTED = {
    "sm_75": (40, 64, 16),  # T4
    "sm_80": (108, 163, 80),  # A100
    "sm_86": (84, 99, 48),  # A40
    "sm_89": (142, 99, 48),  # L40S
    "sm_90a": (132, 227, 80),  # H100 SXM; an H200 has 132 multiprocessors as well
    "sm_100a": (148, 227, 180),  # B200
    "sm_120a": (188, 99, 96),  # RTX PRO 6000 Blackwell
}


@functools.cache
def _capability(arch: str) -> tuple[int, int]:
    match = re.fullmatch(r"sm_([1-9]\d?)(\d)[af]?", arch) if isinstance(arch, str) else None
    return (int(match[1]), int(match[2])) if match else (0, 0)


@functools.cache
def of_device(index: int) -> Target:
    """The target of a GPU by its number. It is remembered: `Target.here`, which also asks whether there is a GPU, takes longer."""
    import torch

    known = torch.cuda.get_device_properties(index)
    shared = getattr(known, "shared_memory_per_block_optin", known.shared_memory_per_block)
    if torch.version.hip:
        vendor, arch = "amd", known.gcnArchName.partition(":")[0]
    else:
        vendor, arch = "nvidia", f"sm_{known.major}{known.minor}{'a' if known.major >= 9 else ''}"
    return Target(vendor, arch, known.multi_processor_count, shared, known.total_memory)


# Triton's interpreter runs kernels on a CPU, in the configurations that an H200 has.
CPU = Target.of("sm_90a")._replace(vendor="", arch="cpu", memory=0)

# What the configurations of kernels were measured on: an H100 and an H200 have equal counts.
MEASURED = Target.of("sm_90a")


def written_for(arch: str, target: Target | None) -> str | None:
    """Why a kernel that is written for one architecture cannot run on a target (None: on any), or None."""
    return None if target is None or target.arch == arch else f"is written for {arch}, not {target.arch}"
