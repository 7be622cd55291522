"""How the rows of a cell reach a file: whole or not at all, with the spec that they were measured for.

This is all of the row schema that a measurement depends on: what it measures. The axes come from the cell; `records` joins both.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_routing_bench.store.parquet import write_table

SCHEMA_VERSION = 5
STATUSES = ("ok", "incorrect", "unsupported", "out_of_memory", "crashed", "timeout", "below_roofline")
SPEC = b"moe_routing_bench.spec"
SUMMARY = b"moe_routing_bench.summary"  # the columns below of every row, as JSON: what a reader of ten thousand cells needs of each
NULLS = b"moe_routing_bench.null_columns"  # those that a cell's file leaves out because no row has a value, as JSON
SUMMARISED = (
    *("schema_version", "bench", "cell", "implementation", "status", "reason", "measure_seconds"),
    *("code_fingerprint", "plugin_fingerprint"),
)

_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_STAGES = pa.map_(_S, _F)
IDENTITY: dict[str, pa.DataType] = {
    "schema_version": pa.int32(),
    "bench": _S,
    "implementation": _S,
    "platform": _S,
    "cell": _S,
    "cell_hash": _S,
    "code_fingerprint": _S,
}
MEASURED: dict[str, pa.DataType] = {
    # outcome
    "status": _S,
    "reason": _S,
    "converged": _B,
    "stop_reason": _S,
    "suspect": _B,
    "suspect_reason": _S,
    # time, in microseconds; device time unless the name says wall
    "median_us": _F,
    "ci_low_us": _F,
    "ci_high_us": _F,
    "min_us": _F,
    "p5_us": _F,
    "q1_us": _F,
    "q3_us": _F,
    "p95_us": _F,
    "max_us": _F,
    "mad_us": _F,
    "samples": _I,
    "blocks": _I,
    "set_aside": _I,
    "set_aside_reason": _S,
    "samples_us": pa.list_(_F),
    "set_aside_samples_us": pa.list_(_F),
    "block_medians_us": pa.list_(_F),
    "block_turns": pa.list_(_I),
    "wall_median_us": _F,
    "warm_median_us": _F,
    "stage_us": _STAGES,
    "timer": _S,
    "launch_hidden": _F,
    "busy_share": _F,
    "stage_timer": pa.map_(_S, _S),
    "turns": _S,
    "calls_per_sample": _I,
    "cold_sets": _I,
    "cold": _B,
    "warmup_calls": _I,
    "settled": _B,
    "block_clocks_mhz": pa.list_(_I),
    "block_powers_w": pa.list_(_F),
    "energy_mj": _F,
    "energy_mj_per_token": _F,
    # derived
    "tokens_per_s": _F,
    "compulsory_bytes": _I,
    "read_bytes": _I,
    "write_bytes": _I,
    "gb_per_s": _F,
    "bw_gibps_strict": _F,
    "bytes_per_token_strict": _I,
    "share_of_copy": _F,
    "share_of_stream": _F,
    "share_of_short_stream": _F,
    "flops": _I,
    "tflops": _F,
    "share_of_peak": _F,
    "share_of_sustained": _F,
    "over_dense": _F,
    "mixed_gb_per_s": _F,
    "roofline_us": _F,
    "share_of_roofline": _F,
    "speedup": _F,
    "speedup_ci_low": _F,
    "speedup_ci_high": _F,
    "speedup_p": _F,
    "baseline": _S,
    "best_speedup": _F,
    "best_speedup_ci_low": _F,
    "best_speedup_ci_high": _F,
    "best_speedup_p": _F,
    "best_other": _S,
    "twin_speedup": _F,
    "twin_speedup_ci_low": _F,
    "twin_speedup_ci_high": _F,
    "twin_speedup_p": _F,
    "twin_median_us": _F,
    # judged over all rows of a run, when they are collected
    "noise_floor": _F,
    "verdict": _S,
    "best_verdict": _S,
    "anomaly": _S,
    "again": _S,
    "again_us": _F,
    "again_ci_low_us": _F,
    "again_ci_high_us": _F,
    "no_interval": _S,
    "peak_memory_bytes": _I,
    "workspace_bytes": _I,
    "transient_bytes": _I,
    "rows": _I,
    "padding_waste": _F,
    # routing, of the first input set
    "expert_load": pa.list_(_I),
    "load_cv": _F,
    "load_max_over_mean": _F,
    "load_gini": _F,
    "active_experts": _I,
    "dead_experts": _I,
    "mean_active_experts": _F,
    "drop_rate": _F,
    "token_drop_rate": _F,
    "gate_entropy": _F,
    "zipf_exponent": _F,
    "capacity": _I,
    # correctness
    "rel_l2_error": _F,
    "max_abs_error": _F,
    "tolerance": _F,
    "mismatches": _I,
    "ties": _I,
    "check_nonce": _I,
    # calibration of the same process
    "copy_gb_per_s": _F,
    "read_gb_per_s": _F,
    "write_gb_per_s": _F,
    "stream_gb_per_s": _F,
    "short_stream_gb_per_s": _F,
    "peak_tflops": _F,
    "sustained_tflops": _F,
    "dense_us": _F,
    "launch_us": _F,
    "graph_node_us": _F,
    "calibration_drift": _F,
    "ceilings_at": _S,
    # provenance
    "git_sha": _S,
    "git_dirty": _B,
    "started_at": _S,
    "ended_at": _S,
    "host": _S,
    "device": _S,
    "gpu_name": _S,
    "gpu_uuid": _S,
    "driver": _S,
    "sm_clock_mhz": _I,
    "memory_clock_mhz": _I,
    "power_limit_w": _F,
    "temperature_c": _I,
    "throttle_bits": _I,
    "other_gpu_processes": _I,
    "cpu_model": _S,
    "cpu_threads": _I,
    "python_version": _S,
    "torch_version": _S,
    "cuda_version": _S,
    "triton_version": _S,
    "cutlass_dsl_version": _S,
    "implementation_version": _S,
    "worker_mode": _S,
    "measure_seconds": _F,
    "restarts": _I,
    "slurm_job_id": _S,
    "configuration": _S,
    "plugin": _S,
    "plugin_fingerprint": _S,
    "isolated": _B,
    "handover_us": _F,
    # a number per rank, of a bench on several
    "rank_backend": _S,
    "rank_devices": pa.list_(_S),
    "rank_medians_us": pa.list_(_F),
    "rank_tokens": pa.list_(_I),
    "rank_rows": pa.list_(_I),
    "rank_all_bytes": pa.list_(_I),
    "rank_wire_bytes": pa.list_(_I),
    "rank_deduplicated_bytes": pa.list_(_I),
    "barrier_us": _F,
    "peer_copy_gb_per_s": _F,
}
# Columns that were added to this version of the schema: a file that lacks one reads as if it were null.
LATER = (
    *("slurm_job_id", "configuration", "energy_mj", "energy_mj_per_token", "dense_us", "over_dense"),
    *("anomaly", "again", "again_us", "again_ci_low_us", "again_ci_high_us", "plugin", "plugin_fingerprint"),
    *("busy_share", "block_turns", "workspace_bytes", "transient_bytes", "mixed_gb_per_s", "mean_active_experts"),
    *("isolated", "handover_us", "ceilings_at", "no_interval"),
    *("rank_backend", "rank_devices", "rank_medians_us", "rank_tokens", "rank_rows"),
    *("rank_all_bytes", "rank_wire_bytes", "rank_deduplicated_bytes", "barrier_us", "peer_copy_gb_per_s"),
)
_AXIS_TYPES = {int: _I, float: _F, str: _S}


def write(path: Path, rows: Sequence[Mapping[str, Any]], spec: str) -> None:
    """Write the rows of a cell: the columns of `IDENTITY` and `MEASURED` of which a row has a value, and every axis that they hold.

    The names of the other columns are in the metadata, so that a file which lost a column differs from one without a value for it: to decode
    a third of the columns, which are null, takes a quarter of the time. `median_us` stays, because readers of any version look for it. Raises KeyError for a column that is neither, and of another type than an axis has.
    """
    types = IDENTITY | _axes(rows) | MEASURED
    nulls = [name for name in MEASURED if name != "median_us" and all(row.get(name) is None for row in rows)]
    types = {name: kind for name, kind in types.items() if name not in nulls}
    table = pa.Table.from_pylist(
        [{name: row.get(name) for name in types} for row in rows], schema=pa.schema(list(types.items()))
    )
    summary = json.dumps([[row.get(name) for name in SUMMARISED] for row in rows], separators=(",", ":"))
    metadata = {SPEC: spec.encode(), SUMMARY: summary.encode(), NULLS: json.dumps(nulls).encode()}
    write_table(path, table.replace_schema_metadata(metadata), schema=False)


def _axes(rows: Sequence[Mapping[str, Any]]) -> dict[str, pa.DataType]:
    """The types of the axes that a value says; an axis that is None throughout is left to `records`."""
    arrays = {}
    for name, value in ((name, value) for row in rows for name, value in row.items()):
        if name not in IDENTITY and name not in MEASURED and value is not None:
            if type(value) not in _AXIS_TYPES:
                raise KeyError(f"column not in the schema: {name}, of {type(value).__name__}")
            arrays[name] = _AXIS_TYPES[type(value)]
    return arrays
