"""Figures and the report of a platform, from its rows."""

import importlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.answers import stored
from moe_routing_bench.cli import options
from moe_routing_bench.cli.claims import held
from moe_routing_bench.cli.options import Platform, Run
from moe_routing_bench.config import presets
from moe_routing_bench.quality import adaptation_rows, run_rows
from moe_routing_bench.store import companions, manifest, paths, platforms, records
from moe_routing_bench.store.project_files import own_or_shipped
from moe_routing_bench.study import last, models, platform_of
from moe_routing_kernels.errors import bad, pick, writing

_UNSHOWN = ("expert_load", "block_clocks_mhz", "block_powers_w")  # lists that no figure and no section reads
_PROFILE = ("bench", "cell", "axes", "platform", "implementations", "differences")


def figure(
    platform: Platform = None,
    run: Run = None,
    name: Annotated[str | None, typer.Option(help="One figure [default: all]")] = None,
) -> None:
    """Draw figures from the rows of a platform as SVG and PNG: measurements, and training runs where there are any."""
    platform = platform_of(platform, run)
    figures = _figures()
    names = [pick("figure", name, figures)] if name else list(_reported(platform))
    tables = {source: rows_of(source, platform) for source in dict.fromkeys(figures[chosen].source for chosen in names)}
    for entry in names:
        _draw(figures[entry], tables[figures[entry].source], platform)
        print(f"wrote {paths.figure(platform, entry)} and .png")


def report(
    platform: Platform = None,
    run: Run = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows",
            help="CSV file of another benchmark's rows: bench, implementation, median_us, axes such as tokens; needs --out",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the report of --rows, with its figures")] = None,
    force: options.Force = False,
) -> None:
    """Write the report (report.json, and the HTML page that is rendered from it) from the rows of a platform (measurements, and training runs where there are any) and figures; or of the rows of another benchmark."""
    if rows is not None or out is not None:
        if rows is None or out is None or platform or run:
            raise bad("--rows and --out", "one of them, or a platform", "both, or neither")
        table = importlib.import_module("moe_routing_bench.figures.foreign").read_csv(rows)
        options.check_folder("--out", out, force)
        _write_foreign(table, out)
        return
    platform = platform_of(platform, run)
    _write(platform, _tables(platform))


def _write_foreign(table: Any, out: Path) -> None:
    """Draw the figures of another benchmark's rows, then write their report."""
    paper = importlib.import_module("moe_routing_bench.figures.paper")
    shown = [one for one in _figures().values() if one.source == "measurements"]
    folder = out / "figures"
    with writing(out / "index.html"):
        folder.mkdir(parents=True, exist_ok=True)
        for one in shown:
            paper.save(paper.draw(one, table), folder / f"{one.name}.svg", folder / f"{one.name}.png")
        render = importlib.import_module("moe_routing_bench.report.render").render
        render(table, [one.name for one in shown], out / "index.html")
    print(f"wrote {out / 'index.html'}")


def build(platform: str) -> None:
    """Draw all figures of a platform, then write its report."""
    tables = _tables(platform)
    for entry in _reported(platform).values():
        _draw(entry, tables[entry.source], platform)
    _write(platform, tables)


def _tables(platform: str) -> dict[str, Any]:
    """The rows of a platform by the name of their table."""
    return {name: rows_of(name, platform) for name in paths.reported(platform)}


def _write(platform: str, tables: dict[str, Any]) -> None:
    """Write the report of these rows, which it takes out of `tables`, and of the figures that are drawn."""
    drawn = {name: paths.figure(platform, name) for name in _reported(platform)}
    absent = [str(path) for path in drawn.values() if not path.is_file()]
    if absent:
        raise bad(
            "figures",
            f"{len(absent)} missing",
            "all drawn",
            f"run `moe-routing-bench figure --platform {shlex.quote(platform)}`",
        )
    out = paths.report(platform)
    versions, claims = _versions(platform, tables), held_claims(platform, tables["measurements"])
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _write_published(platform)
        importlib.import_module("moe_routing_bench.report.render").render(
            tables.pop("measurements"),  # whose memory is needed for the page
            drawn,
            out,
            tables.get("quality"),
            tables.get("perft"),
            versions,
            claims,
            _models(platform),
            platform.partition(".")[2],
            profiles(platform),
            accuracy_of(platform),
            _own_presets(platform),
            _stored(platform),
        )
    print(f"wrote {out}")


def _write_published(platform: str) -> None:
    """Next to the report of a CPU, the page of the GPU with most published runs, where there are any: what its own rows cannot show."""
    if platform.partition(".")[0] != platforms.CPU:
        return
    published = {name: runs for name, runs in stored.runs().items() if not name.startswith(platforms.CPU)}
    if published:
        name = max(published, key=lambda one: len(published[one]))
        pages = importlib.import_module("moe_routing_bench.report.platform_pages")
        pages.write_alone(name, paths.published_page(platform), models())
        print(f"wrote {paths.published_page(platform)}: published rows of {name}")


def profiles(platform: str) -> list[Any]:
    """What the calls of a platform's cells consist of, where it was profiled."""
    return [companions.mapping(path, _PROFILE) for path in paths.profile_files(platform)]


def _versions(platform: str, tables: Mapping[str, Any]) -> dict[str, str]:
    """The package version of every commit that rows name."""
    return manifest.versions(platform, {sha for table in tables.values() for sha in table["git_sha"].dropna()})


def held_claims(platform: str, rows: Any) -> Any:
    """What became of published figures; nothing on a CPU, whose times say nothing of them."""
    if platform.startswith(platforms.CPU):
        return ()
    claims = importlib.import_module("moe_routing_bench.config.claims")
    return held(platform, claims.load(own_or_shipped(paths.CLAIMS)), [rows])


def accuracy_of(platform: str) -> Any:
    """The accuracy matrix of a platform as a DataFrame, if it is stored."""
    path = paths.accuracy(platform)
    return companions.read_matrix(path, platform.partition(".")[0]).to_pandas() if path.is_file() else None


def _stored(platform: str) -> dict[str, Any]:
    """The tables of the platform's folder, besides its rows, that the report shows."""
    columns = importlib.import_module("moe_routing_bench.report.section_tables").COLUMNS
    files = {name: paths.results(platform) / f"{name}.csv" for name in columns}
    return {name: companions.table(path, columns[name]) for name, path in files.items() if companions.is_there(path)}


def _models(platform: str) -> dict[str, Any]:
    """The sizes of every preset that can be measured; also of those that only the workflow's last run had."""
    known = models(_own_file(platform))
    return {name: presets.values(preset) for name, preset in known.items() if not preset.unsupported}


def _own_presets(platform: str) -> dict[str, str]:
    """The file of presets that the workflow's last run named, for each preset in it."""
    file = _own_file(platform)
    return dict.fromkeys(models(file).keys() - models().keys(), file) if file else {}


def _own_file(platform: str) -> str | None:
    kept = last(platform)
    return companions.mapping(kept).get("models") if companions.is_there(kept) else None


def _figures() -> Mapping[str, Any]:
    """The figures by name, in the order of the report."""
    return importlib.import_module("moe_routing_bench.figures").FIGURES


def _reported(platform: str) -> dict[str, Any]:
    """The figures of a platform's report: those of training runs only where it has any."""
    there = paths.reported(platform)
    return {name: entry for name, entry in _figures().items() if entry.source in there}


def rows_of(source: str, platform: str) -> Any:
    """The table that figures with this source are drawn from, as a DataFrame."""
    path = paths.TABLES[source](platform)
    if source == "measurements":
        table = records.read(path, _UNSHOWN)
    else:
        table = run_rows.read(path, adaptation_rows.SCHEMA if source == "perft" else run_rows.SCHEMA)
    return records.frame(records.of_platform(table, platform, str(path)))


def _draw(entry: Any, table: Any, platform: str) -> None:
    paper = importlib.import_module("moe_routing_bench.figures.paper")
    svg = paths.figure(platform, entry.name)
    drawn = paper.draw(entry, table)
    with writing(svg):
        svg.parent.mkdir(parents=True, exist_ok=True)
        paper.save(drawn, svg, paths.figure(platform, entry.name, "png"))
