"""The row schema, in one place, and how rows reach a file: written to a temporary name, checked, then renamed.

One row per (cell, implementation). A cell's file also stores the spec that it was measured for, so that a stale file is
noticed even when Snakemake has lost its own records.
"""

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moe_routing_bench import files
from moe_routing_bench.errors import UserError, bad, writing
from moe_routing_bench.grid import Job, spec_hash

SCHEMA_VERSION = 2
STATUSES = ("ok", "incorrect", "unsupported", "out_of_memory", "crashed", "timeout", "below_roofline")

_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_STAGES = pa.map_(_S, _F)
COLUMNS: dict[str, pa.DataType] = {
    # identity
    "schema_version": pa.int32(), "bench": _S, "implementation": _S, "platform": _S, "cell": _S, "cell_hash": _S,
    "model": _S, "phase": _S, "tokens": _I, "hidden": _I, "intermediate": _I, "experts": _I, "top_k": _I,
    "capacity_factor": _F, "skew": _F, "sampler": _S, "trace": _S, "dtype": _S, "layout": _S, "router": _S, "seed": _I,
    "code_fingerprint": _S,
    # outcome
    "status": _S, "reason": _S, "converged": _B, "stop_reason": _S, "suspect": _B, "suspect_reason": _S,
    # time, in microseconds; device time unless the name says wall
    "median_us": _F, "ci_low_us": _F, "ci_high_us": _F, "min_us": _F, "p5_us": _F, "q1_us": _F, "q3_us": _F, "p95_us": _F,
    "max_us": _F, "mad_us": _F, "samples": _I, "blocks": _I, "set_aside": _I, "set_aside_reason": _S, "samples_us": pa.list_(_F), "set_aside_samples_us": pa.list_(_F),
    "block_medians_us": pa.list_(_F), "wall_median_us": _F, "warm_median_us": _F, "stage_us": _STAGES, "timer": _S,
    "calls_per_sample": _I, "cold_sets": _I, "warmup_calls": _I,
    # derived
    "tokens_per_s": _F, "compulsory_bytes": _I, "read_bytes": _I, "write_bytes": _I, "gb_per_s": _F, "bw_gibps_strict": _F,
    "bytes_per_token_strict": _I, "share_of_copy": _F, "share_of_stream": _F, "share_of_short_stream": _F, "flops": _I, "tflops": _F, "share_of_peak": _F,
    "roofline_us": _F, "share_of_roofline": _F, "speedup": _F, "speedup_ci_low": _F, "speedup_ci_high": _F, "baseline": _S,
    "peak_memory_bytes": _I, "rows": _I, "padding_waste": _F,
    # routing, of the first input set
    "expert_load": pa.list_(_I), "load_cv": _F, "load_max_over_mean": _F, "load_gini": _F, "active_experts": _I,
    "dead_experts": _I, "drop_rate": _F, "token_drop_rate": _F, "gate_entropy": _F, "zipf_exponent": _F, "capacity": _I,
    # correctness
    "rel_l2_error": _F, "max_abs_error": _F, "tolerance": _F, "mismatches": _I, "ties": _I,
    # calibration of the same process
    "copy_gb_per_s": _F, "read_gb_per_s": _F, "write_gb_per_s": _F, "stream_gb_per_s": _F, "short_stream_gb_per_s": _F, "peak_tflops": _F, "launch_us": _F,
    "graph_node_us": _F, "calibration_drift": _F,
    # provenance
    "git_sha": _S, "git_dirty": _B, "started_at": _S, "ended_at": _S, "host": _S, "device": _S, "gpu_name": _S, "gpu_uuid": _S,
    "driver": _S, "sm_clock_mhz": _I, "memory_clock_mhz": _I, "power_limit_w": _F, "temperature_c": _I, "throttle_bits": _I,
    "other_gpu_processes": _I, "cpu_model": _S, "cpu_threads": _I, "python_version": _S, "torch_version": _S, "cuda_version": _S,
    "triton_version": _S, "cutlass_dsl_version": _S, "implementation_version": _S, "worker_mode": _S, "measure_seconds": _F,
    "restarts": _I,
}  # fmt: skip
SCHEMA = pa.schema(list(COLUMNS.items()))
_SPEC = b"moe_routing_bench.spec"


def write(path: Path, rows: Sequence[Mapping[str, Any]], spec: str) -> None:
    """Write rows (missing columns null, unknown ones an error) as one Parquet file; it appears whole or not at all."""
    unknown = {name for row in rows for name in row} - set(COLUMNS)
    if unknown:
        raise KeyError(f"columns not in the schema: {sorted(unknown)}")
    table = pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS} for row in rows], schema=SCHEMA)
    write_table(path, table.replace_schema_metadata({_SPEC: spec.encode()}))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table under a temporary name in the same folder, then rename it."""
    with files.replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def check_writable(path: Path) -> None:
    """Raise `UserError`, before any work is done for it, for an output that could not be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # replacing a link to a folder would succeed
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()


def read(path: Path) -> pa.Table:
    """Read rows of this schema version. Raises `UserError` for a missing, unreadable or older file."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).rsplit(": ", 1)[-1][:60]
        hint = f"run `snakemake` to measure it again ({reason})" if path.exists() else "run `snakemake` first"
        raise bad("measurements", str(path), "a readable Parquet file", hint) from error
    again = "delete the file and run `snakemake` again"
    versions = set(table["schema_version"].to_pylist()) if "schema_version" in table.column_names else {None}
    if others := versions - {SCHEMA_VERSION}:
        raise bad("schema_version", min(others, key=str), f"{SCHEMA_VERSION} in {path}", again)
    types = dict(zip(table.column_names, table.schema.types, strict=True))
    if wrong := sorted(name for name in types | COLUMNS if types.get(name) != COLUMNS.get(name)):
        names = ", ".join(wrong[:5])
        raise bad(
            f"columns of {path}", f"{len(wrong)} absent, unknown or of another type: {names}", "the schema", again
        )
    if not len(table):
        raise bad("measurements", f"no rows in {path}", "at least one", again)
    return table.select(list(COLUMNS))


def spec_of(table: pa.Table) -> str | None:
    """The spec that a cell's file was measured for."""
    return (table.schema.metadata or {}).get(_SPEC, b"").decode(errors="replace") or None


def collect(files: Mapping[Path, Job]) -> pa.Table:
    """All rows of the jobs' files, each checked against the spec it should have been measured for.

    Raises `UserError` naming every file that is unreadable, stale or incomplete; nothing is skipped.
    """
    tables, problems = [], []
    for path, job in files.items():
        try:
            table = read(path)
        except UserError as error:
            problems.append(str(error))
            continue
        if (spec := spec_of(table)) != job.spec:
            problems.append(f"{path} was measured for spec {spec_hash(spec or '')}, the config asks for {job.hash}")
        elif sorted(table["implementation"].to_pylist()) != sorted(job.implementations):
            problems.append(
                f"{path} holds {table['implementation'].to_pylist()}, asked were {list(job.implementations)}"
            )
        tables.append(table)
    if problems:
        raise bad(
            "cell files", f"{len(problems)} that do not fit: " + "; ".join(problems[:5]), "files of this config",
            "measure them again: snakemake --forcerun measure, or delete them and run snakemake",
        )  # fmt: skip
    return pa.concat_tables(t.replace_schema_metadata(None) for t in tables)


def orphans(folder: Path, wanted: Iterable[Path]) -> list[Path]:
    """Cell files below `folder` that no job of the config asks for, sorted."""
    return sorted(set(folder.glob("cells/*/*.parquet")) - set(wanted))
