"""The command line: what it prints, and that a mistake is one line on stderr with exit status 2."""

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

import forks
from moe_routing_bench import packages, study
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import main as cli
from moe_routing_bench.cli import printing, status
from moe_routing_bench.comparison import anomalies
from moe_routing_bench.config import load as config
from moe_routing_bench.config.expand import cell_of, expand
from moe_routing_bench.measure import supervisor
from moe_routing_bench.quality import code as quality_code
from moe_routing_bench.quality import plan, run_rows
from moe_routing_bench.quantities import count
from moe_routing_bench.store import paths, platforms, records, rows
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.study import progress
from moe_routing_kernels import choices
from signals import interruptible, runs

ROOT = Path(__file__).parents[2]
CONFIG = {
    "grid": [{"benches": ["gate"], "implementations": ["torch"], "tokens": [64, 128], "experts": [8], "top_k": [2]}]
}


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder that has the presets; return (exit status, stdout, stderr)."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


def write_cell(job, status="ok", code=None, folder="cpu", **more):
    path = paths.cell_file(folder, job)
    row = (
        {
            "schema_version": rows.SCHEMA_VERSION,
            "bench": job.cell.bench,
            "cell": job.cell.key,
            "cell_hash": job.hash,
            "platform": "cpu",
            "implementation": "torch",
            "status": status,
            "reason": "it broke",
            "measure_seconds": 2.0,
            "median_us": 1.0 if status == "ok" else None,
            "started_at": "2026-11-21T06:55:00+00:00",
            "ended_at": "2026-11-21T06:55:02+00:00",
            "code_fingerprint": code or BENCHES[job.cell.bench].code_fingerprint(),
        }
        | dict(job.cell.values)
        | more
    )
    rows.write(path, [row], job.spec)
    return path


def test_list_names_everything_and_why_it_is_missing(call):
    code, out, _ = call("list", "--platform", "cpu")
    assert code == 0
    for text in ("torch_grouped_mm", "deepseek_v3", "qwen3-30b-a3b", "needs an NVIDIA GPU", "unsupported: "):
        assert text in out


def test_columns_are_listed_with_their_units_and_can_be_searched(call):
    code, out, _ = call("columns")
    assert code == 0 and set(records.COLUMNS) <= {line.split()[0] for line in out.splitlines()}
    _, out, _ = call("columns", "INTERVAL")
    assert "ci_low_us   " in out and " µs " in out and "converged" in out and "gpu_name" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["columns", "no such text"], "TEXT: got 'no such text'; allowed: a text in the name"),
        (["measure", "gat"], "did you mean 'gate'?"),
        (["measure", "gate", "--implementations", "troch"], "did you mean 'torch'?"),
        (["measure", "gate", "--top-k", "9"], "1 to experts=8"),
        (["measure", "gate", "--tokens", "64,x"], "--tokens: got 'x'; allowed: an integer"),
        (["measure", "gate", "--seed", "1", "--seed", "2"], "--seed: got '2 times'; allowed: once"),
        (["measure", "gate", "--tokens", "1,2", "--out", "rows.parquet"], "--out: got '2 cells'"),
        (["measure", "gate", "--json", "--csv"], "one of them"),
        (["measure", "gate", "--dtype", "float32"], "did you mean 'fp32'?"),
        (["measure", "gate", "--dtype", "torch.bfloat16"], "did you mean 'bf16'?"),
        (["status", "--platform", "cpu", "--platform", "cpu"], "--platform: got '2 times'"),
        (["measure", "pack", "--layout", "padded"], "capacity_factor"),
        (["measure", "pack", "--capacity-factor", "x"], "or none"),
        (["measure", "layer", "--model", "mixtral-8x7b", "--experts", "8"], "nothing in addition to model"),
        (["status", "--config", "absent.yaml"], "readable YAML"),
        (["status", "--config-json", "{"], "--config-json"),
        (["report", "--platform", "../x"], "lower-case"),
        (["collect", "--platform", "cpu"], "run `snakemake`"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(call, arguments, words):
    code, out, error = call(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


@pytest.fixture
def measured(monkeypatch):
    """What `measure` hands to the supervisor, which measures nothing."""
    seen = []

    def fake(job, out, mode, *_):
        seen.append((job, out, mode))
        return [{"implementation": "torch", "status": "ok", "median_us": 12.345, "ci_low_us": 12.0, "ci_high_us": 13.0}]

    monkeypatch.setattr(supervisor, "measure", fake)
    return seen


def test_measure_hands_one_job_to_the_supervisor(call, measured):
    code, out, _ = call("measure", "gate", "--tokens", "64", "--implementations", "torch", "--max-seconds", "0.1")
    ((job, path, mode),) = measured
    assert code == 0 and path is None and mode == "cold" and "12.35" in out.replace("12.34", "12.35")
    assert job.implementations == ("torch",) and job.settings.max_seconds == 0.1
    assert job.cell == cell_of("gate", tokens=64, experts=8, top_k=2)


def test_measure_prints_shares_loads_and_what_speaks_against_a_time(call, monkeypatch):
    row = {
        "bench": "pack",
        "cell": "a",
        "implementation": "torch",
        "status": "ok",
        "median_us": 12.5,
        "ci_low_us": 12.0,
        "ci_high_us": 13.0,
    }
    row |= {
        "gb_per_s": 3.0,
        "speedup": 1.0,
        "share_of_roofline": 0.425,
        "converged": False,
        "suspect": True,
        "suspect_reason": "ceilings drifted",
    }
    row |= {"load_cv": 0.5, "load_max_over_mean": 1.75, "dead_experts": 1, "drop_rate": 0.0325, "capacity_factor": 1.0}
    monkeypatch.setattr(supervisor, "measure", lambda *_: [row])
    _, out, _ = call("measure", "pack")
    assert "42 %" in out and "suspect: ceilings drifted; interval still wide" in out
    for timer, warm in (("cuda_graph", True), ("events", True), ("wall", False)):
        monkeypatch.setattr(supervisor, "measure", lambda *_, timer=timer: [row | {"cold": False, "timer": timer}])
        assert ("interval still wide; L2 may be warm" in call("measure", "pack")[1]) == warm, timer
    monkeypatch.setattr(supervisor, "measure", lambda *_: [row | {"cold": True, "timer": "cuda_graph"}])
    assert "L2 may be warm" not in call("measure", "pack")[1]
    assert "loads: CV 0.50, busiest expert 1.75x the mean, 1 without a token; 3.2 % of the assignments dropped" in out
    monkeypatch.setattr(
        supervisor, "measure", lambda *_: [row | {"converged": True, "suspect": False, "load_cv": None}]
    )
    _, out, _ = call("measure", "pack")
    assert "suspect" not in out and "wide" not in out and "loads" not in out


def test_measure_ends_with_status_1_where_an_implementation_failed(call, monkeypatch):
    """The table is printed all the same. What this machine lacks is no failure."""
    found = {"bench": "gate", "cell": "a", "median_us": None}
    crashed = found | {"implementation": "torch", "status": "crashed", "reason": "preparing: KeyError: 'xx'"}
    absent = found | {"implementation": "cute", "status": "unsupported", "reason": "needs an NVIDIA GPU"}
    monkeypatch.setattr(supervisor, "measure", lambda *_: [crashed, absent])
    code, out, error = call("measure", "gate")
    assert code == 1 and "KeyError: 'xx'" in out and "\n1 of 2 rows are of implementations that failed\n" in error
    monkeypatch.setattr(supervisor, "measure", lambda *_: [absent])
    assert call("measure", "gate")[0] == 0


def test_a_run_ends_with_the_counts_of_its_rows_and_the_first_that_failed(call):
    """At most five of those, each with its reason."""
    cells = {"grid": [{**CONFIG["grid"][0], "tokens": [1, 2, 3, 4, 5, 6, 7, 8]}]}
    assert progress.closing("cpu") == ""
    jobs = expand(config.load(cells), {})
    for number, job in enumerate(jobs):
        write_cell(job, "crashed" if number else "ok")
    call("collect", "--platform", "cpu", "--config-json", json.dumps(cells))
    first, *wrong, more = progress.closing("cpu").split("\n")
    assert first == "Rows: 7 crashed, 1 ok" and more == "  and 2 more"
    assert wrong == [f"  gate {job.cell.key} torch: crashed: it broke" for job in jobs[1:6]]


def test_a_run_ends_with_how_many_of_its_times_are_unreliable_and_why(call):
    """With the reason that most of them have; and with the page of published rows, where there is one."""
    cells = {"grid": [{**CONFIG["grid"][0], "tokens": [1, 2, 3, 4, 5, 6]}]}
    drifted = [{"suspect": True, "suspect_reason": f"ceilings drifted {by}%"} for by in (3.1, 12)]
    busy = {"suspect": True, "suspect_reason": "busy", "converged": False}  # once, though both speak against it
    each = [busy, *drifted, {"converged": False}, {}, {}]
    for job, doubt in zip(expand(config.load(cells), {}), each, strict=True):
        write_cell(job, "ok", **doubt)
    call("collect", "--platform", "cpu", "--config-json", json.dumps(cells))
    said = (
        "Unreliable: 4 of 6 times: 3 suspect, most often as: ceilings drifted 3.1%; 1 with a wider interval than asked"
    )
    assert progress.closing("cpu").split("\n") == ["Rows: 6 ok", said]
    page = paths.published_page("cpu")
    page.parent.mkdir(parents=True)
    page.write_text("")
    assert progress.closing("cpu").split("\n")[2:] == [f"Published rows of a GPU, to compare: {page}"]


def test_measure_takes_several_values_of_an_axis_and_says_what_it_is_about(call, measured):
    """Separated by commas, or in several options; each cell is announced."""
    code, _, error = call(
        "measure", "gate", "--tokens", "64,128", "--tokens", "256", "--experts", "8,16", "--implementations", "torch"
    )
    assert code == 0
    request = [
        cell_of("gate", tokens=tokens, experts=experts, top_k=2) for tokens in (64, 128, 256) for experts in (8, 16)
    ]
    assert [job.cell for job, *_ in measured] == request
    assert error.splitlines()[-1] == f"cell 6 of 6: gate {request[-1].key}: torch"


def test_measure_warns_of_options_that_the_bench_does_not_read(call, measured):
    assert (
        "warning: gate does not read --hidden, --skew\n" in call("measure", "gate", "--skew", "1", "--hidden", "8")[2]
    )
    assert "warning" not in call("measure", "pack", "--skew", "1", "--hidden", "8", "--seed", "3")[2]
    assert "warning" not in call("measure", "gate", "--model", "mixtral-8x7b", "--phase", "decode")[2]
    assert len(measured) == 3


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_measure_prints_all_columns_for_programs(call, monkeypatch, form):
    """Those of all cells in one document, and nothing else on stdout; of rows that differ in their columns as well."""
    found = [
        {"implementation": "torch", "status": "ok", "median_us": 1.5, "samples_us": [1.0, 2.0]},
        {"implementation": "cute", "status": "unsupported", "reason": "needs a GPU, and more"},
    ]
    monkeypatch.setattr(supervisor, "measure", lambda *_: [dict(row) for row in found])
    code, out, error = call("measure", "gate", "--tokens", "64,128", form)
    assert code == 0 and "cell 2 of 2" in error
    if form == "--json":
        assert json.loads(out) == found * 2
    else:
        first, second, *rest = csv.DictReader(io.StringIO(out))
        assert len(rest) == 2 and json.loads(first["samples_us"]) == [1.0, 2.0] and float(first["median_us"]) == 1.5
        assert second["reason"] == "needs a GPU, and more" and second["median_us"] == ""


@pytest.mark.parametrize(
    ("option", "threads"), [pytest.param([], 1, marks=pytest.mark.slow), (["--cpu-threads", "2"], 2)]
)
def test_measure_computes_with_as_many_threads_as_the_workflow(option, threads):
    """One, whatever torch would take by itself and Snakemake gives to its jobs; it is said, and stored in the rows."""
    quick = ["--implementations", "torch", "--tokens", "8", "--max-seconds", "0.01", "--min-blocks", "3", "--json"]
    # What torch would take by itself it decides when it is imported, so a fork is no test of the default.
    environment = forks.environment(ROOT / "src", forked=bool(option)) | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        ["moe-routing-bench", "measure", "gate", *quick, *option],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[:2000] + done.stderr
    (row,) = json.loads(done.stdout)
    assert row["cpu_threads"] == threads
    assert done.stderr.startswith(f"torch computes with {count(threads, 'CPU thread')}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_measurement_without_a_traceback_or_a_process(number):
    """As Ctrl-C does, while the worker runs; the exit status is the shell's own for it."""
    options = ["gate", "--implementations", "torch", "--tokens", "64", "--max-seconds", "60", "--min-blocks", "5000"]
    command = [sys.executable, "-m", "moe_routing_bench.cli", "measure", *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    )
    assert any(line.startswith("cell 1 of 1: ") for line in process.stderr), "it has ended before"
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in error + out, error
    deadline = time.monotonic() + 60
    while any(map(runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers and not any(map(runs, workers))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_at_the_fork_of_a_worker_is_not_swallowed(number):
    """Which is what Python does with one that comes in what it runs around a fork."""
    script = f"""
import os, signal, sys
from moe_routing_bench.cli.main import main
parent = os.getpid()
os.register_at_fork(after_in_parent=lambda: os.getpid() == parent and os.kill(parent, {number:d}))
sys.argv = ["moe-routing-bench", "measure", "gate", "--implementations", "torch", "--max-seconds", "60", "--min-blocks", "5000"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, preexec_fn=interruptible
    )
    assert done.returncode == 128 + number and "Exception ignored" not in done.stderr


def test_the_version_and_short_help(call):
    assert call("--version")[:2] == (0, f"moe-routing-bench {metadata.version('moe-routing-bench')}\n")
    code, out, _ = call("measure", "-h")
    assert code == 0 and "Exit status: 0 where" in out and "--tokens INTEGER[,...]" in out
    assert "--install-completion" in call("-h")[1]


def test_an_option_of_measure_is_a_value_of_its_axis(call, measured):
    trace = str(ROOT / "config/traces/topk_hard-e32-k2.parquet")
    options = [
        "--experts",
        "32",
        "--capacity-factor",
        "1.25",
        "--packed",
        "fp8_row",
        "--phase",
        "decode",
        "--seed",
        "3",
    ]
    call("measure", "pack", *options, "--trace", trace)
    call("measure", "pack", "--capacity-factor", "none")
    call("measure", "gate", "--model", "mixtral-8x7b", "--tokens", "64")
    (first, *_), (second, *_), (third, *_) = measured
    sizes = {"tokens": 1024, "hidden": 1024, "top_k": 2}
    request = {"experts": 32, "capacity_factor": 1.25, "packed": "fp8_row", "phase": "decode", "seed": 3}
    assert first.cell == cell_of("pack", **sizes, **request, sampler="trace", trace=trace)
    assert second.cell == cell_of("pack", **sizes, experts=8)
    assert third.cell == cell_of("gate", tokens=64, experts=8, top_k=2, router="softmax_topk_renorm")


def test_status_collect_and_prune_follow_the_config(call):
    jobs = expand(config.load(CONFIG), {})
    text = ["--platform", "cpu", "--config-json", json.dumps(CONFIG)]
    write_cell(jobs[0])
    code, out, _ = call("status", *text)
    assert code == 0 and "1 of 2 cells measured, 1 remain" in out and "about 2 s" in out

    code, _, error = call("collect", *text)
    assert code == 2 and "1 of 2 missing" in error and not paths.measurements("cpu").exists()

    write_cell(jobs[1], "crashed")
    code, out, _ = call("collect", *text)
    assert code == 0 and "2 rows of 2 cells" in out and len(records.read(paths.measurements("cpu"))) == 2
    assert "crashed: it broke" in call("status", *text)[1]

    other = json.dumps({"grid": [{**CONFIG["grid"][0], "tokens": [64]}]})
    orphan = paths.cell_file("cpu", jobs[1])
    assert str(orphan) in call("prune", "--platform", "cpu", "--config-json", other)[1] and orphan.exists()
    out = call("prune", "--remove", "--platform", "cpu", "--config-json", other)[1]
    assert not orphan.exists() and paths.cell_file("cpu", jobs[0]).exists()
    (moved,) = paths.trash("cpu").glob("*/cells/*/*.parquet")
    assert moved.name == orphan.name and str(moved.parents[2]) in out and "compared with --config-json" in out


def test_collect_holds_rows_against_what_was_measured_again(call, monkeypatch):
    jobs = expand(config.load(CONFIG), {})
    for job in jobs:
        write_cell(job)
    again = paths.again("cpu")
    again.parent.mkdir(parents=True, exist_ok=True)
    rest = dict.fromkeys(anomalies.SECONDS.names)
    second = pa.Table.from_pylist([rest | {"cell_hash": jobs[0].hash, "median_us": 3.0}], anomalies.SECONDS)
    write_table(again, second)
    judged, given = anomalies.with_anomalies, []
    monkeypatch.setattr(anomalies, "with_anomalies", lambda *values: given.append(values[1]) or judged(*values))
    assert call("collect", "--platform", "cpu", "--config-json", json.dumps(CONFIG))[0] == 0
    again.unlink()
    assert call("collect", "--platform", "cpu", "--config-json", json.dumps(CONFIG), "--force")[0] == 0
    assert given[0].to_pylist() == second.to_pylist() and given[1] is None


@pytest.mark.parametrize("kept_by", ["manifest", "name", None])
def test_prune_keeps_what_a_published_or_named_run_has_collected(call, kept_by):
    """Their tables are not made again from another config."""
    folder = "cpu.named" if kept_by == "name" else "cpu"
    jobs = expand(config.load(CONFIG), {})
    collected = write_cell(jobs[0], folder=folder)
    text = json.dumps({"grid": [{**CONFIG["grid"][0], "tokens": [64]}]})
    assert call("collect", "--platform", folder, "--config-json", text)[0] == 0
    orphan = write_cell(jobs[1], folder=folder)
    if kept_by == "manifest":
        paths.manifest(folder).write_text("")
    other = json.dumps({"grid": [{**CONFIG["grid"][0], "tokens": [32]}]})
    out = call("prune", "--remove", "--platform", folder, "--config-json", other)[1]
    assert not orphan.exists() and collected.exists() == bool(kept_by)
    assert ("kept 1 other files" in out) == bool(kept_by) and f"moved {1 + (kept_by is None)} files" in out


def test_collect_says_on_what_rows_were_measured(call):
    """How many cards, nodes and SLURM jobs, and the names of some."""
    request = {"grid": [CONFIG["grid"][0] | {"tokens": [64, 128, 256, 512, 1024]}]}
    for number, job in enumerate(expand(config.load(request), {})):
        where = {"gpu_name": "NVIDIA H200", "gpu_uuid": f"GPU-{number % 2}", "host": "n2", "slurm_job_id": str(number)}
        write_cell(job, **(where if number else {"host": "n1"}))
    code, out, _ = call("collect", "--platform", "cpu", "--config-json", json.dumps(request))
    assert code == 0 and "measured on 2 NVIDIA H200; 2 nodes (n1, n2); 4 SLURM jobs (1, 2, 3, 4)" in out
    rows = [{"host": "n1", "slurm_job_id": str(number)} for number in range(9)]
    assert printing.places(rows) == "1 node (n1); 9 SLURM jobs (0, 1, 2, 3, …)"


def test_status_counts_cells_of_other_code_as_remaining(call):
    first, second = expand(config.load(CONFIG), {})
    write_cell(first)
    write_cell(second, code="0" * 16)
    code, out, _ = call("status", "--platform", "cpu", "--config-json", json.dumps(CONFIG))
    assert code == 0 and "1 of 2 cells measured, 1 remain, 1 of them done by other code" in out
    assert "asked by --config-json" in out and "about 2 s" in out


def test_status_takes_a_cell_for_done_only_where_all_its_rows_are_of_todays_code(call):
    """And counts its time once, however many rows it has."""
    cells = progress.Progress("cells measured", 3)
    for codes in ({"today"}, {"today", "other"}, {"other"}):
        cells.add(codes, "today")
    assert (cells.done, cells.other_code, cells.remain) == (1, 2, 2)
    times = [("a", 4.0), ("a", 3.0), ("a", None), ("b", 2.0)]
    assert status._seconds([{"bench": "gate", "cell": c, "measure_seconds": s} for c, s in times]) == [4.0, 2.0]


def test_status_says_what_a_collected_table_holds_of_cells_without_files(call):
    """As after a clone, which has the published rows and no files of cells."""
    jobs = expand(config.load(CONFIG), {})
    text = ["--platform", "cpu", "--config-json", json.dumps(CONFIG)]
    files = [write_cell(jobs[0]), write_cell(jobs[1], code="0" * 16)]
    tables = [records.read(path) for path in files]
    rows.write(paths.measurements("cpu"), [row for one in tables for row in one.to_pylist()], "")
    for path in files:
        path.unlink()
    out = call("status", *text)[1]
    assert "0 of 2 cells measured, 2 remain" in out
    assert "measurements.parquet has rows of 2 of the cells, 1 of them of today's code" in out


def test_status_counts_training_runs(call):
    """One of two runs is there; its timing, which names no code, is of the same."""
    entry = {
        "label": "tiny",
        "router": ["softk"],
        "steps": 4,
        "experts": 4,
        "seed": [0, 1],
        "lr": 0.01,
        "warmup": 1,
        "timing": True,
        "corpora": {"stdlib": 50000},
    }
    wanted = CONFIG | {"quality": [entry]}
    text = ["--platform", "cpu", "--config-json", json.dumps(wanted)]
    first, _ = plan.expand(config.load(wanted)["quality"]).finals.values()
    today = packages.fingerprint(quality_code.training_files())[:16]
    row = {"schema_version": run_rows.SCHEMA_VERSION, "run": first.name, "router": "softk"}
    run_rows.write(paths.timing_file("cpu", first.name), [row], first.spec)
    assert "0 of 1 timings done, 1 remain\n" in call("status", *text)[1], "there is nothing that it is of"
    run_rows.write(paths.run_file("cpu", first.name), [row | {"code_fingerprint": today}], first.spec)
    out = call("status", *text)[1]
    assert "1 of 2 training runs done, 1 remain\n" in out and "1 of 1 timings done, 0 remain\n" in out
    run_rows.write(paths.run_file("cpu", first.name), [row | {"code_fingerprint": "0" * 16}], first.spec)
    out = call("status", *text)[1]
    assert "0 of 2 training runs done, 2 remain, 1 of them done by other code\n" in out
    assert "0 of 1 timings done, 1 remain, 1 of them done by other code\n" in out


def test_without_a_config_status_and_prune_follow_the_last_run(call):
    """Not the default config, of which nothing was measured; where no run has left its config, prune refuses."""
    jobs = expand(config.load(CONFIG), {})
    kept = write_cell(jobs[0])
    status, _, error = call("prune", "--platform", "cpu", "--remove")
    assert status == 2 and "results/cpu/config.json" in error and kept.exists()
    assert "asked by config/config.yaml, because" in call("status", "--platform", "cpu")[1]
    study.last("cpu").write_text(json.dumps(CONFIG))
    assert "found 0 files" in call("prune", "--platform", "cpu")[1]
    out = call("status", "--platform", "cpu")[1]
    assert "1 of 2 cells measured, 1 remain\nasked by results/cpu/config.json\n" in out


def test_doctor_checks_the_config(call):
    code, out, _ = call("doctor")
    assert code == 0 and "22 cells" in out and "FAIL" not in out


def test_doctor_ends_with_what_can_be_measured_here(call, monkeypatch):
    """Most of what is optional is of no use without a GPU, and the last line says so."""
    monkeypatch.setattr(platforms, "current", lambda: "cpu")
    said = call("doctor")[1].splitlines()[-1]
    able, known = map(int, re.match(r"(\d+) of (\d+) implementations can be measured here", said).groups())
    assert 5 < able < known == sum(len(bench.implementations) for bench in BENCHES.values())
    assert said.endswith("the others need an NVIDIA GPU, and some a package; `moe-routing-bench list` says which")
    monkeypatch.setattr(platforms, "current", lambda: "nvidia-h200")
    assert call("doctor")[1].splitlines()[-1].endswith("the others need a package; `moe-routing-bench list` says which")


def test_an_unknown_option_keeps_its_own_message_and_nothing_imports_torch():
    script = "import sys; from moe_routing_bench.cli import main as cli; assert 'torch' not in sys.modules; cli.main()"
    done = subprocess.run([sys.executable, "-c", script, "list", "--nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "No such option" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_choices_prints_the_regret_and_writes_the_table(call):
    """Of all stored runs that are not of a CPU, or of those that are named."""
    Path("results").symlink_to(ROOT / "results")
    code, out, _ = call("choices", "--out", "table.json")
    assert code == 0 and Path("table.json").read_bytes() == choices.FILE.read_bytes()
    for text in (
        "in the table, against the best of the candidates: mean 0.0%",
        "left out, against the best measured: mean",
        "bar: mean 3%, worst 15%",
        "suspect cells: ",
    ):
        assert text in out
    files = sorted(Path("results").glob("nvidia-h200*/measurements.parquet"))
    with_layers = [one.parent.name for one in files if "layer" in set(pd.read_parquet(one, columns=["bench"])["bench"])]
    assert 5 < len(with_layers) < len(files)
    code, out, _ = call("choices", *with_layers, "--peers", "--out", "some.json")
    assert code == 0 and Path("some.json").read_bytes() == choices.FILE.read_bytes(), "no other run has layers"
    code, _, said = call("choices", "nvidia-h200.training")
    assert code == 2 and "layers with a time" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["choices"], "layers with a time: got 'none in results/'"),
        (["choices", "nvidia-h200.none"], "run `snakemake` first"),
        (["choices", "--out", "none/there/is/table.json"], "error: "),
    ],
)
def test_choices_without_rows_is_refused_in_one_line(arguments, words, call):
    code, _, said = call(*arguments)
    assert code == 2 and words in said and said.count("\n") == 1


def test_targets_prints_bars_with_intervals_and_what_is_not_measured(call):
    """Of all stored runs, or of those that are named."""
    code, _, said = call("targets")
    assert code == 2 and "rows: got 'none in results/'" in said
    Path("results").symlink_to(ROOT / "results")
    code, out, _ = call("targets", "nvidia-h200.model", "nvidia-h200.decode")
    text = " ".join(out.split())
    assert code == 0 and "not measured" in text and re.search(r"\d+ bars: (\d+ [a-z, ]+)+", text)
    assert re.search(r"model, one token: .* 1\.\d{3}x \[1\.\d{3}, 1\.\d{3}\]", text) and "nvidia-h200.model" in text
    assert call("targets", "nvidia-h200.none")[0] == 2
