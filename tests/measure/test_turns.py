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
    known._computed = known._passed = 0.0
    known._request, known._rotations, known._count, known.sets = "rotate", {"rotate": 1, "run": 1}, 1, 4
    return known


class Four(SimpleNamespace):
    """Four sets."""

    base = None

    def __len__(self) -> int:
        return 4

    def poison(self) -> None:
        """Nothing is looked at."""


def compared(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Turns of ten rotations of 0.1 ms on a GPU, which few are compared with; without sets."""
    monkeypatch.setattr(turns, "_OVERHEAD_SHARE", 1e3)
    monkeypatch.setattr(turns, "_LAUNCH_US", 0.0)
    known = judged(threads=1, believed=lambda: None, least_handover_us=0.0)
    known._kind, known._request, known._count = "cuda", "run", 10
    known._sets = Four(novel=lambda: None, load=lambda draw: None)
    known._right = lambda left: None
    known._turn = lambda request, rotations: Turn(1e-4, 0)
    return known


@pytest.mark.parametrize(
    ("threads", "computed", "refused"), [(1, 0.013, False), (1, 0.015, True), (2, 0.09, False), (2, 0.1, True)]
)
def test_threads_that_wait_until_they_are_stopped_are_no_further_threads(threads, computed, refused, monkeypatch):
    """A reply after 10 ms, and a stop 30 ms later. A single thread waits for nothing."""
    clock, spent = iter([0.0, 0.04]), iter([1.0, 1.0 + computed])
    monkeypatch.setattr(turns, "perf_counter", lambda: next(clock))
    known = judged(
        threads=threads,
        cpu_seconds=lambda: next(spent),
        ask=lambda *_: ({}, 0.01),
        spent=lambda said, seconds, calls: seconds,
    )
    if refused:
        with pytest.raises(Failure, match=rf"on {threads} threads"):
            known._turn("run", 1)
    else:
        assert known._turn("run", 1) == Turn(0.01, pytest.approx(computed))


def test_a_turn_has_as_many_calls_as_sets_take_part_in_its_rotations() -> None:
    """Those of a graph are several. Fewer sets, fewer calls."""
    calls = []
    known = judged(
        threads=1,
        cpu_seconds=lambda: 0.0,
        ask=lambda *_: ({}, 0.01),
        spent=lambda said, seconds, count: calls.append(count) or seconds,
    )
    known._sets, known._rotations = Four(), {"rotate": 1, "run": 5}
    for sets in (4, 2):
        known._limit(sets)
        known._turn("rotate", 3)
        known._turn("run", 2)
    assert calls == [12, 40, 6, 20]


@pytest.mark.parametrize(
    ("lone", "refused"),
    [
        (lambda turn: 1e-3, True),
        (lambda turn: 1e-3 if turn < 150 else 1e-4, False),
        (lambda turn: 1e-3 if turn < 300 else 1e-4, True),
    ],
    ids=["leaves work out", "busy host", "busier host"],
)
def test_few_rotations_are_compared_with_many_eight_times(lone, refused, monkeypatch):
    """A call of many takes 0.1 ms; a rotation alone takes ten times that, always or in the first turns. Turns of many are looked at five at a time,
    each with five of few."""
    known, lone_turns, signs = compared(monkeypatch), count(), []
    known._looked_at = lambda request, rotations, pause=True: Turn(
        1e-3 if request == "run" else lone(next(lone_turns)), 0
    )
    if refused:
        with pytest.raises(Failure, match="in 1 rotations as among 10"):
            known.judge(lambda: signs.append(1))
    else:
        known.judge(lambda: signs.append(1))
    assert len(signs) == next(lone_turns) // 25 == (8 if refused else 7), "a sign of life in every attempt"


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
    known, lone = compared(monkeypatch), []

    def looked_at(request, rotations, pause=True):
        if request == "rotate":
            lone.append(pause)
        return Turn(1e-3 if request == "run" else 4e-4 if pause else 1.2e-4, 0)

    known._looked_at = looked_at
    known.judge(lambda: None)
    assert lone == [True, False, False, False, False] * 5


@pytest.mark.parametrize(
    ("lone_us", "novel_us", "verdict"),
    [
        (129, 100, None),
        (131, 100, "in 1 rotations as among 10 .*131, and 100 us a rotation; limit 1.3.: work is left out"),
        (100, 129, None),
        (120, 131, "on new values as on known ones .*131, and 100 us.*: answers are remembered"),
    ],
)
def test_work_that_is_left_out_and_answers_that_are_remembered_take_longer(lone_us, novel_us, verdict, monkeypatch):
    known, fresh = compared(monkeypatch), [False]
    known._sets = Four(novel=lambda: fresh.__setitem__(0, True), load=lambda draw: fresh.__setitem__(0, False))
    known._turn = lambda request, rotations: Turn(novel_us / 1e6 if fresh[0] else 1e-4, 0)
    known._looked_at = lambda request, rotations, pause=True: Turn(1e-3 if request == "run" else lone_us / 1e6, 0)
    if verdict:
        with pytest.raises(Failure, match=verdict):
            known.judge(lambda: None)
    else:
        known.judge(lambda: None)


@pytest.mark.parametrize(("lucky", "refused"), [(0, False), (2, False), (3, True)])
def test_a_few_short_turns_are_luck_and_no_remembered_answers(lucky: int, refused: bool, monkeypatch) -> None:
    """Seen where the host decides how long calls take: of 8 rotations of 50 ms on known values the shortest took 44 ms, on new ones 57."""
    known, fresh, seen = compared(monkeypatch), [False], count()
    known._sets = Four(novel=lambda: fresh.__setitem__(0, True), load=lambda draw: fresh.__setitem__(0, False))

    def turn(request, rotations):
        if fresh[0]:
            return Turn(57e-3, 0)
        number = next(seen) - 1  # the first chooses how many rotations are few
        return Turn(40e-3 if 0 <= number < lucky else 57e-3, 0)

    known._turn = turn
    known._looked_at = lambda request, rotations, pause=True: Turn(57e-2 if request == "run" else 57e-3, 0)
    if refused:
        with pytest.raises(Failure, match="answers are remembered"):
            known.judge(lambda: None)
    else:
        known.judge(lambda: None)


@pytest.mark.parametrize(
    ("first_us", "later_us", "sets", "refused"),
    [(100, 100, 40, False), (10_000, 10_000, 5, False), (10_000, 3000, 5, False), (10_000, 2000, 5, True)],
)
def test_calls_that_are_slow_while_sets_are_chosen_do_not_stay_in_a_cache(
    first_us, later_us, sets, refused, monkeypatch
) -> None:
    """The judge chooses by its own clock, of calls that are launched one by one: as many sets as take 50 ms, at least 3. Faster later is no way to few."""
    monkeypatch.setattr(turns, "bench_of", lambda job: SimpleNamespace(definition=lambda: None))
    limits, us = [], [first_us]

    def ask(request, number):
        if request == "limit":
            limits.append(number)
        return {}, us[0] * limits[-1] * number / 1e6

    process = SimpleNamespace(
        device="cuda",
        bind=lambda of: {"sets": 40, "rotations": 1, "warmup_calls": 3, "launched": True},
        alone=lambda: None,
        believed=lambda: None,
        ask=ask,
        spent=lambda reply, seconds, calls: seconds,
        cpu_seconds=lambda: 0.0,
        threads=1,
        overhead_us=0.0,
        least_handover_us=0.0,
    )
    known_sets = type("Forty", (), {"poison": lambda self: None, "__len__": lambda self: 40})()
    known_sets.novel = known_sets.load = lambda *_: None
    known_sets.base = None
    job = SimpleNamespace(settings=SimpleNamespace(interval_us=200))
    known = Turns(job, None, known_sets, process, Quiet())  # type: ignore[arg-type]
    assert limits == [3, sets] and known.sets == sets and known.calls >= 3
    us[0] = later_us
    known._looked_at = lambda request, number, pause=True: Turn(us[0] * sets * number / 1e6, 0)
    known._right = lambda left: None
    monkeypatch.setattr(turns, "_LAUNCH_US", 0.0)
    if refused:
        with pytest.raises(Failure, match=r"5\.0 times as long"):
            known.judge(lambda: None)
    else:
        known.judge(lambda: None)


class Told:
    """Sets of a cell that tell what was asked of them, in order; `left` still hold poison after a turn."""

    base = "base"

    def __init__(self, left: list[int]) -> None:
        self.told, self.left = list[str](), left

    def novel(self) -> None:
        self.told.append("novel")

    def places(self) -> dict:
        return {}

    def scar(self, places: dict) -> None:
        self.told.append("scar")

    def scarred(self, places: dict, ran: range) -> list[int]:
        assert list(ran) == [0, 1, 2, 3], "all sets of a turn"
        return self.left

    def load(self, draw: str) -> None:
        self.told.append(draw)


@pytest.mark.parametrize("left", [[], [2]])
def test_a_turn_of_a_cpu_is_of_values_that_no_call_has_seen(left: list[int], monkeypatch) -> None:
    """In every sample, and those that are timed are loaded again, also where the call is wrong. Sets with poison left are compared in any case."""
    known, looks = judged(threads=1), []
    known._sets = Told(left)
    monkeypatch.setattr(turns.secrets, "randbelow", lambda count: 1)
    known.calls, known._right = 4, looks.append
    known._turn = lambda request, rotations: known._sets.told.append("turn") or Turn(4e-6, 0)
    assert known.sample() == pytest.approx(1)
    assert known._sets.told == ["novel", "scar", "turn", "base"]
    assert looks == [left] * bool(left)

    def fails(request, rotations):
        raise Failure("crashed", "in a turn")

    known._turn = fails
    with pytest.raises(Failure, match="in a turn"):
        known.sample()
    assert known._sets.told[-1] == "base"


@pytest.mark.parametrize(("turn_ms", "looked"), [(1, 10), (60, 2)])
def test_outputs_of_a_cpu_are_compared_in_turns_of_the_judge(turn_ms: float, looked: int) -> None:
    """All of ten turns, or of two long ones; where a sample is looked at now and then."""
    known, looks = judged(threads=1, believed=lambda: None), []
    known._sets, known._right = Told([]), looks.append
    known._turn = lambda request, rotations: Turn(turn_ms / 1e3, 0)
    known.judge(lambda: None)
    assert len(looks) == looked


@pytest.mark.parametrize(("threads", "each", "refused"), [(1, 1.04, False), (1, 1.15, True), (2, 1.15, False)])
def test_a_second_core_is_seen_in_all_turns_together(threads: int, each: float, refused: bool, monkeypatch) -> None:
    """Turns of 5 ms in which a call computes for 0.75 ms more than it takes: less than a single turn can tell."""
    computed, clock = count(0, each * 5e-3), count(0, 5e-3)
    spent = iter(value for pair in zip(computed, count(each * 5e-3, each * 5e-3), strict=False) for value in pair)
    monkeypatch.setattr(turns, "perf_counter", lambda: next(clock))
    known = judged(
        threads=threads,
        believed=lambda: None,
        cpu_seconds=lambda: next(spent),
        ask=lambda *_: ({}, 5e-3),
        spent=lambda said, seconds, calls: seconds,
    )
    known._sets, known._right = Told([]), lambda left: None
    if refused:
        with pytest.raises(Failure, match=r"it computed for 1.15 times as long as the calls took, on 1 threads"):
            known.judge(lambda: None)
    else:
        known.judge(lambda: None)


@pytest.mark.parametrize(
    ("device", "reply", "said"),
    [
        ("cpu", {"sets": 3}, "sets 3, not 4 to 4"),
        ("cpu", {"rotations": 2}, "rotations 2, not 1 to 1"),
        ("cuda", {"sets": 5}, "sets 5, not 4 to 4"),
        ("cuda", {"sets": 3}, "sets 3, not 4 to 4"),  # they would lie in a cache
        ("cuda", {"rotations": True}, "rotations True"),
    ],
)
def test_what_a_process_says_of_its_turns_is_held_against_what_is_known(device: str, reply: dict, said: str) -> None:
    """On a CPU a turn is one rotation of all sets, so a process has nothing to say of it."""
    process = SimpleNamespace(
        device=device, bind=lambda sets: {"sets": 4, "rotations": 1, "warmup_calls": 3} | reply, alone=lambda: None
    )
    with pytest.raises(Failure, match=said):
        Turns(None, None, Four(), process, Quiet())  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "says"), [(1e-5, ""), (2.9e-5, ""), (1e-3, "held up"), (4e-5, "held up")])
def test_a_device_at_work_is_seen_by_small_kernels_that_wait(seconds: float, says: str) -> None:
    """Three times an idle kernel's time is no sign; more is, once it adds up to 0.7 ms. The reason has the figures."""
    quiet = GpuQuiet.__new__(GpuQuiet)
    quiet._least, quiet._once = 1e-5, lambda: seconds  # type: ignore[method-assign]
    said = quiet.goes_on()
    assert bool(said) == bool(says) and says in said
    if said:
        assert f"{(seconds - 3e-5) * 1e3:.2f} ms at most" in said and "one takes 0.010 ms" in said


@pytest.mark.parametrize(
    ("looks", "status"),
    [([1, 1, 1, 0, 0, 0], "incorrect"), ([1, 1, 1, 1], "timeout"), ([1, 1, 1, 0, 0, 1], "timeout"), ([1, 1, 0], None)],
)
def test_a_call_is_not_to_blame_for_work_that_goes_on_without_it(looks: list[int], status: str | None) -> None:
    """Seen next to training on another GPU of the host: small kernels were held up, for honest calls as well."""
    ended: list[int] = []
    known = judged(
        threads=1, cpu_seconds=lambda: 0.0, ask=lambda *_: ({}, 1e-3), spent=lambda reply, seconds, calls: seconds
    )
    known._kind, known._process.end, seen = "cuda", lambda: ended.append(len(looks)), iter(looks)
    known._quiet = SimpleNamespace(before=lambda: None, goes_on=lambda: "held up" * next(seen))
    if status is None:
        assert known._turn("rotate", 1).seconds == 1e-3 and not ended
        return
    with pytest.raises(Failure, match="held up") as failed:
        known._turn("rotate", 1)
    assert failed.value.status == status and ended and next(seen, None) is None
