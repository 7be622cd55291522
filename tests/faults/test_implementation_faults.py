"""Whatever an implementation does to its worker, the cell's file is complete, the others are measured, and nothing is left."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import processes, supervisor
from moe_routing_bench.store import cell_files, platforms

sys.path.insert(0, str(Path(__file__).parent))
import faulty_pack

CELL = cell_of("pack", tokens=64, hidden=32, experts=8, top_k=2, dtype="fp32")
QUICK = Settings(max_seconds=0.02, min_blocks=3, max_blocks=3, warmup_ms=1, interval_us=200, timeout=30)
HUNG = replace(QUICK, timeout=6)  # waited for once for each that hangs; on a busy machine a right one may need seconds
EXPECTED = {
    "raise": ("crashed", "preparing: ValueError: the kernel was called wrongly (/"),
    "exit": ("crashed", "SystemExit"),
    "exit_text": ("crashed", "SystemExit: a text"),
    "exit_large": ("crashed", "SystemExit: 1099511627776"),
    "surrogate": ("crashed", r"ValueError: \udcff"),
    "huge": ("crashed", "ValueError: xxx"),
    "wrong": ("incorrect", "1 of 4096 elements differ"),
    "nan": ("incorrect", "1 of 4096 elements differ"),
    "memory": ("out_of_memory", "memory"),
    "mutate": ("incorrect", "inputs were changed: x"),
    "orphan": ("incorrect", "processes were left running"),
    "daemon": ("incorrect", "processes were left running"),
    "command": ("incorrect", "processes were left running"),
    # these cost the worker its life
    "kill": ("crashed", "worker was killed by signal SIGKILL"),
    "segfault": ("crashed", "worker was killed by signal SIGSEGV"),
    "abort": ("crashed", "worker was killed by signal SIGABRT"),
    "leave": ("crashed", "worker exited with status 0"),
    "close": ("crashed", "worker exited with status"),
    "interrupt": ("crashed", "worker exited with status 1"),
    "orphan_of_killed": ("crashed", "worker was killed by signal SIGKILL"),
    "daemon_of_killed": ("crashed", "worker was killed by signal SIGKILL"),
    "hang": ("timeout", "no word for 6 s"),
    "stop": ("timeout", "the worker was stopped, and did not go on for 6 s, 2 times"),
}
DEADLY = list(EXPECTED)[list(EXPECTED).index("kill") :]


@pytest.fixture
def measured(add_packs, no_ceilings, tmp_path):
    """Measure `pack` with the torch baseline and faulty implementations, and read the file back."""
    import torch  # noqa: F401  (imported before the fork, as the warm server does)

    def run(*faults, settings=QUICK):
        add_packs(faulty_pack, "fault", faults)
        job, before = Job(CELL, ("torch", *faults), settings), processes.offspring()
        supervisor.measure(job, tmp_path / "cell.parquet")
        assert [p.name for p in tmp_path.iterdir()] == ["cell.parquet"], "a partial file was left"
        assert processes.offspring() <= before, "a process was left"
        table = cell_files.collect({tmp_path / "cell.parquet": job}, platforms.current())
        return {row["implementation"]: row for row in table.to_pylist()}

    return run


def check(rows, faults, restarts):
    for fault in faults:
        status, reason = EXPECTED[fault]
        assert rows[fault]["status"] == status and reason in rows[fault]["reason"], rows[fault]["reason"]
        assert rows[fault]["median_us"] is None, "what is wrong has no time"
        assert len(rows[fault]["reason"]) <= 500 and "\n" not in rows[fault]["reason"]
    assert rows["torch"]["status"] == rows["none"]["status"] == "ok" and rows["torch"]["restarts"] == restarts
    assert rows["torch"]["median_us"] > 0 and rows["none"]["speedup"] > 0


def test_where_an_implementation_crashed_is_in_its_row_and_the_traceback_in_the_log(measured, capfd) -> None:
    """The line of the project's or the author's code that an error inside a library came from."""
    rows = measured("none", "raise", "inside")
    own = Path(faulty_pack.__file__)
    lines = {
        name: number
        for number, line in enumerate(own.read_text().splitlines(), 1)
        for name in ("raise error", "json.loads")
        if name in line
    }
    printed = capfd.readouterr().err
    for fault, line in (("raise", "raise error"), ("inside", "json.loads")):
        assert rows[fault]["reason"].endswith(f"({own}:{lines[line]})"), rows[fault]["reason"]
        assert f'File "{own}", line {lines[line]}' in printed
    assert printed.count("Traceback (most recent call last)") == 2


@pytest.mark.fault("implementation that fails", len(EXPECTED) - len(DEADLY))
def test_faults_that_the_worker_survives(measured):
    """All of them beside two that are right, in one worker."""
    faults = [fault for fault in EXPECTED if fault not in DEADLY]
    check(measured("none", *faults), faults, 0)


@pytest.mark.fault("worker's death", len(DEADLY))
def test_faults_that_the_worker_does_not_survive(measured):
    """A restart for each, and one more for the one that stops itself, as others may have stopped it; the last worker measures the rest."""
    check(measured("none", *DEADLY, settings=HUNG), DEADLY, len(DEADLY) + 1)


HARMFUL = {
    "input_settle": "inputs were changed: x",
    "input_block": "inputs were changed: x",
    "clock_settle": "timers.perf_counter was replaced",
    "clock_block": "timers.perf_counter was replaced",
    "clock_and_raise": "time.perf_counter was replaced",
}


@pytest.mark.fault("harm to rivals")
@pytest.mark.parametrize("fault", HARMFUL)
def test_who_harms_others_is_blamed_and_nobody_else(fault, measured, monkeypatch):
    """The times of the others are none that it has made."""
    monkeypatch.setitem(EXPECTED, fault, ("incorrect", HARMFUL[fault]))
    rows = measured(fault, "none")
    check(rows, [fault], rows["torch"]["restarts"])
    assert rows["torch"]["restarts"] <= 1 and min(rows[name]["min_us"] for name in ("torch", "none")) > 1


def test_without_others_the_baseline_has_itself(measured):
    assert measured("none")["torch"]["speedup"] == pytest.approx(1.0)
