"""What a turn leaves is looked at: by its bits, and by the reference where these are others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_routing_bench.benches.checks import Check
from moe_routing_bench.measure import leftovers, memory
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted
from moe_routing_bench.measure.inputs import Sets

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
    """The cause is not known yet: the implementation whose turn it was may be right."""
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


class Large(Sets):
    """Six sets of an output of 4 KiB, which counts as large; the right answer of a set is its number."""

    def __init__(self) -> None:
        self._outputs = {"y": memory.Guarded(torch.zeros(1024), 6)}
        self._key, self.outputs = 5, [{"y": tensor} for tensor in self._outputs["y"].tensors]
        self._loaded: Any = [object() for _ in range(6)]
        self._inputs = self._shared = {}

    def write(self, i: int, last: int = 1024) -> None:
        self.outputs[i]["y"][:last] = float(i)


@pytest.fixture
def large(monkeypatch):
    """A candidate whose sets are right, and whose next turns are looked at in part; the sets that are compared with the reference."""
    monkeypatch.setattr(leftovers, "_SMALL", {"cpu": 0})
    monkeypatch.setattr(leftovers.secrets, "randbelow", lambda below: 1)
    compared, sets = [], Large()
    monkeypatch.setattr(leftovers, "difference", lambda job, candidate, sets, i: compared.append(i) or Check())
    for i in range(6):
        sets.write(i)
    candidate = Candidate("a", [], timer=Timer(), whole_turn=0, turns_laid=1)
    candidate.digests = {id(sets.draw_of(i)): digest for i, digest in sets.digests(dict.fromkeys(range(6))).items()}
    candidate.timer.calls = 6
    return candidate, sets, compared


def test_a_turn_of_large_outputs_leaves_places_that_cannot_be_foreseen(large) -> None:
    candidate, sets, compared = large
    state, places = torch.get_rng_state(), []
    for _ in range(2):
        leftovers.lay(candidate, sets)
        lost = [set(tensor["y"].isnan().nonzero().flatten().tolist()) for tensor in sets.outputs]
        assert 100 < len(lost[0]) <= leftovers._SCARS and len(lost[0] & lost[1]) < 150, "others in every set"
        places.append(lost[0])
        for i in range(6):
            sets.write(i)
        leftovers.judge(JOB, candidate, sets, 0.0)
    assert len(places[0] & places[1]) < 150 and compared == [], "all were written"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("last", [0, 900])
def test_a_set_that_a_turn_has_not_written_in_whole_is_compared(large, last: int) -> None:
    candidate, sets, compared = large
    leftovers.lay(candidate, sets)
    for i in range(6):
        sets.write(i, last if i == 4 else 1024)
    leftovers.judge(JOB, candidate, sets, 0.0)
    assert compared == [4]


def test_zeros_are_found_where_all_places_were_written(large, monkeypatch) -> None:
    """By the bits of some sets, which cannot be foreseen: here of all."""
    candidate, sets, compared = large
    monkeypatch.setattr(leftovers, "_compared", lambda candidate, sets: 5)
    leftovers.lay(candidate, sets)
    monkeypatch.setattr(leftovers.memory, "some", lambda count, of: list(range(of))[:count])
    sets._outputs["y"].whole[:, 512:-512] = 0
    leftovers.judge(JOB, candidate, sets, 0.0)
    assert compared and set(compared) <= {1, 2, 3, 4}, "zeros are the answer of set 0"


def test_returned_memory_is_looked_at_where_it_was_not_written(large) -> None:
    candidate, sets, compared = large
    candidate.timer.returned = [{"y": torch.full((1024,), float(i))} for i in range(6)]
    leftovers.lay(candidate, sets)
    assert all(returned["y"].isnan().any() for returned in candidate.timer.returned)
    for i in (0, 1, 2, 4, 5):
        candidate.timer.returned[i]["y"].fill_(float(i))
    leftovers.judge(JOB, candidate, sets, 0.0)
    assert compared == [3], "and the buffers that no call writes are left out"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_of_the_first_turns_is_looked_at_in_whole(large, number: int) -> None:
    candidate, sets, _ = large
    candidate.whole_turn, candidate.turns_laid = number, 0
    whole = []
    for _ in range(4):
        leftovers.lay(candidate, sets)
        whole.append(candidate.laid is None and bool(sets.outputs[0]["y"].isnan().all()))
    assert whole == [i == number for i in range(4)] and 0 <= Candidate("b", []).whole_turn < 3


def test_small_outputs_are_always_looked_at_in_whole(large, monkeypatch) -> None:
    candidate, sets, _ = large
    monkeypatch.setattr(leftovers, "_SMALL", {"cpu": 6 * 4096})
    leftovers.lay(candidate, sets)
    assert candidate.laid is None and all(tensor["y"].isnan().all() for tensor in sets.outputs)
