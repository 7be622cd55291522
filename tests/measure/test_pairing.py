"""Speed-ups pair the blocks of one round, whichever blocks are set aside."""

import pytest

pytest.importorskip("torch")
from moe_routing_bench.measure import outcome
from moe_routing_bench.measure.candidate import Candidate
from moe_routing_bench.measure.host_timer import HostTimer


def test_set_aside_blocks_do_not_shift_the_pairs() -> None:
    """A machine that slows down round by round, one implementation twice as fast: the ratio is 2 in every round."""
    rounds = [100.0 * 1.1**i for i in range(12)]
    timer = HostTimer([lambda: None], 1)
    base = Candidate("base", [], timer=timer, blocks=[[t] * 3 for t in rounds], clocks=[1980] * 12, slow=[0] * 12)
    fast = Candidate("fast", [], timer=timer, blocks=[[t / 2] * 3 for t in rounds], clocks=[1980] * 12, slow=[0] * 12)
    base.slow[0] = base.slow[5] = 1  # two blocks with a slowdown bit
    base.clocks[7] = 1400  # the power limit, not the hardware: it counts
    fast.slow[9], fast.blocks[9] = 1, [1e6] * 3
    rows = {one.name: outcome.row(one) for one in (base, fast)}
    outcome.speedups([base, fast], rows, "base")
    assert rows["base"]["set_aside"] == 6 and rows["fast"]["set_aside"] == 3
    assert rows["fast"]["speedup_ci_low"] == pytest.approx(2) and rows["fast"]["speedup_ci_high"] == pytest.approx(2)
    assert rows["base"]["speedup"] == 1 and rows["base"]["best_other"] == "fast"
    assert rows["base"]["baseline"] == rows["fast"]["baseline"] == "base"
    assert rows["fast"]["best_speedup"] == pytest.approx(2) and rows["base"]["best_speedup"] == pytest.approx(0.5)


@pytest.mark.parametrize("of_twins", [False, True])
def test_a_pair_counts_where_both_of_its_blocks_do(of_twins: bool) -> None:
    """Of twelve rounds, five have a slow block of the one and four others of the other; in the three that are left the ratio is 2."""
    timer = HostTimer([lambda: None], 1)
    base = Candidate("base", [], timer=timer, blocks=[[200.0]] * 12, clocks=[None] * 12, slow=[0] * 12)
    fast = Candidate("fast", [], timer=timer, blocks=[[100.0]] * 12, clocks=[None] * 12, slow=[0] * 12)
    for one, rounds in ((base, range(5)), (fast, range(5, 9))):
        for i in rounds:
            one.slow[i], one.blocks[i] = 8, [1000.0]
    if of_twins:
        base.twin = fast
        rows = {"base": {}}
        outcome.twins([base], rows)
        assert (rows["base"]["twin_speedup"], rows["base"]["twin_median_us"]) == (pytest.approx(2), 100.0)
        return
    rows = {one.name: outcome.row(one) for one in (base, fast)}
    outcome.speedups([base, fast], rows, "base")
    assert rows["fast"]["speedup"] == pytest.approx(2) and rows["base"]["best_speedup"] == pytest.approx(0.5)
    assert [rows[name]["set_aside_samples_us"] for name in ("base", "fast")] == [[1000.0] * 5, [1000.0] * 4]
    assert rows["base"]["set_aside_reason"] == "a hardware slowdown bit" and rows["base"]["samples"] == 7
    fast.slow = [8] * 12  # then no block is better than another
    rows = {one.name: outcome.row(one) for one in (base, fast)}
    assert rows["fast"]["samples"] == 12 and rows["fast"]["set_aside_reason"] is None
    outcome.speedups([base, fast], rows, "base")
    assert rows["fast"]["speedup"] == pytest.approx(0.2), "of the seven rounds in which base counts, four are of 0.2"


def test_what_chose_to_be_another_one_is_nobodys_best_other() -> None:
    """`auto` is `ours` here, a little faster by chance: it is compared with `loop` alone, and so is `ours`. Where `ours` is not measured,
    `auto` is what others are compared with."""
    timer = HostTimer([lambda: None], 1)

    def call() -> None: ...

    call.chosen = "ours"  # type: ignore[attr-defined]
    alive = [
        Candidate(name, calls, timer=timer, blocks=[[time] * 3] * 12, clocks=[None] * 12, slow=[0] * 12)
        for name, calls, time in (("loop", [], 300.0), ("ours", [], 10.0), ("auto", [call], 9.9))
    ]
    for ones, expected in ((alive, ["ours", "loop", "loop"]), (alive[::2], ["auto", "loop"])):
        rows = {one.name: outcome.row(one) for one in ones}
        outcome.speedups(ones, rows, "loop")
        assert [rows[one.name]["best_other"] for one in ones] == expected


def test_the_best_other_is_not_the_baseline_where_something_is_faster() -> None:
    """A speed-up of 30 over a weak baseline, and of 1.5 over the best alternative."""
    timer = HostTimer([lambda: None], 1)
    alive = [
        Candidate(name, [], timer=timer, blocks=[[time] * 3] * 12, clocks=[None] * 12, slow=[0] * 12)
        for name, time in (("loop", 300.0), ("compiled", 15.0), ("ours", 10.0))
    ]
    rows = {one.name: outcome.row(one) for one in alive}
    outcome.speedups(alive, rows, "loop")
    assert rows["ours"]["speedup"] == pytest.approx(30) and rows["ours"]["best_speedup"] == pytest.approx(1.5)
    assert [rows[name]["best_other"] for name in ("loop", "compiled", "ours")] == ["ours", "ours", "compiled"]
