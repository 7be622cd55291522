"""Whether an implementation is right, in the very calls that are timed.

Twice in a row: first on values drawn after the implementation was bound and captured, in poisoned outputs; then on
the values that are timed, in outputs that still hold the other answers. What was computed early, is remembered, or is done only
where something shows that it is looked at, is wrong in one of the two. Before and after sampling twice more: on values of which only a few
are not those that are timed, which catches kernels that remember answers by a sample of the inputs; and once more on those that are timed, in outputs
that are right but for a few elements, which catches kernels that skip work when inputs or outputs look as they should. The first set of each draw is compared with its reference,
and every other set with it, bit by bit.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.checks import Check, both
from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.grid.cell import Cell, Job
from moe_routing_bench.measure import memory, processes
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted
from moe_routing_bench.measure.host_timer import ATTEMPTS, Pairs
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.output_forms import outputs_of, unlike_any, unlike_asked, unshared

_SWEEP_SECONDS = 2.0
_LISTEN_SECONDS = 0.01
_LOOKS = 5
_ATTEMPTS = 4  # at a rotation by itself that nothing else on the machine holds up
# On a busy CPU so many more, of a call of one thread, and of several within seconds. Those wait for one another by computing, up to a time
# slice of 8 ms: of calls on two threads among ten such processes, one in five rotations of 60 us did without. A call that leaves work out
# gets the more chances to look whole.
_MORE_ATTEMPTS, _MORE_WAITING, _MORE_SECONDS = 4, 40, 10.0
# Times as long a call of a lone rotation may take, or on a CPU compute, where there are no pairs of rotations; leaving out every other one
# makes it 2. The least of few samples on a busy CPU is less than that of as few rotations now and then: honest calls were 1.6 times as long.
_SHORTENED_HOST, _SHORTENED_FEW, _SHORTENED = 1.25, 1.8, 1.3
_FEW_SAMPLES = 50
_ELSEWHERE = 0.2  # share of the computing in a call that other threads may do, as a thread that ends does


def verify(job: Job, candidate: Candidate, sets: Sets, thorough: bool = False) -> None:
    """Raise `Failure` unless the timed calls of `candidate` are right, keep to their outputs and leave nothing running.

    Raises `Tainted` where inputs were changed before. `thorough` also runs a rotation by itself, on scarred outputs and on `near` values,
    and looks at what the stages of a composite hand on, on values drawn after binding. What is timed is loaded in the end.
    """
    if damage := sets.damage():
        raise Tainted(damage)
    timer = candidate.timer
    turns = [(timer.check, _fresh), (timer.check, _base)]
    if thorough:
        turns += [(timer.rotate, _scarred), (timer.rotate, _near)]
    for last in _attempts(timer.name):
        try:
            for run, prepare in turns:
                prepare(candidate, sets)
                _right(job, candidate, sets, run, stages=thorough and prepare is _fresh)
        finally:
            sets.restore()
        if not thorough:
            break
        _complete(candidate)
        if timer.name == "wall" and timer.pairs():
            _paired(job, candidate, sets)
            break
        if _whole(candidate, last):
            break


def _attempts(name: str) -> Iterator[bool]:
    """Whether each attempt at a call that holds all its work is the last one, by the `name` of the timer."""
    yield from [False] * (_ATTEMPTS - 1)
    if name == "wall":
        end = time.monotonic() + _MORE_SECONDS
        for _ in range(_MORE_ATTEMPTS if torch.get_num_threads() == 1 else _MORE_WAITING):
            if time.monotonic() > end:
                break
            yield False
    yield True


def _right(job: Job, candidate: Candidate, sets: Sets, run: Callable[[], object], stages: bool) -> None:
    """Run timed calls; `Failure` unless they are right, with `stages` also in what the stages of a composite hand on."""
    bench = bench_of(job)
    copies = _run(run, sets)
    unharmed(sets)
    if error := unlike_any(candidate, sets) or unshared(candidate, sets):
        raise Failure("incorrect", error)
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
    sets.scar(sets.places())
    for call in candidate.calls:
        for buffer in getattr(call, "buffers", {}).values():
            whole = memory.as_bytes(buffer)[None], buffer
            memory.scar(*whole, memory.places(*whole))


def _paired(job: Job, candidate: Candidate, sets: Sets) -> None:
    """Whether a call on a CPU computes as long where it is checked as where it is timed, in as many attempts as it takes to tell. `Failure`
    where not; a doubt where they cannot tell."""
    pairs = Pairs()
    for _ in range(ATTEMPTS):
        pairs.add(*_alternated(job, candidate, sets))
        if pairs.whole:
            return
        if pairs.shortened:
            raise Failure("incorrect", f"{pairs}: work is left out")
    candidate.doubts.append(f"{pairs}, on a host too busy to tell whether work is left out")


def _alternated(job: Job, candidate: Candidate, sets: Sets) -> tuple[list[list[float]], list[list[float]]]:
    """What calls compute in rotations among others and alone, in turn. `Failure` where one of the latter is wrong: outputs are scarred before
    each, and looked at in whole where a scar is left, or after one that cannot be foreseen."""
    timer, count, among, alone = candidate.timer, candidate.timer.pairs(), list[list[float]](), list[list[float]]()
    whole = secrets.randbelow(count)
    for i in range(count):
        places = sets.places()  # before both rotations: a call that follows the choice finds its code out of the caches
        among.append(timer.among())
        alone.append(timer.lone(partial(sets.scar, places)))
        if i == whole or sets.scarred(places, range(len(timer.returned))):
            unlike = unlike_any(candidate, sets) or unshared(candidate, sets)
            compared = Check(error=unlike) if unlike else differences(job, candidate, sets)
            candidate.check = both(candidate.check, compared)
            if candidate.check.error:
                raise Failure("incorrect", candidate.check.error)
    return among, alone


def _complete(candidate: Candidate) -> None:
    """`Failure` where a sample does not hold all the work because some of it is elsewhere."""
    timer = candidate.timer
    if outstanding := timer.outstanding_us():
        reason = (
            f"work went on for {outstanding:.0f} us after the last event: it is on another stream, or in another thread"
        )
        raise Failure("incorrect", reason)
    if (share := timer.elsewhere()) > _ELSEWHERE:
        raise Failure("incorrect", f"other threads do {share:.0%} of the computing")


def _whole(candidate: Candidate, last: bool) -> bool:
    """Whether a call takes as long where it is checked as where it is timed; where not, `Failure` in the `last` attempt."""
    timer = candidate.timer
    alone, among = timer.alone_us(), max(timer.among_us(candidate.blocks), 1e-3)
    limit = _SHORTENED
    if timer.name == "wall":
        limit = _SHORTENED_HOST if sum(map(len, candidate.blocks)) >= _FEW_SAMPLES else _SHORTENED_FEW
    if last and alone > limit * among:
        figures = f"{alone:.1f} us in the quickest rotation, {among:.1f} us in a sample; limit {limit:g}"
        reason = f"a call takes {alone / among:.2f} times as long where it is checked as where it is timed ({figures}): work is left out"
        raise Failure("incorrect", reason)
    return alone <= limit * among


def unharmed(sets: Sets) -> None:
    """`Failure` where something was written that is no output; it is mended."""
    if damage := sets.damage():
        raise Failure("incorrect", damage)


def _run(run: Callable[[], object], sets: Sets) -> dict[str, Tensor] | None:
    """Run timed calls; `Failure` where they leave a thread or a process running. What outputs hold as soon as they are over (`copied`)."""
    before, frames, children = set(threading.enumerate()), running(), processes.offspring()
    run()
    copies = sets.copied()  # before a thread of earlier has time to end
    if processes.offspring() - children:
        processes.sweep(children, _SWEEP_SECONDS)
        raise Failure("incorrect", "processes were left running")
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    left += [f"number {number}" for number in running() - frames - {thread.ident for thread in threading.enumerate()}]
    if left:
        raise Failure("incorrect", f"threads were left running: {', '.join(left)}")
    return copies


def _compared(bench: Bench, job: Job, candidate: Candidate, sets: Sets) -> Check:
    """One set of each draw with its reference, all others with that set."""
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


def idle(children: set[int]) -> None:
    """`Failure` where there are processes other than `children` that compute; they are ended. Those that wait, as a compiler's may, are not."""
    others = processes.offspring() - children
    if not others:
        return
    before, ready = {pid: processes.cpu_seconds(pid) for pid in others}, others
    for _ in range(_LOOKS):  # on a busy machine one that computes may get no core meanwhile
        time.sleep(_LISTEN_SECONDS / _LOOKS)
        ready = processes.ready(ready)
    if ready or any(processes.cpu_seconds(pid) > seconds + _LISTEN_SECONDS / 10 for pid, seconds in before.items()):
        processes.sweep(children, _SWEEP_SECONDS)
        raise Failure("incorrect", "processes compute outside of calls")


def running() -> set[int]:
    """The threads that run Python, those that `threading` does not know among them."""
    return set(sys._current_frames())


def _checked(bench: Bench, job: Job, candidate: Candidate, sets: Sets, i: int) -> Check:
    outputs, draw = outputs_of(candidate, sets, i), sets.draw_of(i)
    digest = sum(sets.digest(outputs[name]) for name in sets.outputs[i])
    if candidate.digests.get(id(draw)) == digest:  # the bits that were right before
        return Check()
    result = bench.check(candidate.name, job.cell, sets.inputs[i], outputs, draw.expected)
    if not result.error:
        candidate.digests[id(draw)] = digest
    return result


def checked(
    bench: Bench,
    name: str,
    cell: Cell,
    given: dict[str, Tensor],
    asked: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> Check:
    """The bench's check of `outputs` on inputs `given`; wrong where one is not a plain tensor of the kind that is `asked`."""
    error = unlike_asked(outputs, asked)
    return Check(error=error) if error else bench.check(name, cell, given, outputs, expected)


def _differ(candidate: Candidate, sets: Sets, first: int, i: int) -> Tensor:
    """Whether an output of set i differs from that of set `first` in a bit, on the device."""
    known, other = outputs_of(candidate, sets, first), outputs_of(candidate, sets, i)
    pairs = [(memory.as_bytes(known[name]), memory.as_bytes(other[name])) for name in sets.outputs[i]]
    flags = [(a != b).any() if a.shape == b.shape else a.new_ones((), dtype=torch.bool) for a, b in pairs]
    return torch.stack(flags).any()


def differences(job: Job, candidate: Candidate, sets: Sets) -> Check:
    """What the outputs of the sets that ran hold, against what they should."""
    return _compared(bench_of(job), job, candidate, sets)


def difference(job: Job, candidate: Candidate, sets: Sets, i: int) -> Check:
    """What the outputs of set i hold, against what they should; nothing where the bits are those that were right before."""
    return _checked(bench_of(job), job, candidate, sets, i)
