"""What the timed calls of a turn leave in their outputs: poison is laid before the turn, and sets that were called are checked after it.

A check runs calls of its own. This looks at those that are timed, which catches kernels that tell the two apart. A turn is a block of
samples or, in long turns, all blocks of a turn. Both steps are outside of the timed region.
"""

import secrets
from dataclasses import dataclass
from time import perf_counter  # by its own name, as in `timers`

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import nbytes
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import memory
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.output_forms import unlike_any, unshared
from moe_routing_bench.measure.verify import difference

_SHARE = 0.1  # of a turn's time: after so much of comparing with references, sets that differ are left to the next turn
_SMALL = {"cpu": 1 << 22, "cuda": 1 << 26}  # bytes of all outputs that are looked at in whole after every turn
_PART = 128  # of larger ones, those that are compared after a turn are what its calls write over this, or a quarter of the small ones
_WHOLE = 16  # turns, in the mean, until one is looked at in whole, besides one of the first
_SCARS = 256  # elements of every output
_RETURNED = 8  # sets, at most, with elements of outputs that calls return in memory of their own


@dataclass(frozen=True)
class Scars:
    """Elements of outputs that a turn has to write: their places in all sets, and in returned outputs of some sets; and how many sets to
    compare in whole."""

    given: dict[str, Tensor]
    returned: dict[tuple[int, str], Tensor]
    sets: int


def lay(candidate: Candidate, sets: Sets) -> float:
    """Put what no right answer holds into the outputs that the calls of a turn will write, given or returned ones; returns when.

    That is all of them where they are small, and in one of the first turns and some later ones, which cannot be foreseen. In other turns it is
    some elements of every output: to find these takes a call as long as to write them.
    """
    timer = candidate.timer
    if timer.begin_turn():
        number, candidate.turns_laid = candidate.turns_laid, candidate.turns_laid + 1
        _plain(candidate, sets)
        count = _compared(candidate, sets)
        whole = number == candidate.whole_turn or not secrets.randbelow(_WHOLE) or count >= len(sets.outputs)
        candidate.laid = None if whole else _scars(candidate, sets, count)
        if whole:
            sets.poison()
            if any(isinstance(returned, dict) for returned in timer.returned):
                with torch.inference_mode():
                    for returned, asked in zip(timer.returned, sets.outputs, strict=False):
                        memory.poison(_elsewhere(returned, asked))
    return perf_counter()


def _compared(candidate: Candidate, sets: Sets) -> int:
    """How many sets are compared after a turn: all of small outputs, of large ones none in some turns."""
    outputs = sets.outputs[0].values()
    size = max(1, nbytes(*outputs))
    small = _SMALL[next(iter(outputs)).device.type] / size
    if small >= len(sets.outputs):
        return len(sets.outputs)
    calls = candidate.timer.calls * candidate.samples_per_block
    return int(max(small / 4, calls / _PART) + secrets.randbelow(1 << 20) / (1 << 20))


def _scars(candidate: Candidate, sets: Sets, count: int) -> Scars:
    timer, returned = candidate.timer, {}
    with torch.inference_mode():
        sets.scar(given := sets.places(_SCARS))
        for i in memory.some(_RETURNED, len(timer.returned)):
            for name, tensor in _elsewhere(timer.returned[i], sets.outputs[i]).items():
                whole = memory.as_bytes(tensor)[None], tensor
                returned[i, name] = memory.scar(*whole, memory.places(*whole, _SCARS))
    return Scars(given, returned, count)


def judge(job: Job, candidate: Candidate, sets: Sets, since: float) -> None:
    """`Failure` where a set that was called since `lay`, at the time `since`, does not hold the right answer.

    Its bits are compared with those that were right before: of all sets, or of those that still hold an element which `lay` put there, and
    of some more. Sets that differ, as with sums in another order, are compared with the reference: those first, then in random order, at
    least one, and as many as fit into a tenth of the turn. Raises `Tainted` where inputs were changed.
    """
    ran, returned, laid = candidate.timer.reached(), candidate.timer.returned, candidate.laid
    if not ran:
        return
    end = perf_counter() + _SHARE * (perf_counter() - since)
    _plain(candidate, sets)
    left = [] if laid is None else _left(candidate, sets, laid, ran)
    if laid is not None:
        ran = sorted({*left, *(ran[place] for place in memory.some(laid.sets, len(ran)))})
    if not ran:
        return
    digests = sets.digests({i: returned[i] if isinstance(returned[i], dict) else None for i in ran})
    differ = [i for i in ran if candidate.digests.get(id(sets.draw_of(i))) != digests[i]]
    order = [differ[place] for place in memory.some(len(differ), len(differ))]
    for i in sorted(order, key=lambda i: i not in left):
        check = difference(job, candidate, sets, i)
        if check.error:
            if harm := sets.harm():  # the audit finds its author, and mends it
                raise Tainted(harm)
            raise Failure("incorrect", f"after a timed turn: {check.error}")
        if perf_counter() > end:
            break


def _left(candidate: Candidate, sets: Sets, laid: Scars, ran: list[int]) -> list[int]:
    """The sets of these that still hold an element which `lay` put there, in an output that they were to write."""
    returned = candidate.timer.returned
    away = {name for i in ran for name in _away(returned[i], sets.outputs[i])}
    left = sets.scarred({name: places for name, places in laid.given.items() if name not in away}, ran)
    flags = {}
    for (i, name), places in laid.returned.items():
        tensor = returned[i].get(name) if i in ran and isinstance(returned[i], dict) else None
        if tensor is not None:
            flags[i, name] = memory.scarred(memory.as_bytes(tensor)[None], tensor, places)
    told = torch.cat(list(flags.values())).tolist() if flags else []
    return left + [i for (i, _), is_left in zip(flags, told, strict=True) if is_left and i not in left]


def _plain(candidate: Candidate, sets: Sets) -> None:
    """`Failure` where calls returned what computes when it is read, or memory of an input or of another set. What a graph holds was looked
    at when it was verified."""
    if candidate.timer.name == "cuda_graph" or all(returned is None for returned in candidate.timer.returned):
        return
    if error := unlike_any(candidate, sets) or unshared(candidate, sets):
        raise Failure("incorrect", f"after a timed turn: {error}")


def _elsewhere(returned: object, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs that a call returned in memory of its own, those that lie in one piece, flat."""
    tensors = _away(returned, asked)
    return {name: tensor.detach().view(-1) for name, tensor in tensors.items() if tensor.is_contiguous()}


def _away(returned: object, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs that a call returned in memory of its own."""
    tensors = returned if isinstance(returned, dict) else {}
    return {
        name: tensors[name]
        for name in asked.keys() & tensors.keys()
        if tensors[name].data_ptr() != asked[name].data_ptr()
    }
