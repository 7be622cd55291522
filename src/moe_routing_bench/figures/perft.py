"""What adapters beside a frozen model reach, against how many parameters they train, and against how many a token meets."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from moe_routing_bench.figures import colors, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.grid.run_spec import VARIANTS
from moe_routing_bench.quality import perft_summary
from moe_routing_bench.quantities import count

TITLE = "Routed fine-tuning: loss against parameters"
_COLORS = dict(zip(VARIANTS, sns.color_palette("colorblind"), strict=False))
_SHAPES = dict(zip(VARIANTS, "osD^", strict=True))
_PANELS = (("params", "trainable parameters"), ("active_params", "trainable parameters that a token meets"))
_MISSING = "no final adaptation of a trained run"
_BITS = Scale("validation bits per byte of the new text (less is better)")


def draw(table: pd.DataFrame) -> Figure:
    """Loss on the new text in a row of two panels per entry of the config: raw, with no axis that combines it with parameters."""
    found = perft_summary.summary(table)
    if found.empty:
        return quality.nothing(TITLE, table.iloc[:0], _MISSING, what="adaptations")
    rows, entries = perft_summary.finals(table), found["label"].unique()
    figure, panels = style.canvas(len(entries), 2, 11, 4.6 * len(entries))
    for number, label in enumerate(entries):
        mine = found[found["label"] == label]
        for axes, (column, name) in zip(panels[2 * number :], _PANELS, strict=False):
            _panel(axes, mine, rows[rows["label"] == label], column)
            axes.set(xlabel=name, ylabel=_BITS.label)
            axes.set_title(_describe(rows[rows["label"] == label]), fontsize=8)
        panels[2 * number + 1].sharey(panels[2 * number])
        panels[2 * number + 1].legend(
            title="ranks from left to right", fontsize=7, title_fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5)
        )  # fmt: skip
    return quality.finish(figure, TITLE, rows, what="adaptations")


def chart(table: pd.DataFrame) -> Chart:
    """The same for the page: a line per variant through its ranks, in a panel per entry and way to count parameters."""
    found = perft_summary.summary(table)
    if found.empty:
        return nothing("lines", Scale("parameters", "log"), _BITS, table.iloc[:0], _MISSING)
    rows, records, own = perft_summary.finals(table), [], {}
    for label in found["label"].unique():
        about = _describe(rows[rows["label"] == label]).replace("\n", "; ")
        for column, name in _PANELS:
            panel = f"{about}; against {name}"
            own[panel] = (Scale(name, "log"), _BITS)
            for one in found[found["label"] == label].sort_values("rank").to_dict("records"):
                half = np.nan_to_num(one["bits_per_byte_half_width"])
                records.append({"panel": panel, "series": f"PERFT-{one['variant']}", "x": one[column], "y": one["bits_per_byte"], "low": one["bits_per_byte"] - half, "high": one["bits_per_byte"] + half, "says": f"rank {one['rank']}, n = {one['seeds']} seeds"})  # fmt: skip
    tints = colors.assigned(f"PERFT-{variant}" for variant in VARIANTS if variant in set(found["variant"]))
    return Chart("lines", Scale("parameters", "log"), _BITS, marks(records), tints, rows, own=own)


def _panel(axes: Axes, found: pd.DataFrame, rows: pd.DataFrame, column: str) -> None:
    """Mean and interval by variant and rank, joined over the ranks; small dots are the seeds."""
    for variant in [one for one in VARIANTS if one in set(found["variant"])]:
        mine = found[found["variant"] == variant].sort_values("rank")
        color = _COLORS[variant]
        seeds = rows[rows["variant"] == variant]
        axes.plot(seeds[column], seeds["bits_per_byte"], ls="", marker=".", ms=3, color=color, alpha=0.4)
        ranks = ", ".join(map(str, mine["rank"]))
        axes.errorbar(
            mine[column], mine["bits_per_byte"], yerr=mine["bits_per_byte_half_width"].fillna(0), color=color, marker=_SHAPES[variant],
            ms=5, lw=1.2, capsize=3, label=f"PERFT-{variant}: r = {ranks}",
        )  # fmt: skip
    axes.set_xscale("log")
    style.plain_log(axes.xaxis)
    axes.xaxis.set_major_formatter(EngFormatter())


def _describe(rows: pd.DataFrame) -> str:
    """Base, texts, and what the frozen model has without adapters."""
    one, seeds = rows.iloc[0], rows["seed"].nunique()
    frozen = (rows["bits_per_byte"] + rows["gain"]).mean()
    texts = f"{' + '.join(one['old_domains'])} → {' + '.join(one['domains'])}"
    return f"{one['label']}: {one['router']}, E={one['experts']:.0f}, {one['base_params'] / 1e6:.3g} M frozen parameters, {texts}\nwithout adapters {frozen:.3f} bits per byte; n = {count(seeds, 'seed')}"
