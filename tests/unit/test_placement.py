"""The placement of experts on ranks: sizes that always hold, and its imbalance against the best of all placements at small sizes."""

import itertools
import math
import random

import pytest

from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routing import placement as steps
from moe_routing_kernels.routing.placement import Placement, consecutive, plan


def drawn(seed: int, experts: int) -> list[float]:
    """Loads from even to those of a few hot experts."""
    rng = random.Random(seed)
    return [rng.random() ** rng.choice((0.2, 1, 4)) * 100 for _ in range(experts)]


def best(loads: list[float], ranks: int, slots: int) -> float:
    """The smallest largest load of a rank over all placements of all splits into replicas."""
    experts, least = range(len(loads)), math.inf
    choices = list(itertools.combinations(experts, slots))
    for rest in itertools.combinations_with_replacement(choices, ranks):
        if len({expert for rank in rest for expert in rank}) == len(loads):
            least = min(least, max(Placement(rest).rank_loads(loads)))
    return least


@pytest.mark.parametrize(
    ("experts", "ranks", "spare", "most", "mean"),
    [
        *((*sizes, 10 / 9, 1.01) for sizes in [(4, 2, 0), (6, 2, 0), (8, 2, 0), (6, 3, 0)]),
        *((*sizes, 4 / 3, 1.1) for sizes in [(4, 2, 1), (6, 3, 1)]),
    ],
)
def test_its_largest_load_is_near_that_of_the_best_placement(
    experts: int, ranks: int, spare: int, most: float, mean: float
) -> None:
    """At most a ninth more in any draw, and 1 % in the mean; with replicas, whose number the best placement picks freely, a third and 10 %."""
    ratios = []
    for seed in range(20 if spare else 50):
        loads = drawn(seed, experts)
        found = max(plan(loads, ranks, spare).rank_loads(loads))
        ratios.append(found / best(loads, ranks, experts // ranks + spare))
    assert min(ratios) > 1 - 1e-9 and max(ratios) < most and sum(ratios) / len(ratios) < mean


@pytest.mark.parametrize(
    ("experts", "ranks", "spare"), [(8, 1, 0), (8, 4, 3), (8, 8, 7), (9, 3, 6), (12, 2, 5), (64, 8, 4), (16, 16, 1)]
)
def test_every_slot_is_filled_and_no_rank_holds_an_expert_twice(experts: int, ranks: int, spare: int) -> None:
    for seed in range(25):
        loads = drawn(seed, experts)
        placement = plan(loads, ranks, spare)
        assert all(len(set(rank)) == len(rank) == experts // ranks + spare for rank in placement.slots)
        assert len(placement.replicas) == experts and max(placement.replicas) <= ranks
        assert math.isclose(sum(placement.rank_loads(loads)), sum(loads))
        largest = max(load / count for load, count in zip(loads, placement.replicas, strict=True))
        assert placement.imbalance(loads) * sum(loads) / ranks >= largest * (1 - 1e-9)


def test_replicas_relieve_a_hot_expert() -> None:
    """One of 64 experts has a third of the load: its rank has 2.9 times the mean, and with a spare slot per rank none has 4 % more."""
    loads = [32.0] + [1.0] * 63
    assert consecutive(64, 8).imbalance(loads) == pytest.approx(39 / 95 * 8)
    assert plan(loads, 8).imbalance(loads) == pytest.approx(39 / 95 * 8)
    spread = plan(loads, 8, 1)
    assert spread.replicas[0] == 8 and spread.imbalance(loads) < 1.04
    assert plan(loads, 8, 1) == spread


def test_ranks_with_no_load_are_even() -> None:
    assert plan([0.0] * 4, 2).imbalance([0.0] * 4) == 1
    assert consecutive(4, 2).slots == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("loads", "ranks", "spare", "named"),
    [
        ([1.0] * 4, 3, 0, "ranks"),
        ([], 1, 0, "ranks"),
        ([1.0] * 4, 2, 3, "spare"),
        ([1.0] * 4, 2, -1, "spare"),
        ([1.0, math.nan], 2, 0, "loads"),
        ([1.0, -1], 1, 0, "loads"),
    ],
)
def test_sizes_and_loads_that_make_no_placement(loads: list[float], ranks: int, spare: int, named: str) -> None:
    with pytest.raises(UserError, match=f"^{named}: got "):
        plan(loads, ranks, spare)


def test_loads_of_other_experts() -> None:
    with pytest.raises(UserError, match="loads: got '3 experts'; allowed: 4"):
        consecutive(4, 2).imbalance([1.0] * 3)


@pytest.mark.parametrize(
    ("ranks", "slots", "replicas"),
    [(4, 4, [1, 1, 1, 1]), (4, 7, [3, 2, 1, 1]), (4, 8, [4, 2, 1, 1]), (2, 7, [2, 2, 2, 1]), (1, 4, [1, 1, 1, 1])],
)
def test_slots_go_to_the_largest_load_per_replica(ranks: int, slots: int, replicas: list[int]) -> None:
    """Of 9, 4, 2 and 1: an expert that has a replica gives way to one whose whole load is larger than its half."""
    assert steps._replicate([9.0, 4.0, 2.0, 1.0], ranks, slots) == replicas


def test_experts_are_placed_by_falling_share_on_the_least_loaded_rank() -> None:
    """5 and 4 first, then 3 next to 4 and 2 next to 5; every replica on a rank of its own, with its share of the load alone."""
    assert steps._place([2.0, 5.0, 3.0, 4.0], [1] * 4, 2, 2) == [{1, 0}, {3, 2}]
    assert steps._place([3.0, 5.0, 1.0, 1.0], [2, 1, 1, 2], 3, 2) == [{1, 3}, {0, 2}, {0, 3}]


def test_the_loads_of_ranks_count_the_share_of_a_replica() -> None:
    """12 on three ranks is 4 on each, 3 on two 1.5; 2, 1, 0.5 and 0.5 go to the least loaded in turn."""
    loads = [12.0, 3.0, 2.0, 1.0, 0.5, 0.5]
    placed = plan(loads, 3, 1)
    assert placed.replicas == [3, 2, 1, 1, 1, 1]
    assert sorted(placed.rank_loads(loads)) == [6.0, 6.5, 6.5]
    assert placed.imbalance(loads) == pytest.approx(6.5 / (19 / 3))


@pytest.mark.parametrize(
    ("load", "room", "count", "left", "chosen"),
    [
        ([1.0, 1.0], [1, 2], 1, [0, 2, 0], [1]),  # equally loaded: the roomier one
        ([1.0, 1.0, 0.5], [2, 2, 0], 1, [0, 3, 0], [0]),  # a rank without room is none; then the first
        ([1.0, 5.0, 3.0], [1, 2, 2], 1, [0, 1, 0, 1], [2]),  # an expert with three replicas needs all three ranks
        ([1.0, 2.0, 9.0, 3.0], [1, 1, 2, 2], 2, [0, 1, 0, 1], [0, 3]),  # the most loaded gives way to the roomiest
    ],
)
def test_the_least_loaded_ranks_that_leave_a_place_for_all(
    load: list[float], room: list[int], count: int, left: list[int], chosen: list[int]
) -> None:
    assert steps._least_loaded(load, room, count, left) == chosen


def test_slots_are_exchanged_while_the_larger_load_falls() -> None:
    """9 + 4 against 3 + 2: 9 and 3 change places, which leaves 11; 9 and 2 would relieve the first rank more, and leave 12."""
    placed = [{0, 1}, {2, 3}]
    steps._exchange(placed, [9.0, 4.0, 3.0, 2.0])
    assert placed == [{2, 1}, {0, 3}]
    even = [{0, 3}, {1, 2}]
    steps._exchange(even, [4.0, 3.0, 3.0, 2.0])
    assert even == [{0, 3}, {1, 2}]
