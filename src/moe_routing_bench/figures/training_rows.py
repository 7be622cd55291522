"""Which training runs are shown and compared: contests, their order, and means with their intervals."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd

from moe_routing_bench import statistics
from moe_routing_bench.figures import palette
from moe_routing_bench.figures.chart import Chart, Scale, marks
from moe_routing_bench.grid.run_spec import DENSE
from moe_routing_bench.quality import compare
from moe_routing_bench.quantities import count
from moe_routing_kernels.routers.zoo import ZOO

NOT_CAUSAL = "†"


def finals(table: pd.DataFrame, *needed: str) -> pd.DataFrame:
    """The last evaluation of each final run that has a value in all `needed` columns, with its `contestant`."""
    rows = _marked(compare.finals(table))
    return rows[rows[list(needed)].notna().all(axis=1)] if needed else rows


def history(table: pd.DataFrame, *needed: str) -> pd.DataFrame:
    """The same for every evaluation."""
    names = compare.finals(table)[["run", "contestant"]]
    rows = _marked(table[table["purpose"] == "final"].merge(names, on="run"))
    return rows[rows[list(needed)].notna().all(axis=1)]


def _marked(rows: pd.DataFrame) -> pd.DataFrame:
    """Contestants that see later tokens carry the mark in their name."""
    names = rows["contestant"].astype(str)
    return rows.assign(contestant=names.where(rows["causal"].astype(bool), names + f" {NOT_CAUSAL}"))


def why(table: pd.DataFrame, what: str) -> str:
    """Why nothing can be drawn of the training runs."""
    runs = table.loc[table["purpose"] == "final", "run"].nunique()
    return f"none of {runs} final runs has {what}" if runs else "no final training run"


def contests(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows that may be compared, with a title: for each number of experts the config with the most routers."""
    found: dict[int, pd.DataFrame] = {}
    for _, group in rows.groupby("label", sort=False):
        experts = int(group["experts"].iloc[0])
        if experts not in found or group["router"].nunique() > found[experts]["router"].nunique():
            found[experts] = group
    return [(describe(found[experts]), found[experts]) for experts in sorted(found)]


def describe(rows: pd.DataFrame) -> str:
    """A config in words: its label, sizes, the bytes trained on (losses of other amounts are not to be compared) and seeds."""
    one = rows.iloc[0]
    seeds = rows["seed"].nunique()
    least, most = (f"{value / 1e6:.3g}" for value in (rows["params"].min(), rows["params"].max()))
    sizes = most if least == most else f"{least} to {most}"
    return f"{one['label']}: E={one['experts']:.0f}, k={one['top_k']:.0f}, {sizes} M parameters, {one['steps']:,.0f} steps, {rows['tokens_seen'].max() / 1e6:.3g} MB (n = {count(seeds, 'seed')})"


def varied(rows: pd.DataFrame, column: str) -> list[tuple[str, pd.DataFrame]]:
    """The runs of each rule of a config that has several values in a column, with a title."""
    groups = [group for _, group in rows.groupby(["label", "router"], sort=False) if group[column].nunique() > 1]
    marks = ("" if group["causal"].all() else f" {NOT_CAUSAL}" for group in groups)
    return [
        (f"{group['router'].iloc[0]}{mark}\n{describe(group)}", group)
        for group, mark in zip(groups, marks, strict=True)
    ]


def ordered(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each contestant: dense first, then in the order of the zoo."""
    rank = {DENSE: -1} | {name: number for number, name in enumerate(ZOO)}
    groups = [(str(name), group) for name, group in rows.groupby("contestant")]
    return sorted(groups, key=lambda pair: (rank.get(pair[1]["router"].iloc[0], len(rank)), pair[0]))


def interval(values: pd.Series) -> tuple[float, float]:
    """Mean and half of its 95 % interval; 0 for one value, which has none."""
    kept = np.sort(values.dropna().to_numpy(float))  # the order of rows must not change the last digit
    return float(kept.mean()), float(np.nan_to_num(statistics.mean_half_width(kept)))


def said(mean: float, half: float, seeds: int, sign: str = "") -> str:
    """A mean over seeds with half of its interval. One seed has no interval."""
    return f"{mean:{sign}.3f} ± {half:.3f}" if seeds > 1 else f"{mean:{sign}.3f}"


def over_tokens(rows: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes trained on (in millions), and at each the mean over seeds and half of its 95 % interval."""
    groups = [(tokens / 1e6, *interval(group)) for tokens, group in rows.groupby("tokens_seen")[column]]
    x, mean, half = np.array(groups, dtype=float).T
    return x, mean, half


def lines(
    panels: Sequence[tuple[str, pd.DataFrame, str]],
    x: Scale,
    y: Scale,
    own: Mapping[str, tuple[Scale, Scale]] = MappingProxyType({}),
) -> Chart:
    """A chart of panels (title, rows, column) over the bytes trained on (millions): a line per contestant through its means over seeds, with
    95 % intervals; `own` as in `Chart`."""
    records, tints = [], {}
    for title, rows, column in panels:
        for name, group in ordered(rows):
            tints[name] = palette.router(group["router"].iloc[0])
            points = zip(*over_tokens(group, column), strict=True)
            records += [
                {"panel": title, "series": name, "x": at, "y": mean, "low": mean - half, "high": mean + half}
                for at, mean, half in points
            ]
    shown = pd.concat(rows for _, rows, _ in panels)
    return Chart("lines", x, y, marks(records), tints, shown, own=own, named=True, shared=True, level=True, timed=False)
