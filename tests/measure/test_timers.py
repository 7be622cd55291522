"""The timers on a simulated device whose times are planted: what they must find, to the last digit."""

import contextlib
from types import SimpleNamespace

import pytest

from moe_routing_bench.measure import timers


class Device:
    """A host and a device that works through a queue; all times in microseconds."""

    def __init__(self, launch: float) -> None:
        self.launch = launch  # what the host needs to queue a graph
        self.host = self.busy_until = self.side_until = 0.0
        self.capturing: list[float] | None = None
        self.slept: list[float] = []

    def queue(self, time: float) -> None:
        """Work of the stream that is timed: captured, or done after what is queued already."""
        if self.capturing is not None:
            self.capturing.append(time)
        else:
            self.busy_until = max(self.busy_until, self.host) + time

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until, self.side_until)

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles / 2000)
        self.queue(cycles / 2000)

    def cuda(self) -> SimpleNamespace:
        """What the timers use of torch.cuda."""
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(device.busy_until, device.host)
                device.host += 1

            def query(self) -> bool:
                return device.host >= self.at

            def synchronize(self) -> None:
                device.host = max(device.host, self.at)

            def elapsed_time(self, end: "Event") -> float:
                return (end.at - self.at) / 1e3

        class CUDAGraph:
            work = 0.0

            def replay(self) -> None:
                device.host += device.launch
                device.queue(self.work)

        @contextlib.contextmanager
        def graph(one: CUDAGraph, capture_error_mode: str):
            device.capturing = []
            yield
            one.work, device.capturing = sum(device.capturing), None

        return SimpleNamespace(
            Event=Event, CUDAGraph=CUDAGraph, graph=graph, synchronize=self.synchronize, _sleep=self.sleep
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose graphs take 300 us to launch, in place of torch's."""
    one = Device(launch=300.0)
    monkeypatch.setattr(timers, "torch", SimpleNamespace(cuda=one.cuda(), OutOfMemoryError=MemoryError))
    monkeypatch.setattr(timers, "perf_counter", lambda: one.host / 1e6)
    return one


@pytest.mark.parametrize(
    ("sets", "time", "interval"), [(10, 5.0, 1000), (7, 3.25, 4000), (3, 900.0, 1000), (1, 40.0, 100)]
)
def test_a_graph_takes_what_was_planted(device: Device, sets: int, time: float, interval: float) -> None:
    """Not a microsecond of the launch, in whole rotations that fill the interval; the shares of sets are even."""
    counts = [0] * sets

    def call(i: int) -> int:
        counts[i] += 1
        device.queue(time)
        return i

    timer = timers.GraphTimer([lambda i=i: call(i) for i in range(sets)], interval)
    assert [timer.sample() for _ in range(3)] == pytest.approx([time] * 3, rel=1e-9)
    assert (timer.hidden, timer.samples) == (3, 3)
    assert timer.calls % sets == 0 and interval <= timer.calls * time < interval + sets * time
    assert len(set(counts)) == 1 and timer.returned == list(range(sets))
    assert timer.shortened() == pytest.approx(1, rel=0.3) and timer.outstanding_us() == 0


def test_a_spin_that_was_too_short_is_made_longer(device: Device) -> None:
    """Where the first event has fired before all is queued, the sample is taken again."""
    timer = timers.GraphTimer([lambda: device.queue(2.0)], 100)
    device.launch = 2000.0
    device.slept.clear()
    assert timer.sample() == pytest.approx(2.0) and timer.hidden == 1
    assert len(device.slept) == 2 and device.slept[1] >= 2000


def test_a_graph_has_a_most_number_of_calls(device: Device) -> None:
    timer = timers.GraphTimer([lambda: device.queue(0.001)] * 100, 1e6)
    assert timer.calls == 2000


def test_leaving_out_every_other_rotation_shows(device: Device) -> None:
    """The answers are all there, but a call takes half as long among others as alone."""
    count = [0]

    def call() -> None:
        count[0] += 1
        if count[0] % 2:
            device.queue(50.0)

    timer = timers.GraphTimer([call], 1000)
    assert timer.shortened() > 1.3


def test_calls_that_wait_for_the_device_are_timed_with_their_waits(device: Device) -> None:
    """3 us on the host before 5 us on the device, every time; no spin can hide it, and none is tried for long."""

    def call() -> None:
        device.host += 3
        device.queue(5)
        device.synchronize()

    timer = timers.EventTimer([call] * 4, 400)
    timer.sample()  # finds out
    device.slept.clear()
    assert timer.sample() == pytest.approx(8, rel=0.02) and timer.hidden == 0
    assert device.slept == [20.0] and timer.calls >= 50


def test_launches_between_events_are_hidden(device: Device) -> None:
    """Calls of 50 us that take the host 3 us each."""

    def call() -> None:
        device.host += 3
        device.queue(50)

    timer = timers.EventTimer([call] * 5, 1000)
    assert timer.sample() == pytest.approx(50, rel=1e-9) and timer.hidden == 1 and timer.calls == 20


def test_slow_calls_rotate_over_fewer_sets(device: Device) -> None:
    """A rotation of at most 50 ms, and of no fewer than 3 sets; quick calls use all."""
    counts = {
        time: len(timers.EventTimer([lambda time=time: device.queue(time)] * 90, 10).returned)
        for time in (1e5, 5e3, 10.0)
    }
    assert counts == {1e5: 3, 5e3: 10, 10.0: 90}


def test_work_on_another_stream_is_outstanding(device: Device) -> None:
    def call() -> None:
        device.host += 3
        device.side_until = max(device.side_until, device.host) + 400

    timer = timers.EventTimer([call] * 3, 10)
    assert timer.outstanding_us() > 1000


def test_what_cannot_be_captured_is_timed_by_events(device: Device) -> None:
    """And memory that runs out is no reason to."""
    timer = timers.device_timer([lambda: device.queue(30)], 100, "cuda")
    assert timer.name == "cuda_graph"

    def refuse() -> None:
        if device.capturing is not None:
            device.capturing = None
            raise RuntimeError("operation not permitted when stream is capturing")
        device.queue(30)

    events = timers.device_timer([refuse], 100, "cuda")
    assert events.name == "events" and events.sample() == pytest.approx(30)

    def exhausted() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        timers.device_timer([exhausted], 100, "cuda")


def test_a_host_timer_divides_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 40 us by a clock that only they move; a sample goes on where the last one ended."""
    now, seen = [0.0], []
    monkeypatch.setattr(timers, "perf_counter", lambda: now[0])

    def call(i: int) -> int:
        now[0] += 40e-6
        seen.append(i)
        return i

    timer = timers.device_timer([lambda i=i: call(i) for i in range(3)], 150, "cpu")
    assert timer.name == "wall" and timer.calls == 4
    seen.clear()
    assert [timer.sample() for _ in range(3)] == pytest.approx([40.0] * 3)
    assert seen == [0, 1, 2] * 4 and timer.returned == [0, 1, 2]
    seen.clear()
    timer.check()
    assert seen == [0, 1, 2]


def test_the_wall_median_is_of_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = [0.0], iter([10e-6, 30e-6, 20e-6])
    monkeypatch.setattr(timers, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += next(times)

    assert timers.wall_median_us([call], 3, "cpu") == pytest.approx(20.0)
