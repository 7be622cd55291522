"""Measures one cell: the process in which implementations run, but for isolated ones, whose runners it judges.

Reports to its supervisor through `send`: ``("at", name, step)`` before every step, ``("failed", name, status, reason)``
when an implementation is out, ``("tainted", reason)`` when one has harmed the others and it is unknown which, and
``("rows", {name: fields})`` at the end; ``("within", name, part)`` where a part of a step begins that takes a while; ``("ceilings", known)``, for later cells, before any implementation is there. It may die at any moment; the supervisor copes. Where an error of Python ends it, ``("died", text)``
says which.
"""

import contextlib
import functools
import traceback
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.benches.ranks import devices
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import calibration, cpu_ceilings, outcome, processes, provenance, timers
from moe_routing_bench.measure.bystanders import Bystanders
from moe_routing_bench.measure.candidate import Candidate, Failure, Ruined, Tainted
from moe_routing_bench.measure.cpu_ceilings import CpuCeilings
from moe_routing_bench.measure.faults import described
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.memory import allocated, footprint
from moe_routing_bench.measure.originals import genuine, originals, unshadowed
from moe_routing_bench.measure.runners import GpuQuiet, Process, Quiet, runners
from moe_routing_bench.measure.sampling import Guarded, power_limited, sample, settle, warm_up
from moe_routing_bench.measure.sharing import Arena
from moe_routing_bench.measure.surroundings import surroundings, undisturbed
from moe_routing_bench.measure.turns import Turns
from moe_routing_bench.measure.verify import idle, running, unharmed, verify
from moe_routing_kernels.errors import one_line
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.target import Target

Send = Callable[[tuple], None]
Kept = dict[str, Any] | None
_RATES = ("peak_tflops", "sustained_tflops")  # of products of 16-bit numbers, which is what is measured
REMEASURE_DRIFT = 0.05  # of a ceiling, over which a GPU cell is sampled once more
_CHOICES = 4000  # letters of what a tuner chose, 240 for every product of QuACK's
BLOCK_US = 20_000.0  # a block of a long call has fewer samples, so that there are enough blocks for an interval


def run(job: Job, device: str, names: list[str], send: Send, audit: bool = False, kept: Kept = None) -> None:
    """Measure the implementations `names` of the job's cell side by side and send their rows. `kept` are ceilings of an earlier cell.

    After every step of an implementation its clocks must be genuine, and settings that all share as they were. With `audit` all inputs are compared as well, which
    takes time, but tells which implementation changes them.
    """
    with runners(job, device, names) as isolated:
        _measured(job, device, names, send, audit, kept, isolated)


def _measured(
    job: Job, device: str, names: list[str], send: Send, audit: bool, kept: Kept, isolated: dict[str, list[Process]]
) -> None:
    """`run` with a process for each isolated implementation."""
    begin = perf_counter()
    torch.set_num_threads(job.settings.cpu_threads)
    known, settings, children = originals(), surroundings(), processes.offspring()  # before a plug-in is imported
    bystanders = Bystanders(isolated)
    send(("at", None, "inputs"))
    bench, cell = bench_of(job), job.cell
    definition = bench.definition()
    gpu = provenance.Gpu() if device != "cpu" else None
    if gpu and isolated:
        gpu.own_pids |= {pid for some in isolated.values() for each in some for pid in each.pids}
    sets = Sets(job, definition, device, Arena(device) if isolated else None)
    cost = sets.cost.of_each(devices(cell, device))
    mix = calibration.reads_to_writes(cost) if bench.streams else None

    alive: list[Candidate] = []

    def harmed(name: str) -> None:
        if gpu:
            gpu.watch()
        timers_of_all = [entry.timer for candidate in alive for entry in candidate.entries]
        with contextlib.ExitStack() as checks:  # all of them, whatever one of them finds
            checks.callback(bystanders.look, name)
            checks.callback(idle, children)
            checks.callback(unshadowed, sets, *timers_of_all)
            if audit:
                checks.callback(unharmed, sets)
            checks.callback(undisturbed, settings)
            checks.callback(genuine, known)

    guarded = functools.partial(_guarded, send, after=harmed)
    send(("at", None, "calibration"))
    gpu_ceilings = functools.partial(calibration.GpuCeilings, mix, cost.read_bytes, cost.write_bytes)
    ceilings = CpuCeilings(kept) if device == "cpu" else gpu_ceilings()
    before, noise = ceilings.measure(), ceilings.noise
    if ceilings.known:  # before an implementation could have a part in it
        send(("ceilings", ceilings.known))
    quiet = GpuQuiet() if gpu and isolated else Quiet()
    for name in names:
        admit = functools.partial(_entered, job, name, sets, device, send, quiet, isolated.get(name, []))
        entered: list[Candidate] = []
        if guarded(name, "preparing", lambda admit=admit, entered=entered: entered.append(admit())):
            alive += entered
    send(("within", None, "power limit"))
    limited = gpu is not None and cost.flops > 0 and _limited(job, alive, gpu, guarded)

    def sustained() -> dict[str, float]:
        if not limited:
            return {}
        send(("at", None, "calibration"))
        return ceilings.sustained(job.settings.turn_seconds, cost.products, FORMATS[cell.dtype].torch_dtype)

    before = before | sustained()
    watched = calibration.binding(before, cost.read_bytes + cost.write_bytes, cost.flops / cost.rate)
    for attempt in (1, 2):
        sample(job, alive, sets, gpu, guarded, limited)
        send(("at", None, "calibration"))
        after = ceilings.measure() | sustained()
        drift = calibration.drift(before, after, watched, (noise, ceilings.noise))
        if device == "cpu" or drift <= REMEASURE_DRIFT or attempt == 2:  # a shared CPU drifts all the time
            break
        before = after
        for candidate in alive:
            candidate.forget()
    for candidate in list(alive):
        check = functools.partial(_checked_again, job, candidate, sets, send)
        if not guarded(candidate.name, "checking again", check):
            alive.remove(candidate)
    send(("within", None, "rows"))
    common = (
        calibration.mean(before, after)
        | {"calibration_drift": drift, "ceilings_at": ceilings.at, "check_nonce": sets.nonce}
        | outcome.routing(job, definition, sets)
        | outcome.traffic(job, definition, sets)
    )
    if gpu:
        common |= {name: cost.rate * common[name] for name in _RATES if name in common}
    common |= {"read_bytes": cost.read_bytes, "write_bytes": cost.write_bytes, "flops": cost.flops}
    common |= {"compulsory_bytes": cost.read_bytes + cost.write_bytes}
    common |= provenance.versions() | (gpu.state() if gpu else {}) | {"device": device}
    rows = {candidate.name: outcome.row(candidate) | common for candidate in alive}
    outcome.speedups(alive, rows, bench.baseline)
    outcome.twins(alive, rows)
    if device == "cpu" and rows:
        cpu_ceilings.judge(rows.values(), cost, ceilings.limits)
    send(("rows", {n: r | {"measure_seconds": perf_counter() - begin} for n, r in rows.items()}))


def _guarded(
    send: Send, name: str, step: str, action: Callable[[], object], after: Callable[[str], object] = lambda name: None
) -> bool:
    """Run one step of an implementation, and `after`; report what they raise, and print the traceback of a crash. A broken CUDA
    context ends the worker."""
    send(("at", name, step))
    threads = running()
    try:
        try:
            action()
        finally:
            after(name)
    except Tainted as error:
        send(("tainted", one_line(error)))
        raise SystemExit(3) from error
    except Failure as failure:
        send(("failed", name, failure.status, one_line(failure.reason)))
        if isinstance(failure, Ruined) or running() - threads:  # what goes on would be in the times of others
            raise SystemExit(3) from failure
    except (Exception, SystemExit) as error:
        status, reason = described(error)
        send(("failed", name, status, f"{step}: {reason}"))
        if status == "crashed":
            traceback.print_exc()
            if "CUDA error" in str(error):
                raise SystemExit(3) from error
    else:
        return True
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return False


def _limited(job: Job, alive: list[Candidate], gpu: Any, guarded: Guarded) -> bool:
    """Whether the power limit binds for one of them. An isolated one that fails meanwhile is out."""
    binding: list[bool] = []
    for candidate in list(alive):
        ask = functools.partial(power_limited, job, [candidate], gpu)
        if not isinstance(candidate.timer, Turns):
            binding.append(ask())
        elif not guarded(candidate.name, "sampling", lambda ask=ask: binding.append(ask())):
            alive.remove(candidate)
        if any(binding):
            return True
    return False


def _entered(
    job: Job, name: str, sets: Sets, device: str, send: Send, quiet: Quiet, forked: list[Process]
) -> Candidate:
    """`_admitted`, twice where the job asks for a twin. What it changes before it fails is mended."""

    def admitted(entry: int) -> Candidate:
        if forked:
            return _isolated(job, name, sets, send, quiet, forked[entry])
        return _admitted(job, name, sets, device, send)

    try:
        candidate = admitted(0)
        if name in job.twins:
            candidate.twin = admitted(1)
        unshadowed(*(entry.timer for entry in candidate.entries))
    except Exception:
        for process in forked:
            process.end()
        sets.damage()
        raise
    return candidate


def _checked_again(job: Job, candidate: Candidate, sets: Sets, send: Send) -> None:
    for entry in candidate.entries:
        verify(job, entry, sets, thorough=True)
        if isinstance(entry.timer, Turns):
            entry.timer.judge(functools.partial(send, ("at", candidate.name, "checking again")))
            entry.fields |= entry.timer.fields()


def _isolated(job: Job, name: str, sets: Sets, send: Send, quiet: Quiet, process: Process) -> Candidate:
    """`_admitted` of an implementation that has a process of its own."""
    if damage := sets.damage():
        raise Tainted(damage)
    candidate = Candidate(name, [], fields={"layout": job.cell.get("layout") or bench_of(job)[name].layout})
    candidate.timer = Turns(job, candidate, sets, process, quiet)
    _settled(job, candidate, sets, send, candidate.timer.warmup_calls)
    candidate.timer.judge(functools.partial(send, ("at", name, "checking")))
    return candidate


def _settled(job: Job, candidate: Candidate, sets: Sets, send: Send, warmup_calls: int) -> None:
    """Verify what is timed, and time it until it settles."""
    send(("at", candidate.name, "checking"))
    unharmed(sets)
    verify(job, candidate, sets, thorough=True)
    send(("within", candidate.name, "settling"))
    candidate.samples_per_block = max(
        1, min(job.settings.samples_per_block, int(BLOCK_US / (candidate.timer.sample() * candidate.timer.calls)))
    )
    warmup_calls += settle(candidate, job.settings)
    cold_sets = len(candidate.timer.returned)
    candidate.fields |= {"cold_sets": cold_sets, "cold": sets.cold(cold_sets)}
    candidate.fields |= {
        "timer": candidate.timer.name,
        "calls_per_sample": candidate.timer.calls,
        "warmup_calls": warmup_calls,
    }


def _admitted(job: Job, name: str, sets: Sets, device: str, send: Send) -> Candidate:
    """Bind, warm up, make a timer and verify what it runs; raises `Failure` for an implementation that may not be timed."""
    bench = bench_of(job)
    if reason := bench.supports(name, job.cell, Target.here(torch.device(device))):
        raise Failure("unsupported", reason)
    if damage := sets.damage():
        raise Tainted(damage)
    before = allocated(device)
    calls = [bench.bind(name, job.cell, sets.bound(0))]
    candidate = Candidate(name, calls, fields={"layout": job.cell.get("layout") or bench[name].layout})
    send(("at", name, "warming up"))
    candidate.fields |= footprint(before, calls[0])
    send(("within", name, "binding"))
    calls += [bench.bind(name, job.cell, sets.bound(i)) for i in range(1, len(sets))]
    send(("within", name, "warming up"))
    warmup_calls = warm_up(candidate, job.settings.warmup_ms, device)
    timers.shorten(calls, device, job.settings.check_seeds)
    send(("within", name, "capturing"))
    nbytes = sets.cost.read_bytes + sets.cost.write_bytes
    candidate.timer = timers.device_timer(calls, job.settings.interval_us, device, nbytes)
    _settled(job, candidate, sets, send, warmup_calls)
    send(("within", name, "wall and warm times"))
    candidate.fields["wall_median_us"] = timers.wall_median_us(calls, job.settings.wall_calls, device)
    if device != "cpu":
        warm = timers.device_timer(calls[:1], job.settings.interval_us, device)
        candidate.fields["warm_median_us"] = sorted(warm.sample() for _ in range(5))[2]
    if configuration := getattr(calls[0], "configuration", None):
        candidate.fields["configuration"] = one_line(configuration(), _CHOICES) or None
    if hasattr(calls[0], "stages"):
        send(("within", name, "stages"))
        candidate.fields |= _stages(calls, job, device)
    return candidate


def _stages(calls: list, job: Job, device: str) -> dict[str, object]:
    """Median time of every stage on its own, over the rotation, with the buffers as the whole call left them; and the timers."""
    times, names = [], []
    for i, (name, _) in enumerate(calls[0].stages):
        timer = timers.device_timer([call.stages[i][1] for call in calls], job.settings.interval_us, device)
        times.append((name, sorted(timer.sample() for _ in range(7))[3]))
        names.append((name, timer.name))
    return {"stage_us": times, "stage_timer": names}
