"""What the network that gives a router's logits does to the loss."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import paired, quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, nothing
from moe_routing_kernels.routers.zoo import NETWORKS

Y = "bits_per_byte"
TITLE = "Router networks"
_MISSING = "another run of its rule with another network beside it"
_SCALES = Scale("network", "names"), Scale("validation bits per byte (less is better)")


def draw(table: pd.DataFrame) -> Figure:
    """One panel a rule that was trained with several networks in one config."""
    rows = quality_rows.finals(table, Y)
    groups = quality_rows.varied(rows, "network")
    if not groups:
        return quality.nothing(TITLE, rows.iloc[:0], quality_rows.why(table, _MISSING))
    figure, panels = style.canvas(1, len(groups), max(8, 5.5 * len(groups)), 4.6)
    for axes, (title, group) in zip(panels, groups, strict=True):
        names = _names(group)
        quality.paired(axes, group, "network", names, Y)
        axes.set_ylabel(_SCALES[1].label)
        axes.set_title(title, fontsize=8)
    return quality.finish(figure, TITLE, pd.concat(group for _, group in groups))


def chart(table: pd.DataFrame) -> Chart:
    """The same for the page."""
    rows = quality_rows.finals(table, Y)
    groups = quality_rows.varied(rows, "network")
    if not groups:
        return nothing("lines", *_SCALES, rows.iloc[:0], quality_rows.why(table, _MISSING))
    found = [one for title, group in groups for one in paired.records(title.replace("\n", ": "), group, "network", _names(group), Y)]  # fmt: skip
    return paired.chart(found, *_SCALES, pd.concat(group for _, group in groups), {})


def _names(group: pd.DataFrame) -> list[str]:
    """The networks of a rule's runs, in the order of the zoo."""
    return [name for name in NETWORKS if name in set(group["network"])]
