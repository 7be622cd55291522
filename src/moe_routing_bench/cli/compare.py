"""One run against another: what is faster, slower or lost, and an exit status that a CI can use."""

import importlib
import io
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.answers import stored
from moe_routing_bench.answers.question import PLATFORM
from moe_routing_bench.cli import options
from moe_routing_bench.cli.printing import show
from moe_routing_bench.quantities import count, counts
from moe_routing_bench.store import paths, records
from moe_routing_kernels.errors import bad, one_line, pick

_PERCENT = re.compile(r"([0-9]{1,9}(?:\.[0-9]+)?) *%?")
_RUN = "a Parquet file, a folder of results/ such as nvidia-h200, or COMMIT:FOLDER"


def compare(
    before: Annotated[str, typer.Argument(metavar="A", help=f"The run to compare with: {_RUN}")],
    after: Annotated[str, typer.Argument(metavar="B", help="The run that is judged, named likewise")],
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Exit status 1 if a row is slower by more than this, such as 3%, or has lost its time"
        ),
    ] = None,
    across: Annotated[bool, typer.Option("--across", help="Compare runs of different devices all the same")] = False,
    most: Annotated[int, typer.Option(metavar="<int>", help="Most rows to print; the page has all", min=0)] = 20,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with all rows; the report links compare-*.html in its folder")
    ] = None,
    force: options.Force = False,
) -> None:
    """Compare two runs row by row: faster, slower, the same or undecided, beyond noise and the drift of the device."""
    share = None if fail_if_slower is None else _share(fail_if_slower)
    if html:
        options.check_file("--html", html, force)
    runs = importlib.import_module("moe_routing_bench.comparison.runs")
    comparison = runs.compare(_table(before), _table(after), across)
    for mark in comparison.marks:
        print(one_line(f"differs besides the code: {mark}"))
    changed = comparison.changed()
    show(_printed(changed[changed["verdict"] != "same"].head(most), f"{before} -> {after}"))
    print(f"{len(comparison.rows)} rows: {counts(comparison.rows['verdict'].tolist())}")
    if repeated := comparison.repeated():
        print(
            f"{count(repeated, 'row')} {'was' if repeated == 1 else 'were'} not measured again: both runs have the same samples"
        )
    if html:
        importlib.import_module("moe_routing_bench.report.run_pages").write_changes(
            comparison, (_lasting(before), _lasting(after)), html
        )
        print(f"wrote {html}")
    if share is not None and len(worse := comparison.worse(share)):
        print(f"slower by more than {share:.1%}, or lost: {len(worse)} rows")
        raise typer.Exit(1)


def history(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help=f"Runs of one platform, oldest first, the last of which is judged; each is {_RUN} [default: published runs, with the versions that git keeps]",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="The page of RUNs to write; the report links compare-*.html in its folder")
    ] = None,
    across: Annotated[bool, typer.Option("--across", help="Take runs of different devices all the same")] = False,
    platform: Annotated[str, typer.Option(help="Device whose published runs are read, without RUN")] = PLATFORM,
    most: Annotated[int, typer.Option(metavar="<int>", help="Most steps to print, without RUN", min=0)] = 20,
    force: options.Force = False,
) -> None:
    """Show the rows of a run over earlier runs, on a page: their times then, and how much faster they are now, beyond noise and drift. Without RUN: print the latest steps of published rows, as the history of a site has them."""
    if not runs:
        if html or across:
            raise bad("runs", "none", "two or more, for --html and --across")
        _print_steps(platform, most)
        return
    if len(runs) < 2 or len(set(runs)) < len(runs):
        raise bad("runs", ", ".join(runs), "two or more, each once")
    if html is None:
        raise bad("--html", "nothing", "a page to write")
    options.check_file("--html", html, force)
    *earlier, last = runs
    rows = importlib.import_module("moe_routing_bench.comparison.runs").history(
        {name: _table(name) for name in earlier}, _table(last), across
    )
    importlib.import_module("moe_routing_bench.report.run_pages").write_history(rows, earlier, last, html)
    print(f"wrote {html}: {len(rows)} rows of {last} that an earlier run timed, too")


def _print_steps(platform: str, most: int) -> None:
    """The latest steps of a platform's published rows, as the site has them."""
    published = stored.runs()
    names = published[pick("--platform", platform, published)]
    timeline = importlib.import_module("moe_routing_bench.comparison.timeline")
    lines = timelines(names)
    found = timeline.steps(lines)
    shown = Table(*timeline.STEPS, box=None)
    for one in found[:most]:
        shown.add_row(*timeline.step(one))
    show(shown)
    for text in timeline.told(lines, found, is_whole()):
        print(text)


def timelines(names: Iterable[str]) -> list[Any]:
    """What was measured more than once in these runs of one platform, as their folders have them and as earlier commits do."""
    timeline = importlib.import_module("moe_routing_bench.comparison.timeline")
    states = [(name, _read(state, timeline.COLUMNS)) for name in names for state in [*_earlier(name), name]]
    return timeline.lines(states)


def is_whole() -> bool:
    """Whether the working directory is in a repository with all of its history."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


def _earlier(run: str) -> list[str]:
    """The states of a run that git keeps, oldest first, as COMMIT:FOLDER; none outside a repository."""
    path = paths.measurements(run)
    found = _git("log", "--reverse", "--diff-filter=AM", "--format=%H", "--", str(path)) if path.is_file() else None
    return [f"{commit}:{run}" for commit in (found or "").split()]


def _git(*words: str) -> str | None:
    """What git prints in the working directory; None without git, outside a repository and after an error."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, check=False, encoding="utf-8")
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def _share(text: str) -> float:
    """A share of a time: 3% or 3 is 0.03."""
    match = _PERCENT.fullmatch(text.strip())
    if not match:
        raise bad("--fail-if-slower", text, "a percentage such as 3%")
    return float(match[1]) / 100


def _table(name: str) -> Any:
    """The rows of a run, with what a comparison reads of them."""
    return _read(name, importlib.import_module("moe_routing_bench.comparison.runs").COLUMNS)


def _read(name: str, columns: Sequence[str]) -> Any:
    commit, colon, folder = name.partition(":")
    if colon:
        source: Any = io.BytesIO(_at(commit, folder))
    else:
        path = Path(name)
        source = path if path.suffix == ".parquet" else paths.measurements(name)
        if not source.is_file():
            raise bad("run", name, _RUN, f"there is no {source}")
    return records.frame(records.read_some(source, columns, name))


def _lasting(name: str) -> str:
    """The name of a run for a page: a commit by its hash, because HEAD or a branch is another one later."""
    commit, colon, folder = name.partition(":")
    if not colon:
        return name
    command = ["git", "rev-parse", "--verify", "--short", "--end-of-options", commit]
    done = subprocess.run(command, capture_output=True, check=False, encoding="utf-8")
    if done.returncode:
        raise bad("run", name, _RUN, done.stderr.strip())
    return f"{done.stdout.strip()}:{folder}"


def _at(commit: str, folder: str) -> bytes:
    """The measurements of a results folder as git stores them at a commit."""
    place = f"{commit}:{paths.measurements(folder)}"
    try:
        done = subprocess.run(["git", "show", "--end-of-options", place], capture_output=True, check=False)
    except OSError as error:
        raise bad("run", place, _RUN, "git is not installed") from error
    if done.returncode:
        raise bad("run", place, _RUN, done.stderr.decode(errors="replace").strip().splitlines()[-1])
    return done.stdout


def _printed(rows: Any, title: str) -> Table:
    """The rows as a table for the terminal."""
    table = Table(
        "bench",
        "cell",
        "implementation",
        "before us",
        "after us",
        "before / after",
        "verdict",
        title=title,
        title_justify="left",
        box=None,
    )
    for row in rows.to_dict("records"):
        ratio = "" if row["ratio"] != row["ratio"] else f"{row['ratio']:.3f}"
        if row["ratio_ci_low"] == row["ratio_ci_low"]:
            ratio += f" ({row['ratio_ci_low']:.3f} to {row['ratio_ci_high']:.3f})"
        times = ["" if row[side] != row[side] else f"{row[side]:.2f}" for side in ("before_us", "after_us")]
        text = row["verdict"] + (f": {row['reason']}" if isinstance(row["reason"], str) else "")
        table.add_row(row["bench"], row["cell"], row["implementation"], *times, ratio, text)
    return table
