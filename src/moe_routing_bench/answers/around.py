"""What would change: the fastest at other numbers of tokens, k, skews, experts and formats of an answer's cell, and on other devices.

Measured points alone. `published.js` follows this module function by function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moe_routing_bench.answers import pairs, stored
from moe_routing_bench.answers.stored import Cell, Row
from moe_routing_kernels.formats.weights import WEIGHTS

Keep = Callable[[Row], bool]
VARIED = {
    "top_k": "k",
    "skew": "skews",
    "experts": "E",
}  # axes of numbers but for tokens, with their names in a sentence
POOR_DB = 10.0  # signal-to-noise of outputs below which a format is of no use, whatever its speed


def alike(cell: Cell, cells: Sequence[Cell], *but: str) -> list[Cell]:
    """The cells that differ from one in these axes alone."""
    fixed = [(name, value) for name, value in cell.axes.items() if name not in but]
    return [one for one in cells if one.bench == cell.bench and all(one.axes[name] == value for name, value in fixed)]


def _point(cell: Cell, row: Row) -> dict[str, Any]:
    return {
        "fastest": row["implementation"],
        "told_apart": pairs.winner(cell)[0] == row["implementation"],
        "median_us": row["median_us"],
        "marks": pairs.marks(row),
        "run": cell.run,
    }


def over_tokens(cell: Cell, cells: Sequence[Cell], keep: Keep) -> Iterator[dict[str, Any]]:
    """The fastest of the rows to keep at each number of tokens of this cell's sizes and formats, in whatever run.

    `told_apart` is None where rows are left out: the stored verdicts are of all.
    """
    seen = set()
    near = alike(cell, cells, "tokens", "phase")
    for one in sorted(near, key=lambda one: (one.axes["tokens"], one is not cell, -len(one.timed))):
        rows = [row for row in one.timed if keep(row)]
        if rows and one.axes["tokens"] not in seen:
            seen.add(one.axes["tokens"])
            point = _point(one, rows[0]) | ({"told_apart": None} if len(rows) < len(one.timed) else {})
            yield {"tokens": one.axes["tokens"], "phase": one.axes["phase"], **point}


def over_axis(cell: Cell, cells: Sequence[Cell], name: str) -> Iterator[dict[str, Any]]:
    """What one implementation takes at other values of an axis of `VARIED` on the same card, over its time here: the fastest here that has a time there.

    The interval is as wide as both make it.
    """
    others = (
        [one for one in alike(cell, cells, name) if one.card == cell.card] if cell.axes.get(name) is not None else []
    )
    others = sorted((one for one in others if one.axes[name] != cell.axes[name]), key=lambda one: one.axes[name])
    there = {row["implementation"] for one in others for row in one.timed}
    here = next((row for row in cell.timed if row["implementation"] in there), None)
    for one in others:
        row = next((row for row in one.timed if here and row["implementation"] == here["implementation"]), None)
        if row and here:
            low, high = pairs.ends(row, here)
            yield {
                name: one.axes[name],
                "implementation": row["implementation"],
                "ratio": row["median_us"] / here["median_us"],
                "low": low,
                "high": high,
                "run": one.run,
            }


def over_formats(cell: Cell, cells: Sequence[Cell], runs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The fastest with each format of weights and rows at this cell's sizes and tokens, the fastest first."""
    if "weights" not in cell.axes:
        return
    best: dict[tuple[Any, Any], Cell] = {}
    for one in alike(cell, cells, "weights", "packed", "phase"):
        key = one.axes["weights"], one.axes.get("packed")
        if one.timed and (key not in best or one.timed[0]["median_us"] < best[key].timed[0]["median_us"]):
            best[key] = one
    for (weights, packed), one in sorted(best.items(), key=lambda item: item[1].timed[0]["median_us"]):
        lost = loss(weights, one.axes["dtype"], runs)
        yield {"weights": weights, "packed": packed, **_point(one, one.timed[0]), "loss": lost}


def loss(weights: str, dtype: str, runs: Sequence[str]) -> dict[str, Any] | None:
    """What a format of weights loses: signal-to-noise ratios in dB, of normal weights; None for weights that are not quantised."""
    if weights not in WEIGHTS:
        return None
    rows = [row for row in stored.accuracy(tuple(runs)) if row["weights"] == weights and row["drawn"] == "normal"]
    rows = [row for row in rows if row["activations"] == dtype] or rows
    if not rows:
        return {"weights": weights, "weight_snr_db": None, "output_snr_db": None, "usable": None}
    least = min(rows, key=lambda row: row["output_snr_db"])
    usable = least["output_snr_db"] >= POOR_DB
    return {name: least[name] for name in ("weights", "weight_snr_db", "output_snr_db")} | {"usable": usable}


def elsewhere(cell: Cell, published: Mapping[str, Sequence[str]], platform: str) -> Iterator[dict[str, Any]]:
    """The fastest in the same cell on each other device."""
    for name, runs in published.items():
        if name != platform:
            same = [one for one in stored.cells(runs, (cell.bench,)) if one.key == cell.key and one.timed]
            for one in sorted(same, key=lambda one: one.timed[0]["median_us"])[:1]:
                yield {"platform": name, **_point(one, one.timed[0])}
