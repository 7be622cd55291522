"""`columns`: what each column of a row holds."""

from typing import Annotated

import typer
from rich.table import Table

from moe_routing_bench.cli.printing import show
from moe_routing_bench.store.records import COLUMNS, about
from moe_routing_kernels.errors import bad


def columns(
    text: Annotated[
        str | None, typer.Argument(help="Show only columns with this text in the name or the meaning")
    ] = None,
) -> None:
    """List the columns of a row, axes included, with unit and meaning."""
    shown = Table("column", "unit", "contents", box=None)
    for name in COLUMNS:
        meaning = about()[name]
        if text is None or text.lower() in f"{name} {meaning.meaning}".lower():
            shown.add_row(name, meaning.unit, meaning.meaning)
    if not shown.row_count:
        raise bad("TEXT", text, "a text in the name or the meaning of a column")
    show(shown)
