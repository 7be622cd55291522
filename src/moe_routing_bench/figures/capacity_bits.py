"""What a capacity factor costs in quality: bits per byte lost where choices over it are dropped."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import plain, quality_rows
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing

TITLE = "Bits lost at a capacity factor"
_SCALES = Scale("bits per byte lost by the limit", "linear"), Scale("router", "names")


def draw(table: pd.DataFrame) -> Figure:
    """A panel per config and factor."""
    found = chart(table)
    return plain.draw(found, TITLE, provenance=quality.provenance(found.shown, "training runs"))


def chart(table: pd.DataFrame) -> Chart:
    """Validation loss with the factor that a model was trained with, less that without a limit, in bits per byte; causal rules."""
    rows = lost(table)
    if rows.empty:
        return nothing("dots", *_SCALES, rows, quality_rows.why(table, "a loss with a capacity limit"))
    records, routers = [], []
    for (_, factor), group in rows.groupby(["label", "capacity_factor"], sort=False):
        means = [(*quality_rows.interval(one["lost"]), name, one) for name, one in quality_rows.ordered(group)]
        for mean, half, name, one in sorted(means, key=lambda found: found[0]):
            routers.append((name, one["router"].iloc[0]))
            says = f"{one['drop_rate'].mean():.1%} of choices dropped; n = {len(one)} seeds"
            records.append({"panel": f"{quality_rows.describe(group)}, capacity factor {factor:g}", "series": name, "x": mean, "y": name, "low": mean - half, "high": mean + half, "says": says})  # fmt: skip
    return Chart("dots", *_SCALES, marks(records), {name: quality.color(router) for name, router in routers}, rows, 0.0)


def lost(table: pd.DataFrame) -> pd.DataFrame:
    """The final runs of causal rules that were evaluated with a capacity limit, with the bits per byte that it `lost`."""
    rows = quality_rows.finals(table, "val_loss", "val_loss_with_capacity", "capacity_factor")
    rows = rows[rows["causal"].astype(bool)]
    return rows.assign(lost=rows["bits_per_byte"] * (rows["val_loss_with_capacity"] / rows["val_loss"] - 1))
