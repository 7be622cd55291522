"""What the judge makes of the time that an isolated process computes for a turn."""

from itertools import count
from types import SimpleNamespace

import pytest

from moe_routing_bench.measure import turns
from moe_routing_bench.measure.candidate import Failure
from moe_routing_bench.measure.runners import GpuQuiet, Quiet
from moe_routing_bench.measure.turns import Turn, Turns


def judged(**process) -> Turns:
    """Turns of a fake process on a CPU, without what binding it would find."""
    known = Turns.__new__(Turns)
    known._kind, known._quiet, known._process = "cpu", Quiet(), SimpleNamespace(alone=lambda: None, **process)
    return known


@pytest.mark.parametrize(
    ("threads", "computed", "refused"), [(1, 0.013, False), (1, 0.015, True), (2, 0.09, False), (2, 0.1, True)]
)
def test_threads_that_wait_until_they_are_stopped_are_no_further_threads(threads, computed, refused, monkeypatch):
    """A reply after 10 ms, and a stop 30 ms later. A single thread waits for nothing."""
    clock, spent = iter([0.0, 0.04]), iter([1.0, 1.0 + computed])
    monkeypatch.setattr(turns, "perf_counter", lambda: next(clock))
    known = judged(
        threads=threads, cpu_seconds=lambda: next(spent), ask=lambda *_: ({}, 0.01), spent=lambda said, seconds: seconds
    )
    if refused:
        with pytest.raises(Failure, match=rf"on {threads} threads"):
            known._turn("run", 1)
    else:
        assert known._turn("run", 1) == Turn(0.01, pytest.approx(computed))


@pytest.mark.parametrize(
    ("threads", "lone", "seconds", "refused"),
    [
        (1, lambda turn: 1e-3, 0, True),
        (1, lambda turn: 1e-3 if turn < 150 else 1e-4, 0, False),
        (1, lambda turn: 1e-3 if turn < 300 else 1e-4, 0, True),
        (2, lambda turn: 1e-3 if turn < 300 else 1e-4, 0, False),
        (2, lambda turn: 1e-3 if turn < 300 else 1e-4, 6, True),
        (2, lambda turn: 1e-3, 0, True),
    ],
    ids=["leaves work out", "busy host", "busier host", "threads that wait", "for long", "left out by threads"],
)
def test_few_rotations_are_compared_with_many_for_longer_where_threads_wait(
    threads, lone, seconds, refused, monkeypatch
):
    """A call of many takes 0.1 ms; a rotation alone takes ten times that, always or in the first turns. Turns of many are looked at five at a time,
    each with five of few."""
    passed, lone_turns = count(0, seconds), count()
    monkeypatch.setattr(turns, "perf_counter", lambda: next(passed))
    monkeypatch.setattr(turns, "_BESIDE", {"cpu": 10.0})
    known = judged(threads=threads, believed=lambda: None, least_handover_us=0.0)
    known._request, known._rotations, known._count = "run", 1, 10
    known._sets = SimpleNamespace(novel=lambda: None, load=lambda draw: None, base=None)
    known._right = lambda: None
    known._turn = lambda request, rotations: Turn(1e-4, 1e-4)
    known._looked_at = lambda request, rotations, pause=True: Turn(
        0, 1e-3 if request == "run" else lone(next(lone_turns))
    )
    signs = []
    if refused:
        with pytest.raises(Failure, match="in 1 rotations as among 10"):
            known.judge(lambda: signs.append(1))
    else:
        known.judge(lambda: signs.append(1))
    assert len(signs) >= min(next(lone_turns) // 25, 8), "a sign of life in every attempt"


@pytest.mark.parametrize(
    ("kind", "turns_taken", "once"),
    [
        ("cpu", [(9e-3, 1.2e-3), (5e-3, 1.1e-3)], 1100),
        ("cpu", [(80e-3, 1e-3), (160e-3, 1e-3)], 10_000),
        ("cpu", [(2e-3, 3.9e-3), (2e-3, 3.9e-3)], 2000),
        ("cuda", [(9e-3, 1.2e-3), (5e-3, 1.1e-3)], 5000),
    ],
    ids=["no core", "at rest", "two threads", "GPU"],
)
def test_a_turn_holds_as_much_on_a_busy_machine_as_on_an_idle_one(kind, turns_taken, once):
    """Seconds, and those that it computes. What rests makes turns no longer than eightfold."""
    known, turn = judged(), iter(turns_taken)
    known._kind, known._turn = kind, lambda request, rotations: Turn(*next(turn))
    assert known._once_us("rotate") == pytest.approx(once)


def test_few_rotations_are_compared_right_after_others(monkeypatch):
    """The first of five takes longer, as where others took the caches during a rest; each finds elements to be written."""
    monkeypatch.setattr(turns, "_BESIDE", {"cpu": 10.0})
    known = judged(threads=1, believed=lambda: None, least_handover_us=0.0)
    known._request, known._rotations, known._count = "run", 1, 10
    known._sets = SimpleNamespace(novel=lambda: None, load=lambda draw: None, base=None)
    known._right = lambda: None
    known._turn = lambda request, rotations: Turn(1e-4, 1e-4)
    lone = []

    def looked_at(request, rotations, pause=True):
        if request == "rotate":
            lone.append(pause)
        return Turn(0, 1e-3 if request == "run" else 4e-4 if pause else 1.5e-4)

    known._looked_at = looked_at
    known.judge(lambda: None)
    assert lone == [True, False, False, False, False] * 5


@pytest.mark.parametrize(
    ("lone_us", "novel_us", "verdict"),
    [
        (140, 100, None),
        (160, 100, "in 1 rotations as among 10 (least of 40 turns: 160 and 100 us a rotation; limit 1.7), on a host"),
        (171, 100, "work is left out"),
        (
            100,
            160,
            "on new values as on known ones (least of 40 turns: 160 and 100 us a rotation; limit 1.7), on a host",
        ),
        (160, 171, "answers are remembered"),
    ],
)
def test_what_a_busy_host_may_have_done_is_a_doubt(lone_us, novel_us, verdict, monkeypatch):
    """Up to 1.4 times as long says nothing, more than 1.7 times is refused, and the row of what is between is suspect."""
    monkeypatch.setattr(turns, "_BESIDE", {"cpu": 10.0})
    known, fresh = judged(threads=1, believed=lambda: None, least_handover_us=0.0), [False]
    known._request, known._rotations, known._count = "run", 1, 10
    known._candidate = SimpleNamespace(doubts=[])
    known._sets = SimpleNamespace(
        novel=lambda: fresh.__setitem__(0, True), load=lambda draw: fresh.__setitem__(0, False), base=None
    )
    known._right = lambda: None
    known._turn = lambda request, rotations: Turn(1e-4, (novel_us + 20) / 1e6 if fresh[0] else 1e-4)
    known._looked_at = lambda request, rotations, pause=True: Turn(
        0, 1e-3 if request == "run" else (lone_us + 20) / 1e6
    )
    if verdict and "host" not in verdict:
        with pytest.raises(Failure, match=verdict):
            known.judge(lambda: None)
    else:
        known.judge(lambda: None)
    doubts = known._candidate.doubts
    assert len(doubts) == ("host" in (verdict or "")) and all(verdict in doubt for doubt in doubts)


@pytest.mark.parametrize(("seconds", "says"), [(1e-5, ""), (2.9e-5, ""), (1e-3, "held up"), (4e-5, "held up")])
def test_a_device_at_work_is_seen_by_small_kernels_that_wait(seconds: float, says: str) -> None:
    """Three times an idle kernel's time is no sign; more is, once it adds up to 0.7 ms. The reason has the figures."""
    quiet = GpuQuiet.__new__(GpuQuiet)
    quiet._least, quiet._once = 1e-5, lambda: seconds  # type: ignore[method-assign]
    said = quiet.goes_on()
    assert bool(said) == bool(says) and says in said
    if said:
        assert f"{(seconds - 3e-5) * 1e3:.2f} ms at most" in said and "one takes 0.010 ms" in said
