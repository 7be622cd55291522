"""One look for all figures: colours by implementation, a footer that says where the numbers come from."""

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.benches import BENCHES

matplotlib.rcParams |= {
    "svg.hashsalt": "moe-routing-bench",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}
_NAMES = list(dict.fromkeys(i.name for bench in BENCHES.values() for i in bench.implementations))
COLORS = dict(zip(_NAMES, sns.color_palette("colorblind", 10) + sns.color_palette("dark", 10), strict=False))
STAGES = dict(zip(("router", "permute", "pack", "experts", "combine"), sns.color_palette("deep", 5), strict=True))


def ok(table: pd.DataFrame, *benches: str) -> pd.DataFrame:
    """Rows that were measured, of the given benches (all when none is named)."""
    good = table[table["status"] == "ok"]
    return good[good["bench"].isin(benches)] if benches else good


def canvas(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure and its axes in reading order."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def empty(axes: Axes, why: str) -> None:
    """Say in the panel that there is nothing to draw, and why."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, f"no data: {why}", ha="center", va="center", transform=axes.transAxes)


def finish(figure: Figure, title: str, rows: pd.DataFrame) -> Figure:
    """Title above, provenance below: hardware, versions, day, number of rows."""
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel(provenance(rows), fontsize=7, color="0.35")
    return figure


def provenance(rows: pd.DataFrame) -> str:
    """Hardware, torch, day and counts of the rows shown."""
    if rows.empty:
        return "no measured rows"
    first = rows.iloc[-1]
    gpu = isinstance(first["gpu_name"], str)
    machine = first["gpu_name"] if gpu else f"{first['cpu_model']}, shared CPU: only ratios are meaningful"
    cells = rows[["bench", "cell"]].drop_duplicates().shape[0]
    cache = "cold L2" if gpu else "wall time"
    return f"{machine} | torch {first['torch_version']} | {str(first['started_at'])[:10]} | {len(rows)} rows of {cells} cells | {cache}, medians"


def legend(axes: Axes, names: list[str]) -> None:
    """A legend of implementations in table order."""
    handles = [
        matplotlib.lines.Line2D([], [], marker="o", ls="", color=COLORS[n], label=n) for n in _NAMES if n in names
    ]
    axes.legend(handles=handles, fontsize=7, frameon=False)


def front(points: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The points that no other one beats in both columns (less is better), by rising x."""
    ordered = points.sort_values([x, y])
    return ordered[ordered[y] < ordered[y].cummin().shift(fill_value=float("inf"))]
