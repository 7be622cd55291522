"""The tables of docs/published.md: rows that other projects claims, with the stored rows of the same cell."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import pandas as pd
from stored_tables import ROOT, digits, runs, table

from moe_routing_bench.comparison import published_rows
from moe_routing_bench.config import claims
from moe_routing_bench.scale import exchange, validation

SHOWN = (1, 64, 4096)  # tokens; reports have the others
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}


@cache
def sources() -> list[tuple[claims.Source, pd.DataFrame, pd.DataFrame]]:
    """Each source, its rows, and the stored H200 rows of the same cells."""
    rows = pd.concat(runs().values(), ignore_index=True)
    found = []
    for path, source in claims.load_published(ROOT / "config/published").items():
        theirs = published_rows.read(path)
        found.append((source, theirs, published_rows.matched(source, theirs, rows)))
    return found


def about() -> str:
    """What each source is."""
    lines = []
    for source, rows, _ in sources():
        lines.append(
            {
                "source": f"{source.title} {source.version} ({source.author}, {source.licence}): {source.source}",
                "rows": f"{len(rows)}, of which {len(published_rows.comparable(rows))} of one GPU or tensor-parallel rank with balanced loads",
                "card": source.hardware,
                "boundary": source.boundary,
                "mode": f"{source.mode}. {source.mode_note}",
            }
        )
    return table(lines)


def share() -> str:
    """The reproduced share of each source."""
    return "\n".join(published_rows.sentence(*found) + "\n" for found in sources())


def scaled() -> str:
    """The error of the scale model by table and mode, of long tables inside a host and between hosts."""
    host, lines = exchange.parameters()["host"], validation.lines()
    long = lines.groupby(["table", "mode"])["error"].transform("size") > 20
    lines = lines.assign(far=long & (lines["ranks"] > host))
    found = []
    for (name, mode, _), rows in lines.groupby(["table", "mode", "far"], sort=False):
        ranks, sizes = dict.fromkeys((rows["ranks"].min(), rows["ranks"].max())), 100 * rows["error"].abs()
        found.append(
            {
                "table": f"`{name}`",
                "mode": str(mode),
                "GPUs": " to ".join(map(str, ranks)),
                "times": str(len(rows)),
                "median %": f"{sizes.median():.0f}",
                "90th %": f"{sizes.quantile(0.9):.0f}",
            }
        )
    return table(found)


def cells() -> str:
    """A line per model and format of published rows of one GPU: for `SHOWN` tokens the time of each package's latest version, of the same kernel here, and of `ops.layer`."""
    lines: dict[tuple[str, str], dict[str, list[str]]] = {}
    for _, rows, matched in sources():
        here = matched.set_index([*published_rows.CELL, "package", "version"]).sort_index() if len(matched) else matched
        comparable = published_rows.comparable(rows)
        whole = comparable[comparable["tensor_parallel"] == 1]
        for key, cell in whole[whole["tokens"].isin(SHOWN)].groupby(published_rows.CELL, sort=True):
            first, found = cell.iloc[0], {}
            for package, name in NAMES.items():
                found |= _package(cell[cell["package"] == package], name, here, key)
            ours: Any = here.loc[cast(Any, key), "ours_us"].iloc[0] if len(here) and key in here.index else float("nan")
            found["`ops.layer`, warm"] = digits(ours)
            line = lines.setdefault((first["model"], f"`{first['weights']}`"), {})
            for name, time in found.items():
                line.setdefault(name, ["–"] * len(SHOWN))[SHOWN.index(first["tokens"])] = time
    shown = {name for line in lines.values() for name, times in line.items() if set(times) != {"–"}}
    return table(
        [
            {"model": model, "weights": weights}
            | {name: ", ".join(times) if set(times) != {"–"} else "–" for name, times in line.items() if name in shown}
            for (model, weights), line in sorted(lines.items())
        ]
    )


def _package(rows: pd.DataFrame, name: str, here: pd.DataFrame, key: tuple) -> dict[str, str]:
    """The latest version of a package in a cell, and the same kernel here."""
    heads = (name, f"{name}'s kernel here")
    if rows.empty:
        return dict.fromkeys(heads, "–")
    last: Any = rows.loc[cast(Any, rows["version"].map(_order).idxmax())]
    place = (*key, last["package"], last["version"])
    found: Any = here.loc[cast(Any, place), "here_us"] if len(here) and place in here.index else float("nan")
    return dict(zip(heads, (digits(last["median_us"]), digits(found)), strict=True))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.replace("rc", ".").split("."))


BLOCKS: Mapping[str, Callable[[], str]] = {
    "published-sources": about,
    "published-share": share,
    "scale-errors": scaled,
    "published-cells": cells,
}
