"""What the network that gives a router's logits does to the loss."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.routers.zoo import NETWORKS

Y = "bits_per_byte"
TITLE = "Router networks"


def draw(table: pd.DataFrame) -> Figure:
    """One panel a rule that was trained with several networks in one config."""
    rows = quality_rows.finals(table, Y)
    groups = quality_rows.varied(rows, "network")
    if not groups:
        return quality.nothing(
            TITLE, rows.iloc[:0], quality_rows.why(table, "another run of its rule with another network beside it")
        )
    figure, panels = style.canvas(1, len(groups), max(8, 5.5 * len(groups)), 4.6)
    for axes, (title, group) in zip(panels, groups, strict=True):
        names = [name for name in NETWORKS if name in set(group["network"])]
        quality.paired(axes, group, "network", names, Y)
        axes.set_ylabel("validation bits per byte (less is better)")
        axes.set_title(title, fontsize=8)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in groups))
