"""Whether experts specialise by domain when the router does not learn with them, and what that costs."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import paired, quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, nothing
from moe_routing_bench.grid.run_spec import TRAIN_MODES
from moe_routing_bench.quality.specialisation import mean_bits

TITLE = "Learning to specialise"
_ROWS = (
    ("expert_domain_bits", "bits between expert and domain"),
    ("bits_per_byte", "validation bits per byte (less is better)"),
)
_MISSING = "another run of its rule in another train mode beside it"
_MODE, _BITS = Scale("train mode", "names"), Scale(_ROWS[1][1])


def draw(table: pd.DataFrame) -> Figure:
    """Two panels, one above the other, for each rule that was trained in several modes in one config."""
    rows = quality_rows.finals(table, "load_by_domain")
    groups = quality_rows.varied(rows, "train_mode")
    if not groups:
        return quality.nothing(TITLE, rows.iloc[:0], quality_rows.why(table, _MISSING))
    figure, panels = style.canvas(2, len(groups), max(8, 5.5 * len(groups)), 7.6)
    for number, (title, group) in enumerate(groups):
        found, modes = _of(group)
        for line, (column, name) in enumerate(_ROWS):
            axes = panels[line * len(groups) + number]
            quality.paired(axes, found, "train_mode", modes, column)
            axes.set_ylabel(name)
        panels[number].set_title(title, fontsize=8)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in groups))


def chart(table: pd.DataFrame) -> Chart:
    """The same for the page, panels side by side."""
    rows = quality_rows.finals(table, "load_by_domain")
    groups = quality_rows.varied(rows, "train_mode")
    if not groups:
        return nothing("lines", _MODE, _BITS, rows.iloc[:0], quality_rows.why(table, _MISSING))
    found, own = [], {}
    for title, group in groups:
        runs, modes = _of(group)
        for column, name in _ROWS:
            panel = f"{title.replace(chr(10), ': ')}: {name}"
            own[panel] = (_MODE, Scale(name))
            found += paired.records(panel, runs, "train_mode", modes, column)
    return paired.chart(found, _MODE, _BITS, pd.concat(group for _, group in groups), own)


def _of(group: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The runs of a rule with the bits that expert and domain share, and their modes in order."""
    found = group.assign(expert_domain_bits=group["load_by_domain"].map(mean_bits))
    return found, [mode for mode in TRAIN_MODES if mode in set(group["train_mode"])]
