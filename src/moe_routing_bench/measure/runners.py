"""The processes of the isolated implementations of a cell: one each, or one for every rank."""

import contextlib
from collections.abc import Iterator, Sequence

from moe_routing_bench.benches.plugins import isolated
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import processes
from moe_routing_bench.measure.isolation import Runner
from moe_routing_bench.measure.rank_group import RankGroup

Process = Runner | RankGroup


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
