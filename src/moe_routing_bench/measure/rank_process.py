"""The process of one rank: it joins the others of its implementation, binds its own tensors, and times its calls by itself.

A turn begins with a barrier, so that ranks begin together, and its calls follow each other as layers of a model do: a call waits for other
ranks only where it needs them. A rank's time is that from the barrier to the end of its last call. All ranks make the same calls in the same
order, because the judge says how many.

With GPUs each rank has one, and the tensors that the judge shares are on the first. So calls work on copies on a rank's own GPU: they are
filled before a turn, and what was written is copied back after it, both outside of its time.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from statistics import median
from time import perf_counter_ns  # by its own name: an implementation may replace the attributes of `time`
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.benches.ranks import is_of, of_rank
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import runner
from moe_routing_bench.measure.candidate import Failure
from moe_routing_bench.measure.output_forms import unlike_asked

_LINK_BYTES, _LINK_COPIES = 1 << 28, 5


class Rank(runner.Bound):
    """What the process of a rank does for a request."""

    backend = "gloo"
    staged = False  # whether calls work on copies, which the judge has to have filled and fetched

    def __init__(self, job: Job, name: str, device: str, shown: int, *, rank: int, rendezvous: int) -> None:
        """`rendezvous` is an empty file that all ranks have open: where they find each other."""
        super().__init__(job, name, device, shown)
        self._rank, self._rendezvous = rank, rendezvous

    def _join(self, seconds: float) -> None:
        """Become a rank of the default process group. An operation of it that others do not join fails after so many seconds."""
        if not (dist.is_available() and dist.is_backend_available(self.backend)):
            raise Failure("unsupported", f"this build of torch has no {self.backend}")
        for library in ("GLOO", "NCCL"):  # all are on this machine, whatever its name resolves to
            os.environ[f"{library}_SOCKET_IFNAME"] = "lo"
        ranks, wait = self._job.cell.ranks, timedelta(seconds=seconds)
        store = dist.FileStore(f"/proc/self/fd/{self._rendezvous}", ranks)  # type: ignore[attr-defined]
        store.set_timeout(wait)
        options = {"store": store, "rank": self._rank, "world_size": ranks, "timeout": wait}
        dist.init_process_group(self.backend, **options, device_id=self.gpu)

    @property
    def gpu(self) -> torch.device | None:
        """That of the rank."""
        return None

    def _link(self) -> dict[str, float]:
        """Nothing: ranks on a CPU have its memory together."""
        return {}

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
        """Call every set in turn, so many times, after a barrier; the nanoseconds of all calls."""
        dist.barrier()
        begin = perf_counter_ns()
        for _ in range(count):
            self._rotation.once()
        return {"turn_ns": perf_counter_ns() - begin}

    _warm = _rotate


class Staged(Rank):
    """A rank that works on copies of the tensors that the judge shares. Outputs that a bench has `kept` may lie where the last call of a set
    returned them: these are filled and fetched in place of the copies."""

    staged = True

    def _bind(self, sets: runner.Sets, descriptors: list[int] | None = None) -> dict[str, int]:
        """Import, and bind copies of the tensors of this rank, one of what all sets share; says how many sets take part."""
        self._given = [of_rank(each, self._rank) for each in sets.attached(descriptors or [])]
        same = [name.rpartition("@")[0] for name in sets.shared if is_of(name, self._rank)]
        shared = {name: self._copy(self._given[0][name]) for name in same}
        self._moving = [name for name in self._given[0] if name not in same]
        self._copies = [{name: self._copy(each[name]) for name in self._moving} for each in self._given]
        self._rotation = runner.Rotation(self._calls([each | shared for each in self._copies]))
        return {"sets": len(self._given)}

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.gpu or tensor.device, copy=True)

    def _kept(self) -> tuple[str, ...]:
        return bench_of(self._job).kept

    def _held(self) -> list[dict[str, Tensor]]:
        """The tensors that calls of each set read and write. `Failure` for kept ones that compute when they are read, or are of another kind."""
        held = []
        for copies, returned in zip_longest(self._copies, self._rotation.returned):
            returned = returned if self._kept() and isinstance(returned, dict) else {}
            if type(returned) is not dict:
                raise Failure(
                    "incorrect", f"outputs are returned in a {type(returned).__name__}, not a plain dictionary"
                )
            own = {name: returned[name] for name in self._kept() if name in returned}
            if error := unlike_asked(own, {name: copies[name] for name in own}):
                raise Failure("incorrect", error)
            held.append(copies | own)
        return held

    def _fill(self) -> None:
        """Copy what the judge's tensors hold, outputs too, which may be poisoned."""
        self._move(self._given, self._held(), self._moving)

    def _fetch(self) -> None:
        """Copy what calls have written back."""
        self._move(self._held(), self._given, bench_of(self._job).writes)

    def _move(
        self, given: Sequence[Mapping[str, Tensor]], to: Sequence[Mapping[str, Tensor]], names: Sequence[str]
    ) -> None:
        kept = self._kept()
        for source, target in zip(given, to, strict=True):
            for name in names:
                # Memory that other GPUs are let into takes and gives copies of its own GPU alone.
                target[name].copy_(self._copy(source[name]) if name in kept else source[name])
        self._wait()


class GpuRank(Staged):
    """A rank with a GPU of its own, the first with that of the judge. It takes its time by events."""

    backend = "nccl"

    @property
    def gpu(self) -> torch.device:
        """The one of its number."""
        return torch.device("cuda", self._rank)

    def _join(self, seconds: float) -> None:
        """The same; `unsupported` where the machine has fewer GPUs than there are ranks."""
        ranks, known = self._job.cell.ranks, torch.cuda.device_count()
        if known < ranks:
            raise Failure("unsupported", f"{ranks} ranks take a GPU each, and this machine has {known}")
        torch.cuda.set_device(self.gpu)
        super()._join(seconds)

    def _link(self) -> dict[str, float]:
        """GB/s of a copy to the GPU of the next rank, while all ranks copy."""
        source = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=self.gpu)
        target = torch.empty_like(source, device=torch.device("cuda", (self._rank + 1) % self._job.cell.ranks))
        times = []
        for _ in range(_LINK_COPIES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        del source, target
        torch.cuda.empty_cache()
        return {"gb_per_s": _LINK_BYTES / median(times) / 1e6}

    def _rotate(self, count: int) -> dict[str, Any]:
        """The same, as long as it takes on its GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        for _ in range(count):
            self._rotation.once()
        end.record()
        torch.cuda.synchronize()
        return {"turn_ns": round(begin.elapsed_time(end) * 1e6)}

    _warm = _rotate


def of(device: str) -> type[Rank]:
    """What a rank on such a device is."""
    return Rank if device == "cpu" else GpuRank
