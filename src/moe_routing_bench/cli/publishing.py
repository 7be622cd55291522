"""All reports as a folder of static pages."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli.reporting import rows_of
from moe_routing_bench.errors import bad, writing
from moe_routing_bench.store import paths

_REPORTS = Path("reports")


def site(
    out: Annotated[Path, typer.Option("--out", help="Folder to write; files there are overwritten")] = Path("site"),
) -> None:
    """Gather the reports of all platforms and runs, with figures and rows, in one folder with a first page, to be served or opened as files."""
    found = [folder for folder in sorted(_REPORTS.glob("*")) if paths.report(folder.name).is_file()]
    if not found:
        raise bad("reports", _REPORTS, "at least one report", "run `moe-routing-bench report`")
    module = importlib.import_module("moe_routing_bench.report.site")
    with writing(out):
        module.write([_report(module, folder) for folder in found], out)
    print(f"wrote {out / 'index.html'}, which leads to {len(found)} reports")


def _report(module: Any, folder: Path) -> tuple[Any, Path, list[Path]]:
    """What is listed of a report, its folder, and its tables."""
    tables = [paths.TABLES[name](folder.name) for name in paths.TABLES if name in paths.reported(folder.name)]
    trained = rows_of("quality", folder.name) if "quality" in paths.reported(folder.name) else None
    return module.listed(folder, rows_of("measurements", folder.name), trained, tables), folder, tables
