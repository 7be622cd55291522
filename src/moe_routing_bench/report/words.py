"""What a page says of itself: how much was measured on what and how, what its names mean, and which other runs have pages next to it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from moe_routing_bench.benches.bench import Bench, Implementation
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins
from moe_routing_bench.config import axes
from moe_routing_bench.figures import footer, row_groups
from moe_routing_bench.quantities import count
from moe_routing_bench.report.parts import Method
from moe_routing_bench.store import manifest, paths

_OURS = {
    "torch": "PyTorch, one operator after the other",
    "torch_compile": "the same, compiled by torch.compile",
    "triton": "this project's Triton kernels",
    "cute": "this project's kernels in the CuTe DSL of CUTLASS",
    "ops": "this project's layer for models, moe_routing_kernels.ops, which calls its kernels",
    "auto": "what this package chooses by its table of measured cells",
}
_TERMS = {
    "T, H, I, E, k": "tokens of a call, width of a token's row, inner width of an expert, number of experts, experts per token",
    "cell": "one set of sizes, formats and loads; its implementations are measured together",
    "faster, slower, same": "verdicts on two implementations of a cell: beyond noise, or within it; undecided where the samples do not tell",
    "roofline": "the least time that the bytes which a call must move, at the bandwidth of a copy, or its FLOPs, at the rate of a large matrix product, would take on this device",
    "skew": "how unequal the loads of the experts are: their standard deviation over their mean; 0 is balanced",
    "capacity factor": "the most rows that an expert takes, over the mean of all experts; what goes over it is dropped",
}
_TRAINED = {
    "e8, e32 and the like": "configs of training runs: a tiny language model, with so many experts; Quality describes each",
    "causal rule": "a router that chooses for a token without seeing later ones, as a model that writes text has to",
}
SHORT, LONG = "short", "long"
_TURNS = {
    SHORT: "in blocks in random order",
    LONG: "each in long turns of its own, because a power limit sets the clock",
}


ANY_METHOD = Method(f"{_TURNS[SHORT]}, or {_TURNS[LONG]}")
SIZES = ("tokens", "hidden", "intermediate", "experts", "top_k")


def scope(frame: pd.DataFrame) -> str:
    """How many rows there are, and of how many cells."""
    timed, cells = int((frame["status"] == "ok").sum()), len(frame[["bench", "cell"]].drop_duplicates())
    return f"{count(len(frame), 'row')}, {timed} of them with a time, of {count(cells, 'cell')}."


def measured(frame: pd.DataFrame, versions: Mapping[str, str] = MappingProxyType({}), said: str = "Measured") -> str:
    """Which version and commit measured the rows, when and on which cards; `versions` are those of commits."""
    names = [name for name in manifest.COLUMNS if name in frame]
    columns = [frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in names]
    entries = manifest.groups([dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)])
    return (
        f"{said} by {'; by '.join(_measured(one, versions, len(entries) > 1) for one in entries)}." if entries else ""
    )


def _measured(one: Mapping[str, Any], versions: Mapping[str, str], several: bool) -> str:
    """One commit of a run in words."""
    version = f"version {versions[one['commit']]}, " if one["commit"] in versions else ""
    commit = (one["commit"] or "unknown")[:7] + " with changes" * (one["dirty"] is True)
    days = " to ".join(dict.fromkeys(one[name][:10] for name in ("first", "last") if one[name])) or "date unknown"
    cards = ", ".join(map(manifest.short, one["cards"])) or "unknown"
    return f"{version}commit {commit} ({days}), on {cards}" + (f": {count(one['rows'], 'row')}" if several else "")


def suspects(frame: pd.DataFrame) -> str:
    """How many rows are suspect, of those with a time; empty where none is."""
    timed = frame.loc[frame["status"] == "ok", "suspect"]
    found = int((timed == True).sum())  # noqa: E712
    return f"{found} of {count(len(timed), 'row')} with a time {'is' if found == 1 else 'are'} suspect" if found else ""


def meanings(frame: pd.DataFrame, trained: bool) -> list[tuple[str, str]]:
    """Terms, and the names of benches and implementations that the rows have, with what they mean."""
    benches = [(name, bench.summary) for name, bench in BENCHES.items() if name in set(frame["bench"])]
    return [*_TERMS.items(), *(_TRAINED.items() if trained else ()), *benches, *_implementations(frame)]


def _implementations(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Our ways, the packages of others, and of what those that are put together are made."""
    known = dict(_OURS)
    for name, bench in BENCHES.items():
        for one in bench.implementations if name in set(frame["bench"]) else ():
            of = f"kernels of the package {one.peer.distribution}" if one.peer else ""
            if text := ": ".join(part for part in (of, _made(one, bench)) if part):
                known.setdefault(one.name, text)
    return [(name, text) for name, text in known.items() if name in set(frame["implementation"])]


def _made(one: Implementation, bench: Bench) -> str:
    """Which way it takes for each stage of a composite; empty where it is one way throughout."""
    named = {stage for part in one.parts for stage in part.split("+")}
    ways = {stage.name: "torch" for stage in bench.stages if stage.name not in named} | dict(one.parts)
    if not one.parts or set(ways.values()) == {one.name}:
        return ""
    stages = {way: [part for part, other in ways.items() if other == way] for way in ways.values()}
    return "; ".join(f"{row_groups.words(parts)} by {_kernel(way)}" for way, parts in stages.items())


def _kernel(way: str) -> str:
    """An implementation of a stage, or the entry of a module, as one reads it."""
    module, _, entry = way.rpartition(".")[2].partition(":")
    return f"{entry} of {module}" if entry else module


def siblings(out: Path) -> list[tuple[str, str]]:
    """Name and address of the other reports of the same platform next to this one."""
    platform = out.parent.name.partition(".")[0]
    near = (path.parent.name for path in out.parents[1].glob(f"{platform}*/index.html"))
    names = sorted(name for name in near if name.partition(".")[0] == platform and name != out.parent.name)
    return [(name.partition(".")[2] or "the grid", f"../{name}/index.html") for name in names]


def published_page(out: Path) -> str:
    """The address of the page of published rows next to this report (`platform_pages.write_alone`), if it is there."""
    found = paths.published_page(out.parent.name).name
    return found if out.with_name(found).is_file() else ""


def commits(frame: pd.DataFrame) -> str:
    """The commits that rows are of, and whether the code differed from them."""
    changed = frame["git_dirty"].eq(True).map({True: " with changes", False: ""})
    return footer.distinct(frame["git_sha"].astype("string").str[:7] + changed)


def method(rows: pd.DataFrame) -> Method:
    """What the rows with a time say; of rows without any, what would be said of others."""
    ok = rows[rows["status"] == "ok"]
    counts = ok["turns"].value_counts()
    known = [kind for kind in _TURNS if counts.get(kind)]
    if len(known) == 1:
        turns = _TURNS[known[0]]
    elif known:
        turns = f"{_TURNS[SHORT]} ({count(counts[SHORT], 'row')}), or {_TURNS[LONG]} ({count(counts[LONG], 'row')})"
    else:
        turns = ANY_METHOD.turns
    gpu = not ok.empty and origins.column(ok) == origins.GPU
    return Method(turns, f" ({footer.caches(ok)})" if gpu else "")


def shape(row: pd.Series) -> str:
    """The model, the sizes, and what else is not the usual in a row's cell, in words."""
    sizes = [f"{axes.AXES[name].prefix}={int(row[name])}" for name in SIZES if pd.notna(row[name])]
    rest = row_groups.labels(pd.DataFrame([row]), but={*SIZES, "model"}).iloc[0]
    return " ".join([*([row["model"]] if pd.notna(row["model"]) else []), *sizes, *([rest] if rest else [])])
