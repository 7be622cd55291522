"""Speed-ups pair the blocks of one round, whichever blocks are set aside."""

import pytest

pytest.importorskip("torch")
from moe_routing_bench.measure import outcome
from moe_routing_bench.measure.candidate import Candidate


def test_set_aside_blocks_do_not_shift_the_pairs() -> None:
    """A machine that slows down round by round, one implementation twice as fast: the ratio is 2 in every round."""
    rounds = [100.0 * 1.1**i for i in range(12)]
    base = Candidate("base", [], blocks=[[t] * 3 for t in rounds], clocks=[1980] * 12, slow=[0] * 12)
    fast = Candidate("fast", [], blocks=[[t / 2] * 3 for t in rounds], clocks=[1980] * 12, slow=[0] * 12)
    base.slow[0] = base.clocks[5] = 1  # one block with a slowdown bit, one at a low clock
    rows = {one.name: outcome.row(one, 1) for one in (base, fast)}
    outcome.speedups([base, fast], rows, "base", 1)
    assert rows["base"]["set_aside"] == 6 and rows["fast"]["set_aside"] == 0
    assert rows["fast"]["speedup_ci_low"] == pytest.approx(2) and rows["fast"]["speedup_ci_high"] == pytest.approx(2)
    assert rows["base"]["speedup"] == 1
