"""One look for all figures: colours by implementation, a footer that says where the numbers come from, saving."""

import io
import textwrap
import zlib
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from moe_routing_bench.benches.layer.sharing import STAGE as SHARED
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import devices
from moe_routing_bench.figures import NOTHING, colors
from moe_routing_bench.quantities import count

matplotlib.rcParams |= {
    "svg.hashsalt": "moe-routing-bench",  # ids are drawn from it, so that equal numbers give equal files
    "text.hinting": "none",  # letters as wide in pixels as in the layout, which is that of the SVG
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "hatch.linewidth": 2.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
NAMES = tuple(dict.fromkeys(i.name for bench in BENCHES.values() for i in bench.implementations))  # legend order
_FIRST = (
    "triton", "cute", "torch_compile", "quack", "torch_grouped_mm", "cute_gather", "sonicmoe", "torch", "cute_quack_gather",
    "flag_gems", "moe_ops", "cute_dependent", "cute_deepgemm", "liger", "transformers_grouped_mm", "cute_mslk", "triton_gather", "torch_bmm",
)  # fmt: skip
COLORS = colors.assigned(
    [*_FIRST, *(name for name in NAMES if name not in _FIRST)],
    [[one.name for one in bench.implementations] for bench in BENCHES.values()],
)
_LETTERS = 105  # in a line of what an empty panel says: the narrowest figure that is one panel has room for them
_SHAPES = "ovsDP^*"  # a second mark of identity: overlapping points, and no colour vision
_COMPOSITES = sorted((bench for bench in BENCHES.values() if bench.stages), key=lambda bench: -len(bench.stages))
_STAGES = [*dict.fromkeys(stage.name for bench in _COMPOSITES for stage in bench.stages), SHARED.name]
_WITH_TEXT = ("#0173b2", "#992255", "#005500", "#445577", "#5533aa", "#556622")  # white on these has 4.5:1
STAGES = dict(zip(_STAGES, _WITH_TEXT, strict=True))  # those of the longest table first


def color(name: str) -> str:
    """The implementation's colour; of one that is in no table, such as another package's, one of the palette by its name."""
    return COLORS.get(name) or list(colors.PALETTE)[zlib.crc32(name.encode()) % len(colors.PALETTE)]


def marker(name: str) -> dict[str, Any]:
    """Marker of the implementation: its own shape, another than those before it of the same colour; hollow and larger for Triton, so
    that a CuTe point on it shows both."""
    alike = [one for one in COLORS if COLORS[one] == color(name)]
    place = list(COLORS).index(alike[0]) + alike.index(name) if name in alike else zlib.crc32(name.encode())
    shape = _SHAPES[place % len(_SHAPES)]
    return {"marker": shape, "ls": ""} | (
        {"mfc": "none", "ms": 7, "mew": 1.2} if name == "triton" else {"ms": 4, "mew": 0}
    )


def ordered(names: Any) -> list[str]:
    """Names of implementations in table order, each once; unknown ones last."""
    found = set(names)
    return [n for n in NAMES if n in found] + sorted(found - set(NAMES))


def groups(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each implementation, in table order."""
    return [(name, rows[rows["implementation"] == name]) for name in ordered(rows["implementation"])]


def ok(table: pd.DataFrame, *benches: str) -> pd.DataFrame:
    """Rows that were measured, of the given benches (all when none is named)."""
    good = table[(table["status"] == "ok") & table["median_us"].notna()]
    return good[good["bench"].isin(benches)] if benches else good


def why(table: pd.DataFrame, *benches: str) -> str:
    """Why no row of these benches can be drawn."""
    asked = table[table["bench"].isin(benches)] if benches else table
    what = "/".join(benches) or "measured"
    if asked.empty:
        return f"no {what} row was asked for"
    bad = asked.loc[asked["status"] != "ok", "status"].value_counts()
    if bad.empty:
        return f"no {what} row has the values that this panel shows"
    counts = ", ".join(f"{n} {status}" for status, n in bad.items())
    return f"{len(asked) - bad.sum()} of {len(asked)} {what} rows ok\n({counts})"


def canvas(rows: int, columns: int, width: float, height: float, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its axes in reading order; `grid` are arguments of ``Figure.subplots``, such as height_ratios."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def empty(axes: Axes, reason: str) -> None:
    """Say in the panel that there is nothing to draw, and why; the text has the id `NOTHING`, for whoever reads the drawing."""
    axes.set_axis_off()
    axes.text(
        0.5,
        0.5,
        textwrap.fill(f"no data: {reason}", _LETTERS),
        ha="center",
        va="center",
        transform=axes.transAxes,
        gid=NOTHING,
    )


def finish(figure: Figure, title: str, rows: pd.DataFrame, note: str = "") -> Figure:
    """Title above, provenance below: hardware, versions, days, number of rows and samples; and a note of the figure's own."""
    cpu = not rows.empty and devices.column(rows) == devices.CPU
    return captioned(figure, title, cpu, provenance(rows), note)


def captioned(figure: Figure, title: str, cpu: bool, *notes: str) -> Figure:
    """Title above, with a caution where the figure shows times of a CPU; below the notes, each wrapped to the width."""
    figure.suptitle(title + (" (CPU: only ratios are meaningful)" if cpu else ""), fontweight="bold")
    letters = int(figure.get_size_inches()[0] * 72 / (0.58 * 7))
    lines = [line for note in notes for line in textwrap.wrap(note, letters)]
    figure.supxlabel("\n".join(lines), fontsize=7, color="0.35")
    return figure


def provenance(rows: pd.DataFrame) -> str:
    """Hardware, torch, days and counts of the rows shown."""
    if rows.empty:
        return "no measured rows"
    column = devices.column(rows)
    cells = len(rows[["bench", "cell"]].drop_duplicates())
    counts = f"n = {count(len(rows), 'row')} of {count(cells, 'cell')}, {rows['samples'].sum():,.0f} samples"
    clock = f"device time, {caches(rows)}" if column == devices.GPU else "wall time"
    return f"{distinct(rows[column])} | torch {distinct(rows['torch_version'])} | {days(rows['started_at'])} | {counts} | medians, {clock}"


def caches(rows: pd.DataFrame) -> str:
    """Of which share of the rows of a GPU the L2 cache may have been warm: small inputs may stay in it, however many sets there are."""
    warm = float((rows["cold"] != True).mean())  # noqa: E712
    if warm in (0.0, 1.0):
        return "L2 may be warm" if warm else "cold L2"
    return f"cold L2 but for {min(0.99, max(0.01, warm)):.0%} of rows"


def days(times: pd.Series) -> str:
    """The first and last day of ISO times."""
    found = sorted({str(time)[:10] for time in times.dropna()}) or ["date unknown"]
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def distinct(values: pd.Series) -> str:
    """The different values, comma separated."""
    return ", ".join(dict.fromkeys(str(v) for v in values.dropna())) or "unknown"


def handles(names: Any) -> list[Line2D]:
    """Legend entries of implementations in table order."""
    return [Line2D([], [], color=color(n), label=n, **marker(n)) for n in ordered(names)]


def legend(axes: Axes, names: Any, **options: Any) -> None:
    """A legend of implementations in table order."""
    axes.legend(handles=handles(names), **({"fontsize": 7, "frameon": False} | options))


def bars(middle: pd.Series, low: pd.Series, high: pd.Series) -> list[np.ndarray]:
    """Lengths of error bars below and above; none where an end is missing."""
    return [np.nan_to_num(length.clip(lower=0).to_numpy(float)) for length in (middle - low, high - middle)]


def plain_log(axis: Axis) -> None:
    """Ticks 1, 2, 5 per decade as plain numbers on a logarithmic axis that spans few decades."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / max(low, 1e-300) < 300 else (1,)))
    if high / max(low, 1e-300) < 3:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter("{x:,.9g}")
    axis.set_minor_formatter(NullFormatter())


def front(points: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The points that no other one beats in both columns (less is better), by rising x."""
    rising = points.sort_values([x, y])
    return rising[rising[y] < rising[y].cummin().shift(fill_value=float("inf"))]


def stages(value: Any) -> dict[str, float]:
    """A row's stage_us as a dict: Arrow maps arrive as pairs or dicts; missing is empty."""
    if value is None or isinstance(value, float):
        return {}
    return {name: time for name, time in dict(value).items() if time is not None and time == time}


def save(figure: Figure, svg: Path, png: Path) -> None:
    """Write both formats, which have one layout; equal numbers give equal files."""
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # it is found by drawing all texts, which takes half of the time
    with io.BytesIO() as drawn:
        figure.savefig(drawn, format="png", dpi=150, metadata={"Software": None})
        # 256 colours are enough for lines and letters, and a third of the bytes: published pictures are kept in the repository
        Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            png, format="png", optimize=True
        )
