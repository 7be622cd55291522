"""The operators and kernels of one call, by torch.profiler: where an implementation's time goes. Nothing of this is timed.

A profiled call is slower than a timed one, above all on the host, and waits for nothing to be cold: its times tell operators apart
and are not held against rows. Draws and tensors are those of the cell's first input set.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nvtx
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import gpus
from moe_routing_bench.store import platforms
from moe_routing_kernels.errors import bad, one_line

WARMUP_CALLS = 3
RESULT = "combined"  # of a layer: what is compared between implementations
_Tensors = dict[str, Tensor]


def profile(job: Job, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Profile one warm call of each implementation `names` of a job's cell, one after the other, with a GPU to itself.

    Returns, and writes to ``folder/profile.json``: of each implementation its operators, or the error that ended it, and of each pair
    the largest difference of their results. ``folder/<implementation>.json`` is the call as a Chrome trace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platform = platforms.current()
    with gpus.reserved(alone=True, family=job.cell.family):
        profiles, results = {}, {}
        inputs = _inputs(job, "cpu" if platform == platforms.CPU else "cuda")
        for name in names:
            try:
                results[name], profiles[name] = _profiled(job, name, inputs, folder / f"{name}.json")
            except Exception as error:  # whatever an implementation raises: the others are profiled all the same
                profiles[name] = {"error": one_line(f"{type(error).__name__}: {error}", 300)}
    summary = {"bench": job.cell.bench, "cell": job.cell.key, "axes": dict(job.cell.values), "platform": platform}
    summary |= {"torch": torch.__version__, "implementations": profiles, "differences": list(_differences(results))}
    (folder / "profile.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def call(job: Job, names: Sequence[str]) -> None:
    """Call each implementation `names` of a job's cell once, warm, in an NVTX range of its name: another program looks on."""
    with gpus.reserved(alone=True, family=job.cell.family):
        inputs = _inputs(job, "cpu" if platforms.current() == platforms.CPU else "cuda")
        for name in names:
            bound, _ = _bound(job, name, inputs)
            with nvtx.annotate(name):
                bound()
                _wait(torch.cuda.is_initialized())


def _inputs(job: Job, device: str) -> _Tensors:
    """The first input set of a cell, and what all sets share. Raises `UserError` for a cell on several ranks."""
    if "ranks" in job.cell:
        raise bad("ranks", job.cell.ranks, "a bench of one process", "a profile is that of a call in this process")
    cell, definition = job.cell, bench_of(job).definition()
    shared = definition.shared(cell, cell.seed, device) if hasattr(definition, "shared") else {}
    return definition.build(cell, cell.seed, device) | shared


def _profiled(job: Job, name: str, inputs: _Tensors, trace: Path) -> tuple[Tensor | None, dict[str, Any]]:
    """The result of an implementation, where it has the one that is compared, and what its call consists of."""
    bound, outputs = _bound(job, name, inputs)
    on_gpu = torch.cuda.is_initialized()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        returned = bound()
        _wait(on_gpu)
    profiler.export_chrome_trace(str(trace))
    operators = sorted(map(_operator, profiler.key_averages()), key=_weight, reverse=True)
    known = outputs | (returned if isinstance(returned, dict) else {})
    result = known[RESULT].clone() if RESULT in known else None
    return result, _totals(operators) | {"operators": operators}


def _bound(job: Job, name: str, inputs: _Tensors) -> tuple[Callable[[], Any], _Tensors]:
    """The call of an implementation, warmed up, and the outputs that it writes."""
    bench = bench_of(job)
    outputs = bench.definition().empty_outputs(job.cell, inputs)
    bound = bench.bind(name, job.cell, inputs | outputs)
    for _ in range(WARMUP_CALLS):
        bound()
    _wait(torch.cuda.is_initialized())
    return bound, outputs


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _operator(event: Any) -> dict[str, Any]:
    """A line of the table. Device times of an operator are those of the kernels that it launched, which have lines of their own."""
    return {
        "operator": event.key,
        "kind": "operator" if event.device_type.name == "CPU" else "kernel",
        "self_cpu_us": event.self_cpu_time_total,
        "cpu_total_us": event.cpu_time_total,
        "self_device_us": event.self_device_time_total,
        "device_total_us": event.device_time_total,
        "calls": event.count,
    }


def _weight(operator: dict[str, Any]) -> tuple[float, float]:
    return operator["self_device_us"], operator["self_cpu_us"]


def _totals(operators: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Self times of all operators on the host, and of all kernels on the device."""
    return {
        "self_cpu_us": sum(operator["self_cpu_us"] for operator in operators),
        "self_device_us": sum(operator["self_device_us"] for operator in operators if operator["kind"] == "kernel"),
    }


def _differences(results: dict[str, Tensor | None]) -> Iterator[dict[str, Any]]:
    """The largest difference of each pair of results, in float64."""
    known = {name: result for name, result in results.items() if result is not None}
    for (first, a), (second, b) in itertools.combinations(known.items(), 2):
        yield {"first": first, "second": second, "max_diff": float((a.double() - b.double()).abs().max())}
