"""Whether an implementation is right, in the very calls that are timed.

Twice in a row: first on values drawn after the implementation was bound and captured, in poisoned outputs; then on
the values that are timed, in outputs that still hold the other answers. What was computed early, is remembered, or is done only
where something shows that it is looked at, is wrong in one of the two. Before and after sampling twice more: on values of which only a few
are not those that are timed, which catches kernels that remember answers by a sample of the inputs; and once more on those that are timed, in outputs
that are right but for a few elements, which catches kernels that skip work when inputs or outputs look as they should. The first set of each draw is compared with its reference,
and every other set with it, bit by bit.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.checks import Check, both
from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.grid.job import Job
from moe_routing_bench.measure import memory, processes, timers
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted
from moe_routing_bench.measure.inputs import Sets

_CLOCKS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (  # what times are taken with: where it is, and by which names
    (time, "time", ("perf_counter", "perf_counter_ns")),
    (timers, "timers", ("perf_counter",)),
    (torch.cuda.Event, "torch.cuda.Event", ("record", "elapsed_time", "query")),
    (torch.cuda.CUDAGraph, "torch.cuda.CUDAGraph", ("replay",)),
)
Clocks = list[tuple[Any, str, str, Any]]
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (  # of the process, which all share
    ("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    ("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    ("torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled),
    ("os.sched_getaffinity(0)", lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)),
)
_SWEEP_SECONDS = 2.0
_SHORTENED = 1.3  # times as long a call of a lone rotation may take; leaving out every other one makes it 2


def verify(job: Job, candidate: Candidate, sets: Sets, thorough: bool = False) -> None:
    """Raise `Failure` unless the timed calls of `one` are right, keep to their outputs and leave nothing running.

    Raises `Tainted` where inputs were changed before. `thorough` also runs a rotation by itself, on scarred outputs and on `near` values,
    and looks at what the stages of a composite hand on, on values drawn after binding. What is timed is loaded in the end.
    """
    if damage := sets.damage():
        raise Tainted(damage)
    timer = candidate.timer
    turns = [(timer.check, _fresh), (timer.check, _base)]
    if thorough:
        turns += [(timer.rotate, _scarred), (timer.rotate, _near)]
    try:
        for run, prepare in turns:
            prepare(candidate, sets)
            _right(job, candidate, sets, run, stages=thorough and prepare is _fresh)
    finally:
        sets.restore()
    if thorough:
        _whole(timer)


def _right(job: Job, candidate: Candidate, sets: Sets, run: Callable[[], object], stages: bool) -> None:
    """Run timed calls; `Failure` unless they are right, with `stages` also in what the stages of a composite hand on."""
    bench = bench_of(job)
    copies = _run(run, sets)
    unharmed(sets)
    candidate.check = both(candidate.check, _compared(bench, job, candidate, sets))
    if sets.written_since(copies):
        raise Failure("incorrect", "outputs were written after the call had returned")
    if stages and bench.stages and not candidate.check.error:
        shown = candidate.timer.shown() if hasattr(candidate.timer, "shown") else candidate.timer.returned[0]
        candidate.check = both(candidate.check, bench.check_stages(candidate.name, job.cell, shown))
    if candidate.check.error:
        raise Failure("incorrect", candidate.check.error)


def _fresh(candidate: Candidate, sets: Sets) -> None:
    """Values drawn after binding, outputs and buffers poisoned."""
    sets.load(sets.fresh)
    sets.poison()
    for call in candidate.calls:
        memory.poison(getattr(call, "buffers", {}))


def _near(candidate: Candidate, sets: Sets) -> None:
    """Values that are nearly those that are timed."""
    sets.load(sets.near)


def _base(candidate: Candidate, sets: Sets) -> None:
    """The values that are timed."""
    sets.load(sets.base)


def _scarred(candidate: Candidate, sets: Sets) -> None:
    """The values as they are, and a few elements of outputs and buffers poisoned."""
    sets.scar()
    for call in candidate.calls:
        for buffer in getattr(call, "buffers", {}).values():
            memory.scar(memory.as_bytes(buffer)[None], buffer)


def _whole(timer: Any) -> None:
    """`Failure` where a sample does not hold all the work: some of it is elsewhere, or left out."""
    if outstanding := timer.outstanding_us():
        reason = f"work went on for {outstanding:.0f} us after the last event: it is on another stream"
        raise Failure("incorrect", reason)
    if (ratio := timer.shortened()) > _SHORTENED:
        reason = f"a call takes {ratio:.2f} times as long in one rotation as among more: work is left out"
        raise Failure("incorrect", reason)


def unharmed(sets: Sets) -> None:
    """`Failure` where something was written that is no output; it is mended."""
    if damage := sets.damage():
        raise Failure("incorrect", damage)


def _run(run: Callable[[], object], sets: Sets) -> dict[str, Tensor] | None:
    """Run timed calls; `Failure` where they leave a thread or a process running. What outputs hold as soon as they are over (`copied`)."""
    before, children = set(threading.enumerate()), processes.offspring()
    run()
    copies = sets.copied()  # before a thread of earlier has time to end
    if processes.offspring() - children:
        processes.sweep(children, _SWEEP_SECONDS)
        raise Failure("incorrect", "processes were left running")
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    if left:
        raise Failure("incorrect", f"threads were left running: {', '.join(left)}")
    return copies


def clocks() -> Clocks:
    """What times are taken with: each with its place, that one's name, and its own; to be called before an implementation may replace it."""
    return [(place, whose, name, getattr(place, name)) for place, whose, names in _CLOCKS for name in names]


def surroundings() -> list[Any]:
    """The settings of the process that all implementations share."""
    return [asked() for _, asked, _ in _SETTINGS]


def undisturbed(known: list[Any]) -> None:
    """`Failure` where an implementation has changed a setting that others and times depend on; it is put back."""
    changed = [(setting, was) for setting, was in zip(_SETTINGS, known, strict=True) if setting[1]() != was]
    text = " and ".join(f"{name} is {asked()}, no longer {was}" for (name, asked, _), was in changed)
    for (_, _, put), was in changed:
        put(was)
    if changed:
        raise Failure("incorrect", text)


def genuine(known: Clocks) -> None:
    """`Failure` where an implementation has replaced a function that times are taken with; it is put back."""
    replaced = [
        (place, whose, name, original) for place, whose, name, original in known if getattr(place, name) is not original
    ]
    for place, _, name, original in replaced:
        setattr(place, name, original)
    if replaced:
        text = " and ".join(f"{whose}.{name}" for _, whose, name, _ in replaced)
        raise Failure("incorrect", f"{text} was replaced")


def _compared(bench: Bench, job: Job, candidate: Candidate, sets: Sets) -> Check:
    """Of the sets that ran, one of each draw with its reference, all others with that set."""
    result, draws, ran = Check(), sets.draws, len(candidate.timer.returned)
    for j in range(min(draws, ran)):  # a rotation of slow calls has fewer sets than there are draws
        first, *others = range(j, ran, draws)
        result = both(result, _checked(bench, job, candidate, sets, first))
        if result.error or not others:
            continue
        returns = any(isinstance(candidate.timer.returned[i], dict) for i in (first, *others))
        flags = (
            torch.stack([_differ(candidate, sets, first, i) for i in others])
            if returns
            else sets.unlike(first)[1 : len(others) + 1]
        )
        for i, differs in zip(others, flags.tolist(), strict=True):  # in another order of sums, say
            if differs and not result.error:
                result = both(result, _checked(bench, job, candidate, sets, i))
    return result


def _checked(bench: Bench, job: Job, candidate: Candidate, sets: Sets, i: int) -> Check:
    outputs, expected = _outputs(candidate, sets, i), sets.draw_of(i).expected
    return checked(bench, candidate.name, job.cell, sets.inputs[i], sets.outputs[i], outputs, expected)


def checked(
    bench: Bench,
    name: str,
    cell: Cell,
    given: dict[str, Tensor],
    asked: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> Check:
    """The bench's check of the outputs `found` on inputs `given`; wrong where one is not of the type and shape that is `asked`."""
    for what, tensor in asked.items():
        if (outputs[what].dtype, outputs[what].shape) != (tensor.dtype, tensor.shape):
            return Check(error=f"{what}: {_kind(outputs[what])}, not {_kind(tensor)}")
    return bench.check(name, cell, given, outputs, expected)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _outputs(candidate: Candidate, sets: Sets, i: int) -> dict[str, Tensor]:
    """The outputs of set i; those that an implementation allocates itself are what its last timed call returned."""
    returned = candidate.timer.returned[i]
    return sets.outputs[i] | (returned if isinstance(returned, dict) else {})


def _differ(candidate: Candidate, sets: Sets, first: int, i: int) -> Tensor:
    """Whether an output of set i differs from that of set `first` in a bit, on the device."""
    known, other = _outputs(candidate, sets, first), _outputs(candidate, sets, i)
    pairs = [(memory.as_bytes(known[name]), memory.as_bytes(other[name])) for name in sets.outputs[i]]
    flags = [(a != b).any() if a.shape == b.shape else a.new_ones((), dtype=torch.bool) for a, b in pairs]
    return torch.stack(flags).any()


def differences(job: Job, candidate: Candidate, sets: Sets) -> Check:
    """What the outputs of the sets that ran hold, against what they should."""
    return _compared(bench_of(job), job, candidate, sets)
