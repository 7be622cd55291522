"""What keeps reports of very many rows small: columns made of their distinct values, points that cover each other, lists that stay in the file."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from moe_routing_bench.figures.chart import MOST_POINTS, Scale, marks, thinned
from moe_routing_bench.report.packing import Column, plain
from moe_routing_bench.store import records, rows

NUMBERS = [
    0.0,
    -0.0,
    1.0,
    9.99995,
    99999.5,
    123456.7,
    1e-30,
    2.5e30,
    1e22,
    -3.14159265,
    math.inf,
    math.nan,
    2.0**60,
    901.00001,
]


def test_a_column_of_numbers_is_that_of_its_single_values() -> None:
    rng = np.random.default_rng(3)
    values = pd.Series([*NUMBERS, *(10.0 ** rng.uniform(-8, 12, 3000) * rng.choice([1, -1], 3000))])
    column = Column(values)
    assert [column.distinct[place] for place in column.places] == [plain(value) for value in values]
    assert len(column.distinct) == len(set(map(repr, column.distinct)))


def test_points_that_cover_each_other_are_one_and_few_points_stay() -> None:
    scales = Scale("x", "log"), Scale("y")
    rng = np.random.default_rng(3)
    points = [
        {"panel": "gate", "series": name, "x": 10.0 ** rng.uniform(0, 4), "y": rng.normal(), "doubt": None}
        for name in "ab"
        for _ in range(MOST_POINTS * 6)
    ]
    table = marks(points)
    kept, text = thinned(table, lambda _: scales)
    assert len(kept) < len(table) / 3 and f"{len(table) - len(kept):,} points" in text
    for name in "xy":  # the ends of both axes stay
        assert (kept[name].min(), kept[name].max()) == pytest.approx((table[name].min(), table[name].max()), rel=0.2)
    few = marks(points[:MOST_POINTS])
    assert thinned(few, lambda _: scales)[0] is few


def test_points_cover_each_other_where_they_are_drawn() -> None:
    """On a logarithmic axis 1 and 10 are as far apart as 10 and 100."""
    every = [1.0, 10.0, 100.0, *[1e6] * MOST_POINTS]
    table = marks([{"panel": "gate", "series": "a", "x": x, "y": 1.0} for x in every])
    assert thinned(table, lambda _: (Scale("x", "log"), Scale("y")))[0]["x"].tolist() == [1.0, 10.0, 100.0, 1e6]
    assert thinned(table, lambda _: (Scale("x"), Scale("y")))[0]["x"].tolist() == [1.0, 1e6]


def test_lists_that_are_not_asked_for_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "rows.parquet", []
    rows.write(path, [{"schema_version": rows.SCHEMA_VERSION, "bench": "gate", "expert_load": [1, 2]}], "")
    read = pq.ParquetFile.read
    monkeypatch.setattr(
        pq.ParquetFile,
        "read",
        lambda file, columns=None, **named: asked.append(columns) or read(file, columns, **named),
    )
    assert records.read(path)["expert_load"].to_pylist() == [[1, 2]]
    table = records.read(path, ["expert_load"])
    assert table["expert_load"].to_pylist() == [None] and table.schema == records.SCHEMA
    assert asked[0] is None and "expert_load" not in asked[1] and "bench" in asked[1]
    path.write_bytes(path.read_bytes().replace(b"gate", b"pack"))
    with pytest.raises(ValueError, match="not those that were written"):
        records.read(path, ["expert_load"])
