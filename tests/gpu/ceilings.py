"""Run by hand on a GPU: how the measured ceilings depend on the size of the buffers. Prints CSV.

The evidence for the buffer size in measure/calibration.py; the table in docs/kernels.md is this output, kept in
results/nvidia-h200/ceilings.csv.
"""

import statistics
import sys
from functools import partial

import torch

from moe_routing_bench.measure import provenance, stream_kernel

MIXES = ((1, 0), (8, 1), (2, 1), (1, 1), (1, 2), (1, 8))


def gb_per_s(call, moved: int) -> float:
    """Median of nine pairs of calls, by events."""
    times = []
    for _ in range(10):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 2e3)
    return moved / statistics.median(times[1:]) / 1e9


def main() -> None:
    """Copy, fill and the stream kernel (best of its configurations) at four sizes, one allocation for all."""
    versions, name = provenance.versions(), torch.cuda.get_device_name()
    print("gpu_name,torch_version,triton_version,buffer_gib,kind,reads,writes,config,gb_per_s")
    about = f"{name},{versions['torch_version']},{versions['triton_version']}"
    source, target = stream_kernel.buffers(4 << 30)
    for gib in (0.25, 0.5, 1, 2, 4):
        elements = int(gib * 2**29)
        s, t = source[:elements], target[:elements]
        print(f"{about},{gib},copy,1,1,,{gb_per_s(partial(t.copy_, s), 4 * elements):.0f}")
        print(f"{about},{gib},fill,0,1,,{gb_per_s(partial(t.fill_, 1), 2 * elements):.0f}")
        for mix in MIXES:
            for config in stream_kernel.CONFIGS:
                run = partial(stream_kernel.launch, s, t, *mix, *config)
                rate = gb_per_s(run, run())
                print(f"{about},{gib},stream,{mix[0]},{mix[1]},{config[0]}x{config[1]},{rate:.0f}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
