"""The processes of the isolated implementations of a cell: one each, or one for every rank; and whether they leave the device at work.

This process, the judge, finds out whether the device is idle without asking the process that may keep it busy.
"""

import contextlib
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import torch

from moe_routing_bench.benches.plugins import isolated
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import processes
from moe_routing_bench.measure.isolation import Runner
from moe_routing_bench.measure.rank_group import RankGroup

Process = Runner | RankGroup
_SECONDS = 0.008  # several time slices of a GPU that two processes share
_LOST_SECONDS = 0.0007  # in which small kernels are held up


@contextlib.contextmanager
def runners(job: Job, device: str, names: Sequence[str]) -> Iterator[dict[str, list[Process]]]:
    """The processes of the isolated ones among implementations, twice for one that has a twin. To be entered before CUDA is initialised and
    before anything is drawn: each begins as a copy of this process."""
    entries: dict[str, list[Process]] = {}
    try:
        for name in isolated(job, names):
            entries[name] = []
            for _ in range(1 + (name in job.twins)):
                entries[name].append((RankGroup if "ranks" in job.cell else Runner)(job, name, device))
        if entries:
            processes.keep_to_itself()
        yield entries
    finally:
        for process in (process for some in entries.values() for process in some):
            process.end()


class Quiet:
    """A CPU, where a process that is stopped does nothing."""

    def before(self) -> None:
        """Nothing is queued."""

    def goes_on(self) -> str:
        """By what work is seen to go on; empty where none is."""
        return ""


class GpuQuiet(Quiet):
    """A GPU: a process that is stopped may have left kernels. They hold up those of this process, slice by slice."""

    def __init__(self) -> None:
        """Find out how long a small kernel takes while the device is idle."""
        self._tiny = torch.zeros(1, device="cuda")
        self._least = median(self._once() for _ in range(100))

    def before(self) -> None:
        """Let what this process has queued end."""
        torch.cuda.synchronize()

    def goes_on(self) -> str:
        """How long small kernels were held up, as the device is at work or this process was stopped; empty where they were not."""
        begin, late = perf_counter(), list[float]()
        while perf_counter() - begin < _SECONDS:
            late.append(self._once() - 3 * self._least)
        held = [seconds for seconds in late if seconds > 0]
        if sum(held) <= _LOST_SECONDS:
            return ""
        times = f"{len(held)} of {len(late)} small kernels were held up, for {sum(held) * 1e3:.1f} ms in all and {max(held) * 1e3:.2f} ms at most"
        return f"{times}, where one takes {self._least * 1e3:.3f} ms"

    def _once(self) -> float:
        begin = perf_counter()
        self._tiny.add_(1)
        torch.cuda.synchronize()
        return perf_counter() - begin
