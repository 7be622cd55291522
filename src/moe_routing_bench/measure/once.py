"""One call of an implementation in this process, and whether it was right: for tests of a kernel and for debuggers."""

import torch

from moe_routing_bench.benches.checks import Check
from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import memory, verify
from moe_routing_bench.store import platforms
from moe_routing_kernels.errors import bad
from moe_routing_kernels.target import Target


def check(job: Job) -> Check:
    """Compare what the job's one implementation writes, into poisoned outputs, with the reference.

    Raises `UserError` where it cannot run this cell on this machine.
    """
    (name,), cell, bench = job.implementations, job.cell, bench_of(job)
    platform, implementation = platforms.current(), bench[name]
    reason = platforms.missing(implementation.requires, platform, implementation.peer)
    if "ranks" in cell:
        reason = f"it is a call of {cell.ranks} processes; `measure` makes them"
    reason = reason or bench.supports(name, cell, Target.here())
    if reason:
        raise bad(f"implementation of {bench.name}", name, "one that can run this cell here", reason)
    device, definition = "cpu" if platform == platforms.CPU else "cuda", bench.definition()
    shared = definition.shared(cell, cell.seed, device) if hasattr(definition, "shared") else {}
    drawn = definition.build(cell, cell.seed, device) | shared
    outputs, expected = definition.empty_outputs(cell, drawn), definition.reference(cell, drawn)
    memory.poison(outputs)
    returned = bench.bind(name, cell, drawn | outputs)()
    if device == "cuda":
        torch.cuda.synchronize()
    results = outputs | (returned if isinstance(returned, dict) else {})
    return verify.checked(bench, name, cell, drawn, outputs, results, expected)
