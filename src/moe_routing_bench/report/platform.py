"""The page of a platform: one form that asks all of its published runs, and what they have by operation. It holds the rows as `answers` reads them.

`published.js` answers by the rules of `answers`, of the same cells in the same order: a test asks both the same questions.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_routing_bench.answers import around, command, nearest, stored
from moe_routing_bench.answers.stored import Cell
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins
from moe_routing_bench.config import axes, presets
from moe_routing_bench.config.axes import AXES, PRESET, Axis
from moe_routing_bench.report.packing import packed, plain
from moe_routing_bench.report.row_data import row_id

FORMER = "report.html"  # the report of the run without a name, next to the page of its platform
_ROW = (
    *("implementation", "status", "reason", "median_us", "ci_low_us", "ci_high_us", "suspect", "suspect_reason"),
    *("converged", "cold", "timer", "noise_floor", "graph_node_us", "roofline_us"),
    *("baseline", "verdict", "speedup", "speedup_ci_low", "speedup_ci_high"),
    *("best_other", "best_verdict", "best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"),
    *("peak_memory_bytes", "energy_mj_per_token", "git_sha", "gpu_name", "driver", "torch_version", "cuda_version"),
)
_OPEN = ("model", "trace", "shared_intermediate", "shared_gate", "seed")  # axes that the form has no control for
_USUAL_TOKENS = 64


def read(platform: str) -> list[Cell]:
    """The cells of all published runs of a platform, in the order in which `ask` reads them."""
    return stored.cells(stored.runs()[platform], tuple(BENCHES))


def page_data(platform: str, cells: Sequence[Cell], models: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's scripts read: `cells` and `rows` by column (`packing.packed`), each row with the place of its cell (`of`), and `rules`.

    `models` are the presets by name.
    """
    rows = [(place, row) for place, cell in enumerate(cells) for row in cell.rows]
    there = _elsewhere(platform, cells)
    codes = {bench: BENCHES[bench].code_fingerprint() for bench in {cell.bench for cell in cells}}
    columns = {
        "run": [cell.run for cell in cells],
        "bench": [cell.bench for cell in cells],
        "cell": [cell.key for cell in cells],
        "card": [cell.card for cell in cells],
        "model": [cell.rows[0]["model"] for cell in cells],
        "day": [cell.day for cell in cells],
        "command": [command.again((cell.timed or cell.rows)[0]) for cell in cells],
        "version": [_version(cell) for cell in cells],
        "older": [(cell.timed or cell.rows)[0]["code_fingerprint"] != codes[cell.bench] for cell in cells],
        "elsewhere": [there.get((cell.bench, cell.key), []) for cell in cells],
    } | {f"axis {name}": [cell.axes.get(name) for cell in cells] for name in AXES}
    values = {name: [_exact(row[name]) for _, row in rows] for name in _ROW}
    values |= {"of": [place for place, _ in rows], "id": [row_id(row) for _, row in rows]}
    return {
        "count": {"cells": len(cells), "rows": len(rows)},
        "cells": {name: packed(column) for name, column in columns.items()},
        "rows": {name: packed(column) for name, column in values.items()},
        "rules": _rules(platform, cells, models),
    }


def _exact(value: Any) -> Any:
    """A value fit for JSON, with all of its digits: the page divides and compares as `answers` does."""
    return value if value is None or isinstance(value, str | bool | int | float) else plain(value)


def _version(cell: Cell) -> str | None:
    commit = cell.rows[0]["git_sha"]
    return commit and stored.version(cell.run, commit)


def _elsewhere(platform: str, cells: Iterable[Cell]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The fastest of each cell on each other platform, by bench and key."""
    wanted = {(cell.bench, cell.key) for cell in cells}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, runs in stored.runs().items():
        best: dict[tuple[str, str], Cell] = {}
        for one in stored.cells(runs, tuple(BENCHES)) if name != platform else ():
            key = one.bench, one.key
            if one.timed and key in wanted and (key not in best or _time(one) < _time(best[key])):
                best[key] = one
        for key, one in best.items():
            first = one.timed[0]
            found.setdefault(key, []).append(
                {"platform": name, "fastest": first["implementation"], "median_us": first["median_us"]}
            )
    return found


def _time(cell: Cell) -> float:
    return cell.timed[0]["median_us"]


def _rules(platform: str, cells: Sequence[Cell], models: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of Python that the scripts follow: `usual` are the values of a question that says nothing, `empty` what an empty control says."""
    runs = stored.runs()[platform]
    pairs_of = {(cell.axes["weights"], cell.axes["dtype"]) for cell in cells if "weights" in cell.axes}
    families = (*nearest.FAMILIES, *(form for form, _ in sorted(pairs_of)))
    sizes = {name: presets.values(one) for name, one in models.items() if not one.unsupported}
    return {
        "platform": platform,
        "axes": [_asked(axis) for axis in AXES.values()],
        "reads": {name: [one.name for one in axes.of(bench.axes)] for name, bench in BENCHES.items()},
        "measured": [name for name in BENCHES if any(cell.bench == name and cell.timed for cell in cells)],
        "rule": {
            "far": nearest.FAR,
            "octaves": nearest.RULE,
            "of": {name: nearest.rules(name) for name in BENCHES},
            "ranks": [name for name in AXES if nearest.of_ranks(name)],
            "families": {name: nearest.formats_of(name) for name in families},
        },
        "ours": {name: sorted(origins.ours(name)) for name in BENCHES},
        "usual": {"dtype": AXES["dtype"].default},
        "empty": {
            "weights": "as dtype",
            "packed": "as dtype",
            "skew": "0",
            "capacity_factor": "none",
            "tp": "1",
            "ep": "1",
        },
        "known": {name: _known(name, cells) for name in AXES if name not in _OPEN},
        "models": {
            name: {key: one[key] for key in PRESET if one[key] is not None} for name, one in sorted(sizes.items())
        },
        "unsupported": {name: one.unsupported for name, one in sorted(models.items()) if one.unsupported},
        "losses": {f"{form} {dtype}": around.loss(form, dtype, runs) for form, dtype in sorted(pairs_of)},
        "runs": {run: {"address": address(run), "by": stored.submitter(run)} for run in runs},
        "opening": opening(cells),
    }


def address(run: str) -> str:
    """Where the report of a run is, from the folder of its platform's page."""
    return f"../{run}/index.html" if "." in run else FORMER


def _asked(axis: Axis) -> dict[str, Any]:
    return {
        "name": axis.name,
        "label": axis.prefix if axis.prefix.isupper() or axis.prefix == "k" else axis.name.replace("_", " "),
        "prefix": axis.prefix,
        "says": axis.summary,
        "scale": "name" if axis.kind is str else "linear" if axis.least == 0 else "log",
        "default": axis.default,
        "follows": axis.follows,
        "sparse": axis.sparse,
    }


def _known(name: str, cells: Iterable[Cell]) -> list[Any]:
    """The values of an axis that the form proposes: those that were measured, and all that can be asked of a phase and of formats."""
    held = {cell.axes[name] for cell in cells if cell.axes.get(name) is not None}
    if name == "phase":
        return [*AXES[name].choices, "training"]
    if name == "weights":
        return [*nearest.FAMILIES, *sorted(held | {"mxfp4"})]
    return sorted(held | set(AXES[name].choices if AXES[name].kind is str and not AXES[name].open else ()))


def opening(cells: Sequence[Cell]) -> dict[str, Any]:
    """The question that the page opens with: the model whose layers were measured at most numbers of tokens, or the bench with most cells."""
    counts: dict[str, set[int]] = {}
    for cell in cells:
        if cell.bench == "layer" and cell.timed and cell.rows[0]["model"] and not is_seed(cell.run):
            counts.setdefault(cell.rows[0]["model"], set()).add(cell.axes["tokens"])
    if counts:
        model = max(counts, key=lambda name: len(counts[name]))
        return {"model": model, "tokens": min(counts[model], key=lambda one: abs(one - _USUAL_TOKENS))}
    benches = [cell.bench for cell in cells if cell.timed]
    return {"bench": max(BENCHES, key=lambda name: (bool(BENCHES[name].stages), benches.count(name)))}


def is_seed(run: str) -> bool:
    """Whether a run replays a seed document."""
    return run.partition(".")[2].startswith("seed-")
