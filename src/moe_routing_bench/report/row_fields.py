"""The fields of a row as the page shows them: columns of the table in their order, and groups of what a row opens to.

What the row is comes first, then its results, then what else tells rows apart: the first of them fit a screen of 1440 px.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.store import records
from moe_routing_bench.store.records import about

# Lists: `samples` has those of times in few bytes, the Parquet file all.
LEFT_OUT = tuple(name for name, kind in records.COLUMNS.items() if pa.types.is_list(kind))
_REST = "Machine and versions"
_GROUPS = (
    ("Cell", "bench implementation cell " + " ".join(AXES)),
    (
        "Code",
        "git_sha git_dirty code_fingerprint cell_hash schema_version implementation_version configuration plugin plugin_fingerprint",
    ),
    (
        "Outcome",
        "status reason suspect suspect_reason anomaly again again_us again_ci_low_us again_ci_high_us converged stop_reason "
        "no_interval",
    ),
    (
        "Time",
        "median_us ci_low_us ci_high_us min_us p5_us q1_us q3_us p95_us max_us mad_us wall_median_us warm_median_us tokens_per_s samples blocks "
        "set_aside set_aside_reason timer launch_hidden busy_share turns calls_per_sample cold_sets cold warmup_calls settled",
    ),
    ("Stages", "stage_us stage_timer"),
    ("Energy", "energy_mj energy_mj_per_token"),
    (
        "Against others",
        "verdict speedup speedup_ci_low speedup_ci_high speedup_p baseline best_verdict best_other best_speedup best_speedup_ci_low "
        "best_speedup_ci_high best_speedup_p noise_floor twin_median_us twin_speedup twin_speedup_ci_low twin_speedup_ci_high twin_speedup_p",
    ),
    (
        "Limits",
        "roofline_us share_of_roofline compulsory_bytes read_bytes write_bytes gb_per_s bw_gibps_strict bytes_per_token_strict share_of_copy "
        "share_of_stream share_of_short_stream flops tflops share_of_peak share_of_sustained over_dense dense_us copy_gb_per_s read_gb_per_s write_gb_per_s "
        "stream_gb_per_s short_stream_gb_per_s peak_tflops sustained_tflops launch_us graph_node_us calibration_drift peak_memory_bytes workspace_bytes transient_bytes mixed_gb_per_s",
    ),
    ("Checks", "rel_l2_error max_abs_error tolerance mismatches ties check_nonce"),
    (
        "Routing",
        "rows padding_waste load_cv load_max_over_mean load_gini active_experts dead_experts mean_active_experts drop_rate token_drop_rate gate_entropy "
        "zipf_exponent capacity",
    ),
)


@dataclass(frozen=True)
class Column:
    """A column of the table: one field is shown as it is, three as a value with its interval.

    `says` replaces what the schema says of its first field. `printed`: paper, which does not scroll, shows it too.
    `stem`: of a path the name without folder and ending is shown.
    """

    name: str
    of: tuple[str, ...] = ()
    says: str = ""
    printed: bool = False
    stem: bool = False

    @property
    def meaning(self) -> str:
        """What it means, for the legend."""
        return self.says or about()[self.fields[0]].text

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the row schema that it shows."""
        return self.of or (self.name,)


def _meaning(axis: Axis) -> str:
    """What the table of axes says of it, and how a key spells it."""
    return about()[axis.name].text + (f" ({axis.prefix})" if axis.prefix else "")


_FIRST = ("model", "tokens", "trace")
_axis = {
    name: Column(name, says=_meaning(axis), printed=name in _FIRST, stem=name == "trace") for name, axis in AXES.items()
}
KEYS = 2  # columns that stay in sight while the others scroll
COLUMNS = (
    Column("bench", printed=True),
    Column("implementation", printed=True),
    *(_axis[name] for name in _FIRST),
    Column(
        "median_us",
        ("median_us", "ci_low_us", "ci_high_us"),
        "median time of a call and its 95 % confidence interval, in µs: device time on a GPU, wall time on a CPU",
        printed=True,
    ),
    Column(
        "best_verdict",
        says="faster, slower, same or undecided against the fastest other implementation of the cell, beyond noise; none: the run has too few twins to judge",
        printed=True,
    ),
    Column("best_other", printed=True),
    Column("best_speedup", ("best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"), printed=True),
    Column(
        "share_of_roofline",
        says="the least time that the bytes at copy bandwidth, or the FLOPs at the rate of a large matrix product, would take, over the median time",
        printed=True,
    ),
    Column(
        "suspect_reason", says="what speaks against the row's absolute time, in words; none: nothing does", printed=True
    ),
    Column("status", printed=True),
    *(column for name, column in _axis.items() if name not in _FIRST),
    Column("verdict"),
    Column("speedup", ("speedup", "speedup_ci_low", "speedup_ci_high")),
    Column("wall_median_us"),
    Column("gb_per_s"),
    Column("share_of_copy"),
    Column("share_of_stream"),
    Column("share_of_short_stream"),
    Column("tflops"),
    Column(
        "noise_floor",
        says="by how much (the logarithm of the ratio) 97.5 % of the implementations that were entered twice in a cell differ from themselves at most, in this bench at such times; at least 0.005",
    ),
    Column("drop_rate"),
    Column("load_cv"),
    Column("converged"),
)


def fields() -> list[dict[str, str | bool]]:
    """Name, group and meaning of every field that a row opens to, and whether it is a number; one that no group names is in the last."""
    return [
        {"name": name, "group": group, "says": about()[name].text, "number": _number(name)}
        for group, name in _grouped()
    ]


def _number(name: str) -> bool:
    return pa.types.is_integer(records.COLUMNS[name]) or pa.types.is_floating(records.COLUMNS[name])


def _grouped() -> Iterator[tuple[str, str]]:
    named = [(group, name) for group, names in _GROUPS for name in names.split()]
    yield from named
    known = {name for _, name in named}
    yield from ((_REST, name) for name in records.COLUMNS if name not in known and name not in LEFT_OUT)
