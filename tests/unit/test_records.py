"""Rows in Parquet: what is written comes back, a file appears whole or not at all, and stored data stays readable."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from campaign import sampled
from moe_routing_bench import packages
from moe_routing_bench.benches.bench import find
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.report import row_fields
from moe_routing_bench.store import cell_files, records, rows
from moe_routing_bench.store.parquet import DIGEST, SEAL, digest, outvoted, read_table, sealed_metadata, write_table
from moe_routing_bench.store.records import about
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "results").glob("nvidia-*/measurements.parquet"))
STORED = pytest.mark.parametrize("path", RUNS, ids=lambda p: p.parent.name)
FINGERPRINTS = """
import importlib, sys
from moe_routing_bench.benches.bench import find
try:
    from moe_routing_bench.packages import fingerprint
except ImportError:  # before the kernels were a package of their own
    fingerprint = importlib.import_module("moe_routing_bench" + ".closure").fingerprint
for name in sys.argv[1:]:
    print(name, fingerprint(find(name).code_files())[:16])
"""
ROW = {
    "schema_version": rows.SCHEMA_VERSION,
    "bench": "gate",
    "implementation": "torch",
    "status": "ok",
    "median_us": 1.5,
    "samples_us": [1.0, 2.0],
    "stage_us": [("pack", 1.0), ("combine", 2.0)],
    "capacity_factor": None,
    "suspect": False,
    "platform": "cpu",
    "started_at": "2026-11-21T06:55:00.000+00:00",
    "ended_at": "2026-11-21T06:56:00.000+00:00",
}


def job(**change):
    cell = cell_of("gate", tokens=64, experts=8, top_k=2, router="softmax_topk", dtype="fp32")
    return Job(cell, change.get("implementations", ("torch",)), Settings(min_blocks=change.get("min_blocks", 10)))


def row_of(one, **values):
    """A row as that of a measured job."""
    return ROW | dict(one.cell.values) | {"cell": one.cell.key, "cell_hash": one.hash} | values


def test_rows_come_back_as_they_were(tmp_path):
    path = tmp_path / "new" / "rows.parquet"
    rows.write(path, [ROW, {**ROW, "implementation": "cute"}], "the spec")
    table = records.read(path)
    first, second = table.to_pylist()
    assert {name: first[name] for name in ROW} == ROW and second["implementation"] == "cute"
    assert [name for name in first if name not in ROW and first[name] is not None] == []
    assert table.column_names == list(records.COLUMNS) and records.spec_of(table) == "the spec"


def test_a_zero_is_a_value(tmp_path):
    """Of an axis that is zero in all rows, and of other columns; None alone is none."""
    zeros = {"skew": 0.0, "seed": 0, "dead_experts": 0, "drop_rate": 0.0, "phase": "", "suspect": False}
    rows.write(tmp_path / "rows.parquet", [ROW | zeros, ROW | zeros], "")
    read = records.read(tmp_path / "rows.parquet").to_pylist()
    assert [{name: row[name] for name in zeros} for row in read] == [zeros, zeros]
    assert read[0]["trace"] is None


def test_a_column_that_the_schema_lacks_is_a_mistake_of_the_code(tmp_path):
    with pytest.raises(KeyError, match="speed"):
        rows.write(tmp_path / "rows.parquet", [{**ROW, "speed": [1]}], "")
    assert list(tmp_path.iterdir()) == []


def test_columns_that_were_added_are_null_in_older_files(tmp_path):
    path = tmp_path / "rows.parquet"
    rows.write(path, [ROW], "")
    pq.write_table(records.read(path).drop(list(rows.LATER)), path)
    assert [records.read(path)[name].to_pylist() for name in rows.LATER] == [[None]] * len(rows.LATER)


def test_a_file_without_null_columns_reads_as_one_with_all(tmp_path):
    """As before they were left out, with Arrow's schema and without; nested values keep the names of the schema."""
    path, files = tmp_path / "cell.parquet", files_of(tmp_path, "a", "a")
    whole = cell_files.collect(files, "cpu")
    assert len(read_table(next(iter(files))).column_names) < len(records.COLUMNS) // 3
    for older in files:
        write_table(older, records.read(older))
        assert len(read_table(older).column_names) == len(records.COLUMNS)
    assert cell_files.collect(files, "cpu").equals(whole, check_metadata=True)
    assert whole.schema.remove_metadata().equals(records.described(records.SCHEMA), check_metadata=True)
    rows.write(path, [ROW], "the spec")
    assert records.read(path).schema.remove_metadata().equals(records.SCHEMA, check_metadata=True)
    assert records.read(path).to_pylist()[0]["stage_us"] == ROW["stage_us"]


def test_a_file_that_lost_a_column_is_refused_though_others_do_without(tmp_path):
    path, timed = tmp_path / "cell.parquet", ROW | {"timer": "wall"}
    rows.write(path, [ROW], "the spec")
    assert records.read(path)["timer"].to_pylist() == [None]
    rows.write(path, [timed], "the spec")
    write_table(path, read_table(path).drop(["timer"]))
    with pytest.raises(UserError, match="1 absent, unknown or of another type: timer"):
        records.read(path)
    for said in (b"timer", b'"timer"', b'{"timer": 1}', b'[["timer"]]'):
        write_table(path, read_table(path).replace_schema_metadata({rows.NULLS: said}))
        with pytest.raises(UserError, match="absent, unknown or of another type"):
            records.read(path)


def test_what_is_withdrawn_is_blank_wherever_rows_are_read(tmp_path):
    """Peak memory was sampled after a call was bound; the file keeps what it has."""
    path = tmp_path / "rows.parquet"
    rows.write(path, [ROW | {"peak_memory_bytes": 0}, ROW | {"peak_memory_bytes": 1_740_000_000}], "")
    assert read_table(path)["peak_memory_bytes"].to_pylist() == [0, 1_740_000_000]
    assert records.read(path)["peak_memory_bytes"].to_pylist() == [None, None]
    some = records.read_some(path, ["implementation", "peak_memory_bytes"])
    assert some["peak_memory_bytes"].to_pylist() == [None, None] and some["implementation"].null_count == 0
    assert records.SCHEMA.field("peak_memory_bytes").type == records.read(path).schema.field("peak_memory_bytes").type
    assert all(
        "none: blank" in about()[name].text and later in about()[name].text for name, later in records.WITHDRAWN.items()
    )


def test_what_is_withdrawn_in_older_rows_is_read_in_rows_of_the_new_meaning(tmp_path):
    path = tmp_path / "rows.parquet"
    rows.write(path, [ROW | {"peak_memory_bytes": 9}, ROW | {"peak_memory_bytes": 7, "workspace_bytes": 3}], "")
    assert records.read(path)["peak_memory_bytes"].to_pylist() == [None, 7]
    assert records.read_some(path, ["peak_memory_bytes"])["peak_memory_bytes"].to_pylist() == [None, 7]


def test_columns_in_another_order_are_read_in_the_schema_s(tmp_path):
    path = tmp_path / "rows.parquet"
    rows.write(path, [ROW], "")
    table = read_table(path)
    write_table(path, table.select(sorted(table.column_names)))
    assert records.read(path).column_names == list(records.COLUMNS)


def test_a_table_of_an_older_version_is_held_against_the_digest_of_its_rows(tmp_path):
    """Whatever the order of its columns; an edited row is refused."""
    path, table = tmp_path / "rows.parquet", pa.table({"name": ["a", "b"], "us": [1.5, None]})
    older = table.replace_schema_metadata({DIGEST: digest(table).encode()})
    for kept in (older, older.select(["us", "name"])):
        pq.write_table(kept, path)
        assert read_table(path).equals(kept) and not read_table(path).schema.metadata
    pq.write_table(older.set_column(1, "us", pa.array([1.5, 2.0])), path)
    with pytest.raises(pa.ArrowInvalid, match="not those that were written"):
        read_table(path)


@pytest.mark.parametrize("size", [3, 300_000], ids=["plain", "compressed"])
def test_no_byte_of_a_file_changes_unseen(tmp_path, size):
    """In pages, headers, names, metadata or the seal itself. Where the name of the seal is damaged, all the rest is as it was written."""
    path = tmp_path / "rows.parquet"
    write_table(path, pa.table({"number": range(size)}).replace_schema_metadata({b"name": b"v" * 300}))
    whole = path.read_bytes()
    assert len(read_table(path)) == size and sealed_metadata(path, b"name", b"other") == [b"v" * 300, None]
    for place in [*range(0, len(whole), len(whole) // 50), whole.rfind(SEAL) + len(SEAL) + 9]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert sealed_metadata(path, b"name") == [None]
        name = range(whole.rfind(SEAL), whole.rfind(SEAL) + len(SEAL) + 2)
        if place not in name:
            with pytest.raises(pa.ArrowException):
                read_table(path)


def test_the_summary_of_a_cell_is_what_its_rows_say(tmp_path, monkeypatch):
    """Found without a look at a column in a file that is as it was written; otherwise by reading all of it, or not at all."""
    path, failed = tmp_path / "rows.parquet", ROW | {"status": "crashed", "reason": 'a "quoted" µ\n', "median_us": None}
    rows.write(path, [ROW, failed], "the spec")
    told, whole = cell_files.summary(path), path.read_bytes()
    table = records.read(path)
    assert told == (records.spec_of(table), table.select(list(rows.SUMMARISED)).to_pylist())
    with monkeypatch.context() as without:
        without.setattr(pq, "ParquetFile", None)
        assert cell_files.summary(path) == told
    pq.write_table(table.replace_schema_metadata({rows.SPEC: b"the spec"}), path)
    assert cell_files.summary(path) == told, "of an older version, without a summary"
    path.write_bytes(whole.replace(b'"crashed"', b'"timeout"'))
    with pytest.raises(UserError, match="not those that were written"):
        cell_files.summary(path)
    other = ROW | {"schema_version": rows.SCHEMA_VERSION + 1}
    for stored in ([other], [ROW, other], [other, ROW]):
        rows.write(path, stored, "the spec")
        with pytest.raises(UserError, match="schema_version"):
            cell_files.summary(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    rows.write(path, [ROW], "old")
    before = path.read_bytes()

    write = Path.write_bytes

    def half(target, data):
        write(target, data[: len(data) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="no space"):
        rows.write(path, [{**ROW, "status": "crashed"}], "new")
    with pytest.raises(OSError, match="no space"):
        rows.write(tmp_path / "other.parquet", [ROW], "new")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("asked", [job(min_blocks=11), job(implementations=("torch", "cute"))])
def test_collect_refuses_a_file_of_another_job_and_takes_its_own(tmp_path, asked):
    path, measured = tmp_path / "cell.parquet", job()
    rows.write(path, [row_of(measured)], measured.spec)
    assert cell_files.collect({path: measured}, "cpu").num_rows == 1
    with pytest.raises(UserError, match=f"measured for spec {measured.hash}, the config asks for {asked.hash}"):
        cell_files.collect({path: asked}, "cpu")


def test_collect_joins_rows_in_order_and_forgets_the_specs(tmp_path):
    files = {}
    for index, blocks in enumerate((10, 11)):
        path, one = tmp_path / f"{index}.parquet", job(min_blocks=blocks)
        rows.write(path, [row_of(one, median_us=index + 1.0)], one.spec)
        files[path] = one
    table = cell_files.collect(files, "cpu.again")
    assert table["median_us"].to_pylist() == [1.0, 2.0] and records.spec_of(table) is None


def several(folder: Path, count: int) -> dict[Path, Job]:
    """Files of so many jobs, each with a time of its own."""
    files = {folder / f"{index}.parquet": job(min_blocks=10 + index) for index in range(count)}
    for index, (path, one) in enumerate(files.items()):
        rows.write(path, [row_of(one, median_us=index + 1.0)], one.spec)
    return files


def lasting_children() -> list:
    """The children that have not ended after a while."""
    for child in multiprocessing.active_children():
        child.join(30)
    return multiprocessing.active_children()


def test_tables_of_runs_are_packed_and_files_of_cells_are_quick_to_read(tmp_path):
    """Times that repeat at other places are smaller without dictionaries, whole numbers of few values with them."""
    path = tmp_path / "table.parquet"
    times = [[0.1 * (7 * row % 50 + sample) for sample in range(60)] for row in range(200)]
    ids = np.random.default_rng(0).integers(32, size=(200, 60)).tolist()
    tables = {name: pa.table({name: values}) for name, values in (("us", times), ("id", ids))}
    for name, table in tables.items():
        sizes = []
        for choice in ({"schema": False}, {}, {"dictionaries": True}):
            write_table(path, table, **choice)
            assert read_table(path).equals(table)
            stored = pq.ParquetFile(path).metadata.row_group(0).column(0)
            assert stored.compression == ("UNCOMPRESSED" if choice.get("schema") is False else "ZSTD")
            assert stored.has_dictionary_page == choice.get("dictionaries", False)
            sizes.append(stored.total_compressed_size)
        assert sizes[0] > sizes[1]
        assert (sizes[1] < sizes[2]) == (name == "us"), sizes
    write_table(path, pa.concat_tables([tables["us"]] * 20), schema=False)
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD", "of a large cell"


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_child_reads_some_parts(tmp_path, monkeypatch, at_once):
    """Its rows and what it refuses stand in their places."""
    files = several(tmp_path, 5)
    whole, others = cell_files.collect(files, "cpu"), list(files)
    assert whole["median_us"].to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    with monkeypatch.context() as patch:
        patch.setattr(cell_files, "_AT_ONCE", at_once)
        assert cell_files.collect(files, "cpu").equals(whole, check_metadata=True)
    strange = job(min_blocks=30)
    rows.write(others[1], [row_of(strange)], strange.spec)
    rows.write(others[2], [row_of(files[others[2]], schema_version=rows.SCHEMA_VERSION + 1)], files[others[2]].spec)
    others[3].write_bytes(b"PAR1")
    with pytest.raises(UserError, match="3 that do not fit") as alone:
        cell_files.collect(files, "cpu")
    monkeypatch.setattr(cell_files, "_AT_ONCE", at_once)
    with pytest.raises(UserError) as together:
        cell_files.collect(files, "cpu")
    assert str(together.value) == str(alone.value)
    assert cell_files.refused(files, "cpu") == ([others[1], others[3]], [others[2]])


def test_a_child_that_is_killed_is_one_line(tmp_path, monkeypatch):
    files, read, here = several(tmp_path, 4), cell_files._part, os.getpid()
    monkeypatch.setattr(cell_files, "_AT_ONCE", 1)

    def part(files, platform):
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(files, platform)

    monkeypatch.setattr(cell_files, "_part", part)
    with pytest.raises(UserError, match="the reader of half of the cell files: got 'a death'"):
        cell_files.collect(files, "cpu")
    assert not lasting_children()


@pytest.mark.parametrize("at_once", [1, 5])
def test_a_child_reads_all_parts_while_this_process_does_something_else(tmp_path, monkeypatch, at_once):
    """Files of one part have no child. Either way the other work is done once."""
    files, read, done = several(tmp_path, 5), cell_files._part, []
    monkeypatch.setattr(cell_files, "_AT_ONCE", at_once)

    def part(files, platform):
        for path in files:
            path.with_suffix(f".{os.getpid()}").touch()
        return read(files, platform)

    def meanwhile():
        done.append(True)
        deadline = time.monotonic() + 60
        while at_once == 1 and len(list(tmp_path.glob("*.[0-9]*"))) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(cell_files, "_part", part)
    assert cell_files.collect(files, "cpu", meanwhile)["median_us"].to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    readers = {path.suffix for path in tmp_path.glob("*.[0-9]*")}
    assert (done, len(readers), f".{os.getpid()}" in readers) == ([True], 1, at_once == 5)


def test_cell_files_are_read_without_pandas(tmp_path):
    """It takes longer to import than hundreds of files to read, in every process that reads some."""
    code = """
import pickle, sys
from moe_routing_bench.store import cell_files
print(len(cell_files.collect(pickle.load(sys.stdin.buffer), "cpu")), "pandas" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(several(tmp_path, 3)), capture_output=True)
    assert found.stdout == b"3 False\n", found.stderr


def test_a_child_ends_with_a_reader_that_fails(tmp_path, monkeypatch):
    files, here = several(tmp_path, 6), os.getpid()
    monkeypatch.setattr(cell_files, "_AT_ONCE", 1)
    monkeypatch.setattr(cell_files, "_part", lambda files, _: 1 / (os.getpid() != here) and bytes(2**20))
    with pytest.raises(ZeroDivisionError):
        cell_files.collect(files, "cpu")
    assert not lasting_children()


def test_an_implementation_without_a_row_is_noticed(tmp_path):
    path, both = tmp_path / "cell.parquet", job(implementations=("torch", "cute"))
    rows.write(path, [ROW], both.spec)
    with pytest.raises(UserError, match=r"holds \['torch'\], asked were \['torch', 'cute'\]"):
        cell_files.collect({path: both}, "cpu")
    alone = job(implementations=("torch",))
    rows.write(path, [ROW, ROW], alone.spec)
    with pytest.raises(UserError, match=r"holds \['torch', 'torch'\], asked were \['torch'\]"):
        cell_files.collect({path: alone}, "cpu")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokens": 65}, "tokens 65 in place of 64"),
        ({"status": "ok", "median_us": None}, "status 'ok' with a median_us of None"),
        ({"ended_at": "2020-01-01T00:00:00+00:00"}, "dates from"),
        ({"ci_low_us": 3.0, "ci_high_us": 4.0}, "numbers that contradict each other"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_row_that_cannot_be_of_its_job_is_named_wherever_it_stands(tmp_path, values, said, place):
    path, both = tmp_path / "cell.parquet", job(implementations=("torch", "cute"))
    found = [row_of(both), row_of(both, implementation="cute")]
    found[place] |= values
    rows.write(path, found, both.spec)
    with pytest.raises(UserError, match=said):
        cell_files.collect({path: both}, "cpu")


def test_collect_joins_files_with_other_columns_in_order(tmp_path):
    """Cells without a value for a column, with all columns of an older version, and of columns that were added since."""
    files, values = {}, [{"timer": "wall"}, {}, {"stage_us": None}, {"isolated": True}, {"timer": "events"}, {}]
    for index, value in enumerate(values):
        path, one = tmp_path / f"{index}.parquet", job(min_blocks=10 + index)
        rows.write(path, [row_of(one, median_us=index + 1.0, **value)], one.spec)
        files[path] = one
    write_table(path, records.read(path).drop(list(rows.LATER)))
    table = cell_files.collect(files, "cpu")
    assert table["median_us"].to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert table["timer"].to_pylist() == ["wall", None, None, None, "events", None]
    assert table["isolated"].to_pylist() == [None, None, None, True, None, None]
    assert table["stage_us"].to_pylist() == [None if i == 2 else ROW["stage_us"] for i in range(6)]
    assert table.schema.remove_metadata().equals(records.described(records.SCHEMA), check_metadata=True)


def files_of(folder, *codes: str):
    """One cell file of gate per fingerprint of the code."""
    files = {}
    for index, code in enumerate(codes):
        path, one = folder / f"{index}.parquet", job(min_blocks=10 + index)
        rows.write(path, [row_of(one, code_fingerprint=code)], one.spec)
        files[path] = one
    return files


def test_rows_of_one_bench_are_of_one_code(tmp_path):
    """Those of today's code stay, or without any the most frequent; the rest is named, to be measured again."""
    today = packages.fingerprint(find("gate").code_files())[:16]
    assert cell_files.collect(files_of(tmp_path, "old", "old"), "cpu").num_rows == 2
    for codes, again in ((("a", today, "a"), (0, 2)), (("a", "b", "a"), (1,)), (("a", today), (0,))):
        with pytest.raises(UserError, match=f"gate was measured by {len(set(codes))} versions of the code") as error:
            cell_files.collect(files_of(tmp_path, *codes), "cpu")
        named = [i for i in range(len(codes)) if f"{tmp_path / str(i)}.parquet" in str(error.value)]
        assert f"({len(again)} files)" in str(error.value) and named == list(again)


def test_a_file_with_rows_of_two_codes_is_made_again_though_one_is_kept():
    codes = {Path("both"): {"a", "b"}, Path("kept"): {"a"}, Path("older"): {"b"}}
    assert outvoted(codes, lambda: "a") == (2, [Path("both"), Path("older")])


def test_collected_rows_say_what_their_columns_hold(tmp_path):
    table = cell_files.collect(files_of(tmp_path, "a"), "cpu")
    assert table.schema.field("median_us").metadata[b"unit"].decode() == "µs"
    assert all(field.metadata[b"description"] for field in table.schema)
    write_table(tmp_path / "all.parquet", table)
    assert b"median time" in records.read(tmp_path / "all.parquet").schema.field("median_us").metadata[b"description"]


def test_every_column_is_described_and_nothing_else():
    """Each in plain words of its own, and those with a unit in their name in that unit."""
    known = about()
    assert set(known) == set(records.COLUMNS)
    units = {"_us": "µs", "_bytes": "bytes", "_gb_per_s": "GB/s", "_tflops": "TFLOP/s", "_mhz": "MHz"}
    for name, one in known.items():
        assert one.meaning and not one.meaning.endswith("."), name
        for end, unit in units.items():
            assert not name.endswith(end) or one.unit == unit, name
    said = "floating-point operations over the median time, in TFLOP/s; none: the bench only moves data"
    meanings = {column.name: column.meaning for column in row_fields.COLUMNS}
    assert meanings["shared_intermediate"].endswith("together, in elements; none: there are none (S)")
    assert meanings["tflops"] == known["tflops"].text == said, "the unit is that of the column, not of what moves data"


def test_each_schema_has_one_version_in_one_place():
    written = {f"{p.parent.name}/{p.name}" for p in (ROOT / "src").rglob("*.py") if "SCHEMA_VERSION =" in p.read_text()}
    assert written == {"store/rows.py", "quality/run_rows.py"}  # measurements, training runs
    assert records.COLUMNS["schema_version"] == pa.int32()
    assert pa.schema(list(records.COLUMNS.items())) == records.SCHEMA


@pytest.mark.slow
@pytest.mark.parametrize("path", sampled(RUNS, [RUNS[0], RUNS[1], RUNS[-1]]), ids=lambda path: path.parent.name)
def test_clean_rows_are_of_the_commit_that_they_name(path, tmp_path):
    """The fingerprint of each bench is that of the sources at the commit, computed by that commit's own code."""
    table = records.read(path).select(["bench", "code_fingerprint", "git_sha", "git_dirty"]).to_pylist()
    clean = {(row["git_sha"], row["bench"], row["code_fingerprint"]) for row in table if row["git_dirty"] is False}
    for sha in {sha for sha, *_ in clean}:
        archive = subprocess.run(["git", "-C", ROOT, "archive", sha, "src"], capture_output=True)
        if archive.returncode:
            shallow = subprocess.run(["git", "-C", ROOT, "rev-parse", "--is-shallow-repository"], capture_output=True)
            assert shallow.stdout.strip() == b"true", f"rows name {sha}, which is no commit of this repository"
            pytest.skip(f"this shallow clone has no commit {sha}")
        (tmp_path / sha).mkdir()
        subprocess.run(["tar", "-x", "-C", tmp_path / sha], input=archive.stdout, check=True)
        benches = sorted(bench for one, bench, _ in clean if one == sha)
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINTS, *benches],
            env=os.environ | {"PYTHONPATH": str(tmp_path / sha / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert {(sha, *line.split()) for line in done.stdout.splitlines()} == {one for one in clean if one[0] == sha}
