"""Synthetic rows that fit `records.SCHEMA`, with known speed-ups, for tests of figures and report."""

import pandas as pd
import pyarrow as pa

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.records import COLUMNS, SCHEMA, SCHEMA_VERSION

BAD = "<script>alert(1)</script> & more"


def rows(gpu: bool = True, status: str = "ok") -> pd.DataFrame:
    """A row for every bench, implementation, two sizes and three skews, and one that crashed."""
    found = [_row(b, i, tokens, skew, gpu) for b in BENCHES.values() for i in range(len(b.implementations)) for tokens in (1024, 4096) for skew in (0.0, 0.7, 1.4)]  # fmt: skip
    for row in found if status != "ok" else found[-1:]:
        measured = (
            "median_us",
            "ci_low_us",
            "ci_high_us",
            "speedup",
            "gb_per_s",
            "share_of_copy",
            "tflops",
            "stage_us",
        )
        row |= dict.fromkeys(measured) | {"status": "crashed", "reason": BAD}
    return pa.Table.from_pylist([{n: r.get(n) for n in COLUMNS} for r in found], schema=SCHEMA).to_pandas()


def _row(bench, i, tokens, skew, gpu) -> dict:
    us, size, flops = (
        tokens / 10 / (1 + i / 2) * (1 + skew / 10),
        tokens * 4096,
        tokens * 10**6 * (bench.name == "layer"),
    )
    return {
        "schema_version": SCHEMA_VERSION, "bench": bench.name, "implementation": bench.implementations[i].name, "platform": "cpu", "cell": f"T{tokens}-{skew}",
        "tokens": tokens, "hidden": 2048, "experts": 64, "top_k": 8, "skew": skew, "sampler": "exact", "seed": 17, "status": "ok", "samples": 9,
        "median_us": us, "ci_low_us": us * 0.99, "ci_high_us": us * 1.01, "stage_us": [("router", us / 4), ("experts", us * 3 / 4)] if flops else None,
        "compulsory_bytes": size, "gb_per_s": size / us / 1e3, "share_of_copy": size / us / 4e6, "flops": flops, "tflops": flops / us / 1e6 if flops else None,
        "speedup": 1 + i / 2, "speedup_ci_low": 0.98 + i / 2, "speedup_ci_high": 1.02 + i / 2, "baseline": bench.baseline, "load_cv": skew, "drop_rate": 0.0,
        "padding_waste": 0.0, "copy_gb_per_s": 4000.0, "peak_tflops": 700.0, "gpu_name": "NVIDIA H200" if gpu else None, "cpu_model": "C",
        "torch_version": "2", "started_at": "2026-11-21T06:55", "ended_at": "2026-11-21T06:56", "suspect": False, "converged": True,
    }  # fmt: skip
