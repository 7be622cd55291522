"""Verdicts on pairs of one run: noise floors from twins, what they call faster, and what becomes of equals and of a planted slowdown."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from moe_routing_bench import intervals
from moe_routing_bench.comparison import verdicts

BLOCKS = 20


def pair(rng: np.random.Generator, us: float, slower: float = 1.0, placed: float = 0.001) -> dict[str, float]:
    """Ratio, interval and p of a time over another that is `slower` times as long; buffers move both by N(0, placed)."""
    one, other = (us * np.exp(rng.normal(0, placed) + rng.normal(0, 0.002, BLOCKS)) for _ in range(2))
    return dict(zip(("", "_ci_low", "_ci_high", "_p"), intervals.paired_ratio(one, slower * other), strict=True))


def run(
    rng: np.random.Generator,
    twins: int,
    slower: float = 1.0,
    bench: str = "pack",
    us: float = 50.0,
    placed: float = 0.001,
) -> pd.DataFrame:
    """So many cells of a bench with a baseline, and a rival with a twin that takes `slower` times as long."""
    rows = []
    for i in range(twins):
        same = {"bench": bench, "cell": f"{bench}-{us}-{i}", "status": "ok", "baseline": "torch", "median_us": us}
        rival = {f"speedup{k}": v for k, v in pair(rng, us, slower, placed).items()}
        best = {k.replace("speedup", "best_speedup"): v for k, v in rival.items()}
        twin = {f"twin_speedup{k}": v for k, v in pair(rng, us, 1.0, placed).items()}
        rows += [
            same | {"implementation": "torch", "speedup": 1.0},
            same | {"implementation": "cute"} | rival | best | twin,
        ]
    return pd.DataFrame(rows)


def test_p_is_corrected_over_all_pairs_and_not_over_those_that_are_significant() -> None:
    """By hand: of six pairs two at 3 and 4 %, which are 12 % after Benjamini and Hochberg; among themselves they would be 4 %."""
    p = [0.03, 0.04, 0.9, 0.9, 0.9, 0.9]
    rows = pd.DataFrame({"speedup": 1.2, "speedup_ci_low": 1.1, "speedup_ci_high": 1.3, "speedup_p": p})
    floor = pd.Series(0.01, rows.index)
    assert verdicts.adjusted(rows["speedup_p"]).tolist() == pytest.approx([0.12, 0.12, 0.9, 0.9, 0.9, 0.9])
    assert list(verdicts.of_pairs(rows, "speedup", floor)) == ["undecided"] * 6
    assert list(verdicts.of_pairs(rows[:2], "speedup", floor[:2])) == ["faster"] * 2


@pytest.mark.parametrize(
    ("numbers", "floor", "expected"),
    [
        ((1.10, 1.09, 1.11, 0.001), 0.005, "faster"),
        ((0.90, 0.89, 0.91, 0.001), 0.005, "slower"),
        ((1.10, 0.99, 1.21, 0.001), 0.005, "undecided"),  # the interval includes 1
        ((1.10, 1.09, 1.11, 0.051), 0.005, "undecided"),  # not significant among all pairs
        ((1.03, 1.029, 1.031, 0.001), 0.04, "same"),  # real, but no more than equals differ by
        ((1.03, 1.01, 1.05, 0.001), 0.04, "undecided"),  # as near, but it may be more
        ((1.03, 1.01, 1.05, 0.001), 0.029, "faster"),  # ln 1.03 is 0.02956
        ((1.03, 1.01, 1.05, 0.001), 0.030, "undecided"),
        ((0.997, 0.9951, 1.002, 0.3), 0.005, "same"),
        ((0.997, 0.9949, 1.002, 0.3), 0.005, "undecided"),
        ((1.1, 1.0, 1.2, 0.001), 0.005, "undecided"),  # 1 is the end of the interval
        ((0.9, 0.8, 1.0, 0.001), 0.005, "undecided"),
        ((1.1, 1.09, 1.11, 0.05), 0.005, "faster"),
        ((1.03, 1.01, 1.05, 0.001), np.log(1.03), "undecided"),  # no more than equals differ by
        ((1.0, 1.0, 1.0, 1.0), 0.0, "same"),
        ((1.1, np.nan, np.nan, np.nan), 0.005, "undecided"),  # under three pairs
        ((1.1, 1.09, 1.11, 0.001), np.nan, "undecided"),
    ],
)
def test_verdict(numbers, floor, expected):
    assert verdicts.verdict(*numbers, floor) == expected


def test_the_smallest_and_the_quantile():
    """The largest gap of up to 40 twins, then the second largest; a floor is never below half a percent."""
    assert verdicts.floor(pd.Series([0.001] * 39 + [0.09])) == 0.09
    assert verdicts.floor(pd.Series([0.001] * 40 + [0.02, 0.09])) == 0.02
    assert verdicts.floor(pd.Series([0.001] * 41 + [0.09])) == verdicts.LEAST == 0.005


def test_classes_of_size():
    found = verdicts.size_class(pd.Series([0.1, 9.99, 10.0, 99.9, 100.0, 1e6]))
    assert [name.split()[0] for name in found] == ["under", "under", "10", "10", "100", "100"]


def test_floors_come_from_the_nearest_class_that_has_enough_twins():
    """Of bench and size, else of the bench, else of all; without five there is none."""
    rng = np.random.default_rng(1)
    other = [run(rng, 1, bench="gate", us=50), run(rng, 6, bench="combine", us=50, placed=0.3)]
    rows = pd.concat(
        [run(rng, 5, us=5, placed=0.05), run(rng, 5, us=50), run(rng, 4, us=500), *other], ignore_index=True
    )
    floors = verdicts.floors(rows).groupby([rows["bench"], rows["median_us"]]).first()
    assert floors["pack", 5] > 0.02 > floors["pack", 50]
    gaps = verdicts.twins(rows)
    assert floors["pack", 500] == verdicts.floor(gaps[gaps["bench"] == "pack"]["gap"]) < floors["combine", 50]
    assert floors["gate", 50] == verdicts.floor(gaps["gap"])
    assert verdicts.floors(run(rng, 4)).isna().all()


def test_without_twins_nothing_is_judged():
    found = verdicts.judged(run(np.random.default_rng(2), 4, slower=2))
    assert found[["noise_floor", "verdict", "best_verdict"]].isna().all().all()


def test_only_rows_with_a_ratio_are_judged():
    """Not the baseline against itself, and nothing that is not ok."""
    rows = run(np.random.default_rng(3), 8, slower=2)
    rows.loc[1, "status"] = "incorrect"
    found = verdicts.judged(rows)
    assert set(found.loc[found["implementation"] == "torch", "verdict"]) == {None}
    assert found.loc[1, "verdict"] is None and found.loc[1, "best_verdict"] is None
    cute = found[(found["implementation"] == "cute") & (found["status"] == "ok")]
    assert set(cute["verdict"]) == set(cute["best_verdict"]) == {"slower"} and (cute["noise_floor"] >= 0.005).all()


def test_a_drift_of_the_ceilings_does_not_unsettle_a_pair():
    """Both times were taken in the same rounds."""
    rows = run(np.random.default_rng(3), 8, slower=2).assign(suspect=True)
    assert set(verdicts.judged(rows)["verdict"].dropna()) == {"slower"}


@pytest.mark.parametrize("placed", [0.0005, 0.004])
def test_equals_are_told_apart_in_at_most_5_percent(placed):
    """As on an H200, where the place of buffers alone moves a time by up to 1 %; intervals by themselves see a difference in a
    third or more of such pairs."""
    told, same, alone = 0, 0, 0
    for seed in range(3):
        table = run(np.random.default_rng(seed), 66, placed=placed)
        wrong, judged = verdicts.false_verdicts(table)
        assert judged == 66 and wrong <= 0.05 * 66
        found = verdicts.judged(table)["verdict"].value_counts()
        told, same = told + found.get("faster", 0) + found.get("slower", 0), same + found["same"]
        alone += ((table["twin_speedup_ci_low"] > 1) | (table["twin_speedup_ci_high"] < 1)).sum()
    assert told <= 0.05 * 198 and same > 0.8 * 198
    assert placed < 0.004 or alone > 0.3 * 198


def test_a_planted_slowdown_of_2_percent_is_found():
    """In at least 90 % of the cells, where equals differ by 0.1 % from buffers and rounds by 0.2 %."""
    found = verdicts.judged(run(np.random.default_rng(5), 60, slower=1.02))["verdict"].value_counts()
    assert found["slower"] >= 54 and found.get("faster", 0) == 0


def test_many_null_pairs_are_not_mined_for_a_winner():
    """A p of 0.03 is a discovery alone, and none among a hundred."""
    assert verdicts.adjusted(pd.Series([0.03]))[0] == 0.03
    p = pd.Series([0.03, *np.linspace(0.1, 1, 99), np.nan])
    assert verdicts.adjusted(p)[0] > 0.5 and np.isnan(verdicts.adjusted(p)[100])


def test_too_few_twins_have_no_false_verdict():
    assert verdicts.false_verdicts(run(np.random.default_rng(6), 5)) == (0, 0)  # four others are too few for a floor


def columns(rows: pd.DataFrame) -> pa.Table:
    """An Arrow table in which the columns of verdicts have their types and no values, and which holds another one."""
    table = pa.Table.from_pandas(
        rows.assign(noise_floor=None, verdict=None, best_verdict=None, other="kept"), preserve_index=False
    )
    for name, kind in {"noise_floor": pa.float64(), "verdict": pa.string(), "best_verdict": pa.string()}.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, pa.field(name, kind), pa.nulls(len(rows), kind))
    return table


def test_verdicts_in_the_columns_of_a_table():
    """Of their own types, where there are any; what else the table holds stays as it is."""
    table = columns(run(np.random.default_rng(3), 8, slower=2))
    found = verdicts.with_verdicts(table)
    assert found.schema.equals(table.schema) and found["other"].equals(table["other"])
    assert found["speedup"].equals(table["speedup"])
    expected = verdicts.judged(table.to_pandas())
    assert found["verdict"].to_pylist() == [None, "slower"] * 8 == found["best_verdict"].to_pylist()
    assert found["noise_floor"].to_pylist() == list(expected["noise_floor"])


def test_columns_keep_their_types_without_a_verdict():
    """Of too few twins: what is missing is null, not NaN."""
    table = columns(run(np.random.default_rng(3), 4, slower=2))
    found = verdicts.with_verdicts(table)
    assert found.schema.equals(table.schema)
    assert [found[name].null_count for name in ("noise_floor", "verdict", "best_verdict")] == [8, 8, 8]
