"""A folder of static pages: every report with its figures and rows, and a page that leads to them."""

import math
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from moe_routing_bench.answers import stored
from moe_routing_bench.comparison import origins, regret
from moe_routing_bench.comparison.claim_verdicts import Held
from moe_routing_bench.config.axes import PRESET
from moe_routing_bench.config.claims import Claim
from moe_routing_bench.figures import footer
from moe_routing_bench.quantities import count, significant
from moe_routing_bench.report import page, platform, words
from moe_routing_bench.report.document import Sentence
from moe_routing_bench.report.headlines import headlines, unfound
from moe_routing_kernels.choices import Entry
from moe_routing_kernels.errors import bad

KEPT = ("index.html", "report.json", "compare-*.html", "figures/*.svg", "figures/*.png")  # of a report's folder


@dataclass(frozen=True)
class Listed:
    """A report as the first page shows it."""

    folder: str
    machine: str
    days: str
    commit: str
    benches: str
    rows: str
    findings: list[Sentence]
    unfound: str  # why there are none
    comparisons: list[str]
    tables: list[str]
    by: str = ""  # the name under which rows of others were submitted


def listed(folder: Path, table: pd.DataFrame, trained: pd.DataFrame | None, tables: Sequence[Path]) -> Listed:
    """What the first page says of the report in `folder`, from its rows; `tables` are the Parquet files that go with it."""
    ok = table[table["status"] == "ok"]
    return Listed(
        folder=folder.name,
        machine=footer.distinct(table[origins.column(table)]),
        days=footer.days(table["started_at"]),
        commit=footer.distinct(table["git_sha"].astype("string").str[:7]),
        benches=", ".join(dict.fromkeys(table["bench"])),
        rows=f"{len(ok)} of {len(table)} rows ok, {count(len(ok[['bench', 'cell']].drop_duplicates()), 'cell')}"
        + ("" if trained is None else f"; {count(trained['run'].nunique(), 'training run')}"),
        findings=headlines(table, trained),
        unfound=unfound(table),
        comparisons=sorted(path.name for path in folder.glob("compare-*.html")),
        tables=[path.name for path in tables],
        by=stored.submitter(folder.name) or "",
    )


def between(pair: tuple[str, str]) -> str:
    """The file name of the page on two platforms."""
    return f"{pair[0]}-and-{pair[1]}.html"


def write(
    reports: Sequence[tuple[Listed, Path, Sequence[Path]]],
    out: Path,
    pairs: Sequence[tuple[str, str]] = (),
    held: Mapping[str, Sequence[Held]] = MappingProxyType({}),
    models: Mapping[str, Any] = MappingProxyType({}),
    platforms: Sequence[str] = (),
) -> None:
    """Copy each report (what is listed of it, its folder, its Parquet files) below `out`, and write `out`/index.html.

    `platforms` are those that get a page (`write_platform`), `pairs` those whose pages are there already, `held` what became of published figures in the folder of each report, `models`
    the presets by name. Files are overwritten; nothing is deleted.
    """
    for one, folder, tables in reports:
        for path in [found for pattern in KEPT for found in sorted(folder.glob(pattern))] + list(tables):
            inside = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
            target = out / one.folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            if path.name == "index.html":  # here the rows are in its folder, where it was made in results/
                text = path.read_text(encoding="utf-8")
                target.write_text(text.replace(f'href="../../results/{one.folder}/', 'href="'), encoding="utf-8")
    page.write(
        "site.html.j2",
        out / "index.html",
        reports=[one for one, *_ in reports],
        pairs=[(pair, between(pair)) for pair in pairs],
        platforms=platforms,
        former=platform.FORMER,
        claims=(told := claimed(held)),
        unheld=len({one.claim.id for found in held.values() for one in found if not one.claim.own}) - len(told),
        models=models,
        sizes=PRESET,
        method=words.ANY_METHOD,
    )


def write_feed(
    found: Sequence[tuple[Listed, Mapping[str, Any]]], out: Path, url: str = "", platforms: Collection[str] = ()
) -> None:
    """Write `out`/feed.xml: an Atom entry per published run, of what is listed of it and its manifest, the latest first.

    `url` is the address at which `out` is served; without one, links are relative. Raises `UserError` for a run whose rows have no date.
    """
    entries = sorted((_entry(*one, platforms) for one in found), key=lambda one: one["updated"], reverse=True)
    updated = entries[0]["updated"] if entries else "1970-01-01T00:00:00+00:00"
    root = f"{url.rstrip('/')}/" if url else ""
    page.write("feed.xml.j2", out / "feed.xml", entries=entries, updated=updated, root=root, id=_urn(url or "results"))


def _entry(one: Listed, manifest: Mapping[str, Any], platforms: Collection[str]) -> dict[str, str]:
    groups = [group for table in manifest["tables"].values() for group in table["measured"]]
    last = max((str(group["last"]) for group in groups if group["last"]), default=None)
    if last is None:
        raise bad(f"dates of run {one.folder}", "none", "rows with ended_at", "collect the run again")
    versions = ", ".join(dict.fromkeys(str(group["version"] or "unknown version") for group in groups))
    commits = ", ".join(dict.fromkeys(group["commit"][:7] for group in groups))
    lines = [
        f"{one.machine}, {one.days}: {one.benches}; {one.rows}.",
        f"Measured by moe-routing-bench {versions}, commit {commits}, on {count(len({card for group in groups for card in group['cards']}), 'card')}.",
        *([found.text for found in one.findings] or [f"No finding: {one.unfound}"]),
    ]
    address = f"{one.folder}/{platform.FORMER if one.folder in platforms else 'index.html'}"
    return {
        "id": _urn(one.folder),
        "title": f"{one.folder}: {one.rows}",
        "updated": last if datetime.fromisoformat(last).tzinfo else f"{last}+00:00",
        "by": one.by,
        "address": address,
        "text": "\n".join(lines),
    }


def _urn(name: str) -> str:
    """An id that is the same whenever a site is built."""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"moe-routing-bench/{name}").urn


SERVING = {"vllm", "sglang"}  # packages that serve models


@dataclass(frozen=True)
class Lead:
    """How many times as long as `ops.layer` the fastest rival takes, geometric mean over so many `cells`; `rivals` are the packages that were the fastest
    rival of some cell."""

    card: str
    ratio: float
    cells: int
    rivals: list[str]


def lead(tables: Iterable[pd.DataFrame], choices: Sequence[Entry]) -> Lead | None:
    """The lead in prefill of whole layers with even loads and plain weights, over cells with a time of a package of `SERVING`; of a cell in several
    runs the last counts. Ours is what `ops.layer` runs by the table of choices. None without such a cell."""
    found: dict[tuple[str, str], tuple[str, float, str]] = {}
    for rows in tables:
        timed = rows[(rows["bench"] == regret.BENCH) & (rows["status"] == "ok") & (rows["phase"] == "prefill")]
        timed = timed[~(timed["skew"] > 0) & (timed["weights"].isna() | (timed["weights"] == timed["dtype"]))]
        for (cell, card), same in regret.as_chosen(timed).groupby(["cell", "gpu_name"]):
            medians = same.set_index("implementation")["median_us"]
            others = medians.drop(sorted(origins.ours(regret.BENCH) & set(medians.index)))
            own, day = regret.runs(same, choices), str(same["started_at"].max())
            makers = {name: origins.maker(regret.BENCH, name) for name in others.index}
            if own is None or not SERVING & set(makers.values()):
                continue
            if (cell, card) not in found or found[cell, card][0] < day:
                found[cell, card] = day, float(others.min() / medians[own]), makers[str(others.idxmin())]
    if not found:
        return None
    ratio = math.exp(sum(math.log(value) for _, value, _ in found.values()) / len(found))
    return Lead(next(iter(found))[1], ratio, len(found), sorted({maker for *_, maker in found.values()}))


def badge(one: Lead) -> dict[str, Any]:
    """A badge as an endpoint of shields.io: https://shields.io/badges/endpoint-badge."""
    label = f"MoE layers on {one.card}, bf16 prefill, against the fastest of {', '.join(one.rivals)}"
    message = f"{significant(one.ratio, 3)}x in {count(one.cells, 'cell')}"
    return {"schemaVersion": 1, "label": label, "message": message, "color": "blue"}


def claimed(held: Mapping[str, Sequence[Held]]) -> list[tuple[Claim, list[tuple[str, Held]]]]:
    """Each claim of others of which some report has rows, with the folders of these reports and what they show; in the order of the claims."""
    every = {one.claim.id: one.claim for found in held.values() for one in found if not one.claim.own}
    shown = {
        name: [
            (folder, one)
            for folder, found in held.items()
            for one in found
            if one.claim.id == name and not math.isnan(one.ours)
        ]
        for name in every
    }
    return [(every[name], found) for name, found in shown.items() if found]
