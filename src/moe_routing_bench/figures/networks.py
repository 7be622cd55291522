"""What the network that gives a router's logits does to the loss."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures import style
from moe_routing_bench.routers.zoo import NETWORKS

Y = "bits_per_byte"
TITLE = "Router networks"


def draw(table: pd.DataFrame) -> Figure:
    """One panel a rule that was trained with several networks in one config."""
    rows = quality.finals(table, Y)
    groups = [group for _, group in rows.groupby(["label", "router"], sort=False) if group["network"].nunique() > 1]
    if not groups:
        figure, (axes,) = style.canvas(1, 1, 8, 4)
        style.empty(axes, quality.why(table, "another run of its rule with another network beside it"))
        return quality.finish(figure, TITLE, rows.iloc[:0])
    figure, panels = style.canvas(1, len(groups), max(8, 5.5 * len(groups)), 4.6)
    for axes, group in zip(panels, groups, strict=True):
        names = [name for name in NETWORKS if name in set(group["network"])]
        by_seed = group.pivot_table(index="seed", columns="network", values=Y)[names]
        router, causal = group["router"].iloc[0], bool(group["causal"].iloc[0])
        for values in by_seed.to_numpy():
            axes.plot(range(len(names)), values, color="0.75", lw=1, marker=".", ms=3)
        for at, name in enumerate(names):
            mean, half = quality.interval(by_seed[name])
            axes.errorbar(at, mean, yerr=half, color=quality.color(router), capsize=3, **quality.marker(router, causal))
            seeds = by_seed[name].notna().sum()
            axes.annotate(f"{mean:.3f} ± {half:.3f}\nn = {seeds}", (at, mean), (7, 0), textcoords="offset points", fontsize=7, va="center")  # fmt: skip
        axes.set_xticks(range(len(names)), names)
        axes.set(xlim=(-0.3, len(names) - 0.3), ylabel="validation bits per byte (less is better)")
        axes.set_title(f"{router}{'' if causal else f' {quality.NOT_CAUSAL}'}\n{quality.describe(group)}", fontsize=8)
    return quality.finish(figure, TITLE, pd.concat(groups))
