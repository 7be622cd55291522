"""All reports as a folder of static pages."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli.asked import models
from moe_routing_bench.cli.reporting import held_claims, rows_of
from moe_routing_bench.errors import bad, writing
from moe_routing_bench.store import paths

_REPORTS = Path("reports")


def site(
    out: Annotated[Path, typer.Option("--out", help="Folder to write; files there are overwritten")] = Path("site"),
) -> None:
    """Gather the reports of all platforms and runs, with figures, rows and comparisons of GPUs, in one folder with a first page, to be served or opened as files."""
    found = [folder for folder in sorted(_REPORTS.glob("*")) if paths.report(folder.name).is_file()]
    if not found:
        raise bad("reports", f"none in {_REPORTS}/", "at least one report", "run `moe-routing-bench report`")
    module = importlib.import_module("moe_routing_bench.report.site")
    versus = importlib.import_module("moe_routing_bench.report.versus")
    tables = {folder.name: rows_of("measurements", folder.name) for folder in found}
    pairs = versus.pairs(tables)
    with writing(out):
        for pair in pairs:
            versus.write(pair, tuple(tables[name] for name in pair), out / module.between(pair))
        held = {name: held_claims(name, table) for name, table in tables.items()}
        reports = [_report(module, folder, tables[folder.name]) for folder in found]
        module.write(reports, out, pairs, held, models())
    print(f"wrote {out / 'index.html'}, which leads to {len(found)} reports and {len(pairs)} comparisons of platforms")


def _report(module: Any, folder: Path, rows: Any) -> tuple[Any, Path, list[Path]]:
    """What is listed of a report, its folder, and its tables."""
    tables = [paths.TABLES[name](folder.name) for name in paths.TABLES if name in paths.reported(folder.name)]
    trained = rows_of("quality", folder.name) if "quality" in paths.reported(folder.name) else None
    return module.listed(folder, rows, trained, tables), folder, tables
