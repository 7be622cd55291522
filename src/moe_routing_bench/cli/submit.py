"""Rows of others: the archive of a run, and what speaks against the rows in one."""

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from moe_routing_bench.cli import options
from moe_routing_bench.cli.options import Platform, Run
from moe_routing_bench.cli.printing import quoted
from moe_routing_bench.comparison import submitted
from moe_routing_bench.quantities import count
from moe_routing_bench.store import archive, contradictions, manifest, parquet, paths, platforms, records
from moe_routing_bench.study import platform_of
from moe_routing_kernels.errors import bad, one_line, writing


def submit(
    by: Annotated[str, typer.Option("--by", help="Name that pages show next to these rows")],
    platform: Platform = None,
    run: Run = None,
    out: Annotated[Path | None, typer.Option("--out", help="Archive to write [default: RUN.tar.gz]")] = None,
    force: options.Force = False,
) -> None:
    """Make an archive of a run to send in: rows, manifest and environment, with digests. `manifest` comes first, and `verify` must pass.

    The rows name the host and the serial number of the card.
    """
    name = platform_of(platform, run)
    target = options.chosen(out, Path(f"{name}.tar.gz"), force)
    with writing(target):
        archive.pack(name, by, target)
    print(f"wrote {target}; next: moe-routing-bench verify {quoted(target)}")


def verify(
    path: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="What `submit` has made")],
    into: Annotated[
        Path | None, typer.Option("--into", help="Folder, such as results, to put the run in if nothing is wrong")
    ] = None,
) -> None:
    """Examine an archive of `submit`: digests, schema, arithmetic, what the hardware allows, and where the rows come from.

    Exit status 1: something speaks against the rows, one line each.
    """
    about, contents = archive.unpacked(path)
    run = about["run"]
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        folder = paths.results(run)
        folder.mkdir(parents=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        wrong, open_, rows = _examined(run, about)
    for line in wrong:
        print(one_line(f"wrong: {line}"))
    for line in open_:
        print(one_line(f"not checked: {line}"))
    if wrong:
        raise typer.Exit(1)
    print(f"nothing speaks against {count(rows, 'row')} of {run}, submitted by {about['by']}")
    if into is not None:
        _keep(into / run, contents)


def _examined(run: str, about: dict) -> tuple[list[str], list[str], int]:
    """What is wrong with a run below the working directory, what could not be checked, and how many rows it has."""
    place = paths.measurements(run)
    try:
        parquet.read_table(place, foreign=True)  # a seal that a stranger wrote says nothing of the size
    except (OSError, pa.ArrowException) as error:
        raise bad("measurements.parquet", "unreadable", "a Parquet file of rows", str(error)) from error
    table = records.read(place)
    manifest.read(run)
    wrong = [*_contradictions(table), *submitted.problems(table)]
    if about["environment"] != archive.environment(run):
        wrong.append(f"environment of {archive.ABOUT} is not that of the rows")
    cards = {platforms.slug(name) for name in table["gpu_name"].to_pylist() if name} or {platforms.CPU}
    if cards != {run.partition(".")[0]}:
        wrong.append(f"the run is of {run.partition('.')[0]}, its rows of {', '.join(sorted(cards))}")
    return wrong, submitted.unchecked(table), len(table)


def _contradictions(table: pa.Table) -> list[str]:
    """A line for each row whose numbers cannot be those of one measurement, three at most."""
    rows = [] if contradictions.is_free(table) else table.to_pylist()
    told = [(row, said) for row in rows if (said := contradictions.contradiction(row))]
    lines = [f"{row['implementation']} of {row['bench']} {row['cell']}: {said}" for row, said in told[:3]]
    return lines + [f"numbers of {count(len(told), 'row')} contradict each other"] * bool(told)


def _keep(folder: Path, contents: dict[str, bytes]) -> None:
    """Put the files of an archive in a folder that is not there yet."""
    if options.taken(folder):
        raise bad("--into", str(folder), "a folder without this run", "remove it, or submit under another name (`run`)")
    with writing(folder):
        folder.mkdir(parents=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    print(f"wrote {folder}")
