"""The commands that collect rows into tables, and those that compare what the tables hold."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli import outputs
from moe_routing_bench.cli.asked import effective, platform_of
from moe_routing_bench.cli.options import ConfigJson, Configs, Platform
from moe_routing_bench.cli.printing import places
from moe_routing_bench.quality.spec import adaptation_rows, plan, run_rows
from moe_routing_bench.store import paths, records
from moe_routing_bench.store.parquet import write_table
from moe_routing_kernels.errors import bad, pick


def collect(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/quality.parquet]")
    ] = None,
    force: outputs.Force = False,
) -> None:
    """Join the rows of all training runs of a config, with the times of those timed alone, and rank the routers."""
    planned, platform = planned_by(config, config_json, platform)
    if not planned.finals:
        raise bad("config.quality", "no runs", "at least one entry")
    out = outputs.chosen(out, paths.quality(platform), force)
    table = run_rows.collect(planned.files(platform), planned.timing_files(platform))
    write_table(out, records.of_platform(table, platform, "training runs"))
    print(f"wrote {out}: {len(table)} evaluations of {len(planned.finals)} runs")
    print(f"trained on {places(table.select(['host', 'slurm_job_id']).to_pylist())}")
    print(_comparison("compare").text(table.to_pandas()))


def collect_perft(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/perft.parquet]")
    ] = None,
    force: outputs.Force = False,
) -> None:
    """Join the rows of all adaptations of a config, and print losses and parameters by variant and rank."""
    planned, platform = planned_by(config, config_json, platform)
    if not planned.adaptations:
        raise bad("config.perft", "no adaptations", "at least one entry")
    out = outputs.chosen(out, paths.perft(platform), force)
    table = run_rows.collect(planned.adaptation_files(platform), {}, adaptation_rows.SCHEMA)
    write_table(out, records.of_platform(table, platform, "adaptations"))
    print(f"wrote {out}: {len(table)} evaluations of {len(planned.adaptations)} adaptations")
    print(f"trained on {places(table.select(['host', 'slurm_job_id']).to_pylist())}")
    print(_comparison("perft_summary").text(table.to_pandas()))


def rank(
    platform: Platform = None,
    metric: Annotated[str, typer.Option(help="A numeric column")] = "bits_per_byte",
) -> None:
    """Rank the routers of quality.parquet by their mean over seeds, with intervals, paired tests and ties."""
    table = _stored(platform_of(platform))
    pick("metric", metric, [name for name, kind in run_rows.COLUMNS.items() if kind in ("double", "int64")])
    print(_comparison("compare").text(table.to_pandas(), metric))


def specialisation(platform: Platform = None) -> None:
    """Print how far the experts of quality.parquet specialise by domain, in bits, with intervals over seeds."""
    table = _stored(platform_of(platform))
    print(_comparison("specialisation").text(table.to_pandas()))


def planned_by(config: list[Path] | None, config_json: str | None, platform: str | None) -> tuple[plan.Plan, str]:
    """The runs and adaptations of a config, and their platform; without one, that of this machine."""
    found = effective(config, config_json)
    return plan.expand(found.get("quality", []), found.get("perft", [])), platform_of(
        platform or found.get("platform"), None if platform else found.get("run")
    )


def _stored(platform: str) -> Any:
    """The rows of all training runs of a platform."""
    path = paths.quality(platform)
    return records.of_platform(run_rows.read(path), platform, str(path))


def _comparison(name: str) -> Any:
    """A module that compares rows; pandas and scipy, which it needs, take seconds to import."""
    return importlib.import_module(f"moe_routing_bench.quality.comparison.{name}")
