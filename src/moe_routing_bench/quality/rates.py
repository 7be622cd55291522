"""Which learning rate a run takes: the best of its pilots, or the best that a study of rates has stored for its rule and size.

Without torch.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_routing_bench.quality import run_rows
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import bad

FALLBACK = "fallback"  # `lr_source` of a run whose rule and size the study has not
# What a best rate depends on besides the rule, whatever the number of experts.
SIZE = ("dim", "layers", "attention", "vocabulary", "sequence", "batch", "steps")
_FEWEST = 3  # rates of a grid that has a middle


def at_the_edge(lr: float, grid: object) -> bool:
    """Whether the best of several rates is the least or the largest: a better one may lie outside."""
    return isinstance(grid, Collection) and len(grid) > 1 and lr in (min(grid), max(grid))


def best(pilots: Sequence[Path], schema: pa.Schema = run_rows.SCHEMA) -> tuple[float, dict[str, list[Any]]]:
    """The learning rate of the pilots with the least final validation loss, and the row fields that say so.

    The loss of a rate is the mean over its pilots, which differ in their seeds. Among equal losses the smaller rate wins.
    Raises `UserError` when every pilot diverged, and when the best of three rates or more is the least or the largest: then
    the best rate is not known, and what is trained with it no result.
    """
    tried: dict[float, list[float]] = {}
    for row in (run_rows.last(path, schema) for path in pilots):
        tried.setdefault(row["lr"], []).append(row["val_loss"])
    losses = {lr: sum(tried[lr]) / len(tried[lr]) for lr in sorted(tried)}
    finite = [(loss, lr) for lr, loss in losses.items() if loss < float("inf")]
    if not finite:
        hint = "add smaller learning rates to quality.pilot.lr"
        raise bad("pilots", "no finite validation loss", "at least one", hint)
    lr = min(finite)[1]
    if len(losses) >= _FEWEST:
        _refuse_the_edge("best learning rate", lr, list(losses), "quality.pilot.lr")
    fields = {"pilot_lrs": list(losses), "pilot_losses": list(losses.values())}
    return lr, fields | {"pilot_losses_by_seed": [tried[one] for one in losses]}


def _refuse_the_edge(what: str, lr: float, grid: list[float], where: str) -> None:
    """Raise `UserError` for a best rate that is the least or the largest of its grid."""
    if at_the_edge(lr, grid):
        side = "smaller" if lr == min(grid) else "larger"
        got = f"{lr:g}, at the edge of {', '.join(f'{rate:g}' for rate in grid)}"
        raise bad(what, got, "one between two others", f"add {side} rates to {where}")


def of_study(study: str, platform: str, router: str, fields: Mapping[str, Any]) -> tuple[float, str] | None:
    """The best rate that a study, a run of another config, has stored on a platform for a rule and the `SIZE` in `fields`, and its source.

    None where it has no row of these. Raises `UserError` for a rate at the edge of its grid, and where rows disagree.
    """
    found: dict[float, dict[str, Any]] = {}
    for row in _stored(paths.quality(paths.folder(platform, study))):
        if row["router"] == router and all(row[name] == fields[name] for name in SIZE):
            found[row["lr"]] = row
    if len(found) > 1:
        rates = ", ".join(f"{rate:g}" for rate in sorted(found))
        raise bad(f"best learning rate of {study} for {router}", rates, "one for each rule and size")
    for lr, row in found.items():
        _refuse_the_edge(
            f"best learning rate of {study} for {router}", lr, list(row["pilot_lrs"]), f"its entry {row['label']}"
        )
        return lr, study
    return None


def _stored(path: Path) -> list[dict[str, Any]]:
    """The final rows of a study whose rates pilots chose; none where nothing is stored."""
    if not path.is_file():
        return []
    names = ["label", "router", "lr", "pilot_lrs", "purpose", *SIZE]
    return [
        row for row in run_rows.read(path).select(names).to_pylist() if row["purpose"] == "final" and row["pilot_lrs"]
    ]
