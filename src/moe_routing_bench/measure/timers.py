"""Timers: device time by CUDA graph or events, wall time by the host clock. All return microseconds per call.

A timer is given R calls, one an input and output set, and always runs them in rotation, so that with R sets of 5x the L2
cache together every call finds the cache cold. `returned` holds what the last timed call of every set
returned, of the sets that it runs.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter  # by its own name: an implementation may replace the attributes of `time`

import torch

from moe_routing_bench.measure.host_timer import OUTSTANDING_US, Call, HostTimer, pause

_CYCLES_PER_US = 2000  # of a GPU's clock, at least
_LEAST_SPIN_US, _MOST_SPIN_US = 20.0, 20_000.0
_MOST_EXCESS = 4  # times as long a spin may take as the queueing that it hides: a device that spins rests
_ATTEMPTS = 3  # at a sample whose launch is hidden, and at the time of a rotation
LEAST_SETS = 3
ROTATION_US = 5000.0  # of a CPU, where there are more sets than an honest check needs: next to isolated calls, whose turns are single rotations
# For calls launched one by one: a longer rotation goes through more memory than a cache holds.
MOST_ROTATION_US = 50_000.0
MOST_NODES = 2048  # calls in a graph
_START_US = 5.0  # of a graph, at most


class EventTimer:
    """Device time between two events around calls launched one by one: for what a CUDA graph cannot capture.

    The device spins while the host queues the first event and the calls, so that launching is not in the time, unless a
    call waits for the device.
    """

    name = "events"

    def __init__(self, calls: Sequence[Call], interval_us: float) -> None:
        """Estimate one call's time and choose a whole number of rotations, of fewer sets where calls take long."""
        self._prepare(calls[:LEAST_SETS])
        once = self._estimate()
        self._prepare(calls[: max(LEAST_SETS, int(MOST_ROTATION_US / once))])
        self._rotations = max(1, math.ceil(interval_us / (once * len(self._calls))))
        self.calls = len(self._calls) * self._rotations

    def _prepare(self, calls: Sequence[Call]) -> None:
        self._calls, self.calls, self._rotations = calls, len(calls), 1
        self.returned: list[object] = [None] * len(calls)
        self.alone: list[float] = []
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._spin_us, self._hides = _LEAST_SPIN_US, True
        self.samples = self.hidden = self._turn = 0

    def _estimate(self) -> float:
        self.sample()
        sample_us = max(self.sample(), 0.1)  # nothing at all takes no time
        self.samples = self.hidden = 0
        return sample_us

    def begin_turn(self) -> bool:
        """Make `returned` what samples will write; whether outputs are to be looked at after the turn."""
        self._turn = self.samples
        return True

    def reached(self) -> list[int]:
        """The sets that samples have called since the turn began: all that take part, or none."""
        return list(range(len(self._calls))) if self.samples > self._turn else []

    def _pause(self) -> None:
        pause()

    def _run(self) -> None:
        for _ in range(self._rotations):
            self._rotation()

    def _rotation(self) -> None:
        for i, call in enumerate(self._calls):
            self.returned[i] = call()

    def rotate(self) -> None:
        """Launch every call once; what that takes is noted in `alone`."""
        self.alone.append(self._timed(self._rotation, len(self._calls))[0])

    def check(self) -> None:
        """What is checked while samples are taken: a sample."""
        self.sample()

    def alone_us(self) -> float:
        """The least time of a call in a rotation by itself, less the start."""
        return min(self.alone) - _START_US / len(self._calls)

    def among_us(self, blocks: Sequence[Sequence[float]]) -> float:
        """The time of a call in a sample: the median of those in `blocks`, or of a sample where there is none yet."""
        return median([sample for block in blocks for sample in block] or [self.sample()])

    def elsewhere(self) -> float:
        """Nothing is known of it: `outstanding_us` finds work on other streams."""
        return 0.0

    def sample(self) -> float:
        """Mean time of all calls between the events."""
        self._pause()
        taken, hidden = self._timed(self._run, self.calls)
        self.samples, self.hidden = self.samples + 1, self.hidden + hidden
        return taken

    def _timed(self, run: Callable[[], None], calls: int) -> tuple[float, bool]:
        """Mean time of the calls that `run` launches, and whether their launch is hidden. What takes the time is at hand before that:
        calls may replace what names stand for."""
        hidden, queueing, clock = False, 0.0, perf_counter
        begins, ends, fired = self._start.record, self._end.record, self._start.query
        over, elapsed = self._end.synchronize, self._start.elapsed_time
        for _ in range(_ATTEMPTS if self._hides else 1):
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self._spin_us * _CYCLES_PER_US))
            begin = clock()
            begins()
            run()
            ends()
            hidden = not fired()  # the device still spins, and everything is queued
            queueing = (clock() - begin) * 1e6
            over()
            if hidden:
                break
            self._spin_us = min(max(2 * self._spin_us, 2 * queueing), _MOST_SPIN_US)
        if not hidden:  # a call waits for the device, and so for the end of any spin
            self._hides, self._spin_us = False, _LEAST_SPIN_US
        elif self._spin_us > _MOST_EXCESS * max(queueing, _LEAST_SPIN_US):  # the host was held up once
            self._spin_us /= 2
        return elapsed(self._end) * 1e3 / calls, hidden

    def outstanding_us(self) -> float:
        """How long the device works on after the last event of a sample, microseconds: the least of three; 0 for a moment."""
        times = []
        for _ in range(3):
            self.sample()
            seconds = []
            for _ in range(2):  # the second time there is nothing to wait for: that is what asking takes
                begin = perf_counter()
                torch.cuda.synchronize()
                seconds.append(perf_counter() - begin)
            times.append((seconds[0] - seconds[1]) * 1e6)
        return min(times) if min(times) > OUTSTANDING_US else 0.0


class GraphTimer(EventTimer):
    """Device time of one replay of a CUDA graph that holds whole rotations: host launch cost is not in it.

    A graph of one rotation is kept too.
    """

    name = "cuda_graph"

    def __init__(self, calls: Sequence[Call], interval_us: float) -> None:
        """Capture one rotation, estimate, and capture again with as many rotations as fill the interval."""
        self._prepare(calls)
        self._one = self._whole = self._captured(1)
        once = self._estimate()
        rotations = min(max(1, math.ceil(interval_us / (once * len(calls)))), max(1, MOST_NODES // len(calls)))
        if rotations > 1:
            self._whole = self._captured(rotations)
            self._estimate()

    def _captured(self, rotations: int) -> tuple[torch.cuda.CUDAGraph, list[object]]:
        """A graph, and what its last call of every set returned: each graph has memory of its own."""
        graph, self.calls = torch.cuda.CUDAGraph(), len(self._calls) * rotations
        self.returned = [None] * len(self._calls)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a stage may have nothing to do
            with capture(graph):
                for _ in range(rotations):
                    super()._rotation()
        return graph, self.returned

    def begin_turn(self) -> bool:
        """Make `returned` what samples will write: the tensors of the graph that they replay."""
        self.returned = self._whole[1]
        return super().begin_turn()

    def _pause(self) -> None:
        """None: no call runs on the host, and a device that waits rests."""

    def _run(self) -> None:
        self._replay(*self._whole)

    def _replay(self, graph: torch.cuda.CUDAGraph, returned: list[object]) -> None:
        graph.replay()
        self.returned = returned

    def _rotation(self) -> None:
        self._replay(*self._one)

    def outstanding_us(self) -> float:
        """Nothing: a capture refuses work that its stream does not wait for."""
        return 0.0


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """`torch.cuda.graph` for one thread of several; where it fails, with RuntimeError, stream and random numbers are as before.

    After a failed capture torch (2.11) leaves its stream the current one, holds the device's generator to be captured still, and
    refuses to draw from it.
    """
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator("cuda").manual_seed(generator.initial_seed()))
        raise


def shorten(calls: list[Call], device: str, least: int) -> None:
    """Keep so many of a CPU's calls, the first ones and at least `least`, as take `ROTATION_US`: as many as isolated ones rotate over, so that
    caches are as cold."""
    if device == "cpu" and len(calls) > least:
        seconds = []
        for _ in range(_ATTEMPTS):  # others may have the core now and then
            begin = perf_counter()
            for call in calls:
                call()
            seconds.append(perf_counter() - begin)
        del calls[max(least, math.ceil(ROTATION_US * len(calls) / (min(seconds) * 1e6))) :]


def device_timer(calls: Sequence[Call], interval_us: float, device: str, nbytes: int = 0) -> HostTimer | EventTimer:
    """A graph where the calls can be captured, events where they cannot (they wait for the host), wall time on a CPU. A call reads and
    writes `nbytes`."""
    if device == "cpu":
        return HostTimer(calls, interval_us, nbytes)
    try:
        return GraphTimer(calls, interval_us)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return EventTimer(calls, interval_us)


def wall_median_us(calls: Sequence[Call], repeats: int, device: str) -> float:
    """Median host time of one call from an idle device to an idle device."""
    wait: Callable[[], object] = torch.cuda.synchronize if device != "cpu" else lambda: None
    times = []
    for i in range(repeats):
        wait()
        start = perf_counter()
        calls[i % len(calls)]()
        wait()
        times.append((perf_counter() - start) * 1e6)
    return sorted(times)[len(times) // 2]
