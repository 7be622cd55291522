"""Synthetic rows that fit `records.SCHEMA`, with known speed-ups, for tests of figures and report."""

import functools
import itertools

import pandas as pd
import pyarrow as pa

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.store import records
from moe_routing_bench.store.records import COLUMNS, SCHEMA
from moe_routing_bench.store.rows import SCHEMA_VERSION

BAD = "<script>alert(1)</script> & more"
_TIMES = ("median_us", "ci_low_us", "ci_high_us", "speedup", "gb_per_s", "share_of_copy", "tflops", "stage_us", "flops")


@functools.cache
def _rows(gpu: bool, status: str) -> pd.DataFrame:
    found = [
        _row(bench, i, tokens, skew, gpu)
        for bench in BENCHES.values()
        for i in range(len(bench.implementations))
        for tokens in (1024, 4096)
        for skew in (0.0, 0.7, 1.4)
    ]
    for row in found if status != "ok" else found[-1:]:
        row |= dict.fromkeys(_TIMES) | {"status": "crashed", "reason": BAD}
    return frame(*found)


def rows(gpu: bool = True, status: str = "ok") -> pd.DataFrame:
    """A row for every bench, implementation, two sizes and three skews, and one that crashed."""
    return _rows(gpu, status).copy()


def some(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of Triton, CuTe DSL, and the first four and the last implementation of each bench: half as many, of all kinds."""
    kept = {
        (bench.name, one.name)
        for bench in BENCHES.values()
        for one in bench.implementations
        if one in (*bench.implementations[:4], bench.implementations[-1]) or one.name in ("triton", "cute")
    }
    return table[[one in kept for one in zip(table["bench"], table["implementation"], strict=True)]]


_CELLS = itertools.count()


def one(bench: str, implementation: str = "cute", **values: object) -> dict[str, object]:
    """A row of a cell of its own with these values and no others; axes that nobody asks for are those that its bench does not read."""
    known = {
        "status": "ok",
        "gpu_uuid": "GPU-1",
        "host": "h",
        "cell": f"c{next(_CELLS)}",
        "baseline": BENCHES[bench].baseline,
    }
    return known | {"suspect": False, "converged": True, "bench": bench, "implementation": implementation} | values


def frame(*found: dict[str, object]) -> pd.DataFrame:
    """Such rows as the table of a report."""
    return records.frame(pa.Table.from_pylist([{n: r.get(n) for n in COLUMNS} for r in found], schema=SCHEMA))


def _stages(bench, one, us) -> list[tuple[str, float]] | None:
    """Equal times of the parts of a composite: a fused one in place of its stages."""
    fused = {name.split("+")[0]: name for name in one.parts if "+" in name}
    inside = {stage for name in fused.values() for stage in name.split("+")[1:]}
    parts = [fused.get(stage.name, stage.name) for stage in bench.stages if stage.name not in inside]
    return [(part, us / len(parts)) for part in parts] or None


def _row(bench, i, tokens, skew, gpu) -> dict:
    us, size = tokens / 10 / (1 + i / 2) * (1 + skew / 10), tokens * 4096
    flops = tokens * 10**6 * ("intermediate" in bench.axes)
    formats = {name: "bf16" for name in ("dtype", "packed", "weights") if name in bench.axes}
    experts = {"intermediate": 1024, "activation": "swiglu"} if "intermediate" in bench.axes else {}
    return (
        formats
        | experts
        | {
            "schema_version": SCHEMA_VERSION,
            "bench": bench.name,
            "implementation": bench.implementations[i].name,
            "platform": "cpu",
            "cell": f"T{tokens}-{skew}",
            "tokens": tokens,
            "hidden": 2048,
            "experts": 64,
            "top_k": 8,
            "skew": skew,
            "sampler": "exact",
            "seed": 17,
            "phase": "prefill",
            "status": "ok",
            "samples": 9,
            "median_us": us,
            "ci_low_us": us * 0.99,
            "ci_high_us": us * 1.01,
            "stage_us": _stages(bench, bench.implementations[i], us),
            "compulsory_bytes": size,
            "gb_per_s": size / us / 1e3,
            "share_of_copy": size / us / 4e6,
            "flops": flops,
            "tflops": flops / us / 1e6 if flops else None,
            "speedup": 1 + i / 2,
            "speedup_ci_low": 0.98 + i / 2,
            "speedup_ci_high": 1.02 + i / 2,
            "baseline": bench.baseline,
            "load_cv": skew,
            "drop_rate": 0.0,
            "padding_waste": 0.0,
            "copy_gb_per_s": 4000.0,
            "peak_tflops": 700.0,
            "gpu_name": "NVIDIA H200" if gpu else None,
            "gpu_uuid": "GPU-1" if gpu else None,
            "host": "h",
            "cpu_model": "C",
            "torch_version": "2",
            "started_at": "2026-11-21T06:55",
            "ended_at": "2026-11-21T06:56",
            "suspect": False,
            "converged": True,
        }
    )


def by_tokens() -> pd.DataFrame:
    """Times of a routing stage by two implementations for three numbers of tokens, with what figures and findings read."""
    timed = {
        "experts": 8,
        "ci_low_us": 1.0,
        "ci_high_us": 9.0,
        "best_verdict": "faster",
        "best_speedup": 1.5,
        "best_speedup_ci_low": 1.4,
        "best_speedup_ci_high": 1.6,
        "gpu_uuid": "GPU-1",
    }
    return frame(
        *(
            one("routing", name, cell=f"{tokens}", tokens=tokens, median_us=us * tokens, **timed)
            for tokens in (64, 512, 4096)
            for name, us in (("cute", 3.0), ("triton", 5.0))
        )
    )
