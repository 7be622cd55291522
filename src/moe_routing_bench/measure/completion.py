"""Makes a whole row of what a worker says of an implementation: identity, rates, shares of ceilings, plausibility, provenance."""

import functools
import math
import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from moe_routing_bench import packages
from moe_routing_bench.benches.bench import find
from moe_routing_bench.benches.plugins import Plugin, bench_of, isolated
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.workload.row_map import row_layout
from moe_routing_kernels.formats import FORMATS

_BANDWIDTHS = ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "stream_gb_per_s", "short_stream_gb_per_s")
LEAST_BUSY = 0.9  # share of long turns in which the device does what is timed; while it waits the card recovers
DERIVED_SLACK = 1.05  # a time this much below the roofline is still believed: ceilings vary as much between processes
_Row = Mapping[Hashable, Any] | Mapping[str, Any]


@functools.cache
def code(bench: str, memory: Any = None) -> dict[str, Any]:
    """Row fields that say which code measures a bench. `memory` has its fingerprint where an earlier job has kept one of the same files."""
    from moe_routing_bench.measure import provenance

    definition, key = find(bench), f"code of {bench}"
    state = packages.state() if memory else None
    known = memory.get(key) if state else None
    if known and known[0] == state:
        fingerprint = known[1]
    else:
        fingerprint = definition.code_fingerprint()
        if state and state == packages.state():
            memory.keep(key, [state, fingerprint])
    return {"code_fingerprint": fingerprint} | provenance.git_state(definition.code_files)


def complete(
    job: Job, platform: str, name: str, outcome: dict[str, Any], started: datetime, ended: datetime, memory: Any = None
) -> dict[str, Any]:
    """A whole row: identity, outcome, what follows from both, provenance. `incorrect` where its numbers contradict each other."""
    from moe_routing_bench.measure import provenance
    from moe_routing_bench.store.contradictions import contradiction
    from moe_routing_bench.store.rows import SCHEMA_VERSION

    bench = bench_of(job)
    row = dict(job.cell.values) | {
        "schema_version": SCHEMA_VERSION,
        "bench": bench.name,
        "implementation": name,
        "platform": platform,
        "cell": job.cell.key,
        "cell_hash": job.hash,
        "host": os.uname().nodename,
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "started_at": started.isoformat(timespec="milliseconds"),
        "ended_at": ended.isoformat(timespec="milliseconds"),
    }
    row |= code(bench.name, memory) | outcome
    row["isolated"] = bool(isolated(job, [name]))
    implementation = bench[name]
    if isinstance(implementation, Plugin):
        row |= {"plugin": implementation.reference, "implementation_version": implementation.version()}
    if implementation.peer:
        row["implementation_version"] = provenance.version(implementation.peer.distribution)
    if row["status"] in ("ok", "below_roofline"):
        row |= derived(job, row)
        # The worker, which implementations share, has no honest way to such a row. Dates are another matter: clocks are set.
        if wrong := contradiction(row | {"started_at": None}):
            failed = {"status": "incorrect", "reason": f"numbers contradict each other: {wrong}"}
            return complete(job, platform, name, failed, started, ended, memory)
    return row


def derived(job: Job, row: dict[str, Any]) -> dict[str, Any]:
    """Rates, shares of the measured ceilings, and the plausibility check."""
    cell, seconds = job.cell, row["median_us"] / 1e6
    gb_per_s, tflops = row["compulsory_bytes"] / seconds / 1e9, row["flops"] / seconds / 1e12
    fields = {
        "tokens_per_s": cell.tokens / seconds,
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / row["copy_gb_per_s"],
        "mixed_gb_per_s": mixed_gb_per_s(row),
    }
    floors = [row["flops"] / row["peak_tflops"] / 1e6] if row["flops"] else []
    if fields["mixed_gb_per_s"]:
        floors.append(row["compulsory_bytes"] / fields["mixed_gb_per_s"] / 1e3)
    if floors:
        fields |= {"roofline_us": max(floors), "share_of_roofline": max(floors) / row["median_us"]}
    for stream in ("stream", "short_stream"):
        if row.get(f"{stream}_gb_per_s"):
            fields[f"share_of_{stream}"] = gb_per_s / row[f"{stream}_gb_per_s"]
    if row["flops"]:
        fields |= {"tflops": tflops, "share_of_peak": tflops / row["peak_tflops"]}
        if row.get("sustained_tflops"):
            fields["share_of_sustained"] = tflops / row["sustained_tflops"]
        if row.get("dense_us"):
            fields["over_dense"] = row["median_us"] / row["dense_us"]
    if passes := find(cell.bench).row_passes:
        form, packed = FORMATS[cell.dtype], FORMATS[cell.get("packed") or cell.dtype]
        strict = passes * (form.bits + cell.top_k * packed.bits) // 8 * cell.hidden
        fields |= {"bytes_per_token_strict": strict, "bw_gibps_strict": strict * cell.tokens / seconds / 2**30}
    if row.get("energy_mj"):
        fields["energy_mj_per_token"] = row["energy_mj"] / cell.tokens
    fields |= _waste(job, row)
    doubts = [row["suspect_reason"]] if row.get("suspect_reason") else []
    if row.get("calibration_drift", 0) > 0.02:
        doubts.append(f"ceilings drifted {row['calibration_drift']:.1%} during the cell")
    if row.get("turns") == "long" and row.get("busy_share", 1) < LEAST_BUSY:
        doubts.append(
            f"the GPU was busy for {row['busy_share']:.0%} of its long turns, and rested from the power limit"
        )
    if others := row.get("other_gpu_processes"):
        doubts.append(f"other processes on the GPU: {others}")
    if doubts:
        fields |= {"suspect": True, "suspect_reason": "; ".join(doubts)}
    ceiling = max(row.get(n) or 0 for n in _BANDWIDTHS)
    floor = max(row["compulsory_bytes"] / ceiling / 1e3, row["flops"] / row["peak_tflops"] / 1e6)
    if row["device"] != "cpu" and row["median_us"] * DERIVED_SLACK < floor and row["cold_sets"] > 1:
        fields |= {
            "status": "below_roofline",
            "reason": f"{row['median_us']:.2f} us is below the roofline of {floor:.2f} us",
        }
    return fields


def _waste(job: Job, row: dict[str, Any]) -> dict[str, Any]:
    """Rows of the layout in use over kept assignments, minus one; a composite's layout is the implementation's."""
    if row.get("layout") is None:
        return {}
    layout, loads = replace(row_layout(job.cell), layout=row["layout"]), row["expert_load"]
    kept = sum(min(load, layout.limit) for load in loads)
    return {"rows": layout.used(loads), "padding_waste": layout.used(loads) / max(1, kept) - 1}


def mixed_gb_per_s(row: _Row) -> float | None:
    """The bandwidth that the row's mix of reads and writes can reach, GB/s, or None: on a CPU, and where the working set may be in a cache (`cold`).

    A copy reads as much as it writes. Work that only reads, as a decoded token reads weights, can be faster than a copy; work that mostly
    writes is slower. So a share of a copy may exceed 100 %, and says nothing of how near a limit is.

    The highest of what was measured for the mix: `stream_gb_per_s`, where there is one; the time per byte interpolated in the share of reads,
    from a copy to reads or writes alone; and, for mixes that mostly write, the copy. In stored rows of H200 and H100 streams of pack and
    combine are 0 to 15 % below the others, 0 to 5 % where they mostly read.
    """
    cold = row.get("cold")
    if cold is None or cold != cold or not cold:  # pandas has NaN for null
        return None
    moved = row["read_bytes"] + row["write_bytes"]
    alone, copy = (row["read_bytes"] - row["write_bytes"]) / moved, row["copy_gb_per_s"]
    mixed = 1 / ((1 - abs(alone)) / copy + abs(alone) / row["read_gb_per_s" if alone > 0 else "write_gb_per_s"])
    stream = row.get("stream_gb_per_s")
    known = [
        mixed,
        *([copy] if alone <= 0 else []),
        *([stream] if stream is not None and not math.isnan(stream) else []),
    ]
    return float(max(known))


def share_of_mixed(row: _Row) -> float:
    """`gb_per_s` over `mixed_gb_per_s`; NaN where there is none."""
    ceiling = mixed_gb_per_s(row)
    return math.nan if ceiling is None else float(row["gb_per_s"] / ceiling)
