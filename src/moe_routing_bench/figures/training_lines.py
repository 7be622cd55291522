"""Lines of training runs: a rule's loss and loads over its steps, and runs of one rule that differ in network or train mode."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moe_routing_bench.figures import palette, training_rows
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.grid.run_spec import DENSE, TRAIN_MODES
from moe_routing_bench.quality import rates
from moe_routing_bench.quality.specialisation import mean_bits
from moe_routing_kernels.routers.zoo import NETWORKS

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
        later = f"{title}; {training_rows.NOT_CAUSAL} rules that see later tokens (their loss means something else)"
        own[later] = (_SEEN, Scale(f"{_LOSS[1].label}; own scale"))
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


SEED = "runs of one seed"
_ONE_NETWORK = "another run of its rule with another network"
_NETWORK = Scale("network", "names"), Scale("validation bits per byte (less is better)")
_ROWS = (
    ("expert_domain_bits", "bits between expert and domain"),
    ("bits_per_byte", "validation bits per byte (less is better)"),
)
_ONE_MODE = "another run of its rule in another train mode"
_MODE, _BITS = Scale("train mode", "names"), Scale(_ROWS[1][1])


def networks(table: pd.DataFrame) -> Chart:
    """A panel for each rule that was trained with several networks in one config."""
    rows = training_rows.finals(table, Y)
    groups = training_rows.varied(rows, "network")
    if not groups:
        return nothing("lines", *_NETWORK, rows.iloc[:0], training_rows.why(table, _ONE_NETWORK))
    found = [
        one
        for title, group in groups
        for one in _records(title.replace("\n", ": "), group, "network", _names(group), Y)
    ]
    return _chart(found, *_NETWORK, pd.concat(group for _, group in groups), {})


def _names(group: pd.DataFrame) -> list[str]:
    """The networks of a rule's runs, in the order of the zoo."""
    return [name for name in NETWORKS if name in set(group["network"])]


def train_modes(table: pd.DataFrame) -> Chart:
    """Two panels for each rule that was trained in several modes in one config."""
    rows = training_rows.finals(table, "load_by_domain")
    groups = training_rows.varied(rows, "train_mode")
    if not groups:
        return nothing("lines", _MODE, _BITS, rows.iloc[:0], training_rows.why(table, _ONE_MODE))
    found, own = [], {}
    for title, group in groups:
        runs, modes = _of(group)
        for column, name in _ROWS:
            panel = f"{title.replace(chr(10), ': ')}: {name}"
            own[panel] = (_MODE, Scale(name))
            found += _records(panel, runs, "train_mode", modes, column)
    return _chart(found, _MODE, _BITS, pd.concat(group for _, group in groups), own)


def _of(group: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The runs of a rule with the bits that expert and domain share, and their modes in order."""
    found = group.assign(expert_domain_bits=group["load_by_domain"].map(mean_bits))
    return found, [mode for mode in TRAIN_MODES if mode in set(group["train_mode"])]


def _records(panel: str, rows: pd.DataFrame, key: str, names: Sequence[str], column: str) -> list[dict[str, Any]]:
    """The marks of one rule: `column` by the value of `key`, in the order of `names`."""
    router = rows["router"].iloc[0]
    by_seed = rows.pivot_table(index="seed", columns=key, values=column)[list(names)]
    found = [
        {"panel": panel, "series": SEED, "x": name, "y": value, "says": f"seed {seed}", "join": str(seed)}
        for name in names
        for seed, value in by_seed[name].dropna().items()
    ]
    for name in names:
        mean, half = training_rows.interval(by_seed[name])
        seeds = int(by_seed[name].notna().sum())
        found.append(
            {
                "panel": panel,
                "series": router,
                "x": name,
                "y": mean,
                "low": mean - half,
                "high": mean + half,
                "says": f"mean over n = {seeds} seeds",
                "text": training_rows.said(mean, half, seeds),
                "join": name,
            }
        )
    return found


def _chart(
    found: list[dict[str, Any]], x: Scale, y: Scale, shown: pd.DataFrame, own: Mapping[str, tuple[Scale, Scale]]
) -> Chart:
    """A _chart of such marks; `own` as in `Chart`."""
    routers = dict.fromkeys(one["series"] for one in found if one["series"] != SEED)
    tints = {SEED: palette.OTHER} | {name: palette.router(name) for name in routers}
    return Chart("lines", x, y, marks(found), tints, shown, own=own, level=True, timed=False)


_RATE = Scale("learning rate", "log"), Scale("validation bits per byte of the pilots (less is better)")
BEST, EDGE = "best rate", "best rate, at the edge of its grid"
_BEST = {BEST: palette.OTHER, EDGE: "#ee6666"}  # black is the dense model
_NO_PILOTS = "pilots of its learning rate"


def learning_rates(table: pd.DataFrame) -> Chart:
    """A panel per entry: a line per rule through the means of its pilots, with a point per seed, and its best rate marked."""
    rows = training_rows.finals(table, "pilot_lrs", Y)
    if rows.empty:
        return nothing("lines", *_RATE, rows, training_rows.why(table, _NO_PILOTS))
    found, tints = [], {}
    for _, group in rows.groupby("label", sort=False):
        for name, runs in training_rows.ordered(group):
            tints[name] = palette.router(runs["router"].iloc[0])
            found += _tried(training_rows.describe(group), name, runs.sort_values("seed").iloc[0])
    tints |= {kind: tint for kind, tint in _BEST.items() if any(one["series"] == kind for one in found)}
    found.sort(key=lambda one: one["series"] in (BEST, EDGE))  # these are drawn over the others
    return Chart("lines", *_RATE, marks(found), tints, rows, shared=True, level=True, timed=False)


def _tried(panel: str, name: str, run: pd.Series) -> list[dict[str, Any]]:
    """The marks of a rule's pilots, of which all its final runs know the same."""
    bits = run[Y] / run["val_loss"]  # bits per byte of a nat per token of this text
    lrs, means = list(run["pilot_lrs"]), [bits * loss for loss in run["pilot_losses"]]
    several = run["pilot_losses_by_seed"] if run["pilot_losses_by_seed"] is not None else [[]] * len(lrs)
    found = []
    for lr, losses in zip(lrs, several, strict=True):
        for number, loss in enumerate(losses):
            point = {"panel": panel, "series": name, "x": lr, "y": bits * loss, "join": f"{lr:g}, {number}"}
            found.append(point | {"says": f"pilot {number + 1} of {len(losses)}"})
    for lr, mean, losses in zip(lrs, means, several, strict=True):
        says = f"mean of {len(losses)} pilots" if len(losses) else "mean of the pilots"
        found.append({"panel": panel, "series": name, "x": lr, "y": mean, "says": says, "join": "mean"})
        if lr == run["lr"]:
            best = EDGE if rates.at_the_edge(lr, lrs) else BEST
            found.append({"panel": panel, "series": best, "x": lr, "y": mean, "says": name, "join": name})
    return found
