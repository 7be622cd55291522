"""Power for small differences by kind of bench: `python docs/power.py` writes docs/power.csv from the stored rows of an H200.

The noise of a kind is that of its stored pairs, each row against the best other: the spread of the logarithms of their blocks' ratios, pair
by pair, and the correlation of neighbours, over all pairs. Long turns are six values with the spread of the medians of turns. With such noise, and gaps
between equals as twins had, pairs are simulated that differ by nothing, 1 % and 2 %, or by more until most are found, and judged as those of a run.
"""

import csv
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from coverage import chained
from stored_tables import ROOT
from twins import kind, known

from moe_routing_bench.comparison import verdicts
from moe_routing_bench.comparison.ratios import is_paired
from moe_routing_bench.intervals import paired_ratio, turn_medians, turns_of, winsorised
from moe_routing_bench.measure.sampling import TURNS

OUT = Path(__file__).with_name("power.csv")
SEED, DRAWS = 49, 400  # pairs of each difference, at least
SLOWER = (1.0, 1.01, 1.02)
FOUND, MOST = 0.8, 500  # share of pairs, and the largest difference that is tried, in 0.1 %
_READ = (
    *("cell_hash", "gpu_uuid", "implementation", "best_other", "status", "bench", "phase", "weights", "dtype"),
    *("turns", "block_turns", "block_medians_us", "set_aside", "median_us"),
    *("cell", "converged", "twin_median_us", "twin_speedup", "twin_speedup_ci_low", "twin_speedup_ci_high"),
    *("twin_speedup_p", "gpu_name"),
)


@dataclass(frozen=True)
class Pair:
    """Logarithms of the ratios of blocks, or of the medians of long turns."""

    kind: str
    values: np.ndarray
    long: bool

    @property
    def spread(self) -> float:
        """Standard deviation; of blocks that of the inner ones, so that a spike does not count as noise of all."""
        if self.long:
            return float(self.values.std(ddof=1))
        middle = winsorised(self.values)[1]
        return float((middle[-1] - middle[0]) / (2 * 0.84162))  # the 20th and 80th percentile of N(0, 1)

    @property
    def correlation(self) -> float:
        """That of neighbours, freed of its bias; NaN for too few values."""
        n, deviations = len(self.values), winsorised(self.values)[0]
        if n < TURNS or not deviations.any():
            return np.nan
        r = float(deviations[:-1] @ deviations[1:] / (deviations @ deviations))
        return (r + 1 / n) / max(1 - 3 / n, 0.5)


def stored() -> pd.DataFrame:
    """The rows of an H200 with a time."""
    runs = []
    for path in sorted((ROOT / "results").glob("nvidia-h200*/measurements.parquet")):
        rows = pd.read_parquet(path)
        rows = rows.reindex(columns=list(_READ)).assign(run=path.parent.name)
        runs.append(rows[rows["status"] == "ok"])
    return pd.concat(runs, ignore_index=True)


def pairs(rows: pd.DataFrame) -> Iterator[Pair]:
    """Each row with the best other of its cell, where both were timed in the same rounds."""
    keys = ["run", "cell_hash", "gpu_uuid"]
    cells = {(*key, row["implementation"]): row for row in rows.to_dict("records") for key in [[row[k] for k in keys]]}
    for (*key, _), row in cells.items():
        other = cells.get((*key, row["best_other"]))
        if other is None or not is_paired(row, other) or len(row["block_medians_us"]) < 3:
            continue
        logs, turns = np.log(row["block_medians_us"]) - np.log(other["block_medians_us"]), turns_of(row)
        yield Pair(kind(pd.Series(row)), logs if turns is None else turn_medians(logs, turns), turns is not None)


def noise(name: str, of_kind: list[Pair]) -> dict[str, object]:
    """The noise of a kind: medians of the spreads, and the mean correlation in short turns, as what few turns show of it is chance."""
    correlations = [pair.correlation for pair in of_kind if not (pair.long or np.isnan(pair.correlation))]
    r = float(np.mean(correlations)) if correlations else np.nan
    spreads = {long: [pair.spread for pair in of_kind if pair.long == long] for long in (False, True)}
    return {
        "kind": name,
        "pairs": len(of_kind),
        **{("turns" if long else "blocks"): np.median(found) if found else np.nan for long, found in spreads.items()},
        "r": r,
    }


def simulated(name: str, of_kind: list[Pair], r: float, gaps: np.ndarray) -> dict[str, float]:
    """How many pairs of each difference are told apart, and the smallest difference, in steps of 0.1 %, at which `FOUND` of them are; NaN
    without a noise floor."""
    columns = [*(f"{slower - 1:.0%}" for slower in SLOWER), "least"]
    if len(gaps) < verdicts.LEAST_TWINS:
        return dict.fromkeys(columns, np.nan)
    shares = _told_apart(name, of_kind, r, gaps, SLOWER)
    low, high = 0, MOST  # found too rarely, and often enough
    while high - low > 1:
        step = (low + high) // 2
        found = _told_apart(name, of_kind, r, gaps, (1.0, 1 + step / 1000))[1] >= FOUND
        low, high = (low, step) if found else (step, high)
    return dict(zip(columns, [*shares, high / 1000 if high < MOST else np.inf], strict=True))


def _told_apart(name: str, of_kind: list[Pair], r: float, gaps: np.ndarray, slower: Sequence[float]) -> list[float]:
    """The share of pairs of each difference that is told apart in a run that has all of them; the noise is the same at each call."""
    generator, found = np.random.default_rng([SEED, *name.encode()]), []
    for times in slower:
        for pair in of_kind * -(-DRAWS // len(of_kind)):
            apart = np.log(times) + generator.choice(gaps) * generator.choice((-1, 1))
            count = TURNS if pair.long else len(pair.values)
            values = apart + pair.spread * chained(0.0 if pair.long else max(r, 0.0))(generator, count)
            ratio = paired_ratio(np.exp(values), np.ones(count), range(count) if pair.long else None)
            found.append((times, *ratio))
    told = pd.DataFrame(found, columns=["slower", "", "_ci_low", "_ci_high", "_p"])
    floor = pd.Series(verdicts.floor(pd.Series(gaps)), told.index)
    apart = verdicts.of_pairs(told, "", floor).isin([verdicts.FASTER, verdicts.SLOWER]).groupby(told["slower"]).mean()
    return [float(apart[times]) for times in slower]


def lines(simulate: Container[str] | None = None) -> list[dict[str, object]]:
    """The lines of all kinds, of those to `simulate` with their power; None for all."""
    rows = stored()
    twins = known(ROOT / "results/nvidia-h200", rows)
    gaps = np.log(twins["twin_speedup"].astype(float)).abs().groupby(twins["kind"])
    by_kind: dict[str, list[Pair]] = {}
    for pair in pairs(rows):
        by_kind.setdefault(pair.kind, []).append(pair)
    found = []
    for name, of_kind in sorted(by_kind.items()):
        line = noise(name, of_kind)
        if simulate is None or name in simulate:
            of_twins = gaps.get_group(name).to_numpy() if name in gaps.groups else np.array([])
            line |= simulated(name, of_kind, float(line["r"]), of_twins)
        found.append(line)
    return found


def text(value: object) -> object:
    """A number as the file has it."""
    return f"{value:.5f}" if isinstance(value, float) else value


if __name__ == "__main__":
    found = lines()
    with OUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows({key: text(value) for key, value in line.items()} for line in found)
