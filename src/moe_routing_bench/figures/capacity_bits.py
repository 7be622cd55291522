"""What a capacity factor costs in quality: bits per byte lost where choices over it are dropped."""

import pandas as pd
from matplotlib.figure import Figure

from moe_routing_bench.figures import plain, quality_rows
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.quality import compare

TITLE = "Bits lost at a capacity factor"
TRAINED, LATER = "trained with it", "set after training"
_SCALES = Scale("bits per byte lost by the limit", "linear"), Scale("router", "names")


def draw(table: pd.DataFrame) -> Figure:
    """A panel per config and factor."""
    found = chart(table)
    return plain.draw(found, TITLE, provenance=quality.provenance(found.shown, "training runs"))


def chart(table: pd.DataFrame) -> Chart:
    """Validation loss with a capacity factor less that without a limit, in bits per byte: the factor of training, and others that were set after it."""
    rows = lost(table)
    if rows.empty:
        return nothing("dots", *_SCALES, limited(table), compare.why_no_capacity(limited(table), quality_rows.why(table, "a loss with a capacity limit")))  # fmt: skip
    records, routers = [], []
    for (_, factor, way), group in rows.groupby(["label", "capacity_factor", "way"], sort=False):
        means = [(*quality_rows.interval(one["lost"]), name, one) for name, one in quality_rows.ordered(group)]
        for mean, half, name, one in sorted(means, key=lambda found: found[0]):
            routers.append((name, one["router"].iloc[0]))
            dropped = "" if one["drop_rate"].isna().all() else f"{one['drop_rate'].mean():.1%} of choices dropped; "
            says = f"{dropped}n = {len(one)} seeds"
            records.append({"panel": f"{quality_rows.describe(group)}, capacity factor {factor:g}, {way}", "series": name, "x": mean, "y": name, "low": mean - half, "high": mean + half, "says": says})  # fmt: skip
    return Chart("dots", *_SCALES, marks(records), {name: quality.color(router) for name, router in routers}, rows, 0.0)


def lost(table: pd.DataFrame) -> pd.DataFrame:
    """Those of `limited` whose validation batches had all domains."""
    return compare.with_mixed_batches(limited(table))


def limited(table: pd.DataFrame) -> pd.DataFrame:
    """The final runs of causal rules, once per capacity factor that they were evaluated with, and the bits per byte that it `lost`.

    `way` says whether a run was trained with the factor or got it after the last step.
    """
    rows = quality_rows.finals(table, "val_loss", "bits_per_byte")
    rows = rows[rows["causal"].astype(bool)]
    own = rows[rows["val_loss_with_capacity"].notna() & rows["capacity_factor"].notna()]
    own = own.assign(lost=own["bits_per_byte"] * (own["val_loss_with_capacity"] / own["val_loss"] - 1), way=TRAINED)
    return pd.concat([own, _later(rows)])


def _later(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs once per factor that they got after training, but for the one that they were trained with."""
    kept = rows[rows["bits_by_capacity"].notna()]
    every = kept.assign(pair=[list(dict(one).items()) for one in kept["bits_by_capacity"]]).explode("pair").dropna(subset=["pair"])  # fmt: skip
    factors = pd.Series([float(name) for name, _ in every["pair"]], index=every.index, dtype=float)
    bits = pd.Series([value for _, value in every["pair"]], index=every.index, dtype=float)
    found = every.assign(lost=bits - every["bits_per_byte"], way=LATER, trained_with=every["capacity_factor"], capacity_factor=factors, drop_rate=float("nan"))  # fmt: skip
    return found[found["capacity_factor"] != found["trained_with"]].drop(columns=["pair", "trained_with"])
