"""Forward and backward of a layer: the whole step, and the forward pass apart where the same run measured it."""

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import row_groups
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import us

FORWARD, REST, WHOLE = "forward", "backward (the rest)", "forward + backward"
_COLORS = {WHOLE: "#445577", FORWARD: "#0173b2", REST: "#992255"}
_SCALES = Scale("median time (µs)"), Scale("implementation", "names")


def chart(table: pd.DataFrame) -> Chart:
    """Bars of the step; where the bench `layer` has a row of the same implementation, cell and card, its time is the forward part."""
    steps = row_groups.ok(table, "training")
    if steps.empty:
        return nothing("bars", *_SCALES, steps, row_groups.why(table, "training"))
    labels = row_groups.labels(steps)
    forward = forwards(steps, table)
    ordered = steps.assign(panel=labels, forward=forward).sort_values(["panel", "median_us"], kind="stable")
    records = [part | row(one) for _, one in ordered.iterrows() for part in _bars(one)]
    there = {record["series"] for record in records}
    return Chart("bars", *_SCALES, marks(records), {name: _COLORS[name] for name in _COLORS if name in there}, ordered)


def forwards(steps: pd.DataFrame, table: pd.DataFrame) -> pd.Series:
    """The time of the forward pass of each step: of the row of `layer` on its card that is equal in implementation and in what `training` reads, and plain in the rest.

    Missing where there is none.

    `ops` of training runs what `auto` chooses, whose forward pass is the row of that name.
    """
    read = BENCHES["training"].axes
    keys = ["implementation", *(name for name in read if name != "model"), "_card"]
    layers = row_groups.ok(table, "layer")
    layers = layers[_usual(layers, [name for name in BENCHES["layer"].axes if name not in read])]
    known = layers.assign(_card=row_groups.card(layers), implementation=layers["implementation"].replace("auto", "ops"))
    wanted = steps.assign(_card=row_groups.card(steps))
    times = {
        tuple(_text(one) for one in values): time
        for *values, time in known[[*keys, "median_us"]].itertuples(index=False)
    }
    found = [times.get(tuple(_text(one) for one in values)) for values in wanted[keys].itertuples(index=False)]
    return pd.Series(found, index=steps.index, dtype=float)


def _usual(rows: pd.DataFrame, names: list[str]) -> pd.Series:
    """Whether a row has nothing of its own in these axes: neither a value besides the default nor one besides what the axis follows."""
    found = pd.Series(True, index=rows.index)
    for name in names:
        usual = rows[AXES[name].follows] if AXES[name].follows else AXES[name].default
        found &= rows[name].isna() | (rows[name] == usual)
    return found


def _text(value: object) -> str:
    """A value of an axis as a key: missing values are equal."""
    return "" if pd.isna(value) else str(value)


def _bars(one: pd.Series) -> list[dict[str, object]]:
    place = {"panel": one["panel"], "x": one["median_us"], "y": one["implementation"]}
    interval = {"x_low": one["ci_low_us"], "x_high": one["ci_high_us"]}
    whole = f"{us(one['median_us'], one['ci_low_us'], one['ci_high_us'])} in all"
    if pd.isna(one["forward"]) or one["forward"] >= one["median_us"]:
        return [
            place
            | interval
            | {
                "series": WHOLE,
                "low": 0.0,
                "high": one["median_us"],
                "says": f"{whole}; forward alone: not measured in this run",
            }
        ]
    rest = one["median_us"] - one["forward"]
    return [
        place | {"series": FORWARD, "low": 0.0, "high": one["forward"], "says": f"forward {us(one['forward'])}"},
        place
        | interval
        | {
            "series": REST,
            "low": one["forward"],
            "high": one["median_us"],
            "says": f"backward {us(rest)}, {rest / one['forward']:.3g}x the forward; {whole}",
        },
    ]
