"""Quantised weights: experts and layers by shape and format, and the accuracy matrix, which says what formats lose. Pure functions; no torch."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from moe_routing_bench.figures import formats
from moe_routing_bench.quantities import digits, us
from moe_routing_bench.report.parts import ABSENT, Exactness, Quantised

DRAWN = {"normal": "normal weights", "outliers": "weights with outliers"}


def lines(table: pd.DataFrame, matrix: pd.DataFrame | None = None) -> list[Quantised]:
    """The lines, by shape and tokens, formats in the order of their table; none where nothing quantised has a time.

    With `matrix`, rows of the accuracy matrix (`store.companions`), each says what its format loses in results of normal weights.
    """
    rows = formats.with_quantised(table)
    ours = formats.fastest(rows)
    losses = _losses(matrix)
    found = []
    for _, group in ours.groupby(["shape", "tokens", "card"], sort=False):
        best = _frontier(group, losses)
        found += [_line(one, rows, group, losses, best) for _, one in group.iterrows()]
    return found


def _line(
    one: pd.Series, rows: pd.DataFrame, group: pd.DataFrame, losses: Mapping[tuple[str, str], float], best: set[str]
) -> Quantised:
    same = rows["shape"].eq(one["shape"]) & rows["tokens"].eq(one["tokens"]) & rows["card"].eq(one["card"])
    peers = rows[same & rows["format"].eq(one["format"]) & ~rows["ours"].astype(bool)]
    plain = group.loc[group["weights"] == group["dtype"], "median_us"].min()
    loses = losses.get(_formats(one))
    return Quantised(
        shape=one["shape"],
        tokens=int(one["tokens"]),
        form=one["format"],
        implementation=one["implementation"],
        time=us(one["median_us"]),
        moved=f"{digits(one['compulsory_bytes'] / 1e6)} MB" if one["compulsory_bytes"] > 0 else ABSENT,
        copy=_percent(one["share_of_copy"]),
        ceiling=_percent(one["share_of_roofline"]),
        error=_percent(one["rel_l2_error"] / one["tolerance"]),
        speedup=f"{one['speedup']:.2f}x {one['baseline']}" if one["speedup"] > 0 else ABSENT,
        plain=ABSENT if one["weights"] == one["dtype"] or pd.isna(plain) else f"{plain / one['median_us']:.2f}x",
        peer=_against(peers, one["median_us"]),
        loses=ABSENT if loses is None else f"{loses:.1f} dB",
        frontier="yes" if one["format"] in best else "" if losses else ABSENT,
    )


def _percent(share: Any) -> str:
    return ABSENT if pd.isna(share) else f"{share:.0%}"


def _against(peers: pd.DataFrame, time: float) -> str:
    """How many times as long the fastest peer takes, and its name."""
    if peers.empty:
        return ABSENT
    first = peers.loc[peers["median_us"].idxmin()]
    return f"{first['median_us'] / time:.2f}x {first['implementation']}"


def _losses(matrix: pd.DataFrame | None) -> dict[tuple[str, str], float]:
    """Signal-to-noise ratio in dB of results by formats of weights and activations; unquantised ones lose nothing."""
    if matrix is None or matrix.empty:
        return {}
    known = matrix[(matrix["drawn"] == "normal") & matrix["output_snr_db"].notna()]
    pairs = zip(known["weights"], known["activations"], known["output_snr_db"], strict=True)
    return {(weights, activations): float(snr) for weights, activations, snr in pairs}


def _formats(one: pd.Series) -> tuple[str, str]:
    """The formats of weights and activations, of quantised rows theirs, as the rows of the accuracy matrix (`store.companions`) name them."""
    return one["weights"], one["dtype"] if one["weights"] == one["format"] else one["packed"]


def _frontier(group: pd.DataFrame, losses: Mapping[tuple[str, str], float]) -> set[str]:
    """The formats of one shape and number of tokens than which none is at least as fast and as exact, and better in one."""
    known: dict[str, tuple[float, float]] = {}
    for _, one in group.iterrows() if losses else ():
        snr = math.inf if one["format"] == one["dtype"] else losses.get(_formats(one))
        if snr is not None:
            known[one["format"]] = (float(one["median_us"]), snr)
    return {
        name
        for name, (time, snr) in known.items()
        if not any(other <= time and more >= snr and (other, more) != (time, snr) for other, more in known.values())
    }


def exactness(table: pd.DataFrame) -> list[Exactness]:
    """A line per format and activations, in the order of the rows; dashes where there is nothing to say."""
    found = []
    for names, rows in table.groupby(["weights", "activations"], sort=False):
        weights, activations = map(str, names)
        tried = rows[rows["status"].notna()]
        right = tried["status"] == "ok"
        share = (tried["kernel_error"] / tried["tolerance"])[right]
        costs = [_costs(rows[rows["drawn"] == one]) for one in DRAWN]
        counted = f"{int(right.sum())} of {len(tried)}" if len(tried) else "–"
        most = f"{share.max():.0%}" if len(share) else "–"
        wrong = tried[~right]
        said = [f"{one.implementation} is {one.status}: {one.reason}" for one in wrong.itertuples()]
        largest = rows["of_bound"].max()
        bound = "–" if pd.isna(largest) else f"{largest:.0%}"
        found.append(Exactness(weights, activations, costs, bound, counted, most, list(dict.fromkeys(said))))
    return found


def sizes(table: pd.DataFrame) -> str:
    """What the rows are of, for a caption."""
    first = table.iloc[0]
    return ", ".join(f"{name}={first[name]}" for name in ("tokens", "hidden", "intermediate", "experts", "top_k"))


def _costs(rows: pd.DataFrame) -> tuple[str, str, str]:
    if rows.empty:
        return ("–",) * 3
    first = rows.iloc[0]
    weights, result = (
        f"{one:.1f}" if pd.notna(one) else "exact" for one in (first["weight_snr_db"], first["output_snr_db"])
    )
    return weights, result, f"{first['output_cosine']:.5f}"
