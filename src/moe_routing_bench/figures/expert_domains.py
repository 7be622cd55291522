"""Which expert serves which domain, for a few routers and every layer."""

import numpy as np
import pandas as pd

from moe_routing_bench.figures import palette, training_rows
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.quality.specialisation import INFORMATION, mean_bits, with_information

SHOWN = ("softk", "switch_top1", "deepseek_v3_small", "hash_balanced", "hash_position", "expert_choice")
_MOST = 3.0  # times as often as an average byte: the end of the scale
_MISSING = "the loads of several domains"
_SCALES = Scale("expert, in the order of the first domain", "names"), Scale("layer and domain", "names")
_LESS, _ALIKE, _MORE = "less than half as often", "within a factor of 1.25", "at least twice as often"
COLORS = {_LESS: "#220088", "less often": "#0173b2", _ALIKE: "#767676", "more often": "#992255", _MORE: "#550000"}


def specialisation(table: pd.DataFrame) -> Chart:
    """A panel per router: layers and domains by experts, the share of a domain's choices over that of all, in five classes."""
    rows, title, by_name = _chosen(table)
    if not by_name:
        return nothing("matrix", *_SCALES, rows, training_rows.why(table, _MISSING))
    found = []
    for name, runs in by_name.items():
        one, panel = runs.sort_values("seed").iloc[0], _heading(name, runs)
        for layer, loads in enumerate(one["load_by_domain"]):
            ratio = times_average(counts(loads))
            ordered = ratio[:, np.argsort(-ratio[0], kind="stable")]
            found += [
                {
                    "panel": panel,
                    "series": _class(value),
                    "x": str(place + 1),
                    "y": f"layer {layer}, {domain}",
                    "says": f"{value:.2f}x",
                }
                for domain, values in zip(one["domains"], ordered, strict=True)
                for place, value in enumerate(values)
            ]
    return Chart(
        "matrix", *_SCALES, marks(found), COLORS, pd.concat(by_name.values()), note=f"config {title}", timed=False
    )


def _chosen(table: pd.DataFrame) -> tuple[pd.DataFrame, str, dict[str, pd.DataFrame]]:
    """The rows that have loads by domain, and of the config with the most routers its title and the runs of those that are shown."""
    rows = training_rows.finals(table, "load_by_domain")
    rows = rows[rows["domains"].map(len) > 1] if len(rows) else rows
    contests = training_rows.contests(rows)
    if not contests:
        return rows, "", {}
    title, group = max(contests, key=lambda contest: contest[1]["router"].nunique())
    by_name = dict(training_rows.ordered(group))
    chosen = [name for router in SHOWN for name, one in by_name.items() if one["router"].iloc[0] == router]
    return rows, title, {name: by_name[name] for name in (chosen or list(by_name))[: len(SHOWN)]}


def _heading(name: str, runs: pd.DataFrame) -> str:
    """A router with the mutual information of expert and domain, mean over layers and seeds."""
    bits = [mean_bits(loads) for loads in runs["load_by_domain"]]
    mean, half = training_rows.interval(pd.Series(bits))
    return f"{name}: {training_rows.said(mean, half, len(bits), 'z')} bits (n = {len(bits)})"


def _class(ratio: float) -> str:
    """The class of a ratio, which the legend names."""
    return list(COLORS)[int(np.searchsorted((0.5, 0.8, 1.25, 2.0), ratio, side="right"))]


def counts(layer: object) -> np.ndarray:
    """Choices (domains, E), float64, of one layer as Arrow gives them."""
    return np.array([list(domain) for domain in layer], dtype=float)  # type: ignore[attr-defined]


def times_average(choices: np.ndarray) -> np.ndarray:
    """P(expert | domain) / P(expert) of counts (domains, E); 1 for an expert without a choice."""
    given = choices / choices.sum(1, keepdims=True)
    alone = choices.sum(0) / choices.sum()
    return np.divide(given, alone, out=np.ones_like(given), where=alone > 0)


_BITS = Scale("bits", "linear"), Scale("", "names")
_NO_BITS = "the loads of experts by class of byte"


def expert_information(table: pd.DataFrame) -> Chart:
    """What an expert says about the token: a panel per entry and kind of information, all of one scale, with a dot per rule."""
    rows = training_rows.finals(table, "load_by_class")
    if rows.empty:
        return nothing("dots", *_BITS, rows, training_rows.why(table, _NO_BITS))
    rows, found, tints = with_information(rows), [], {}
    for title, group in training_rows.contests(rows):
        for column, about in INFORMATION.items():
            for name, runs in training_rows.ordered(group[group[column].notna()]):
                tints[name] = palette.router(runs["router"].iloc[0])
                mean, half = training_rows.interval(runs[column])
                says = f"n = {len(runs)} seeds of {runs['choices'].mean():,.0f} choices a layer"
                place = {"panel": f"{title}: expert and {about}", "series": name, "x": mean, "y": name}
                found.append(place | {"low": mean - half, "high": mean + half, "says": says})
    least, most = (f"{value:,.0f}" for value in (rows["choices"].min(), rows["choices"].max()))
    note = f"bias of {least if least == most else f'{least} to {most}'} choices a layer corrected (Miller and Madow)"
    return Chart("dots", *_BITS, marks(found), tints, rows, note=note, shared=True, timed=False)
