"""Layer time over expert-parallel ranks, as the scale model estimates it, with the errors that published tables found."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_routing_bench.figures import paper

_SERIES = {"layer_us": "even loads", "drawn_us": "drawn", "planned_us": "drawn, planned placement"}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw rows of the model (EP, times and errors) as an SVG. A bar is the median error of the validating tables, the band the 90th percentile."""
    shown = sorted((row for row in rows if row["tp"] == 1), key=lambda row: row["ep"])
    figure, (axes,) = paper.canvas(1, 1, 7, 4)
    for column, name in _SERIES.items():
        points = [row for row in shown if row[column] is not None]
        places, times = [row["ep"] for row in points], [row[column] for row in points]
        (line,) = axes.plot(places, times, marker="o", markersize=3, label=name)
        sure = [row for row in points if row["error_median"] is not None]
        for row in sure:
            error = row[column] * row["error_median"]
            axes.errorbar(row["ep"], row[column], error, color=line.get_color(), capsize=2, linewidth=1)
        if column == "drawn_us":
            edges = [[row[column] * (1 + sign * min(row["error_p90"], 0.99)) for row in sure] for sign in (-1, 1)]
            axes.fill_between([row["ep"] for row in sure], *edges, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="expert-parallel ranks", ylabel="layer time, modelled (µs)")
    axes.set_xticks([row["ep"] for row in shown], [str(row["ep"]) for row in shown])
    axes.minorticks_off()
    one = shown[0]
    axes.set_title(
        f"{one['model']}, {one['gpus']} GPUs, {one['tokens']} tokens of each, skew {one['skew']:g}",
        fontsize=8,
        loc="left",
    )
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
