"""Whatever an implementation does to its worker, the cell's file is complete and the others are measured."""

import sys
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.job import Job
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.measure import supervisor
from moe_routing_bench.store import platforms, records

sys.path.insert(0, str(Path(__file__).parent))
import faulty_pack

CELL = cell_of("pack", tokens=64, hidden=32, experts=8, top_k=2, dtype="fp32")
QUICK = Settings(max_seconds=0.05, min_blocks=3, max_blocks=4, warmup_ms=1, timeout=3)
EXPECTED = {
    "kill": ("crashed", "SIGKILL"),
    "hang": ("timeout", "no word for 3 s"),
    "raise": ("crashed", "ValueError: the kernel was called wrongly"),
    "wrong": ("incorrect", "1 of 4096 elements differ"),
    "nan": ("incorrect", "1 of 4096 elements differ"),
    "memory": ("out_of_memory", "memory"),
    "mutate": ("incorrect", "inputs were changed: x"),
}


@pytest.fixture
def measured(add_packs, tmp_path):
    """Measure `pack` with the torch baseline and faulty implementations, and read the file back."""
    import torch  # noqa: F401  (imported before the fork, as the warm server does)

    def run(*faults):
        add_packs(faulty_pack, "fault", faults)
        job = Job(CELL, ("torch", *faults), QUICK)
        supervisor.measure(job, tmp_path / "cell.parquet")
        assert [p.name for p in tmp_path.iterdir()] == ["cell.parquet"], "a partial file was left"
        table = records.collect({tmp_path / "cell.parquet": job}, platforms.current())
        return {row["implementation"]: row for row in table.to_pylist()}

    return run


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_costs_only_its_own_row(measured, fault):
    rows = measured("none", fault)
    status, reason = EXPECTED[fault]
    assert rows[fault]["status"] == status
    assert reason in rows[fault]["reason"]
    assert rows[fault]["median_us"] is None, "what is wrong has no time"
    assert rows["torch"]["status"] == rows["none"]["status"] == "ok"
    assert rows["torch"]["median_us"] > 0
    assert rows["none"]["speedup"] > 0


def test_all_faults_at_once(measured):
    rows = measured(*EXPECTED)
    assert {name: row["status"] for name, row in rows.items()} == {"torch": "ok"} | {
        n: s for n, (s, _) in EXPECTED.items()
    }
    assert rows["torch"]["restarts"] == 2, "one restart for the killed worker, one for the hung one"


def test_a_failing_baseline_leaves_the_others_without_speedup(monkeypatch, tmp_path, measured):
    rows = measured("none")
    assert rows["torch"]["speedup"] == pytest.approx(1.0)
