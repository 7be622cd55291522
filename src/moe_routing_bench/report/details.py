"""What a row of the report opens to: every field of the schema but the lists of samples, in groups."""

from collections.abc import Iterator

import pyarrow as pa

from moe_routing_bench.config.axes import AXES
from moe_routing_bench.store.records import COLUMNS, about

LEFT_OUT = (
    "samples_us", "set_aside_samples_us", "block_medians_us", "block_clocks_mhz", "block_powers_w", "expert_load",
)  # fmt: skip  # long lists: `samples` has the first two in few bytes, the Parquet file all
_REST = "Machine and versions"
_GROUPS = (
    ("Cell", "bench implementation cell " + " ".join(AXES)),
    (
        "Code",
        "git_sha git_dirty code_fingerprint cell_hash schema_version implementation_version configuration plugin plugin_fingerprint",
    ),
    (
        "Outcome",
        "status reason suspect suspect_reason anomaly again again_us again_ci_low_us again_ci_high_us converged stop_reason",
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
        "stream_gb_per_s short_stream_gb_per_s peak_tflops sustained_tflops launch_us graph_node_us calibration_drift peak_memory_bytes",
    ),
    ("Checks", "rel_l2_error max_abs_error tolerance mismatches ties check_nonce"),
    (
        "Routing",
        "rows padding_waste load_cv load_max_over_mean load_gini active_experts dead_experts drop_rate token_drop_rate gate_entropy "
        "zipf_exponent capacity",
    ),
)


def fields() -> list[dict[str, str | bool]]:
    """Name, group and meaning of every field that a row opens to, and whether it is a number; one that no group names is in the last."""
    return [
        {"name": name, "group": group, "says": about()[name].text, "number": _number(name)}
        for group, name in _grouped()
    ]


def _number(name: str) -> bool:
    return pa.types.is_integer(COLUMNS[name]) or pa.types.is_floating(COLUMNS[name])


def _grouped() -> Iterator[tuple[str, str]]:
    named = [(group, name) for group, names in _GROUPS for name in names.split()]
    yield from named
    known = {name for _, name in named}
    yield from ((_REST, name) for name in COLUMNS if name not in known and name not in LEFT_OUT)
