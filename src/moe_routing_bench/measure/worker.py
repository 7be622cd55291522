"""Measures one cell in one process: the only place where an implementation runs.

Reports to its supervisor through `send`: ``("at", name, step)`` before every step, ``("failed", name, status, reason)``
when an implementation is out, ``("rows", {name: fields})`` at the end. It may die at any moment; the supervisor copes.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.benches.checks import Check, both, nbytes
from moe_routing_bench.grid import Job
from moe_routing_bench.measure import calibration, provenance, statistics, timers
from moe_routing_bench.settings import Settings

Send = Callable[[tuple], None]
REMEASURE_DRIFT = 0.05  # of a ceiling, over which a GPU cell is sampled once more
BLOCK_US = 20_000.0  # a block of a long call has fewer samples, so that there are enough blocks for an interval
_POISON_INT = 2**30  # far out of range of every index, and far below overflow when added to


class Failure(Exception):
    """An implementation is out of this cell; carries its status and reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class InputSet:
    """One set of inputs and outputs, and what the outputs should be; copies of a set share its expectation."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    expected: dict[str, Tensor]


@dataclass
class Candidate:
    """An implementation on its way through the cell."""

    name: str
    calls: list[Callable[[], object]]
    check: Check = field(default_factory=Check)
    timer: Any = None
    samples_per_block: int = 1
    blocks: list[list[float]] = field(default_factory=list)
    clocks: list[int | None] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    fields: dict[str, object] = field(default_factory=dict)


def run(job: Job, device: str, names: list[str], send: Send) -> None:
    """Measure the implementations `names` of the job's cell side by side and send their rows."""
    begin = time.perf_counter()
    send(("at", None, "inputs"))
    bench, cell = BENCHES[job.cell.bench], job.cell
    definition = bench.definition()
    gpu = provenance.Gpu() if device != "cpu" else None
    sets = _input_sets(job, definition, device)
    cost = definition.cost(cell, sets[0].inputs, sets[0].outputs, sets[0].expected)
    mix = _mix(cost) if bench.name in ("pack", "combine") else None
    send(("at", None, "calibration"))
    ceilings = calibration.ceilings(device, mix, cost.read_bytes, cost.write_bytes)
    before = ceilings.measure()
    alive: list[Candidate] = []
    for name in names:
        _guarded(
            send,
            name,
            "preparing",
            lambda name=name: alive.append(_admitted(job, definition, name, sets, device, send)),
        )
    watched = ("copy_gb_per_s", "peak_tflops") if cost.flops else ("copy_gb_per_s",)
    for attempt in (1, 2):
        _sample(job, alive, gpu, send)
        send(("at", None, "calibration"))
        after = ceilings.measure()
        drift = calibration.drift(before, after, watched)
        if device == "cpu" or drift <= REMEASURE_DRIFT or attempt == 2:  # a shared CPU drifts all the time
            break
        before = after
        for one in alive:
            one.blocks, one.clocks, one.slow = [], [], []
    for one in list(alive):
        if not _guarded(send, one.name, "checking again", lambda one=one: _verify(job, definition, one, sets)):
            alive.remove(one)
    common = before | {"calibration_drift": drift} | _routing(job, definition, sets[0])
    common |= {"read_bytes": cost.read_bytes, "write_bytes": cost.write_bytes, "compulsory_bytes": cost.read_bytes + cost.write_bytes, "flops": cost.flops}  # fmt: skip
    common |= provenance.versions() | (gpu.state() if gpu else {}) | {"device": device, "cold_sets": len(sets)}
    seed = int(job.hash[:8], 16)
    rows = {one.name: _row(one, seed) | common for one in alive}
    _speedups(alive, rows, bench.baseline, seed)
    send(("rows", {n: r | {"measure_seconds": time.perf_counter() - begin} for n, r in rows.items()}))


def _guarded(send: Send, name: str, step: str, action: Callable[[], object]) -> bool:
    """Run one step of an implementation; report what it raises. A broken CUDA context ends the worker."""
    send(("at", name, step))
    try:
        action()
    except Failure as failure:
        send(("failed", name, failure.status, failure.reason))
    except (MemoryError, torch.OutOfMemoryError) as error:
        send(("failed", name, "out_of_memory", f"{step}: {_one_line(error)}"))
    except Exception as error:
        text = _one_line(error)
        memory = "not enough memory" in text or "can't allocate memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
        send(("failed", name, "out_of_memory" if memory else "crashed", f"{step}: {text}"))
        if "CUDA error" in text and not memory:
            raise SystemExit(3) from error
    else:
        return True
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return False


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:300]


def _input_sets(job: Job, definition: Any, device: str) -> list[InputSet]:
    """`check_seeds` sets drawn apart, then copies of them until their inputs together are 5x the L2 cache (GPU only)."""
    cell, settings = job.cell, job.settings
    shared = definition.shared(cell, cell.seed, device) if hasattr(definition, "shared") else {}
    sets = []
    for i in range(settings.check_seeds):
        inputs = definition.build(cell, cell.seed + 1000 * i, device) | shared
        sets.append(InputSet(inputs, definition.empty_outputs(cell, inputs), definition.reference(cell, inputs)))
    if device == "cpu":
        return sets
    own = [t for n, t in sets[0].inputs.items() if n not in shared]
    footprint = nbytes(*own, *sets[0].outputs.values())
    cold = calibration.cold_sets(nbytes(*own))  # outputs do not count: stores may be the first to leave the cache
    wanted = max(len(sets), min(cold, settings.set_limit, int(settings.set_bytes // footprint)))
    for i in range(len(sets), wanted):
        first = sets[i % settings.check_seeds]
        copies = {n: t if n in shared else t.clone() for n, t in first.inputs.items()}
        sets.append(InputSet(copies, {n: torch.empty_like(t) for n, t in first.outputs.items()}, first.expected))
    return sets


def _mix(cost: Any) -> tuple[int, int]:
    """Reads to writes of a stage as whole numbers of at most 32."""
    ratio = cost.write_bytes / cost.read_bytes
    return (1, min(32, max(1, round(ratio)))) if ratio >= 1 else (min(32, max(1, round(1 / ratio))), 1)


def _admitted(job: Job, definition: Any, name: str, sets: list[InputSet], device: str, send: Send) -> Candidate:
    """Prepare, verify, warm up and make a timer; raises `Failure` for an implementation that may not be timed."""
    bench = BENCHES[job.cell.bench]
    module, options = bench.load(name), bench[name].options
    reason = module.supports(job.cell, **options) if hasattr(module, "supports") else None
    if reason:
        raise Failure("unsupported", reason)
    calls = [module.prepare(job.cell, s.inputs, s.outputs, **options) for s in sets]
    one = Candidate(name, calls, fields={"layout": job.cell.layout or bench[name].layout})
    send(("at", name, "checking"))
    _verify(job, definition, one, sets)
    send(("at", name, "warming up"))
    warmup_calls = _warm_up(one, job.settings.warmup_ms, device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        calls[0]()
        torch.cuda.synchronize()
        one.fields["peak_memory_bytes"] = torch.cuda.max_memory_allocated() - held
    one.timer = timers.device_timer(calls, job.settings.interval_us, device)
    one.samples_per_block = max(
        1, min(job.settings.samples_per_block, int(BLOCK_US / (one.timer.sample() * one.timer.calls)))
    )
    warmup_calls += _settle(one, job.settings)
    one.fields |= {"timer": one.timer.name, "calls_per_sample": one.timer.calls, "warmup_calls": warmup_calls}
    one.fields["wall_median_us"] = timers.wall_median_us(calls, job.settings.wall_calls, device)
    if device != "cpu":
        warm = timers.device_timer(calls[:1], job.settings.interval_us, device)
        one.fields["warm_median_us"] = sorted(warm.sample() for _ in range(5))[2]
    if hasattr(calls[0], "stages"):
        one.fields["stage_us"] = _stages(calls, job, device)
    return one


def _stages(calls: list, job: Job, device: str) -> list[tuple[str, float]]:
    """Median time of every stage on its own, over the rotation, with the buffers as the whole call left them."""
    found = []
    for i, (name, _) in enumerate(calls[0].stages):
        timer = timers.device_timer([call.stages[i][1] for call in calls], job.settings.interval_us, device)
        found.append((name, sorted(timer.sample() for _ in range(7))[3]))
    return found


def _verify(job: Job, definition: Any, one: Candidate, sets: list[InputSet]) -> None:
    """Run on every checked set with poisoned outputs, compare with the reference, and see that inputs are untouched."""
    for one_set, call in zip(sets[: job.settings.check_seeds], one.calls, strict=False):
        known = {n: t.clone() for n, t in one_set.inputs.items() if n not in ("w13", "w2")}
        for tensor in one_set.outputs.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else _POISON_INT)
        call()
        changed = [n for n, t in known.items() if not torch.equal(t, one_set.inputs[n])]
        for name in changed:  # the others get what was drawn
            one_set.inputs[name].copy_(known[name])
        result = definition.check(job.cell, one_set.inputs, one_set.outputs, one_set.expected)
        one.check = both(one.check, result)
        if result.error:
            raise Failure("incorrect", result.error)
        if changed:
            raise Failure("incorrect", f"inputs were changed: {', '.join(changed)}")


def _warm_up(one: Candidate, milliseconds: float, device: str) -> int:
    """Call for at least that long and 3 times; returns the number of calls."""
    end, count = time.perf_counter() + milliseconds / 1e3, 0
    while count < 3 or time.perf_counter() < end:
        one.calls[count % len(one.calls)]()
        count += 1
        if device != "cpu":
            torch.cuda.synchronize()
    return count


def _settle(one: Candidate, settings: Settings) -> int:
    """Take blocks until the medians of two in a row agree within 1 %, or the block limit; returns the number of calls."""
    medians: list[float] = []
    while len(medians) < settings.settle_blocks:
        medians.append(median([one.timer.sample() for _ in range(one.samples_per_block)]))
        if len(medians) > 1 and abs(medians[-1] / medians[-2] - 1) <= 0.01:
            break
    return len(medians) * one.samples_per_block * one.timer.calls


def _sample(job: Job, alive: list[Candidate], gpu: Any, send: Send) -> None:
    """Blocks of samples, one an implementation a round, in random order, until all have converged or a cap is met."""
    settings, order = job.settings, random.Random(job.hash)
    start, stop = time.perf_counter(), ""
    while alive and not stop:
        for one in order.sample(alive, len(alive)):

            def block(one: Candidate = one) -> None:
                one.blocks.append([one.timer.sample() for _ in range(one.samples_per_block)])
                one.clocks.append(gpu.sm_clock_mhz() if gpu else None)
                one.slow.append(gpu.slowdown_bits() if gpu else 0)

            if not _guarded(send, one.name, "sampling", block):
                alive.remove(one)
        rounds = len(alive[0].blocks) if alive else 0
        if rounds >= settings.min_blocks and rounds % 5 == 0:
            if all(_width(one) <= settings.target_half_width for one in alive):
                stop = "converged"
            elif rounds >= settings.max_blocks:
                stop = "block cap"
        if not stop and rounds >= 3 and time.perf_counter() - start > settings.max_seconds:
            stop = "time cap"
    for one in alive:
        width = _width(one)
        one.fields |= {
            "converged": width <= settings.target_half_width,
            "stop_reason": f"{stop}, half-width {width:.2%}",
        }


def _width(one: Candidate) -> float:
    return statistics.half_width([sorted(b)[len(b) // 2] for b in one.blocks])


def _kept(one: Candidate) -> list[bool]:
    """Which blocks count: not those at a low clock or with a slowdown bit, unless that would leave none."""
    clocks = sorted(c for c in one.clocks if c)
    low = 0.9 * clocks[len(clocks) // 2] if clocks else 0
    good = [not s and (c is None or c >= low) for c, s in zip(one.clocks, one.slow, strict=True)]
    return good if any(good) else [True] * len(good)


def _row(one: Candidate, seed: int) -> dict[str, object]:
    """Row fields of one implementation; samples of blocks that do not count are kept apart, with the reason."""
    kept = _kept(one)
    good = [b for b, keep in zip(one.blocks, kept, strict=True) if keep]
    aside = [s for b, keep in zip(one.blocks, kept, strict=True) if not keep for s in b]
    reason = "clock below 90 % of the median, or a hardware slowdown bit" if aside else None
    checked = {n: getattr(one.check, n) for n in ("rel_l2_error", "max_abs_error", "tolerance", "mismatches", "ties")}
    return (
        {"status": "ok", "set_aside": len(aside), "set_aside_samples_us": aside, "set_aside_reason": reason}
        | checked | one.fields | statistics.summarize(good, seed)
    )  # fmt: skip


def _speedups(alive: list[Candidate], rows: dict[str, dict], baseline: str, seed: int) -> None:
    """Ratios to the baseline, paired within the rounds in which both blocks count."""
    base = next((one for one in alive if one.name == baseline), None)
    if base is None:
        return
    for one in alive:
        rounds = list(zip(base.blocks, one.blocks, _kept(base), _kept(one), strict=True))
        pairs = [(median(b), median(o)) for b, o, *both in rounds if all(both)]
        pairs = pairs or [(median(b), median(o)) for b, o, *_ in rounds]
        ratio = statistics.paired_ratio([b for b, _ in pairs], [o for _, o in pairs], seed)
        rows[one.name] |= dict(zip(("speedup", "speedup_ci_low", "speedup_ci_high"), ratio, strict=True)) | {
            "baseline": baseline
        }


def _routing(job: Job, definition: Any, first: InputSet) -> dict[str, object]:
    """Realised loads, drops and gate entropy of the first set."""
    ids, weights = definition.assignment(job.cell, first.inputs, first.expected)
    experts, capacity = job.cell.experts or 0, job.cell.capacity
    loads = torch.bincount(ids.reshape(-1).long(), minlength=experts).tolist()
    found = statistics.load_statistics(loads)
    kept = sum(min(n, capacity) if capacity is not None else n for n in loads)
    found |= {"drop_rate": 1 - kept / sum(loads), "capacity": capacity}
    inverse = first.inputs.get("inverse", first.expected.get("inverse"))
    if inverse is not None:
        found["token_drop_rate"] = float((inverse < 0).all(1).float().mean())
    if weights is not None:
        share = weights.double() / weights.double().sum(1, keepdim=True)
        found["gate_entropy"] = float(-(share * share.clamp_min(1e-30).log()).sum(1).mean())
    return found | {"rows": _rows(job, loads)}


def _rows(job: Job, loads: list[int]) -> int | None:
    """Rows in use under the cell's layout, where it fixes one."""
    cell = job.cell
    if cell.layout is None:
        return None
    if cell.layout == "padded":
        return (cell.experts or 0) * (cell.capacity or 0)
    kept = [min(n, cell.capacity) if cell.capacity is not None else n for n in loads]
    return sum(-(-n // cell.block) * cell.block for n in kept)
