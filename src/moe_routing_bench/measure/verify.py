"""Whether an implementation is right, in the very calls that are timed.

Twice in a row: first on values that nobody knew before the implementation was bound and captured, in poisoned outputs; then on
the values that are timed, in outputs that still hold the other answers. What was computed early, is remembered, or is done only
where something shows that it is looked at, is wrong in one of the two. Before and after sampling twice more: on values of which only a few
are not those that are timed, for who remembers answers by a sample of the inputs; and once more on those that are timed, in outputs that are
right but for a few elements, for who does nothing where inputs or outputs look as they should. The first set of each draw is compared with its reference,
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
from moe_routing_bench.measure import inputs, processes, timers
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


def verify(job: Job, one: Candidate, sets: Sets, thorough: bool = False) -> None:
    """Raise `Failure` unless the timed calls of `one` are right, keep to their outputs and leave nothing running.

    Raises `Tainted` where inputs were changed before. `thorough` also runs a rotation by itself, on scarred outputs and on `near` values,
    and looks at what the stages of a composite hand on, on values that nobody knew. What is timed is loaded in the end.
    """
    if damage := sets.damage():
        raise Tainted(damage)
    timer = one.timer
    turns = [(timer.check, _fresh), (timer.check, _base)]
    if thorough:
        turns += [(timer.rotate, _scarred), (timer.rotate, _near)]
    try:
        for run, prepare in turns:
            prepare(one, sets)
            _right(job, one, sets, run, stages=thorough and prepare is _fresh)
    finally:
        sets.restore()
    if thorough:
        _whole(timer)


def _right(job: Job, one: Candidate, sets: Sets, run: Callable[[], object], stages: bool) -> None:
    """Run timed calls; `Failure` unless they are right, with `stages` also in what the stages of a composite hand on."""
    bench = bench_of(job)
    copies = _run(run, sets)
    unharmed(sets)
    one.check = both(one.check, _compared(bench, job, one, sets))
    if sets.written_since(copies):
        raise Failure("incorrect", "outputs were written after the call had returned")
    if stages and bench.stages and not one.check.error:
        one.check = both(one.check, bench.check_stages(one.name, job.cell, one.timer.returned[0]))
    if one.check.error:
        raise Failure("incorrect", one.check.error)


def _fresh(one: Candidate, sets: Sets) -> None:
    """Values that nobody knew, outputs and buffers poisoned."""
    sets.load(sets.fresh)
    sets.poison()
    for call in one.calls:
        inputs.poison(getattr(call, "buffers", {}))


def _near(one: Candidate, sets: Sets) -> None:
    """Values that are nearly those that are timed."""
    sets.load(sets.near)


def _base(one: Candidate, sets: Sets) -> None:
    """The values that are timed."""
    sets.load(sets.base)


def _scarred(one: Candidate, sets: Sets) -> None:
    """The values as they are, and a few elements of outputs and buffers poisoned."""
    sets.scar()
    for call in one.calls:
        for buffer in getattr(call, "buffers", {}).values():
            inputs.scar(inputs.as_bytes(buffer)[None], buffer)


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
    """What times are taken with: each with its place, that one's name, and its own; to be asked before anybody may replace it."""
    return [(place, whose, name, getattr(place, name)) for place, whose, names in _CLOCKS for name in names]


def surroundings() -> list[Any]:
    """The settings of the process that all implementations share."""
    return [asked() for _, asked, _ in _SETTINGS]


def undisturbed(known: list[Any]) -> None:
    """`Failure` where somebody has changed a setting that others depend on, and times; it is put back."""
    changed = [(one, was) for one, was in zip(_SETTINGS, known, strict=True) if one[1]() != was]
    said = " and ".join(f"{name} is {asked()}, no longer {was}" for (name, asked, _), was in changed)
    for (_, _, put), was in changed:
        put(was)
    if changed:
        raise Failure("incorrect", said)


def genuine(known: Clocks) -> None:
    """`Failure` where somebody has replaced what times are taken with; it is put back."""
    replaced = [(place, whose, name, one) for place, whose, name, one in known if getattr(place, name) is not one]
    for place, _, name, one in replaced:
        setattr(place, name, one)
    if replaced:
        said = " and ".join(f"{whose}.{name}" for _, whose, name, _ in replaced)
        raise Failure("incorrect", f"{said} was replaced")


def _compared(bench: Bench, job: Job, one: Candidate, sets: Sets) -> Check:
    """Of the sets that ran, one of each draw with its reference, all others with that set."""
    result, draws, ran = Check(), sets.draws, len(one.timer.returned)
    for j in range(min(draws, ran)):  # a rotation of slow calls has fewer sets than there are draws
        first, *others = range(j, ran, draws)
        result = both(result, _checked(bench, job, one, sets, first))
        if result.error or not others:
            continue
        own = any(isinstance(one.timer.returned[i], dict) for i in (first, *others))
        flags = (
            torch.stack([_differ(one, sets, first, i) for i in others])
            if own
            else sets.unlike(first)[1 : len(others) + 1]
        )
        for i, differs in zip(others, flags.tolist(), strict=True):  # in another order of sums, say
            if differs and not result.error:
                result = both(result, _checked(bench, job, one, sets, i))
    return result


def _checked(bench: Bench, job: Job, one: Candidate, sets: Sets, i: int) -> Check:
    found, expected = _outputs(one, sets, i), sets.draw_of(i).expected
    return checked(bench, one.name, job.cell, sets.inputs[i], sets.outputs[i], found, expected)


def checked(
    bench: Bench,
    name: str,
    cell: Cell,
    given: dict[str, Tensor],
    asked: dict[str, Tensor],
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> Check:
    """The bench's check of the outputs `found` on inputs `given`; wrong where one is not of the type and shape that is `asked`."""
    for what, one in asked.items():
        if (found[what].dtype, found[what].shape) != (one.dtype, one.shape):
            return Check(error=f"{what}: {_kind(found[what])}, not {_kind(one)}")
    return bench.check(name, cell, given, found, expected)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _outputs(one: Candidate, sets: Sets, i: int) -> dict[str, Tensor]:
    """The outputs of set i; those that an implementation allocates itself are what its last timed call returned."""
    returned = one.timer.returned[i]
    return sets.outputs[i] | (returned if isinstance(returned, dict) else {})


def _differ(one: Candidate, sets: Sets, first: int, i: int) -> Tensor:
    """Whether an output of set i differs from that of set `first` in a bit, on the device."""
    known, other = _outputs(one, sets, first), _outputs(one, sets, i)
    pairs = [(inputs.as_bytes(known[name]), inputs.as_bytes(other[name])) for name in sets.outputs[i]]
    flags = [(a != b).any() if a.shape == b.shape else a.new_ones((), dtype=torch.bool) for a, b in pairs]
    return torch.stack(flags).any()
