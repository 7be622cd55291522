"""Rows under the ceilings measured in the same processes: bytes or FLOPs of a second, and the time over the floor that binds."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import Chart, Scale, doubts, marks, nothing, row, thinned
from moe_routing_bench.quantities import us

ROOF = "roof"
_BYTES, _RATE = Scale("compulsory bytes of a call (MB)", "log"), Scale("GB/s of compulsory bytes")
_POINT = ("compulsory_bytes", "flops", "gb_per_s", "tflops", "share_of_copy", "ci_low_us", "ci_high_us")
_INTENSITY = Scale("arithmetic intensity (FLOP / compulsory byte)", "log"), Scale("achieved TFLOP/s", "log")


def bandwidth(table: pd.DataFrame) -> Chart:
    """A point per row, with the interval of its time, in a panel per bench that only moves data; dashed: the median copy of all of them.

    A panel is logarithmic only where many of its own points lie far below the copy: it hides what tells kernels near the copy apart.
    """
    benches = row_groups.moving(table)
    rows = _timed(table, benches) if benches else table.iloc[:0]
    if rows.empty:
        some = len(row_groups.ok(table)) > 0 and not benches
        reason = "no bench that only moves data was measured" if some else row_groups.why(table, *benches)
        return nothing("points", _BYTES, _RATE, rows, reason)
    far = [bench for bench in benches if _mostly_far_below(rows[rows["bench"] == bench])]
    own = {bench: (_BYTES, Scale(_RATE.label, "log")) for bench in far}
    placed = rows.iloc[np.argsort(rows["bench"].map(benches.index), kind="stable")]
    placed = placed.assign(
        panel=placed["bench"],
        series=placed["implementation"],
        x=placed["compulsory_bytes"] / 1e6,
        y=placed["gb_per_s"],
        doubt=[doubts(one) for one in row_groups.records(placed, ())],
    )
    kept, covered = thinned(placed, lambda panel: own.get(panel, (_BYTES, _RATE)))
    labels = row_groups.labels(rows)[kept.index].to_dict()
    records = [
        {"panel": one["bench"], "series": one["implementation"], "x": one["x"], "y": one["y"]}
        | {"low": low, "high": high, "says": f"{labels[one['index']]}, {one['share_of_copy']:.0%} of the copy"}
        | row(one)
        for one in row_groups.records(kept, (*_POINT, "x", "y"))
        for low, high in [(one["compulsory_bytes"] / one[end] / 1e3 for end in ("ci_high_us", "ci_low_us"))]
    ]
    copy = rows["copy_gb_per_s"].median()
    note = _points(rows)
    note += "" if np.isnan(copy) else f"; dashed: a copy, {copy:,.0f} GB/s"
    tints = palette.tints(rows["implementation"])
    note += f"; {covered}" * bool(covered)
    return Chart(
        "points",
        _BYTES,
        _RATE,
        marks(records),
        tints,
        rows,
        None if np.isnan(copy) else float(copy),
        note=note,
        own=own,
        shared=True,
        level=True,
    )


def _timed(table: pd.DataFrame, benches: Iterable[str]) -> pd.DataFrame:
    """The rows of benches that have a bandwidth."""
    rows = row_groups.ok(table, *benches)
    return rows[rows["gb_per_s"].notna() & (rows["compulsory_bytes"] > 0)]


def _mostly_far_below(part: pd.DataFrame) -> bool:
    """Whether a quarter of the points would lie on a linear axis's lowest thirtieth."""
    return bool(part["gb_per_s"].quantile(0.25) < part["copy_gb_per_s"].median() / 30)


def _points(rows: pd.DataFrame) -> str:
    """That each row is a point, and in what those of an implementation differ."""
    apart = row_groups.differing(rows, "", by=["bench", "implementation"])
    return f"one point per row; in a panel, rows{apart}" if apart else "one point per row"


def roofline(table: pd.DataFrame) -> Chart:
    """A point per row with FLOPs, with the interval of its time, in a panel per bench under the medians of its ceilings."""
    rows = row_groups.ok(table)
    rows = rows[(rows["flops"] > 0) & (rows["compulsory_bytes"] > 0) & rows["tflops"].notna()]
    if rows.empty:
        return nothing("lines", *_INTENSITY, rows, "no row with FLOPs is ok")
    labels = row_groups.labels(rows)
    records = []
    for bench in row_groups.benches(rows):
        mine = rows[rows["bench"] == bench]
        records += _roof(bench, mine)
        for one in row_groups.records(mine, _POINT):
            low, high = (one["flops"] / one[end] / 1e6 for end in ("ci_high_us", "ci_low_us"))
            alone = f"{one['bench']} {one['cell']}"  # a line through one point is none
            records.append(
                {
                    "panel": bench,
                    "series": one["implementation"],
                    "x": one["flops"] / one["compulsory_bytes"],
                    "y": one["tflops"],
                    "low": low,
                    "high": high,
                    "says": labels[one["index"]],
                    "join": alone,
                }
                | row(one)
            )
    tints = palette.tints(rows["implementation"])
    note = _points(rows)
    return Chart(
        "lines", *_INTENSITY, marks(records), tints | {ROOF: palette.BLACK}, rows, note=note, shared=True, level=True
    )


def _roof(bench: str, rows: pd.DataFrame) -> list[dict[str, object]]:
    """The roof over a bench's rows as three points: below the least intensity, where the ceilings meet, above the most. None without ceilings."""
    bandwidth, peak = rows["copy_gb_per_s"].median(), rows["peak_tflops"].median()
    if not (bandwidth > 0 and peak > 0):
        return []
    x = (rows["flops"] / rows["compulsory_bytes"]).astype(float)
    ridge = 1e3 * peak / bandwidth
    says = f"copy {bandwidth:,.0f} GB/s, bf16 matmul {peak:,.3g} TFLOP/s"
    ends = sorted({min(x.min() / 2, ridge), ridge, max(x.max() * 2, ridge)})
    return [
        {"panel": bench, "series": ROOF, "x": one, "y": min(one * bandwidth / 1e3, peak), "says": says, "join": ROOF}
        for one in ends
    ]


MOST_CELLS = 8  # of a bench
_SCALES = Scale("time over the floor that binds", "log"), Scale("cell", "names")


def limits(table: pd.DataFrame) -> Chart:
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
    first = shown.loc[shown.groupby(["bench", labels])["median_us"].idxmin()]
    asides = {
        (one["bench"], labels[i]): f"{one['implementation']}, {us(one['median_us'])}" for i, one in first.iterrows()
    }
    records = [
        {
            "panel": one["bench"],
            "series": one["implementation"],
            "x": one["median_us"] / one["floor_us"],
            "y": labels[i],
            "low": one["ci_low_us"] / one["floor_us"],
            "high": one["ci_high_us"] / one["floor_us"],
            "says": f"floor {us(one['floor_us'])}: {one['binds']}",
            "aside": asides[one["bench"], labels[i]],
        }
        | row(one)
        for i, one in shown.iterrows()
    ]
    tints = palette.tints(shown["implementation"])
    return Chart(
        "dots", *_SCALES, marks(records), tints, shown, 1.0, note=row_groups.shown_of(shown, rows), shared=True
    )


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
