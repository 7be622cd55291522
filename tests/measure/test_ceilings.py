"""Ceilings without a GPU: sizes and places of a short stream's launches, and the planted rates of a simulated card."""

import contextlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moe_routing_bench.measure import calibration, cpu_ceilings, stream_kernel

BUFFER, CACHE = 64 << 20, 1 << 20  # bytes


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ends of the parts of source and target that are streamed, in elements, in place of launches."""
    found: list[tuple[int, int]] = []

    def launch(source, target, reads, writes, block, warps):
        part = min(source.numel() // reads, target.numel() // writes) // block * block
        found.append((source.storage_offset() + source.numel(), target.storage_offset() + target.numel()))
        assert part and source.storage_offset() % 8 == 0 and target.storage_offset() % 8 == 0, "a load of 16 bytes"
        return part * 2 * (reads + writes)

    monkeypatch.setattr(stream_kernel, "launch", launch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=CACHE))
    monkeypatch.setattr(calibration, "timed", lambda *_: 1e-3)
    return found


def ceilings(read_bytes: int, write_bytes: int) -> calibration.GpuCeilings:
    """Without what needs a device."""
    one = object.__new__(calibration.GpuCeilings)
    one._kernel, one._moved, one._short = stream_kernel, read_bytes + write_bytes, None
    one._source, one._target = (torch.empty(BUFFER // 2, dtype=torch.bfloat16) for _ in range(2))
    return one


@pytest.mark.parametrize(
    ("mix", "nbytes"), [((1, 8), 9 << 20), ((8, 1), 36 << 20), ((1, 2), 3 << 20), ((1, 1), 5_000_001)]
)
def test_a_short_stream_moves_what_the_stage_moves(mix, nbytes, launches) -> None:
    one = ceilings(nbytes * mix[0] // sum(mix), nbytes * mix[1] // sum(mix))
    rate = one._streamed_short(mix)["short_stream_gb_per_s"]
    assert one._short is not None
    sets = one._short[1] / nbytes
    assert round(sets) >= min(BUFFER / nbytes, 5 * CACHE / nbytes + 1) - 1 and sets == pytest.approx(
        round(sets), rel=0.02
    )
    assert rate == pytest.approx(one._short[1] / 1e-3 / 1e9)
    assert all(max(ends) <= BUFFER // 2 for ends in launches)
    assert len(set(launches)) == round(sets), "every launch of a graph has parts of its own"
    before = len(launches)
    one._streamed_short(mix)
    assert len(launches) == before, "the second calibration replays the graph of the first"


def test_a_stage_of_less_than_a_mebibyte_has_no_short_stream(launches) -> None:
    assert ceilings(1 << 18, 1 << 19)._streamed_short((1, 2)) == {} and not launches
    assert ceilings(1 << 19, (1 << 19) - 1)._streamed_short((1, 1)) == {} and not launches
    assert ceilings(1 << 19, 1 << 19)._streamed_short((1, 1)).keys() == {"short_stream_gb_per_s"} and launches


@pytest.mark.parametrize(
    ("mix", "mebibytes", "cache", "sets"),
    [
        ((1, 8), 9, 1, 6),  # reads 1 MiB: five caches and one more; there would be room for 8 writes of 8 MiB
        ((8, 1), 36, 1, 2),
        ((1, 1), 28, 64, 4),  # 14 MiB each: as often as a buffer holds them
        ((1, 1), 128, 1, 1),  # the whole of both buffers
        ((1, 1), 256, 1, 1),  # more than the memory had room for
        ((1, 1), 1, 256, 128),
        ((1, 1), 0.25, 999, 256),  # of 512 parts: the longest graph
    ],
)
def test_launches_of_a_short_stream(mix, mebibytes, cache, sets, launches, monkeypatch) -> None:
    """Until reads are cold, as long as there are parts of the buffers that no other launch has."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=cache << 20))
    one = ceilings(int(mebibytes * 2**20), 0)
    n = one._moved // 2 // sum(mix) // 1024 * 1024
    one._short_graph(mix, n, (1024, 4))
    assert len(launches) == 1 + sets, "one to compile it"


@pytest.mark.parametrize(
    ("mix", "blocks"),
    [((1, 1), {1024, 2048, 4096, 8192}), ((64, 64), {1024, 2048, 4096}), ((100, 1), {1024, 2048, 4096})],
)
def test_no_block_is_larger_than_a_part(mix, blocks, launches, monkeypatch) -> None:
    """1 MiB in 128 parts of 4096 elements, or in 101 of 5120."""
    seen, launch = set(), stream_kernel.launch
    monkeypatch.setattr(stream_kernel, "launch", lambda *given: seen.add(given[4]) or launch(*given))
    ceilings(1 << 20, 0)._streamed_short(mix)
    assert seen == blocks


class Clock:
    """Seconds that pass only where a call lets them: the times of `took`, in turn."""

    def __init__(self, took: list[float]) -> None:
        self.now, self.took = 0.0, iter(took)

    def __call__(self) -> None:
        self.now += next(self.took)


def events(clock: "Clock | Card") -> type:
    """CUDA events that read a clock's `now`, in seconds."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing is True
            self.at = 0.0

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1e3

    return Event


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_median_of_the_repeats_without_the_first(device, monkeypatch) -> None:
    """Nine repeats of two calls: 8 s, then 2, 10, 2, 12, 2, 14, 4, 6 s; the fifth of the last eight in order is 6 s, 3 s a call."""
    took = [8.0, 2.0, 10.0, 2.0, 12.0, 2.0, 14.0, 4.0, 6.0]
    clock = Clock([half for both in took for half in (both / 4, both * 3 / 4)])

    monkeypatch.setattr(calibration, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch.cuda, "Event", events(clock))
    assert calibration.timed(clock, device, 2, 8) == pytest.approx(3.0, rel=1e-12)
    assert next(clock.took, None) is None, "as many repeats as asked, and one to warm up"
    single = Clock([5.0, 1.0, 4.0, 2.0])
    clock.took, clock.now = single.took, 0.0
    assert calibration.timed(clock, device, repeats=3) == pytest.approx(2.0, rel=1e-12), (
        "one call unless more are asked"
    )


class Ran(TorchFunctionMode):
    """Which operations of torch were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_ceilings_of_a_cpu(monkeypatch) -> None:
    """Bytes and FLOPs of what runs, over its time; a copy reads and writes."""
    asked = []

    def seconds(call, device, calls=1, repeats=7):
        with Ran() as ran:
            call()
        asked.append((ran.names[-1], device, calls, repeats))
        return 2e-3

    monkeypatch.setattr(cpu_ceilings, "timed", seconds)
    found = cpu_ceilings.CpuCeilings().measure()
    nbytes = 4 * (8 << 20)
    assert found == pytest.approx(
        {
            "copy_gb_per_s": 2 * nbytes / 2e-3 / 1e9,
            "read_gb_per_s": nbytes / 2e-3 / 1e9,
            "write_gb_per_s": nbytes / 2e-3 / 1e9,
            "peak_tflops": 2 * 768**3 / 2e-3 / 1e12,
            "launch_us": 2e3,
        },
        rel=1e-13,
        abs=0,
    )
    whole = [(name, "cpu", 1, 7) for name in ("copy_", "sum", "fill_", "matmul")] + [("add_", "cpu", 20, 7)]
    probe = [("copy_", "cpu", 1, 1), ("mm", "cpu", 1, 1)] * 25  # in turns
    assert asked == [*probe, *whole, *probe]
    assert cpu_ceilings.CpuCeilings().sustained(1.0) == {}


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A simulated CPU: seconds of the probe's copy and product, of the clock, and how often all ceilings were measured."""
    now = SimpleNamespace(copy=1e-3, product=1e-4, clock=1000.0, whole=0)
    rates = {"copy_gb_per_s": 8.0, "read_gb_per_s": 6.0, "write_gb_per_s": 5.0, "peak_tflops": 0.1, "launch_us": 2.0}

    def whole() -> dict[str, float]:
        now.whole += 1
        return dict(rates)

    monkeypatch.setattr(cpu_ceilings, "_copy", lambda _: "copy")
    monkeypatch.setattr(cpu_ceilings, "_product", lambda _: "product")
    monkeypatch.setattr(cpu_ceilings, "timed", lambda which, _, repeats=1: getattr(now, which))
    monkeypatch.setattr(cpu_ceilings, "_whole", whole)
    monkeypatch.setattr(cpu_ceilings.time, "clock_gettime", lambda _: now.clock)
    monkeypatch.setattr(cpu_ceilings, "limits", lambda: (1e10, 1e11))
    return now


def later(known: dict) -> cpu_ceilings.CpuCeilings:
    """Those of another cell of the same server, to which what is known comes as JSON."""
    return cpu_ceilings.CpuCeilings(json.loads(json.dumps(known)))


def test_later_cells_scale_the_ceilings_by_their_probe(cpu) -> None:
    """Copies are slower by 5 %, products faster by 4 %: so are the ceilings, which say when they were measured."""
    first = cpu_ceilings.CpuCeilings()
    rates = first.measure()
    cpu.copy, cpu.product, cpu.clock = 1e-3 / 0.95, 1e-4 / 1.04, cpu.clock + 599
    second = later(first.known)
    scales = {"copy_gb_per_s": 0.95, "read_gb_per_s": 0.95, "write_gb_per_s": 0.95, "peak_tflops": 1.04, "launch_us": 1}
    assert second.measure() == pytest.approx({name: rates[name] * scale for name, scale in scales.items()})
    assert cpu.whole == 1 and second.at == first.at and list(second.limits) == [1e10, 1e11]


NOISE = random.Random(1)


def noisy(sigma: float, drift: float) -> tuple[bool, float]:
    """Whether a probe with such noise, before and after a drift of the CPU, makes a cell suspect; and the drift that it finds."""
    rates = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ceilings, "_copy", lambda _: 1.0)
        patch.setattr(cpu_ceilings, "_product", lambda _: 0.1)
        one = cpu_ceilings.CpuCeilings({"rates": {"copy_gb_per_s": 8.0, "peak_tflops": 0.1}, "probe": (1.0, 10.0)})
        patch.setattr(one, "_holds", lambda *_: True)
        for slower in (1.0, 1 + drift):
            draw = lambda seconds, *_, repeats=1, slower=slower: seconds * slower * math.exp(NOISE.gauss(0, sigma))  # noqa: E731
            patch.setattr(cpu_ceilings, "timed", draw)
            rates.append((one.measure(), one.noise))
    (before, first), (after, second) = rates
    found = calibration.drift(before, after, ["copy_gb_per_s"], (first, second))
    return found > 0.02, found


@pytest.mark.parametrize("sigma", [0.003, 0.02, 0.1, 0.3])
def test_the_noise_of_a_probe_is_no_drift_of_the_cpu(sigma) -> None:
    """Of 400 CPUs without a drift at most one in twelve is called suspect, however noisy; of those that became slower by three widths, most are."""
    assert sum(noisy(sigma, 0.0)[0] for _ in range(400)) <= 400 / 12
    drift = 0.03 + 2.5 * sigma
    assert sum(noisy(sigma, drift)[0] for _ in range(100)) >= 90
    quiet = noisy(1e-9, 0.05)[1]
    assert quiet == pytest.approx(1 - 1 / 1.05, rel=1e-6), "without noise the drift is all of the change"


def test_copies_and_products_have_noises_of_their_own(monkeypatch) -> None:
    rates = {"copy_gb_per_s": 8.0, "launch_us": 2.0, "peak_tflops": 0.1}
    one = cpu_ceilings.CpuCeilings({"rates": rates, "probe": (1.0, 10.0)})
    monkeypatch.setattr(one, "_holds", lambda *_: True)
    monkeypatch.setattr(one, "_probed", lambda: ((1.0, 10.0), (0.1, 0.3)))
    one.measure()
    assert one.noise == {"copy_gb_per_s": 0.1, "launch_us": 0.1, "peak_tflops": 0.3}


def test_the_noise_of_a_median_of_25_times() -> None:
    """Half of the logarithm of the eighth from above over the eighth from below."""
    assert cpu_ceilings._off([1.0] * 25) == 0
    assert cpu_ceilings._off([1.0] * 8 + [2.0] * 10 + [3.0] * 7) == pytest.approx(math.log(2) / 2)
    assert cpu_ceilings._off([0.1] * 7 + [1.0] * 11 + [9.0] * 7) == 0, "outliers do not count"


@pytest.mark.parametrize("change", ["clock", "load", "threads", "CPUs", "age", "suspended", "booted"])
def test_ceilings_of_another_state_are_not_used(change, cpu, monkeypatch) -> None:
    """A CPU with another clock or load, other threads or cores, or what was measured long ago or before a boot: all is measured again."""
    first = cpu_ceilings.CpuCeilings()
    first.measure()
    if change == "clock":
        cpu.product *= 1.4
    elif change == "load":
        cpu.copy *= 1.4
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    elif change == "CPUs":
        monkeypatch.setattr(cpu_ceilings.os, "sched_getaffinity", lambda _: {97})
    else:
        cpu.clock += {"age": 601, "suspended": 90_000, "booted": -1}[change]
    second = later(first.known)
    rates = second.measure()
    assert cpu.whole == 2 and second.known["clock"] == cpu.clock and rates == second.known["rates"]


class Card(TorchFunctionMode):
    """A GPU of planted rates: what runs on it takes the time of its bytes or its FLOPs. Its tensors have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.tflops, self.hot = 0.0, 800.0, float("inf")  # `hot`: the second from which it makes 600
        self.captured: list[float] | None = None
        self.ran: Counter[str] = Counter()
        self.mixes: set[tuple[int, int]] = set()  # of the streams

    def spend(self, name: str, seconds: float) -> None:
        """A kernel runs, or is captured, which one that has never run cannot be: its module is loaded when it first does."""
        if self.captured is None:
            self.now += seconds
            self.ran[name] += 1
        else:
            assert self.ran[name], f"{name} was never launched"
            self.captured.append(seconds)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, given = func.__name__, dict(kwargs or {})
        if "device" in given:
            assert given["device"] == "cuda"
            given["device"] = "meta"
        if name == "mm":
            assert given["out"].shape == (len(args[0]), args[1].shape[1]), "torch would make it larger, within the time"
        found = func(*args, **given)
        if name == "copy_":
            self.spend(name, 2 * args[0].nbytes / 4e12)
        elif name == "fill_":
            self.spend(name, args[0].nbytes / 3e12)
        elif name == "mm":
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            assert given["out"].dtype == args[0].dtype == torch.bfloat16
            self.spend(name, 2 * rows * inner * columns / (600e12 if self.now >= self.hot else self.tflops * 1e12))
        elif name == "add_":
            self.spend(name, 2.5e-6 if self.captured is None else 1.5e-6)
        return found

    def launch(self, source, target, reads, writes, block, warps) -> int:
        """The stream kernel: 2000 GB/s with blocks of 1024, 3000 with the best block, which is 8192 where it reads alone."""
        assert source.device.type == "meta"
        self.mixes.add((reads, writes))
        part = min(source.numel() // max(reads, 1), target.numel() // max(writes, 1)) // block * block
        best = (block, warps) == ((4096, 4) if writes else (8192, 8))
        moved = part * 2 * (reads + writes)
        self.spend("stream", 1e-6 + moved / (3e12 if best else 2e12))
        return moved


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """The card in place of torch's GPU, with 80 GB of free memory and 50 MB of cache."""
    one, seconds = Card(), calibration.timed

    class CUDAGraph:
        def replay(self) -> None:
            one.now += self.work
            one.ran["replay"] += 1

    @contextlib.contextmanager
    def graph(captured: CUDAGraph):
        one.captured = []
        yield
        captured.work, one.captured = sum(one.captured), None

    def checked(call, device, calls=1, repeats=7):
        assert device == "cuda"
        return seconds(call, device, calls, repeats)

    for name, part in (
        ("Event", events(one)),
        ("CUDAGraph", CUDAGraph),
        ("graph", graph),
        ("current_device", lambda: 0),
    ):
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50 << 20))
    monkeypatch.setattr(stream_kernel, "launch", one.launch)
    monkeypatch.setattr(calibration, "timed", checked)
    monkeypatch.setattr(calibration, "perf_counter", lambda: one.now)
    with one:
        yield one


def test_ceilings_of_a_gpu_are_what_was_planted(card) -> None:
    """8 repeats of 2 copies, fills and products, of 100 launches and of a graph; a stream is timed 4 times with every
    configuration, then 8 times with the best, which the second calibration remembers."""
    mix, read = (1, 2), 3 << 20
    one = calibration.GpuCeilings(mix, read, 2 * read)
    assert card.ran == {"add_": 1}
    found, size = one.measure(), 2 << 30
    assert card.mixes == {(1, 0), mix} and one._tiny.device == one._a.device
    stream = lambda moved: moved / (1e-6 + moved / 3e12) / 1e9  # noqa: E731
    part = lambda parts, block: size // 2 // parts // block * block * 2  # noqa: E731
    expected = {
        "copy_gb_per_s": 4000.0,
        "write_gb_per_s": 3000.0,
        "peak_tflops": 800.0,
        "launch_us": 2.5,
        "graph_node_us": 1.5,
        "read_gb_per_s": stream(size),
        "stream_gb_per_s": stream(3 * part(2, 4096)),
        "short_stream_gb_per_s": stream(3 * read),
    }
    assert found == pytest.approx(expected, rel=2e-11, abs=0)
    chosen = 5 * (1 + 4 * 2) + 1 + 8 * 2
    assert card.ran == {
        "add_": 1 + 800,
        "copy_": 16,
        "fill_": 16,
        "mm": 16,
        "replay": 8 + 5 * 4 + 8,
        "stream": 2 * chosen + 5,
    }
    assert one.measure() == pytest.approx(expected, rel=2e-11, abs=0)
    assert card.ran["stream"] == 2 * chosen + 5 + 2 * 17 and card.ran["replay"] == 36 + 16
    assert calibration.GpuCeilings().measure().keys() == expected.keys() - {
        "stream_gb_per_s",
        "short_stream_gb_per_s",
    }


def test_the_fastest_short_stream_is_that_of_most_bytes_per_second(card) -> None:
    """Of 15 blocks of 1024, one of 8192 holds little more than half, in less time."""
    one = calibration.GpuCeilings((32, 1), 1 << 20, 0)
    moved = 33 * 15 * 1024 * 2
    best = 33 * 3 * 4096 * 2
    rate = {
        block: size / (1e-6 + size / speed) / 1e9 for block, size, speed in ((1024, moved, 2e12), (4096, best, 3e12))
    }
    assert one._streamed((32, 1)) and one._streamed_short((32, 1))["short_stream_gb_per_s"] == pytest.approx(
        max(rate.values()), rel=2e-11, abs=0
    )


@pytest.mark.parametrize(
    ("read", "write", "free", "size"),
    [(1, 2, 80, 2), (3, 1, 80, 3), (1, 5, 80, 5), (9, 9, 80, 8), (3, 3, 16, 2), (3, 3, 8, 1), (0, 0, 80, 2)],
)
def test_buffers_of_a_gpu(read, write, free, size, card, monkeypatch) -> None:
    """In GiB: as much as the stage reads or writes, between 2 and 8, and no more than an eighth of what is free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 0))
    one = calibration.GpuCeilings((1, 1), read << 30, write << 30)
    assert one._source.nbytes == one._target.nbytes == size << 30
    assert one._a.shape == one._dot.shape == (8192, 8192)


def test_what_a_gpu_sustains(card) -> None:
    """Its rate after a second of products: 800 TFLOP/s at first, and 600 from 0.99 s on; in steps of 16 products."""
    one = calibration.GpuCeilings()
    now, products, flops = 0.0, 0, 2 * 8192**3
    while now < 1.0:
        for _ in range(16):
            now, products = now + flops / (800e12 if now < 0.99 else 600e12), products + 1
    card.hot, begin = card.now + 0.99, now
    while now < begin + 0.5:
        for _ in range(16):
            now, products = now + flops / 600e12, products + 1
    assert one.sustained(1.0) == pytest.approx({"sustained_tflops": 600.0}, rel=2e-11, abs=0)
    assert card.ran["mm"] == products, "the median is over half as long again"
    card.hot = card.now + 2
    assert one.sustained(0.0) == pytest.approx({"sustained_tflops": 800.0}, rel=2e-11, abs=0)


def test_what_a_gpu_sustains_of_products(card) -> None:
    """The time of one of each, once they have run for a second: 0.4 and 0.6 TFLOP, at 800 TFLOP/s at first, then at 600."""
    one = calibration.GpuCeilings()
    card.hot = card.now + 2.99  # the large product has a second as well
    found = one.sustained(1.5, [(100_000, 500, 4000), (100_000, 3000, 1000)], torch.bfloat16)
    assert found == pytest.approx({"sustained_tflops": 800.0, "dense_us": 1e12 / 600e12 * 1e6}, rel=2e-11, abs=0)


def test_mean_and_drift() -> None:
    """The mean of before and after; the largest change of what is watched, and of nothing else."""
    before, after = {"a": 100.0, "b": 10.0, "c": 1.0}, {"a": 96.0, "b": 11.0, "c": 9.0}
    assert calibration.mean(before, after) == {"a": 98.0, "b": 10.5, "c": 5.0}
    assert calibration.drift(before, after, ["a"]) == pytest.approx(0.04)
    assert calibration.drift(before, after, ["a", "b"]) == pytest.approx(0.1)
    noises = {"a": 0.03, "b": 0.06}, {"b": 0.08}
    assert calibration.drift(before, after, ["a"], noises) == pytest.approx(0.01)
    assert calibration.drift(before, after, ["a", "b"], noises) == pytest.approx(0.01), "b may differ by 10 %"
    assert calibration.drift(before, after, ["b"], noises) == pytest.approx(0.0, abs=1e-12)
    assert not calibration.GpuCeilings.noise, "all of a change of a GPU counts"


@pytest.mark.parametrize(
    ("nbytes", "flops", "names"),
    [
        (10**9, 0, ["copy"]),
        (10**9, 1e12, ["copy"]),  # 10 ms, and 2.5 ms
        (10**9, 2e12, ["copy"]),  # 5 ms: just half of it
        (10**9, 2.01e12, ["copy", "peak"]),
        (10**9, 7.99e12, ["copy", "peak"]),
        (10**9, 8e12, ["peak"]),  # 20 ms
        (1, 10**15, ["peak"]),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_ceilings_that_bind(nbytes, flops, names, streams, limited) -> None:
    """Of 100 GB/s and 400 TFLOP/s; a stream is of what a stage itself does. Under the power limit 400 is what lasts, and a burst is nothing."""
    rates = {"peak_tflops": 900.0, "sustained_tflops": 400.0, "dense_us": 7.0} if limited else {"peak_tflops": 400.0}
    ceilings = {"copy_gb_per_s": 100.0, "launch_us": 5.0} | rates | ({"stream_gb_per_s": 90.0} if streams else {})
    units = {"copy": ["copy_gb_per_s"], "peak": ["sustained_tflops", "dense_us"] if limited else ["peak_tflops"]}
    known = [name for one in names for name in units[one]] + ["stream_gb_per_s"] * streams
    assert calibration.binding(ceilings, nbytes, flops) == known


@pytest.mark.parametrize(("nbytes", "sets"), [(CACHE, 6), (CACHE // 2, 11), (300_000, 19), (10 * CACHE, 2)])
def test_sets_until_the_cache_is_cold(nbytes, sets, launches, monkeypatch) -> None:
    """Five times the cache, rounded up, and one more; of the device that is current."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: {0: SimpleNamespace(L2_cache_size=CACHE)}[device]
    )
    assert calibration.cold_sets(nbytes) == sets
