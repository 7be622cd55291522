"""Only changed cells are measured, one at a time: real runs of the workflow on a copy of the repository, with their jobs counted.

All tests that share the first run are in this file: workers that share the tests then make it once."""

import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.seeds.section import section
from moe_routing_bench.store import records
from moe_routing_bench.study import LAST
from project import CELLS, GRID, ROOT, SHOWN, SMALL, Project, count, measured
from signals import commands, interruptible

ALL = sum(CELLS.values())
DRAW = {"figure": len(SHOWN), "html": 1, "all": 1}  # what follows from newly collected measurements
COLLECT = {"measure_again": 1, "collect": 1}  # what follows from newly measured cells
AFTER = {**COLLECT, **DRAW}


def cells(project: Project) -> dict[Path, bytes]:
    """The cells' files with their content."""
    return {path: path.read_bytes() for path in (project.folder / "results/cpu/cells").rglob("*.parquet")}


def test_first_run_measures_the_copy_and_makes_the_report(first_run: tuple[Project, dict[str, int]]) -> None:
    """Every cell has rows, the report is there, and the code that ran is the copy's."""
    done, jobs = first_run
    assert jobs == {"measure": ALL, **AFTER}
    table = pq.read_table(done.folder / "results/cpu/measurements.parquet")
    assert table.num_rows == ALL and set(table["status"].to_pylist()) == {"ok"}
    assert set(table["cpu_threads"].to_pylist()) == {1}, "whatever torch would take by itself"
    assert (done.folder / "reports/cpu/index.html").stat().st_size > 10_000
    where = done.run("python", "-c", "import moe_routing_bench; print(moe_routing_bench.__file__)").stdout
    assert where.startswith(str(done.folder))


def test_one_measurement_at_a_time_whatever_the_cores(done: Project) -> None:
    """The first run had two cores and the default profile, whose `gpu` resource keeps measurements apart."""
    rows = pq.read_table(
        done.folder / "results/cpu/measurements.parquet", columns=["started_at", "ended_at"]
    ).to_pylist()
    spans = sorted((datetime.fromisoformat(row["started_at"]), datetime.fromisoformat(row["ended_at"])) for row in rows)
    assert len(spans) == sum(CELLS.values()) and all(start < end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), spans


@pytest.mark.slow
def test_snakemake_report_holds_every_figure_with_its_caption(project: Project) -> None:
    """One file to hand on."""
    project.run("snakemake", "--report", "report.html", forked=True)
    text = (project.folder / "report.html").read_text()
    _, _, embedded = text.partition('<script id="results">\n    var results = ')
    results, _ = json.JSONDecoder().raw_decode(embedded)
    drawn = [FIGURES[name] for name in SHOWN]
    assert set(results) == {f"reports/cpu/figures/{figure.name}.svg" for figure in drawn}
    for figure in drawn:
        shown = results[f"reports/cpu/figures/{figure.name}.svg"]
        assert figure.caption in html.unescape(shown["caption"]) and shown["labels"] == {"figure": figure.title}
        assert shown["data_uri"].startswith("data:image/svg+xml")


def test_second_run_does_nothing(done: Project, tmp_path: Path) -> None:
    """Not even in another folder, with newer times of every file that is not a result. It says where the report is all the same."""
    project = done.copy(tmp_path / "project")
    before = cells(project)
    for path in project.folder.rglob("*"):
        if path.relative_to(project.folder).parts[0] not in ("results", "reports", ".snakemake"):
            os.utime(path)
    second = project.snakemake()
    assert count(second) == {} and "the report is reports/cpu/index.html" in second.stdout + second.stderr
    assert cells(project) == before


def test_snakemake_waits_for_the_end_of_a_job(project: Project) -> None:
    """Its default limit would have it look at all waiting jobs once a second for every job so far; a limit that is asked for stays."""
    for limit in ("100/1s", "7/1s"):
        run = project.snakemake(
            "--until", "collect", "--forcerun", "collect", "--verbose", "--max-jobs-per-timespan", limit
        )
        assert re.findall(r"Submitting maximum (.*?) job", run.stdout + run.stderr) == ["7"] * (limit == "7/1s")
        assert count(run) == {"collect": 1}


def test_status_and_prune_compare_with_the_config_that_was_run(project: Project) -> None:
    """And not with the default config, which may ask for something else."""
    project.configure([GRID[0] | {"tokens": [256]}])
    assert f"{ALL} of {ALL} cells measured, 0 remain" in project.bench("status").stdout
    assert "found 0 files" in project.bench("prune").stdout
    assert f"found {ALL} files" in project.bench("prune", "--config", "config/config.yaml").stdout


def test_a_new_axis_value_and_an_edited_kernel_measure_only_their_cells(project: Project) -> None:
    """One more number of tokens: one cell of pack, one of combine. A file of gate: its bench, and the composite that is made of
    it. Then what is made of all rows."""
    before = cells(project)
    project.configure([GRID[0] | {"tokens": [64, 128, 256]}, GRID[1]])
    project.edit("src/moe_routing_kernels/gate/torch_gate.py")
    run = project.snakemake("--until", "collect")
    assert measured(run) == {"pack": 1, "combine": 1, "gate": 1, "routing": 1}
    assert count(run) == {"measure": 4, **COLLECT} and f"\nRows: {ALL + 2} ok\n" in run.stdout + run.stderr
    after = cells(project)
    assert len(after) == ALL + 2
    assert {path.parent.name for path, content in before.items() if after[path] != content} == {"gate", "routing"}
    assert project.jobs() == DRAW


@pytest.mark.slow
def test_adding_a_bench_leaves_every_cell_fresh(project: Project) -> None:
    """Nor does an axis that no bench reads, a rule to train with, or a format: what is only registered measures nothing."""
    recipes = (ROOT / "docs/extending.md").read_text()
    bench = re.search(r"^## Add a bench\n(.*?)^## ", recipes, re.M | re.S)
    assert bench
    for path, text in re.findall(r"File: `([^`]+)`\n\n *```python\n(.*?)^ *```", bench[1], re.M | re.S):
        (project.folder / path).parent.mkdir(exist_ok=True)
        (project.folder / path).write_text(textwrap.dedent(text))
    package = project.folder / "src/moe_routing_bench"
    for file, old, new in (
        ("benches/registry.py", '"model",', '"model", "count",'),
        (
            "config/axes.py",
            "_TABLE = (\n",
            '_TABLE = (\n    Axis("extra", int, "an axis of no bench", "way", default=1, least=0),\n',
        ),
    ):
        text = (package / file).read_text()
        assert text.count(old) == 1, file
        (package / file).write_text(text.replace(old, new))
    assert "count" in project.bench("list").stdout
    assert count(project.snakemake("--until", "collect")) == {"collect": 1}
    table = pq.read_table(project.folder / "results/cpu/measurements.parquet")
    assert table["extra"].null_count == len(table) == ALL


@pytest.mark.slow
def test_editing_the_report_measures_nothing(project: Project) -> None:
    """What only the report needs; then also one figure, and the caption of another, though all captions are in one file; then also
    what all figures share."""
    package = project.folder / "src/moe_routing_bench"
    captions, title = package / "figures/captions.yaml", FIGURES["pareto"].title
    text = captions.read_text()
    assert text.count(f"title: {title}\n") == 1
    for file, drawn in (
        ("report/templates/report.css", 0),
        ("figures/matrices.py", 2),
        ("figures/paper.py", len(SHOWN)),
    ):
        project.edit(f"src/moe_routing_bench/{file}")
        if drawn == 2:
            captions.write_text(text.replace(f"title: {title}\n", f"title: {title} and more\n"))
        assert project.jobs() == ({"figure": drawn} if drawn else {}) | {"html": 1, "all": 1}, file


@pytest.mark.slow
def test_a_fresh_clone_changes_nothing(project: Project, tmp_path: Path) -> None:
    """All sources written anew by git, results carried over; Snakemake's records as well, then without those."""
    as_someone = ("git", "-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "all")):
        project.run(*as_someone, *command)
    project.run("git", "clone", "--quiet", ".", tmp_path / "clone")
    clone = Project(tmp_path / "clone")
    before = cells(project)
    for name in ("results", "reports", ".snakemake"):
        shutil.copytree(project.folder / name, clone.folder / name, dirs_exist_ok=True)
    for path in (clone.folder / "src").rglob("*.py"):
        os.utime(path)  # newer than all results
    assert clone.jobs() == {}
    shutil.rmtree(clone.folder / ".snakemake")
    assert "measure" not in clone.jobs()  # only times are left to go by, so what is cheap may be made again
    assert before and {path.relative_to(clone.folder) for path in cells(clone)} == {
        path.relative_to(project.folder) for path in before
    }


def test_a_lost_cell_is_measured_again(project: Project) -> None:
    """Though `collect` has no input of every cell: Snakemake would go through all of them a second time."""
    lost, *_ = (path for path in cells(project) if path.parent.name == "gate")
    lost.unlink()
    dry = project.snakemake("--dry-run")
    assert measured(dry) == {"gate": 1} and count(dry) == {"measure": 1, **AFTER}
    assert count(project.snakemake("--until", "collect")) == {"measure": 1, **COLLECT}
    assert len(cells(project)) == ALL and project.jobs() == DRAW


def test_other_implementations_measure_their_cells(project: Project) -> None:
    """All implementations of a cell are measured side by side, so one more measures them all, in that cell."""
    project.configure([GRID[0], GRID[1] | {"implementations": ["torch", "torch_compile"]}])
    dry = project.snakemake("--dry-run")
    assert measured(dry) == {"gate": 1, "routing": 1} and count(dry) == {"measure": 2, **AFTER}


def test_swapped_settings_measure_everything(project: Project) -> None:
    """The same values in other places are another measurement."""
    project.configure(GRID, SMALL | {"wall_calls": 2, "settle_blocks": 1})  # they were 1 and 2
    assert project.jobs() == {"measure": ALL, **AFTER}


@pytest.mark.slow
@pytest.mark.campaign
def test_the_config_says_how_many_threads_measure(project: Project) -> None:
    """One without it, which Snakemake's log says; another number is another measurement, and stored."""
    rows = project.folder / "results/cpu/measurements.parquet"
    assert set(pq.read_table(rows)["cpu_threads"].to_pylist()) == {1}
    project.configure([GRID[1] | {"benches": ["gate"]}], SMALL | {"cpu_threads": 2})
    run = project.snakemake("--until", "collect")
    assert (
        count(run) == {"measure": 1, **COLLECT}
        and "cells are asked for, with 2 CPU threads;" in run.stdout + run.stderr
    )
    assert pq.read_table(rows)["cpu_threads"].to_pylist() == [2]


@pytest.mark.slow
def test_another_seed_measures_everything(project: Project) -> None:
    """It decides the routing that is measured."""
    config = project.folder / "config/config.yaml"
    config.write_text(config.read_text().replace("seed: 17", "seed: 18"))
    assert project.jobs() == {"measure": ALL, **AFTER}


def test_a_lost_snakemake_folder_loses_no_change(project: Project) -> None:
    """A file's name holds the hash of its spec and its metadata the spec: good files are kept, others never collected."""
    shutil.rmtree(project.folder / ".snakemake")
    before = cells(project)
    assert "wrote" in project.bench("collect").stdout
    project.edit("src/moe_routing_kernels/gate/torch_gate.py")
    assert measured(project.snakemake("--dry-run")) == {"gate": 1, "routing": 1}
    project.configure(GRID, SMALL | {"wall_calls": 2})
    shutil.rmtree(project.folder / ".snakemake", ignore_errors=True)
    assert project.jobs() == {"measure": ALL, **AFTER}
    assert "6 rows" in project.bench("collect", "--force").stdout, "a plan changes nothing"
    refused = project.bench("collect", "--config", "config/config.yaml", "--force", check=False)
    assert refused.returncode == 2 and f"{ALL} of {ALL} missing" in refused.stderr, refused.stderr
    assert refused.stderr.count("\n") == 1 and cells(project) == before


def test_a_file_of_another_spec_is_refused(project: Project) -> None:
    """Even under the right name."""
    first, second = sorted(path for path in cells(project) if path.parent.name == "pack")
    shutil.copy2(first, second)
    refused = project.bench("collect", check=False)
    assert refused.returncode == 2 and "was measured for spec" in refused.stderr and refused.stderr.count("\n") == 1


def measuring(group: int) -> bool:
    """Whether the client of a measurement runs in a group of processes."""
    for pid, command in commands():
        with contextlib.suppress(OSError):  # it has ended
            if "\0-S\0" in command and os.getpgid(pid) == group:
                return True
    return False


@pytest.mark.slow
def test_an_interrupt_says_what_to_do_and_no_spec(project: Project) -> None:
    """Ctrl-C in a measurement: Snakemake prints the command that it has ended, without the JSON text that it had."""
    project.configure(
        [GRID[1] | {"benches": ["gate"]}], SMALL | {"max_seconds": 60.0, "min_blocks": 5000, "max_blocks": 5000}
    )
    environment = os.environ | {"PYTHONPATH": str(project.folder / "src")}
    with subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1"],
        cwd=project.folder,
        env=environment,
        preexec_fn=interruptible,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        deadline = time.monotonic() + 120
        while not measuring(run.pid) and time.monotonic() < deadline:
            time.sleep(0.05)  # until the client runs: its shell alone has made the log
        time.sleep(0.3)
        os.killpg(run.pid, signal.SIGINT)
        out, _ = run.communicate(timeout=120)
    assert run.returncode == 1 and "Error in rule measure" in out
    assert "client.py results/cpu/cells/gate/" in out and " '{...}' cpu" in out and '{"' not in out
    assert "`moe-routing-bench status` lists what remains" in out


NAMED = ("--config", "run=mine")


def write_trace(project: Project, reverse: bool = False) -> Path:
    """A trace so large that Snakemake compares files of its size by time, with its tokens in either order."""
    ids = np.random.default_rng(0).random((100_000, 8), dtype=np.float32).argsort(axis=1)[:, :2]
    trace = project.folder / "trace.parquet"
    rows = pa.table({"expert_ids": list(ids[::-1] if reverse else ids)})
    pq.write_table(rows, trace, compression="none", use_dictionary=False)
    assert trace.stat().st_size > 1_000_000
    return trace


@pytest.fixture(scope="module")
def named(done: Project, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy in which another run, of one cell that reads a trace, was measured beside the first. Not to measure."""
    project = done.copy(place)
    write_trace(project)
    entry = {"benches": ["permute"], "implementations": ["torch"], "tokens": [64], "experts": [8], "top_k": [2]}
    project.configure([entry | {"sampler": ["trace"], "trace": "trace.parquet"}])
    assert count(project.snakemake(*NAMED, "--until", "collect")) == {"measure": 1, **COLLECT}
    return project.copy(tmp_path_factory.mktemp("named") / "project")


@pytest.mark.slow
def test_a_trace_counts_by_its_content(named: Project) -> None:
    """A touched file changes nothing; other ids do."""
    target = ("results/cpu.mine/measurements.parquet", *NAMED)
    os.utime(named.folder / "trace.parquet")
    assert named.jobs(*target) == {}
    write_trace(named, reverse=True)
    assert named.jobs(*target) == {"measure": 1, **COLLECT}
    write_trace(named)


@pytest.mark.slow
def test_a_named_run_keeps_to_itself(named: Project, done: Project) -> None:
    """Its own cells, rows and report; the unnamed run and its figures stay as they are."""
    table = pq.read_table(named.folder / "results/cpu.mine/measurements.parquet")
    assert table.num_rows == 1 and set(table["platform"].to_pylist()) == {"cpu"}
    dry = named.snakemake(*NAMED, "--dry-run")
    assert count(dry) == DRAW and "report reports/cpu.mine/index.html" in dry.stdout + dry.stderr
    kept = {path.relative_to(named.folder): content for path, content in cells(named).items()}
    assert kept == {path.relative_to(done.folder): content for path, content in cells(done).items()}
    report = "reports/cpu/index.html"
    assert (named.folder / report).read_bytes() == (done.folder / report).read_bytes()
    assert "1 of 1 cells measured" in named.bench("status", "--run", "mine").stdout
    refused = named.snakemake("--dry-run", "--config", "run=../cpu", check=False)
    assert refused.returncode and "config.run: got '../cpu'" in refused.stdout + refused.stderr


@pytest.mark.slow
def test_what_other_packages_have_counts_where_it_is_asked_for(project: Project) -> None:
    """A kernel and a routing rule, from the working directory, on the warm server, in a run of its own."""
    shutil.copytree(ROOT / "examples/own_kernel/own_kernel", project.folder / "own_kernel")
    shutil.copy(ROOT / "examples/own_router.py", project.folder)
    entry = {"tokens": [64], "hidden": [64], "experts": [8], "top_k": [2]}
    grid = [
        {"benches": ["combine"], "implementations": ["torch", "own_bmm"], **entry},
        {"benches": ["pack", "combine"], "implementations": ["torch"], **entry | {"tokens": [128]}},
        {"benches": ["gate"], "implementations": ["torch"], "router": ["own_router:SHARP"], **entry},
    ]
    project.configure(grid, plugins=["own_kernel"])
    target = ("--config", "run=own", "--until", "collect")
    assert count(project.snakemake(*target)) == {"measure": 4, **COLLECT}
    rows = pq.read_table(project.folder / "results/cpu.own/measurements.parquet").to_pylist()
    # So few calls of a busy machine may look like work that is left out.
    assert all(row["status"] == "ok" or "work is left out" in row["reason"] for row in rows)
    assert [row["plugin"] for row in rows].count("own_kernel:COMBINE") == 1
    (project.folder / "own_kernel/unused.py").write_text("")
    assert project.jobs(*target) == {} and "4 of 4 cells measured" in project.bench("status", "--run", "own").stdout
    project.edit("own_kernel/bmm_combine.py")
    said = project.bench("status", "--run", "own").stdout
    assert "3 of 4 cells measured, 1 remain, 1 of them done by other code" in said
    project.edit("own_router.py")
    assert measured(project.snakemake(*target, "--dry-run")) == {"combine": 1, "gate": 1}


@pytest.mark.slow
def test_orphans_are_listed_and_removed_only_when_asked(project: Project) -> None:
    """A smaller grid leaves files behind; they are in no table."""
    project.configure([GRID[0] | {"tokens": [64]}, GRID[1]])
    assert count(project.snakemake("--until", "collect")) == COLLECT
    assert pq.read_table(project.folder / "results/cpu/measurements.parquet").num_rows == ALL - 2
    assert len(cells(project)) == ALL
    listed = project.bench("prune").stdout
    assert listed.count(".parquet") == 2 and "found 2 files" in listed and len(cells(project)) == ALL
    assert "moved 2 files" in project.bench("prune", "--remove").stdout
    assert len(cells(project)) == ALL - 2 and project.jobs() == DRAW


@pytest.mark.slow
def test_a_seed_document_s_block_is_replayed_at_a_reduced_size(project: Project) -> None:
    """From the command that replays it to its tables, on a CPU: sizes, profiles, and both sides of the tables. It is here for the
    warm server, which takes longer to start than to measure the block."""
    config = ("--configfile", "config/seeds/004.yaml", "--config", "device=cpu")
    project.snakemake(*config, "--until", "collect", "profile")
    results = project.folder / "results/cpu.seed-004"
    (cell,) = results.glob("cells/layer/*.parquet")
    (profiled,) = results.glob("profiles/*")
    assert profiled.name == cell.stem and (profiled / "operators.csv").is_file()
    assert json.loads((profiled / "torch_loop.json").read_text())["traceEvents"]
    assert '"cpu":' not in (results / LAST).read_text(), "what was asked for on this platform, and no more"
    rows = records.read(results / "measurements.parquet").to_pandas()
    replayed = section(rows, "seed-004", [json.loads((profiled / "profile.json").read_text())])
    assert replayed is not None
    totals, *operators = replayed.tables
    manual = next(row for row in totals.rows if row[0] == "manual")
    assert manual[1:3] == ["829,292", "849,695"] and manual[4] == "torch_loop" and "divided by 8" in totals.note
    assert all(float(manual[i].replace(",", "")) > 0 for i in (5, 8)), manual
    assert len(operators) == 3
    remaining = project.jobs(*config)
    assert "html" in remaining and not remaining.keys() & {"measure", "profile", "collect"}
