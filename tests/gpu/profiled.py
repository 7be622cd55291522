"""Run by hand on a GPU under a profiler or checker: one implementation of a bench, three times, and nothing else of ours.

    METRICS=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
    ncu --clock-control none --kernel-name "regex:(?i)gate|pack|combine|topk|choice" --metrics $METRICS --csv \
        python tests/gpu/profiled.py pack cute 16384 4096 64 8 bf16
    compute-sanitizer --tool racecheck python tests/gpu/profiled.py gate cute 777 0 128 8 fp32

Without `--clock-control none` ncu would set the card's clocks. results/nvidia-h200/ncu.csv holds what it said.
"""

import sys

import torch

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.grid import Cell, project

bench, name, tokens, hidden, experts, top_k, dtype = sys.argv[1:]
cell = project(
    Cell(
        bench, 17, tokens=int(tokens), hidden=int(hidden), experts=int(experts), top_k=int(top_k), dtype=dtype,
        skew=0.0, sampler="exact", router="softmax_topk_renorm", layout="compact",
    )
)  # fmt: skip
definition, way = BENCHES[bench].definition(), BENCHES[bench][name]
inputs = definition.build(cell, 1, "cuda")
call = BENCHES[bench].load(name).prepare(cell, inputs, definition.empty_outputs(cell, inputs), **way.options)
for _ in range(3):
    call()
torch.cuda.synchronize()
