"""Published runs: the manifest of each, which are older than the code of today, rows that others submit, and all reports as a folder of static pages."""

import contextlib
import importlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.table import Table

from moe_routing_bench.cli import options
from moe_routing_bench.cli.compare import is_whole, timelines
from moe_routing_bench.cli.options import Platform, Run
from moe_routing_bench.cli.printing import quoted, show
from moe_routing_bench.cli.report import build, held_claims, profiles, rows_of
from moe_routing_bench.packages import fingerprint
from moe_routing_bench.quality import code
from moe_routing_bench.quantities import count
from moe_routing_bench.store import archive, contradictions, parquet, paths, platforms, records
from moe_routing_bench.store import manifest as manifests
from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.study import models, platform_of
from moe_routing_kernels.choices import load
from moe_routing_kernels.errors import bad, one_line, writing

_TRAINED = {"quality": code.training_files, "perft": code.adaptation_files}


def manifest(platform: Platform = None, run: Run = None) -> None:
    """Write the manifest of a run, from its rows: versions, commits, cards, dates, and the config. A published run has one."""
    print(f"wrote {manifests.write(platform_of(platform, run))}")


def published(platform: Platform = None, run: Run = None) -> None:
    """List the published runs: what measured them, and which benches' code has changed since. Without options, all runs."""
    names = runs() if platform is None and run is None else [platform_of(platform, run)]
    if not names:
        raise bad("published runs", "none in results/", "at least one", "`moe-routing-bench manifest` publishes a run")
    shown = Table("run", "table", "version", "commit", "measured", "card", "rows", "code changed since", box=None)
    for name in names:
        for line in _lines(name):
            shown.add_row(*line)
    show(shown)


def runs() -> list[str]:
    """The published runs: the folders of results that have a manifest."""
    return sorted(path.parent.name for path in paths.results("").glob("*/manifest.yaml"))


def _lines(run: str) -> Iterator[list[str]]:
    for table, about in manifests.read(run)["tables"].items():
        changed = _changed(run, table)
        for group in about["measured"]:
            days = dict.fromkeys(str(group[name])[:10] for name in ("first", "last"))
            commit = group["commit"][:7] + " with changes" * bool(group["dirty"])
            yield [
                run,
                table,
                group["version"] or "unknown",
                commit,
                " to ".join(days),
                ", ".join(map(manifests.short, group["cards"])),
                str(group["rows"]),
                changed,
            ]


def _changed(run: str, table: str) -> str:
    """The benches of a table whose code has changed; a dash where none has, or where rows do not name their code."""
    rows: Any = read_table(paths.results(run) / f"{table}.parquet")
    if table == "measurements":
        pairs = zip(rows["bench"].to_pylist(), rows["code_fingerprint"].to_pylist(), strict=True)
        return ", ".join(manifests.changed(pairs)) or "–"
    today = fingerprint(_TRAINED[table]()) if table in _TRAINED else None
    return table if today and set(rows["code_fingerprint"].to_pylist()) != {today} else "–"


_REPORTS = Path("reports")
_URL = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
_TITLE = "<title>moe-routing-bench: reports</title>"  # of the first page


def site(
    out: Annotated[
        Path, typer.Option("--out", help="Folder to write; files of an earlier site are overwritten")
    ] = Path("site"),
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the reports of published runs again, also those that are there")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="Address at which the folder will be served, for its feed and preview images")
    ] = None,
    force: options.Force = False,
) -> None:
    """Build the missing reports of published runs, and gather the reports of all platforms and runs, with figures, rows and comparisons of GPUs, in one folder with a first page, to be served or opened as files."""
    if url is not None and not _URL.fullmatch(url):
        raise bad("--url", url, "an address such as https://example.org/bench")
    published = runs()
    about = {name: manifests.read(name) for name in published}
    built = [folder.name for folder in _REPORTS.glob("*") if not _missing(folder.name)]
    folders = [_REPORTS / name for name in sorted({*built, *published})]
    if not folders:
        raise bad("reports", f"none in {_REPORTS}/", "at least one report", "run `moe-routing-bench report`")
    module = importlib.import_module("moe_routing_bench.report.site")
    versus = importlib.import_module("moe_routing_bench.report.run_pages")
    tables = {folder.name: rows_of("measurements", folder.name) for folder in folders}
    pairs, platforms = versus.pairs(tables), platforms_of(published)
    _check(out, ["index.html", "feed.xml", *(module.between(pair) for pair in pairs), *tables, *platforms], force)
    _build([name for name in published if rebuild or _missing(name)])
    with writing(out):
        for pair in pairs:
            versus.write(pair, tuple(tables[name] for name in pair), out / module.between(pair))
        claims = {name: held_claims(name, table) for name, table in tables.items()}
        reports = [_report(module, folder, tables[folder.name]) for folder in folders]
        module.write(reports, out, pairs, claims, models(), platforms)
        module.write_feed(
            [(one, about[one.folder]) for one, *_ in reports if one.folder in about], out, url or "", platforms
        )
        for platform in platforms:
            _platform(platform, published, tables, out / platform, f"{url.rstrip('/')}/{platform}" if url else "")
            if lead := module.lead([tables[name] for name in published if name.partition(".")[0] == platform], load()):
                (out / platform / "badge.json").write_text(json.dumps(module.badge(lead)), encoding="utf-8")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(
        f"wrote {out / 'index.html'}, which leads to {len(folders)} reports, {len(platforms)} pages of platforms and {len(pairs)} comparisons of platforms; {size / 1e6:.0f} MB in all"
    )


def platforms_of(runs: Iterable[str]) -> list[str]:
    """The platforms of these runs."""
    return list(dict.fromkeys(name.partition(".")[0] for name in runs))


def _platform(platform: str, published: Iterable[str], tables: Mapping[str, Any], out: Path, url: str) -> None:
    """Write the pages of a platform, of its published runs."""
    module = importlib.import_module("moe_routing_bench.report.platform_pages")
    held = {
        name: module.Tables(tables[name], *(_table(one, name) for one in _TRAINED), profiles(name))
        for name in published
        if name.partition(".")[0] == platform
    }
    out.mkdir(parents=True, exist_ok=True)
    lines = timelines([name for name in held if paths.measurements(name).is_file()])
    module.write(platform, held, out, models(), platform in tables, lines, is_whole(), url)


def _table(source: str, name: str) -> Any:
    return rows_of(source, name) if source in paths.reported(name) else None


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
    there = [name for name in names if options.taken(folder / name)]
    if there and not ours and not force:
        hint = f"{', '.join(there)} would be overwritten; --force does so"
        raise bad("--out", str(folder), "a folder without such files, or an earlier site", hint)


def _report(module: Any, folder: Path, rows: Any) -> tuple[Any, Path, list[Path]]:
    """What is listed of a report, its folder, and its tables."""
    tables = [paths.TABLES[name](folder.name) for name in paths.TABLES if name in paths.reported(folder.name)]
    trained = rows_of("quality", folder.name) if "quality" in paths.reported(folder.name) else None
    return module.listed(folder, rows, trained, tables), folder, tables


def submit(
    by: Annotated[str, typer.Option("--by", help="Name that pages show next to these rows")],
    platform: Platform = None,
    run: Run = None,
    out: Annotated[Path | None, typer.Option("--out", help="Archive to write [default: RUN.tar.gz]")] = None,
    force: options.Force = False,
) -> None:
    """Make an archive of a run to send in: rows, manifest and environment, with digests. `manifest` comes first, and `verify` must pass.

    The rows name the host and the serial number of the card.
    """
    name = platform_of(platform, run)
    target = options.chosen(out, Path(f"{name}.tar.gz"), force)
    with writing(target):
        archive.pack(name, by, target)
    print(f"wrote {target}; next: moe-routing-bench verify {quoted(target)}")


def verify(
    path: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="What `submit` has made")],
    into: Annotated[
        Path | None, typer.Option("--into", help="Folder, such as results, to put the run in if nothing is wrong")
    ] = None,
) -> None:
    """Examine an archive of `submit`: digests, schema, arithmetic, what the hardware allows, and where the rows come from.

    Exit status 1: something speaks against the rows, one line each.
    """
    about, contents = archive.unpacked(path)
    run = about["run"]
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        folder = paths.results(run)
        folder.mkdir(parents=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        wrong, open_, rows = _examined(run, about)
    for line in wrong:
        print(one_line(f"wrong: {line}"))
    for line in open_:
        print(one_line(f"not checked: {line}"))
    if wrong:
        raise typer.Exit(1)
    print(f"nothing speaks against {count(rows, 'row')} of {run}, submitted by {about['by']}")
    if into is not None:
        _keep(into / run, contents)


def _examined(run: str, about: dict) -> tuple[list[str], list[str], int]:
    """What is wrong with a run below the working directory, what could not be checked, and how many rows it has."""
    place = paths.measurements(run)
    try:
        parquet.read_table(place, foreign=True)  # a seal that a stranger wrote says nothing of the size
    except (OSError, pa.ArrowException) as error:
        raise bad("measurements.parquet", "unreadable", "a Parquet file of rows", str(error)) from error
    table = records.read(place)
    manifests.read(run)
    submitted = importlib.import_module("moe_routing_bench.comparison.submitted")
    wrong = [*_contradictions(table), *submitted.problems(table)]
    if about["environment"] != archive.environment(run):
        wrong.append(f"environment of {archive.ABOUT} is not that of the rows")
    cards = {platforms.slug(name) for name in table["gpu_name"].to_pylist() if name} or {platforms.CPU}
    if cards != {run.partition(".")[0]}:
        wrong.append(f"the run is of {run.partition('.')[0]}, its rows of {', '.join(sorted(cards))}")
    return wrong, submitted.unchecked(table), len(table)


def _contradictions(table: pa.Table) -> list[str]:
    """A line for each row whose numbers cannot be those of one measurement, three at most."""
    rows = [] if contradictions.is_free(table) else table.to_pylist()
    told = [(row, said) for row in rows if (said := contradictions.contradiction(row))]
    lines = [f"{row['implementation']} of {row['bench']} {row['cell']}: {said}" for row, said in told[:3]]
    return lines + [f"numbers of {count(len(told), 'row')} contradict each other"] * bool(told)


def _keep(folder: Path, contents: dict[str, bytes]) -> None:
    """Put the files of an archive in a folder that is not there yet."""
    if options.taken(folder):
        raise bad("--into", str(folder), "a folder without this run", "remove it, or submit under another name (`run`)")
    with writing(folder):
        folder.mkdir(parents=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    print(f"wrote {folder}")
