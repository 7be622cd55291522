"""One self-contained HTML file a platform, readable offline. Never imports torch."""

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jinja2
import pandas as pd

from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.findings import findings

SHOWN = (
    "bench", "implementation", "model", "tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew",
    "sampler", "dtype", "layout", "router", "status", "median_us", "ci_low_us", "ci_high_us", "wall_median_us", "gb_per_s",
    "share_of_copy", "share_of_stream", "tflops", "speedup", "speedup_ci_low", "speedup_ci_high", "drop_rate", "load_cv",
    "converged", "suspect",
)  # fmt: skip
_MACHINE = (
    "platform", "gpu_name", "driver", "cuda_version", "cpu_model", "cpu_threads", "torch_version", "triton_version",
    "cutlass_dsl_version", "python_version", "power_limit_w", "git_sha", "git_dirty", "schema_version",
)  # fmt: skip


def render(table: pd.DataFrame, figures: Mapping[str, Path], out: Path) -> None:
    """Write the report of `table` (rows of the schema) with the SVG file of each figure to `out`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("moe_routing_bench.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    bad = table[table["status"] != "ok"].groupby(["status", "bench", "implementation", "reason"], dropna=False)
    page = environment.get_template("report.html.j2").render(
        platform=table["platform"].iloc[0],
        findings=findings(table),
        figures=[(FIGURES[name], _data_uri(path)) for name, path in figures.items()],
        columns=SHOWN,
        rows=_embedded([[_plain(v) for v in row] for row in table[list(SHOWN)].itertuples(index=False)]),
        bad=[(*key, len(group)) for key, group in bad],
        machine=[(name, _values(table, name)) for name in _MACHINE],
        days=(str(table["started_at"].min())[:16], str(table["ended_at"].max())[:16]),
        ceilings=[(n, _values(table, n, True)) for n in ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "peak_tflops", "launch_us", "graph_node_us")],
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(page)
    temporary.replace(out)


def _data_uri(path: Path) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def _embedded(rows: list) -> str:
    """JSON that may stand inside a script element: no '<' survives."""
    return json.dumps(rows, separators=(",", ":")).replace("<", "\\u003c")


def _plain(value: object) -> object:
    """A JSON value; missing is null, numbers to five digits."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return None
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.5g}")
    return value


def _values(table: pd.DataFrame, column: str, spread: bool = False) -> str:
    """The distinct values of a column, or the range of a measured one."""
    values = table[column].dropna()
    if values.empty:
        return "–"
    if spread:
        return f"{values.median():,.4g} (median; {values.min():,.4g} to {values.max():,.4g})"
    return ", ".join(str(_plain(v)) for v in values.unique()[:4])
