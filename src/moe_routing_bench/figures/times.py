"""Times of calls: against the number of tokens, shape by shape, at decode sizes, and of layers forward and backward."""

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.figures import palette, row_groups
from moe_routing_bench.figures.chart import TOKENS, Chart, Scale, marks, nothing, row
from moe_routing_bench.quantities import us

MOST_SHAPES = 12
MOST_TOKENS, MOST_CELLS = 64, 12
_LINES = Scale(TOKENS, "log"), Scale("median time (µs)", "log")
_DOTS = Scale("median time (µs)", "log"), Scale("implementation", "names")


def over_tokens(table: pd.DataFrame) -> Chart:
    """A line per implementation, through the rows that are equal but for the tokens; the widest benches and most tokens first."""
    rows = row_groups.ok(table)
    rows = rows.assign(panel=_panels(rows)) if len(rows) else rows.assign(panel="")
    counts = rows.groupby("panel")["tokens"].nunique()
    several = rows[rows["panel"].isin(counts.index[counts > 1])]
    if several.empty:
        return nothing(
            "lines", *_LINES, rows, f"no shape was measured at two numbers of tokens; {row_groups.why(table)}"
        )
    benches = row_groups.benches(several)
    firsts = several.drop_duplicates("panel")
    place = {panel: benches.index(bench) for panel, bench in zip(firsts["panel"], firsts["bench"], strict=True)}
    order = sorted(
        several["panel"].unique(), key=lambda name: (-place[name], -counts[name], name)
    )  # benches of one stage come last
    kept = order[:MOST_SHAPES]
    shown = several[several["panel"].isin(kept)]
    shown = shown.assign(line=row_groups.joined(shown, ["panel", "implementation"]))
    records = [
        {
            "panel": one["panel"],
            "series": one["implementation"],
            "x": one["tokens"],
            "y": one["median_us"],
            "low": one["ci_low_us"],
            "high": one["ci_high_us"],
            "join": one["line"],
        }
        | row(one)
        for panel in kept
        for one in row_groups.records(
            shown[shown["panel"] == panel].sort_values(["tokens", "median_us"]),
            ("panel", "tokens", "median_us", "ci_low_us", "ci_high_us", "line"),
        )
    ]
    tints = palette.tints(shown["implementation"])
    note = f"{len(kept)} of {len(order)} shapes" if len(kept) < len(order) else ""
    return Chart("lines", *_LINES, marks(records), tints, shown, note=note, shared=True, level=True)


def _panels(rows: pd.DataFrame) -> pd.Series:
    """Bench and shape in words; cells of a model and of its bare sizes share a panel, which names the model."""
    whole = rows["bench"] == "model"
    sizes = row_groups.labels(rows.assign(model=rows["model"].where(whole)), but=["tokens", "phase"])
    plain_sizes = rows["bench"] + ": " + sizes
    known = rows["model"].dropna()  # rows of sizes alone are most of many
    models = known.groupby(plain_sizes[known.index]).agg(lambda names: ", ".join(sorted(set(names)))).to_dict()
    named = plain_sizes.map(lambda sizes: models.get(sizes, "")).where(~whole, "")
    return plain_sizes + named.map(lambda text: f" ({text})" if text else "")


def decode(table: pd.DataFrame) -> Chart:
    """The implementations of each cell, fastest first; whole layers and models before stages, and the fewest tokens first."""
    rows = row_groups.ok(table)
    rows = rows[(rows["tokens"] <= MOST_TOKENS) & (rows["bench"] != "training")]
    if rows.empty:
        return nothing("dots", *_DOTS, rows, f"no cell of at most {MOST_TOKENS} tokens; {row_groups.why(table)}")
    benches = row_groups.benches(rows)
    rows = rows.assign(
        panel=rows["bench"] + ": " + row_groups.labels(rows), place=[-benches.index(name) for name in rows["bench"]]
    )
    ordered = rows.sort_values(["place", "tokens", "panel", "median_us"], kind="stable")
    panels = ordered["panel"].unique()
    shown = ordered[ordered["panel"].isin(panels[:MOST_CELLS])]
    records = [
        {
            "panel": one["panel"],
            "series": one["implementation"],
            "x": one["median_us"],
            "y": one["implementation"],
            "low": one["ci_low_us"],
            "high": one["ci_high_us"],
            "aside": us(one["median_us"]),
        }
        | row(one)
        for _, one in shown.iterrows()
    ]
    tints = palette.tints(shown["implementation"])
    note = f"{MOST_CELLS} of {len(panels)} cells" if len(panels) > MOST_CELLS else ""
    return Chart("dots", *_DOTS, marks(records), tints, shown, note=note, shared=True)


FORWARD, REST, WHOLE = "forward", "backward (the rest)", "forward + backward"
_COLORS = {WHOLE: "#445577", FORWARD: "#0173b2", REST: "#992255"}
_SCALES = Scale("median time (µs)"), Scale("implementation", "names")


def backward(table: pd.DataFrame) -> Chart:
    """Bars of the step; where the bench `layer` has a row of the same implementation, cell and card, its time is the forward part."""
    steps = row_groups.ok(table, "training")
    if steps.empty:
        return nothing("bars", *_SCALES, steps, row_groups.why(table, "training"))
    labels = row_groups.labels(steps)
    forward = forwards(steps, table)
    ordered = steps.assign(panel=labels, forward=forward).sort_values(["panel", "median_us"], kind="stable")
    records = [part | row(one) for _, one in ordered.iterrows() for part in _bars(one)]
    there = {record["series"] for record in records}
    tints = {name: tint for name, tint in _COLORS.items() if name in there}
    return Chart("bars", *_SCALES, marks(records), tints, ordered, shared=True)


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
