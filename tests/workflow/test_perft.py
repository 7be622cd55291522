"""Adaptations as jobs: after their base, with pilots, collected in a table of their own; and what runs again."""

import pyarrow.parquet as pq
import pytest

from project import GRID, Project, count

BASE = {
    "label": "tiny", "router": ["softk"], "seed": [1], "corpora": {"stdlib": 20000}, "experts": 4, "dim": 16, "heads": 2, "expert_hidden": 16,
    "sequence": 32, "batch": 4, "steps": 4, "warmup": 1, "lr": 0.01,
}  # fmt: skip
ENTRY = {
    "label": "other", "base": "tiny", "variant": ["R"], "rank": [2], "corpora": {"docs": "all"}, "steps": 3, "warmup": 1,
    "pilot": {"lr": [0.01, 0.001], "steps": 2},
}  # fmt: skip
JOBS = {"train": 1, "adapt": 3, "collect_perft": 1}
TARGET = "results/cpu/perft.parquet"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy with a run and its adaptation, all done."""
    project = Project.create(tmp_path_factory.mktemp("perft"))
    project.configure(GRID, quality=[BASE], perft=[ENTRY])
    assert count(project.snakemake(TARGET)) == JOBS
    return project


@pytest.mark.slow
def test_rows_are_collected_with_the_chosen_rate(project: Project) -> None:
    """From before the first step on; losses and parameters are in the log."""
    rows = pq.read_table(project.folder / TARGET).to_pylist()
    assert [(row["seed"], row["step"], row["variant"]) for row in rows] == [(1, 0, "R"), (1, 3, "R")]
    assert all(row["lr"] == min(zip(row["pilot_losses"], row["pilot_lrs"], strict=True))[1] for row in rows)
    assert all(row["domains"] == ["docs"] and row["old_domains"] == ["stdlib"] for row in rows)
    assert "PERFT-R r2" in (project.folder / "results/cpu/logs/collect_perft.log").read_text()
    assert len(list((project.folder / "results/cpu/runs").glob("*.pt"))) == 1


@pytest.mark.slow
def test_what_runs_again(project: Project) -> None:
    """Nothing; another rank; adaptations alone after an edit of the adapters, with their bases after one of the loop."""
    assert project.jobs(TARGET) == {}
    project.configure(GRID, quality=[BASE], perft=[ENTRY | {"rank": [2, 4]}])
    assert project.jobs(TARGET) == {"adapt": 3, "collect_perft": 1}
    project.configure(GRID, quality=[BASE], perft=[ENTRY])
    adapted = {"adapt": 3, "collect_perft": 1}
    for name, expected in (
        ("comparison/perft_summary", {"collect_perft": 1}),
        ("model/adapters", adapted),
        ("training/train", JOBS),
    ):
        path = project.folder / f"src/moe_routing_bench/quality/{name}.py"
        before = path.read_text()
        path.write_text(before + "\n# edited\n")
        assert project.jobs(TARGET) == expected
        path.write_text(before)
