"""Training runs and adaptations as jobs: what is planned and collected, what runs again, and that a config without them plans none.

All with one project, which has run once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from moe_routing_bench.figures import FIGURES
from project import BASE, CELLS, DRAWN, GRID, Project, count

ENTRY = {
    "label": "tiny",
    "router": ["dense"],
    "seed": [1],
    "corpora": {"stdlib": 20000},
    "dim": 16,
    "heads": 2,
    "expert_hidden": 16,
    "sequence": 32,
    "batch": 4,
    "steps": 4,
    "warmup": 1,
    "timing": True,
    "pilot": {"lr": [0.01, 0.001], "steps": 3},
}
ADAPTED = {
    "label": "other",
    "base": "base",
    "variant": ["R"],
    "rank": [2],
    "corpora": {"docs": 8000},  # of all of it, validation alone would be 80 kB
    "steps": 3,
    "warmup": 1,
    "pilot": {"lr": [0.01, 0.001], "steps": 2},
}
COLLECT = {"collect_quality": 1, "collect_perft": 1}
JOBS = {"train": 4, "time_training": 1, "adapt": 3, **COLLECT}
RUNS, ADAPTATIONS = TARGETS = ("results/cpu/quality.parquet", "results/cpu/perft.parquet")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy with a training run, its pilots and its timing, and another run with its adaptation, all done."""
    project = Project.create(tmp_path_factory.mktemp("training"))
    project.configure(GRID, quality=[ENTRY, BASE], perft=[ADAPTED])
    assert count(project.snakemake(*TARGETS)) == JOBS
    return project


@pytest.mark.slow
def test_rows_are_collected_with_the_chosen_rate_and_the_time(project: Project) -> None:
    """And their ranking is in the log: the validation text of the library recurs nowhere in training."""
    rows = pq.read_table(project.folder / RUNS, filters=[("router", "=", "dense")]).to_pylist()
    assert [(row["seed"], row["step"], row["purpose"]) for row in rows] == [(1, 4, "final")]
    assert all(row["pilot_lrs"] == [0.001, 0.01] and row["lr"] in row["pilot_lrs"] for row in rows)
    assert rows[0]["timed_alone"] and rows[0]["experts_ms"] > 0
    assert rows[0]["lr"] == min(zip(rows[0]["pilot_losses"], rows[0]["pilot_lrs"], strict=True))[1]
    assert rows[0]["recurring_share"] == 0
    log = (project.folder / "results/cpu/logs/collect_quality.log").read_text()
    assert "rank  router" in log and "recurs" not in log


@pytest.mark.slow
def test_adaptations_are_collected_with_the_chosen_rate(project: Project) -> None:
    """From before the first step on; losses and parameters are in the log."""
    rows = pq.read_table(project.folder / ADAPTATIONS).to_pylist()
    assert [(row["seed"], row["step"], row["variant"]) for row in rows] == [(1, 0, "R"), (1, 3, "R")]
    assert all(row["lr"] == min(zip(row["pilot_losses"], row["pilot_lrs"], strict=True))[1] for row in rows)
    assert all(row["domains"] == ["docs"] and row["old_domains"] == ["stdlib"] for row in rows)
    assert "PERFT-R r2" in (project.folder / "results/cpu/logs/collect_perft.log").read_text()
    weights = (project.folder / "results/cpu/runs").glob("*.pt")
    assert sorted(path.name.partition("-")[0] for path in weights) == ["base", "tiny"], "of final runs alone"


@pytest.mark.slow
def test_what_runs_again(project: Project) -> None:
    """Nothing; a new seed and another rank; only a ranking after an edit of its comparison; adaptations alone after one of the
    adapters; all after one of the loop."""
    assert project.jobs(*TARGETS) == {}
    project.configure(GRID, quality=[ENTRY | {"seed": [1, 2]}, BASE], perft=[ADAPTED | {"rank": [2, 4]}])
    assert project.jobs(*TARGETS) == {"train": 1, "adapt": 3, **COLLECT}
    project.configure(GRID, quality=[ENTRY, BASE], perft=[ADAPTED])
    for name, expected in (
        ("compare", {"collect_quality": 1}),
        ("perft_summary", {"collect_perft": 1}),
        ("adapt", {"adapt": 3, "collect_perft": 1}),
        ("train", JOBS),
    ):
        path = project.folder / f"src/moe_routing_bench/quality/{name}.py"
        before = path.read_text()
        path.write_text(before + "\n# edited\n")
        assert project.jobs(*TARGETS) == expected, name
        path.write_text(before)


@pytest.mark.slow
def test_without_a_quality_section_nothing_is_trained(project: Project) -> None:
    """The jobs are those of the grid; rows that are stored are in its report all the same, and are not collected again."""
    bench = {"measure": sum(CELLS.values()), "measure_again": 1, "collect": 1, "html": 1, "all": 1}
    project.configure(GRID)
    assert project.jobs() == bench | {"figure": len(FIGURES)}
    stored = [project.folder / name for name in TARGETS]
    for rows in stored:
        rows.rename(rows.with_suffix(".kept"))
    assert project.jobs() == bench | {"figure": DRAWN}
    for rows in stored:
        rows.with_suffix(".kept").rename(rows)


@pytest.mark.slow
def test_a_command_on_the_server_ends_with_its_caller(project: Project, tmp_path: Path) -> None:
    """A run whose client is killed stops, and its checkpoint is there for the next."""
    client = project.folder / "src/moe_routing_bench/measure/client.py"
    out = tmp_path / "run.parquet"
    fields = [
        f"{k}={yaml.safe_dump(v, default_flow_style=True).splitlines()[0]}"
        for k, v in ENTRY.items()
        if k in ("dim", "heads", "corpora", "sequence", "batch")
    ]
    settings = [*fields, "eval_every=2", "warmup=1", "max_epochs=1000000"]
    words = [word for one in settings for word in ("--set", one)]
    command = [
        sys.executable,
        "-I",
        "-S",
        client,
        "--module",
        "moe_routing_bench.cli",
        "train",
        "--router",
        "dense",
        "--steps",
        "100000",
        *words,
        "--out",
        out,
    ]
    environment = os.environ | {"PYTHONPATH": str(project.folder / "src")}
    with subprocess.Popen(
        list(map(str, command)), cwd=project.folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None and any("step 2/" in line for line in caller.stdout)
        while not out.with_suffix(".ckpt").exists():
            time.sleep(0.01)
        caller.send_signal(signal.SIGKILL)
    time.sleep(0.5)
    written = out.with_suffix(".ckpt").stat().st_mtime_ns
    time.sleep(0.5)
    assert out.with_suffix(".ckpt").stat().st_mtime_ns == written and not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("studies", ["a1.yaml", pytest.param("*.yaml", marks=pytest.mark.campaign)])
def test_every_study_runs_at_a_tiny_size(studies: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model of the first and the last entry of each, on bytes of the standard library; two rates of pilots. One study has pilots."""
    tiny = {"dim": 16, "heads": 2, "layers": 1, "sequence": 16, "batch": 2, "steps": 2, "warmup": 1, "eval_every": 2}
    tiny |= {"corpora": {"stdlib": 40_000}, "vocabulary": 256, "validation_tokens": 100, "trace_tokens": 16}
    entries = []
    for study in sorted((project.folder / "config/studies").glob(studies)):
        every = yaml.safe_load(study.read_text())["quality"]
        for entry in every if len(every) < 3 else (every[0], every[-1]):
            some = {name: entry[name][:1] for name in ("router", "seed", "capacity_factor") if name in entry} | tiny
            if "pilot" in entry:  # of two rates none is between two others
                some["pilot"] = {"steps": 2, "lr": entry["pilot"]["lr"][:2], "seed": entry["pilot"]["seed"][:1]}
            entries.append(entry | some | {"expert_hidden": entry["expert_hidden"] // 64})
    project.configure(GRID, quality=entries)
    assert count(project.snakemake(TARGETS[0]))["collect_quality"] == 1
    rows = pq.read_table(project.folder / RUNS).to_pylist()
    assert {row["label"] for row in rows} == {entry["label"] for entry in entries}
    assert all(row["bits_per_byte"] > 0 and row["engine"] == "eager" for row in rows)
    assert (
        {row["label"] for row in rows if row["pilot_losses"]}
        == {entry["label"] for entry in entries if "pilot" in entry}
        == {"a1_xs", "a1_s"}
    )
    packaged = BASE | {"label": "packaged", "corpora": {"packages": "all"}, "vocabulary": 512}
    project.configure(GRID, quality=[packaged, packaged | {"label": "wider", "vocabulary": 1024}])
    monkeypatch.setenv("MOE_ROUTING_BENCH_CORPORA", str(project.folder / "nothing"))
    assert project.jobs(TARGETS[0]) == {"prepare_texts": 1, "train": 2, "collect_quality": 1}
    said = project.snakemake(TARGETS[0], "--dry-run", "--printshellcmds")
    assert "prepare-texts --vocabulary 1024" in said.stdout + said.stderr, "which has the tokens of both"
