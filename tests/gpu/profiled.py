"""Run by hand on a GPU under a profiler or checker: one implementation of a bench, three times, and nothing else of ours.

    METRICS=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
    ncu --clock-control none --kernel-name "regex:(?i)gate|pack|combine|topk|choice" --metrics $METRICS --csv \
        python tests/gpu/profiled.py pack cute 16384 4096 64 8 bf16
    compute-sanitizer --tool racecheck python tests/gpu/profiled.py gate cute 777 0 128 8 fp32

Without `--clock-control none` ncu would set the card's clocks. results/nvidia-h200/ncu.csv holds what it said.
"""

import sys

import torch

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of

bench, name, tokens, hidden, experts, top_k, dtype = sys.argv[1:]
shape = {"tokens": int(tokens), "hidden": int(hidden), "experts": int(experts), "top_k": int(top_k), "dtype": dtype}
cell = cell_of(bench, **{axis: value for axis, value in shape.items() if value})
definition = BENCHES[bench].definition()
inputs = definition.build(cell, 1, "cuda")
call = BENCHES[bench].bind(name, cell, inputs | definition.empty_outputs(cell, inputs))
for _ in range(3):
    call()
torch.cuda.synchronize()
