"""Operator profiles of the implementations of a measured cell."""

import csv
import importlib
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli import options
from moe_routing_bench.cli.printing import plain, show
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.store import platforms, records
from moe_routing_kernels.errors import bad, pick, writing

SHOWN = 10  # operators of each implementation that are printed; the files have all
TABLE = "operators.csv"


def profile(
    cell: Annotated[
        Path, typer.Argument(help="Parquet file of a measured cell: results/PLATFORM/cells/layer/….parquet")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the table and a Chrome trace of each implementation")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Comma-separated names [default: all implementations that are ok]")
    ] = None,
    calls_only: Annotated[
        bool, typer.Option("--calls-only", help="No profile: calls in NVTX ranges, for a profiler around this command")
    ] = False,
    force: options.Force = False,
) -> None:
    """Profile one call of each implementation that is ok in a measured cell, operator by operator, with torch.profiler.

    Writes operators.csv, profile.json and a Chrome trace per implementation. Times of a profile are not those of a row. Where NVIDIA's
    ncu is there, its command lines for the same calls are printed.
    """
    if (out is None) != calls_only:
        raise bad("--out", "given" if out else "nothing", "a folder, or --calls-only")
    table = records.read(cell)
    spec = records.spec_of(table)
    if spec is None:
        raise bad(
            "cell", str(cell), "a file that `measure --out` or the workflow wrote", "it does not say what was measured"
        )
    if out:
        options.check_folder("--out", out, force)
    platforms.verify(table["platform"][0].as_py())
    job, rows = Job.from_spec(spec), table.select(["implementation", "status"]).to_pylist()
    if only is not None:
        names = [pick("--only", name.strip(), job.implementations) for name in only.split(",")]
        rows = [row for row in rows if row["implementation"] in names]
    if out is None:
        importlib.import_module("moe_routing_bench.measure.profiling").call(job, _ok(rows))
        return
    profiled(job, rows, out)
    if program := shutil.which("ncu"):
        for name in _ok(rows):
            print(_ncu(program, name, cell, out))


def _ncu(program: str, name: str, cell: Path, out: Path) -> str:
    """The command line that profiles the kernels of one call of an implementation."""
    calls = ["moe-routing-bench", "profile", plain(cell), "--calls-only", "--only", name]
    options = [
        "--set",
        "full",
        "--nvtx",
        "--nvtx-include",
        f"{name}/",
        "--clock-control",  # else ncu lowers the clocks of the card, for others too
        "none",
        "--force-overwrite",
        "--export",
        plain(out / name),
    ]
    return shlex.join([program, *options, *calls])


def _ok(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["implementation"] for row in rows if row["status"] == "ok"]


def profiled(job: Job, rows: Sequence[Mapping[str, Any]], out: Path, tables: bool = True) -> None:
    """Profile the implementations that are ok, write the files, and print their tables where these are wanted. Raises `UserError`."""
    with writing(out):
        result = importlib.import_module("moe_routing_bench.measure.profiling").profile(job, _ok(rows), out)
        _write(result, out / TABLE)
    if tables:
        show(*_tables(result))
    print(f"wrote {out}", file=sys.stdout if tables else sys.stderr)


def _write(result: Mapping[str, Any], path: Path) -> None:
    """All operators of all implementations as CSV."""
    lines = [
        {"implementation": name} | operator
        for name, parts in result["implementations"].items()
        for operator in parts.get("operators", ())
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]) if lines else ["implementation"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """A table of each implementation's first operators, and one of the differences, where there are pairs with results to compare."""
    for name, parts in result["implementations"].items():
        if "error" in parts:
            table = Table("error", title=name, title_justify="left", box=None)
            table.add_row(parts["error"])
            yield table
            continue
        title = (
            f"{name}: one call, self CPU {parts['self_cpu_us']:.0f} us, self device {parts['self_device_us']:.0f} us"
        )
        columns = ("operator", "kind", "self device us", "self CPU us", "calls")
        table = Table(*columns, title=title, title_justify="left", box=None)
        for operator in parts["operators"][:SHOWN]:
            times = (f"{operator['self_device_us']:.1f}", f"{operator['self_cpu_us']:.1f}")
            table.add_row(operator["operator"][:80], operator["kind"], *times, str(operator["calls"]))
        yield table
    if not result["differences"]:
        return
    table = Table(
        "implementation", "against", "max_diff", title="largest difference of results", title_justify="left", box=None
    )
    for operator in result["differences"]:
        table.add_row(operator["first"], operator["second"], f"{operator['max_diff']:.3g}")
    yield table
