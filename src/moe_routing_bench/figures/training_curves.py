"""Validation loss and balance of the loads over training: a line per rule through its means over seeds."""

import pandas as pd

from moe_routing_bench.figures import training_rows
from moe_routing_bench.figures.chart import Chart, Scale, nothing
from moe_routing_bench.grid.run_spec import DENSE

Y = "bits_per_byte"
_SEEN = Scale("bytes trained on (millions)")
_LOSS = _SEEN, Scale("validation bits per byte")
_LOADS = _SEEN, Scale("CV of choices per expert (0: balanced)")


def training_curves(table: pd.DataFrame) -> Chart:
    """Per number of experts: causal rules, their paired difference to the dense model where there are several, and rules that see later tokens."""
    rows = training_rows.history(table, Y)
    contests = training_rows.contests(rows)
    if not contests:
        return nothing("lines", *_LOSS, rows, training_rows.why(table, "a validation loss"))
    panels, own = [], {}
    for title, group in contests:
        causal = group["causal"].astype(bool)
        panels.append((title, group[causal], Y))
        if group.loc[causal, "contestant"].nunique() > 1:
            base, both = _paired(group[causal])
            name = f"{title}; difference to {base}, paired by seed (below 0 is better)"
            own[name] = (_SEEN, Scale(f"bits per byte less those of {base}"))
            panels.append((name, both, "difference"))
        later = f"{title}; {training_rows.NOT_CAUSAL} rules that see later tokens (own scale: their loss means something else)"
        panels.append((later, group[~causal], Y))
    return training_rows.lines([one for one in panels if len(one[1])], *_LOSS, own)


def _paired(rows: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The reference's name, and the others' rows with their difference to it at equal seed and step."""
    last = rows[rows["step"] == rows["step"].max()].groupby("contestant")[Y].mean()
    base = DENSE if DENSE in last else str(last.idxmin())
    own = rows.loc[rows["contestant"] == base, ["seed", "step", Y]]
    both = rows[rows["contestant"] != base].merge(own, on=["seed", "step"], suffixes=("", "_base"))
    return base, both.assign(difference=both[Y] - both[f"{Y}_base"])


def training_load_cv(table: pd.DataFrame) -> Chart:
    """A line per rule through its means over seeds, in a panel per number of experts."""
    rows = training_rows.history(table, "load_cv")
    contests = training_rows.contests(rows)
    if not contests:
        return nothing("lines", *_LOADS, rows, training_rows.why(table, "a load"))
    return training_rows.lines([(title, group, "load_cv") for title, group in contests], *_LOADS)
