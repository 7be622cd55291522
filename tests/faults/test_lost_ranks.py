"""A rank that is killed, hangs, fails or lies ends its implementation's row with a reason, within the bound, and leaves no process."""

import os
import sys
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import processes, supervisor
from moe_routing_bench.store import platforms

pytestmark = pytest.mark.slow
sys.path.insert(0, str(Path(__file__).parent))

CELL = cell_of("dispatch", tokens=16, hidden=16, experts=4, top_k=2, ranks=2, dtype="fp32")
QUICK = Settings(
    *(2, 1.0),
    max_seconds=0.1,
    settle_blocks=2,
    interval_us=200,
    samples_per_block=1,
    min_blocks=2,
    max_blocks=3,
    timeout=8 if platforms.current() == platforms.CPU else 25,  # NCCL and a GPU take seconds to begin
)
STATUSES = {  # what each rogue gets, and parts of the reason
    "killed_preparing": ("crashed", "rank 1 of 2: preparing: ", "SIGKILL"),
    "killed_warming_up": ("crashed", "rank 1 of 2: warming up: ", "SIGKILL"),
    "killed_sampling": ("crashed", "rank 1 of 2: sampling: ", "SIGKILL"),
    "hangs_preparing": ("timeout", "rank 1 of 2: preparing: no word for ", "s"),
    "hangs_sampling": ("timeout", "rank 1 of 2: sampling: no word for ", "rank 0 waited"),
    "raises": ("crashed", "rank 1 of 2: warming up: ", "ValueError: no such row"),
    "left_out": ("incorrect", "received@1", "elements differ"),
    "clock": ("incorrect", "times as long as the ranks say", ""),
    "slow_clock": ("incorrect", "times as long as the ranks say", ""),
}


@pytest.fixture(scope="module")
def measured():
    """All of them in one cell with an honest implementation, and the processes that are left."""
    names = ("torch_all_to_all", *STATUSES)
    plugins = tuple(f"rank_rogues:{name.upper()}" for name in STATUSES)
    before = processes.descendants(os.getpid())
    rows = supervisor.measure(Job(CELL, names, QUICK, plugins=plugins))
    left = processes.running(processes.descendants(os.getpid()) - before)
    return {row["implementation"]: row for row in rows}, left


@pytest.mark.fault("lost rank")
@pytest.mark.parametrize("name", STATUSES)
def test_the_row_says_which_rank_it_was(measured, name: str) -> None:
    status, *parts = STATUSES[name]
    row = measured[0][name]
    assert row["status"] == status and all(part in row["reason"] for part in parts), row.get("reason")


def test_others_of_the_cell_are_measured_and_nothing_is_left(measured) -> None:
    """By the same worker: no rank takes it down."""
    rows, left = measured
    assert (rows["torch_all_to_all"]["status"], rows["torch_all_to_all"]["restarts"]) == ("ok", 0)
    assert not left
