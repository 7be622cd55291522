"""What planning, watching, collecting and drawing very many cells takes: `python tests/timing/large_grids.py FOLDER`, on an idle machine.

It prints seconds of CPU and of the clock, and the peak of memory, of every command, for grids of 1,000, 3,000 and 10,000 cells with seven rows each, and for
reports of 10,000 and 100,000 rows; Snakemake alone plans as many jobs in the same run. It takes about ten minutes.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import pyarrow as pa
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import many_rows  # noqa: E402
from moe_routing_bench.benches.registry import BENCHES  # noqa: E402
from moe_routing_bench.config import load as config  # noqa: E402
from moe_routing_bench.config import presets  # noqa: E402
from moe_routing_bench.config.expand import expand  # noqa: E402
from moe_routing_bench.store import paths, records, rows  # noqa: E402
from moe_routing_bench.store.parquet import write_table  # noqa: E402

GPU = "nvidia-h200"
BENCH = "moe_routing_bench.cli"
BARE = 'rule all:\n    input: expand("{{i}}.txt", i=range({count}))\nrule one:\n    output: "{{i}}.txt"\n    shell: "touch {{output}}"\n'


def grid(folder: Path, count: int) -> None:
    """A project of so many cells of gate, each measured by today's code: the rows of a stored cell, called otherwise."""
    cells: dict[str, list[dict]] = {}
    for row in records.read(many_rows.STORED).to_pylist():
        if row["bench"] == "gate":
            cells.setdefault(row["cell"], []).append(row)
    stored = max(cells.values(), key=len)
    entry = {"benches": ["gate"], "implementations": [row["implementation"] for row in stored]}
    entry |= {"tokens": list(range(1, count // 8 + 1)), "experts": [4, 8], "top_k": [1, 2], "dtype": ["fp32", "bf16"]}
    project(folder)
    (folder / paths.CONFIG).write_text(
        yaml.safe_dump({"device": "cpu", "grid": [entry], "measure": {"cpu_threads": 1}})
    )
    settings = config.on(config.load(folder / paths.CONFIG), "cpu")
    code = BENCHES["gate"].code_fingerprint()
    for job in expand(settings, presets.load(folder / paths.MODELS)):
        names = {
            "cell": job.cell.key,
            "cell_hash": job.hash,
            "platform": "cpu",
            "device": "cpu",
            "code_fingerprint": code,
        }
        plain = [{name: value for name, value in row.items() if name not in records.AXIS_COLUMNS} for row in stored]
        for row in plain:
            row["tokens_per_s"] = job.cell.tokens / row["median_us"] * 1e6  # which `collect` computes again
        rows.write(
            folder / paths.cell_file("cpu", job), [row | dict(job.cell.values) | names for row in plain], job.spec
        )


def project(folder: Path) -> None:
    """The files that the workflow reads."""
    for name in ("config", "workflow", "src", "environment.yml", "Snakefile"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        folder.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)


def report(folder: Path, count: int) -> None:
    """A folder with so many collected rows, and figures as if drawn."""
    project(folder)
    many_rows.MANY = count
    table = pa.Table.from_pandas(many_rows.many(), records.SCHEMA, preserve_index=False)
    write_table(folder / paths.measurements(GPU), table)


def timed(what: str, folder: Path, *command: str) -> None:
    """Run a command in a folder, and print what it takes; its own output is left out."""
    start = time.perf_counter()
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execvp(command[0], command)
    _, status, used = os.wait4(child, 0)
    wall = time.perf_counter() - start
    failed = "" if status == 0 else f"  failed: {status}"
    cpu = used.ru_utime + used.ru_stime
    print(f"{what:32} {cpu:7.1f} s CPU {wall:7.1f} s {used.ru_maxrss / 1024:7.0f} MB{failed}", flush=True)


def main(folder: Path) -> None:
    """Make the grids and tables below `folder`, and run the commands."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python compiles the package once, not in every command
    planned = (
        "snakemake",
        "--dry-run",
        "--quiet",
        "all",
        "--cores",
        "1",
        "--scheduler",
        "greedy",
        "--resources",
        "gpu=1",
    )
    for count in (1_000, 3_000, 10_000):
        own, bare = folder / f"cells-{count}", folder / f"bare-{count}"
        grid(own, count)
        bare.mkdir()
        (bare / "Snakefile").write_text(BARE.format(count=count))
        timed(f"bare dry run of {count}", bare, *planned)
        timed(f"dry run of {count}", own, *planned, "--forcerun", "measure")
        timed(f"status of {count}", own, sys.executable, "-m", BENCH, "status")
        timed(f"collect of {count}", own, sys.executable, "-m", BENCH, "collect")
    for count in (10_000, 100_000):
        own = folder / f"rows-{count}"
        report(own, count)
        timed(f"figures of {count} rows", own, sys.executable, "-m", BENCH, "figure", "--platform", GPU)
        timed(f"report of {count} rows", own, sys.executable, "-m", BENCH, "report", "--platform", GPU)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
