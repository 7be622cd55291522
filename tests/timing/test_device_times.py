"""Device time holds no host time: a call takes as long in a short sample as in a long one."""

from statistics import median

import pytest
import torch

from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.measure import timers

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
if not torch.cuda.is_available():  # as a whole: hundreds of tests need not be collected
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


def copies(nbytes: int) -> list:
    """Copies between buffers that together are more than the L2 cache holds."""
    count = max(3, (300 << 20) // nbytes)
    pairs = [(torch.randn(nbytes // 4, device="cuda"), torch.empty(nbytes // 4, device="cuda")) for _ in range(count)]
    return [lambda source=source, target=target: target.copy_(source) for source, target in pairs]


SIZES = pytest.mark.parametrize("nbytes", [8 << 20, 64 << 20, 256 << 20])


@SIZES
def test_time_per_call_is_that_of_longer_samples(nbytes: int) -> None:
    """Samples of the interval that is the default, and of 2, 4 and 8 times that, in turns: within 0.2 %, every launch hidden."""
    calls, interval = copies(nbytes), Settings().interval_us
    lengths = [timers.GraphTimer(calls, interval * factor) for factor in (1, 2, 4, 8)]
    for _ in range(20):
        for one in lengths:
            one.sample()
    found: list[list[float]] = [[] for _ in lengths]
    for _ in range(40):
        for one, times in zip(lengths, found, strict=True):
            times.append(one.sample())
    medians = [median(times) for times in found]
    print([f"{one.calls} calls: {time:.4f} us" for one, time in zip(lengths, medians, strict=True)])
    assert all(one.hidden == one.samples for one in lengths)
    assert max(medians) / min(medians) < 1.002, medians


@SIZES
def test_a_call_is_no_longer_alone_than_among_others(nbytes: int) -> None:
    timer = timers.GraphTimer(copies(nbytes), 1000)
    for _ in range(3):
        timer.rotate()
    assert timer.alone_us() < 1.1 * timer.sample()


def test_events_hide_launches_too() -> None:
    """Of calls that are launched one by one and take longer than their launch."""
    calls = copies(64 << 20)
    graph, events = timers.GraphTimer(calls, 4000), timers.EventTimer(calls, 4000)
    for _ in range(10):
        graph.sample(), events.sample()
    assert median([events.sample() for _ in range(20)]) == pytest.approx(
        median([graph.sample() for _ in range(20)]), rel=0.1
    )


def test_after_a_call_that_is_not_captured_all_is_as_before() -> None:
    """It waits for the host. The next cell of a worker, and ceilings after the samples, draw what they multiply."""
    values, stream = torch.ones(8, device="cuda"), torch.cuda.current_stream()
    torch.manual_seed(17)
    want = torch.randn(8, device="cuda")
    assert timers.device_timer([lambda: values.sum().item()] * 3, 100, "cuda").name == "events"
    assert torch.cuda.initial_seed() == 17 and torch.cuda.current_stream() == stream
    torch.manual_seed(17)
    assert torch.equal(torch.randn(8, device="cuda"), want)
    graph = torch.cuda.CUDAGraph()
    with timers.capture(graph):
        drawn = torch.randn(8, device="cuda")
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(drawn, first), "a graph draws anew each time"
