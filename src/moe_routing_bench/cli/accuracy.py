"""The accuracy of quantised weights: formats against activations and kinds of weights, and the kernels that multiply with them."""

import importlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import options, printing
from moe_routing_bench.cli.delivery import Delivery, Part, Rows, delivering
from moe_routing_bench.cli.options import option_of
from moe_routing_bench.cli.printing import progress_console, show
from moe_routing_bench.config import by_hand
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.store import companions as stored
from moe_routing_bench.store import platforms
from moe_routing_kernels.errors import bad, pick, writing
from moe_routing_kernels.formats import FORMATS, QUANTISED
from moe_routing_kernels.formats.weights import WEIGHTS

BENCH = BENCHES["experts"]
PLAIN = "plain"
_KNOWN = (PLAIN, *WEIGHTS)
_ACTIVATIONS = "bf16,fp16"
_SIZES = {"tokens": 64, "hidden": 512, "intermediate": 256, "experts": 4, "top_k": 2, "seed": 17}
_COLUMNS = {  # of the table for people: heading, column, format
    "weights": ("weights", ""),
    "activations": ("activations", ""),
    "drawn": ("drawn", ""),
    "weights: SNR dB": ("weight_snr_db", ".1f"),
    "of bound": ("of_bound", ".2f"),
    "result: error": ("output_error", ".2e"),
    "SNR dB": ("output_snr_db", ".1f"),
    "cosine": ("output_cosine", ".6f"),
    "implementation": ("implementation", ""),
    "kernel: error": ("kernel_error", ".2e"),
    "limit": ("tolerance", ".1e"),
    "kernel: SNR dB": ("kernel_snr_db", ".1f"),
    "status": ("status", ""),
    "reason": ("reason", ""),
}


def accuracy(
    weights: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated formats [default: plain, which is that of the activations, and all that are quantised]"
        ),
    ] = None,
    activations: Annotated[
        str, typer.Option(help=f"Comma-separated formats: {', '.join(FORMATS)}; the fp8 ones are of rows, with bf16")
    ] = _ACTIVATIONS,
    drawn: Annotated[
        str,
        typer.Option(
            help="Comma-separated kinds of weights: normal; outliers, one in 200 of which is 16 times as large"
        ),
    ] = "normal,outliers",
    implementations: Annotated[
        str | None, typer.Option(help="Comma-separated names [default: all that take them here]")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens")] = _SIZES["tokens"],
    hidden: Annotated[int, typer.Option(help="Width of a token row")] = _SIZES["hidden"],
    intermediate: Annotated[int, typer.Option(help="Inner width of an expert")] = _SIZES["intermediate"],
    experts: Annotated[int, typer.Option(help="Number of experts")] = _SIZES["experts"],
    top_k: Annotated[int, typer.Option(help="Experts per token")] = _SIZES["top_k"],
    seed: Annotated[int, typer.Option(help="Seed of what is drawn")] = _SIZES["seed"],
    out: Annotated[
        Path | None, typer.Option(help="Also write all columns to this Parquet file, after each comparison")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all columns as one JSON list")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns as CSV")] = False,
    force: options.Force = False,
) -> None:
    """Compare results of experts with quantised weights: kernels with what the codes stand for, and that with the weights before.

    Exit status: 0 where every kernel is right, 1 where one is not, 2 for a mistake in the options.
    """
    if as_json and as_csv:
        raise bad("--csv", "together with --json", "one of them")
    if out:
        options.check_file("--out", out, force)
    sizes = {
        "tokens": tokens,
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts,
        "top_k": top_k,
        "seed": seed,
    }
    matrix = importlib.import_module("moe_routing_bench.measure.accuracy")
    kinds = [pick("--drawn", kind, matrix.DRAWS) for kind in _split(drawn)]
    names = _names(implementations)
    formats = [pick("--weights", form, _KNOWN) for form in _split(weights)] if weights else _KNOWN
    chosen = [pick("--activations", form, FORMATS) for form in _split(activations)]
    cases = list(itertools.product(_cells(formats, chosen, sizes), kinds))
    device = "cpu" if platforms.gpu_name() is None else "cuda"
    common = sizes | {"platform": platforms.current()} | matrix.place(device)
    title = f"experts, {', '.join(f'{name}={value}' for name, value in sizes.items())}, on {platforms.current()}"
    write = printing.write_json if as_json else printing.write_csv if as_csv else lambda rows: show(_table(rows, title))

    def document(parts: Sequence[Part]) -> None:
        write([row for _, rows in parts for row in rows])

    rows: Rows = []
    delivery = Delivery(document, len(cases))
    with delivering(delivery):
        # Other people's kernels may take minutes to compile.
        for cell, kind in track(cases, "accuracy", console=progress_console()):
            found = [row | common for row in matrix.rows(cell, kind, names, device)]
            delivery.add(cell, found)
            rows += found
            if out:  # what was compared is kept, whenever the rest is stopped
                with writing(out):
                    stored.write_matrix(out, rows)
    if out:
        print(f"wrote {out}", file=sys.stderr if as_json or as_csv else sys.stdout)
    if wrong := [row for row in rows if row.get("status") not in (None, "ok")]:
        print(f"{len(wrong)} of {len(rows)} rows are of implementations that failed", file=sys.stderr)
        raise typer.Exit(1)


def default_cells() -> list[Cell]:
    """The cells that `accuracy` compares in where no sizes and formats are given, as in a workflow."""
    return _cells(_KNOWN, _split(_ACTIVATIONS), _SIZES)


def _cells(formats: Iterable[str], activations: Iterable[str], sizes: dict[str, int]) -> list[Cell]:
    return [_cell(form, other, sizes) for form, other in itertools.product(formats, activations)]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _names(asked: str | None) -> list[str]:
    """The implementations that are asked for, else all whose needs are met here."""
    known = [implementation.name for implementation in BENCH.implementations]
    if asked is not None:
        return [pick("--implementations", name, known) for name in _split(asked)]
    here = platforms.current()
    return [
        implementation.name
        for implementation in BENCH.implementations
        if not platforms.missing(implementation.requires, here, implementation.peer)
    ]


def _cell(weights: str, activations: str, sizes: dict[str, int]) -> Cell:
    """The cell of a format of weights with activations, or of rows of a quantised format with activations in bf16."""
    formats = {"packed": activations, "dtype": "bf16"} if activations in QUANTISED else {"dtype": activations}
    with by_hand.called(option_of):
        return cell_of("experts", **sizes, **formats, weights=formats["dtype"] if weights == PLAIN else weights)


def _table(rows: Iterable[dict[str, Any]], title: str) -> Table:
    table = Table(*_COLUMNS, title=title, title_justify="left", box=None)
    for row in rows:
        values = [(row.get(name), form) for name, form in _COLUMNS.values()]
        table.add_row(*("" if value is None else f"{value:{form}}" for value, form in values))
    return table
