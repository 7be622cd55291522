"""Whether a device is idle, found out from another process than the one that may keep it busy."""

from statistics import median
from time import perf_counter

import torch

_SECONDS = 0.008  # several time slices of a GPU that two processes share
_LOST_SECONDS = 0.0007  # in which small kernels are held up


class Quiet:
    """A CPU, where a process that is stopped does nothing."""

    def before(self) -> None:
        """Nothing is queued."""

    def goes_on(self) -> bool:
        """Whether work goes on."""
        return False


class GpuQuiet(Quiet):
    """A GPU: a process that is stopped may have left kernels. They hold up those of this process, slice by slice."""

    def __init__(self) -> None:
        """Find out how long a small kernel takes while the device is idle."""
        self._tiny = torch.zeros(1, device="cuda")
        self._least = median(self._once() for _ in range(100))

    def before(self) -> None:
        """Let what this process has queued end."""
        torch.cuda.synchronize()

    def goes_on(self) -> bool:
        """Whether the device is at work, or this process was held up by something else."""
        begin, lost = perf_counter(), 0.0
        while perf_counter() - begin < _SECONDS:
            lost += max(0.0, self._once() - 3 * self._least)
        return lost > _LOST_SECONDS

    def _once(self) -> float:
        begin = perf_counter()
        self._tiny.add_(1)
        torch.cuda.synchronize()
        return perf_counter() - begin
