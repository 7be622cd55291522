"""`rank`, `specialisation`: what stored training runs say about routers and their experts."""

from typing import Annotated, Any

import typer

from moe_routing_bench.cli.collect import comparison
from moe_routing_bench.cli.options import Platform
from moe_routing_bench.quality import run_rows
from moe_routing_bench.store import paths, records
from moe_routing_bench.study.request import platform_of
from moe_routing_kernels.errors import pick


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
