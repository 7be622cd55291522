"""What `watch` holds a version against: the fastest of the rivals and the version before, with a verdict on each."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.store import platforms

Row = Mapping[str, Any]


class Rivals:
    """The rivals of the implementations that are being written, and which of them a round measures.

    The first round has all and finds the fastest, which later ones have alone. One that torch.compile makes, seconds in every process,
    is not made again: later rounds then have the bench's baseline, through which they are compared with it.
    """

    def __init__(self, bench: Bench, mine: Iterable[str], names: Iterable[str]) -> None:
        """`mine` are those that are being written, `names` the rivals."""
        self._bench, self._mine = bench, set(mine)
        self._names = [name for name in names if name not in self._mine]
        # The next round has these.
        self.beside: list[str] = self._names.copy()
        if any(self._compiled(name) for name in self._names) and bench.baseline not in self._mine.union(self._names):
            self.beside.append(bench.baseline)
        self._kept: tuple[Row, Row] | None = None  # of the first round: the fastest rival, and the baseline

    def choose(self, rows: Mapping[str, Row]) -> None:
        """Choose what later rounds have, from the rows of the first."""
        right = [name for name in self._names if rows[name]["status"] == "ok"]
        best = min(right, key=lambda name: rows[name]["median_us"], default=None)
        base = self._bench.baseline
        self.beside = [best] if best else []
        if best and self._compiled(best) and base not in self._mine and rows[base]["status"] == "ok":
            self.beside, self._kept = [base], (rows[best], rows[base])

    def said(self, row: Row, rows: Mapping[str, Row], last: Row | None) -> Iterator[str]:
        """The ratio to the best other, and to the last version where there is one, each with its verdict."""
        base = rows.get(self._bench.baseline)
        if self._kept and base and base["status"] == "ok":
            ratio, verdict = _chained(self._kept, (row, base))
            yield f"{ratio:.2f}x {self._kept[0]['implementation']} ({verdict}; that of round 1, by way of {base['implementation']})"
        elif row["best_other"]:
            ratio, verdict = _judged(*(row[f"best_speedup{end}"] for end in ("", "_ci_low", "_ci_high", "_p")))
            yield f"{ratio:.2f}x {row['best_other']} ({verdict})"
        if last:
            ratio, verdict = _versions(last, row)
            yield f"{ratio:.2f}x the last version ({verdict})"

    def _compiled(self, name: str) -> bool:
        return "compiler" in self._bench[name].requires


def _judged(ratio: float, low: float | None, high: float | None, p: float | None) -> tuple[float, str]:
    verdicts = importlib.import_module("moe_routing_bench.comparison.verdicts")  # pandas takes a second
    runs = importlib.import_module("moe_routing_bench.comparison.runs")
    numbers = [float("nan") if one is None else one for one in (low, high, p)]
    return ratio, verdicts.verdict(ratio, *numbers, runs.UNKNOWN_FLOOR)


def _chained(then: tuple[Row, Row], now: tuple[Row, Row]) -> tuple[float, str]:
    """How much faster `now` is than `then`, each a row and its baseline's of the same round: what has changed for both in
    between, as on a CPU, does not count."""
    statistics = importlib.import_module("moe_routing_bench.measure.statistics")
    blocks = [[one["block_medians_us"] for one in pair] for pair in (then, now)]
    # A block with a hardware slowdown is left out of one row alone: its neighbours then pair with the next round's.
    shares = [[own / base for own, base in zip(*pair, strict=False)] for pair in blocks]
    return _judged(*statistics.unpaired_ratio(*shares))


def _versions(last: Row, row: Row) -> tuple[float, str]:
    runs, pandas = (importlib.import_module(name) for name in ("moe_routing_bench.comparison.runs", "pandas"))
    (found,) = runs.compare(*(pandas.DataFrame([one]) for one in (last, row))).rows.to_dict("records")
    # Two processes, seconds apart: between them the other work of a CPU changes, which neither interval sees.
    return found["ratio"], found["verdict"] if row["platform"] != platforms.CPU else "not judged on a CPU, which drifts"
