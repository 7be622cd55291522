"""What the timed calls of a turn leave in their outputs: poison is laid before the turn, and every set that was called is checked after it.

A check runs calls of its own. This looks at those that are timed, which catches kernels that tell the two apart. A turn is a block of
samples or, in long turns, all blocks of a turn. Both steps are outside of the timed region.
"""

from time import perf_counter  # by its own name, as in `timers`

import torch
from torch import Tensor

from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import memory
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.verify import difference, unlike_any, unshared

_SHARE = 0.1  # of a turn's time: after so much of comparing with references, sets that differ are left to the next turn


def lay(candidate: Candidate, sets: Sets) -> float:
    """Fill the outputs that the calls of a turn will write, given or returned ones, with what no right answer holds; returns when."""
    timer = candidate.timer
    if timer.begin_turn():
        sets.poison()
        _plain(candidate, sets)
        if any(isinstance(returned, dict) for returned in timer.returned):
            with torch.inference_mode():
                for returned, asked in zip(timer.returned, sets.outputs, strict=False):
                    memory.poison(_elsewhere(returned, asked))
    return perf_counter()


def judge(job: Job, candidate: Candidate, sets: Sets, since: float) -> None:
    """`Failure` where a set that was called since `lay`, at the time `since`, does not hold the right answer.

    Its bits are compared with those that were right before. Sets that differ, as with sums in another order, are compared with the reference:
    in random order at least one of them, and as many as fit into a tenth of the turn. Raises `Tainted` where inputs were changed.
    """
    ran, returned = candidate.timer.reached(), candidate.timer.returned
    if not ran:
        return
    end = perf_counter() + _SHARE * (perf_counter() - since)
    _plain(candidate, sets)
    found = sets.digests({i: returned[i] if isinstance(returned[i], dict) else None for i in ran})
    differ = [i for i in ran if candidate.digests.get(id(sets.draw_of(i))) != found[i]]
    for place in memory.some(len(differ), len(differ)):
        check = difference(job, candidate, sets, differ[place])
        if check.error:
            if harm := sets.harm():  # the audit finds its author, and mends it
                raise Tainted(harm)
            raise Failure("incorrect", f"after a timed turn: {check.error}")
        if perf_counter() > end:
            break


def _plain(candidate: Candidate, sets: Sets) -> None:
    """`Failure` where calls returned what computes when it is read, or memory of an input or of another set. What a graph holds was looked
    at when it was verified."""
    if candidate.timer.name == "cuda_graph" or all(returned is None for returned in candidate.timer.returned):
        return
    if error := unlike_any(candidate, sets) or unshared(candidate, sets):
        raise Failure("incorrect", f"after a timed turn: {error}")


def _elsewhere(returned: object, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs that a call returned in memory of its own, those that lie in one piece, flat."""
    tensors = returned if isinstance(returned, dict) else {}
    return {
        name: tensors[name].detach().view(-1)
        for name in asked.keys() & tensors.keys()
        if tensors[name].data_ptr() != asked[name].data_ptr() and tensors[name].is_contiguous()
    }
