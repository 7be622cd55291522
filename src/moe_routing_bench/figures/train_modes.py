"""Whether experts specialise by domain when the router does not learn with them, and what that costs."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.grid.run_spec import TRAIN_MODES
from moe_routing_bench.quality.comparison.specialisation import mean_bits

TITLE = "Learning to specialise"
_ROWS = (
    ("expert_domain_bits", "bits between expert and domain"),
    ("bits_per_byte", "validation bits per byte (less is better)"),
)


def draw(table: pd.DataFrame) -> Figure:
    """Two panels, one above the other, for each rule that was trained in several modes in one config."""
    rows = quality_rows.finals(table, "load_by_domain")
    groups = quality_rows.varied(rows, "train_mode")
    if not groups:
        return quality.nothing(
            TITLE, rows.iloc[:0], quality_rows.why(table, "another run of its rule in another train mode beside it")
        )
    figure, panels = style.canvas(2, len(groups), max(8, 5.5 * len(groups)), 7.6)
    for number, (title, group) in enumerate(groups):
        found = group.assign(expert_domain_bits=group["load_by_domain"].map(mean_bits))
        modes = [mode for mode in TRAIN_MODES if mode in set(group["train_mode"])]
        for line, (column, name) in enumerate(_ROWS):
            axes = panels[line * len(groups) + number]
            quality.paired(axes, found, "train_mode", modes, column)
            axes.set_ylabel(name)
        panels[number].set_title(title, fontsize=8)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in groups))
