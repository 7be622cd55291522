"""A folder of static pages: every report with its figures and rows, and a page that leads to them."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from moe_routing_bench.answers import stored
from moe_routing_bench.comparison import origins
from moe_routing_bench.comparison.claim_verdicts import Held
from moe_routing_bench.config.axes import PRESET
from moe_routing_bench.config.claims import Claim
from moe_routing_bench.figures import footer
from moe_routing_bench.quantities import count
from moe_routing_bench.report import page, platform, words
from moe_routing_bench.report.document import Sentence
from moe_routing_bench.report.headlines import headlines, unfound

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
