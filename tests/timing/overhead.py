"""What the benchmark itself takes, on a machine with nothing else at work: ``python tests/timing/overhead.py [CELLS]``, three times each.

Wall time, and CPU time of all processes. `beyond` is wall time less that of the worker (`measure_seconds`); `bare` is Snakemake alone
with as many jobs that touch a file. Takes 5 minutes with the default of 300 cells.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import client
from moe_routing_bench.store import records

ROOT = Path(__file__).parents[2]
TINY = {"max_seconds": 0.01, "min_blocks": 3, "warmup_ms": 1}
BARE = """
rule all:
    input: expand("{{i}}.txt", i=range({cells}))
rule one:
    output: "{{i}}.txt"
    shell: "touch {{output}}"
"""
CLI = [sys.executable, "-m", "moe_routing_bench.cli"]
SNAKEMAKE = [sys.executable, "-m", "snakemake", "--cores", "1"]


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a command with its children, but for a server that outlives it."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, cpu


def told(what: str, *runs: tuple[float, float]) -> None:
    """Print the median of each."""
    wall, cpu = (statistics.median(values) for values in zip(*runs, strict=True))
    print(f"{what:40} {wall:8.3f} s wall {cpu:8.3f} s CPU", flush=True)


def warm_cells(folder: Path, cells: int) -> None:
    """Cells of one warm server in a loop."""
    out, walls, beyond = folder / "cell.parquet", [], []
    for tokens in range(64, 65 + cells):
        job = Job(cell_of("permute", tokens=tokens, experts=8, top_k=2), ("torch",), Settings(**TINY))
        begin = time.perf_counter()
        subprocess.run(client.command(str(out), job.spec), check=True, capture_output=True)
        walls.append(time.perf_counter() - begin)
        beyond.append(walls[-1] - records.read(out)["measure_seconds"][0].as_py())
    print(
        f"a warm cell: {statistics.median(walls[1:]):.3f} s, beyond {statistics.median(beyond[1:]):.3f} s", flush=True
    )


def grid(folder: Path, cells: int) -> None:
    """A grid of so many cells by Snakemake up to the collected rows, and Snakemake alone."""
    (folder / "bare").mkdir()
    (folder / "bare/Snakefile").write_text(BARE.format(cells=cells))
    bare, _ = timed([*SNAKEMAKE], folder / "bare")
    entry = {"benches": ["permute"], "implementations": ["torch"], "experts": [8], "top_k": [2]}
    config = {"seed": 17, "device": "cpu", "measure": TINY, "grid": [entry | {"tokens": list(range(64, 64 + cells))}]}
    (folder / "grid.yaml").write_text(yaml.safe_dump(config))
    rows = "results/cpu/measurements.parquet"
    words = ["--snakefile", str(ROOT / "Snakefile"), "--resources", "gpu=1", "--configfile", "grid.yaml"]
    whole, _ = timed([*SNAKEMAKE, rows, *words], folder)
    measured = sum(records.read(folder / rows)["measure_seconds"].to_pylist())
    print(f"{cells} cells: {whole:.1f} s, beyond {whole - measured:.1f} s; bare {bare:.1f} s", flush=True)


def main(cells: int) -> None:
    """Measure and print."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    with tempfile.TemporaryDirectory(prefix="mrb-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["TMPDIR"] = tempfile.tempdir = name
        for option in ("--help", "--version"):
            told(option, *(timed([*CLI, option], folder) for _ in range(3)))
        cell = [
            "--tokens",
            "64",
            "--experts",
            "8",
            "--top-k",
            "2",
            "--implementations",
            "torch",
            "--max-seconds",
            "0.1",
        ]
        told("measure gate, one tiny cell", *(timed([*CLI, "measure", "gate", *cell], folder) for _ in range(3)))
        for turn in range(3):
            warm_cells(folder, 20)
            (folder / str(turn)).mkdir()
            grid(folder / str(turn), cells)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
