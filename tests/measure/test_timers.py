"""The timers on a simulated device whose times are planted: what they must find, to the last digit."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.measure import host_timer, timers


class Generator:
    """Of random numbers, as torch's: what it is while a graph captures it, it stays where the capture fails."""

    def __init__(self, device: str) -> None:
        assert device == "cuda"
        self.state = {"seed": 67280421310721, "captured": False}

    def manual_seed(self, seed: int) -> "Generator":
        self.state["seed"] = seed
        return self

    def initial_seed(self) -> int:
        return int(self.state["seed"])

    def graphsafe_set_state(self, other: "Generator") -> None:
        self.state = other.state


class Device:
    """A host and a device that works through a queue; all times in microseconds."""

    def __init__(self, launch: float) -> None:
        self.launch = launch  # what the host needs to queue a graph
        self.host = self.busy_until = self.side_until = 0.0
        self.capturing: list[float] | None = None
        self.slept: list[float] = []
        self.starts: list[float] = []  # what the next graphs take before their first call
        self.asking = 0.0  # what it takes the host to find that there is nothing to wait for
        self.speed = 1.0  # of its clock: a spin is a number of cycles
        self.generator = Generator("cuda").manual_seed(17)
        self.stream = "of the caller"

    def queue(self, time: float) -> None:
        """Work of the stream that is timed: captured, or done after what is queued already."""
        if self.capturing is not None:
            self.capturing.append(time)
        else:
            self.busy_until = max(self.busy_until, self.host) + time

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until, self.side_until) + self.asking

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles / 2000)
        self.queue(cycles / 2000 / self.speed)

    def cuda(self) -> SimpleNamespace:
        """What the timers use of torch.cuda."""
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing is True, "torch refuses elapsed_time of others"
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
                device.queue(self.work + (device.starts.pop(0) if device.starts else 0.0))

        @contextlib.contextmanager
        def graph(one: CUDAGraph, capture_error_mode: str):
            assert capture_error_mode == "thread_local", "others may allocate while this thread captures"
            before, device.stream = device.stream, "of captures"
            device.capturing, device.generator.state["captured"] = [], True
            yield
            one.work, device.capturing, device.generator.state["captured"] = sum(device.capturing), None, False
            device.stream = before

        return SimpleNamespace(
            Event=Event,
            CUDAGraph=CUDAGraph,
            graph=graph,
            synchronize=self.synchronize,
            _sleep=self.sleep,
            default_generators=(None, self.generator),
            current_device=lambda: 1,
            current_stream=lambda: self.stream,
            set_stream=lambda stream: setattr(self, "stream", stream),
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose graphs take 300 us to launch, in place of torch's."""
    one = Device(launch=300.0)
    monkeypatch.setattr(
        timers, "torch", SimpleNamespace(cuda=one.cuda(), OutOfMemoryError=MemoryError, Generator=Generator)
    )
    monkeypatch.setattr(timers, "perf_counter", lambda: one.host / 1e6)
    return one


@pytest.mark.parametrize(
    ("sets", "time", "interval"), [(10, 5.0, 1000), (7, 3.25, 4000), (3, 900.0, 1000), (2, 300.0, 1000), (1, 40.0, 100)]
)
def test_a_graph_takes_what_was_planted(device: Device, sets: int, time: float, interval: float) -> None:
    """Not a microsecond of the launch, in whole rotations that fill the interval; the shares of sets are even.

    One rotation is captured to estimate; where it fills the interval, it is the graph that is timed.
    """
    counts = [0] * sets

    def call(i: int) -> int:
        counts[i] += 1
        device.queue(time)
        return i

    timer = timers.GraphTimer([lambda i=i: call(i) for i in range(sets)], interval)
    assert [timer.sample() for _ in range(3)] == pytest.approx([time] * 3, rel=1e-9)
    assert (timer.hidden, timer.samples) == (3, 3)
    assert timer.calls % sets == 0 and interval <= timer.calls * time < interval + sets * time
    rotations = timer.calls // sets
    assert counts == [1 + rotations * (rotations > 1)] * sets and timer.returned == list(range(sets))
    timer.rotate()
    assert timer.alone_us() <= time and timer.outstanding_us() == timer.elsewhere() == 0


def test_a_spin_that_was_too_short_is_made_longer(device: Device) -> None:
    """Where the first event has fired before all is queued, the sample is taken again."""
    timer = timers.GraphTimer([lambda: device.queue(2.0)], 100)
    device.launch = 2000.0
    device.slept.clear()
    assert timer.sample() == pytest.approx(2.0) and timer.hidden == 1
    # the launch and two events of 1 us each were queued, and the next spin takes twice as long
    assert device.slept[1:] == pytest.approx([4004.0])


def test_a_spin_is_shorter_again_once_the_host_is_quick(device: Device) -> None:
    """It held the host up once. A device that spins for long rests, and a card under its power limit is quicker after a rest (H200)."""
    timer = timers.GraphTimer([lambda: device.queue(2000.0)], 100)
    device.launch = 8000.0
    timer.sample()
    device.launch = 300.0
    device.slept.clear()
    assert [timer.sample() for _ in range(6)] == pytest.approx([2000.0] * 6)
    # down to four times what the launch and two events of 1 us each take, and no further
    assert device.slept == pytest.approx([16004.0, 8002.0, 4001.0, 2000.5, 1000.25, 1000.25])
    assert timer.hidden == timer.samples


def test_a_spin_on_a_quick_clock_is_doubled(device: Device) -> None:
    """It is over sooner than asked: at eight times the clock only 80 us hide the 8 us that three calls and two events take."""
    host = [0.0]

    def call() -> None:
        device.host += host[0]
        device.queue(2.0)

    timer = timers.EventTimer([call] * 3, 1)
    device.slept.clear()
    device.speed, host[0] = 8.0, 2.0
    assert timer.sample() == pytest.approx(2.0)
    assert device.slept == [20.0, 40.0, 80.0] and timer.hidden == 1


@pytest.mark.parametrize(("sets", "calls"), [(100, 2000), (1500, 1500), (3000, 3000)])
def test_a_graph_has_a_most_number_of_calls(device: Device, sets: int, calls: int) -> None:
    """2048, in whole rotations, of which there is one whatever it takes."""
    assert timers.GraphTimer([lambda: device.queue(0.001)] * sets, 1e6).calls == calls


def test_a_call_of_a_lone_rotation_has_its_share_of_the_start(device: Device) -> None:
    """4 calls of 50 us after 45, 25 and 30 us: the quickest, less the 5 us that a graph may take to start."""
    timer = timers.GraphTimer([lambda: device.queue(50.0)] * 4, 1000)
    device.starts = [45.0, 25.0, 30.0]
    assert timer.calls == 20
    for _ in range(3):
        timer.rotate()
    assert timer.alone_us() == pytest.approx((200 + 25 - 5) / 4, rel=1e-9)
    assert timer.sample() == pytest.approx(50) and timer.calls == 20, "the whole graph is timed again"


@pytest.mark.parametrize("kind", [timers.GraphTimer, timers.EventTimer])
def test_a_turn_reaches_all_sets_once_a_sample_was_taken(kind, device: Device) -> None:
    """And `returned` is what its samples write, not what a lone rotation did: each graph has tensors of its own."""
    made = iter(range(1000))
    timer = kind([lambda: (device.queue(50.0), next(made))[1]] * 3, 1000)
    timer.sample()
    known = list(timer.returned)
    timer.rotate()
    assert timer.returned != known
    assert timer.begin_turn() and timer.reached() == []
    assert kind is timers.EventTimer or timer.returned == known
    timer.sample()
    assert timer.reached() == [0, 1, 2] and timer.begin_turn() and timer.reached() == []


@pytest.mark.parametrize("kind", [timers.GraphTimer, timers.EventTimer])
def test_leaving_out_every_other_rotation_shows(kind, device: Device) -> None:
    """The answers are all there, but a call takes half as long among others as alone."""
    count = [0]

    def call() -> None:
        count[0] += 1
        if kind is timers.GraphTimer or count[0] < 4:  # of calls that are launched one by one, the first after a pause
            device.queue(50.0 if count[0] % 2 or kind is timers.EventTimer else 0.0)

    timer = kind([call], 1000)
    count[0] = 0
    timer.rotate()
    assert timer.alone_us() > 1.3 * timer.sample()


def test_a_call_among_others_takes_the_median_of_the_samples_that_there_are(device: Device) -> None:
    """Or a sample, of 50 us."""
    timer = timers.GraphTimer([lambda: device.queue(50.0)], 1000)
    assert timer.among_us([[1.0, 2.0, 3.0], [2.0, 9.0]]) == 2.0 and timer.among_us([]) == pytest.approx(50)


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
    found = {time: timers.EventTimer([lambda time=time: device.queue(time)] * 90, 10) for time in (1e5, 5e3, 10.0)}
    assert {time: len(timer.returned) for time, timer in found.items()} == {1e5: 3, 5e3: 10, 10.0: 90}
    assert {time: timer.calls for time, timer in found.items()} == {1e5: 3, 5e3: 10, 10.0: 90}, "one rotation is enough"


@pytest.mark.parametrize(("time", "calls"), [(0.5, 20), (0.0, 100)])
def test_calls_of_next_to_no_time(device: Device, time: float, calls: int) -> None:
    """Rotations of 4 sets that fill 10 us, of calls that take at least a tenth."""
    timer = timers.EventTimer([lambda: device.queue(time)] * 4, 10)
    assert timer.calls == calls


def test_work_on_another_stream_is_outstanding(device: Device) -> None:
    def call() -> None:
        device.host += 3
        device.side_until = max(device.side_until, device.host) + 400

    timer = timers.EventTimer([call] * 3, 10)
    assert timer.outstanding_us() > 1000


@pytest.mark.parametrize(("least", "found"), [(500.0, 451.0), (310.0, 261.0), (290.0, 0.0)])
def test_the_least_of_three_is_outstanding(device: Device, least: float, found: float) -> None:
    """On another stream from 1 us after the host began, while a spin and three calls take 50; asking takes 30 us, twice.

    250 us or less are nothing.
    """
    side = iter([0.0] * 9)

    def call() -> None:
        device.queue(10)
        device.side_until = device.host + next(side)

    timer = timers.EventTimer([call] * 3, 10)
    device.asking, side = 30.0, iter([900.0] * 3 + [least] * 3 + [700.0] * 3 + [0.0] * 3)
    assert timer.outstanding_us() == pytest.approx(found, rel=1e-9)


def test_what_cannot_be_captured_is_timed_by_events(device: Device) -> None:
    """On the stream that was current before, and random numbers can be drawn afterwards. Memory that runs out is no reason to."""
    timer = timers.device_timer([lambda: device.queue(30)], 100, "cuda")
    assert timer.name == "cuda_graph"

    def refuse() -> None:
        if device.capturing is not None:
            device.capturing = None
            raise RuntimeError("operation not permitted when stream is capturing")
        device.queue(30)

    events = timers.device_timer([refuse], 100, "cuda")
    assert events.name == "events" and events.sample() == pytest.approx(30)
    assert device.generator.state == {"seed": 17, "captured": False} and device.stream == "of the caller"

    def exhausted() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        timers.device_timer([exhausted], 100, "cuda")


def keep_time(monkeypatch: pytest.MonkeyPatch, clock) -> None:
    """Have a clock of a test in place of Python's, which host timers have at hand."""
    known = host_timer.HostTimer._timed.__defaults__
    monkeypatch.setattr(host_timer.HostTimer._timed, "__defaults__", (clock, *known[1:]))


def test_a_host_timer_divides_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 40 us by a clock that only they move; a sample goes on where the last one ended."""
    now, seen = [0.0], []
    keep_time(monkeypatch, lambda: now[0])

    def call(i: int) -> int:
        now[0] += 40e-6
        seen.append(i)
        return i

    timer = timers.device_timer([lambda i=i: call(i) for i in range(3)], 150, "cpu")
    assert timer.name == "wall" and timer.calls == 4
    seen.clear()
    assert [timer.sample() for _ in range(3)] == pytest.approx([40.0] * 3)
    assert seen == [0, 1, 2] * 4 and timer.returned == [0, 1, 2]
    begins = set()
    for _ in range(60):
        seen.clear()
        timer.check()
        assert seen == [(seen[0] + i) % 3 for i in range(3)]
        begins.add(seen[0])
    assert begins == {0, 1, 2}, "as a sample, which a call could tell from a check by its first set"


def test_a_sample_of_few_calls_reaches_some_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come next, from where the last one ended; a check is no part of a turn."""
    now = [0.0]
    keep_time(monkeypatch, lambda: now[0])
    timer = host_timer.HostTimer([lambda: now.__setitem__(0, now[0] + 40e-6)] * 5, 120)
    assert timer.begin_turn() and timer.reached() == []
    timer.rotate()
    assert timer.reached() == []
    reached = []
    for _ in range(3):
        timer.sample()
        reached.append(timer.reached())
        timer.begin_turn()
    assert reached == [[0, 1, 2], [0, 3, 4], [1, 2, 3]]


@pytest.mark.parametrize(("took", "interval", "calls"), [(0.5e-6, 10, 20), (2.0**-4, 125_000.1, 3), (0.0, 10, 100)])
def test_a_sample_fills_the_interval(monkeypatch: pytest.MonkeyPatch, took: float, interval: float, calls: int) -> None:
    """Not a millionth less; what takes no time at all takes a tenth of a microsecond."""
    now = [0.0]
    keep_time(monkeypatch, lambda: now[0])

    def call() -> None:
        now[0] += took

    assert host_timer.HostTimer([call] * 3, interval).calls == calls


@pytest.mark.parametrize(("slow_rotations", "calls"), [(1, 10), (3, 10), (4, 1)])
def test_a_call_is_not_estimated_while_the_machine_holds_it_up(slow_rotations, calls, monkeypatch) -> None:
    """The least of up to four rotations counts where the first takes longer than a sample has to."""
    rotations = iter([8000.0] * slow_rotations + [10.0] * 4)
    monkeypatch.setattr(host_timer.HostTimer, "_timed", lambda timer, first, count: next(rotations))
    assert host_timer.HostTimer([len] * 3, 100).calls == calls


def test_the_wall_median_is_of_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = [0.0], iter([500e-6, 10e-6, 400e-6, 20e-6, 30e-6])
    monkeypatch.setattr(timers, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += next(times)

    assert timers.wall_median_us([call], 5, "cpu") == pytest.approx(30.0)


def test_the_wall_median_is_from_idle_to_idle(device: Device) -> None:
    """3 us on the host and 20 on the device, and not the 500 us of before."""
    device.queue(500)

    def call() -> None:
        device.host += 3
        device.queue(20)

    assert timers.wall_median_us([call], 3, "cuda") == pytest.approx(23.0)


def test_a_host_timer_compares_what_calls_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of lone rotations, less 100 us and a microsecond per 20 kB, and the least of samples; whatever time passes."""
    now, computes = [0.0, 0.0], [40.0]
    timed = host_timer.HostTimer._timed
    known = timed.__defaults__
    monkeypatch.setattr(timed, "__defaults__", (lambda: now[0], lambda: now[1], *known[2:]))

    def call() -> None:
        now[0] += 1e-3
        now[1] += computes[0] / 1e6

    timer = host_timer.HostTimer([call] * 3, 100, nbytes=200_000)
    for computes[0] in (170.0, 150.0, 190.0):
        timer.rotate()
    assert timer.alone_us() == pytest.approx(150 - 100 - 10)
    computes[0] = 60.0
    assert timer.among_us([[1.0]]) == pytest.approx(60), "there was none"
    for computes[0] in (80.0, 45.0):
        timer.sample()
    assert timer.among_us([[1.0]]) == pytest.approx(45)


class Work:
    """Computes for so many microseconds in another thread, and waits for it as long as asked."""

    def __init__(self, microseconds: float, waits: bool) -> None:
        self.pool, self.seconds, self.waits = ThreadPoolExecutor(1), microseconds / 1e6, waits

    def spin(self) -> None:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass

    def __call__(self) -> None:
        done = self.pool.submit(self.spin)
        if self.waits:
            done.result()


def test_work_of_other_threads_is_seen() -> None:
    """In a call and after it, where torch has one thread."""
    torch.set_num_threads(1)
    here = host_timer.HostTimer([Work(1000, True).spin], 100)
    here.sample()
    assert here.elsewhere() < 0.05
    there = host_timer.HostTimer([Work(1000, True)], 100)
    there.sample()
    assert there.elsewhere() > 0.5
    later = host_timer.HostTimer([Work(8000, False)], 1)
    assert any(later.outstanding_us() > 250 for _ in range(20)), "on a busy machine it may get no core meanwhile"


def test_the_share_of_other_threads_is_what_three_of_four_samples_have_at_least() -> None:
    torch.set_num_threads(1)
    timer = host_timer.HostTimer([lambda: None], 1)
    timer._elsewhere = [0.4, 0.1, 0.3, 0.2]
    assert timer.elsewhere() == 0.2


def test_calls_of_rotations_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's CPU time, in a rotation at a random place of a sample, and in one at such a place that a mark precedes."""
    now, ran = [0.0], []
    known = host_timer.HostTimer._each.__defaults__
    monkeypatch.setattr(host_timer.HostTimer._each, "__defaults__", (lambda: now[0],))
    monkeypatch.setattr(host_timer, "pause", lambda: ran.append("pause"))
    assert known == (time.process_time,)

    def call(i: int) -> None:
        now[0] += (i + 1) / 1e6
        ran.append(i)

    timer = host_timer.HostTimer([partial(call, i) for i in range(3)], 1)
    timer.calls, places = 8, set()
    for _ in range(200):
        ran.clear()
        times = timer.among()
        assert ran[0] == "pause" and times == pytest.approx([i + 1 for i in ran[-3:]])
        assert sorted(ran[-3:]) == [0, 1, 2] and ran[1:] == [(ran[1] + i) % 3 for i in range(len(ran) - 1)]
        places.add(len(ran) - 4)
        last = ran[-1]
        ran.clear()
        times = timer.lone(lambda: ran.append("mark"))
        assert ran[0] == "pause" and ran[-4] == "mark" and times == pytest.approx([i + 1 for i in ran[-3:]])
        calls = [i for i in ran[1:] if i != "mark"]
        assert calls == [(last + 1 + i) % 3 for i in range(len(calls))]
        places.add(len(ran) - 5)
    assert places == {1, 2, 3, 4, 5}


def test_pairs_are_fewer_where_rotations_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a single set, or with several threads."""
    torch.set_num_threads(1)
    timer = host_timer.HostTimer([lambda: None] * 3, 1)
    for timer._among, pairs in (([1000.0], 10), ([4000.0], 4), ([1e6], 1)):
        assert timer.pairs() == pairs
    assert host_timer.HostTimer([lambda: None], 1).pairs() == 0
    monkeypatch.setattr(host_timer.torch, "get_num_threads", lambda: 2)
    assert timer.pairs() == 0


def pairs_of(*attempts: tuple[list[float], list[float]]) -> host_timer.Pairs:
    """Ten rotations of each kind in every attempt."""
    pairs = host_timer.Pairs()
    for among, alone in attempts:
        pairs.add([among] * 10, [alone] * 10)
    return pairs


def test_calls_count_and_so_do_whole_rotations() -> None:
    """One call may do the work of all others."""
    assert pairs_of(([9.0, 1.0, 1.0], [9.0, 1.0, 1.0])).ratio == 1
    assert pairs_of(([1.0, 1.0, 1.0], [1.5, 1.5, 1.5])).ratio == 1.5
    assert pairs_of(([1.0, 1.0, 1.0], [4.0, 1.0, 1.0])).ratio == pytest.approx(2 / 1.15)
    assert pairs_of(*[([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])] * 20).shortened


def test_the_lowest_tenth_is_compared() -> None:
    """Of 20 calls the third least: others on the host hold up most, and two may be quicker than any should be."""
    pairs = host_timer.Pairs()
    pairs.add([[1.0, 1.0]] + [[2.0, 50.0]] * 9, [[0.1, 0.1]] + [[3.0, 70.0]] * 9)
    assert pairs.ratio == 1.5 and not pairs.whole
    assert "of 10 pairs: 3.0 and 2.0 us of a call, 73.0 and 52.0 us of a rotation; limit 1.25" in str(pairs)


def test_most_attempts_must_agree_that_work_is_left_out() -> None:
    """A host that was quiet for one of them, and then only for rotations among others, is no evidence."""
    quiet, busy = ([1.0] * 3, [2.0] * 3), ([2.0] * 3, [2.0] * 3)
    few, most = pairs_of(*[quiet] * 10, *[busy] * 10), pairs_of(*[quiet] * 11, *[busy] * 10)
    assert few.ratio == most.ratio == 2 and not few.shortened and not few.whole and most.shortened


@pytest.mark.parametrize(("times", "after"), [(1.25, None), (1.26, 20), (9.0, 20)])
def test_what_is_above_the_limit_leaves_work_out(times, after) -> None:
    """In the last attempt, and not before."""
    known = [count for count in range(1, 31) if pairs_of(*[([1.0] * 2, [times] * 2)] * count).shortened]
    assert (known[0] if known else None) == after


@pytest.mark.parametrize(
    ("call_us", "device", "kept"), [(100, "cpu", 50), (1, "cpu", 90), (5000, "cpu", 3), (100, "cuda", 90)]
)
def test_calls_next_to_isolated_ones_rotate_over_as_many_sets(call_us, device, kept, monkeypatch):
    """As take five milliseconds on a CPU, and no fewer than are checked; a GPU has as many as its cache asks for."""
    now = [0.0]
    monkeypatch.setattr(timers, "perf_counter", lambda: now[0])
    calls = [lambda: now.__setitem__(0, now[0] + call_us / 1e6) for _ in range(90)]
    first = calls[0]
    timers.shorten(calls, device, 3)
    assert len(calls) == pytest.approx(kept, abs=1) and calls[0] is first


def test_a_rotation_that_the_machine_holds_up_leaves_no_fewer_calls(monkeypatch):
    """The first takes ten times as long as the others: 100 us a call count, not a millisecond."""
    now, taken = [0.0], [0]

    def call() -> None:
        taken[0] += 1
        now[0] += 1e-3 if taken[0] <= 90 else 1e-4

    monkeypatch.setattr(timers, "perf_counter", lambda: now[0])
    calls = [call] * 90
    timers.shorten(calls, "cpu", 3)
    assert len(calls) == pytest.approx(50, abs=1)
