"""The estimate of `measure` against what cells take here, and its sizes against the cost model of the benches."""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from campaign import sampled
from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import estimates
from moe_routing_bench.config import by_hand
from moe_routing_bench.measure import supervisor
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.store import platforms

pytestmark = pytest.mark.slow

SMALL = {"tokens": 32, "hidden": 64, "intermediate": 32, "experts": 4, "top_k": 2}
COSTS = {
    "router": {},
    "experts": {},
    "experts relu2": {"activation": "relu2"},
    "experts int4": {"weights": "int4_g32"},
    "experts fp32": {"dtype": "fp32"},
    "layer": {},
    "layer shared": {"shared_intermediate": 48},
    "training": {},
    "gate": {},
    "pack": {},
}
CELLS = {
    "weights": ("experts", ["torch_loop"], {"experts": 24, "tokens": 64, "hidden": 512, "intermediate": 512}),
    "operations": ("layer", ["torch_loop"], {"tokens": 1024, "hidden": 512, "intermediate": 1024}),
    "float32": (
        "layer",
        ["torch_loop", "torch_gather_loop"],
        {"tokens": 256, "hidden": 512, "intermediate": 512, "dtype": "fp32"},
    ),
    "rows": ("pack", ["torch"], {"tokens": 4096, "hidden": 1024}),
    "next to nothing": ("gate", ["torch"], {"tokens": 64}),
}


def job_of(bench, names, values, **settings):
    (job,) = by_hand.jobs(bench, names, values, settings, [], {})
    return job


@pytest.mark.parametrize("case", COSTS)
def test_sizes_are_those_of_the_cost_model(case) -> None:
    """Operations to the last one; the weights that all sets share to a hundredth, as scales are left out."""
    bench = case.partition(" ")[0]
    values = {name: value for name, value in (SMALL | COSTS[case]).items() if name in BENCHES[bench].axes}
    job = job_of(bench, None, values)
    sets = Sets(job, bench_of(job).definition(), "cpu")
    found = estimates.sizes(job.cell)
    assert found.flops == sets.cost.flops
    shared = sum(tensor.nbytes for tensor, _ in sets._shared.values())
    assert found.weights == pytest.approx(shared, rel=0.15 if "int4" in case else 0.01)
    moved = sum(tensor.nbytes for tensor in [*sets.inputs[0].values(), *sets.outputs[0].values()]) - shared
    assert moved / 4 < found.moved < 4 * moved + 4096


def computed() -> float:
    """The seconds that this process and its children have computed for: other work of the machine is not in them."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def shortest(call: Callable[[], object]) -> float:
    """The seconds that this process computes for a call, after a first one."""
    found = []
    for _ in range(10):
        before = time.process_time()
        call()
        found.append(time.process_time() - before)
    return min(found[1:])


def passes() -> None:
    """Work like the harness's: passes of torch over a large tensor, and short calls."""
    numbers, few = torch.arange(1 << 20), torch.zeros(8)
    for _ in range(4):
        (numbers * 31 ^ numbers >> 7).sum().item()
    for _ in range(2000):
        few.add_(1)


PASSES_SECONDS = 0.06  # of `passes` on a CPU with the assumed rates, a third as fast as a Xeon of 2023


def rates_here(assumed: estimates.Rates, dtype: torch.dtype) -> estimates.Rates:
    """The rates of this CPU: those of GEMMs are measured, the others are assumed and scaled by the time of `passes`."""
    slower = shortest(passes) / PASSES_SECONDS
    pairs = [(torch.ones(64, 512, dtype=kind), torch.ones(512, 512, dtype=kind)) for kind in (dtype, torch.float32)]
    flops, wide = (2 * 64 * 512 * 512 / shortest(lambda a=a, b=b: a @ b) for a, b in pairs)
    scaled = {name: getattr(assumed, name) * slower for name in ("checked", "drawn", "start", "each")}
    return replace(assumed, flops=flops, wide_flops=wide, bytes=assumed.bytes / slower, **scaled)


@pytest.mark.parametrize("case", sampled(CELLS, ["rows"]))
def test_a_cell_takes_what_was_estimated(case, monkeypatch) -> None:
    """Within the factor that is printed, at the rates of this CPU: a faster or busier one differs from the assumed ones. Here without the
    start of a process, and other work of the machine makes the cell take longer than it computes."""
    bench, names, values = CELLS[case]
    job = job_of(bench, names, values, max_seconds=0.2, min_blocks=3)
    began, before = time.monotonic(), computed()
    rows = supervisor.measure(job)
    taken, alone = time.monotonic() - began, computed() - before
    assert [row["status"] for row in rows] == ["ok"] * len(names)
    assumed = estimates.estimate(job, platforms.CPU).rates
    here = rates_here(assumed, torch.float32 if values.get("dtype") == "fp32" else torch.bfloat16)
    monkeypatch.setattr(estimates, "_cpu", lambda *_: here)
    started = here.start * 2 / assumed.start  # calibration, and the fork
    expected = estimates.estimate(job, platforms.CPU).seconds - here.start + started
    assert alone / estimates.WITHIN < expected < taken * estimates.WITHIN, (alone, expected, taken, here)


def test_a_cell_takes_the_memory_that_was_estimated() -> None:
    """Its weights at least, and no more than was said."""
    job = job_of("experts", ["torch_loop"], {"experts": 32, "tokens": 64, "hidden": 512, "intermediate": 1024})
    torch.set_num_threads(1)
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            sets = Sets(job, bench_of(job).definition(), "cpu")
            taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * bool(sets)
            os.write(send, str(taken).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    taken = int(os.read(receive, 99))
    found = estimates.estimate(job, platforms.CPU)
    assert 0.8 * found.least < taken < found.memory, (found.least, taken, found.memory)
