"""How a sentence names a cell. Pure functions; no torch."""

import pandas as pd

from moe_routing_bench.config import axes
from moe_routing_bench.figures import grouping

SIZES = ("tokens", "hidden", "intermediate", "experts", "top_k")


def shape(row: pd.Series) -> str:
    """The model, the sizes, and what else is not the usual in a row's cell, in words."""
    sizes = [f"{axes.AXES[name].prefix}={int(row[name])}" for name in SIZES if pd.notna(row[name])]
    rest = grouping.labels(pd.DataFrame([row]), but={*SIZES, "model"}).iloc[0]
    return " ".join([*([row["model"]] if pd.notna(row["model"]) else []), *sizes, *([rest] if rest else [])])
