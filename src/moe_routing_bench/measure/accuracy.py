"""How right implementations are, without times: one call in this process, and errors of kernels with quantised weights and of their formats.

A kernel is compared with what the quantised weights and rows stand for (its exactness), and that with the same experts before
anything was quantised (the cost of the formats), both as results of `experts`. The cost is also that of the weights by themselves, over
the bound that their format promises.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches.bench import find
from moe_routing_bench.benches.checks import Check
from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.grid.cell import Cell, Job
from moe_routing_bench.measure import memory, provenance, verify
from moe_routing_bench.store import platforms
from moe_routing_bench.workload.draw import generator
from moe_routing_kernels.errors import bad, one_line
from moe_routing_kernels.formats import groups
from moe_routing_kernels.formats.weights import WEIGHTS, WeightFormat
from moe_routing_kernels.target import Target

OUTLIERS, SIZE = 1 / 200, 16.0  # share of the weights that are so many times as large
DRAWS: Mapping[str, str] = MappingProxyType(
    {
        "normal": "N(0, 1)",
        "outliers": f"N(0, 1), of which one in {1 / OUTLIERS:.0f} is {SIZE:g} times as large",
    }
)
Row = dict[str, Any]
Tensors = dict[str, Tensor]


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


def rows(cell: Cell, drawn: str, names: Sequence[str], device: str) -> list[Row]:
    """A row for each of the implementations `names` of `experts` that take the cell, with its errors and those of the formats; where
    none takes it one row of the formats alone. `drawn` is one of `DRAWS`.

    An error is relative in L2; ``snr_db`` says it in decibels, None where there is no error. `status` is ``ok``, ``incorrect`` (beyond
    the tolerance of the bench) or ``crashed``.
    """
    bench = find("experts")
    definition = bench.definition()
    plain = cell.but(weights=cell.dtype, packed=cell.dtype)
    before = definition.build(plain, cell.seed, device) | _weights(plain, drawn, device)
    parts = {
        name: part for name in ("w13", "w2") for name, part in definition.quantised(cell, name, before[name]).items()
    }
    inputs = definition.build(cell, cell.seed, device) | {n: t for n, t in before.items() if n in ("b13", "b2")} | parts
    expected, used = definition.reference(cell, inputs), before["order"] >= 0
    common: Row = {"weights": cell.weights, "activations": cell.packed, "drawn": drawn}
    common |= _of_weights(cell, before, inputs)
    common |= _errors("output", expected["y"][used], definition.reference(plain, before)["y"][used])
    lacking = [name for name in names if not bench.supports(name, cell, Target.here(torch.device(device)))]
    return [common | _of_kernel(cell, name, inputs, expected) for name in lacking] or [common]


def place(device: str) -> Row:
    """Where and with which code errors come about: columns of `store.companions.MATRIX`."""
    known = provenance.versions() | provenance.git_state(find("experts").code_files)
    facts = {name: known.get(name) for name in ("host", "torch_version", "git_sha", "git_dirty")}
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return facts | {"gpu_name": gpu, "ended_at": datetime.now(UTC).isoformat(timespec="seconds")}


def _weights(plain: Cell, drawn: str, device: str) -> Tensors:
    """The weights of the bench, with outliers where they are asked for."""
    weights_drawn = find("experts").definition().shared(plain, plain.seed, device)
    if drawn == "outliers":
        rng = generator(plain.seed + 1, device)  # by that of the weights the chosen ones would be of one size
        for name in ("w13", "w2"):
            chosen = torch.rand(weights_drawn[name].shape, generator=rng, device=device) < OUTLIERS
            weights_drawn[name] = torch.where(chosen, weights_drawn[name] * SIZE, weights_drawn[name])
    return weights_drawn


def _of_weights(cell: Cell, before: Tensors, inputs: Tensors) -> Row:
    """Errors of the weights by themselves, and the largest of an element over its bound; nothing where they are not quantised."""
    form, definition = WEIGHTS.get(cell.weights), find("experts").definition()
    if form is None:
        return {"weight_error": 0.0, "weight_snr_db": None, "of_bound": None}
    pairs = [
        (definition.dense(cell, inputs, name, expert, torch.float64), before[name][expert].double())
        for name in ("w13", "w2")
        for expert in range(cell.experts)
    ]
    both = _errors("weight", *(torch.cat([part.flatten() for part in side]) for side in zip(*pairs, strict=True)))
    worst = max(_of_bound(form, cell.dtype, *pair) for pair in pairs)
    return {name: both[name] for name in ("weight_error", "weight_snr_db")} | {"of_bound": worst}


def _of_bound(form: WeightFormat, dtype: str, got: Tensor, w: Tensor) -> float:
    """The largest error of an element of w (N, K), over the bound for its group."""
    low, high = groups.ranges(w, form)
    span = high - low if form.zero_points else 2 * torch.maximum(high, -low)
    spans = groups.of_rows(span, form, len(w)).clamp_min(torch.finfo(w.dtype).tiny)
    largest = (view.amax(2) / spans[:, where] for view, where in groups.views((got - w).abs(), form))
    return max(float(error.max()) for error in largest) / form.error_bound(dtype)


def _of_kernel(cell: Cell, name: str, inputs: Tensors, expected: Tensors) -> Row:
    """Errors of one implementation against what the quantised numbers stand for."""
    bench = find("experts")
    definition = bench.definition()
    outputs = definition.empty_outputs(cell, inputs)
    outputs["y"].fill_(math.nan)
    try:
        outputs |= bench.bind(name, cell, inputs | outputs)() or {}
    except Exception as error:  # whatever it is, the other rows are still of use
        return {"implementation": name, "status": "crashed", "reason": one_line(f"{type(error).__name__}: {error}")}
    outcome, used = bench.check(name, cell, inputs, outputs, expected), inputs["order"] >= 0
    row = {"implementation": name, "status": "incorrect" if outcome.error else "ok", "reason": outcome.error}
    return row | _errors("kernel", outputs["y"][used], expected["y"][used]) | {"tolerance": outcome.tolerance}


def _errors(what: str, got: Tensor, want: Tensor) -> Row:
    """The relative L2 error, the signal-to-noise ratio in dB and the cosine of two tensors, taken as one vector each, in float64."""
    got, want = got.double().flatten(), want.double().flatten()
    size = float(want.norm())
    error = float((got - want).norm()) / size
    cosine = float(got @ want) / (float(got.norm()) * size)
    return {
        f"{what}_error": error,
        f"{what}_snr_db": -20 * math.log10(error) if error else None,
        f"{what}_cosine": cosine,
    }
