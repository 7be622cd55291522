"""No implementation of the rogues' gallery gets a time, whatever it does; each gets the status and the reason that fit."""

import os
import sys
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.measure import memory, worker
from moe_routing_bench.store import platforms

sys.path.insert(0, str(Path(__file__).parent))
import rogues

CELL = cell_of("pack", tokens=64, hidden=32, experts=8, top_k=2, dtype="fp32", capacity_factor=0.75, skew=0.5)
QUICK = Settings(max_seconds=0.05, min_blocks=3, max_blocks=4, warmup_ms=1, interval_us=200, timeout=30)
DIFFER = "elements differ"
REASONS = {
    "early": DIFFER,
    "by_pointer": DIFFER,
    "where_looked_at": DIFFER,
    "once": DIFFER,
    "of_last_set": DIFFER,
    "one_answer": DIFFER,
    "known_seed": DIFFER,
    "every_other": DIFFER,
    "now_and_then": DIFFER,
    "half": DIFFER,
    "shuffled": DIFFER,
    "narrow": DIFFER,
    "other_dtype": "packed: float64",
    "beyond": "bytes next to a tensor were written: packed",
    "ahead": "bytes next to a tensor were written: x",
    "changes_input": "inputs were changed: x",
    "restores_input": "inputs were written, if only to restore them: x",
    "elsewhere": "another stream",
    "later": "threads were left running",
    "slow_clock": "time.perf_counter was replaced",
    "in_pool": ("outputs were written after the call had returned", DIFFER),
    "already_right": DIFFER,
    "where_changed": DIFFER,
    "by_sample": DIFFER,
    "last_row": DIFFER,
    "whole_tiles": DIFFER,
    "last_column": DIFFER,
    "nearest_float": DIFFER,
    "returns_input": "packed: float32 of shape (64, 32)",
    "returns_nothing_new": DIFFER,
    "more_threads": "torch.get_num_threads() is",
    "other_cores": "os.sched_getaffinity(0) is",
}


@pytest.fixture
def measured(add_packs, no_ceilings, monkeypatch):
    """Measure `pack` with rogues as a worker does, but for the ceilings of a CPU; what it reports, by implementation. What a check chooses
    at random is never first."""
    monkeypatch.setattr(memory, "some", lambda count, of: list(range(of))[-count:])

    def run(*names):
        add_packs(rogues, "rogue", names)
        rogues.forget()
        found, job = {}, Job(CELL, ("torch", *names), QUICK)
        device = "cpu" if platforms.current() == platforms.CPU else "cuda"

        def send(message):
            if message[0] == "failed":
                found[message[1]] = {"status": message[2], "reason": message[3]}
            elif message[0] == "rows":
                found.update(message[1])

        worker.run(job, device, list(job.implementations), send)
        return found

    return run


def test_every_rogue_has_its_reason() -> None:
    assert rogues.ROGUES.keys() == REASONS.keys() | {"honest"} and len(REASONS) >= 15


def test_an_honest_one_beside_them_is_timed(measured) -> None:
    """And nothing that a rogue does costs another implementation its row."""
    rows = measured("honest", "early", "changes_input", "beyond", "slow_clock")
    assert rows["honest"]["status"] == rows["torch"]["status"] == "ok" and rows["honest"]["median_us"] > 0


@pytest.mark.fault("rogue")
@pytest.mark.parametrize("name", REASONS)
def test_a_rogue_gets_no_time(measured, name: str) -> None:
    """On a GPU a capture may make another fault of it first."""
    gpu = platforms.current() != platforms.CPU
    if name == "elsewhere" and not gpu:
        pytest.skip("needs an NVIDIA GPU")
    if name == "other_cores" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one core")
    if name in ("in_pool", "more_threads", "other_cores") and gpu:
        pytest.skip("a CPU's work, threads and cores")
    if name == "once" and gpu:
        pytest.skip("a graph repeats what was captured: the work is done in every sample")
    row = measured(name)[name]
    assert row["status"] == "incorrect" and "median_us" not in row, row
    reasons = [REASONS[name]] if isinstance(REASONS[name], str) else REASONS[name]
    assert gpu or any(one in row["reason"] for one in reasons), row["reason"]
