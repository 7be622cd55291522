"""What the report says of the accuracy matrix: what formats lose on either kind of weights, and how exact kernels are with them."""

import pandas as pd

from moe_routing_bench.report.sections import Exactness

DRAWN = {"normal": "normal weights", "outliers": "weights with outliers"}


def lines(table: pd.DataFrame) -> list[Exactness]:
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
