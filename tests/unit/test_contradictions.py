"""Numbers of a row that cannot be measured are said; all stored rows are free of them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_routing_bench import statistics
from moe_routing_bench.store import records
from moe_routing_bench.store.contradictions import COLUMNS, contradiction, is_free
from moe_routing_bench.store.records import COLUMNS as COLUMNS_OF_TYPE
from moe_routing_bench.store.records import SCHEMA
from moe_routing_bench.store.rows import IDENTITY, MEASURED

STORED = sorted((Path(__file__).parents[2] / "results").glob("*/measurements.parquet"))


def row(**changes) -> dict:
    """A row of 20 blocks of 3 samples about 100 us, with these changes."""
    blocks = (100 + np.random.default_rng(5).normal(size=(20, 3))).tolist()
    found: dict[str, Any] = statistics.summarize(blocks) | {
        "tokens": 64,
        "read_bytes": 1000,
        "write_bytes": 500,
        "flops": 7000,
    }
    found |= {"compulsory_bytes": 1500, "gb_per_s": 1500 / found["median_us"] / 1e3}
    found |= {"tflops": 7000 / found["median_us"] / 1e6, "tokens_per_s": 64e6 / found["median_us"]}
    found |= {"speedup": 1.5, "speedup_ci_low": 1.4, "speedup_ci_high": 1.6, "speedup_p": 0.01}
    return found | {"started_at": "2026-11-28T20:00:00+00:00", "ended_at": "2026-11-28T20:00:09+00:00"} | changes


def test_a_row_as_it_is_measured() -> None:
    assert contradiction(row()) == contradiction({}) == contradiction(row(samples_us=None, speedup=None)) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_us": 101.0}, "min_us 101 is above p5_us"),
        ({"median_us": 1.0}, "q1_us"),
        ({"ci_low_us": 99.9, "samples_us": None}, "median 99.7479 is not within"),
        ({"median_us": 99.99, "ci_low_us": 90.0}, "median_us is 99.99, that of the samples"),
        ({"max_us": 200.0}, "max_us is 200, that of the samples"),
        ({"min_us": float("nan")}, "min_us is nan"),
        ({"min_us": -1.0}, "min_us is -1.0"),
        ({"ci_low_us": 120.0, "ci_high_us": 130.0}, "median 99.7479 is not within 120 to 130"),
        ({"ci_low_us": 101.0, "ci_high_us": 90.0}, "is not within 101 to 90"),
        ({"samples": 61}, "there are 60 samples, not 61"),
        ({"blocks": 21}, "there are medians of 20 blocks, not of 21"),
        ({"block_medians_us": [1.0] * 20}, "a block's median is outside of the samples"),
        ({"block_medians_us": [100.0] * 19 + [1.0]}, "a block's median is outside of the samples"),
        ({"block_medians_us": [100.0] * 19 + [999.0]}, "a block's median is outside of the samples"),
        ({"speedup": 2.0}, "speedup 2 is not within 1.4 to 1.6"),
        ({"speedup_p": 1.5}, "speedup_p is 1.5"),
        *(
            (dict(zip((name, f"{name}_ci_low", f"{name}_ci_high"), numbers, strict=True)), f"{name} 2 is not within")
            for name in ("best_speedup", "twin_speedup")
            for numbers in ((2.0, 1.0, 1.5), (2.0, 2.5, 3.0))
        ),
        ({"gb_per_s": 1.0}, "gb_per_s is 1, compulsory_bytes over median_us"),
        ({"tflops": 1.0}, "tflops is 1, flops over median_us"),
        ({"tokens_per_s": 1.0}, "tokens_per_s is 1, tokens over median_us"),
        ({"write_bytes": 501}, "compulsory_bytes 1500 are not 1000 and 501"),
        ({"ended_at": "2026-11-28T19:59:59+00:00"}, "it began at"),
        ({"ended_at": "yesterday"}, "it began at"),
    ],
)
def test_a_contradiction_is_said(changes, said) -> None:
    assert said in contradiction(row(**changes))


@pytest.mark.parametrize("name", sorted({*COLUMNS, "tokens"} - {"started_at", "ended_at"}))
def test_all_rows_at_once_are_as_free_as_each(name: str) -> None:
    """A table is free where each of its rows is, whatever one number is; but for numbers whose sums are not exact, which are looked at one by one."""
    whole = row(samples_us=None)
    kind = COLUMNS_OF_TYPE[name]
    value = whole.get(name)
    factors = (0.0, -1.0, 1 - 2e-6, 1 - 5e-7, 1 + 5e-7, 1 + 2e-6, 1.1, 10.0)
    given = [None, 0, -1, 1, *([value * factor for factor in factors] if value is not None else [])]
    given = [None if one is None else int(one) for one in given] if kind == pa.int64() else [*given, math.nan, math.inf]
    for one in given:
        changed = whole | {name: one}
        table = pa.Table.from_pylist([whole, changed, {}], SCHEMA)
        assert is_free(table) == (contradiction(changed) == ""), (one, contradiction(changed))
    if kind == pa.int64():
        assert not is_free(pa.Table.from_pylist([whole | {name: 2**60}], SCHEMA))


def test_tables_have_the_columns() -> None:
    assert set(COLUMNS) <= {*IDENTITY, *MEASURED}


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_no_stored_row_contradicts_itself(path: Path) -> None:
    rows = pq.read_table(path).to_pylist()
    assert rows and [found for one in rows if (found := contradiction(one))] == []
    assert is_free(records.read(path))
