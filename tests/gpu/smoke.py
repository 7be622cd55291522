"""Run by hand on a GPU: one cell of every bench through the real supervisor, all implementations; prints what came out."""

import sys
import time

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure.supervisor import measure

AXES = {
    "tokens": 16384,
    "hidden": 4096,
    "intermediate": 1024,
    "experts": 128,
    "top_k": 8,
    "skew": 0.7,
}
SHOWN = (
    "status",
    "reason",
    "median_us",
    "wall_median_us",
    "warm_median_us",
    "timer",
    "cold_sets",
    "converged",
    "stop_reason",
    "speedup",
    "share_of_copy",
    "share_of_stream",
    "copy_gb_per_s",
    "stream_gb_per_s",
    "tflops",
    "peak_tflops",
    "calibration_drift",
    "launch_us",
    "graph_node_us",
    "measure_seconds",
    "peak_memory_bytes",
    "stage_us",
)

for name, bench in BENCHES.items():
    for dtype, factor in (("fp32", None), ("bf16", None)) if name == "gate" else (("bf16", None), ("bf16", 1.25)):
        cell = cell_of(name, dtype=dtype, capacity_factor=factor, **AXES)
        names = tuple(i.name for i in bench.implementations if "--compile" in sys.argv or i.name != "torch_compile")
        start = time.perf_counter()
        for row in measure(Job(cell, names, Settings(max_seconds=1.0))):
            print(name, dtype, factor, row["implementation"], {n: row.get(n) for n in SHOWN if row.get(n) is not None})
        print(f"-- {name} {time.perf_counter() - start:.1f} s", flush=True)
