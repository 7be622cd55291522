"""Whether a device is idle, found out from another process than the one that may keep it busy."""

from statistics import median
from time import perf_counter

import torch

from moe_routing_bench.measure.candidate import Failure

_SECONDS = 0.008  # several time slices of a GPU that two processes share
_LOST, _TRIES = 0.2, 3  # share of the time in which small kernels are held up: a host that is busy does it once


class Quiet:
    """A CPU, where a process that is stopped does nothing."""

    def before(self) -> None:
        """Nothing is queued."""

    def after(self) -> None:
        """Nothing goes on."""


class GpuQuiet(Quiet):
    """A GPU: a process that is stopped may have left kernels. They hold up those of this process, slice by slice."""

    def __init__(self) -> None:
        """Find out how long a small kernel takes while the device is idle."""
        self._tiny = torch.zeros(1, device="cuda")
        self._least = median(self._once() for _ in range(100))

    def before(self) -> None:
        """Let what this process has queued end."""
        torch.cuda.synchronize()

    def after(self) -> None:
        """`Failure` where the device is at work."""
        if all(self._lost() > _LOST for _ in range(_TRIES)):
            raise Failure("incorrect", "the GPU was still at work after the call had returned")

    def _once(self) -> float:
        begin = perf_counter()
        self._tiny.add_(1)
        torch.cuda.synchronize()
        return perf_counter() - begin

    def _lost(self) -> float:
        """Share of a few milliseconds in which kernels waited for others."""
        begin, lost = perf_counter(), 0.0
        while (total := perf_counter() - begin) < _SECONDS:
            lost += max(0.0, self._once() - 3 * self._least)
        return lost / total
