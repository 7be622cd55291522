"""Manifests: computed from the rows, refused where they contradict them, and valid for every published run."""

import functools
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from moe_routing_bench.benches.bench import find
from moe_routing_bench.cli import main as cli
from moe_routing_bench.cli import published
from moe_routing_bench.packages import fingerprint
from moe_routing_bench.quality.code import training_files
from moe_routing_bench.store import manifest, paths, records, rows
from moe_routing_bench.store.parquet import read_table, write_table
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
RUNS = sorted(path.parent.name for path in (ROOT / "results").glob("nvidia-*/measurements.parquet"))
SHA = "5c515ac0000000000000000000000000000000aa"
ROW = {
    "schema_version": rows.SCHEMA_VERSION,
    "bench": "gate",
    "implementation": "torch",
    "cell": "a",
    "status": "ok",
    "median_us": 1.5,
    "platform": "cpu",
    "git_sha": SHA,
    "git_dirty": False,
    "cpu_model": "C",
    "started_at": "2026-11-21T06:55:00+00:00",
    "ended_at": "2026-11-22T06:55:00+00:00",
}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Writes rows of a run where there is no history, and one config: reading all of the repository's takes half a second a manifest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    shutil.copy(ROOT / "config/config.yaml", tmp_path / "config")
    monkeypatch.setattr(manifest, "_git", lambda *words: None)
    return lambda *changes: rows.write(paths.measurements("cpu"), [ROW | change for change in changes], "")


def edit(**change):
    path = paths.manifest("cpu")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))


def test_a_manifest_says_what_measured_the_rows(stored):
    """One entry per commit and state of the tree. The package version is unknown without the history."""
    stored({}, {"cell": "b", "git_dirty": True, "cpu_model": "D"}, {"implementation": "triton", "started_at": None})
    manifest.write("cpu")
    found = manifest.read("cpu")
    table = found["tables"]["measurements"]
    assert (found["run"], found["config"], table["schema_version"], table["cells"]) == (
        "cpu",
        None,
        rows.SCHEMA_VERSION,
        2,
    )
    clean, dirty = sorted(table["measured"], key=lambda one: one["dirty"])
    assert clean == {
        "version": None,
        "commit": SHA,
        "dirty": False,
        "cards": ["C"],
        "first": ROW["started_at"],
        "last": ROW["ended_at"],
        "rows": 2,
    }
    assert (dirty["dirty"], dirty["cards"], dirty["rows"]) == (True, ["D"], 1)
    paths.manifest("cpu").write_text(paths.manifest("cpu").read_text().replace("version: null", "version: 0.1.0"))
    assert manifest.versions("cpu", [SHA, None, "other"]) == {SHA: "0.1.0"}, "the manifest keeps it for later"


def test_the_config_that_the_workflow_kept_is_in_the_manifest(stored):
    stored({})
    (paths.results("cpu") / "config.json").write_text('{"device": "cpu"}')
    manifest.write("cpu")
    assert manifest.read("cpu")["config"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "cpu.other"}, "run of results/cpu/manifest.yaml: got 'cpu.other'; allowed: cpu"),
        ({"tables": {}}, "got 'nothing'"),
        ({"note": "x"}, "note of results/cpu/manifest.yaml: got 'x'; allowed: no such key"),
        ({"config": 3}, "config of results/cpu/manifest.yaml: got 3"),
    ],
)
def test_an_edited_manifest_is_refused(stored, change, words):
    stored({})
    manifest.write("cpu")
    edit(**change)
    with pytest.raises(UserError) as error:
        manifest.read("cpu")
    assert words in str(error.value) and "moe-routing-bench manifest --platform cpu" in str(error.value)


@pytest.mark.parametrize("text", [None, "- a\n", "a: [\n"])
def test_a_manifest_that_is_none_is_refused(stored, monkeypatch, capsys, text):
    """One line and exit status 2."""
    stored({})
    if text is not None:
        paths.manifest("cpu").write_text(text)
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "published", "--platform", "cpu"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "manifest" in error and "writes it" in error


def test_other_rows_contradict_the_manifest(stored):
    stored({})
    manifest.write("cpu")
    stored({}, {"cell": "b"})
    with pytest.raises(UserError, match=r"tables.measurements.cells of .*: got 1; allowed: 2"):
        manifest.read("cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"git_sha": None}], "got None; allowed: 40 hexadecimal digits"),
        ([{"git_sha": "5c515ac"}], "got '5c515ac'; allowed: 40 hexadecimal digits"),
        ([{}, {"schema_version": 4}], "schema_version: got 4"),
        ([{"platform": "nvidia-h200"}], "platform of the rows"),
    ],
)
def test_rows_that_cannot_be_published(stored, changes, words):
    stored(*changes)
    with pytest.raises(UserError, match=words):
        manifest.write("cpu")
    assert not paths.manifest("cpu").exists()


def test_a_commit_outside_the_history_is_refused(stored, monkeypatch):
    """Where the whole history is there; a shallow clone cannot know."""
    stored({})
    said = {"rev-parse": "false", "cat-file": None, "show": None}
    monkeypatch.setattr(manifest, "_git", lambda word, *words: said[word])
    with pytest.raises(UserError, match="allowed: a commit of this repository"):
        manifest.write("cpu")
    said["rev-parse"] = "true"
    manifest.write("cpu")


def test_a_version_that_the_history_contradicts_is_refused(stored, monkeypatch):
    """Where there is no history the manifest is believed."""
    stored({})
    said = {"rev-parse": "false", "cat-file": "", "show": 'version = "0.2.0"'}
    monkeypatch.setattr(manifest, "_git", lambda word, *words: said[word])
    manifest.write("cpu")
    path = paths.manifest("cpu")
    path.write_text(path.read_text().replace("version: 0.2.0", "version: 0.3.0"))
    with pytest.raises(UserError, match=r"version of .*manifest.yaml: got '0.3.0'; allowed: 0.2.0"):
        manifest.read("cpu")
    said |= {"rev-parse": None, "cat-file": None, "show": None}
    assert manifest.read("cpu")["tables"]["measurements"]["measured"][0]["version"] == "0.3.0"


def test_published_names_changed_benches(stored, capsys):
    """It is information: rows of older code are listed like others."""
    with pytest.raises(UserError, match="published runs: got 'none in results/'"):
        published.published()
    stored({"code_fingerprint": "old"}, {"bench": "pack", "code_fingerprint": find("pack").code_fingerprint()})
    published.manifest("cpu")
    published.published()
    out = capsys.readouterr().out
    assert "wrote results/cpu/manifest.yaml" in out and "2026-11-21 to 2026-11-22" in out
    assert out.splitlines()[-1].split()[-1] == "gate" and SHA[:7] in out
    assert manifest.changed([("gone", "x"), ("pack", find("pack").code_fingerprint())]) == ["gone"]
    assert manifest.changed([("pack", "older"), ("pack", find("pack").code_fingerprint())]) == ["pack"]


@pytest.mark.parametrize(("code_of", "said"), [(None, "quality"), (training_files, "–")], ids=["older", "today"])
def test_published_compares_training_runs_with_the_code_of_today(code_of, said, stored, capsys):
    stored({})
    today = "old" if code_of is None else fingerprint(code_of())[:16]
    names = ("schema_version", "platform", "git_sha", "git_dirty", "cpu_model", "started_at", "ended_at")
    rows_of = [{name: ROW[name] for name in names} | {"code_fingerprint": today}]
    write_table(paths.quality("cpu"), pa.Table.from_pylist(rows_of))
    published.manifest("cpu")
    capsys.readouterr()
    published.published("cpu")
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == said


@functools.cache
def table_of(run):
    return records.read(ROOT / "results" / run / "measurements.parquet")


@pytest.mark.parametrize("run", RUNS)
def test_published_rows_are_as_their_manifest_says(run, monkeypatch):
    """The schema can be read, commits are known, and the manifest has a config."""
    monkeypatch.chdir(ROOT)
    found = manifest.read(run)
    assert set(table_of(run)["status"].to_pylist()) <= set(rows.STATUSES) and found["config"]


@pytest.mark.parametrize("run", RUNS)
def test_published_rows_are_consistent(run):
    """Medians lie within their quartiles, rates are bytes over time, and every row has its own cell and implementation."""
    frame = records.frame(table_of(run))
    assert not frame.duplicated(["bench", "cell", "implementation"]).any()
    ok = frame[frame["status"] == "ok"]
    assert (ok["min_us"] <= ok["median_us"]).all() and (ok["median_us"] <= ok["max_us"]).all()
    moved = ok[ok["gb_per_s"].notna()]
    rate = moved["compulsory_bytes"] / moved["median_us"] / 1e3
    assert ((rate / moved["gb_per_s"] - 1).abs() < 1e-6).all()
    computed = ok[ok["tflops"].notna()]
    assert ((computed["flops"] / computed["median_us"] / 1e6 / computed["tflops"] - 1).abs() < 1e-6).all()


def test_tables_of_two_schemas_are_refused(stored):
    """Also of training runs, whose schema the store does not know."""
    stored({})
    other = read_table(paths.measurements("cpu")).select(["schema_version", "platform", "git_sha"])
    two = other.set_column(0, "schema_version", other["schema_version"]).to_pylist()
    write_table(paths.quality("cpu"), other.from_pylist([*two, two[0] | {"schema_version": 3}]))
    with pytest.raises(UserError, match=r"schema versions of .*quality.parquet: got \['3', '5'\]"):
        manifest.write("cpu")


def test_groups_stand_in_the_order_of_their_first_rows():
    """A commit that began earlier and ended later comes first."""
    times = [("b", "2026-11-21", "2026-11-25"), ("a", "2026-11-22", "2026-11-23"), ("b", "2026-11-20", "2026-11-21")]
    groups = manifest.groups(
        [ROW | {"git_sha": sha, "started_at": first, "ended_at": last} for sha, first, last in times]
    )
    assert [(group["commit"], group["first"], group["last"], group["rows"]) for group in groups] == [
        ("b", "2026-11-20", "2026-11-25", 2),
        ("a", "2026-11-22", "2026-11-23", 1),
    ]


@pytest.mark.parametrize(("dirty", "said"), [(False, "aaaaaaa"), (True, "aaaaaaa with changes")])
def test_published_says_whether_the_code_had_changes(dirty, said, monkeypatch):
    group = {"commit": "a" * 40, "dirty": dirty, "version": "1", "first": "2026-11-21", "last": "2026-11-21"}
    tables = {"measurements": {"measured": [group | {"cards": ["a card"], "rows": 3}]}}
    monkeypatch.setattr(published.manifests, "read", lambda run: {"tables": tables})
    monkeypatch.setattr(published, "_changed", lambda run, table: "")
    assert [line[3] for line in published._lines("run")] == [said]
