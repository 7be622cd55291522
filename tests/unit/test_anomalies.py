"""Which times are doubted: planted ones, those of a published table that its authors could not explain, and no others."""

import multiprocessing
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_routing_bench.comparison import anomalies, ratios, recomputed, verdicts
from moe_routing_bench.comparison.verdicts import replaced
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.report.seeds.kernels import as_rows
from moe_routing_bench.store import records
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
STORED = sorted(ROOT.glob("results/nvidia-h200*/measurements.parquet"))


def grid(**columns):
    """Five batches at two widths of a kernel whose time follows the bytes, and what the columns say."""
    sizes = [(tokens, hidden) for hidden in (1024, 2048) for tokens in (256, 512, 1024, 2048, 4096)]
    found = pd.DataFrame(sizes, columns=["tokens", "hidden"])
    found = found.assign(
        bench="pack", implementation="torch", gpu_uuid="GPU-1", status="ok", experts=8, dtype="bf16", weights="bf16"
    )
    found = found.assign(compulsory_bytes=found["tokens"] * found["hidden"] * 2, median_us=found["tokens"] * 0.1)
    found = found.assign(cell_hash=[f"{number:016x}" for number in range(len(found))])
    found = found.assign(q1_us=found["median_us"], q3_us=found["median_us"] * 1.01)
    return found.assign(**columns)


def doubted(rows):
    return list(rows.index[anomalies.found(rows).notna()])


@pytest.mark.parametrize("factor", [1, 0.4, 2.5])
def test_times_that_follow_the_bytes_or_stay_constant_are_believed(factor: float) -> None:
    rows = grid()
    rows.loc[4, "median_us"] *= factor
    assert doubted(rows) == []
    assert doubted(grid(median_us=7.0)) == []


@pytest.mark.parametrize("factor", [8, 1 / 8])
@pytest.mark.parametrize("where", range(10))
def test_one_time_out_of_line_is_doubted_and_its_neighbours_are_not(where: int, factor: float) -> None:
    rows = grid()
    rows.loc[where, "median_us"] *= factor
    assert doubted(rows) == [where]
    (said,) = anomalies.found(rows).dropna()
    assert (" µs or less:" if factor > 1 else " µs or more:") in said


def alike(*times, **columns):
    """A cell whose loads alone differ from row to row, with these times in µs."""
    skews = [0.1 * number for number in range(len(times))]
    rows = pd.concat([grid().head(1)] * len(times), ignore_index=True)
    return rows.assign(skew=skews, median_us=np.array(times, float), q1_us=1.0, q3_us=1.0, **columns)


def test_most_neighbours_have_to_speak_against_a_time_and_by_more_than_the_factor() -> None:
    assert doubted(alike(3, 1, 1, 1, 1)) == doubted(alike(1, 3, 3, 3, 3)) == [], "the factor itself is allowed"
    assert doubted(alike(10, 10, 10, 1, 1)) == [3, 4], "half of their neighbours speak against the others"
    (slow,), (fast,) = (anomalies.found(alike(*times)).dropna() for times in ((20, 2, 2, 2, 2), (2, 20, 20, 20, 20)))
    assert slow == "20 µs, where 4 of 4 neighbouring cells allow 2 µs or less: a factor of 10 (3 is allowed)"
    assert fast == "2 µs, where 4 of 4 neighbouring cells allow 20 µs or more: a factor of 10 (3 is allowed)"


def test_what_cells_do_not_need_widens_nothing() -> None:
    """Nor does a count that is unknown, or one of zero beside others, which is silent too."""
    rows = grid(flops=1e9)
    rows.loc[4, ["flops", "median_us"]] = 0.0, rows.at[4, "median_us"] / 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doubted(rows) == [4]
        for flops in (None, 0.0):
            assert doubted(alike(5, 1, 1, 1, 1, flops=flops)) == [0]


def test_a_capacity_is_another_way() -> None:
    assert doubted(alike(20, 1, 1, 1, 1)) == [0]
    assert doubted(alike(20, 1, 1, 1, 1, capacity_factor=[1.0, None, None, None, None])) == []


def test_scatter_alone_is_a_doubt() -> None:
    rows = grid()
    rows.loc[2, ["q1_us", "q3_us"]] = 2.0, 3.0  # as much as is allowed
    rows.loc[3, "q3_us"] = rows.loc[3, "q1_us"] * 1.6
    assert anomalies.found(rows)[3] == "the middle half of its samples spans a factor of 1.6 (1.5 is allowed)"
    assert doubted(rows) == [3]
    rows.loc[3, "median_us"] *= 100
    assert "is allowed); the middle half of its samples spans" in anomalies.found(rows)[3], "both are said"


def test_rows_of_another_way_are_no_neighbours() -> None:
    """Other cards, other code, quantised formats, a capacity where others have none: each with times of its own."""
    for column, value in (
        ("gpu_uuid", "GPU-2"),
        ("implementation", "cute"),
        ("weights", "int4_g128"),
        ("capacity_factor", 1.0),
        ("router", "hash"),
    ):
        slow = grid(**{column: value})
        slow["median_us"] *= 20
        both = pd.concat([grid(), slow.assign(cell_hash="s" + slow["cell_hash"])], ignore_index=True)
        assert doubted(both) == [], column
    also = pd.concat([grid(), grid(skew=0.7, median_us=grid()["median_us"] * 20)], ignore_index=True)
    assert doubted(also) == [], "half of all cannot outvote the other half"


def test_rows_without_a_time_and_too_few_neighbours_say_nothing() -> None:
    rows = grid()
    rows.loc[1:, "status"] = "unsupported"
    rows.loc[1:, ["median_us", "q1_us", "q3_us"]] = np.nan
    assert doubted(rows) == []
    three = grid().head(3)
    three.loc[0, "median_us"] *= 1000
    assert doubted(three) == [], "two neighbours are too few"
    four = grid().head(4)
    four.loc[0, "median_us"] *= 1000
    assert doubted(four) == [0], "three are enough"


def test_the_anomalies_of_document_003_are_caught_and_its_steady_rows_are_not() -> None:
    """581 ms among 18, 8057, 5655 and 4605 ms; and much of a stretch of the run in which the same products took up to 41 times less."""
    rows = as_rows()
    words = anomalies.found(rows)
    assert rows["extreme"].sum() == 4 and words[rows["extreme"]].notna().all()
    steady = rows["machine"] == "steady"
    assert steady.sum() > 300 and words[steady].isna().all()
    same_product = rows[(rows["implementation"] == "base_mm_ms") & (rows["experts"] == 32) & ~steady]
    assert words[same_product.index].notna().sum() >= 2, "2.1 and 12 ms where fourteen other tables say 73 ms"


@pytest.mark.slow
def test_of_the_stored_rows_at_most_one_in_200_is_doubted() -> None:
    """Beside their neighbours; a time that scatters in itself is no false alarm, and is of a loop that waits for the host."""
    rows = pd.concat([records.frame(records.read(path)) for path in STORED], ignore_index=True)
    ok, words = (rows["status"] == "ok").sum(), anomalies.found(rows)
    scatter = words.str.startswith("the middle half", na=False)
    assert ok > 600 and (words.notna() & ~scatter).sum() <= ok / 200
    assert scatter.sum() <= ok / 100 and set(rows.loc[scatter, "implementation"]) <= {"torch_loop", "dequant_loop"}


def test_most_times_out_of_line_are_caught_in_a_real_grid() -> None:
    """Not all: some rows have too few neighbours, others neighbours of very different sizes."""
    rows = records.frame(records.read(ROOT / "results/nvidia-h200/measurements.parquet"))
    ok = rows.index[rows["status"] == "ok"]
    caught = []
    for number, index in enumerate(np.random.default_rng(17).choice(ok, 24, replace=False)):
        planted = rows[rows["bench"] == rows.at[index, "bench"]].copy()
        planted.loc[index, "median_us"] *= (20, 1 / 20)[number % 2]
        caught.append(anomalies.found(planted)[index] is not None)
    assert sum(caught) > len(caught) / 2


def test_the_cells_that_are_measured_again_are_few_and_the_worst_first() -> None:
    rows = pd.concat([grid(), grid(implementation="cute")], ignore_index=True)
    rows["q3_us"] = rows["q1_us"] * 1.01
    rows.loc[[2, 5, 6, 7, 17], "q3_us"] *= 2
    assert anomalies.repeated(rows)[0] == rows.at[7, "cell_hash"] and len(anomalies.repeated(rows)) == 3
    many = pd.concat([grid().assign(cell_hash=f"{n}" + grid()["cell_hash"]) for n in range(20)], ignore_index=True)
    many["q3_us"] *= 2
    assert len(anomalies.repeated(many)) == 10, "5 % of 200 cells"
    assert anomalies.repeated(grid()) == []


def stored(**columns):
    """Three rows as cells' files have them, the first of which is in doubt."""
    rows = [dict.fromkeys(records.COLUMNS) for _ in range(3)]
    for number, row in enumerate(rows):
        row |= {
            "cell_hash": f"{number}",
            "implementation": "torch",
            "bench": "pack",
            "status": "ok",
            "gpu_uuid": "GPU-1",
            "suspect": False,
        }
        row |= {"median_us": 10.0, "q1_us": 10.0, "q3_us": 10.0} | ({"q3_us": 20.0} | columns if number == 0 else {})
    return pa.Table.from_pylist(rows, records.SCHEMA)


def second(**columns):
    row = {
        "cell_hash": "0",
        "implementation": "torch",
        "status": "ok",
        "gpu_uuid": "GPU-1",
        "median_us": 10.5,
        "ci_low_us": 10.0,
        "ci_high_us": 11.0,
    }
    return anomalies.seconds(stored().to_pandas(), [row | columns])


def test_a_second_time_that_agrees_confirms_the_first() -> None:
    first, other, _ = anomalies.with_anomalies(stored(), second()).to_pylist()
    assert anomalies.with_anomalies(stored(), second(median_us=11.0)).to_pylist()[0]["again"] == "confirmed"
    assert first["again"] == "confirmed" and first["suspect"] is False and first["suspect_reason"] is None
    assert (first["again_us"], first["again_ci_low_us"], first["again_ci_high_us"]) == (10.5, 10.0, 11.0)
    assert first["anomaly"].startswith("the middle half")
    assert other["anomaly"] is other["again"] is other["again_us"] is None and other["suspect"] is False


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"median_us": 20.0}, "20 µs, a factor of 2 apart"),
        ({"median_us": 5.0, "gpu_uuid": "GPU-2"}, "5 µs, a factor of 2 apart, on another card"),
        ({"status": "crashed", "median_us": None}, "the second time crashed"),
    ],
)
def test_a_row_that_the_second_time_does_not_confirm_is_suspect(columns: dict, said: str) -> None:
    row = anomalies.with_anomalies(stored(suspect_reason="drift"), second(**columns)).to_pylist()[0]
    assert row["again"] == said and row["suspect"] is True and row["median_us"] == 10.0
    assert row["suspect_reason"].startswith("drift; the middle half") and row["suspect_reason"].endswith(said)


def test_a_second_time_of_other_rows_counts_for_nothing() -> None:
    """That of a cell which was measured anew since, or no file at all."""
    old = second().set_column(4, "first_us", pa.array([9.0]))
    assert old.column_names[4] == "first_us"
    for again in (old, None):
        row = anomalies.with_anomalies(stored(), again).to_pylist()[0]
        assert (row["again"], row["again_us"], row["suspect"]) == ("not measured again", None, True)


def halved(table: pa.Table) -> pa.Table:
    """The rows after a rule of another column."""
    return replaced(table, {"ci_low_us": [5.0] * len(table)})


def test_a_child_finds_what_this_process_would_while_other_rules_run(monkeypatch: Any) -> None:
    alone = anomalies.with_anomalies(halved(stored()), second())
    monkeypatch.setattr(anomalies, "_MANY_ROWS", 1)
    assert anomalies.with_anomalies(stored(), second(), [halved]).equals(alone, check_metadata=True)
    assert alone["anomaly"][0].as_py() and not multiprocessing.active_children()


def test_a_child_that_is_killed_or_has_no_use_is_not_left(monkeypatch: Any) -> None:
    monkeypatch.setattr(anomalies, "_MANY_ROWS", 1)
    with pytest.raises(ZeroDivisionError):
        anomalies.with_anomalies(stored(), None, [lambda _: 1 / 0])
    monkeypatch.setattr(anomalies, "_doubts", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="looks for times in doubt: got 'a death'"):
        anomalies.with_anomalies(stored(), None)
    assert not multiprocessing.active_children()


def test_other_rules_neither_write_what_is_read_of_times_in_doubt_nor_read_what_is_said_of_these() -> None:
    rules = (recomputed, ratios, verdicts)
    read, written = {*anomalies._READ, *anomalies._ROW}, {*anomalies._TOLD}
    of_rules = [{*recomputed._WRITTEN}, {*ratios._TOLD}, {"noise_floor", "verdict", "best_verdict"}]
    assert not read & set().union(*of_rules) and not written & set().union(*(rule._READ for rule in rules))


def test_all_axes_are_of_a_part_that_neighbours_know() -> None:
    assert {axis.part for axis in AXES.values()} == {"way", *anomalies.PARTS}


def test_what_is_kept_of_second_times_can_be_read(tmp_path: Path) -> None:
    pq.write_table(second(), tmp_path / "again.parquet")
    assert pq.read_table(tmp_path / "again.parquet").to_pylist() == second().to_pylist()


def test_the_most_cells_that_are_measured_again_are_a_share_of_cells_not_of_rows() -> None:
    """200 cells of two rows each: 5 % are 10."""
    many = pd.concat([grid().assign(cell_hash=f"{n}" + grid()["cell_hash"]) for n in range(20)], ignore_index=True)
    many["q3_us"] *= 2
    both = pd.concat([many, many.assign(implementation="cute")], ignore_index=True)
    assert len(anomalies.repeated(both)) == 10


def test_what_neighbours_allow_is_said_by_the_middle_one() -> None:
    """Three bounds, of which one is far off: 10 times the middle one."""
    said = anomalies._against(100.0, np.array([1.0, 1.0, 1.0]), np.array([9.0, 10.0, 30.0]))
    assert said is not None and "3 of 3" in said and "a factor of 10 " in said
    assert anomalies._against(100.0, np.array([1.0] * 4), np.array([10.0, 10.0, 100.0, 100.0])) is None, (
        "half is no more"
    )
