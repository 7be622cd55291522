"""Routing that other programs recorded, converted to a trace and summarised."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli import options
from moe_routing_bench.cli.printing import quoted, show
from moe_routing_kernels.errors import bad, one_line, pick

_SHOWN = 4  # inputs whose evidence is printed


def trace(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT",
            help="Files with expert ids (.npy, .npz, .csv, .pt, .pth, .json of vLLM, .parquet), in the order of their tokens",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the trace there, a Parquet file [default: only the summary]")
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Layer to take where a file has several: its number in a column or name, otherwise counted from 0",
            show_default=False,
        ),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option(
            help="What the first dimension counts: tokens | layers | k; or that a list holds passes", show_default=False
        ),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(help="Number of experts [default: the file's, or the highest id + 1]", show_default=False),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            help="Ids per token where a file does not say: of router logits (tokens, experts) the highest are chosen, of equal ones the lowest id",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Name of the array in a .npz or .pt, or of the column in a .parquet [default: the only one; expert_ids]",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns of a table with ids: NAME,NAME; others as layer=NAME, token=NAME, slot=NAME, other=NAME. Columns without names are 1, 2, ...",
            show_default=False,
        ),
    ] = None,
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="Whether the first line of a .csv names columns [default: where it holds no numbers]",
            show_default=False,
        ),
    ] = None,
    force: options.Force = False,
) -> None:
    """Convert recorded expert ids to a trace that `measure --trace` and grid entries replay, and print its loads and drops."""
    traces, reading, writing = (
        importlib.import_module(f"moe_routing_bench.traces{name}") for name in ("", ".reading", ".writing")
    )
    if first is not None:
        pick("--first", first, traces.FIRST)
    if out and out.suffix != ".parquet":
        raise bad("--out", str(out), "a name that ends with .parquet")
    if out:
        options.check_file("--out", out, force)
    given = traces.Options(key, layer, first, experts, top_k, columns, header)
    records = [reading.read(path, given) for path in inputs]
    ids = writing.joined([record.ids for record in records])
    known = writing.agreed({record.experts for record in records})
    writing.check_range(ids, known, "all inputs")
    summary = writing.summary(ids, known or int(ids.max()) + 1)
    if out:
        writing.write(out, ids, known)
    show(_printed(summary, writing.CAPACITY_FACTORS, known is not None))
    for path, record in list(zip(inputs, records, strict=True))[:_SHOWN]:
        print(one_line(f"{path}: {record.evidence}"))
    if len(inputs) > _SHOWN:
        print(f"and {len(inputs) - _SHOWN} more inputs, each read by its own evidence")
    if out:
        print(f"wrote {out}: measure it with --trace {quoted(out)} --experts {summary.experts} --top-k {summary.top_k}")


def _printed(summary: Any, factors: tuple[float, ...], known: bool) -> Table:
    table = Table("trace", "", box=None)
    guess = f"{summary.experts} (the highest id + 1: --experts says how many there are)"
    lines = {
        "tokens": summary.tokens,
        "k": summary.top_k,
        "experts": summary.experts if known else guess,
        "experts seen": summary.seen,
        "dead experts": summary.dead,
        "load coefficient of variation": f"{summary.load_cv:.3f}",
        "busiest expert over mean": f"{summary.load_max_over_mean:.3f}",
    } | {
        f"dropped at capacity factor {factor:g}": f"{drop:.2%}"
        for factor, drop in zip(factors, summary.drops, strict=True)
    }
    for name, value in lines.items():
        table.add_row(name, str(value))
    return table
