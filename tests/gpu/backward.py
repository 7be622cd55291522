"""Run by hand on a GPU: how long each direction of pack and combine takes. Prints CSV.

Cold-L2 microseconds (CUDA graphs over rotating buffer sets) beside what one writes in plain torch, and the share of the
copy bandwidth that the compulsory bytes reach. Kept in results/nvidia-h200/backward.csv, quoted in docs/kernels.md:
`PYTHONPATH=src:tests/ops python tests/gpu/backward.py`.
"""

import math
import statistics
from collections.abc import Callable

import torch
from ops_cases import data, routing
from torch import Tensor

from moe_routing_bench.measure import provenance
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.ops import cuda

COLD_BYTES = 5 * 60e6  # rotate over at least five times the L2 of an H200
# tokens, hidden, experts, top_k, layout, capacity factor
SHAPES = (
    (16384, 4096, 128, 8, "compact", None),
    (16384, 4096, 128, 2, "compact", None),
    (16384, 2048, 128, 8, "compact", None),
    (16384, 2048, 128, 8, "block128", None),
    (16384, 4096, 64, 8, "padded", 1.0),
    (1024, 4096, 128, 8, "compact", None),
    (64, 4096, 128, 8, "compact", None),
)


def microseconds(runs: list[Callable[[], object]], expected: float, samples: int = 15) -> float:
    """Median time of one call; `expected` microseconds size the graph to at least 300."""
    runs[0]()
    rounds = math.ceil(300 / (expected * len(runs)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs * rounds:
            run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / rounds / len(runs))
    return statistics.median(times)


def in_torch(order: Tensor, inverse: Tensor) -> dict[str, Callable]:
    """What one writes without these operators; index_add_ has atomics, so its sums may differ from run to run."""
    top_k = inverse.shape[1]
    token, kept = order.clamp_min(0).long() // top_k, (order >= 0)[:, None]
    rows = inverse.clamp_min(0).long()

    def pack_backward(grad: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(grad).index_add_(0, token, torch.where(kept, y, 0))

    def combine_backward(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.where(inverse >= 0, weights, 0).view(-1)
        scale = flat[order.clamp_min(0).long()][:, None]
        d_y = torch.where(kept, grad[token] * scale, 0).to(y.dtype)
        return d_y, torch.where(inverse >= 0, (y[rows] * grad[:, None]).sum(-1, dtype=torch.float32), 0)

    return {"pack_backward": pack_backward, "combine_backward": combine_backward}


def measure(shape: tuple, copy: float, about: str) -> None:
    """One line a direction."""
    tokens, hidden, experts, top_k, layout, factor = shape
    order, inverse = routing(tokens, experts, top_k, layout, factor, device="cuda")
    rows, kept, size = len(order), int((inverse >= 0).sum()), 2 * hidden
    torch.cuda.empty_cache()
    sets = [
        data(rows, hidden, inverse, torch.bfloat16) for _ in range(min(64, math.ceil(COLD_BYTES / (tokens * size)) + 1))
    ]
    unit = torch.ones(inverse.shape, device="cuda")
    plain = in_torch(order, inverse)
    # name: the call of (x or gradient (T, H), y (R, H), weights), rows of `size` bytes read and written
    directions = {
        "pack": (lambda x, y, w: cuda.pack(x, order, inverse), tokens + rows),
        "pack_backward": (lambda g, y, w: cuda.combine(y, inverse, unit, None), kept + tokens),
        "combine": (lambda x, y, w: cuda.combine(y, inverse, w, None), kept + tokens),
        "combine_residual": (lambda x, y, w: cuda.combine(y, inverse, w, x), kept + 2 * tokens),
        "combine_backward": (lambda g, y, w: cuda.combine_backward(g, y, inverse, w, rows), tokens + kept + rows),
        "only_d_y": (lambda g, y, w: cuda.combine_backward(g, None, inverse, w, rows), tokens + rows),
        "only_d_weights": (lambda g, y, w: cuda.combine_backward(g, y, inverse, w, None), tokens + kept),
    }
    for direction, (call, moved) in directions.items():
        ways = {"triton": call} | ({"torch": plain[direction]} if direction in plain else {})
        for name, way in ways.items():
            taken = microseconds([lambda one=one, way=way: way(*one) for one in sets], moved * size / 3e6)
            values = (
                tokens,
                hidden,
                experts,
                top_k,
                layout,
                factor or "",
                direction,
                name,
                f"{taken:.2f}",
                f"{moved * size / taken / 1e3 / copy:.3f}",
            )
            print(about, *values, sep=",", flush=True)


def main() -> None:
    """All shapes."""
    torch.manual_seed(17)
    chooser.installed = lambda package: package == "triton"  # both directions
    source, target = (torch.zeros(2**28, dtype=torch.int32, device="cuda") for _ in range(2))
    copy = 2 * 2**30 / microseconds([lambda: torch.neg(source, out=target)], 500) / 1e3
    versions = provenance.versions()
    about = f"{torch.cuda.get_device_name()},{versions['torch_version']},{versions['triton_version']},{copy:.0f}"
    print(
        "gpu_name,torch_version,triton_version,copy_gb_per_s,tokens,hidden,experts,top_k,layout,capacity_factor,direction,implementation,us,share_of_copy"
    )
    for shape in SHAPES:
        measure(shape, copy, about)


if __name__ == "__main__":
    main()
