"""Distance to the limit: the time of a call over the floor that binds, stage by stage."""

import numpy as np
import pandas as pd

from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import us

MOST_CELLS = 8  # of a bench
_SCALES = Scale("time over the floor that binds", "log"), Scale("cell", "names")


def chart(table: pd.DataFrame) -> Chart:
    """A line per cell, those of models and of most tokens first, with every implementation's time over its floor."""
    rows = row_groups.ok(table)
    rows = rows.assign(**floors(rows))
    rows = rows[rows["floor_us"] > 0]
    if rows.empty:
        return nothing(
            "dots", *_SCALES, rows, f"no row has a floor (on a CPU none is measured); {row_groups.why(table)}"
        )
    groups = [(bench, rows[rows["bench"] == bench]) for bench in row_groups.benches(rows)]
    shown = pd.concat(_chosen(group) for _, group in groups)
    labels = row_groups.labels(shown)
    records = [
        {
            "panel": one["bench"],
            "series": one["implementation"],
            "x": one["median_us"] / one["floor_us"],
            "y": labels[i],
            "low": one["ci_low_us"] / one["floor_us"],
            "high": one["ci_high_us"] / one["floor_us"],
            "says": f"floor {us(one['floor_us'])}: {one['binds']}",
        }
        | row(one)
        for i, one in shown.iterrows()
    ]
    tints = palette.tints(shown["implementation"])
    return Chart("dots", *_SCALES, marks(records), tints, shown, 1.0, note=row_groups.shown_of(shown, rows))


def floors(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """`floor_us` of each row, the longest of compulsory bytes at the copy bandwidth, FLOPs at the peak and an empty node of its graph, and which it is (`binds`).

    Of rows of a GPU; missing where no ceiling was measured.
    """
    gpu = rows["gpu_uuid"].notna()
    moved = rows["compulsory_bytes"] / rows["copy_gb_per_s"] / 1e3
    multiplied = (rows["flops"] / rows["peak_tflops"] / 1e6).where(rows["flops"] > 0)
    node = rows["graph_node_us"].where(rows["timer"] == "cuda_graph")
    each = (
        pd.DataFrame({"bytes": moved, "MMA rate": multiplied, "launch": node}).astype(float).where(gpu, np.nan, axis=0)
    )
    known = each.dropna(how="all")
    return {"floor_us": each.max(axis=1), "binds": known.idxmax(axis=1).reindex(rows.index)}


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a bench's first cells: one of each model, then most tokens first, without skew and capacity where there are such."""
    ordered = rows.sort_values(
        ["skew", "capacity_factor", "tokens"], ascending=[True, False, False], na_position="first", kind="stable"
    )
    cells = ordered.drop_duplicates("cell")
    turn = cells.groupby(cells["model"], dropna=False).cumcount().where(cells["model"].notna(), len(cells))
    kept = cells.assign(turn=turn).sort_values("turn", kind="stable")["cell"].head(MOST_CELLS)
    rank = {cell: i for i, cell in enumerate(kept)}
    return (
        rows[rows["cell"].isin(kept)]
        .assign(rank=rows["cell"].map(rank))
        .sort_values(["rank", "median_us"], kind="stable")
    )
