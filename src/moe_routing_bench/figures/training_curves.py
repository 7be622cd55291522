"""Validation loss over training, and its difference to the dense model, with bands over seeds."""

from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, nothing
from moe_routing_bench.grid.run_spec import DENSE

Y = "bits_per_byte"
_SCALES = Scale("bytes trained on (millions)"), Scale("validation bits per byte")
TITLE = "Training curves"


def draw(table: pd.DataFrame) -> Figure:
    """One row per number of experts: causal rules, their paired difference to the dense model, rules that see later tokens."""
    rows = quality_rows.history(table, Y)
    contests = quality_rows.contests(rows)
    figure, axes, found = quality.panels(contests, 3, 17, 4.6)
    if not contests:
        style.empty(axes[0], quality_rows.why(table, "a validation loss"))
        return quality.finish(figure, TITLE, rows)
    for title, group, (left, middle, right) in found:
        causal = group[group["causal"].astype(bool)]
        _curves(left, causal, Y, "validation bits per byte", f"{title}\ncausal rules")
        if causal["contestant"].nunique() > 1:
            base, differences = _paired(causal)
            middle.axhline(0, color="black", lw=0.8, ls=":")
            _curves(
                middle,
                differences,
                "difference",
                f"bits per byte less those of {base}",
                f"difference to {base}, paired by seed\n(below 0 is better)",
            )
        else:
            style.empty(middle, "no two causal rules to compare")
        _curves(
            right,
            group[~group["causal"].astype(bool)],
            Y,
            "validation bits per byte",
            f"{quality_rows.NOT_CAUSAL} rules that see later tokens\n(own scale: their loss means something else)",
        )
    return quality.finish(figure, TITLE, pd.concat(group for _, group in contests))


def chart(table: pd.DataFrame) -> Chart:
    """A line per rule through its means over seeds, in a panel of causal rules and one of the others per number of experts; a causal rule's
    points say how far it is from the dense model."""
    rows = quality_rows.history(table, Y)
    contests = quality_rows.contests(rows)
    if not contests:
        return nothing("lines", *_SCALES, rows, quality_rows.why(table, "a validation loss"))
    said, contested = {}, []
    for title, group in contests:
        causal = group["causal"].astype(bool)
        later = f"{title}; {quality_rows.NOT_CAUSAL} rules that see later tokens"
        contested += [(name, part) for name, part in ((title, group[causal]), (later, group[~causal])) if len(part)]
        if group.loc[causal, "contestant"].nunique() > 1:
            said |= {(title, *key): text for key, text in _differences(group[causal]).items()}
    found = quality.lines(contested, Y, *_SCALES)
    keys = found.marks[["panel", "series", "x"]].itertuples(index=False, name=None)
    return replace(found, marks=found.marks.assign(says=[said.get(key) for key in keys]))


def _differences(causal: pd.DataFrame) -> dict[tuple[str, float], str]:
    """By contestant and bytes (millions): the mean difference to the reference, with its interval, in words."""
    base, both = _paired(causal)
    return {
        (name, at): f"{mean:+.4f} ± {half:.4f} to {base}, paired by seed"
        for name, group in quality_rows.ordered(both)
        for at, mean, half in zip(*quality_rows.over_tokens(group, "difference"), strict=True)
    }


def _paired(rows: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The reference's name, and the others' rows with their difference to it at equal seed and step."""
    last = rows[rows["step"] == rows["step"].max()].groupby("contestant")[Y].mean()
    base = DENSE if DENSE in last else str(last.idxmin())
    own = rows.loc[rows["contestant"] == base, ["seed", "step", Y]]
    both = rows[rows["contestant"] != base].merge(own, on=["seed", "step"], suffixes=("", "_base"))
    return base, both.assign(difference=both[Y] - both[f"{Y}_base"])


def _curves(axes: Axes, rows: pd.DataFrame, column: str, label: str, title: str) -> None:
    if rows.empty:
        style.empty(axes, "no such run")
        return
    quality.curves(axes, rows, column)
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=9)
