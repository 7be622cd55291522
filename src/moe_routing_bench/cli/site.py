"""All reports as a folder of static pages."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli import outputs
from moe_routing_bench.cli.published import runs
from moe_routing_bench.cli.report import build, held_claims, rows_of
from moe_routing_bench.store import manifest, paths
from moe_routing_bench.study.request import models
from moe_routing_kernels.errors import bad, writing

_REPORTS = Path("reports")
_TITLE = "<title>moe-routing-bench: reports</title>"  # of the first page


def site(
    out: Annotated[
        Path, typer.Option("--out", help="Folder to write; files of an earlier site are overwritten")
    ] = Path("site"),
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the reports of published runs again, also those that are there")
    ] = False,
    force: outputs.Force = False,
) -> None:
    """Build the missing reports of published runs, and gather the reports of all platforms and runs, with figures, rows and comparisons of GPUs, in one folder with a first page, to be served or opened as files."""
    published = runs()
    for name in published:
        manifest.read(name)
    built = [folder.name for folder in _REPORTS.glob("*") if not _missing(folder.name)]
    found = [_REPORTS / name for name in sorted({*built, *published})]
    if not found:
        raise bad("reports", f"none in {_REPORTS}/", "at least one report", "run `moe-routing-bench report`")
    module = importlib.import_module("moe_routing_bench.report.site")
    versus = importlib.import_module("moe_routing_bench.report.versus")
    tables = {folder.name: rows_of("measurements", folder.name) for folder in found}
    pairs = versus.pairs(tables)
    _check(out, ["index.html", *(module.between(pair) for pair in pairs), *tables], force)
    _build([name for name in published if rebuild or _missing(name)])
    with writing(out):
        for pair in pairs:
            versus.write(pair, tuple(tables[name] for name in pair), out / module.between(pair))
        held = {name: held_claims(name, table) for name, table in tables.items()}
        reports = [_report(module, folder, tables[folder.name]) for folder in found]
        module.write(reports, out, pairs, held, models())
    print(f"wrote {out / 'index.html'}, which leads to {len(found)} reports and {len(pairs)} comparisons of platforms")


def _missing(name: str) -> bool:
    """Whether a run has no report, or only the empty file that a build that was interrupted leaves."""
    path = paths.report(name)
    return not path.is_file() or not path.stat().st_size


def _build(names: Sequence[str]) -> None:
    """Build the reports of published runs. All files exist before the first report is written, so that reports link each other."""
    for path in map(paths.report, names):
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for name in names:
        build(name)


def _check(folder: Path, names: Iterable[str], force: bool) -> None:
    """Raise `UserError` where a folder has something of these names, and its first page is not one that this command wrote."""
    index = folder / "index.html"
    ours = index.is_file() and _TITLE in index.read_text(encoding="utf-8", errors="replace")
    there = [name for name in names if outputs.taken(folder / name)]
    if there and not ours and not force:
        hint = f"{', '.join(there)} would be overwritten; --force does so"
        raise bad("--out", str(folder), "a folder without such files, or an earlier site", hint)


def _report(module: Any, folder: Path, rows: Any) -> tuple[Any, Path, list[Path]]:
    """What is listed of a report, its folder, and its tables."""
    tables = [paths.TABLES[name](folder.name) for name in paths.TABLES if name in paths.reported(folder.name)]
    trained = rows_of("quality", folder.name) if "quality" in paths.reported(folder.name) else None
    return module.listed(folder, rows, trained, tables), folder, tables
