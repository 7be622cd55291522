"""Timers: device time by CUDA graph or events, wall time by the host clock. All return microseconds per call.

A timer is given R calls, one an input and output set, and always runs them in rotation, so that with R sets of 5x the L2
cache together every call finds the cache cold.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


class HostTimer:
    """Wall time of calls on a CPU; `interval_us` is the least time between two readings of the clock."""

    name = "wall"

    def __init__(self, calls: Sequence[Call], interval_us: float) -> None:
        """Estimate one call's time from one rotation and choose how many calls a sample takes."""
        self.calls_list = calls
        start = time.perf_counter()
        for call in calls:
            call()
        once = max((time.perf_counter() - start) * 1e6 / len(calls), 0.1)
        self.calls = max(1, math.ceil(interval_us / once))
        self._next = 0

    def sample(self) -> float:
        """Mean time of `calls` consecutive calls."""
        start = time.perf_counter()
        for i in range(self._next, self._next + self.calls):
            self.calls_list[i % len(self.calls_list)]()
        self._next += self.calls
        return (time.perf_counter() - start) * 1e6 / self.calls


class EventTimer:
    """Device time between two events around calls launched one by one: for what a CUDA graph cannot capture."""

    name = "events"

    def __init__(self, calls: Sequence[Call], interval_us: float) -> None:
        """Estimate one call's time and choose a whole number of rotations."""
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._run = lambda: [call() for call in calls]
        self.calls = len(calls)
        once = self.sample()
        self._rotations = max(1, math.ceil(interval_us / (once * len(calls))))
        self.calls = len(calls) * self._rotations

    _rotations = 1

    def sample(self) -> float:
        """Mean time of all calls between the events."""
        torch.cuda.synchronize()
        self._start.record()
        for _ in range(self._rotations):
            self._run()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / self.calls


class GraphTimer(EventTimer):
    """Device time of one replay of a CUDA graph that holds whole rotations: host launch cost is not in it."""

    name = "cuda_graph"

    def __init__(self, calls: Sequence[Call], interval_us: float) -> None:
        """Capture one rotation, estimate, and capture again with as many rotations as fill the interval."""
        once = self._captured(calls, 1)
        rotations = min(max(1, math.ceil(interval_us / (once * len(calls)))), max(1, 2048 // len(calls)))
        if rotations > 1:
            self._captured(calls, rotations)

    def _captured(self, calls: Sequence[Call], rotations: int) -> float:
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._graph, self.calls = torch.cuda.CUDAGraph(), len(calls) * rotations
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for _ in range(rotations):
                for call in calls:
                    call()
        self._run = self._graph.replay
        self.sample()
        return self.sample()


def device_timer(calls: Sequence[Call], interval_us: float, device: str) -> HostTimer | EventTimer:
    """A graph where the calls can be captured, events where they cannot (they wait for the host), wall time on a CPU."""
    if device == "cpu":
        return HostTimer(calls, interval_us)
    try:
        return GraphTimer(calls, interval_us)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return EventTimer(calls, interval_us)


def wall_median_us(calls: Sequence[Call], repeats: int, device: str) -> float:
    """Median host time of one call from an idle device to an idle device."""
    times = []
    for i in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        calls[i % len(calls)]()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)[len(times) // 2]
