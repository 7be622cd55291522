"""Under a power limit an implementation's time is that of its own steady state: long turns, in either order, on a simulated card."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.measure import outcome, provenance, sampling
from moe_routing_bench.measure.candidate import Candidate, Failure

SECONDS = Settings(turn_seconds=1.0, min_blocks=20, max_seconds=0.2)
# As seen on one H200: dense products in turns with a lighter layer took 1.71 ms, alone 1.97; the layer 4.75 and 4.48.
STEADY_US, DRAW = {"dense": 1970.0, "light": 4480.0}, {"dense": 1.0, "dense2": 1.0, "light": 0.6}


class Card:
    """A GPU whose heat follows what it does, to a thirtieth within a third of a second, and whose clock falls as it heats up."""

    counts = True  # the energy that is drawn

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limited: bool = True) -> None:
        self.now, self.heat, self.limited, self.drawn = 0.0, 0.0, limited, 0.0
        monkeypatch.setattr(sampling, "perf_counter", lambda: self.now)
        monkeypatch.setattr(sampling, "sleep", self.rest)

    def rest(self, seconds: float) -> None:
        """Nothing runs."""
        self.heat *= np.exp(-seconds / 0.1)
        self.now += seconds

    def run(self, name: str) -> float:
        """Time of a sample, µs: that of the steady state at its own heat, shorter on a cooler card, longer on a hotter one."""
        us = STEADY_US.get(name, STEADY_US["dense"]) * (1 + 0.5 * (self.heat - DRAW[name]) * self.limited)
        seconds = us * 5 / 1e6
        self.heat += (DRAW[name] - self.heat) * (1 - np.exp(-seconds / 0.1))
        self.now += seconds
        self.drawn += 700e3 * DRAW[name] * seconds
        return us

    def power_capped(self) -> bool:
        return self.limited and self.heat > 0.5

    def sm_clock_mhz(self) -> int:
        return int(1980 - 500 * self.heat)

    def power_w(self) -> float:
        return 700.0

    def energy_mj(self) -> float | None:
        return self.drawn if self.counts else None

    def slowdown_bits(self) -> int:
        return 0


def candidate(card: Card, name: str, calls: int = 1) -> Candidate:
    """One whose samples are 5 calls, though its timer may speak of one."""
    timer = SimpleNamespace(sample=lambda: card.run(name), name="wall", calls=calls, returned=[])
    timer.begin_turn, timer.reached = lambda: False, lambda: []
    return Candidate(name, [], timer=timer, samples_per_block=1)


def sampled(
    monkeypatch,
    order: tuple[str, ...],
    limited: bool = True,
    settings: Settings = SECONDS,
    calls: int = 1,
) -> dict[str, Candidate]:
    """What `sample` leaves of candidates that are shuffled into this order."""
    card = Card(monkeypatch, limited)
    alive = [candidate(card, name, calls) for name in order]
    monkeypatch.setattr(sampling, "verify", lambda *_, **__: None)
    monkeypatch.setattr(random.Random, "sample", lambda self, entries, n: list(entries))
    job = SimpleNamespace(settings=settings, hash="0")
    limited = sampling.power_limited(job, alive, card)
    sampling.sample(job, alive, None, card, lambda name, step, action: action() or True, limited)
    return {one.name: one for one in alive}


def medians(found: dict[str, Candidate]) -> dict[str, float]:
    return {name: float(np.median(one.blocks)) for name, one in found.items()}


def test_the_order_of_turns_does_not_matter(monkeypatch):
    """Each has the time that it has alone, within half a percent, whoever came before; clocks of its blocks are its own."""
    for order in itertools.permutations(STEADY_US):
        found = sampled(monkeypatch, order)
        assert medians(found) == pytest.approx(STEADY_US, rel=0.02), order
        clocks = {name: set(one.clocks) for name, one in found.items()}
        assert max(clocks["dense"]) < min(clocks["light"])
        assert {tuple(one.turns) for one in found.values()} == {tuple(np.repeat(range(6), 4))}
        assert all(
            one.fields["turns"] == "long" and "6 long turns" in one.fields["stop_reason"] for one in found.values()
        )


@pytest.mark.parametrize("limited", [True, False])
def test_the_card_has_rested_when_its_ceilings_are_measured_again(monkeypatch, limited):
    """A matrix product right after long turns would be a sustained one, and the one before the samples was not. Short turns take no longer."""
    card, rests = Card(monkeypatch, limited), []
    monkeypatch.setattr(sampling, "sleep", lambda seconds: rests.append(seconds) or card.rest(seconds))
    monkeypatch.setattr(sampling, "verify", lambda *_, **__: None)
    job, alive = SimpleNamespace(settings=SECONDS, hash="0"), [candidate(card, "dense")]
    sampling.sample(job, alive, None, card, lambda name, step, action: action() or True, limited)
    assert (card.heat < 0.1) == limited and len(rests) == limited


def test_the_energy_of_a_call_is_its_power_times_its_time(monkeypatch):
    """In company as alone: 700 W for the heavy one, over the second half of the work before each of its six turns."""
    for name, one in sampled(monkeypatch, ("light", "dense"), calls=5).items():
        known = [700 * DRAW[name] * STEADY_US[name] / 1e3] * 6
        assert one.energies == pytest.approx(known, rel=0.05) and len(set(one.energies)) > 2
        assert outcome.row(one)["energy_mj"] == pytest.approx(np.mean(one.energies))


@pytest.mark.parametrize(("limited", "counts"), [(False, True), (True, False)])
def test_no_energy_of_short_turns_nor_where_the_board_does_not_count(monkeypatch, limited, counts):
    monkeypatch.setattr(Card, "counts", counts)
    for one in sampled(monkeypatch, ("dense", "light"), limited).values():
        one.timer.name = "wall"
        assert "energy_mj" not in outcome.row(one)


@pytest.mark.parametrize("idle", [0.0, 0.25])
def test_a_share_of_long_turns_is_idle(idle, monkeypatch):
    """Before each sample, as while a spin hides a launch: a card that waits recovers from the limit. Nothing outside of blocks counts."""
    run = Card.run

    def waiting(card: Card, name: str) -> float:
        us = run(card, name)
        card.now += idle * us * 5 / 1e6
        return us

    monkeypatch.setattr(Card, "run", waiting)
    for one in sampled(monkeypatch, ("light", "dense"), calls=5).values():
        one.timer.name, one.timer.hidden, one.timer.samples = "cuda_graph", 1, 1
        assert outcome.row(one)["busy_share"] == pytest.approx(1 / (1 + idle))


def test_short_turns_would_favour_the_heavy_one(monkeypatch):
    """What long turns are for: in company each has the other's clock."""
    monkeypatch.setattr(sampling, "half_width", lambda _: 1.0)
    monkeypatch.setattr(sampling, "power_limited", lambda *_: False)
    found = sampled(monkeypatch, ("dense", "light"), settings=Settings(min_blocks=200, max_blocks=200, max_seconds=100))
    for one in found.values():
        del one.blocks[:100]  # the card was cold
    found = medians(found)
    assert found["dense"] < 0.9 * STEADY_US["dense"] and found["light"] > 1.03 * STEADY_US["light"]


def test_where_no_limit_binds_turns_are_short(monkeypatch):
    found = sampled(monkeypatch, ("dense", "light"), False)
    assert {one.fields["turns"] for one in found.values()} == {"short"}


def test_one_that_fails_in_its_turn_is_out(monkeypatch):
    """Its check, at a block that nobody foresees, is within the turn; the others go on."""
    card = Card(monkeypatch)
    alive = [candidate(card, name) for name in STEADY_US]
    failed = []

    def verify(job, one, sets):
        if one.name == "dense":
            raise Failure("incorrect", "wrong at last")

    def guarded(name, step, action):
        try:
            action()
        except Failure as failure:
            failed.append((name, step, failure.reason))
            return False
        return True

    monkeypatch.setattr(sampling, "verify", verify)
    sampling.sample(SimpleNamespace(settings=SECONDS, hash="0"), alive, None, card, guarded, True)
    assert failed == [("dense", "sampling", "wrong at last")] and [one.name for one in alive] == ["light"]
    assert len(alive[0].blocks) == 24


def test_what_a_long_turn_holds(monkeypatch):
    """Untimed work before it counts, twice as much as asked over all turns, blocks of at least 100 ms, or 25 ms of what the limit does not
    reach, one check in one of the six turns and half as much work after it; every second turn in the opposite order of the one before; the
    orders depend on the job alone, and differ; the first turn of all begins with a card that is warm."""
    orders = []
    for _ in range(2):
        card, turns, busy, checked = Card(monkeypatch), [], [], []
        alive = [candidate(card, name) for name in ("dense", "light", "dense2")]
        keep, needs = sampling._kept_busy, {"dense": 100_000, "dense2": 100_000, "light": 25_000}
        monkeypatch.setattr(card, "power_capped", lambda card=card: card.heat > 0.9)

        def kept_busy(one, seconds, *found, keep=keep, turns=turns, busy=busy):
            busy.append((one.name, seconds))
            turns += [one.name] if found and True not in found else []
            return keep(one, seconds, *found)

        monkeypatch.setattr(sampling, "_kept_busy", kept_busy)
        monkeypatch.setattr(sampling, "verify", lambda *given, checked=checked: checked.append(given))
        job, sets = SimpleNamespace(settings=SECONDS, hash="a hash"), object()
        assert sampling.power_limited(job, alive, card)
        sampling.sample(job, alive, sets, card, lambda name, step, action: action() or True, True)
        monkeypatch.setattr(sampling, "_kept_busy", keep)
        passes = [turns[i : i + 3] for i in range(0, 18, 3)]
        assert all(passes[i + 1] == passes[i][::-1] for i in (0, 2, 4)) and len({tuple(order) for order in passes}) > 2
        assert {tuple(sorted(order)) for order in passes} == {("dense", "dense2", "light")} and len(turns) == 18
        assert sorted(one.name for _, one, _ in checked) == sorted(passes[0]) and all(
            given[::2] == (job, sets) for given in checked
        )
        assert busy[0][1] == 1.0 and busy[1] == (turns[0], 1.0) and {seconds for _, seconds in busy[2:]} == {1 / 6}
        assert {name: [one for one, _ in busy[2:]].count(name) for name in needs} == dict.fromkeys(needs, 13)
        assert all(sum(block) >= needs[one.name] > sum(block[:-1]) for one in alive for block in one.blocks)
        orders.append(turns)
    assert orders[0] == orders[1]


def test_twins_have_turns_of_their_own(monkeypatch):
    card = Card(monkeypatch)
    one = candidate(card, "dense")
    one.twin = candidate(card, "dense")
    monkeypatch.setattr(sampling, "verify", lambda *_, **__: None)
    sampling.sample(
        SimpleNamespace(settings=SECONDS, hash="0"), [one], None, card, lambda n, s, action: action() or True, True
    )
    rows = {"dense": {}}
    outcome.twins([one], rows)
    assert len(one.twin.blocks) == 24 and rows["dense"]["twin_speedup"] == pytest.approx(1, rel=0.01)


def test_what_nvml_says_of_the_clock():
    """The power limit is no slowdown of the hardware, and the other way round."""
    gpu = object.__new__(provenance.Gpu)
    for bits, capped, slow in (
        (0x4, True, 0),
        (0x1, False, 0),
        (0x40, False, 0x40),
        (0x1 | 0x4 | 0x8, True, 0x8),
        (None, False, 0),
    ):
        gpu._ask = lambda name, bits=bits: bits
        assert (gpu.power_capped(), gpu.slowdown_bits()) == (capped, slow)


def test_the_driver_is_asked_rarely_and_not_last(monkeypatch):
    """A query takes time, in which the card may rest from the limit: twenty of a second's work at most, none before what counts."""
    card, asked = Card(monkeypatch), []
    seen, samples = sampling._kept_busy(candidate(card, "dense"), 1.0, lambda: asked.append(card.now) or True)
    assert seen and samples == pytest.approx(1 / 5 / 1.97e-3, rel=0.1)
    assert 5 <= len(asked) <= 20 and max(asked) < 1.0 - 0.05 and min(np.diff(asked)) >= 0.05


@pytest.mark.parametrize(("asked", "untimed"), [(1.0, 1 / 3), (3.0, 1.0), (0.3, 0.3), (0.4, 0.3), (0.01, 0.01)])
def test_untimed_work_of_a_turn(asked, untimed):
    """All turns together have twice what is asked, unless a turn were too short for the card to settle."""
    assert sampling._untimed_seconds(Settings(turn_seconds=asked)) == pytest.approx(untimed)
