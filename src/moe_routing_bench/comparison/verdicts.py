"""Whether one implementation is faster than another: one rule for all pairs of a run. Pure functions; no torch.

An implementation that takes part twice in a cell shows how far apart equals come out (A/A): by where their buffers lie, for
example, which no interval over rounds sees. The noise floor is the 97.5th percentile of |ln ratio| over such twins, per bench and
size class, more for few twins, and at least `LEAST`; with the 95th, 6 % of equals would be told apart, judged by the floor of the others. A pair is ``faster`` or ``slower`` when its paired interval excludes 1, its p stays significant after
Benjamini and Hochberg (1995, J. R. Stat. Soc. B 57) over all pairs of the run, and the gap exceeds the floor; ``same`` when the whole
interval lies within the floor; else ``undecided``.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import pyarrow as pa

from moe_routing_bench.quantities import beyond_any_floor

LEAST = 0.005  # of |ln ratio|: what no twins can take a floor below
LEAST_TWINS = 5  # fewer say nothing of a percentile: those of a wider class are taken
RATE = 0.05  # of false discoveries among the pairs called faster or slower
QUANTILE = 0.975
MANY_TWINS = 19  # from which on that quantile bounds the gap of one more pair of equals in 95 % of the cases, whatever gaps are like
# Quantiles of 1 - RATE / 2 of Student's t with 1/2, 1, 3/2, ... degrees of freedom: scipy's, which takes half a second to import.
_STUDENT = (
    *(164.55767348048818, 12.706204736174694, 6.016663104427929, 4.302652729749462, 3.5746548420036817),
    *(3.1824463052837078, 2.9400886379827282, 2.7764451051977934, 2.6589123472044034, 2.5705818356363146),
    *(2.501858617589239, 2.4469118511449786, 2.4020020079102764, 2.364624251592784, 2.333039626864974),
    *(2.306004135204166, 2.282604893392452, 2.262157162798205),
)
FASTER, SLOWER, SAME, UNDECIDED = "faster", "slower", "same", "undecided"
CLASSES = (
    (0.0, "under 10 µs"),
    (10.0, "10 to 100 µs"),
    (100.0, "100 µs and above"),
)  # of the median time, from which on
_PAIRS = ("speedup", "best_speedup", "twin_speedup")
_READ = (
    *("bench", "implementation", "baseline", "status", "median_us"),
    *(f"{ratio}{part}" for ratio in _PAIRS for part in ("", "_ci_low", "_ci_high", "_p")),
)


def size_class(median_us: pd.Series) -> pd.Series:
    """The name of the class of each time."""
    edges = [start for start, _ in CLASSES]
    return pd.Series([CLASSES[np.searchsorted(edges, us, "right") - 1][1] for us in median_us], median_us.index, object)


def twins(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a twin, with their size class and `gap`, |ln ratio|."""
    found = rows[(rows["status"] == "ok") & rows["twin_speedup"].notna()]
    return found.assign(size=size_class(found["median_us"]), gap=np.log(found["twin_speedup"].astype(float)).abs())


def floor(gaps: pd.Series) -> float:
    """The noise floor that these gaps of twins give, which the gap of one more pair of equals exceeds in 5 % of the cases at most.

    The 97.5th percentile of m gaps, rounded up to one of them: of the ranks that the next may have among m + 1, at most one in twenty
    is above, whatever the distribution is. The largest of fewer than 19 is not enough: then the floor is at least their root mean square
    times Student's t with m / 2 degrees of freedom. Normal gaps would have m; half as many hold for tails as heavy as those of t with 2.
    """
    found = [LEAST, float(np.quantile(gaps, QUANTILE, method="higher"))]
    if len(gaps) < MANY_TWINS:
        found.append(float(np.sqrt(np.mean(np.square(gaps))) * _STUDENT[len(gaps) - 1]))
    return max(found)


def floors(rows: pd.DataFrame, known: pd.DataFrame | None = None) -> pd.Series:
    """The noise floor of each row, from the twins among `known` (by default the same rows); NaN where there are too few.

    From those of its bench and size class, or where there are fewer than `LEAST_TWINS` of its bench, or of all benches.
    """
    known = twins(rows) if known is None else known
    keys = list(zip(rows["bench"], size_class(rows["median_us"].fillna(0)), strict=True))
    every = np.ones(len(known), bool)
    found = {key: _floor_of(known, *key, every) for key in dict.fromkeys(keys)}
    return pd.Series([found[key] for key in keys], rows.index, float)


def _floor_of(known: pd.DataFrame, bench: str, size: str, every: np.ndarray) -> float:
    """The noise floor of a bench and size class, from the twins that are marked in `every` (n,); NaN where there are too few."""
    of_bench = every & (known["bench"].to_numpy() == bench)
    wider = (of_bench & (known["size"].to_numpy() == size), of_bench, every)
    chosen = next((marked for marked in wider if marked.sum() >= LEAST_TWINS), None)
    return np.nan if chosen is None else floor(known["gap"][chosen])


def adjusted(p: pd.Series) -> pd.Series:
    """Benjamini-Hochberg's p over those that are known."""
    known = p.dropna().astype(float).sort_values(ascending=False)
    ranks = np.arange(len(known), 0, -1)
    return (known * len(known) / ranks).cummin().clip(upper=1).reindex(p.index)


def verdict(ratio: float, low: float, high: float, p: float, floor: float) -> str:
    """The verdict on a time ratio above 1 where the one is faster, its interval, its adjusted p and the noise floor."""
    if np.isnan([ratio, low, high, p, floor]).any():
        return UNDECIDED
    gap = float(np.log(ratio))
    if (low > 1 or high < 1) and p <= RATE and abs(gap) > floor:
        return FASTER if gap > 0 else SLOWER
    return SAME if -floor <= np.log(low) and np.log(high) <= floor else UNDECIDED


def of_pairs(rows: pd.DataFrame, column: str, floor: pd.Series) -> pd.Series:
    """The verdict on each ratio in `column`, with its interval and p in columns named after it; None where there is no ratio.

    A drift of the ceilings does not count: the two times of a pair were taken in the same round, or in turns that mirror each other.
    """
    p = adjusted(rows[f"{column}_p"])
    numbers = [rows[column], rows[f"{column}_ci_low"], rows[f"{column}_ci_high"], p, floor]
    each = zip(*(one.astype(float) for one in numbers), strict=True)
    found = [None if np.isnan(ratio) else verdict(ratio, *others) for ratio, *others in each]
    return pd.Series(found, rows.index, object)


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a run with `noise_floor`, `verdict` (against the baseline) and `best_verdict` (against the best other).

    All three are missing where the run has too few twins: without a noise floor there is no verdict.
    """
    ok = table[table["status"] == "ok"]
    floor = floors(ok)
    against = ok[ok["implementation"] != ok["baseline"]]
    found = table.assign(noise_floor=floor.reindex(table.index), verdict=None, best_verdict=None)
    for rows, column, name in ((against, "speedup", "verdict"), (ok, "best_speedup", "best_verdict")):
        told = floor[rows.index].notna()
        found.loc[rows.index[told], name] = of_pairs(rows, column, floor[rows.index])[told]
    return found


def assumed(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a run, with a `best_verdict` for those of a GPU without a noise floor: FASTER or SLOWER beyond any floor, else UNDECIDED.

    The column `assumed` is true of these rows.
    """
    open_ = (table["status"] == "ok") & table["noise_floor"].isna() & table["gpu_uuid"].notna()
    open_ &= table["best_speedup"].notna() & table["best_verdict"].isna()
    rows = table[open_]
    ends = zip(rows["best_speedup_ci_low"].astype(float), rows["best_speedup_ci_high"].astype(float), strict=True)
    found = [UNDECIDED if not beyond_any_floor(*pair) else FASTER if pair[0] > 1 else SLOWER for pair in ends]
    verdicts_ = table["best_verdict"].where(~open_, pd.Series(found, rows.index, object))
    return table.assign(best_verdict=verdicts_, assumed=open_)


def with_verdicts(table: pa.Table) -> pa.Table:
    """`judged` of an Arrow table; its other columns stay as they are."""
    found = judged(table.select(list(_READ)).to_pandas())
    return replaced(table, {name: found[name] for name in ("noise_floor", "verdict", "best_verdict")})


def replaced(table: pa.Table, columns: Mapping[str, Iterable[object]]) -> pa.Table:
    """The table with other values in some of its columns, whose places, types and descriptions stay."""
    for name, values in columns.items():
        place, field = table.schema.get_field_index(name), table.schema.field(name)
        table = table.set_column(place, field, pa.array(values, field.type, from_pandas=True))
    return table


def false_verdicts(table: pd.DataFrame) -> tuple[int, int]:
    """How many twins the rule would tell apart, judged by the floors of all twins but their own, and how many there are in all. The second is 0 where there are too few to judge any."""
    known = twins(table)
    wrong = judgeable = 0
    p = adjusted(known["twin_speedup_p"])
    places = np.arange(len(known))
    of_pairs = known[["bench", "size", *(f"twin_speedup{part}" for part in ("", "_ci_low", "_ci_high"))]]
    for place, (index, one) in enumerate(of_pairs.iterrows()):
        own = _floor_of(known, one["bench"], one["size"], places != place)
        if np.isnan(own):
            continue
        judgeable += 1
        ends = one["twin_speedup_ci_low"], one["twin_speedup_ci_high"]
        wrong += verdict(one["twin_speedup"], *map(float, ends), p[index], own) in (FASTER, SLOWER)
    return wrong, judgeable
