"""Loss against the seconds that training takes: what a rule's speed is worth."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import plain, quality_rows
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.quality import compare

TITLE = "Loss against training seconds"
_SCALES = Scale("training seconds (steps alone)", "log"), Scale("validation bits per byte")


def draw(table: pd.DataFrame) -> Figure:
    """A panel per config of each number of experts; causal rules alone."""
    found = chart(table)
    return plain.draw(found, TITLE, provenance=quality.provenance(found.shown, "training runs"), note=found.note)


def chart(table: pd.DataFrame) -> Chart:
    """Of causal rules with a speed: mean loss over seeds at every evaluation, against the bytes seen until then over the rule's speed."""
    timed = compare.with_speeds(quality_rows.finals(table, "train_tokens_per_s", "bits_per_byte"))
    timed = timed[timed["causal"].astype(bool)]
    contests = quality_rows.contests(timed)
    if not contests:
        return nothing("lines", *_SCALES, timed, quality_rows.why(table, "a loss and a speed"))
    every = quality_rows.history(table, "bits_per_byte")
    records, routers, shown = [], [], []
    for title, runs in contests:
        speeds = runs.groupby("contestant")["train_tokens_per_s"].mean()
        for name, group in quality_rows.ordered(every[every["run"].isin(set(runs["run"]))]):
            routers.append((name, group["router"].iloc[0]))
            for seen, values in group.groupby("tokens_seen")["bits_per_byte"]:
                mean, half = quality_rows.interval(values)
                end = seen == group["tokens_seen"].max()
                says = f"{seen / 1e6:.3g} MB seen" + (", end of the schedule" if end else "")
                records.append({"panel": title, "series": name, "x": seen / speeds[name], "y": mean, "low": mean - half, "high": mean + half, "says": says})  # fmt: skip
        shown.append(runs)
    tints = {name: quality.color(router) for name, router in routers}
    rows = pd.concat(shown)
    return Chart("lines", *_SCALES, marks(records), tints, rows, note=f"speed: {compare.timed(rows)}")
