"""What a turn leaves is looked at: by its bits, and by the reference where these are others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_routing_bench.benches.checks import Check
from moe_routing_bench.measure import leftovers
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted

JOB: Any = None  # a judge hands it on


class Timer:
    """Of six sets that all were called; what calls return is a test's."""

    name = "wall"

    def __init__(self) -> None:
        self.returned: list[Any] = [None] * 6

    def begin_turn(self) -> bool:
        return True

    def reached(self) -> list[int]:
        return list(range(6))


@pytest.fixture
def turn(monkeypatch):
    """Judge a turn that left these digests, where those of before were all 7; a comparison takes 30 ms of a turn of 400, and finds
    set 4 wrong. Returns the sets that were compared."""
    monkeypatch.setattr(leftovers.memory, "some", lambda count, of: list(range(of))[::-1][:count])

    def judged(found: list[int], harm: str | None = None) -> list[int]:
        now, compared = [0.0], []
        monkeypatch.setattr(leftovers, "perf_counter", lambda: now[0])

        def difference(job, candidate, sets, i) -> Check:
            now[0] += 0.03
            compared.append(i)
            return Check(error="3 wrong" if i == 4 else None)

        monkeypatch.setattr(leftovers, "difference", difference)
        draws = [object() for _ in range(6)]
        candidate = Candidate("a", [], timer=Timer(), digests={id(draw): 7 for draw in draws})
        sets: Any = SimpleNamespace(
            harm=lambda: harm, digests=lambda given: dict(zip(given, found, strict=True)), draw_of=lambda i: draws[i]
        )
        now[0] = 0.4
        leftovers.judge(JOB, candidate, sets, 0.0)
        return compared

    return judged


def test_bits_that_were_right_before_are_right(turn) -> None:
    assert turn([7] * 6) == []


def test_sets_that_differ_are_compared_for_a_tenth_of_the_turn(turn) -> None:
    """In an order that cannot be foreseen."""
    assert turn([8, 8, 8, 8, 7, 7]) == [3, 2] and turn([7, 8, 7, 7, 7, 8]) == [5, 1] and turn([8] + [7] * 5) == [0]


def test_one_wrong_set_is_refused(turn) -> None:
    with pytest.raises(Failure, match=r"^after a timed turn: 3 wrong$") as failure:
        turn([7, 7, 7, 7, 8, 7])
    assert failure.value.status == "incorrect"


def test_changed_inputs_are_another_fault(turn) -> None:
    """The culprit is not known yet, as the implementation whose turn it was may be right."""
    with pytest.raises(Tainted, match=r"^inputs were changed: x$"):
        turn([7, 7, 7, 7, 8, 7], "inputs were changed: x")


def test_returned_outputs_are_poisoned_too() -> None:
    """Those in memory of their own, in one piece; buffers that were given are poisoned with all others."""
    given = [{"y": torch.zeros(4)} for _ in range(6)]
    timer, poisoned = Timer(), []
    own = torch.zeros(2, 2)
    timer.returned = [{"y": given[0]["y"], "z": torch.zeros(2)}, {"y": own.flatten()}, None, None, None, None]
    sets: Any = SimpleNamespace(outputs=given, poison=lambda: poisoned.append(True), extents=lambda: [])
    leftovers.lay(Candidate("a", [], timer=timer), sets)
    assert poisoned == [True] and own.isnan().all()
    assert not given[0]["y"].isnan().any() and not timer.returned[0]["z"].isnan().any()


def test_a_tensor_that_computes_when_it_is_read_is_not_read() -> None:
    class Lazy(torch.Tensor):
        pass

    timer, given = Timer(), [{"y": torch.zeros(4)} for _ in range(6)]
    timer.returned = [{"y": torch.zeros(4).as_subclass(Lazy)}, *[None] * 5]
    sets: Any = SimpleNamespace(outputs=given, poison=lambda: None, extents=lambda: [])
    with pytest.raises(Failure, match="after a timed turn: y: Lazy, not a plain tensor"):
        leftovers.judge(JOB, Candidate("a", [], timer=timer), sets, 0.0)
