"""The ceilings of this machine, in the process that measures: copy, read, write, stream, matrix product, launch.

Measured before and after a cell, on the same buffers: on an H200 a copy of 0.5 GiB ran at 3.76 or 4.19 TB/s depending
on where the two buffers lay. A drift between the two of a ceiling that binds marks the cell suspect. Every share in a row is of these
figures.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from time import perf_counter  # by its own name, as in `timers`
from typing import Any

import torch

_REPEATS = 7
_LEAST_BYTES, _MOST_BYTES = 2 << 30, 8 << 30  # a buffer; the ramp of a launch costs 4 % of 0.5 GiB, 1 % of 2 GiB (H200)
_PART = 1024  # elements: parts are multiples of the smallest block
_MOST_SETS = 256  # launches in the graph of a short stream
_LEAST_SHORT = 1 << 20  # bytes: what moves less is a launch, not a stream
Products = Sequence[tuple[int, int, int]]  # rows, terms and columns of each


def timed(call: Callable[[], object], device: str, calls: int = 1, repeats: int = _REPEATS) -> float:
    """Median time of one of `calls` calls, by events on a GPU and the host clock on a CPU."""
    times = []
    for _ in range(repeats + 1):
        if device == "cpu":
            start = perf_counter()
            for _ in range(calls):
                call()
            times.append((perf_counter() - start) / calls)
        else:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(calls):
                call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / calls)
    return sorted(times[1:])[repeats // 2]  # the first one warms up


def cold_sets(nbytes: int) -> int:
    """How many sets of so many bytes a GPU is to go through in turn, so that none is in its L2 cache: 5 times that, and one."""
    return -(-5 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size // nbytes) + 1


def reads_to_writes(cost: Any) -> tuple[int, int]:
    """Bytes that a stage reads and writes, as whole numbers of at most 32."""
    ratio = cost.write_bytes / cost.read_bytes
    return (1, min(32, max(1, round(ratio)))) if ratio >= 1 else (min(32, max(1, round(1 / ratio))), 1)


class GpuCeilings:
    """Ceilings of the current CUDA device."""

    known: dict[str, Any] | None = None  # for later cells nothing: each has its own
    limits: Sequence[float] | None = None
    noise: Mapping[str, float] = {}  # not known: a drift is all of a change
    at = ""  # when they were measured

    def __init__(self, mix: tuple[int, int] | None = None, read_bytes: int = 0, write_bytes: int = 0) -> None:
        """Make the buffers, at most an eighth of the free memory each, and capture a graph of 100 small kernels.

        `mix` is the stage's reads to writes as small whole numbers, the bytes are what it reads and writes: the stream moves
        no less, so that a long stage is not held against a ceiling that a shorter run has lowered, and the short stream just
        as much, launch and ramp included.
        """
        from moe_routing_bench.measure import stream_kernel

        self._kernel, self._mix, self._moved = stream_kernel, mix, read_bytes + write_bytes
        size = min(max(read_bytes, write_bytes, _LEAST_BYTES), _MOST_BYTES, torch.cuda.mem_get_info()[0] // 8)
        self._source, self._target = stream_kernel.buffers(size)
        self._best: dict[tuple[int, int], tuple[int, int]] = {}
        self._short: tuple[torch.cuda.CUDAGraph, int] | None = None  # and the bytes that it moves
        self._a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self._dot, self._tiny = torch.empty_like(self._a), torch.zeros(1, device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        self._tiny.add_(0)
        with torch.cuda.graph(self._graph):
            for _ in range(100):
                self._tiny.add_(0)

    def _streamed(self, mix: tuple[int, int]) -> float:
        """GB/s of the stream kernel; the first time also chooses the fastest of its configurations."""

        def rate(config: tuple[int, int], repeats: int) -> float:
            moved = self._kernel.launch(self._source, self._target, *mix, *config)
            call = lambda: self._kernel.launch(self._source, self._target, *mix, *config)  # noqa: E731
            return moved / timed(call, "cuda", 2, repeats) / 1e9

        if mix not in self._best:
            self._best[mix] = max(self._kernel.CONFIGS, key=lambda config: rate(config, 3))
        return rate(self._best[mix], _REPEATS)

    def _streamed_short(self, mix: tuple[int, int]) -> dict[str, float]:
        """Row field short_stream_gb_per_s: launches that each move as much as the stage, in a graph over cold parts of the
        buffers; empty for a stage of less than 1 MiB."""
        n = self._moved // self._source.element_size() // sum(mix) // _PART * _PART
        if self._moved < _LEAST_SHORT or not n:
            return {}
        if self._short is None:
            graphs = [self._short_graph(mix, n, config) for config in self._kernel.CONFIGS if config[0] <= n]
            self._short = min(graphs, key=lambda graph: timed(graph[0].replay, "cuda", 1, 3) / graph[1])
        graph, moved = self._short
        return {"short_stream_gb_per_s": moved / timed(graph.replay, "cuda") / 1e9}

    def _short_graph(self, mix: tuple[int, int], n: int, config: tuple[int, int]) -> tuple[torch.cuda.CUDAGraph, int]:
        cold = min(cold_sets(mix[0] * n * self._source.element_size()), _MOST_SETS)
        sets = max(1, min(self._source.numel() // (max(mix) * n), cold))
        parts = [
            [
                buffer[i * each * n : (i + 1) * each * n]
                for buffer, each in ((self._source, mix[0]), (self._target, mix[1]))
            ]
            for i in range(sets)
        ]
        self._kernel.launch(*parts[0], *mix, *config)  # compiles it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moved = sum(self._kernel.launch(*part, *mix, *config) for part in parts)
        return graph, moved

    def measure(self) -> dict[str, float]:
        """Row fields copy_, read_, write_, stream_gb_per_s (of the mix), short_stream_gb_per_s, peak_tflops, launch_us,
        graph_node_us."""
        self.at = datetime.now(UTC).isoformat(timespec="milliseconds")
        source, target = self._source, self._target
        size = source.numel() * source.element_size()
        rates = {
            "copy_gb_per_s": 2 * size / timed(lambda: target.copy_(source), "cuda", 2) / 1e9,
            "read_gb_per_s": self._streamed((1, 0)),
            "write_gb_per_s": size / timed(lambda: target.fill_(1), "cuda", 2) / 1e9,
            "peak_tflops": 2 * 8192**3 / timed(lambda: torch.mm(self._a, self._a, out=self._dot), "cuda", 2) / 1e12,
            "launch_us": timed(lambda: self._tiny.add_(0), "cuda", 100) * 1e6,
            "graph_node_us": timed(self._graph.replay, "cuda") * 1e4,
        }
        if self._mix:
            rates |= {"stream_gb_per_s": self._streamed(self._mix)} | self._streamed_short(self._mix)
        return rates

    def sustained(
        self, seconds: float, products: Products = (), dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, float]:
        """Under the power limit: row field sustained_tflops, the rate of the same product as that of peak_tflops once it has run
        for so long; and dense_us, the time of `products` of `dtype`, one after the other, once these have. Medians over half as long
        again: the clock swings within a third of a second.

        Their right sides are transposed, as weights are stored, and like the left ones drawn from N(0, 1): zeros would draw less
        power.
        """

        def settled(call: Callable[[], object]) -> float:
            end = perf_counter() + seconds
            while perf_counter() < end:
                timed(call, "cuda", 8, 1)
            times, end = [], perf_counter() + seconds / 2
            while len(times) < _REPEATS or perf_counter() < end:
                times.append(timed(call, "cuda", 8, 1))
            return median(times)

        rate = 2 * 8192**3 / settled(lambda: torch.mm(self._a, self._a, out=self._dot)) / 1e12
        if not products:
            return {"sustained_tflops": rate}
        draw = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
        sides = [(draw(m, k), draw(n, k).mT, draw(m, n)) for m, k, n in products]

        def dense() -> None:
            for left, right, out in sides:
                torch.mm(left, right, out=out)

        return {"sustained_tflops": rate, "dense_us": settled(dense) * 1e6}


def mean(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The ceilings that rows are held against: between those of before and of after the samples."""
    return {name: (value + after[name]) / 2 for name, value in before.items()}


def binding(ceilings: dict[str, float], nbytes: int, flops: float) -> list[str]:
    """Those that hold for a call of so many bytes and FLOPs: the bandwidth of a copy or the rate of a product, whichever takes it longer,
    or both, where neither takes it twice as long as the other; and the stream, where there is one. Under the power limit the rate is
    the sustained one, and with it the time of the dense products.

    A rate that a call is nowhere near says nothing of its time, and that of a burst moves by 2 to 3 % with the clock of a card at rest.
    """
    rate = "sustained_tflops" if "sustained_tflops" in ceilings else "peak_tflops"
    seconds = {"copy_gb_per_s": nbytes / ceilings["copy_gb_per_s"] / 1e9, rate: flops / ceilings[rate] / 1e12}
    shorter = [name for name, floor in seconds.items() if 2 * floor > max(seconds.values())]
    also = ("dense_us", "stream_gb_per_s") if rate in shorter else ("stream_gb_per_s",)
    return shorter + [name for name in also if name in ceilings]


def drift(
    before: dict[str, float], after: dict[str, float], names: Sequence[str], noises: Sequence[Mapping[str, float]] = ()
) -> float:
    """Largest relative change of a ceiling between the two calibrations, less what their `noises` explain where those are known."""

    def beyond(name: str) -> float:
        noise = math.hypot(*(known.get(name, 0.0) for known in noises))
        return max(0.0, abs(after[name] / before[name] - 1) - noise)

    return max(map(beyond, names))
