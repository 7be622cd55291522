"""Cells with quantised weights are held against an implementation that dequantises them, and say so."""

import pyarrow as pa
import pytest
from rows import frame, one

from moe_routing_bench import intervals
from moe_routing_bench.comparison import ratios, verdicts
from moe_routing_bench.report import findings
from moe_routing_bench.store.records import SCHEMA

KERNEL = [10.0, 11.0, 10.5, 10.2]
SLOW = [20.0, 22.0, 21.0, 20.4]


def row(name: str, blocks: list[float], cell: str = "c", **values: object) -> dict[str, object]:
    """A row without a baseline, as a worker leaves it where that of the bench cannot run."""
    known = {"cell": cell, "cell_hash": cell, "weights": "int4_g128", "dtype": "bf16", "set_aside": 0, "baseline": None}
    times = {"block_medians_us": blocks, "median_us": blocks[0]} if blocks else {}
    return one("experts", name, **{**known, **times, **values})


def told(*rows: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Baseline and speed-up of each row of one cell."""
    found = ratios.against_dequantised(rows)
    return {str(one["implementation"]): (one["baseline"], one.get("speedup")) for one in found}


def test_the_ratio_is_paired_within_rounds() -> None:
    """As a worker makes it, to the last bit; the baseline itself has 1."""
    rows = [row("dequant", SLOW), row("cute_quantised", KERNEL), row("dequant_loop", KERNEL)]
    found = {one["implementation"]: one for one in ratios.against_dequantised(rows)}
    names = ("speedup", "speedup_ci_low", "speedup_ci_high", "speedup_p")
    assert tuple(found["cute_quantised"][name] for name in names) == intervals.paired_ratio(SLOW, KERNEL)
    assert found["cute_quantised"]["speedup"] == pytest.approx(2)
    assert {one["baseline"] for one in found.values()} == {"dequant"} and found["dequant"]["speedup"] == 1


def test_blocks_that_were_set_aside_leave_no_pairs() -> None:
    """Which rounds the others are of is not known."""
    rows = [row("dequant", SLOW, set_aside=1), row("cute_quantised", KERNEL[:3])]
    kernel = ratios.against_dequantised(rows)[1]
    assert kernel["speedup"] == intervals.unpaired_ratio(SLOW, KERNEL[:3])[0]


def test_the_next_one_stands_in() -> None:
    """Quantised rows are beyond `dequant`; where neither ran, there is no speed-up."""
    lost = row("dequant", [], status="unsupported")
    assert told(lost, row("dequant_loop", SLOW), row("cute_fp8", KERNEL))["cute_fp8"] == (
        "dequant_loop",
        pytest.approx(2),
    )
    assert told(lost, row("cute_fp8", KERNEL)) == {"dequant": (None, None), "cute_fp8": (None, None)}


def test_other_cells_stay_as_they_are() -> None:
    """With a baseline of their own, or of plain weights that `dequant` would never run."""
    assert told(row("dequant", SLOW), row("cute", KERNEL, baseline="torch_grouped_mm"))["dequant"] == (None, None)
    assert told(row("dequant", SLOW, weights="bf16"), row("cute", KERNEL, weights="bf16"))["cute"] == (None, None)


def test_a_run_is_told_cell_by_cell() -> None:
    """Rows of cells that lie between each other keep their order, and verdicts and findings follow."""
    rows = [
        row("dequant", SLOW),
        row("dequant", KERNEL, "d"),
        row("cute_quantised", KERNEL),
        row("cute_quantised", SLOW, "d"),
    ]
    rows += [row("cute", KERNEL, "plain", weights="bf16", baseline="torch_grouped_mm", speedup=3.0)]
    table = ratios.with_baselines(pa.Table.from_pandas(frame(*rows), SCHEMA))
    assert table["implementation"].to_pylist() == [one["implementation"] for one in rows]
    assert table["speedup"].to_pylist() == pytest.approx([1.0, 1.0, 2.0, 0.5, 3.0])
    assert table.schema == SCHEMA and verdicts.judged(table.to_pandas())["verdict"].isna().all()
    said = [one.text for one in findings.findings(table.to_pandas())]
    assert any("experts: " in text and "1.00x" in text and "dequant" in text for text in said)
    assert any("experts: " in text and "faster than torch_grouped_mm" in text for text in said)


def test_rows_of_a_cell_have_the_baseline_of_their_own_card() -> None:
    rows = [row("dequant", SLOW), row("cute_quantised", KERNEL)]
    rows += [row("dequant", [40.0] * 4, gpu_uuid="GPU-2"), row("cute_quantised", [10.0] * 4, gpu_uuid="GPU-2")]
    table = ratios.with_baselines(pa.Table.from_pandas(frame(*rows), SCHEMA))
    assert table["speedup"].to_pylist() == pytest.approx([1.0, 2.0, 1.0, 4.0])
