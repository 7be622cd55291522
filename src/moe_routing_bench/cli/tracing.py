"""Routing that other programs recorded, converted to a trace and summarised."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli import outputs
from moe_routing_bench.cli.printing import quoted, show
from moe_routing_bench.errors import bad, pick


def trace(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT", help="Files with expert ids (.npy, .npz, .csv, .pt, .pth, .json of vLLM, .parquet), in the order of their tokens")],
    out: Annotated[Path | None, typer.Option(help="Write the trace there, a Parquet file [default: only the summary]")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer to take where a file has several, from 0", show_default=False)] = None,
    first: Annotated[str | None, typer.Option(help="What the first dimension of three counts: layers | tokens", show_default=False)] = None,
    experts: Annotated[int | None, typer.Option(help="Number of experts [default: the highest id + 1]", show_default=False)] = None,
    key: Annotated[str | None, typer.Option(help="Name of the array in a .npz or .pt, or of the column in a .parquet [default: the only one; expert_ids]", show_default=False)] = None,
    force: outputs.Force = False,
) -> None:  # fmt: skip
    """Convert recorded expert ids to a trace that `measure --trace` and grid entries replay, and print its loads and drops."""
    checks, reading, summaries, written = (
        importlib.import_module(f"moe_routing_bench.traces.{name}") for name in ("checks", "reading", "summary", "writing")
    )  # fmt: skip
    if first is not None:
        pick("--first", first, checks.FIRST)
    if out and out.suffix != ".parquet":
        raise bad("--out", str(out), "a name that ends with .parquet")
    if out:
        outputs.check_file("--out", out, force)
    ids = checks.joined([checks.checked(reading.read(one, key, layer, first), experts, one) for one in inputs])
    found = summaries.summary(ids, experts or int(ids.max()) + 1)
    if out:
        written.write(out, ids, experts)
    show(_printed(found, summaries.CAPACITY_FACTORS, experts is not None))
    if out:
        print(f"wrote {out}: measure it with --trace {quoted(out)} --experts {found.experts} --top-k {found.top_k}")


def _printed(found: Any, factors: tuple[float, ...], known: bool) -> Table:
    table = Table("trace", "", box=None)
    lines = {
        "tokens": found.tokens,
        "k": found.top_k,
        "experts": found.experts if known else f"{found.experts} (the highest id + 1: --experts says how many there are)",
        "experts seen": found.seen,
        "dead experts": found.dead,
        "load coefficient of variation": f"{found.load_cv:.3f}",
        "busiest expert over mean": f"{found.load_max_over_mean:.3f}",
    } | {f"dropped at capacity factor {one:g}": f"{drop:.2%}" for one, drop in zip(factors, found.drops, strict=True)}  # fmt: skip
    for name, value in lines.items():
        table.add_row(name, str(value))
    return table
