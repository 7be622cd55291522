"""Plug-ins in processes of their own get no false time, and change no rival's row, whatever they reach for."""

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

CELL = cell_of("pack", tokens=64, hidden=32, experts=8, top_k=2, dtype="fp32", capacity_factor=0.75, skew=0.5)
QUICK = Settings(max_seconds=0.3, min_blocks=3, max_blocks=5, warmup_ms=1, interval_us=200, timeout=10)
STATUSES = {  # what each rogue gets, and a part of the reason
    "honest": ("ok", ""),
    "slow": ("ok", ""),
    "raw_thread": ("incorrect", ""),  # outputs that are not written yet, or a second core
    "lazy": ("incorrect", "Lazy, not a plain tensor"),
    "loop_count": ("ok", ""),  # a turn is one rotation, and the last one
    "of_the_stack": ("incorrect", "elements differ"),
    "of_the_heap": ("incorrect", "elements differ"),
    "of_the_judge": ("crashed", "Permission denied"),
    "of_a_rival": ("crashed", "Permission denied"),
    "hasty": ("incorrect", "another scheduling policy or priority"),
    "memo": ("ok", ""),  # it finds no values again
    "median": ("ok", ""),  # of its own process, which takes no time
    "clock": ("ok", ""),
    "backends": ("ok", ""),
    "modes": ("ok", ""),
    "after_a_burst": ("incorrect", "elements differ"),
    "daemon": ("incorrect", "processes were left running"),
    "early_reply": ("incorrect", ""),
    "rests": ("timeout", "no word"),
    "left_over": ("ok", ""),
    "killed": ("crashed", "SIGKILL"),
    "claims": ("incorrect", "its process says rotations 4, not 1 to 1"),
    "fewer_sets": ("incorrect", "its process says sets 1, not"),
    "seen_again": ("ok", ""),
    "last_rotation": ("ok", ""),
    "patched": ("ok", ""),
}
if platforms.current() != platforms.CPU:  # where a turn holds many rotations of graphs, whose replays run no Python
    STATUSES |= {"memo": ("incorrect", ""), "claims": ("ok", "")}
    STATUSES["seen_again"] = ("crashed", "the same values in ten calls")


@pytest.fixture(scope="module")
def rows():
    """All of them in one cell, with torch in the process that judges."""
    names = ("torch", *STATUSES)
    plugins = tuple(f"isolated_rogues:{name.upper()}" for name in STATUSES)
    return {row["implementation"]: row for row in supervisor.measure(Job(CELL, names, QUICK, plugins=plugins))}


@pytest.mark.fault("rogue")
@pytest.mark.parametrize("name", STATUSES)
def test_a_rogue_gets_no_false_time(rows, name: str) -> None:
    """What is timed at all takes no less than the fastest of what is honest: on a busy machine rows differ threefold."""
    status, reason = STATUSES[name]
    row = rows[name]
    assert row["status"] == status and reason in (row.get("reason") or ""), row.get("reason")
    least_us = min(rows[honest]["min_us"] for honest, (status, _) in STATUSES.items() if status == "ok")
    assert row["isolated"] and (row["status"] != "ok" or row["median_us"] > 0.4 * least_us)


def test_rivals_are_timed_as_if_they_were_alone(rows):
    """None is suspect for a rogue's sake, or was measured again."""
    assert (
        rows["torch"]["status"] == "ok" and not rows["torch"]["isolated"] and rows["torch"].get("handover_us") is None
    )
    assert rows["torch"]["min_us"] < 2 * rows["honest"]["median_us"]
    assert 0 < rows["honest"]["handover_us"] < 0.02 * rows["honest"]["median_us"] * rows["honest"]["calls_per_sample"]
    assert {row["restarts"] for row in rows.values()} == {0}


def test_who_reaches_for_rivals_is_out_and_they_are_measured_again():
    """By other processes, which it has not touched."""
    names, plugins = ("honest", "reaches"), ("isolated_rogues:HONEST", "isolated_rogues:REACHES")
    honest, reaches = supervisor.measure(Job(CELL, names, QUICK, plugins=plugins))
    assert (honest["status"], honest["restarts"], reaches["status"]) == ("ok", 1, "incorrect"), honest.get("reason")
    assert (
        "the process of honest: it has other limits and scheduling policy and priority and pending signals"
        in reaches["reason"]
    )


def test_nothing_is_left_running(rows):
    """Neither a runner, nor what a rogue has started."""
    assert not any("isolated_rogues" in name or state == "T" for name, state in _children())


def _children() -> list[tuple[str, str]]:
    """Command line and state of each process below this one."""
    found = []
    for pid in processes.descendants(os.getpid()):
        try:
            folder = Path(f"/proc/{pid}")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(((folder / "cmdline").read_text(), state))
        except OSError:
            continue
    return found


def test_our_own_run_isolated_where_a_job_asks_for_it():
    """Also a composite whose outputs are right only by what its stages show."""
    cell = cell_of("routing", tokens=16, hidden=32, experts=4, top_k=2, dtype="fp32")
    (row,) = supervisor.measure(Job(cell, ("torch",), QUICK, ("torch",), isolate="all"))
    assert (row["status"], row["isolated"], row.get("stage_us")) == ("ok", True, None), row.get("reason")
    assert row["twin_median_us"] > 0 and row["cold_sets"] >= 3 and row["timer"] == "wall"
