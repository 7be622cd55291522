"""How the short stream is cut from the buffers, without a GPU: sizes and places of its launches."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.measure import calibration, stream_kernel

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
    monkeypatch.setattr(calibration, "_seconds", lambda *_: 1e-3)
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


class Clock:
    """Seconds that pass only where a call lets them: the times of `took`, in turn."""

    def __init__(self, took: list[float]) -> None:
        self.now, self.took = 0.0, iter(took)

    def __call__(self) -> None:
        self.now += next(self.took)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_median_of_the_repeats_without_the_first(device, monkeypatch) -> None:
    """Nine repeats of two calls: 8 s, then 2, 10, 2, 12, 2, 14, 4, 6 s; the fifth of the last eight in order is 6 s, 3 s a call."""
    took = [8.0, 2.0, 10.0, 2.0, 12.0, 2.0, 14.0, 4.0, 6.0]
    clock = Clock([half for both in took for half in (both / 4, both * 3 / 4)])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing is True

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert calibration._seconds(clock, device, 2, 8) == pytest.approx(3.0, rel=1e-12)
    assert next(clock.took, None) is None, "as many repeats as asked, and one to warm up"
    single = Clock([5.0, 1.0, 4.0, 2.0])
    clock.took, clock.now = single.took, 0.0
    assert calibration._seconds(clock, device, repeats=3) == pytest.approx(2.0, rel=1e-12), (
        "one call unless more are asked"
    )


def test_ceilings_of_a_cpu(monkeypatch) -> None:
    """Bytes and FLOPs of what runs, over its time; a copy reads and writes."""
    asked = []

    def seconds(call, device, calls=1):
        asked.append((device, calls))
        call()
        return 2e-3

    monkeypatch.setattr(calibration, "_seconds", seconds)
    found = calibration.CpuCeilings().measure()
    nbytes = 4 * (8 << 20)
    assert found == pytest.approx(
        {
            "copy_gb_per_s": 2 * nbytes / 2e-3 / 1e9, "read_gb_per_s": nbytes / 2e-3 / 1e9, "write_gb_per_s": nbytes / 2e-3 / 1e9,
            "peak_tflops": 2 * 768**3 / 2e-3 / 1e12, "launch_us": 2e3,
        },
        rel=1e-12,
    )  # fmt: skip
    assert asked == [("cpu", 1)] * 4 + [("cpu", 20)] and calibration.CpuCeilings().sustained(1.0) == {}


def test_mean_and_drift() -> None:
    """The mean of before and after; the largest change of what is watched, and of nothing else."""
    before, after = {"a": 100.0, "b": 10.0, "c": 1.0}, {"a": 96.0, "b": 11.0, "c": 9.0}
    assert calibration.mean(before, after) == {"a": 98.0, "b": 10.5, "c": 5.0}
    assert calibration.drift(before, after, ["a"]) == pytest.approx(0.04)
    assert calibration.drift(before, after, ["a", "b"]) == pytest.approx(0.1)


@pytest.mark.parametrize(("nbytes", "sets"), [(CACHE, 6), (CACHE // 2, 11), (300_000, 19), (10 * CACHE, 2)])
def test_sets_until_the_cache_is_cold(nbytes, sets, launches, monkeypatch) -> None:
    """Five times the cache, rounded up, and one more; of the device that is current."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {0: SimpleNamespace(L2_cache_size=CACHE)}[device])  # fmt: skip
    assert calibration.cold_sets(nbytes) == sets
