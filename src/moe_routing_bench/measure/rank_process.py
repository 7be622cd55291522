"""The process of one rank: it joins the others of its implementation, binds its own tensors, and times each call by itself.

Every call begins with a barrier, so that ranks begin together; a rank's time is that from the barrier to the end of its own call. All ranks
make the same calls in the same order, because the judge says how many.
"""

import os
from datetime import timedelta
from time import perf_counter_ns  # by its own name: an implementation may replace the attributes of `time`
from typing import Any

import torch.distributed as dist

from moe_routing_bench.benches.ranks import of_rank
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import runner
from moe_routing_bench.measure.candidate import Failure

BACKEND = "gloo"


class Rank(runner.Bound):
    """What the process of a rank does for a request."""

    def __init__(self, job: Job, name: str, device: str, shown: int, *, rank: int, rendezvous: int) -> None:
        """`rendezvous` is an empty file that all ranks have open: where they find each other."""
        super().__init__(job, name, device, shown)
        self._rank, self._rendezvous = rank, rendezvous

    def _join(self, seconds: float) -> None:
        """Become a rank of the default process group. An operation of it that others do not join fails after so many seconds."""
        if not (dist.is_available() and dist.is_gloo_available()):
            raise Failure("unsupported", f"this build of torch has no {BACKEND}")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all are on this machine, whatever its name resolves to
        ranks, wait = self._job.cell.ranks, timedelta(seconds=seconds)
        store = dist.FileStore(f"/proc/self/fd/{self._rendezvous}", ranks)  # type: ignore[attr-defined]
        store.set_timeout(wait)
        dist.init_process_group(BACKEND, store=store, rank=self._rank, world_size=ranks, timeout=wait)

    def _barrier(self, count: int) -> None:
        """So many barriers and nothing between them."""
        for _ in range(count):
            dist.barrier()

    def _bind(self, sets: runner.Sets, descriptors: list[int] | None = None) -> dict[str, int]:
        """Import and bind the tensors of this rank; says how many sets take part."""
        tensors = [of_rank(each, self._rank) for each in sets.attached(descriptors or [])]
        self._rotation = runner.Rotation(self._calls(tensors))
        return {"sets": len(tensors)}

    def _rotate(self, count: int) -> dict[str, Any]:
        """Call every set in turn, so many times; the nanoseconds of each call, and of all with their barriers."""
        times, rotation, start = [], self._rotation, perf_counter_ns()
        for _ in range(count):
            for i, call in enumerate(rotation.calls):
                dist.barrier()
                begin = perf_counter_ns()
                rotation.returned[i] = call()
                times.append(perf_counter_ns() - begin)
        return {"times_ns": times, "turn_ns": perf_counter_ns() - start}

    _warm = _rotate
