"""Intervals anew from stored blocks: those of long turns are wider, those of slow noise know of it, ratios and medians stay."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from moe_routing_bench import intervals
from moe_routing_bench.comparison import ratios, recomputed
from moe_routing_bench.store.records import SCHEMA

BLOCKS = {
    "torch": [20.0, 20.2, 20.1, 20.3, 21.0, 21.2, 21.1, 21.3],
    "cute": [10.0, 10.1, 10.0, 10.1, 10.8, 10.9, 10.8, 10.9],
}


def row(name: str, turns: str = "long", **values: object) -> dict[str, Any]:
    found = {"cell_hash": "c", "gpu_uuid": "g", "implementation": name, "status": "ok", "set_aside": 0, "turns": turns}
    known = {
        "baseline": "torch",
        "best_other": "cute" if name == "torch" else "torch",
        "speedup": 2.0,
        "best_speedup": 2.0,
    }
    old = {"ci_low_us": 1.0, "ci_high_us": 1.0, "speedup_ci_low": 1.0, "speedup_p": 0.5, "best_speedup_ci_high": 1.0}
    return (
        found | known | old | {"median_us": float(np.median(BLOCKS[name])), "block_medians_us": BLOCKS[name]} | values
    )


def anew(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return recomputed.with_intervals(pa.Table.from_pylist(list(rows), SCHEMA)).to_pylist()


@pytest.mark.parametrize("turns", ["long", "short"])
def test_intervals_are_those_of_today(turns: str) -> None:
    torch, cute = anew(row("torch", turns), row("cute", turns))
    known = [0] * 4 + [1] * 4 if turns == "long" else None
    assert (cute["ci_low_us"], cute["ci_high_us"]) == intervals.time_interval(BLOCKS["cute"], known)
    _, low, high, p = intervals.paired_ratio(BLOCKS["torch"], BLOCKS["cute"], known)
    assert low and high
    expected = (min(low, 2.0), max(high, 2.0), p)
    for ratio in ("speedup", "best_speedup"):
        assert tuple(cute[f"{ratio}{end}"] for end in ("_ci_low", "_ci_high", "_p")) == pytest.approx(expected)
    assert cute["speedup"] == torch["speedup"] == 2.0 and cute["median_us"] == np.median(BLOCKS["cute"])


def test_rows_without_a_time_or_a_partner_keep_what_they_have() -> None:
    failed, alone = anew(row("torch", status="incorrect"), row("cute"))
    assert failed["ci_low_us"] == 1.0 and alone["ci_low_us"] != 1.0
    assert (alone["speedup_ci_low"], alone["speedup_p"]) == (1.0, 0.5)
    aside = anew(row("torch", set_aside=3), row("cute"))[1]
    assert (aside["speedup_ci_low"], aside["speedup_p"]) == (1.0, 0.5), "which rounds they shared is not known"
    (few,) = anew(row("cute", block_medians_us=[10.0, 10.1]))
    assert few["ci_low_us"] is None and few["no_interval"] == "time: 2 turns are too few"
    (few,) = anew(row("cute", "short", block_medians_us=[10.0, 10.1]))
    assert few["no_interval"] == "time: 2 blocks are too few"
    (wide,) = anew(row("cute", "short", block_medians_us=[1.0, 100.0, 10.0]))
    assert wide["no_interval"] == "time: 3 blocks differ too much to tell"


def test_rows_of_a_run_with_slow_noise_get_wider_intervals_or_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 cells: intervals of short turns know of the slow state, and a row that is too short, or that becomes wide, has not converged; those
    of long turns stay."""
    generator = np.random.default_rng(0)

    def times(long: bool, blocks: int) -> list[float]:
        state = np.cumsum(generator.normal(size=blocks // 4 if long else blocks))
        return (10 * np.exp(0.01 * (np.repeat(state, 4) if long else state))).tolist()

    def rows(turns: str, blocks: int) -> list[dict[str, Any]]:
        found = []
        for i in range(30):
            known = {"torch": times(turns == "long", blocks), "cute": times(turns == "long", blocks)}
            found += [
                row(name, turns, cell_hash=str(i), bench="pack", block_medians_us=known[name], converged=True)
                | {"median_us": float(np.median(known[name])), "ci_low_us": 9.99, "ci_high_us": 10.01}
                | {"block_turns": [j // 4 for j in range(blocks)] if turns == "long" else None}
                for name in known
            ]
        return found

    whole, short, long = rows("short", 24), rows("short", 12), rows("long", 24)
    for given in (whole, short, long):
        found = anew(*given)
        assert not any(one["converged"] for one in found)
        if given is whole:
            alone = intervals.time_interval(found[0]["block_medians_us"])
            assert (found[0]["ci_low_us"], found[0]["ci_high_us"]) != pytest.approx(alone, rel=1e-9)
            assert not any(one["no_interval"] for one in found)
            continue
        for one in found:
            assert [one[name] for name in ("ci_low_us", "ci_high_us", "speedup_ci_low", "best_speedup_p")] == [None] * 4
            number = "6 turns" if given is long else "12 blocks"
            assert all(f"{name}: {number}" in one["no_interval"] for name in ("time", "speedup", "best_speedup"))
            assert math.isnan(ratios.speed(found[0], found[1]).low)
    few = anew(*whole[:10])
    assert all(one["converged"] for one in few), "ten rows show nothing"
    monkeypatch.setattr(recomputed.slow_noise, "hides", lambda known, count: False)
    wide = [one | {"ci_low_us": 1.0, "ci_high_us": 99.0} for one in whole]
    assert all(one["converged"] for one in anew(*wide))
    assert not any(one["converged"] for one in anew(*(one | {"converged": False} for one in wide))), (
        "it stays unconverged"
    )


def test_rows_all_at_once_have_the_intervals_of_each() -> None:
    """Of few, many, equal and correlated blocks, of intervals that say nothing, and of times that are none."""
    generator = np.random.default_rng(4)
    rows = [[], [1.0, 2.0, 0.0], [1.0, math.nan, 2.0, 3.0], [1.0, math.inf, 3.0, 4.0], [1e-300, 1e300, 1.0], [2.0] * 9]
    for count in (1, 2, 3, 4, 8, 11, 20, 20, 40, 150):
        for spread in (0.0, 1e-9, 0.01, 1.0, 4.0):
            noise = generator.normal(size=(4, count)) * spread
            rows += np.exp(noise).tolist() + (10 * np.exp(np.cumsum(noise, axis=1) / 3)).round(2).tolist()
    pairs = [(a, b) for a, b in zip(rows, [*rows[1:], rows[0]], strict=True) if len(a) == len(b) > 0]
    with np.errstate(all="ignore"):
        expected = [intervals.time_interval(row) for row in rows if row]
        found = intervals.time_intervals([row for row in rows if row])
        assert repr(found) == repr(expected) and None in found, "bit by bit; NaN is not equal to itself"
        of_pairs = intervals.paired_ratios(pairs)
        assert repr(of_pairs) == repr([intervals.paired_ratio(*pair) for pair in pairs])
    assert {ratio[1] is None for ratio in of_pairs} == {True, False}
    assert intervals.time_intervals([]) == intervals.paired_ratios([]) == []
