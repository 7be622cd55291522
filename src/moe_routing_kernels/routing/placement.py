"""Where experts lie under expert parallelism: a static placement from a histogram of loads, with replicas of hot experts.

Every rank has the same number of slots, and a slot holds one expert. An expert in several slots is replicated, and its load is split evenly
among them. Strategy, as of DeepSeek's EPLB: slots beyond one per expert go, one after another, to the expert with the largest load per
replica; then experts are placed by falling load per replica, each on the least loaded ranks that have a free slot (longest processing
time first). Two steps differ from EPLB. A rank never holds an expert twice, which would relieve nothing. At the end slots of the most
loaded rank are exchanged with those of others as long as that lowers the larger of the two loads.

Plain Python: O(S N + E log E) for S slots on N ranks, and as much per exchange.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_routing_kernels.errors import bad, whole

_LESS = 1 - 1e-9  # what an exchange must lower a load to: rounding alone cannot go on for ever


@dataclass(frozen=True)
class Placement:
    """The expert in every slot of every rank: all ranks have equally many slots, and all experts 0 .. E - 1 have one."""

    slots: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> list[int]:
        """How many slots hold each expert (E,)."""
        return _count(expert for rank in self.slots for expert in rank)

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Loads (E,) of experts -> the load of each rank (N,), if replicas of an expert share its load evenly."""
        replicas = self.replicas
        if len(loads) != len(replicas):
            raise bad("loads", f"{len(loads)} experts", f"{len(replicas)}, as the placement has")
        return [math.fsum(loads[expert] / replicas[expert] for expert in rank) for rank in self.slots]

    def imbalance(self, loads: Sequence[float]) -> float:
        """The load of the most loaded rank over the mean of ranks: 1 is even; 1 without any load."""
        ranks = self.rank_loads(loads)
        return max(ranks) * len(ranks) / math.fsum(ranks) if any(ranks) else 1.0


def consecutive(experts: int, ranks: int) -> Placement:
    """The usual placement: E / N consecutive experts per rank, no replica. Raises `UserError`."""
    _check_sizes(experts, ranks, 0)
    local = experts // ranks
    return Placement(tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ranks)))


def plan(loads: Sequence[float], ranks: int, spare: int = 0) -> Placement:
    """Place experts with these loads (E,), tokens or any other unit, on ranks with E / N + `spare` slots each.

    The result depends on the arguments alone; an expert has at most N replicas. Slots of a rank are in the order of experts. Raises
    `UserError` for loads that are negative or not finite, and for sizes that leave slots empty: E must be divisible by `ranks`, and
    `spare` at most E - E / N.
    """
    _check_sizes(len(loads), ranks, spare)
    if not all(math.isfinite(load) and load >= 0 for load in loads):
        raise bad("loads", list(loads), "finite numbers, at least 0")
    replicas = _replicate(loads, ranks, len(loads) // ranks * ranks + spare * ranks)
    shares = [load / count for load, count in zip(loads, replicas, strict=True)]
    placed = _place(shares, replicas, ranks, len(loads) // ranks + spare)
    _exchange(placed, shares)
    return Placement(tuple(tuple(sorted(rank)) for rank in placed))


def _check_sizes(experts: int, ranks: int, spare: int) -> None:
    if not whole(ranks) or ranks < 1 or not experts or experts % ranks:
        raise bad("ranks", ranks, f"a divisor of the number of experts, {experts}")
    if not whole(spare) or not 0 <= spare <= experts - experts // ranks:
        raise bad("spare", spare, f"0 to {experts - experts // ranks}: a rank holds no expert twice")


def _count(experts: Iterable[int]) -> list[int]:
    counts: dict[int, int] = {}
    for expert in experts:
        counts[expert] = counts.get(expert, 0) + 1
    return [counts[expert] for expert in range(len(counts))]


def _replicate(loads: Sequence[float], ranks: int, slots: int) -> list[int]:
    """Replicas of each expert, `slots` in all, at most one per rank: no other split has a smaller largest load per replica."""
    replicas = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)] if ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        _, expert = heapq.heappop(heap)
        replicas[expert] += 1
        if replicas[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / replicas[expert], expert))
    return replicas


def _place(shares: Sequence[float], replicas: Sequence[int], ranks: int, slots: int) -> list[set[int]]:
    """The experts of each rank: by falling share, every replica of an expert on a rank of its own."""
    placed: list[set[int]] = [set() for _ in range(ranks)]
    load, room = [0.0] * ranks, [slots] * ranks
    left = [0] * (ranks + 1)  # how many experts with so many replicas are not placed yet
    for count in replicas:
        left[count] += 1
    for expert in sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert)):
        left[replicas[expert]] -= 1
        chosen = _least_loaded(load, room, replicas[expert], left)
        for rank in chosen:
            placed[rank].add(expert)
            load[rank] += shares[expert]
            room[rank] -= 1
    return placed


def _least_loaded(load: Sequence[float], room: Sequence[int], count: int, left: Sequence[int]) -> list[int]:
    """The `count` least loaded ranks with room that leave a place for all experts that are `left`.

    The roomiest ranks always do (Gale and Ryser), so the most loaded of the choice give way to them, one by one.
    """
    free = [rank for rank in range(len(room)) if room[rank]]
    chosen = sorted(free, key=lambda rank: (load[rank], -room[rank], rank))[:count]
    roomiest = sorted(free, key=lambda rank: (-room[rank], load[rank], rank))[:count]
    for rank in roomiest:
        if _fits(room, chosen, left):
            break
        if rank not in chosen:
            worst = max((other for other in chosen if other not in roomiest), key=lambda other: load[other])
            chosen[chosen.index(worst)] = rank
    return chosen


def _fits(room: Sequence[int], chosen: Sequence[int], left: Sequence[int]) -> bool:
    """Whether experts, `left[c]` of them with c replicas, fill what room the choice leaves with no rank holding one twice."""
    rooms = sorted((room[rank] - (rank in chosen) for rank in range(len(room))), reverse=True)
    most = 0
    for first, size in enumerate(rooms, 1):  # the `first` roomiest take at most so many of each expert's replicas
        most += size
        if most > sum(count * min(replicas, first) for replicas, count in enumerate(left)):
            return False
    return True


def _exchange(placed: list[set[int]], shares: Sequence[float]) -> None:
    """Exchange a slot of the most loaded rank with one of another as long as the larger of their loads falls."""
    load = [math.fsum(shares[expert] for expert in rank) for rank in placed]
    while True:
        top = max(range(len(load)), key=lambda rank: load[rank])
        best = (load[top] * _LESS, -1, -1, -1)
        for rank in sorted(range(len(load)), key=lambda rank: load[rank]):
            for out in placed[top] - placed[rank]:
                for back in placed[rank] - placed[top]:
                    moved = shares[out] - shares[back]
                    best = min(best, (max(load[top] - moved, load[rank] + moved), rank, out, back))
        _, rank, out, back = best
        if rank < 0:
            return
        for at, gone, come in ((top, out, back), (rank, back, out)):
            placed[at] = placed[at] - {gone} | {come}
            load[at] = math.fsum(shares[expert] for expert in placed[at])
