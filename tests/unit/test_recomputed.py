"""Intervals anew from stored blocks: those of long turns are wider, those of slow noise know of it, ratios and medians stay."""

import numpy as np
import pyarrow as pa
import pytest

from moe_routing_bench import intervals
from moe_routing_bench.comparison import recomputed
from moe_routing_bench.store.records import SCHEMA

BLOCKS = {
    "torch": [20.0, 20.2, 20.1, 20.3, 21.0, 21.2, 21.1, 21.3],
    "cute": [10.0, 10.1, 10.0, 10.1, 10.8, 10.9, 10.8, 10.9],
}


def row(name: str, turns: str = "long", **values: object) -> dict[str, object]:
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


def anew(*rows: dict[str, object]) -> list[dict[str, object]]:
    return recomputed.with_intervals(pa.Table.from_pylist(list(rows), SCHEMA)).to_pylist()


@pytest.mark.parametrize("turns", ["long", "short"])
def test_intervals_are_those_of_today(turns: str) -> None:
    torch, cute = anew(row("torch", turns), row("cute", turns))
    known = [0] * 4 + [1] * 4 if turns == "long" else None
    assert (cute["ci_low_us"], cute["ci_high_us"]) == intervals.time_interval(BLOCKS["cute"], known)
    expected = intervals.paired_ratio(BLOCKS["torch"], BLOCKS["cute"], known)[1:]
    expected = (min(expected[0], 2.0), max(expected[1], 2.0), expected[2])
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
    assert few["ci_low_us"] is None


def test_rows_of_a_run_with_slow_noise_get_wider_intervals_or_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 cells: intervals of short turns know of the slow state, and a row that is too short, or that becomes wide, has not converged; those
    of long turns stay."""
    generator = np.random.default_rng(0)

    def times(long: bool, blocks: int) -> list[float]:
        state = np.cumsum(generator.normal(size=blocks // 4 if long else blocks))
        return (10 * np.exp(0.01 * (np.repeat(state, 4) if long else state))).tolist()

    def rows(turns: str, blocks: int) -> list[dict[str, object]]:
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
        alone = intervals.time_interval(found[0]["block_medians_us"], intervals.turns_of(found[0]))
        same = (found[0]["ci_low_us"], found[0]["ci_high_us"]) == pytest.approx(alone, rel=1e-9)
        assert same == (given is long)
        assert not any(one["converged"] for one in found)
    few = anew(*whole[:10])
    assert all(one["converged"] for one in few), "ten rows show nothing"
    monkeypatch.setattr(recomputed.slow_noise, "hides", lambda known, count: False)
    assert all(one["converged"] for one in anew(*(one | {"ci_low_us": 1.0, "ci_high_us": 99.0} for one in whole)))
