"""Rows in Parquet: what is written comes back, a file appears whole or not at all, and stored data stays readable."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.errors import UserError
from moe_routing_bench.grid.job import Job
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.store import records, rows

ROOT = Path(__file__).parents[2]
ROW = {
    "schema_version": rows.SCHEMA_VERSION, "bench": "gate", "implementation": "torch", "status": "ok", "median_us": 1.5,
    "samples_us": [1.0, 2.0], "stage_us": [("pack", 1.0), ("combine", 2.0)], "capacity_factor": None, "suspect": False,
}  # fmt: skip


def job(**change):
    cell = cell_of("gate", tokens=64, experts=8, top_k=2, router="softmax_topk", dtype="fp32")
    return Job(cell, change.get("implementations", ("torch",)), Settings(min_blocks=change.get("min_blocks", 10)))


def test_rows_come_back_as_they_were(tmp_path):
    path = tmp_path / "new" / "rows.parquet"
    rows.write(path, [ROW, {**ROW, "implementation": "cute"}], "the spec")
    table = records.read(path)
    first, second = table.to_pylist()
    assert {name: first[name] for name in ROW} == ROW and second["implementation"] == "cute"
    assert [name for name in first if name not in ROW and first[name] is not None] == []
    assert table.column_names == list(records.COLUMNS) and records.spec_of(table) == "the spec"


def test_a_column_that_the_schema_lacks_is_a_mistake_of_the_code(tmp_path):
    with pytest.raises(KeyError, match="speed"):
        rows.write(tmp_path / "rows.parquet", [{**ROW, "speed": [1]}], "")
    assert list(tmp_path.iterdir()) == []


def test_columns_in_another_order_are_read_in_the_schema_s(tmp_path):
    path = tmp_path / "rows.parquet"
    rows.write(path, [ROW], "")
    table = pq.read_table(path)
    pq.write_table(table.select(sorted(table.column_names)), path)
    assert records.read(path).column_names == list(records.COLUMNS)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    rows.write(path, [ROW], "old")
    before = path.read_bytes()

    def half(table, target, **_):
        Path(target).write_bytes(b"PAR1")
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(OSError, match="no space"):
        rows.write(path, [{**ROW, "status": "crashed"}], "new")
    with pytest.raises(OSError, match="no space"):
        rows.write(tmp_path / "other.parquet", [ROW], "new")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("asked", [job(min_blocks=11), job(implementations=("torch", "cute"))])
def test_collect_refuses_a_file_of_another_job_and_takes_its_own(tmp_path, asked):
    path, measured = tmp_path / "cell.parquet", job()
    rows.write(path, [ROW], measured.spec)
    assert records.collect({path: measured}).num_rows == 1
    with pytest.raises(UserError, match=f"measured for spec {measured.hash}, the config asks for {asked.hash}"):
        records.collect({path: asked})


def test_collect_joins_rows_in_order_and_forgets_the_specs(tmp_path):
    files = {}
    for index, blocks in enumerate((10, 11)):
        path, one = tmp_path / f"{index}.parquet", job(min_blocks=blocks)
        rows.write(path, [{**ROW, "median_us": float(index)}], one.spec)
        files[path] = one
    table = records.collect(files)
    assert table["median_us"].to_pylist() == [0.0, 1.0] and records.spec_of(table) is None


def test_an_implementation_without_a_row_is_noticed(tmp_path):
    path, both = tmp_path / "cell.parquet", job(implementations=("torch", "cute"))
    rows.write(path, [ROW], both.spec)
    with pytest.raises(UserError, match=r"holds \['torch'\], asked were \['torch', 'cute'\]"):
        records.collect({path: both})


def test_each_schema_has_one_version_in_one_place():
    written = {f"{p.parent.name}/{p.name}" for p in (ROOT / "src").rglob("*.py") if "SCHEMA_VERSION =" in p.read_text()}
    assert written == {"store/rows.py", "spec/run_rows.py"}  # measurements, training runs
    assert records.COLUMNS["schema_version"] == pa.int32()
    assert pa.schema(list(records.COLUMNS.items())) == records.SCHEMA


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results").glob("nvidia-*/measurements.parquet")), ids=lambda p: p.parent.name
)
def test_stored_measurements_are_of_this_schema(path):
    """A changed schema needs a new version, and the stored data measured or converted again."""
    table = records.read(path)
    assert set(table["status"].to_pylist()) <= set(rows.STATUSES) and len(table) > 100
