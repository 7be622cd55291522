"""A file that is damaged, edited or of something else is refused in one line that names it; nothing is collected from it."""

import contextlib
import io
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_routing_bench.cli import report, status
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.quality import run_rows
from moe_routing_bench.store import cell_files, companions, paths, records, rows
from moe_routing_bench.store.parquet import read_table, write_table
from moe_routing_bench.study import progress
from moe_routing_bench.traces import reading
from moe_routing_bench.workload import trace
from moe_routing_kernels.errors import UserError

JOB = Job(cell_of("gate", tokens=64, experts=8, top_k=2, router="softmax_topk", dtype="fp32"), ("torch",), Settings())
THEN = "2026-11-21T06:55:00.000+00:00"
ROW = dict(JOB.cell.values) | {
    "schema_version": rows.SCHEMA_VERSION,
    "bench": "gate",
    "implementation": "torch",
    "status": "ok",
    "median_us": 1.5,
    "samples_us": [1.0 + i / 7 for i in range(300)],
    "platform": "cpu",
    "started_at": THEN,
    "ended_at": THEN,
    "cell": JOB.cell.key,
    "cell_hash": JOB.hash,
    "code_fingerprint": "0" * 16,
}


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """The file of a measured cell."""
    path = tmp_path / "cell.parquet"
    rows.write(path, [ROW], JOB.spec)
    return path


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError) as error:
        cell_files.collect({path: JOB}, "cpu")
    text = str(error.value)
    assert str(path) in text and words in text and "\n" not in text and len(text) < 500
    there = path.exists()
    assert (
        "`moe-routing-bench prune --refused" if there else "run `snakemake`, which measures what is missing"
    ) in text
    assert cell_files.refused({path: JOB}, "cpu") == ([path] * there, [])


def with_edited(path: Path, **values: Any) -> None:
    """As an editor of Parquet leaves it: the metadata stay."""
    table = pq.read_table(path)
    for name, value in values.items():
        column = pa.array([value], table.schema.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, path)


@pytest.mark.fault("edited row")
@pytest.mark.parametrize(
    ("column", "value"), [("median_us", 0.5), ("code_fingerprint", "f" * 16), ("status", "crashed"), ("samples_us", [])]
)
def test_an_edited_row(column: str, value: object, cell: Path) -> None:
    assert len(cell_files.collect({cell: JOB}, "cpu")) == 1
    with_edited(cell, **{column: value})
    refused(cell, "its rows are not those that were written")


FALSE = {
    "another platform": ({"platform": "nvidia-h200"}, "platform 'nvidia-h200' in place of 'cpu'"),
    "another bench": ({"bench": "pack"}, "bench 'pack' in place of 'gate'"),
    "another cell": ({"cell": "other"}, "cell 'other' in place of"),
    "another spec": ({"cell_hash": "0" * 16}, "cell_hash '0000000000000000' in place of"),
    "another size": ({"tokens": 128}, "tokens 128 in place of 64"),
    "a status that is none": ({"status": "fine"}, "status 'fine'"),
    "ok without a time": ({"median_us": None}, "status 'ok' with a median_us of None"),
    "no time": ({"median_us": 0.0}, "status 'ok' with a median_us of 0.0"),
    "NaN": ({"median_us": float("nan")}, "status 'ok' with a median_us of nan"),
    "of the future": ({"ended_at": (datetime.now(UTC) + timedelta(days=1)).isoformat()}, "dates from"),
    "ended before it began": ({"ended_at": "2026-11-20T06:55:00.000+00:00"}, "dates from"),
    "no date": ({"started_at": "yesterday"}, "dates from yesterday"),
}


@pytest.mark.fault("false row")
@pytest.mark.parametrize("false", FALSE)
def test_a_row_that_cannot_be_of_this_job(false: str, cell: Path) -> None:
    values, words = FALSE[false]
    rows.write(cell, [ROW | values], JOB.spec)
    refused(cell, words)


def test_checks_of_all_rows_at_once_find_what_those_of_each_row_do(tmp_path: Path, monkeypatch: Any) -> None:
    """Of each kind of false row, a file among good ones is named, with the same words; alone, the good ones give the same table."""
    files, good = {}, {}
    for number, (values, _) in enumerate(
        [({}, ""), ({"tokens": None}, ""), *FALSE.values(), ({"status": "crashed"}, "")]
    ):
        job = Job(JOB.cell, JOB.implementations, Settings(min_blocks=10 + number))
        path = tmp_path / f"{number}.parquet"
        rows.write(path, [ROW | {"cell_hash": job.hash} | values], job.spec)
        files[path] = job
        if not values or "crashed" in values.values():
            good[path] = job
    quick, quickly = cell_files.collect(good, "cpu"), cell_files.refused(files, "cpu")
    with pytest.raises(UserError) as at_once:
        cell_files.collect(files, "cpu")
    monkeypatch.setattr(cell_files, "_are_true", lambda *_: False)
    assert cell_files.collect(good, "cpu").equals(quick, check_metadata=True)
    assert cell_files.refused(files, "cpu") == quickly == (sorted(set(files) - set(good)), [])
    with pytest.raises(UserError) as each:
        cell_files.collect(files, "cpu")
    assert str(each.value) == str(at_once.value)


@pytest.mark.parametrize("false", FALSE)
def test_no_false_row_passes_the_checks_of_all_rows_at_once(false: str) -> None:
    true = records.completed(pa.Table.from_pylist([ROW], records.SCHEMA))
    assert cell_files._are_true(true, [(JOB, 1)], "cpu")
    odd = records.completed(pa.Table.from_pylist([ROW, ROW | FALSE[false][0]], records.SCHEMA))
    assert not cell_files._are_true(odd, [(JOB, 1), (JOB, 1)], "cpu")


@pytest.mark.fault("flipped bit")
@pytest.mark.parametrize("part", range(8))
def test_flipped_bits(part: int, cell: Path) -> None:
    """In data, headers and footer: refused, or what is read is what was written."""
    whole, known = cell.read_bytes(), records.read(cell)
    for place in range(len(whole) * part // 8, len(whole) * (part + 1) // 8, 211):
        cell.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            found = cell_files.collect({cell: JOB}, "cpu")
        except UserError as error:
            text = str(error)
            assert "\n" not in text and str(cell) in text
        else:
            assert found.equals(known), place


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def text(path: Path) -> None:
    path.write_text("no Parquet\n")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.fault("unreadable file")
@pytest.mark.parametrize("damage", [truncated, half, empty, zeros, text, folder, gone, dangling])
def test_a_file_that_is_no_whole_parquet(damage: Callable[[Path], None], cell: Path) -> None:
    damage(cell)
    refused(cell, "a readable Parquet file" if cell.exists() else "1 of 1 missing")


NEWER = ROW | {"schema_version": rows.SCHEMA_VERSION + 1}


def names_newer(text: str, path: Path, allowed: int) -> None:
    """A file, its version, the versions that are read, and what to do."""
    assert all(word in text for word in (str(path), f"got {allowed + 1}", f"allowed: {allowed}", "keep", "update"))
    assert "\n" not in text and "delete" not in text and "prune" not in text and len(text) < 500


@pytest.mark.fault("newer version's file")
def test_a_newer_cell_is_named_and_kept(monkeypatch, tmp_path: Path) -> None:
    """Also with a column that this version does not know, and when damaged cells are set aside."""
    monkeypatch.chdir(tmp_path)
    other = Job(JOB.cell, ("triton",), Settings())
    path, damaged = (paths.cell_file("cpu", job) for job in (JOB, other))
    damaged = damaged.with_name("damaged.parquet")
    path.parent.mkdir(parents=True)
    table = pa.Table.from_pylist([NEWER], schema=records.SCHEMA).append_column("new", pa.array([1]))
    write_table(path, table)
    damaged.write_bytes(b"no Parquet")
    for read in (lambda: cell_files.summary(path), lambda: cell_files.collect({path: JOB}, "cpu")):
        with pytest.raises(UserError) as error:
            read()
        names_newer(str(error.value), path, rows.SCHEMA_VERSION)
    names_newer(str(progress.of_cells({path: JOB})).splitlines()[1], path, rows.SCHEMA_VERSION)
    assert cell_files.refused({path: JOB, damaged: other}, "cpu") == ([damaged], [path])
    monkeypatch.setattr(status, "jobs_of", lambda config: [JOB])
    monkeypatch.setattr(status, "config_or_last", lambda *given: ({}, "cpu", "a config"))
    before, printed = path.read_bytes(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status.prune(refused=True, remove=True)
    assert path.read_bytes() == before and str(path) in printed.getvalue()
    assert not paths.trash("cpu").exists()


@pytest.mark.fault("newer version's file")
def test_a_newer_training_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    row = {"schema_version": run_rows.SCHEMA_VERSION + 1, "platform": "cpu"}
    write_table(path, pa.Table.from_pylist([row], schema=run_rows.SCHEMA).append_column("new", pa.array([1])))
    for read in (lambda: run_rows.read(path), lambda: run_rows.collect({path: None}, {})):
        with pytest.raises(UserError) as error:
            read()
        names_newer(str(error.value), path, run_rows.SCHEMA_VERSION)


@pytest.mark.fault("unreadable file")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("results/cpu/measurements.parquet", "`moe-routing-bench collect --platform cpu`"),
        ("results/cpu.new/cells/gate/a.parquet", "`moe-routing-bench prune --refused --remove --platform cpu.new`"),
        (
            "results/cpu/claims/a b.parquet",
            "`mv 'results/cpu/claims/a b.parquet' 'results/cpu/claims/a b.parquet.damaged'`",
        ),
        ("mine.parquet", "`mv mine.parquet mine.parquet.damaged`"),
    ],
)
def test_a_damaged_file_that_is_read_alone(name: str, command: str, tmp_path: Path, monkeypatch) -> None:
    """A command that replaces it, whatever has asked for it."""
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for damage in (lambda: path.write_bytes(b"no Parquet"), lambda: write_table(path, pa.table({"a": [1]}))):
        damage()
        with pytest.raises(UserError) as error:
            records.read(path)
        assert name in str(error.value) and command in str(error.value) and len(str(error.value)) < 500


def collected(path: Path) -> Any:
    return cell_files.collect({path: JOB}, "cpu")


READERS: dict[str, tuple[Callable[[Path], Any], pa.Schema]] = {
    "a cell": (collected, records.SCHEMA),
    "a table": (records.read, records.SCHEMA),
    "some columns": (lambda path: records.read_some(path, ["bench"]), records.SCHEMA),
    "training runs": (run_rows.read, run_rows.SCHEMA),
    "accuracy": (lambda path: companions.read_matrix(path, "cpu"), companions.MATRIX),
    "a trace": (lambda path: trace.read(path, 1, 4, 1), pa.schema({"expert_ids": pa.list_(pa.int64())})),
    "a foreign trace": (lambda path: reading.read(path), pa.schema({"expert_ids": pa.list_(pa.int64())})),
}


@pytest.mark.fault("doubled column")
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_a_doubled_column(reader: str, sealed: bool, tmp_path: Path) -> None:
    read, schema = READERS[reader]
    path, name = tmp_path / "rows.parquet", schema.names[0]
    table = pa.Table.from_pylist([{"expert_ids": [1]} if "trace" in reader else {"schema_version": 5}], schema=schema)
    table = table.append_column(name, table[name])
    (write_table if sealed else lambda path, table: pq.write_table(table, path))(path, table)
    with pytest.raises(UserError) as error:
        read(path)
    text = str(error.value)
    assert str(path) in text and "\n" not in text and len(text) <= 500
    assert f"2 columns '{name}'" in text


@pytest.mark.fault("doubled column")
def test_a_doubled_column_that_is_not_read(tmp_path: Path) -> None:
    write_table(path := tmp_path / "rows.parquet", pa.table([[1], [2], [3]], names=["a", "b", "b"]), schema=False)
    with pytest.raises(OSError, match="2 columns 'b'"):
        read_table(path, without=("b",))


@pytest.mark.fault("another platform's table")
@pytest.mark.parametrize("source", ["measurements", "quality"])
def test_a_table_of_another_platform_is_not_drawn(source: str, tmp_path: Path, monkeypatch) -> None:
    """As when `measurements.parquet` is copied to another folder."""
    monkeypatch.chdir(tmp_path)
    if source == "measurements":
        table = pa.Table.from_pylist([ROW | {"platform": "nvidia-h200"}], schema=records.SCHEMA)
    else:
        table = pa.Table.from_pylist(
            [{"schema_version": run_rows.SCHEMA_VERSION, "platform": "nvidia-h200"}], schema=run_rows.SCHEMA
        )
    for folder, fits in (("nvidia-h200.again", True), ("cpu", False)):
        write_table(paths.TABLES[source](folder), table)
        if fits:
            assert len(report.rows_of(source, folder)) == 1
        else:
            with pytest.raises(UserError, match=r"platform of the rows of .*cpu.*: got 'nvidia-h200'; allowed: cpu"):
                report.rows_of(source, folder)
