"""No implementation of the rogues' gallery gets a time, whatever it does; each gets the status and the reason that fit."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import memory, worker
from moe_routing_bench.store import platforms

sys.path.insert(0, str(Path(__file__).parent))
import rogues

CELL = cell_of("pack", tokens=64, hidden=32, experts=8, top_k=2, dtype="fp32", capacity_factor=0.75, skew=0.5)
QUICK = Settings(max_seconds=0.05, min_blocks=3, max_blocks=4, warmup_ms=1, interval_us=200, timeout=30)
LONG = Settings(
    max_seconds=0.5, min_blocks=6, max_blocks=6, warmup_ms=1, interval_us=10_000, timeout=30
)  # whole bursts


@pytest.fixture
def measured(add_packs, no_ceilings, monkeypatch):
    """Measure `pack` with rogues as a worker does, but for the ceilings of a CPU; what it reports, by implementation. What a check chooses
    at random is never first."""
    monkeypatch.setattr(memory, "some", lambda count, of: list(range(of))[-count:])

    def run(*names):
        add_packs(rogues, "rogue", names)
        rogues.forget()
        found, bursts = {}, any("burst" in name or "random_calls" in name for name in names)
        job = Job(CELL, ("torch", *names), LONG if bursts else QUICK)
        device = "cpu" if platforms.current() == platforms.CPU else "cuda"

        def send(message):
            if message[0] == "failed":
                found[message[1]] = {"status": message[2], "reason": message[3]}
            elif message[0] == "rows":
                found.update(message[1])

        with contextlib.suppress(SystemExit):  # a supervisor would start another worker
            worker.run(job, device, list(job.implementations), send)
        return found

    return run


def test_the_gallery_is_of_distinct_kinds() -> None:
    assert len(rogues.ROGUES) >= 45 and rogues.ROGUES.keys().isdisjoint(rogues.ISOLATED)


def test_an_honest_one_beside_them_is_timed(measured) -> None:
    """And nothing that a rogue does costs another implementation its row."""
    names = (
        "early",
        "changes_input",
        "beyond",
        "slow_clock",
        "no_mkldnn",
        "wrapped_median",
        "leaves_a_mode",
        "collects",
    )
    rows = measured("honest", *names)
    assert rows["honest"]["status"] == rows["torch"]["status"] == "ok" and rows["honest"]["median_us"] > 0


@pytest.mark.fault("rogue")
@pytest.mark.parametrize("name", rogues.ROGUES)
def test_a_rogue_gets_no_time(measured, name: str) -> None:
    """On a GPU a capture may make another fault of it first."""
    fate, gpu = rogues.ROGUES[name], platforms.current() != platforms.CPU
    if (fate.gpu if gpu else fate.cpu) is None:
        pytest.skip("a fault of a CPU" if gpu else "needs an NVIDIA GPU")
    if name == "other_cores" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one core")
    try:
        rows = measured(name)
    finally:
        rogues.forget()
    row = rows[name]
    assert rows.get("torch", {"status": "ok"})["status"] == "ok", rows["torch"]
    if gpu:
        assert row["status"] in fate.gpu, row
    else:
        assert row["status"] == "incorrect" and "median_us" not in row, row
        assert any(one in row["reason"] for one in fate.reasons), row["reason"]
