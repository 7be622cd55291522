"""Numbers of comparisons, worked out in another way on rows in which every time, size, card and day differs."""

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from rows import frame, one
from scipy import special, stats

from moe_routing_bench import intervals
from moe_routing_bench.comparison import (
    anomalies,
    origins,
    published_rows,
    ratios,
    recomputed,
    regret,
    runs,
    slow_noise,
    submitted,
    timeline,
    verdicts,
)
from moe_routing_bench.comparison.timeline import Line, Point
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.claims import Kernel, Source
from moe_routing_bench.store.records import SCHEMA
from moe_routing_kernels.choices import Entry, Shape

GAPS = [0.011, 0.002, 0.007, 0.004, 0.005]


@pytest.mark.parametrize("count", range(1, 19))
def test_a_floor_of_few_twins_is_their_root_mean_square_times_t(count):
    gaps = (GAPS * 4)[:count]
    expected = float(np.sqrt(np.mean(np.square(gaps))) * special.stdtrit(count / 2, 0.975))
    assert verdicts.floor(pd.Series(gaps)) == expected > 0.011
    assert verdicts.floor(pd.Series((GAPS * 4)[:19])) == 0.011, "nineteen are enough for their largest"


def twin(name, ratio, us=50.0, bench="pack", **values):
    ends = {f"twin_speedup{end}": ratio * factor for end, factor in (("_ci_low", 0.999), ("_ci_high", 1.001))}
    return one(bench, name, median_us=us, twin_speedup=ratio, twin_speedup_p=0.001, **ends | values)


def test_twins_are_of_rows_with_a_time_and_count_on_either_side():
    rows = frame(twin("cute", 1.02), twin("triton", 1 / 1.02, us=5.0), twin("torch", 3.0, status="incorrect"))
    found = verdicts.twins(rows)
    assert found["gap"].tolist() == pytest.approx([np.log(1.02)] * 2)
    assert found["size"].tolist() == ["10 to 100 µs", "under 10 µs"]


def test_floors_are_of_the_bench_and_its_size_class_where_five_twins_are():
    """Each class has gaps of its own; rows without a twin get the floor of their class as well."""

    def some(count, gap, us, bench="pack"):
        return [twin("cute", np.exp(gap), us, bench) for _ in range(count)]

    parts = [*some(5, 0.01, 5.0), *some(4, 0.02, 50.0), *some(6, 0.04, 5.0, "gate"), *some(6, 0.08, 500.0, "gate")]
    rows = frame(*parts, one("pack", "triton", median_us=7.0), one("combine", "triton", median_us=7.0))
    found = verdicts.floors(rows)
    gaps = np.log(rows["twin_speedup"].dropna().to_numpy())
    small, pack, every = (verdicts.floor(pd.Series(gaps[a:b])) for a, b in ((0, 5), (0, 9), (0, 21)))
    assert found.iloc[[0, 21, 5, 22]].tolist() == pytest.approx([small, small, pack, every])
    expected = [gap * stats.t.ppf(0.975, 3) for gap in (0.04, 0.08)]
    assert found.iloc[[9, 15]].tolist() == pytest.approx(expected)
    assert verdicts.floors(rows, verdicts.twins(rows)[:4]).isna().all()


def test_a_false_verdict_is_judged_by_the_other_twins():
    """Five gaps of 1 % and one of 40 %: with itself among them, its floor would hide it."""
    rows = frame(*(twin("cute", 1.01) for _ in range(5)), twin("triton", 1.4))
    assert verdicts.floor(verdicts.twins(rows)["gap"]) > np.log(1.4)
    assert verdicts.false_verdicts(rows) == (1, 6)


def test_p_is_corrected_over_those_that_are_known():
    p = pd.Series([0.01, np.nan, 0.04, 0.03, np.nan])
    assert verdicts.adjusted(p).tolist() == pytest.approx([0.03, np.nan, 0.04, 0.04, np.nan], nan_ok=True)


def test_without_a_floor_a_gap_beyond_any_is_assumed_on_a_gpu():
    def best(low, high, **values):
        ends = {"best_speedup_ci_low": low, "best_speedup_ci_high": high}
        return one("pack", "cute", best_speedup=(low + high) / 2, **ends | values)

    rows = [best(1.2, 1.3), best(0.7, 0.8), best(0.9, 1.2), best(1.2, 1.3, gpu_uuid=None)]
    rows += [best(1.2, 1.3, noise_floor=0.5), best(1.2, 1.3, status="crashed"), best(1.2, 1.3, best_verdict="same")]
    found = verdicts.assumed(frame(*rows))
    assert found["assumed"].tolist() == [True] * 3 + [False] * 4
    assert found["best_verdict"].fillna("").tolist() == ["faster", "slower", "undecided", "", "", "", "same"]


def problems(rows, part, *arguments):
    """Which rows each limit is against, by the first words of what it says."""
    return {text: list(np.flatnonzero(wrong)) for text, wrong in part(rows, *arguments)}


GPU = {"gpu_name": "NVIDIA H200", "median_us": 100.0, "copy_gb_per_s": 4000.0, "read_gb_per_s": 4400.0}
GPU |= {"write_gb_per_s": 3000.0, "peak_tflops": 800.0, "roofline_us": 50.0, "tflops": 1.0, "gb_per_s": 1.0}


@pytest.mark.parametrize(
    ("column", "within", "beyond", "says"),
    [
        ("gb_per_s", 5059.0, 5061.0, "gb_per_s exceeds the measured bandwidth"),
        ("tflops", 839.0, 841.0, "tflops exceeds the measured peak"),
        ("roofline_us", 114.9, 115.1, "the time is below the roofline"),
        ("write_gb_per_s", 4800.0, 4801.0, "a measured bandwidth exceeds that of the data sheet"),
        ("peak_tflops", 1979.0, 1980.0, "peak_tflops exceeds that of the data sheet"),
    ],
)
def test_what_the_hardware_allows(column, within, beyond, says):
    """Of the second of three rows; one without a GPU has no ceiling to exceed."""
    for value, wrong in ((within, []), (beyond, [1])):
        on_cpu = one("pack", "torch", median_us=1.0, gb_per_s=9e9, tflops=9e9, roofline_us=9e9)
        rows = frame(one("pack", **GPU), one("pack", **GPU | {column: value}), on_cpu)
        found = {text: list(series[series].index) for text, series in submitted._plausible(rows)}
        assert found[says] == wrong and sum(map(len, found.values())) == len(wrong)
    none = dict.fromkeys(submitted.CEILINGS)
    rows = frame(
        one("pack", **GPU), one("pack", **GPU | none), one("pack", **GPU | {"gpu_name": "NVIDIA X9"} | {column: 1e3})
    )
    found = {text: list(series[series].index) for text, series in submitted._plausible(rows)}
    assert found["the row has no ceiling to hold it against"] == [1]


def test_a_time_that_neighbours_contradict_is_marked_or_confirmed():
    rows = [
        one("pack", median_us=us, q1_us=us, q3_us=us, cell_hash=str(i), compulsory_bytes=64, skew=0.1 * i, **values)
        for i, (us, values) in enumerate(
            [(90.0, {}), *[(1.0, {})] * 9, (80.0, {"suspect": True}), (70.0, {"again": "confirmed"})]
        )
    ]
    found = {text: list(series[series].index) for text, series in submitted._plausible(frame(*rows))}
    assert found["a time that neighbouring cells contradict is not marked"] == [0]


def test_where_rows_come_from():
    now = datetime(2026, 11, 20, 12, tzinfo=UTC)
    known = {"git_sha": "a", "code_fingerprint": "x", "platform": "p", "ended_at": "2026-11-20T10:00:00+00:00"}
    changes = [
        {},
        {"git_dirty": True},
        {"gpu_uuid": None},
        {"gpu_uuid": None, "platform": "cpu"},
        {"git_sha": "b", "code_fingerprint": "y"},
        {"bench": "gate", "code_fingerprint": "z"},
        {"git_sha": "c", "code_fingerprint": "v"},
        {"git_sha": "c", "code_fingerprint": "w"},
        {"git_sha": "d", "code_fingerprint": None},
        {"git_sha": "d", "code_fingerprint": None, "status": "crashed"},
        {"ended_at": "2026-11-21T13:00:00+02:00"},
        {"ended_at": "2026-11-21T13:00:00+00:00"},
        {"ended_at": "yesterday"},
    ]
    rows = frame(*(one(**{"bench": "pack"} | known | change) for change in changes))
    found = problems(rows, submitted._provenance, now)
    assert list(found.values()) == [[1], [2], [6, 7], [8], [11, 12]] and submitted._time(None) == ""


def test_a_ratio_is_held_against_the_medians_of_its_own_card():
    """The same cell on two cards: ratios of each are those of its own medians; 1.5 is allowed on both sides."""

    def pair(card, base, us, ratio):
        at = {"cell": "c", "gpu_uuid": card, "baseline": "torch", "turns": "short"}
        return [
            one("pack", "torch", median_us=base, speedup=1.0, **at),
            one("pack", "cute", median_us=us, speedup=ratio, **at),
        ]

    for ratio, wrong in ((4.0, False), (5.9, False), (6.1, True), (2.7, False), (2.6, True)):
        rows = pair("GPU-1", 40.0, 10.0, ratio) + pair("GPU-2", 90.0, 10.0, 9.0)
        rows = [row | {"block_medians_us": [row["median_us"], 1.01 * row["median_us"]], "set_aside": 0} for row in rows]
        table = pa.Table.from_pandas(frame(*rows), SCHEMA, preserve_index=False)
        found = dict(submitted._arithmetic(table, table.to_pandas()))
        assert list(found["speedup is far from the ratio of the medians"]) == [False] * 1 + [wrong] + [False] * 2, ratio
    assert (
        submitted._sheet("NVIDIA H20-3e") == submitted.SHEETS["H20"]
        and submitted._sheet("NVIDIA GH200 480GB")[0] == 4900
    )


def test_an_interval_of_a_share_or_a_multiple_is_that_of_its_time():
    """Of a time whose ends are not as far apart on both sides."""
    row = {"share": 0.5, "median_us": 10.0, "ci_low_us": 8.0, "ci_high_us": 20.0}
    share, multiple = ratios.share(row, "share"), ratios.multiple(row, "share")
    assert (share.low, share.high) == (0.25, 0.625) and (multiple.low, multiple.high) == (0.4, 1.0)


def test_pairs_are_of_the_same_turns_and_blocks():
    def blocks(count, turns=None, **values):
        return {"block_medians_us": [1.0] * count, "set_aside": 0, "turns": turns} | values

    assert ratios.is_paired(blocks(4), blocks(4)) and not ratios.is_paired(blocks(4), blocks(5))
    assert not ratios.is_paired(blocks(4, "long"), blocks(4))
    long = blocks(4, "long", block_turns=[0, 0, 1, 1])
    assert ratios.is_paired(long, blocks(4, "long")) and not ratios.is_paired(
        long, blocks(4, "long", block_turns=[0, 1, 1, 1])
    )
    drift = {"suspect": True, "suspect_reason": "ceilings drifted by 3 %; ceilings drifted by 2 %"}
    assert ratios.drifted_alone(drift) and not ratios.drifted_alone(drift | {"suspect": False})
    assert not ratios.drifted_alone(drift | {"suspect_reason": "ceilings drifted by 3 %; it scatters"})


def test_a_cell_without_a_baseline_has_the_first_that_dequantises():
    def row(name, us, **values):
        blocks = {"block_medians_us": [us, 1.1 * us, 0.95 * us], "block_turns": None, "turns": "short"}
        return (
            {"implementation": name, "status": "ok", "weights": "int4_g128", "set_aside": 0, "baseline": None}
            | blocks
            | values
        )

    rows = [row("dequant_loop", 40.0), row("cute", 10.0), row("dequant", 20.0), row("torch", 1.0, status="crashed")]
    found = ratios.against_dequantised(rows)
    assert [one.get("baseline") for one in found] == ["dequant"] * 3 + [None]
    assert [one.get("speedup") for one in found[:3]] == [0.5, 2.0, 1.0] and "speedup" not in found[3]
    assert found[1]["speedup_p"] == intervals.paired_ratio(rows[2]["block_medians_us"], rows[1]["block_medians_us"])[3]
    rows[2]["status"] = "incorrect"
    assert ratios.against_dequantised(rows)[1]["speedup"] == 4.0
    for other in (
        [row("dequant", 2.0, weights="bf16"), row("cute", 1.0, weights="bf16")],
        [row("dequant", 2.0, baseline="torch"), row("cute", 1.0)],
    ):
        assert ratios.against_dequantised(other) == other


def test_intervals_reach_to_the_median_of_the_row():
    """Which blocks that are not kept may have moved."""
    blocks = [10.0, 10.2, 9.9, 10.1, 10.0, 10.3]
    low, high = intervals.time_interval(blocks)
    for us, ends in ((9.0, (9.0, high)), (12.0, (low, 12.0)), (10.05, (low, high))):
        row = {"cell_hash": "c", "implementation": "cute", "status": "ok", "set_aside": 0, "turns": "short"}
        (found,) = recomputed.with_intervals(
            pa.Table.from_pylist([row | {"median_us": us, "block_medians_us": blocks}], SCHEMA)
        ).to_pylist()
        assert (found["ci_low_us"], found["ci_high_us"]) == pytest.approx(ends)


def test_the_interval_of_slow_noise_reaches_to_the_median():
    """Of values whose trimmed mean is far above their median."""
    values = np.array([0.0] * 7 + [0.01, 1.0, 1.0, 1.0, 1.0])
    known = tuple(float(i == 0) for i in range(len(slow_noise._models(12).inflation)))
    low, high, _ = slow_noise.interval(values, known)
    assert low <= np.median(values) <= high
    middle = np.sort(values)[2:-2]
    clipped = np.clip(values, middle[0], middle[-1])
    error = np.sqrt(((clipped - clipped.mean()) ** 2).sum() / (8 * 7))
    for scale in (1, 1e-3):
        low, high, p = slow_noise.interval(scale * (values + 1), known)
        assert high == pytest.approx(scale * (1 + middle.mean() + stats.t.ppf(0.975, 7) * error), rel=1e-4)
        assert p == pytest.approx(2 * stats.t.sf((1 + middle.mean()) / error, 7))


def chained(rows, count, seed=0):
    values = np.random.default_rng(seed).normal(size=(rows, count))
    for i in range(1, count):
        values[:, i] = 0.95 * values[:, i - 1] + np.sqrt(1 - 0.95**2) * values[:, i]
    return values


def test_twenty_rows_of_ten_cells_tell_of_slow_noise():
    values = chained(20, 40)
    assert slow_noise.shares({i: list(values[2 * i : 2 * i + 2]) for i in range(10)}) is not None
    assert slow_noise.shares({i: list(values[2 * i : 2 * i + 2]) for i in range(9)}) is None


def test_the_evidence_is_that_of_the_longest_rows():
    """Rows of three values show one pattern, for which half of the evidence is enough; not where others have more values."""

    def told(rows):
        return np.cumsum([slow_noise._likelihoods(intervals.winsorised(row)[0]) for row in rows], axis=0)

    rows = chained(200, 3, 3)
    gains = told(rows).max(axis=1) - told(rows)[:, 0]
    count = next(n for n in range(20, 200) if 5.2 < gains[n - 1] < 7)
    assert slow_noise.shares({i: [row] for i, row in enumerate(rows[:count])}) is not None
    longer = [*rows[:count], chained(1, 6)[0]]
    last = told(longer)[-1]
    assert slow_noise.shares({i: [row] for i, row in enumerate(longer)}) is None and 4 < last.max() - last[0] < 8


def test_neighbours_allow_from_not_at_all_to_as_much_as_grew_most():
    """Twice the bytes and a third of the FLOPs: from a third of the time to twice as long; equal or less of all: no longer."""
    need, needs = np.array([2.0, 1.0]), np.array([[1.0, 3.0], [4.0, 5.0], [2.0, 1.0], [1.0, 0.5]])
    low, high = anomalies._allowed(need, needs, np.array([6.0, 10.0, 7.0, 8.0]))
    found = sorted(zip(low, high, strict=True))
    assert found == [(pytest.approx(2), 10), (pytest.approx(2), 12), (7, 7), (8, 16)]


def test_a_row_without_blocks_is_not_the_same_measurement():
    """Two runs of another benchmark may have the same median."""

    def run(**values):
        return frame(one("pack", "cute", cell="c", tokens=8, median_us=5.0, **values)).reindex(
            columns=list(runs.COLUMNS)
        )

    found = runs.compare(run(), run())
    assert found.rows["verdict"].tolist() == ["undecided"] and found.repeated() == 0
    blocks = {"block_medians_us": [5.0, 5.1, 4.9]}
    again = runs.compare(run(**blocks), run(**blocks))
    assert again.rows["verdict"].tolist() == ["same"] and again.repeated() == 1


def test_the_floor_of_a_pair_is_its_largest():
    """Of both runs and of the drift of the ceilings: of the copy, and of products where there are any."""

    def both(**values):
        known = {"block_medians_us": [5.0, 5.2, 4.9, 5.1], "median_us": 5.05, "floor": 0.01, "flops": 0.0}
        known |= {"copy_gb_per_s": 4000.0, "peak_tflops": 800.0, "turns": "short", "block_turns": None}
        return {f"{name}_{side}": value for side in ("before", "after") for name, value in known.items()} | values

    for values, drifts, floor in (
        ({}, True, 0.01),
        ({"floor_before": 0.03}, True, 0.03),
        ({"floor_after": 0.04}, True, 0.04),
        ({"copy_gb_per_s_before": 4400.0, "floor_after": 0.04}, True, np.log(1.1)),
        ({"copy_gb_per_s_after": 4400.0}, True, np.log(1.1)),
        ({"copy_gb_per_s_after": 4400.0}, False, 0.01),
        ({"peak_tflops_after": 960.0}, True, 0.01),
        ({"peak_tflops_after": 960.0, "flops_after": 9.0, "copy_gb_per_s_after": 4400.0}, True, np.log(1.2)),
        ({"peak_tflops_after": None, "flops_after": 9.0}, True, 0.01),
    ):
        assert runs.ratio(both(**values), drifts)["floor"] == pytest.approx(floor), values


def test_what_differs_between_runs_is_what_both_know():
    before, after = frame(one("pack", driver="1"), one("pack", driver="2")), frame(one("pack", driver="1"))
    assert runs._difference(before, after, "driver") == "driver: 1, 2 before, 1 after"
    for other in (frame(one("pack")), before):
        assert runs._difference(before, other, "driver") == ""


def test_an_axis_that_some_rows_lack_keeps_its_values():
    """Only one that no row has is filled, and in benches that read it alone."""
    rows = frame(
        one("pack", layout="padded", dtype="fp16", packed=None),
        one("pack", layout=None, dtype="bf16", packed=None),
        one("gate", layout=None, dtype="fp32", packed=None),
    )
    found = runs._with_newer_axes(rows)
    assert found["layout"].fillna("").tolist() == ["padded", "", ""]
    assert found["packed"].fillna("").tolist() == ["fp16", "bf16", ""]
    assert set(found.loc[:1, "seed"]) == {AXES["seed"].default}


def test_a_history_is_in_the_order_of_runs():
    def run(us, cell="c", **values):
        times = {"median_us": us, "block_medians_us": [us, 1.001 * us, 0.999 * us, us], "turns": "short"}
        return frame(
            one("pack", "cute", cell=cell, tokens=8, **times | values),
            one("pack", "torch", cell=cell, tokens=8, **times),
        ).reindex(columns=list(runs.COLUMNS))

    found = runs.history({"first": run(20.0), "second": run(5.0)}, run(10.0, cell="new"))
    assert [(line.implementation, line.cell, line.us) for line in found] == [
        ("cute", "new", 10.0),
        ("torch", "new", 10.0),
    ]
    (first, second) = found[0].then
    assert (first.run, first.us, first.ratio, first.verdict) == ("first", 20.0, pytest.approx(2), "faster")
    assert (second.run, second.us, second.ratio, second.verdict) == ("second", 5.0, pytest.approx(0.5), "slower")
    assert first.low < 2 < first.high


def point(day, us, card="GPU-1", ratio=1.0, verdict="", moved=False, run="r"):
    ends = {"ratio_low": 0.9 * ratio, "ratio_high": 1.2 * ratio}
    return Point(
        run,
        f"2026-11-{day}",
        "a" * 40,
        us,
        0.9 * us,
        1.2 * us,
        {"gpu_uuid": card},
        ratio,
        **ends,
        verdict=verdict,
        moved=moved,
    )


def line(name, *points, bench="pack", cell="c"):
    return Line(bench, cell, name, points)


def test_steps_have_what_others_did_between_the_same_cards():
    """The middle of three packages in the same cell from the first card to the second; the latest step first."""
    moves = {"torch": 1.5, "flag_gems": 1.2, "megatron": 1.3}
    foreign = [
        line(name, point("21", 9.0), point("23", 6.0, "GPU-2", ratio, moved=True)) for name, ratio in moves.items()
    ]
    assert not any(map(timeline.is_ours, foreign))
    other = line("torch", point("21", 9.0), point("23", 9.0, "GPU-2", 7.0), cell="d")
    back = line("torch", point("23", 9.0, "GPU-2"), point("24", 9.0, ratio=5.0), bench="gate")
    ours = line(
        "cute",
        point("21", 9.0),
        point("23", 6.0, "GPU-2", 1.5, "faster", True),
        point("25", 7.0, "GPU-2", 0.9, "slower"),
    )
    found = timeline.steps([*foreign, other, back, ours])
    assert [(step.after.started[-2:], step.others, step.count) for step in found] == [
        ("25", pytest.approx(np.nan, nan_ok=True), 0),
        ("23", 1.3, 3),
    ]
    changed = line("torch", point("21", 9.0), point("23", 6.0, "GPU-2", 1.5, "faster", True))
    (own,) = timeline.steps([*foreign[1:], changed])
    assert (own.others, own.count) == (pytest.approx(1.25), 2)
    texts = timeline.step(found[1])
    assert texts[:3] == ["2026-11-23", "pack", "cute"] and texts[3:5] == ["9.000 µs", "6.000 µs"]
    assert texts[5].startswith("1.50x [1.35, 1.80") and texts[6:8] == ["1.30x (3)", "another"]
    assert timeline.step(found[0])[6:8] == ["–", "the same"]
    about, cards = timeline.told([*foreign, ours], found, True)
    assert (
        about.startswith("4 rows measured more than once, 9 times in all")
        and "2 steps beyond noise, 1 faster and 1 slower" in about
    )
    assert (
        cards.startswith("1 of these steps are between two cards")
        and "same card" in timeline.told([ours], found[:1], True)[1]
    )
    assert timeline.told([ours], found[1:], True)[1].startswith("All of these")


def test_the_longest_lines_are_of_ours_and_of_whole_layers_first():
    def many(name, count, **values):
        return line(name, *(point(str(10 + i), 9.0) for i in range(count)), **values)

    found = [
        many("cute", 2, cell="a"),
        many("torch", 9, cell="a"),
        many("cute", 3, cell="b"),
        many("torch", 2, cell="b"),
        many("cute", 3, cell="c"),
        many("torch", 3, cell="c"),
        many("torch", 9, cell="d"),
        many("cute", 2, bench="layer", cell="e"),
        many("cute", 2, bench="gate", cell="f"),
    ]
    longest = timeline.longest(found, 9)
    assert list(longest) == ["layer, e", "gate, f", "pack, c"]
    assert [each.implementation for each in longest["pack, c"]] == ["cute", "torch"] and list(
        timeline.longest(found, 1)
    ) == ["layer, e"]


def test_points_of_cards_that_are_not_known_have_moved():
    row = {
        "run": "r",
        "started_at": "2026-11-21",
        "git_sha": None,
        "median_us": 2.0,
        "ci_low_us": 1.0,
        "ci_high_us": 4.0,
    }
    row |= dict.fromkeys(timeline._SHOWN)
    found = {"ratio": 2.0, "ratio_ci_low": 1.5, "ratio_ci_high": None, "verdict": "faster"}
    for card, before, moved in (
        (None, None, True),
        ("GPU-1", "GPU-1", False),
        ("GPU-1", "GPU-2", True),
        ("GPU-1", None, True),
    ):
        made = timeline._point(row | {"gpu_uuid": card}, found, row | {"gpu_uuid": before})
        assert made.moved is moved and (made.us, made.low, made.high, made.commit) == (2.0, 1.0, 4.0, "")
        assert (made.ratio, made.ratio_low, np.isnan(made.ratio_high), made.verdict) == (2.0, 1.5, True, "faster")


SHAPE = Shape(64, 8, 2, 512, 256, "swiglu", "bf16", "bf16", "bf16", None, "sm_90")


def test_a_choice_among_all_that_has_no_time_here_is_named():
    """Not one that is only another than what is chosen among the measured."""
    small = Entry("small", "prefill", SHAPE, {"cute": 10.0, "triton": 12.0})
    large = Entry(
        "large", "prefill", Shape(**vars(SHAPE) | {"tokens": 128}), {"cute_gather": 1.0, "triton": 2.0, "cute": 3.0}
    )
    found, _ = regret.lines([small, large], [small, large])
    assert [(one.name, one.unlimited) for one in found.choices] == [("cute", None), ("triton", "cute_gather")]
    assert found.unmeasured == ["cute_gather has no time here"] and found.best_own == "cute"


def test_of_entries_with_as_many_times_the_last_measured_counts():
    known = [
        Entry("c", "prefill", SHAPE, {"cute": 1.0}, run=run, measured=day, card="x")
        for run, day in (("a", "2026-11-22"), ("b", "2026-11-21"))
    ]
    assert [one.run for one in regret.fullest(known)] == [one.run for one in regret.fullest(known[::-1])] == ["a"]


def test_regret_of_one_implementation_is_in_the_order_of_cells_and_means():
    entries = [
        Entry(str(i), "prefill", Shape(**vars(SHAPE) | {"tokens": 64 * 4**i}), times)
        for i, times in enumerate(
            [
                {"cute": 10.0, "triton": 15.0},
                {"cute": 40.0, "triton": 20.0},
                {"torch_loop": 5.0, "cute": 4.0, "triton": 4.0},
            ]
        )
    ]
    found = regret.always(regret.lines(entries, entries))
    assert [(one.what, one.cells, one.mean, one.worst) for one in found] == [
        ("triton", 3, pytest.approx(0.5 / 3), 0.5),
        ("cute", 3, pytest.approx(1 / 3), 1.0),
        ("torch_loop", 1, pytest.approx(0.25), 0.25),
    ]


SOURCE = Source(
    **dict.fromkeys(("title", "source", "version", "licence", "author", "boundary", "mode", "mode_note"), "x"),
    hardware="NVIDIA H200",
    bench="layer",
    within=0.1,
    kernels={"k": Kernel(implementation="sonicmoe")},
)


def test_the_sentence_counts_rows_that_cells_can_be_like():
    """Ten rows of which one is of ranks, one uneven, one of no model; four have a cell here, and some no row of the kernel."""
    published = pd.DataFrame(
        {
            "expert_parallel": [1] * 9 + [2],
            "loads": ["balanced"] * 8 + ["power", "balanced"],
            "model": ["m"] * 7 + [None, "m", "m"],
        }
    )
    status = [
        published_rows.REPRODUCED,
        published_rows.NOT,
        published_rows.NO_ROW,
        published_rows.NO_ROW,
        published_rows.NO_TIME,
    ]
    lines = pd.DataFrame({"status": status, "implementation": ["a", "a", "z", "b", "c"], "why": ""})
    text = published_rows.sentence(SOURCE, published, lines)
    assert (
        text.startswith("5 of 7 published rows")
        and " 2 have a row" in text
        and "of which 1 (50 %) is reproduced within 10 %" in text
    )
    assert text.endswith("No row of this implementation yet: b (1), z (1). No time here: c (1).")


def test_ours_next_to_published_rows_is_what_auto_runs(monkeypatch):
    """Not the fastest by chance."""
    sizes = {"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2, "activation": "swiglu", "dtype": "bf16"}
    sizes |= {
        "packed": "bf16",
        "weights": "bf16",
        "gpu_name": "NVIDIA H200",
        "phase": "decode",
        "tokens": 8,
        "cell": "a",
    }
    sizes |= {"started_at": "2026-11-28", "git_sha": "a"}
    cell = frame(
        *(
            one("layer", name, median_us=us, warm_median_us=us / 2, **sizes)
            for name, us in (("cute", 9.0), ("triton", 5.0), ("sonicmoe", 1.0))
        )
    )
    monkeypatch.setattr(regret, "runs", lambda timed, table: "cute")
    assert published_rows._ours(cell) == {"ours": "cute", "ours_us": 4.5}


def test_a_layer_of_ours_has_all_of_its_stages():
    """Where torch does one of them it is not ours, though the others are."""
    for bench in ("layer", "routing", "experts"):
        names = origins.ours(bench)
        assert not {name for name in names if name.startswith("torch")}
    assert origins.names(frame(one("pack", gpu_name="A"), one("pack", gpu_name="B"), one("pack", gpu_name="A"))) == [
        "A",
        "B",
    ]
    mixed = frame(one("pack", gpu_name="A", cpu_model="C"), one("pack", cpu_model="D"))
    assert origins.names(mixed) == ["A"] and origins.names(mixed.iloc[1:]) == ["D"]
    assert (
        origins.maker("layer", "sonicmoe") not in ("torch", "sonicmoe2") and origins.maker("layer", "gone") == "torch"
    )


def test_the_nearest_are_found_in_a_tree_as_among_all_pairs():
    rng = np.random.default_rng(3)
    points, values = rng.integers(0, 6, (200, 3)).astype(float), rng.integers(0, 3, 200)
    for nearest in (1, 5, 16, 17, 60):
        tree, pairs = (found(values, points, nearest) for found in (anomalies._of_tree, anomalies._of_all_pairs))
        for place, (one_, other) in enumerate(zip(tree, pairs, strict=True)):
            assert {*one_} == {*other}
            distances = np.abs(points - points[place]).max(axis=1)
            mine = np.sort(distances[values != values[place]])
            last = np.sort(np.where(values != values[place], distances, np.inf))[nearest - 1]
            assert {*other} == {*np.flatnonzero((values != values[place]) & (distances <= last))} and len(other) >= min(
                nearest, len(mine)
            )


@pytest.mark.parametrize(
    ("count", "blocks", "turns", "hidden", "said"),
    [
        (1, 6, "long", False, "time: 1 turns are too few"),
        (2, 6, "long", False, "time: 2 turns differ too much to tell"),
        (2, 2, "short", False, "time: 2 blocks are too few"),
        (3, 3, "short", False, "time: 3 blocks differ too much to tell"),
        (12, 12, "short", True, "time: 12 blocks do not show how slowly the run's noise changes; 20 do"),
    ],
)
def test_why_there_is_no_interval(count, blocks, turns, hidden, said):
    row = {"turns": turns, "block_turns": None, "block_medians_us": [1.0] * blocks}
    assert recomputed._why("time", count, row, hidden) == said


def test_the_interval_of_a_row_is_that_of_the_models_that_its_values_are_like():
    """Of two that hold as often: the noise of neighbours that agree is slow, that of neighbours that alternate is not."""
    count = len(slow_noise._models(16).inflation)
    place = 1 + slow_noise._CORRELATIONS.index(0.95) * len(slow_noise._SHARES) + slow_noise._SHARES.index(1.0)
    white, slow, both = (
        tuple(float(n in kept) / len(kept) for n in range(count)) for kept in ((0,), (place,), (0, place))
    )
    values = np.sin(np.arange(16) / 4) + 0.01 * np.arange(16)

    def width(given, known):
        low, high, _ = slow_noise.interval(given, known)
        return high - low

    assert width(values, white) < 0.5 * width(values, slow) and width(values, both) > 0.9 * width(values, slow)
    mixed = values[np.random.default_rng(1).permutation(16)]
    assert width(mixed, both) < 1.1 * width(mixed, white) < 0.5 * width(mixed, slow)
    assert slow_noise.interval(np.array([1.0, 2.0, 4.0]), white) is not None


def test_a_row_that_lacks_its_interval_gives_none_to_a_ratio():
    known = {"block_medians_us": [2.0, 2.1, 1.9], "set_aside": 0, "cell_hash": "c"}
    lacking = known | {"no_interval": "few", "block_medians_us": [1.0, 1.1, 0.9]}
    for pair in ((known, lacking), (lacking, known)):
        assert np.isnan(ratios.speed(*pair).low)
    assert not np.isnan(ratios.speed(known, lacking | {"no_interval": None}).low)


def test_a_card_is_known_by_a_whole_word_of_its_name():
    assert [origins.architecture(name) for name in ("NVIDIA GB200", "NVIDIA H20-3e", "NVIDIA GH200 480GB", "")] == [
        "NVIDIA GB200",
        "sm_90",
        "sm_90",
        "cpu",
    ]


@pytest.mark.parametrize(
    ("version", "suspect", "differs", "said"),
    [
        ("1", False, "", ""),
        ("2", False, "", "version 2 here"),
        (None, True, "", "suspect here"),
        ("2", True, "a gate", "version 2 here; a gate; suspect here"),
        ("1", None, "a gate", "a gate"),
    ],
)
def test_why_the_same_kernel_may_take_another_time(version, suspect, differs, said):
    here = pd.Series({"implementation_version": version, "suspect": suspect}, dtype=object)
    assert published_rows._why(here, {"version": "1"}, differs) == said


def test_cards_without_a_data_sheet_are_named_each_once():
    table = pa.table({"gpu_name": ["NVIDIA X9", None, "NVIDIA H200", "NVIDIA A9", "NVIDIA X9"]})
    assert [text.split()[3].rstrip(":") for text in submitted.unchecked(table)] == ["A9", "X9"]


def test_what_differs_besides_the_code_is_marked():
    def run(**values):
        return frame(one("pack", "cute", cell="c", tokens=8, median_us=5.0, **values)).reindex(
            columns=list(runs.COLUMNS)
        )

    known = dict.fromkeys(runs._MARKED, "1")
    assert "gpu_uuid" in known and "driver" in known and "triton_version" in known
    for name in known:
        assert runs.compare(run(**known), run(**known | {name: "2"})).marks == [f"{name}: 1 before, 2 after"]


def test_rows_with_different_numbers_of_neighbours_are_each_judged():
    """The first has eight, of other skews and of other batches; the others four."""
    rows = [{"skew": 0.1 * n, "tokens": 64, "median_us": 1.0} for n in range(5)]
    rows += [{"skew": 0.0, "tokens": 64 * 2**n, "median_us": 1.0} for n in range(1, 5)]
    for place in (0, 2, 7):
        known = [one("pack", q1_us=1.0, q3_us=1.0, experts=8, **row) for row in rows]
        known[place]["median_us"] = 100.0
        assert list(np.flatnonzero(anomalies.found(frame(*known)).notna())) == [place]


def test_a_drift_is_no_part_of_the_spread_that_is_seen():
    models = slow_noise._models(9)
    slope = np.arange(9) - 4.0
    for drift in range(-len(slow_noise._DRIFTS), 0):
        np.testing.assert_allclose(models.spreads[drift] @ slope, 0, atol=1e-9)
    assert np.abs(models.spreads[0] @ slope).max() > 1
    np.testing.assert_allclose(models.spreads.sum(axis=2), 0, atol=1e-9)


def test_peers_come_last_among_candidates():
    """Of equal times that of ours is chosen."""
    even = Entry("even", "prefill", SHAPE, {"sonicmoe": 10.0, "cute": 10.0})
    (line,) = regret.lines([even], [even], with_peers=True)
    assert line.best_own == "cute" and regret._able(even, ["sonicmoe", "cute"], {"sonicmoe"}) == ["cute", "sonicmoe"]
    assert regret._able(even, ["sonicmoe", "cute"], set()) == ["cute"]
