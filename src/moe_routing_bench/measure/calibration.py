"""The ceilings of this machine, in the process that measures: copy, read, write, stream, matrix product, launch.

Run before and after a cell; a drift between the two marks the cell suspect. Every share in a row is of these figures.
"""

import time
from collections.abc import Callable, Sequence

import torch

_REPEATS = 7


def _seconds(call: Callable[[], object], device: str, calls: int = 1) -> float:
    """Median time of one of `calls` calls, by events on a GPU and the host clock on a CPU."""
    times = []
    for _ in range(_REPEATS + 1):
        if device == "cpu":
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
        else:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(calls):
                call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / calls)
    return sorted(times[1:])[_REPEATS // 2]  # the first one warms up


def calibrate(device: str, mix: tuple[int, int] | None) -> dict[str, float]:
    """Row fields copy_, read_, write_, stream_gb_per_s (of `mix`, reads to writes), peak_tflops, launch_us, graph_node_us."""
    return _on_cpu() if device == "cpu" else _on_gpu(mix)


def _on_cpu() -> dict[str, float]:
    source = torch.randn(8 << 20)
    target, size = torch.empty_like(source), source.numel() * 4
    a = torch.randn(768, 768)
    return {
        "copy_gb_per_s": 2 * size / _seconds(lambda: target.copy_(source), "cpu") / 1e9,
        "read_gb_per_s": size / _seconds(source.sum, "cpu") / 1e9,
        "write_gb_per_s": size / _seconds(lambda: target.fill_(1), "cpu") / 1e9,
        "peak_tflops": 2 * 768**3 / _seconds(lambda: a @ a, "cpu") / 1e12,
        "launch_us": _seconds(lambda: a[0, 0].add_(0), "cpu", 20) * 1e6,
    }


def _on_gpu(mix: tuple[int, int] | None) -> dict[str, float]:
    from moe_routing_bench.measure import stream_kernel

    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    source, target = stream_kernel.buffers(max(10 * l2, 1 << 29))
    size = source.numel() * source.element_size()

    def streamed(reads: int, writes: int) -> float:
        rates = []
        for block, warps in stream_kernel.CONFIGS:
            moved = stream_kernel.launch(source, target, reads, writes, block, warps)
            timed = _seconds(
                lambda b=block, w=warps: stream_kernel.launch(source, target, reads, writes, b, w), "cuda", 2
            )
            rates.append(moved / timed / 1e9)
        return max(rates)

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    dot, tiny = torch.empty_like(a), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    tiny.add_(0)
    with torch.cuda.graph(graph):
        for _ in range(100):
            tiny.add_(0)
    found = {
        "copy_gb_per_s": 2 * size / _seconds(lambda: target.copy_(source), "cuda", 2) / 1e9,
        "read_gb_per_s": streamed(1, 0),
        "write_gb_per_s": size / _seconds(lambda: target.fill_(1), "cuda", 2) / 1e9,
        "peak_tflops": 2 * 8192**3 / _seconds(lambda: torch.mm(a, a, out=dot), "cuda", 2) / 1e12,
        "launch_us": _seconds(lambda: tiny.add_(0), "cuda", 100) * 1e6,
        "graph_node_us": _seconds(graph.replay, "cuda") * 1e4,
    }
    return found | ({"stream_gb_per_s": streamed(*mix)} if mix else {})


def drift(before: dict[str, float], after: dict[str, float], names: Sequence[str]) -> float:
    """Largest relative change of a ceiling between the two calibrations."""
    return max(abs(after[n] / before[n] - 1) for n in names)
