"""The predecessor's commands, figures and metrics as ours: every command runs, every name is there, and the report has the times."""

import json
from pathlib import Path

import pytest
from rows import frame, one
from typer.testing import CliRunner

from campaign import sampled
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli.main import app
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load, on
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.parts import ABSENT
from moe_routing_bench.report.seeds.predecessor import KINDS, Command, commands, rest
from moe_routing_bench.report.seeds.section import section
from moe_routing_bench.store.records import COLUMNS
from moe_routing_kernels.routers import zoo
from packs import no_ceilings

pytestmark = pytest.mark.slow

__all__ = ["no_ceilings"]

ROOT = Path(__file__).parents[2]
SEEDS = ("001", "002")
COMMANDS = {command.ours: command for seed in SEEDS for command in commands(seed)}
TINY = {"tokens": 16, "hidden": 32, "intermediate": 16, "experts": 4}


def jobs(seed: str, platform: str) -> list:
    return expand(on(load(ROOT / f"config/seeds/{seed}.yaml"), platform), {})


def tiny(command: Command) -> tuple[str, ...]:
    """Our command with one value of each axis, small sizes, and an implementation that runs on a CPU."""
    options = {name: text.split(",")[0] for name, text in command.options.items()}
    options |= {name: str(size) for name, size in TINY.items() if name in options}
    assert options["implementations"].startswith("torch")
    return command.bench, *(word for name, text in options.items() for word in (f"--{name.replace('_', '-')}", text))


EVERY = sorted({tiny(command) for command in COMMANDS.values()})
OF_EACH_BENCH = {words[0]: words for words in EVERY}


@pytest.mark.parametrize("words", sampled(EVERY, OF_EACH_BENCH.values()), ids=" ".join)
@pytest.mark.usefixtures("no_ceilings")
def test_every_command_runs_at_a_tiny_size(words):
    """Commands that are the same at that size run once."""
    done = CliRunner().invoke(app, ["measure", *words, "--max-seconds", "0.02", "--min-blocks", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["status"] for row in json.loads(done.stdout)] == ["ok"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_config_of_a_seed_measures_the_cells_of_all_its_commands_and_no_others(seed):
    asked = set()
    for command in commands(seed):
        entry = {
            "benches": [command.bench],
            "implementations": command.options["implementations"].split(","),
        } | command.axes
        entry |= {"capacity_factor": [*entry["capacity_factor"]]} if "capacity_factor" in entry else {}
        found = {job.cell.key: set(job.implementations) for job in expand(load({"grid": [entry]}), {})}
        there = {
            job.cell.key: set(job.implementations)
            for job in jobs(seed, "nvidia-h200")
            if job.cell.bench == command.bench
        }
        assert found.keys() <= there.keys() and all(names <= there[key] for key, names in found.items())
        asked |= {(command.bench, key) for key in found}
    assert asked == {(job.cell.bench, job.cell.key) for job in jobs(seed, "nvidia-h200")}


@pytest.mark.parametrize(("theirs", "kind", "name"), [line for seed in SEEDS for line in rest(seed)])
def test_every_other_name_is_there(theirs, kind, name):
    known = {"figure": FIGURES, "column": COLUMNS, "router": zoo.ZOO, "axis": AXES}
    assert name in known[kind] if kind in known else (ROOT / name).is_file(), f"{theirs}: no {kind} {name}"
    assert set(KINDS) == {*known, "file"}


@pytest.mark.parametrize("platform", ["cpu", "nvidia-h200"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_report_of_a_seed_has_a_time_for_each_command(seed, platform):
    rows = frame(
        *(
            one(
                job.cell.bench,
                name,
                **dict(job.cell.values),
                cell=job.cell.key,
                median_us=100.0 + i,
                gpu_name="NVIDIA H200",
            )
            for i, job in enumerate(jobs(seed, platform))
            for name in job.implementations
        )
    )
    table, names = section(rows, f"seed-{seed}").tables
    assert [row[2] for row in table.rows] == [command.ours for command in commands(seed)]
    cells = [int(row[3]) for row in table.rows]
    assert all(cells) and all("µs" in row[4] and row[4].startswith("torch") for row in table.rows)
    if platform == "nvidia-h200":
        asked = [len(expand(load({"grid": [{"benches": [c.bench]} | c.axes]}), {})) for c in commands(seed)]
        assert cells == asked and "divided" not in table.note
    else:
        assert "divided by 64" in table.note
    assert table.rows[0][1] == ("torch 315.7 µs, quack 308.3 µs" if seed == "001" else ABSENT)
    assert len(names.rows) == len(rest(seed))


def test_an_implementation_without_a_time_says_why():
    """One that ran in some cells of a command has the times of those."""
    known = [job for job in jobs("002", "nvidia-h200") if job.cell.bench == "routing"]
    gate, pack = (
        next(job for job in jobs("002", "nvidia-h200") if job.cell.bench == name) for name in ("gate", "pack")
    )
    untimed = {"median_us": None, "reason": "k must be a multiple of 8"}
    rows = frame(
        *(
            one("routing", name, **dict(job.cell.values), cell=job.cell.key)
            | ({"status": "crashed", **untimed} if (i, name) == (0, "triton") else {"median_us": 200.0 + i})
            for i, job in enumerate(known)
            for name in job.implementations
        ),
        *(
            one("routing", "quack", **dict(job.cell.values), cell=job.cell.key, status="unsupported", **untimed)
            for job in known
        ),
        one("gate", "torch", **dict(gate.cell.values), cell=gate.cell.key, median_us=125.0),
        one("gate", "quack", **dict(gate.cell.values), cell=gate.cell.key, status="unsupported", **untimed),
        one("pack", "triton", **dict(pack.cell.values), cell=pack.cell.key, status="crashed", **untimed),
    )
    gates, alone, *several = [line[4] for line in section(rows, "seed-002").tables[0].rows if line[4] != ABSENT]
    assert gates == "torch 125 µs; quack unsupported: k must be a multiple of 8"
    none = "; quack unsupported: k must be a multiple of 8"
    assert alone == f"torch 200 µs, cute 200 µs; triton crashed: k must be a multiple of 8{none}"
    assert "triton crashed: k must be a multiple of 8" in several
    sweeps = [times for times in several if "to 2" in times]
    assert sweeps and all("triton 2" in times and "crashed" not in times and times.count(none) == 1 for times in sweeps)


def test_commands_name_benches_and_implementations_that_are_there():
    for command in COMMANDS.values():
        known = [one.name for one in BENCHES[command.bench].implementations]
        assert set(command.options["implementations"].split(",")) <= set(known)
