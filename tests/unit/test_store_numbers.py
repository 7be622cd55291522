"""Rows in files, cells and requests: what counts among several rows, files, commits, cards and processes that all differ."""

import copy
import dataclasses
import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from moe_routing_bench import study
from moe_routing_bench.grid.cell import Cell, Job, Settings, canonical, spec_hash
from moe_routing_bench.grid.run_spec import Adaptation, Run, content_sha256, documents
from moe_routing_bench.quality import adaptation_rows, run_rows
from moe_routing_bench.quality.code import adaptation_files, training_files
from moe_routing_bench.quality.plan import Plan
from moe_routing_bench.store import (
    archive,
    cell_files,
    companions,
    contradictions,
    manifest,
    parquet,
    paths,
    platforms,
    project_files,
    records,
    rows,
)
from moe_routing_bench.study import progress
from moe_routing_kernels.errors import UserError


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        (" (NVIDIA) A100-SXM4/80GB! ", "nvidia-a100-sxm4-80gb"),
        (None, "cpu"),
        ("", "cpu"),
    ],
)
def test_the_folder_of_a_device(name, slug):
    assert platforms.slug(name) == slug


def test_the_first_of_the_visible_gpus_is_named(monkeypatch):
    """By its index or its UUID; of another number another GPU."""
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"index {index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: f"uuid {uuid}",
        nvmlDeviceGetName=lambda handle: f"name of {handle}".encode(),
        nvmlDeviceGetUUID=lambda handle: f"uuid of {handle}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("MOE_ROUTING_BENCH_DEVICE", raising=False)
    for visible, name in (
        (None, "name of index 0"),
        ("3,1", "name of index 3"),
        ("GPU-7,2", "name of uuid GPU-7"),
        ("", None),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert platforms.gpu_name.__wrapped__() == name
    assert platforms.uuid_of("2") == "uuid of index 2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("MOE_ROUTING_BENCH_DEVICE", "cpu")
    assert platforms.gpu_name.__wrapped__() is None
    monkeypatch.setattr(platforms, "gpu_name", lambda: "NVIDIA H200")
    platforms.verify("nvidia-h200.a-run")
    with pytest.raises(UserError, match="platform: got 'nvidia-h200'; allowed: cpu"):
        platforms.verify("cpu.a-run")


@pytest.mark.parametrize(
    ("requires", "platform", "absent", "says"),
    [
        (("gpu",), "cpu", (), "needs a GPU"),
        (("gpu",), "nvidia-h200", (), None),
        (("triton",), "nvidia-h200", ("triton",), "triton is not installed"),
        (("compiler",), "cpu", ("c++",), "torch.compile needs a C++"),
        (("compiler",), "nvidia-h200", ("c++",), None),
        (("compiler",), "nvidia-h200", ("triton",), "torch.compile needs triton"),
        ((), "cpu", ("torch",), "torch is not installed"),
        ((), "cpu", ("peer",), "peer is not installed; pip install peer"),
    ],
)
def test_what_an_implementation_lacks(requires, platform, absent, says, monkeypatch):
    monkeypatch.setattr(platforms, "_importable", lambda package: package not in absent)
    monkeypatch.setattr(platforms, "_cxx", lambda: None if "c++" in absent else "/g++")
    peer = SimpleNamespace(module="peer", install="pip install peer")
    found = platforms.missing(requires, platform, peer)
    assert (found is None) if says is None else found.startswith(says)


def test_jobs_find_this_interpreter_first(monkeypatch):
    monkeypatch.setenv("PATH", "/elsewhere")
    platforms.prepare_jobs("auto")
    assert os.environ["PATH"].split(os.pathsep) == [os.path.dirname(sys.executable), "/elsewhere"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(platforms.shutil, "which", lambda name: "/c++" if name == "c++" else None)
    assert platforms._cxx() == "/c++"


@pytest.mark.parametrize("text", ["a,b\n1,2\n3\n", "a,b\n1,2\n3,4,5\n", "a,b\n1,2", "a,a\n1,2\n", "a\n1\n"])
def test_a_cut_table_is_refused(text, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,2\n3,\n")
    assert companions.table(path, ["b"])["a"].tolist() == [1, 3]
    path.write_text(text)
    with pytest.raises(UserError, match=r"table\.csv"):
        companions.table(path, ["a", "b"])


def test_tables_next_to_rows_have_exactly_their_columns_and_platform(tmp_path):
    path = tmp_path / "accuracy.parquet"
    companions.write_matrix(path, [{"platform": "cpu", "tokens": 3}, {"platform": "cpu", "weights": "int4_g128"}])
    assert companions.read_matrix(path, "cpu")["weights"].to_pylist() == [None, "int4_g128"]
    with pytest.raises(ValueError, match="own"):
        companions.write_matrix(path, [{"platform": "cpu"}, {"platform": "cpu", "own": 1}])
    companions.write_matrix(path, [{"platform": "cpu"}, {"platform": "other"}])
    with pytest.raises(UserError, match="those of other"):
        companions.read_matrix(path, "cpu")
    schema = pa.schema([("a", pa.int64())])
    parquet.write_table(path, pa.table({"a": [1, 2]}, schema))
    assert companions.rows(path, schema)["a"].to_pylist() == [1, 2]
    parquet.write_table(path, pa.table({"a": [1.0, 2.0]}))
    with pytest.raises(UserError, match="other columns"):
        companions.rows(path, schema)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert companions.is_there(tmp_path / "link") and not companions.is_there(tmp_path / "nothing")


def packed(path, files, about=None, sparse=False):
    """An archive of these files whose digests fit."""
    listed = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    known = {"format": 1, "run": "cpu", "by": "Ada", "environment": {}, "files": listed} | (about or {})
    with tarfile.open(path, "w:gz") as archive_:
        for name, content in [*files.items(), ("submission.yaml", json.dumps(known).encode())]:
            entry = tarfile.TarInfo(name)
            if sparse and name == "measurements.parquet":
                size = str(len(content))
                entry.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": size}
                content = f"1\n0\n{size}\n".encode().ljust(tarfile.BLOCKSIZE, b"\0") + content
            entry.size = len(content)
            archive_.addfile(entry, io.BytesIO(content))


FILES = {"manifest.yaml": b"a", "measurements.parquet": b"b", "quality.parquet": b"c"}


def test_an_archive_has_what_it_lists_and_lists_what_it_has(tmp_path):
    path = tmp_path / "run.tar.gz"
    packed(path, FILES)
    about, found = archive.unpacked(path)
    assert about["by"] == "Ada" and {name: found[name] for name in FILES} == FILES
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    for files, listed, says in (
        (FILES, {**digests, "perft.parquet": "0"}, "lists manifest.yaml"),
        (FILES, {name: digests[name] for name in ("manifest.yaml", "measurements.parquet")}, "the archive has"),
        (FILES, {**digests, "quality.parquet": "0" * 64}, "digest of quality.parquet"),
        ({"measurements.parquet": b"b"}, None, "no manifest.yaml"),
        ({"manifest.yaml": b"a"}, None, "no measurements.parquet"),
    ):
        packed(path, files, {"files": listed} if listed else None)
        with pytest.raises(UserError, match=says):
            archive.unpacked(path)
    for form in (0, 2, "1"):
        packed(path, FILES, {"format": form})
        with pytest.raises(UserError, match="format"):
            archive.unpacked(path)
    packed(path, FILES, sparse=True)
    with pytest.raises(UserError, match=r"'measurements\.parquet' is no regular file"):
        archive.unpacked(path)


def test_an_archive_that_was_packed_can_be_unpacked(tmp_path, monkeypatch):
    """With all tables of the run, and no other file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(archive.manifest, "read", lambda run: {})
    monkeypatch.setattr(archive, "environment", lambda run: {"gpu_name": ["A"]})
    folder = paths.results("cpu.x")
    folder.mkdir(parents=True)
    kept = FILES | {"perft.parquet": b"d", "accuracy.parquet": b"e"}
    for name, content in (kept | {"config.json": b"{}"}).items():
        (folder / name).write_bytes(content)
    archive.pack("cpu.x", "Ada", tmp_path / "x.tar.gz")
    about, found = archive.unpacked(tmp_path / "x.tar.gz")
    assert (about["run"], about["by"], about["environment"]) == ("cpu.x", "Ada", {"gpu_name": ["A"]})
    assert {name: content for name, content in found.items() if name != archive.ABOUT} == kept
    (folder / archive.ABOUT).write_bytes(found[archive.ABOUT])
    assert archive.submitter(folder) == "Ada" and archive.submitter(tmp_path) is None


def test_an_environment_names_what_rows_know(monkeypatch):
    table = pa.table(
        {"gpu_name": ["B", "A", "B"], "power_limit_w": [700.0, None, 500.0]}
        | {name: pa.nulls(3) for name in archive.ENVIRONMENT if name not in ("gpu_name", "power_limit_w")}
    )
    monkeypatch.setattr(archive.records, "read", lambda path: table)
    assert archive.environment("cpu") == {"gpu_name": ["A", "B"], "power_limit_w": ["500.0", "700.0"]}


TIMES = {"min_us": 1.0, "p5_us": 2.0, "q1_us": 3.0, "median_us": 4.0, "q3_us": 5.0, "p95_us": 6.0, "max_us": 7.0}


def columns(*changes):
    """Rows without contradiction but for these changes, as a table and one by one."""
    known = dict.fromkeys((*contradictions.COLUMNS, "tokens"))
    whole = TIMES | {
        "ci_low_us": 3.5,
        "ci_high_us": 4.5,
        "read_bytes": 600,
        "write_bytes": 400,
        "compulsory_bytes": 1000,
    }
    whole |= {"flops": 8_000_000, "gb_per_s": 0.25, "tflops": 2.0, "tokens": 8, "tokens_per_s": 2e6}
    for name in ("speedup", "best_speedup", "twin_speedup"):
        whole |= {name: 2.0, f"{name}_ci_low": 1.5, f"{name}_ci_high": 2.5, f"{name}_p": 0.5}
    found = [known | whole | change for change in changes]
    kinds = {name: records.COLUMNS[name] for name in found[0]}
    return found, pa.Table.from_pylist(found, pa.schema(list(kinds.items())))


@pytest.mark.parametrize(
    ("change", "fine"),
    [
        ({}, True),
        *(({name: TIMES[name] + 1.5}, False) for name in list(TIMES)[:-1]),
        *(({name: None}, True) for name in TIMES if name != "median_us"),
        ({"q1_us": 5.5, "median_us": None, "gb_per_s": None}, False),  # above q3, the next that there is
        ({"p5_us": None, "q1_us": None, "min_us": 4.5}, False),
        ({"max_us": float("inf")}, False),
        ({"max_us": float("nan")}, False),
        ({"min_us": -1.0}, False),
        ({"min_us": 0.0}, True),
        *(({f"{name}_ci_low": 2.1}, False) for name in ("speedup", "best_speedup", "twin_speedup")),
        *(({f"{name}_ci_high": 1.9}, False) for name in ("speedup", "best_speedup", "twin_speedup")),
        *(({f"{name}_p": -0.1}, False) for name in ("speedup", "twin_speedup")),
        ({"best_speedup_p": 1.1}, False),
        ({"speedup_ci_low": None, "speedup": 9.0}, True),
        ({"ci_low_us": 4.1}, False),
        ({"ci_high_us": 3.9}, False),
        ({"read_bytes": 700}, False),
        ({"write_bytes": 300}, False),
        ({"write_bytes": None, "read_bytes": 1}, True),
        *(
            ({name: value}, False)
            for name, value in (("gb_per_s", 0.2501), ("tflops", 2.001), ("tokens_per_s", 2.001e6))
        ),
        ({"tflops": float("inf")}, False),
        ({"tokens": None, "tokens_per_s": 5.0}, True),
    ],
)
def test_numbers_that_contradict_each_other_in_one_row_and_in_many(change, fine):
    """The changed row first, last or alone: all are looked at, and every check counts."""
    (one,), table = columns(change)
    assert (contradictions.contradiction(one) == "") is fine and contradictions.is_free(table) is fine
    for place in ((change, {}, {}), ({}, {}, change)):
        assert contradictions.is_free(columns(*place)[1]) is fine


def test_samples_say_their_number_and_quantiles_and_hold_the_blocks_medians():
    samples = [1.0, 2.0, 3.0, 4.0, 9.0]
    known = {"samples_us": samples, "samples": 5, "median_us": 3.0, "max_us": 9.0, "min_us": 1.0}
    known |= {"block_medians_us": [1.5, 6.0], "blocks": 2}
    assert contradictions.contradiction(known) == ""
    for change in (
        {"samples": 4},
        {"median_us": 3.01},
        {"q1_us": 2.5},
        {"blocks": 3},
        {"block_medians_us": [0.5, 6.0]},
        {"block_medians_us": [1.5, 9.5]},
    ):
        assert contradictions.contradiction(known | change), change
    at = "2026-11-28T20:00:00+00:00"
    assert contradictions.contradiction({"started_at": at, "ended_at": at}) == ""
    assert contradictions.contradiction({"started_at": at, "ended_at": "2026-11-28T20:00:00"})


def test_groups_of_a_manifest_are_in_the_order_of_their_first_rows():
    def row(sha, first, last, dirty=False, gpu=None, uuid=None, **values):
        return {
            "git_sha": sha,
            "git_dirty": dirty,
            "started_at": first,
            "ended_at": last,
            "gpu_name": gpu,
            "gpu_uuid": uuid,
        } | values

    known = [
        row("b", "2", "9", gpu="H", uuid="GPU-12345678-9"),
        row("a", "3", "4", gpu="H"),
        row("b", "1", "5", gpu="G", uuid="GPU-2"),
        row("b", "0", None, dirty=True, cpu_model="C"),
        row("c", None, "4", gpu="H"),
    ]
    found = manifest.groups(known)
    assert [(one["commit"], one["dirty"], one["first"], one["last"], one["rows"]) for one in found] == [
        ("b", True, "0", "0", 1),
        ("b", False, "1", "9", 2),
        ("a", False, "3", "4", 1),
        ("c", False, "4", "4", 1),
    ]
    assert found[1]["cards"] == ["G (GPU-2)", "H (GPU-12345678-9)"] and found[0]["cards"] == []
    on_cpu = manifest.groups([{"cpu_model": "C", "device": "d"}, {"device": "d"}])
    assert on_cpu[0]["cards"] == ["C", "d"] and manifest.short("H (GPU-12345678-9abc)") == "H (GPU-12345678)"


def test_versions_are_those_of_the_manifest_or_of_the_history(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = paths.manifest("cpu")
    path.parent.mkdir(parents=True)
    measured = [{"version": "1.0", "commit": "a"}, {"version": None, "commit": "b"}]
    path.write_text(json.dumps({"tables": {"measurements": {"measured": measured}}}))
    monkeypatch.setattr(manifest, "_version", {"a": "9.0", "b": "2.0", "c": None}.get)
    assert manifest.versions("cpu", ["a", "b", "c", None]) == {"a": "1.0", "b": "2.0"}


def test_benches_whose_code_has_changed(monkeypatch):
    today = SimpleNamespace(code_fingerprint=lambda: "x")
    monkeypatch.setattr(manifest, "BENCHES", {"pack": today, "gate": today, "layer": today})
    rows_ = [("pack", "x"), ("gate", "x"), ("gate", "y"), ("gone", "x"), ("layer", None)]
    assert manifest.changed(rows_) == ["gate", "gone", "layer"]


def test_columns_with_values_are_written_and_null_ones_named(tmp_path):
    """A zero and a no are values, also where only a later row has one."""
    path = tmp_path / "a.parquet"
    row = {
        "schema_version": rows.SCHEMA_VERSION,
        "bench": "gate",
        "implementation": "a",
        "status": "ok",
        "median_us": 1.0,
    }
    rows.write(
        path,
        [row | {"mismatches": 0, "suspect": False}, row | {"implementation": "b", "ties": 0, "tokens": 3, "skew": 0.5}],
        "spec",
    )
    table = parquet.read_table(path)
    assert {"mismatches", "suspect", "ties", "tokens", "skew"} <= {*table.column_names}
    nulls = json.loads(table.schema.metadata[rows.NULLS])
    assert "flops" in nulls and not {"mismatches", "suspect", "ties", "median_us"} & {*nulls}
    spec, summary = cell_files.summary(path)
    assert spec == "spec" and [one["implementation"] for one in summary] == ["a", "b"]
    with pytest.raises(KeyError, match="bool"):
        rows.write(path, [row | {"tokens": True}], "spec")


def test_texts_of_a_table_for_pandas_keep_their_gaps():
    table = pa.table({"a": ["x", None, "y", "x"], "n": [1, 2, None, 4], "b": pa.array([None] * 4, pa.string())})
    found = records.frame(table)
    assert list(found.columns) == ["a", "n", "b"] and found["a"].tolist()[::2] == ["x", "y"] and pd.isna(found["a"][1])
    assert found["b"].isna().all() and found["n"].tolist()[:2] == [1.0, 2.0] and found["a"][0] is found["a"][3]


def test_what_other_columns_vouch_for_is_kept_where_they_have_a_value():
    table = pa.table({"peak_memory_bytes": [5, 6, 7], "workspace_bytes": [0, None, 3]})
    assert records._true(table, "peak_memory_bytes").to_pylist() == [5, None, 7]
    with pytest.raises(UserError, match="platform of the rows"):
        records.of_platform(pa.table({"platform": ["cpu", None]}), "cpu.x", "file")
    assert len(records.of_platform(pa.table({"platform": ["cpu", "cpu"]}), "cpu.x", "file")) == 2


JOB = Job(Cell("gate", "k", (("tokens", 8), ("dtype", "fp32"))), ("torch", "triton"), Settings())


def test_a_row_of_a_job_has_its_cell_a_status_and_dates_that_can_be():
    now = datetime.now(UTC)
    at = {
        name: (now - timedelta(minutes=minutes)).isoformat() for name, minutes in (("started_at", 9), ("ended_at", 4))
    }
    known = {"bench": "gate", "cell": "k", "cell_hash": JOB.hash, "platform": "cpu", "tokens": 8, "dtype": "fp32"}
    row = dict.fromkeys(records.COLUMNS) | known | at | {"status": "ok", "median_us": 2.0, "implementation": "torch"}

    def judged(*changes):
        found = [row | change for change in changes]
        table = pa.Table.from_pylist(found, records.SCHEMA)
        said = cell_files._false(found, JOB, "cpu")
        assert cell_files._are_true(table, [(JOB, len(found))], "cpu") <= (not said)
        return said

    assert judged({}, {"status": "crashed", "median_us": None}) == ""
    assert cell_files._are_true(pa.Table.from_pylist([row], records.SCHEMA), [(JOB, 1)], "cpu")
    for change, says in (
        ({"tokens": 9}, "tokens 9 in place of 8"),
        ({"status": "fine"}, "status 'fine'"),
        ({"median_us": 0.0}, "status 'ok' with"),
        ({"median_us": None}, "status 'ok' with"),
        ({"started_at": at["ended_at"], "ended_at": at["started_at"]}, "dates from"),
        ({"ended_at": (now + timedelta(hours=2)).isoformat()}, "dates from"),
        ({"ended_at": None}, "dates from"),
        ({"max_us": 1.0, "min_us": 1.5}, "numbers that contradict"),
    ):
        assert says in judged(change), change
        assert says in judged({}, change) and not cell_files._are_true(
            pa.Table.from_pylist([row, row | change], records.SCHEMA), [(JOB, 2)], "cpu"
        )
    assert judged({"ended_at": (now + timedelta(minutes=30)).isoformat()}) == "", "clocks of machines differ"


def test_files_of_a_minority_are_made_again():
    a, b, c, d = (Path(name) for name in "abcd")
    assert parquet.outvoted({a: {"x"}, b: {"x"}}) == (1, [])
    found = {d: {"x"}, a: {"y"}, c: {"y"}, b: {"x", "y"}}
    assert parquet.outvoted(found) == (2, [b, d])
    assert parquet.outvoted(found, lambda: "x") == (2, [a, b, c]) and parquet.outvoted(found, lambda: "z") == (
        2,
        [b, d],
    )
    assert parquet.some([a, b, c], 2) == "a, b, … (3 files)" and parquet.some([a, b], 2) == "a, b (2 files)"


def test_of_newer_versions_the_highest_is_named():
    table = pa.table({"schema_version": [3, 7, 5, None, 6]})
    with pytest.raises(parquet.Newer, match="got 7; allowed: 5 or lower"):
        parquet.check_versions(Path("a"), table, 5)
    parquet.check_versions(Path("a"), table, 7)


@pytest.mark.parametrize("length", [1, 127, 128, 300, 20_000, 2_200_000])
def test_an_entry_of_the_metadata_is_found_at_any_length(length, tmp_path):
    """Of two with the name the one that is in the metadata, not in the rows."""
    path = tmp_path / "a.parquet"
    text = "ab" * (length // 2) + "c" * (length % 2)
    table = pa.table({"a": ["name\x18\x01z"]}).replace_schema_metadata({"name": text, "other": "o"})
    parquet.write_table(path, table, schema=False)
    found = parquet.sealed_metadata(path, b"name", b"other", b"none")
    assert found == [text.encode(), b"o", None]
    path.write_bytes(path.read_bytes().replace(b"name\x18\x01z", b"name\x18\x01y", 1))
    assert parquet.sealed_metadata(path, b"name") == [None]


def test_texts_that_repeat_are_counted_where_each_stands():
    repeated = pa.array(["long text", "b", "long text", None, "long text"]).dictionary_encode()
    assert parquet._bytes_of_texts(repeated) == 28 and parquet._bytes_of_texts(pa.array([1])) == 0
    nested = pa.StructArray.from_arrays([repeated, pa.array(range(5))], ["a", "b"])
    assert parquet._bytes_of_texts(nested) == 28
    table = pa.table({"a": pa.chunked_array([repeated, repeated]), "b": pa.chunked_array([repeated, repeated])})
    schema = pa.schema([("a", pa.string()), ("b", pa.string())])
    assert parquet._written_out(table, schema)["a"].to_pylist()[:2] == ["long text", "b"]
    for most, fits in ((112, True), (111, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parquet.guarded, "MOST_TABLE", most)
            if fits:
                parquet._written_out(table, schema)
            else:
                with pytest.raises(parquet.guarded.Refused):
                    parquet._written_out(table, schema)


def test_cells_of_the_same_values_are_equal_and_have_the_values_that_they_are_given():
    one, other = Cell("gate", "k", (("b", 1), ("a", None))), Cell("gate", "k", (("a", None), ("b", 1)))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert one == other and "b" in one and "a" not in one and one.get("c", 7) == 7 and one.get("a", 7) is None
    changed = one.but(b=2, c=3)
    assert (changed.b, changed.c, changed.bench, one.but("pack").bench) == (2, 3, "gate", "pack")
    assert canonical({"b": [1, 2], "a": 1.5}) == '{"a":1.5,"b":[1,2]}'
    assert spec_hash("x") == hashlib.sha256(b"x").hexdigest()[:16]
    parts = json.loads(JOB.spec)
    assert {*parts} == {"cell", "implementations", "settings"} and JOB.name == f"k-{JOB.hash[:8]}"
    full = dataclasses.replace(JOB, twins=("torch",), plugins=("p:P",), isolate="all")
    assert {*json.loads(full.spec)} == {*parts, "twins", "plugins", "isolate"} and Job.from_spec(full.spec) == full
    assert Settings(min_blocks=40, max_blocks=40, max_seconds=3).max_seconds == 3.0
    with pytest.raises(UserError, match="max_blocks"):
        Settings(min_blocks=41)


def test_the_hash_of_a_replayed_trace_is_part_of_its_spec(tmp_path):
    path = tmp_path / "trace"
    specs = []
    for content in (b"a", b"b"):
        path.write_bytes(content)
        specs.append(dataclasses.replace(JOB, cell=Cell("gate", "k", (("trace", str(path)),))).spec)
        assert json.loads(specs[-1])["trace_sha256"] == hashlib.sha256(content).hexdigest()
    assert (
        specs[0] != specs[1]
        and "trace_sha256" not in dataclasses.replace(JOB, cell=Cell("gate", "k", (("trace", None),))).spec
    )


RUN = Run(corpora={"stdlib": 1000})


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"warmup": 9, "steps": 10}, {"warmup": 10, "steps": 10}),
        ({"dim": 64, "heads": 8}, {"dim": 72, "heads": 8}),
        ({"top_k": 8, "experts": 8}, {"top_k": 9, "experts": 8}),
        ({"lr": None, "pilots": ("a",)}, {"lr": None}),
        ({"shared_gate": "gated", "shared_hidden": 8}, {"shared_gate": "gated"}),
        ({"corpora": {"packages": None}, "vocabulary": 300}, {"vocabulary": 300}),
    ],
)
def test_sizes_of_a_run_fit_each_other(right, wrong):
    dataclasses.replace(RUN, **right)
    with pytest.raises(UserError, match="quality"):
        dataclasses.replace(RUN, **wrong)


def test_runs_that_are_compared_differ_in_their_rule_and_seed_alone():
    """And each has a name of its own, with what is unusual in it; fields that came later are in a spec where they are not the default."""
    same = {"seed": 3, "router": "base", "lr": 0.5, "capacity_factor": None, "network": "mlp", "drop_policy": "random"}
    same |= {
        "train_mode": "frozen_router",
        "trace_tokens": 5,
        "keep_weights": True,
        "pilots": ("x",),
        "options": {"a": 1},
    }
    for name, value in same.items():
        other = dataclasses.replace(RUN, **{name: value})
        assert other.config_hash == RUN.config_hash and other.hash != RUN.hash and other.name != RUN.name, name
    for name, value in {
        "batch": 8,
        "dim": 128,
        "steps": 99,
        "experts": 16,
        "corpora": {"kjv": 9},
        "attention": "qk_norm",
        "label": "b",
    }.items():
        assert dataclasses.replace(RUN, **{name: value}).config_hash != RUN.config_hash, name
    many = dataclasses.replace(RUN, **same, purpose="pilot", attention="qk_norm", shared_hidden=8, shared_gate="gated")
    assert many.name.startswith(
        "run-base-E8-k2-cfnone-mlp-random-frozen_router-shared-gated-qk_norm-pilot-lr0.5-seed3-"
    )
    assert RUN.name == f"run-softk-E8-k2-cf1.25-seed17-{RUN.hash[:8]}" and RUN.tokens_per_step == 16 * 128
    assert "attention" not in json.loads(RUN.spec) and json.loads(many.spec)["attention"] == "qk_norm"
    assert "warmup" in json.loads(RUN.spec) and Run.from_spec(many.spec) == many


def test_an_adaptation_is_named_by_its_variant_and_rank():
    one = Adaptation(RUN, "base", "R", rank=4, adapters=3, top_k=3)
    assert one.name.startswith("run-perftR-r4-seed17-") and one.config_hash == RUN.config_hash
    assert Adaptation.from_spec(one.spec) == one and dataclasses.replace(one, base="other").name != one.name
    assert json.loads(one.spec)["run"] == RUN.spec
    with pytest.raises(UserError, match="at most adapters = 2"):
        dataclasses.replace(one, adapters=2)


def test_the_text_of_a_folder_is_its_visible_files_by_name(tmp_path, monkeypatch):
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    for name in ("b/one", "two", ".hidden"):
        (folder / name).write_text(name)
    assert documents(folder) == [folder / "b/one", folder / "two"] and documents(folder / "two") == [folder / "two"]
    digest = hashlib.sha256(b"text/b/one\0b/onetext/two\0two").hexdigest()
    assert content_sha256(folder) == digest
    (folder / "two").rename(folder / "three")
    assert content_sha256(folder) != digest
    for name, most in (("_MOST_BYTES", 7), ("_MOST_FILES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(f"moe_routing_bench.grid.run_spec.{name}", most)
            with pytest.raises(UserError, match="a larger folder"):
                documents(folder)


@pytest.mark.parametrize(
    ("share", "groups"),
    [
        (None, {"a", "b", "c", "d"}),
        ("1/2", {"a"}),
        ("2/2", {"b", "c", "d"}),
        ("1/3", {"a"}),
        ("2/3", {"b"}),
        ("3/3", {"c", "d"}),
    ],
)
def test_large_groups_are_dealt_out_first(share, groups):
    assert study.groups_of(share, ["d", "c", "c", *["b"] * 4, *["a"] * 8]) == groups
    with pytest.raises(UserError, match="1/2 to 2/2"):
        study.groups_of("3/2", ["a"])


def test_the_folder_of_a_request_is_the_one_that_is_given(tmp_path, monkeypatch):
    """Else that of the config; a platform with a run in its name has no other."""
    config = {"platform": "nvidia-h200", "run": "own"}
    assert study._folder(config, None, None) == "nvidia-h200.own" and study._folder(config, "cpu", None) == "cpu.own"
    assert study._folder(config, None, "mine") == "nvidia-h200.mine"
    assert study._folder(config, "cpu.mine", None) == "cpu.mine" and study._folder({}, "cpu", None) == "cpu"
    monkeypatch.chdir(tmp_path)
    grid = [{"benches": ["gate"], "tokens": [4], "experts": [4], "top_k": [2]}]
    on_cpu = {"grid": [grid[0] | {"tokens": [2]}]}
    monkeypatch.setenv("MOE_ROUTING_BENCH_DEVICE", "auto")
    text = json.dumps({"device": "auto", "run": "own", "grid": grid, "cpu": on_cpu})
    for platform, tokens in (("cpu", [2]), ("nvidia-h200", [4])):
        found, folder, source = study.config_or_last(None, text, platform, None)
        assert (found["grid"][0]["tokens"], folder, source) == (tokens, f"{platform}.own", "--config-json")
    hidden = []
    monkeypatch.setattr(study.platforms, "hide_gpu", hidden.append)
    study.effective(None, json.dumps({"device": "cpu", "grid": grid}))
    monkeypatch.setattr(study.declarations, "installed", lambda: ["b", "a"])
    assert (
        hidden == ["cpu"]
        and study.references(["a", "c", "c"]) == ["b", "a", "c"]
        and study.references(None) == ["b", "a"]
    )


def test_progress_counts_what_is_done_by_todays_code():
    found = progress.Progress("cells measured", 5)
    for codes in ({"x"}, {"x", "y"}, {"y"}, {"x"}):
        found.add(codes, "x")
    assert (found.done, found.other_code, found.remain) == (2, 2, 3)
    assert str(found) == "2 of 5 cells measured, 3 remain, 2 of them done by other code"
    found.newer += [f"file {i}" for i in range(7)]
    assert str(found).count("file") == 5


def test_files_of_another_spec_or_code_are_not_done(tmp_path, monkeypatch):
    def row(code="x", plugin=None):
        return {"code_fingerprint": code, "plugin_fingerprint": plugin}

    files = {Path(name): dataclasses.replace(JOB, twins=(name,)) for name in "abcde"}
    kept = {Path(name): job.spec for name, job in files.items()} | {Path("b"): "other"}
    contents = {"a": [row(), row()], "b": [row()], "c": [row("y"), row()], "d": [row(plugin="p")]}

    def summary(path):
        if path.name not in contents:
            raise UserError("damaged")
        return kept[path], contents[path.name]

    monkeypatch.setattr(progress.cell_files, "summary", summary)
    monkeypatch.setattr(progress, "_codes", lambda: lambda job: ("x", None))
    found = progress.of_cells(files)
    assert (found.asked, found.done, found.other_code, len(found.rows)) == (5, 1, 2, 5)
    monkeypatch.chdir(tmp_path)
    hashes = [(job.hash, one) for path, job in files.items() for one in contents.get(path.name, ())]
    table = pa.Table.from_pylist(
        [{"cell_hash": key} | one for key, one in hashes],
        pa.schema([(name, pa.string()) for name in ("cell_hash", "code_fingerprint", "plugin_fingerprint")]),
    )
    assert progress.collected("cpu", files.values()) is None
    paths.measurements("cpu").parent.mkdir(parents=True)
    paths.measurements("cpu").touch()
    monkeypatch.setattr(progress.records, "read", lambda path: table)
    assert progress.collected("cpu", files.values()) == (4, 2)


def test_training_is_done_where_a_file_is_of_the_spec_and_of_todays_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "fingerprint", lambda files: "x")
    runs = [dataclasses.replace(RUN, seed=seed) for seed in range(4)]
    plan = Plan(
        finals={run.name: run for run in runs}, timing={runs[0].name: [runs[0].name], runs[1].name: [runs[1].name]}
    )
    for run, code, spec in ((runs[0], "x", runs[0].spec), (runs[1], "y", runs[1].spec), (runs[2], "x", "other")):
        known = {"schema_version": run_rows.SCHEMA_VERSION, "code_fingerprint": code, "router": "softk"}
        path = paths.run_file("cpu", run.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        run_rows.write(path, [known], spec)
        timing = paths.timing_file("cpu", run.name)
        timing.parent.mkdir(parents=True, exist_ok=True)
        run_rows.write(timing, [known], spec)
    trained, timed = progress.of_training(plan, "cpu")
    assert (trained.what, trained.asked, trained.done, trained.other_code) == ("training runs done", 4, 1, 1)
    assert (timed.what, timed.asked, timed.done, timed.other_code) == ("timings done", 2, 1, 1)
    assert adaptation_rows.SCHEMA.names[0] == "schema_version"


def test_adaptations_are_held_against_code_of_their_own(tmp_path, monkeypatch):
    """An edit of what trains adapters alone makes adaptations stale and no run; only kinds that are asked for have a line."""
    monkeypatch.chdir(tmp_path)
    codes = {tuple(files_of()): name for name, files_of in (("r", training_files), ("a", adaptation_files))}
    assert len(codes) == 2
    monkeypatch.setattr(progress, "fingerprint", lambda files: codes[tuple(files)])
    adaptations = [Adaptation(dataclasses.replace(RUN, seed=seed), "base", "S", rank=2) for seed in range(5)]
    pilot, *finals = adaptations
    plan = Plan(adaptation_pilots={pilot.name: pilot}, adaptations={one.name: one for one in finals})
    for one, code, spec in (
        (pilot, "a", pilot.spec),
        (finals[0], "r", finals[0].spec),
        (finals[1], "a", "other"),
        (finals[2], "a", finals[2].spec),
    ):
        known = {"schema_version": run_rows.SCHEMA_VERSION, "code_fingerprint": code, "router": "softk"}
        path = paths.perft_file("cpu", one.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        run_rows.write(path, [known], spec, adaptation_rows.SCHEMA)
    (found,) = progress.of_training(plan, "cpu")
    assert (found.what, found.asked, found.done, found.other_code) == ("adaptations done", 5, 2, 1)
    known = {"schema_version": run_rows.SCHEMA_VERSION + 1, "code_fingerprint": "a", "router": "softk"}
    run_rows.write(paths.perft_file("cpu", finals[3].name), [known], finals[3].spec, adaptation_rows.SCHEMA)
    (found,) = progress.of_training(plan, "cpu")
    assert (found.done, found.other_code, len(found.newer)) == (2, 1, 1), "what a newer version wrote is not done"
    assert progress.of_training(Plan(), "cpu") == []


@pytest.mark.parametrize(("wrong", "more"), [(4, []), (5, []), (6, ["and 1 more"]), (9, ["and 4 more"])])
def test_of_rows_that_need_attention_five_are_said(wrong, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths.measurements("cpu").parent.mkdir(parents=True)
    paths.measurements("cpu").touch()
    about = {"bench": "gate", "cell": "c", "suspect": False}
    rows_ = [about | {"implementation": "a", "status": "ok", "converged": True}]
    rows_ += [about | {"implementation": f"i{n}", "status": "crashed", "reason": "x"} for n in range(wrong)]
    table = pa.Table.from_pylist([dict.fromkeys(records.COLUMNS) | one for one in rows_], records.SCHEMA)
    monkeypatch.setattr(progress.records, "read", lambda path: table)
    head, *lines = progress.closing("cpu").splitlines()
    assert head == f"Rows: {wrong} crashed, 1 ok" if wrong > 1 else "Rows: 1 ok, 1 crashed"
    assert [line.strip() for line in lines] == [f"gate c i{n}: crashed: x" for n in range(min(wrong, 5))] + more


def test_codes_of_today_are_read_once_for_each_bench_and_set_of_plugins(monkeypatch):
    """A row's code is both: an edit of its plug-in alone makes it older."""
    asked = []
    fake = {
        name: SimpleNamespace(code_fingerprint=lambda name=name: asked.append(name) or f"of {name}") for name in "ab"
    }
    monkeypatch.setattr(progress, "BENCHES", fake)
    monkeypatch.setattr(progress.plugins, "references", lambda job: job.plugins)
    monkeypatch.setattr(progress.plugins, "fingerprint", lambda job: asked.append(job.plugins) or "+".join(job.plugins))
    of = progress._codes()
    jobs = [
        SimpleNamespace(cell=SimpleNamespace(bench=b), plugins=p)
        for b, p in (("a", ()), ("b", ("x",)), ("a", ("x", "y")))
    ]
    assert [of(job) for job in [*jobs, *jobs]] == [("of a", None), ("of b", "x"), ("of a", "x+y")] * 2
    assert sorted(map(str, asked)) == sorted(map(str, ["a", "b", ("x",), ("x", "y")]))
    row = {"code_fingerprint": "c", "plugin_fingerprint": "p", "status": "ok"}
    assert progress._code(row) == ("c", "p") != progress._code(row | {"plugin_fingerprint": None})


def test_a_request_is_the_given_config_or_the_one_that_was_run_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = [{"benches": ["gate"], "tokens": [4], "experts": [4], "top_k": [2]}]
    paths.CONFIG.parent.mkdir()
    paths.CONFIG.write_text(json.dumps({"platform": "nvidia-h200", "grid": grid}))
    found, folder, source = study.config_or_last(None, None, None, None)
    assert (found["grid"][0]["tokens"], folder, source) == ([4], "nvidia-h200", None)
    assert found["seed"] == 17 and found["device"] == "auto", "defaults are filled in"
    study.last("nvidia-h200").parent.mkdir(parents=True)
    study.last("nvidia-h200").write_text(json.dumps({"grid": [grid[0] | {"tokens": [8]}]}))
    found, _, source = study.config_or_last(None, None, None, None)
    assert (found["grid"][0]["tokens"], source) == ([8], str(study.last("nvidia-h200")))
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({"grid": [grid[0] | {"tokens": [2]}]}))
    found, folder, source = study.config_or_last([paths.CONFIG, own], None, "nvidia-h200", "named")
    assert (found["grid"][0]["tokens"], folder, source) == ([2], "nvidia-h200.named", f"{paths.CONFIG}, {own}")
    with pytest.raises(UserError, match="together with --config"):
        study.effective([own], "{}")
    for text, says in (("[1]", "a JSON object"), ("{", "one JSON text")):
        with pytest.raises(UserError, match=says):
            study.effective(None, text)
    asked = []
    monkeypatch.setattr(study.presets, "load", lambda path, own: asked.append(own) or {})
    assert [job.cell.tokens for job in study.jobs_of(found | {"models": "mine.yaml"})] == [2] and asked == ["mine.yaml"]


def test_rows_that_need_attention_and_times_that_are_doubted(tmp_path, monkeypatch):
    def row(status="ok", suspect=False, reason=None, converged=True, name="a"):
        known = {"bench": "gate", "cell": "c", "implementation": name, "status": status, "reason": "why\nnot"}
        return known | {"suspect": suspect, "suspect_reason": reason, "converged": converged}

    rows_ = [
        row(),
        row(converged=False),
        row(converged=False, suspect=True, reason="it scatters by 3"),
        row(suspect=True, reason="drift of 2.5 %"),
    ]
    rows_ += [
        row(suspect=True, reason="drift of 7 %"),
        row("crashed", suspect=True, converged=False),
        row("unsupported", converged=False),
    ]
    assert progress._unreliable(rows_) == [
        "Unreliable: 4 of 5 times: 3 suspect, most often as: drift of 2.5 %; 1 with a wider interval than asked"
    ]
    assert progress._unreliable(rows_[:1]) == [] and progress._unreliable(rows_[:2]) == [
        "Unreliable: 1 of 2 times: 1 with a wider interval than asked"
    ]
    assert study.unwell(rows_) == ["gate c a: crashed: why not"]
    monkeypatch.chdir(tmp_path)
    assert progress.closing("cpu") == ""
    paths.measurements("cpu").parent.mkdir(parents=True)
    paths.measurements("cpu").touch()
    many = rows_[:2] + [row("timeout", name=f"i{n}") for n in range(7)]
    table = pa.Table.from_pylist([dict.fromkeys(records.COLUMNS) | one for one in many], records.SCHEMA)
    monkeypatch.setattr(progress.records, "read", lambda path: table)
    found = progress.closing("cpu").splitlines()
    assert (
        found[0] == "Rows: 7 timeout, 2 ok"
        and found[1].startswith("Unreliable: 1 of 2")
        and found[-1].strip() == "and 2 more"
    )
    assert len(found) == 8 and found[2].strip().startswith("gate c i0: timeout")
    paths.published_page("cpu").parent.mkdir(parents=True)
    paths.published_page("cpu").touch()
    assert progress.closing("cpu").splitlines()[-1].endswith(str(paths.published_page("cpu")))


def test_an_object_next_to_rows_has_its_keys_once(tmp_path):
    path = tmp_path / "about.json"
    path.write_text('{"a": 1, "b": null}')
    assert companions.mapping(path, ["a", "b"]) == {"a": 1, "b": None}
    for text, says in (('{"a": 1, "a": 1, "b": 2}', "'a'"), ('{"a": 1}', "no b"), ("[1]", "list"), ('{"a": 1', "JSON")):
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            companions.mapping(path, ["a", "b"])


def test_where_files_lie_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/one.parquet", "b/two.parquet", "b/three.txt", "deep/er/four.parquet"):
        path = paths.results("cpu") / "cells" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    cells = paths.results("cpu") / "cells"
    assert paths.orphans("cpu", [cells / "a/one.parquet", cells / "a/gone.parquet"]) == [cells / "b/two.parquet"]
    assert paths.orphans("cpu", []) == [cells / "a/one.parquet", cells / "b/two.parquet"]
    assert cell_files.refused({cells / "a/gone.parquet": JOB}, "cpu") == ([], [])
    assert paths.cell_files("cpu", [JOB]) == {cells / f"gate/{JOB.name}.parquet": JOB} and paths.cell_file(
        "cpu", JOB
    ) in paths.cell_files("cpu", [JOB])
    assert paths.reported("cpu") == {"measurements"}
    paths.perft("cpu").touch()
    assert paths.reported("cpu") == {"measurements", "perft"}
    assert paths.profile_folder("cpu", JOB) == paths.results("cpu") / "profiles" / JOB.name
    assert paths.weights_file(Path("a/run.x.parquet")) == Path("a/run.x.pt") and paths.trace_file(
        Path("r/runs/x.parquet")
    ) == Path("r/traces/x.parquet")
    assert paths.folder("cpu", "x" * 96) == "cpu." + "x" * 96 and paths.plugin_code("cpu", "a:B").name == "a.B.sha256"
    for name in ("x" * 97, "A", "a--b", "a.b"):
        with pytest.raises(UserError, match="run: got"):
            paths.folder("cpu", name)


def test_files_of_a_package_are_named_below_the_working_directory(tmp_path, monkeypatch):
    package = tmp_path / "here" / "package"
    for name in ("a/one.py", "a/deep/two.py", "a/three.txt", "b/four.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    monkeypatch.setattr(project_files, "PACKAGE", package)
    monkeypatch.chdir(tmp_path / "here")
    assert project_files.sources("a") == ["package/a/deep/two.py", "package/a/one.py"]
    assert project_files.sources("a", "b", suffixes=(".txt", ".py"))[2:] == ["package/a/three.txt", "package/b/four.py"]
    assert project_files.source("b/four.py", package) == "package/b/four.py"
    monkeypatch.chdir(package)
    assert project_files.named([tmp_path / "here/x"]) == [str(tmp_path / "here/x")]
    monkeypatch.setattr(
        project_files, "closure", lambda modules: {package / "figures/__init__.py", package / "a/one.py"}
    )
    assert project_files.drawn_with("figures.x") == ["a/one.py"]
    own = package / "own.yaml"
    assert project_files.own_or_shipped(Path("own.yaml")) != Path("own.yaml")
    own.touch()
    assert project_files.own_or_shipped(Path("own.yaml")) == Path("own.yaml")


@pytest.mark.parametrize(
    ("absent", "says"),
    [(["a"], "no a"), (["a", "b", "c"], "no a, b, c"), (["a", "b", "c", "d", "e"], "no a, b, c and 2 more")],
)
def test_packages_that_are_not_installed_are_counted(absent, says, monkeypatch):
    monkeypatch.setattr(project_files, "lacking", lambda: absent)
    with pytest.raises(UserError, match=f"got '{says}'"):
        project_files.check_extra("it")


def test_where_an_installed_package_is_from():
    url = "https://example.org/a/wheel-1.whl"
    assert project_files._places({"url": url}) == (f" @ {url}", ["--find-links", "https://example.org/a"])
    noted = {"url": "https://h/r", "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"}}
    place, kernels = project_files._places(noted)
    assert place == " @ git+https://h/r@abc" and kernels[0].startswith(
        "moe-routing-kernels @ git+https://h/r@abc#subdirectory=src/"
    )
    assert project_files._places({"url": "file:///x", "dir_info": {}})[0] == " @ file:///x"


def test_a_wheel_is_installed_from_where_it_came(monkeypatch):
    """A checkout is told what it is told; without a note of pip the index has it."""
    import importlib.metadata

    advice = "torch is missing; pip install -e src/moe_routing_kernels -e '.[bench]'"
    assert project_files.to_install(advice) == advice or project_files.installed()
    monkeypatch.setattr(project_files, "installed", lambda: True)
    monkeypatch.setattr(project_files, "copied", lambda: True)
    for noted, words in (
        (
            {"url": "file:///x/wheel.whl"},
            "pip install --find-links file:///x 'moe-routing-bench[bench] @ file:///x/wheel.whl'",
        ),
        (None, "pip install 'moe-routing-bench[bench]'"),
    ):
        found = [SimpleNamespace(read_text=lambda name, noted=noted: noted and json.dumps(noted))]
        monkeypatch.setattr(importlib.metadata, "distributions", lambda name, found=found: iter(found))
        assert project_files.to_install(advice) == f"torch is missing; {words}"


def test_git_does_not_look_above_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "site/package"
    package.mkdir(parents=True)
    monkeypatch.setattr(project_files, "PACKAGE", package)
    monkeypatch.setattr(project_files, "installed", lambda: True)
    monkeypatch.setattr(project_files, "shipped", lambda name: tmp_path / name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", "/other")
    (tmp_path / "COMMIT").write_text("abc\n")
    monkeypatch.setenv(project_files.COMMIT, "")
    project_files.name_commit()
    assert os.environ["GIT_CEILING_DIRECTORIES"] == f"{tmp_path / 'site'}{os.pathsep}/other"
    assert os.environ[project_files.COMMIT] == "abc"


def test_rows_for_answers_fit_the_runs_that_have_a_manifest(tmp_path, monkeypatch):
    """Not one of a folder without, and no file that is gone."""
    digests = {}
    for name, published in (("a", True), ("b", True), ("c", False)):
        path = tmp_path / name / "measurements.parquet"
        path.parent.mkdir()
        path.write_bytes(name.encode())
        if published:
            path.with_name("manifest.yaml").touch()
            digests[name] = {"parquet": hashlib.sha256(name.encode()).hexdigest()}
    known = dict(digests)
    monkeypatch.setattr(project_files, "published_rows", lambda path: known)

    def fits():
        project_files.fits_parquet.cache_clear()
        return project_files.fits_parquet(tmp_path / "rows")

    assert fits()
    known["c"] = {"parquet": "0"}
    assert not fits()
    del known["c"]
    (tmp_path / "a/measurements.parquet").write_bytes(b"z")
    assert not fits()
    (tmp_path / "a/measurements.parquet").unlink()
    assert not fits()
    del known["a"]
    assert fits() and np.isfinite(len(known))
