"""All reports as a folder of static pages."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli import outputs
from moe_routing_bench.cli.asked import models
from moe_routing_bench.cli.reporting import held_claims, rows_of
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import bad, writing

_REPORTS = Path("reports")
_TITLE = "<title>moe-routing-bench: reports</title>"  # of the first page


def site(
    out: Annotated[Path, typer.Option("--out", help="Folder to write; files of an earlier site are overwritten")] = Path("site"),
    force: outputs.Force = False,
) -> None:  # fmt: skip
    """Gather the reports of all platforms and runs, with figures, rows and comparisons of GPUs, in one folder with a first page, to be served or opened as files."""
    found = [folder for folder in sorted(_REPORTS.glob("*")) if paths.report(folder.name).is_file()]
    if not found:
        raise bad("reports", f"none in {_REPORTS}/", "at least one report", "run `moe-routing-bench report`")
    module = importlib.import_module("moe_routing_bench.report.site")
    versus = importlib.import_module("moe_routing_bench.report.versus")
    tables = {folder.name: rows_of("measurements", folder.name) for folder in found}
    pairs = versus.pairs(tables)
    _check(out, ["index.html", *(module.between(pair) for pair in pairs), *tables], force)
    with writing(out):
        for pair in pairs:
            versus.write(pair, tuple(tables[name] for name in pair), out / module.between(pair))
        held = {name: held_claims(name, table) for name, table in tables.items()}
        reports = [_report(module, folder, tables[folder.name]) for folder in found]
        module.write(reports, out, pairs, held, models())
    print(f"wrote {out / 'index.html'}, which leads to {len(found)} reports and {len(pairs)} comparisons of platforms")


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
