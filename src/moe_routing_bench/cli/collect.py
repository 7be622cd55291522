"""`collect`, `collect-quality`, `collect-perft`: join the rows of all cells, training runs or adaptations into one table.

`rank` and `specialisation` print what such a table says about routers and their experts.
"""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli import options
from moe_routing_bench.cli.options import ConfigJson, Configs, Platform, Run
from moe_routing_bench.cli.printing import places
from moe_routing_bench.quality import adaptation_rows, plan, run_rows
from moe_routing_bench.quantities import counts
from moe_routing_bench.store import cell_files, companions, paths, records
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.study import config_or_last, effective, jobs_of, platform_of
from moe_routing_kernels.errors import bad, one_line, pick


def collect(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    run: Run = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/measurements.parquet]")
    ] = None,
    force: options.Force = False,
) -> None:
    """Join the rows of all cells of a config into one file, after checking that each was measured for this config.

    Without a config, of the one that the workflow was last run with for these results.
    """
    effective, platform, _ = config_or_last(config, config_json, platform, run)
    jobs = jobs_of(effective)
    out = options.chosen(out, paths.measurements(platform), force)
    table = cell_files.collect(paths.cell_files(platform, jobs), platform, meanwhile=_comparisons)
    recomputed, ratios, verdicts, anomalies = _comparisons()
    again = paths.again(platform)
    second = companions.rows(again, anomalies.SECONDS) if companions.is_there(again) else None
    rules = (recomputed.with_intervals, ratios.with_baselines, verdicts.with_verdicts)
    table = anomalies.with_anomalies(table, second, rules)
    write_table(out, table)
    print(f"wrote {out}: {len(table)} rows of {len(jobs)} cells, {counts(table['status'].to_pylist())}")
    for row in table.select(["bench", "implementation", "cell", "anomaly", "again"]).to_pylist():
        if row["anomaly"]:
            print(
                one_line(
                    f"in doubt: {row['bench']} {row['implementation']} {row['cell']}: {row['anomaly']}; {row['again']}"
                )
            )
    print(one_line(f"measured on {places(table.select(['gpu_uuid', 'gpu_name', 'host', 'slurm_job_id']).to_pylist())}"))


def _comparisons() -> list[Any]:
    """The modules that compare rows: pandas, which they need, takes half a second to import."""
    names = ("recomputed", "ratios", "verdicts", "anomalies")
    return [importlib.import_module(f"moe_routing_bench.comparison.{name}") for name in names]


def collect_quality(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/quality.parquet]")
    ] = None,
    force: options.Force = False,
) -> None:
    """Join the rows of all training runs of a config, with the times of those timed alone, and rank the routers."""
    planned, platform = _planned(config, config_json, platform)
    if not planned.finals:
        raise bad("config.quality", "no runs", "at least one entry")
    out = options.chosen(out, paths.quality(platform), force)
    table = run_rows.collect(planned.files(platform), planned.timing_files(platform))
    write_table(out, records.of_platform(table, platform, "training runs"))
    print(f"wrote {out}: {len(table)} evaluations of {len(planned.finals)} runs")
    print(one_line(f"trained on {places(table.select(['host', 'slurm_job_id']).to_pylist())}"))
    print(comparison("compare").text(table.to_pandas()))


def collect_perft(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/perft.parquet]")
    ] = None,
    force: options.Force = False,
) -> None:
    """Join the rows of all adaptations of a config, and print losses and parameters by variant and rank."""
    planned, platform = _planned(config, config_json, platform)
    if not planned.adaptations:
        raise bad("config.perft", "no adaptations", "at least one entry")
    out = options.chosen(out, paths.perft(platform), force)
    table = run_rows.collect(planned.adaptation_files(platform), {}, adaptation_rows.SCHEMA)
    write_table(out, records.of_platform(table, platform, "adaptations"))
    print(f"wrote {out}: {len(table)} evaluations of {len(planned.adaptations)} adaptations")
    print(one_line(f"trained on {places(table.select(['host', 'slurm_job_id']).to_pylist())}"))
    print(comparison("perft_summary").text(table.to_pandas()))


def _planned(config: list[Path] | None, config_json: str | None, platform: str | None) -> tuple[plan.Plan, str]:
    """The runs and adaptations of a config, and their platform; without one, that of this machine."""
    settings = effective(config, config_json)
    folder = platform_of(platform or settings.get("platform"), None if platform else settings.get("run"))
    return plan.expand(settings.get("quality", []), settings.get("perft", []), folder), folder


def comparison(name: str) -> Any:
    """A module that compares rows; pandas and scipy, which it needs, take seconds to import."""
    return importlib.import_module(f"moe_routing_bench.quality.{name}")


def rank(
    platform: Platform = None,
    metric: Annotated[str, typer.Option(help="A numeric column")] = "bits_per_byte",
) -> None:
    """Rank the routers of quality.parquet by their mean over seeds, with intervals, paired tests and ties."""
    table = _stored(platform_of(platform))
    pick("metric", metric, [name for name, kind in run_rows.COLUMNS.items() if kind in ("double", "int64")])
    print(comparison("compare").text(table.to_pandas(), metric))


def specialisation(platform: Platform = None) -> None:
    """Print how far the experts of quality.parquet specialise by domain, in bits, with intervals over seeds."""
    table = _stored(platform_of(platform))
    print(comparison("specialisation").text(table.to_pandas()))


def _stored(platform: str) -> Any:
    """The rows of all training runs of a platform."""
    path = paths.quality(platform)
    return records.of_platform(run_rows.read(path), platform, str(path))
