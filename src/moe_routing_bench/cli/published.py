"""Published runs: the manifest of each, and which runs are older than the code of today."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from moe_routing_bench.cli.options import Platform, Run
from moe_routing_bench.cli.printing import show
from moe_routing_bench.packages import fingerprint
from moe_routing_bench.quality import code
from moe_routing_bench.store import manifest as manifests
from moe_routing_bench.store import paths
from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.study.request import platform_of
from moe_routing_kernels.errors import bad

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
        for one in about["measured"]:
            days = dict.fromkeys(str(one[name])[:10] for name in ("first", "last"))
            commit = one["commit"][:7] + " with changes" * bool(one["dirty"])
            yield [
                run,
                table,
                one["version"] or "unknown",
                commit,
                " to ".join(days),
                ", ".join(map(manifests.short, one["cards"])),
                str(one["rows"]),
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
