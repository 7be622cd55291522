"""Every number of a row, worked out by hand: implementations that take planted times on a clock of the test's own."""

import functools
import json
import math
import os
import re
import time
import types
from datetime import UTC, datetime, timedelta
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from moe_routing_bench.benches import composite
from moe_routing_bench.benches.checks import Assignment, Cost
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import (
    calibration,
    candidate,
    completion,
    cpu_ceilings,
    faults,
    host_timer,
    memory,
    outcome,
    sampling,
    supervisor,
    timers,
    verify,
    worker,
)
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.store.rows import SCHEMA_VERSION
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.pack import torch_pack

CELL = cell_of("pack", tokens=64, hidden=32, experts=4, top_k=2, dtype="fp32")
SETTINGS = Settings(
    check_seeds=2,
    warmup_ms=2,
    settle_blocks=3,
    interval_us=950,
    samples_per_block=3,
    min_blocks=5,
    max_blocks=20,
    wall_calls=4,
    max_seconds=10,
    target_half_width=0.01,
)
CEILINGS = {
    "copy_gb_per_s": 100.0,
    "read_gb_per_s": 50.0,
    "write_gb_per_s": 200.0,
    "peak_tflops": 4.0,
    "launch_us": 2.0,
}
BYTES = 64 * 32 * 4 + 64 * 2 * 4 + 64 * 2 * 32 * 4  # rows of x, order; packed rows


class Clock:
    """What `perf_counter` says: seconds that pass only where a call lets them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of timers and sampling, and ceilings that stay as they are."""
    found = Clock()
    for module in (timers, sampling):
        monkeypatch.setattr(module, "perf_counter", found)
    timed = host_timer.HostTimer._timed  # which has its clocks at hand
    monkeypatch.setattr(timed, "__defaults__", (found, found, *timed.__defaults__[2:]))
    monkeypatch.setattr(host_timer.HostTimer, "elsewhere", lambda timer: 0.0)  # threads go by another clock
    monkeypatch.setattr(cpu_ceilings.CpuCeilings, "measure", lambda self: dict(CEILINGS))
    return found


@pytest.fixture
def measured(clock, add_packs):
    """Measure `pack` with implementations that take planted times, by name a function of the number of calls so far to µs."""

    def run(job: Job, on: str = "cpu", **planted):
        module, count = types.ModuleType("planted_packs"), dict.fromkeys(planted, 0)

        def bind(problem, *, name, x, order, inverse, packed):
            work = torch_pack.bind(problem, x=x, order=order, inverse=inverse, packed=packed)

            def call():
                work()
                clock.now += planted[name](count[name]) / 1e6
                count[name] += 1

            return call

        module.bind = bind
        add_packs(module, "name", tuple(planted))
        found, messages = {}, []

        def send(message):
            messages.append(message)
            found.update(message[1] if message[0] == "rows" else {})

        worker.run(job, on, list(planted), send)
        return found, messages

    return run


def test_a_row_of_constant_times(measured):
    """100 µs each: 10 calls of a sample, 3 samples of a block, 5 blocks until it has converged; twice as fast as 200 µs."""
    job = Job(CELL, ("torch", "slow", "fast"), SETTINGS)
    rows, messages = measured(job, slow=lambda _: 200.0, fast=lambda _: 100.0)
    fast, slow = rows["fast"], rows["slow"]
    times = (
        "median_us",
        "ci_low_us",
        "ci_high_us",
        "min_us",
        "p5_us",
        "q1_us",
        "q3_us",
        "p95_us",
        "max_us",
        "wall_median_us",
    )
    assert [fast[name] for name in times] == pytest.approx([100.0] * len(times)) and fast["mad_us"] < 1e-9
    assert (fast["calls_per_sample"], slow["calls_per_sample"]) == (10, 5)
    assert (fast["blocks"], fast["samples"], fast["set_aside"], fast["set_aside_samples_us"]) == (5, 15, 0, [])
    assert (len(fast["samples_us"]), fast["samples_us"]) == (15, pytest.approx([100.0] * 15))
    assert fast["block_medians_us"] == pytest.approx([100.0] * 5)
    assert (fast["converged"], fast["settled"], fast["turns"]) == (True, True, "short")
    assert fast["stop_reason"] == "converged, half-width 0.00%"
    # 2 ms of warm-up, then two blocks of three samples until two in a row agree
    assert fast["warmup_calls"] in (20 + 60, 21 + 60) and slow["warmup_calls"] in (10 + 30, 11 + 30)
    assert (fast["cold_sets"], fast["cold"], fast["timer"]) == (2, None, "wall")
    assert (
        fast["best_other"] == "slow"
        and fast["best_speedup"] == pytest.approx(2)
        and slow["best_speedup"] == pytest.approx(0.5)
    )
    assert "speedup" not in fast, "the baseline did not run"
    assert not {"warm_median_us", "peak_memory_bytes"} & fast.keys(), "of a GPU"
    assert fast["block_clocks_mhz"] == [None] * 5 == fast["block_powers_w"]
    assert {name: fast[name] for name in CEILINGS} == CEILINGS and fast["calibration_drift"] == 0
    assert (fast["read_bytes"] + fast["write_bytes"], fast["compulsory_bytes"], fast["flops"]) == (BYTES, BYTES, 0)
    assert (fast["write_bytes"], fast["device"], fast["status"]) == (64 * 2 * 32 * 4, "cpu", "ok")
    assert (fast["rel_l2_error"], fast["max_abs_error"], fast["tolerance"], fast["mismatches"], fast["ties"]) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert sum(fast["expert_load"]) == 128 and fast["load_cv"] == 0 and fast["drop_rate"] == 0 and fast["rows"] == 128
    assert 0 < fast["check_nonce"] < 2**31 and fast["measure_seconds"] > 0 and "launch_hidden" not in fast
    steps = [(message[1], message[2]) for message in messages if message[0] == "at"]
    assert steps[:2] == [(None, "inputs"), (None, "calibration")]
    assert steps[2:8] == [(name, step) for name in ("slow", "fast") for step in ("preparing", "warming up", "checking")]
    assert [step for step in steps if step[1] == "sampling"].count(("fast", "sampling")) == 5
    assert (None, "calibration") in steps[8:] and steps[-2:] == [("slow", "checking again"), ("fast", "checking again")]
    assert 2 <= sum(step[1] == "checking between samples" for step in steps) <= 4, "one surprise for each is certain"


def test_what_follows_from_a_row(measured):
    """Rates and shares of 100 µs: the supervisor's part."""
    job = Job(CELL, ("torch", "fast"), SETTINGS)
    rows, _ = measured(job, fast=lambda _: 100.0)
    found = completion.derived(job, rows["fast"])
    gb_per_s = BYTES / 100e-6 / 1e9
    assert found["tokens_per_s"] == pytest.approx(64 / 100e-6) and found["gb_per_s"] == pytest.approx(gb_per_s)
    assert found["share_of_copy"] == pytest.approx(gb_per_s / 100)
    assert "energy_mj_per_token" not in found
    assert completion.derived(job, rows["fast"] | {"energy_mj": 32.0})["energy_mj_per_token"] == 0.5
    assert found["mixed_gb_per_s"] is None and not {"roofline_us", "share_of_roofline"} & found.keys(), (
        "a CPU has caches"
    )
    strict = (1 + 2) * 32 * 4  # pack reads a row and writes k of them
    assert found["bytes_per_token_strict"] == strict and found["bw_gibps_strict"] == pytest.approx(
        strict * 64 / 100e-6 / 2**30
    )
    assert (found["rows"], found["padding_waste"]) == (128, 0)
    assert not {"tflops", "share_of_stream", "suspect", "status"} & found.keys()


def test_rounds_pair_the_times_of_a_drift(measured, clock):
    """A machine that becomes slower: the time drifts, the ratio does not, however many calls there were before."""
    job, start = Job(CELL, ("torch", "a", "b"), SETTINGS), clock.now
    slower = lambda us: us * (1 + 2 * (clock.now - start))  # noqa: E731
    rows, _ = measured(job, a=lambda _: slower(100.0), b=lambda _: slower(50.0))
    assert rows["b"]["max_us"] > 1.01 * rows["b"]["min_us"]
    assert rows["b"]["best_speedup"] == pytest.approx(2, rel=0.02)
    low, high = rows["b"]["best_speedup_ci_low"], rows["b"]["best_speedup_ci_high"]
    assert low <= rows["b"]["best_speedup"] <= high


def test_a_cell_that_never_converges_stops_at_a_cap(measured):
    """At the block limit, with times that alternate, or when the sampling time is over; both say so.

    The first block, of 3 samples of 4 calls, takes 3.6 ms, and later ones, of a sample, 1.2 ms: the time is over in the third.
    """
    swinging = lambda n: 100.0 if n // 30 % 2 else 300.0  # noqa: E731  (a block has 30 calls, or fewer)
    rows, _ = measured(Job(CELL, ("torch", "a"), SETTINGS), a=swinging)
    assert not rows["a"]["converged"] and rows["a"]["stop_reason"].startswith("block cap, half-width ")
    assert rows["a"]["blocks"] == 20
    capped = Settings(**vars(SETTINGS) | {"max_seconds": 0.005})
    rows, _ = measured(Job(CELL, ("torch", "a"), capped), a=lambda _: 300.0)
    assert rows["a"]["stop_reason"].startswith("time cap") and rows["a"]["blocks"] == 3


def test_sampling_goes_on_until_all_have_converged(measured):
    """That of the first does not end it."""
    planted = {"still": lambda _: 100.0, "swinging": lambda n: 100.0 if n // 30 % 2 else 300.0}
    rows, _ = measured(Job(CELL, ("torch", *planted), SETTINGS), **planted)
    assert rows["still"]["converged"] and rows["still"]["stop_reason"].startswith("block cap")
    assert rows["still"]["blocks"] == rows["swinging"]["blocks"] == 20


def test_blocks_of_a_twin_count_by_its_own_bits():
    """The median over its samples, without its slow block; a pair counts where both of its blocks do."""
    one = Candidate("a", [], blocks=[[100.0], [100.0], [900.0], [100.0]], slow=[0, 0, 1, 0])
    one.twin = Candidate("a", [], blocks=[[100.0], [500.0], [100.0], [400.0]], slow=[0, 1, 0, 0])
    rows = {"a": {}}
    outcome.twins([one], rows)
    assert rows["a"]["twin_median_us"] == 100.0 and rows["a"]["twin_speedup"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("medians", "settled", "blocks"),
    [
        ((100, 100.9), True, 2),
        ((100, 99.1), True, 2),
        ((100, 102, 102), True, 3),
        ((100, 98, 98), True, 3),
        ((100, 102, 104), False, 3),
    ],
)
def test_settling(medians, settled, blocks):
    """Until two blocks in a row agree within 1 %, here at most three; of each block the middle sample counts."""
    samples = iter([sample for median in medians for sample in (1.0, median, 1e6)])
    timer = types.SimpleNamespace(sample=lambda: next(samples), calls=7)
    one = Candidate("a", [], timer=timer, samples_per_block=3)
    assert sampling.settle(one, SETTINGS) == blocks * 3 * 7
    assert one.fields["settled"] is settled and next(samples, None) is None
    one = Candidate("a", [], timer=timer, samples_per_block=3)
    assert (
        sampling.settle(one, Settings(**vars(SETTINGS) | {"settle_blocks": 0})) == 0 and one.fields["settled"] is False
    )


@pytest.mark.parametrize(
    ("interval_us", "us", "calls", "samples"), [(950, 7000.0, 1, 2), (950, 25_000.0, 1, 1), (8000, 1000.0, 8, 2)]
)
def test_a_long_call_has_short_blocks(interval_us, us, calls, samples, measured):
    """Of at most 20 ms, or of one sample: a sample has calls for its interval, five blocks have so many samples each."""
    settings = Settings(**vars(SETTINGS) | {"interval_us": interval_us})
    rows, _ = measured(Job(CELL, ("torch", "a"), settings), a=lambda _: us)
    assert (rows["a"]["calls_per_sample"], rows["a"]["samples"], rows["a"]["blocks"]) == (calls, 5 * samples, 5)


def test_a_drift_of_the_ceilings(measured, monkeypatch):
    """Rows hold the mean of before and after; 4 % of a watched one make a row suspect, and of one that is not watched nothing."""
    for name, drift in (("copy_gb_per_s", 0.04), ("peak_tflops", 0.0)):
        states = iter((CEILINGS, CEILINGS | {name: CEILINGS[name] * 1.04}))
        monkeypatch.setattr(cpu_ceilings.CpuCeilings, "measure", lambda self, states=states: dict(next(states)))
        job = Job(CELL, ("torch", "a"), SETTINGS)
        rows, _ = measured(job, a=lambda _: 100.0)
        assert rows["a"]["calibration_drift"] == pytest.approx(drift)
        assert rows["a"][name] == pytest.approx(CEILINGS[name] * 1.02)
        found = completion.derived(job, rows["a"])
        assert found.get("suspect", False) == bool(drift)
        assert found.get("suspect_reason") == ("ceilings drifted 4.0% during the cell" if drift else None)


def test_a_drift_within_the_noise_of_the_ceilings_is_none(measured, monkeypatch):
    """4 % where both may be off by 3 %; where one may be off by 1 %, the rest is a drift."""
    for noises, drift in (((0.03, 0.03), 0.0), ((0.01, 0.0), 0.03)):
        states = iter(zip((1.0, 1.04), noises, strict=True))

        def measure(self, states=states) -> dict[str, float]:
            factor, noise = next(states)
            self.noise = {"copy_gb_per_s": noise}
            return CEILINGS | {"copy_gb_per_s": CEILINGS["copy_gb_per_s"] * factor}

        monkeypatch.setattr(cpu_ceilings.CpuCeilings, "measure", measure)
        job = Job(CELL, ("torch", "a"), SETTINGS)
        rows, _ = measured(job, a=lambda _: 100.0)
        assert rows["a"]["calibration_drift"] == pytest.approx(drift, abs=1e-12)
        assert completion.derived(job, rows["a"]).get("suspect", False) == bool(drift)


def test_twins_share_the_rounds(measured):
    """Each entry has blocks of its own in every round."""
    job = Job(CELL, ("torch", "a"), SETTINGS, ("a",))
    rows, messages = measured(job, a=lambda _: 100.0)
    assert rows["a"]["twin_speedup"] == pytest.approx(1) and rows["a"]["twin_median_us"] == pytest.approx(100)
    assert rows["a"]["blocks"] == 5 and sum(m[1:3] == ("a", "sampling") for m in messages) == 10


GPU_ROW = CEILINGS | {
    "cold": True,
    "read_bytes": 5 * 10**5,
    "write_bytes": 5 * 10**5,
    "median_us": 10.0,
    "compulsory_bytes": 10**6,
    "flops": 0,
    "device": "cuda",
    "cold_sets": 4,
    "calibration_drift": 0.02,
    "stream_gb_per_s": 160.0,
    "short_stream_gb_per_s": 125.0,
    "other_gpu_processes": 0,
    "expert_load": [40, 24],
    "layout": "compact",
}
derived = functools.partial(completion.derived, Job(CELL, ("torch",), SETTINGS))


def test_what_follows_from_a_row_of_a_gpu():
    found = derived(GPU_ROW)
    assert found["gb_per_s"] == pytest.approx(100) and found["share_of_copy"] == pytest.approx(1)
    assert found["share_of_stream"] == pytest.approx(100 / 160) and found["share_of_short_stream"] == pytest.approx(0.8)
    assert "suspect" not in found and "status" not in found and "tflops" not in found
    flops = derived(GPU_ROW | {"flops": 2 * 10**7, "sustained_tflops": 2.5, "dense_us": GPU_ROW["median_us"] / 1.25})
    assert flops["over_dense"] == pytest.approx(1.25)
    assert (flops["tflops"], flops["share_of_peak"], flops["share_of_sustained"]) == pytest.approx((2.0, 0.5, 0.8))
    assert flops["mixed_gb_per_s"] == 160 and flops["roofline_us"] == pytest.approx(1e6 / 160e9 * 1e6)
    assert flops["share_of_roofline"] == pytest.approx(flops["roofline_us"] / 10)
    assert derived(GPU_ROW | {"flops": 10**8})["roofline_us"] == pytest.approx(25)
    warm = GPU_ROW | {"cold": False}
    assert "roofline_us" not in derived(warm) and derived(warm | {"flops": 10**7})["roofline_us"] == pytest.approx(2.5)
    assert not {"share_of_sustained", "over_dense"} & derived(GPU_ROW | {"flops": 1}).keys()


@pytest.mark.parametrize(
    ("turns", "busy", "said"),
    [("long", 0.894, True), ("long", 0.9, False), ("short", 0.1, False), ("long", None, False)],
)
def test_long_turns_of_a_card_that_rests_between_samples_are_suspect(turns, busy, said):
    """What the power limit allows is then not what is timed."""
    found = derived(GPU_ROW | {"turns": turns} | ({} if busy is None else {"busy_share": busy}))
    assert found.get("suspect_reason") == (
        "the GPU was busy for 89% of its long turns, and rested from the power limit" if said else None
    )


def test_rates_are_exact():
    """To the last digits: no unit is off by one."""
    found = derived(GPU_ROW | {"flops": 3 * 10**7})
    exact = functools.partial(pytest.approx, rel=1e-13)
    assert found["gb_per_s"] == exact(100) and found["tflops"] == exact(3) and found["roofline_us"] == exact(7.5)
    assert derived(GPU_ROW | {"flops": 10**8})["roofline_us"] == exact(25)
    below = derived(GPU_ROW | {"flops": 4 * 10**13})["reason"]
    assert below == "10.00 us is below the roofline of 10000000.00 us"
    without = {name: value for name, value in GPU_ROW.items() if name != "calibration_drift"}
    assert "suspect" not in derived(without), "a row without a calibration has no drift"


def test_strict_bytes_of_quantised_rows():
    """A row of 32 elements of 2 bytes read, two of 1 byte written."""
    cell = cell_of("pack", tokens=64, hidden=32, experts=4, top_k=2, dtype="bf16", packed="fp8_row")
    found = completion.derived(Job(cell, ("torch",), SETTINGS), GPU_ROW)
    assert found["bytes_per_token_strict"] == 32 * (2 + 2 * 1) and isinstance(found["bytes_per_token_strict"], int)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"calibration_drift": 0.021}, "ceilings drifted 2.1% during the cell"),
        ({"other_gpu_processes": 2}, "other processes on the GPU: 2"),
        (
            {"calibration_drift": 0.5, "other_gpu_processes": 1},
            "ceilings drifted 50.0% during the cell; other processes on the GPU: 1",
        ),
    ],
)
def test_what_makes_a_row_suspect(change, reason):
    found = derived(GPU_ROW | change)
    assert (found["suspect"], found["suspect_reason"]) == (True, reason) and found["gb_per_s"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("change", "below"),
    [
        ({"median_us": 4.75}, True),  # the floor is 1 MB at 200 GB/s, the fastest ceiling: 5 us, and 5 % of slack
        ({"median_us": 4.76}, True),
        ({"median_us": 4.77}, False),
        ({"median_us": 4.7, "cold_sets": 1}, False),  # a warm cache may be faster than memory
        ({"median_us": 4.7, "cold_sets": 2}, True),
        ({"median_us": 4.7, "device": "cpu"}, False),
        ({"median_us": 9.5, "flops": 4 * 10**7}, True),  # 10 us at 4 TFLOP/s
        ({"median_us": 9.6, "flops": 4 * 10**7}, False),
    ],
)
def test_below_the_roofline(change, below):
    found = derived(GPU_ROW | change)
    assert (found.get("status") == "below_roofline") == below
    assert not below or f"{change['median_us']:.2f} us is below the roofline of " in found["reason"]


def test_padding_is_waste():
    """Two blocks of 64 rows hold 64 assignments; the layout is the implementation's, whatever the cell's is."""
    for layout, rows in (("block64", 128), ("compact", 64)):
        cell = cell_of("pack", tokens=64, hidden=32, experts=4, top_k=1, dtype="fp32")
        found = completion.derived(
            Job(cell, ("torch",), SETTINGS), GPU_ROW | {"layout": layout, "expert_load": [1, 63, 0, 0]}
        )
        assert (found["rows"], found["padding_waste"]) == (rows, pytest.approx(rows / 64 - 1))
    assert "rows" not in derived(GPU_ROW | {"layout": None})


def test_a_cell_is_sampled_again_where_a_ceiling_has_moved(measured, monkeypatch):
    """On a GPU; on a CPU, where ceilings drift all the time, once."""
    calls = []
    monkeypatch.setattr(worker, "sample", lambda *_, **__: calls.append(1))
    monkeypatch.setattr(outcome, "row", lambda one: {"status": "ok", "median_us": 1.0})
    monkeypatch.setattr(outcome, "speedups", lambda *_: None)
    monkeypatch.setattr(calibration, "drift", lambda *_: 0.06)
    measured(Job(CELL, ("torch", "a"), SETTINGS), a=lambda _: 100.0)
    assert len(calls) == 1


def test_blocks_that_are_set_aside():
    """Those with a slowdown bit, unless all have one; the reason is in the row, and their samples are kept."""
    timer = types.SimpleNamespace(name="cuda_graph", hidden=3, samples=4, calls=1)
    one = Candidate(
        "a",
        [],
        timer=timer,
        blocks=[[1.0, 2.0, 3.0], [50.0, 60.0, 70.0], [2.0, 3.0, 4.0]],
        spans=[8.0, 184.0, 20.0],
        clocks=[1, 2, 3],
        slow=[0, 8, 0],
    )
    row = outcome.row(one)
    assert (row["set_aside"], row["set_aside_samples_us"], row["set_aside_reason"]) == (
        3,
        [50.0, 60.0, 70.0],
        "a hardware slowdown bit",
    )
    assert (
        row["samples_us"] == [1.0, 2.0, 3.0, 2.0, 3.0, 4.0] and row["median_us"] == 2.5 and row["launch_hidden"] == 0.75
    )
    assert row["busy_share"] == pytest.approx(195 / 212)
    one.slow = [8, 8, 8]
    row = outcome.row(one)
    assert (row["set_aside"], row["set_aside_reason"], len(row["samples_us"])) == (0, None, 9)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ([1.0, float("nan")], False),  # the same bits
        ([1.0, 2.0], True),
        ([-1.0, float("nan")], True),
        ([1.0, float("nan"), 0.0], True),  # another shape
    ],
)
def test_outputs_that_an_implementation_returns_are_compared_bit_by_bit(other, differs):
    """Of two sets that hold the same draw, on the device."""
    returned = [{"y": torch.tensor([1.0, float("nan")])}, {"y": torch.tensor(other)}]
    one = types.SimpleNamespace(timer=types.SimpleNamespace(returned=returned))
    sets = types.SimpleNamespace(outputs=[{"y": torch.zeros(2)}, {"y": torch.zeros(2)}])
    flag = verify._differ(one, sets, 0, 1)
    assert flag.dtype == torch.bool and bool(flag) is differs


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (Failure("incorrect", "wrong"), "incorrect", "wrong"),
        (MemoryError("no more"), "out_of_memory", "binding: MemoryError: no more"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), "out_of_memory", None),
        (RuntimeError("not enough memory: you tried"), "out_of_memory", None),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory", None),
        (ValueError("two\n  lines"), "crashed", "binding: ValueError: two lines"),
        (ValueError("x" * 10**7 + "z"), "crashed", "binding: ValueError: " + "x" * 135 + " … "),
        (ValueError("\udcff"), "crashed", "binding: ValueError: \\udcff"),
        (SystemExit("a text"), "crashed", "binding: SystemExit: a text"),
        (SystemExit(0), "crashed", "binding: SystemExit: 0"),
    ],
)
def test_what_an_implementation_raises_is_a_status(error, status, reason):
    """One line, of at most 300 characters that any file can hold and with the place at its end; the worker goes on."""
    messages = []

    def action():
        raise error

    place = f" ({__file__}:{action.__code__.co_firstlineno + 1})"

    assert worker._guarded(messages.append, "a", "binding", action) is False
    at, failed = messages
    assert at == ("at", "a", "binding") and failed[:3] == ("failed", "a", status)
    assert len(failed[3]) <= 300 + len("binding: ")
    if status != "incorrect":
        assert failed[3].endswith(place)
        assert reason is None or failed[3].removesuffix(place) == reason or failed[3] == reason + failed[3][-150:]
    else:
        assert failed[3] == reason


def test_the_place_of_a_crash_is_the_last_line_that_is_no_librarys(monkeypatch):
    """Relative to the package where it is the package's; where all is a library's, the innermost."""
    found = []
    for text, action in (("[", lambda: json.loads("[")), (None, lambda: cell_of("no such bench"))):
        try:
            action()
        except Exception as error:
            found.append(faults._place(error))
            if text:
                monkeypatch.setattr(faults, "_LIBRARIES", ("/",))
                found.append(faults._place(error))
                monkeypatch.undo()
    own, library, package = found
    assert (
        own.rpartition(":")[0] == __file__
        and "json/" in library
        and package.startswith(("moe_routing_bench/", "moe_routing_kernels/"))
    )


def test_a_broken_context_ends_the_worker():
    """After it is reported; where memory is short the context is whole."""
    messages = []

    def action(text):
        raise RuntimeError(text)

    with pytest.raises(SystemExit) as end:
        worker._guarded(messages.append, "a", "sampling", lambda: action("CUDA error: an illegal memory access"))
    assert end.value.code == 3 and messages[-1][2] == "crashed"
    assert worker._guarded(messages.append, "a", "sampling", lambda: action("CUDA error: not enough memory")) is False
    assert worker._guarded(messages.append, "a", "sampling", lambda: None) is True and messages[-1] == (
        "at",
        "a",
        "sampling",
    )


def test_inputs_that_were_harmed_end_the_worker():
    """The next one finds out who it was."""
    messages = []

    def harmed(name):
        raise Tainted("inputs were\nchanged")

    with pytest.raises(SystemExit) as end:
        worker._guarded(messages.append, "a", "sampling", lambda: None, after=harmed)
    assert end.value.code == 3 and messages == [("at", "a", "sampling"), ("tainted", "inputs were changed")]


@pytest.mark.parametrize(
    ("read", "write", "mix"),
    [
        (1, 1, (1, 1)),
        (10, 80, (1, 8)),
        (80, 10, (8, 1)),
        (1, 1000, (1, 32)),
        (1000, 1, (32, 1)),
        (10, 14, (1, 1)),
        (10, 16, (1, 2)),
        (14, 10, (1, 1)),
        (16, 10, (2, 1)),
    ],
)
def test_the_mix_of_a_stream(read, write, mix):
    """Whole numbers of at most 32, the nearest to the stage's own."""
    assert calibration.reads_to_writes(Cost(read, write)) == mix


def test_how_a_worker_ended():
    assert supervisor._manner(9) == "was killed by signal SIGKILL"
    assert supervisor._manner(3 << 8) == "exited with status 3"


def test_half_a_message_is_none():
    """Of a worker that died while it was writing."""
    receive, send = Pipe(duplex=False)
    send.send(("at", None, "inputs"))
    assert supervisor._next(receive) == ("at", None, "inputs")
    os.write(send.fileno(), b"\x00\x00\x00\x20half")
    send.close()
    assert supervisor._next(receive) is None and supervisor._next(receive) is None


def test_a_whole_row_of_an_implementation_without_a_time():
    """Identity, provenance and the reason; nothing is derived."""
    job = Job(CELL, ("torch",), SETTINGS)
    started = datetime(2026, 1, 2, 3, 4, 5, 678900, UTC)
    row = completion.complete(
        job, "cpu", "torch", {"status": "crashed", "reason": "boom"}, started, started + timedelta(seconds=1)
    )
    assert {
        name: row[name]
        for name in ("bench", "implementation", "platform", "cell", "cell_hash", "status", "reason", "tokens")
    } == {
        "bench": "pack",
        "implementation": "torch",
        "platform": "cpu",
        "cell": CELL.key,
        "cell_hash": job.hash,
        "status": "crashed",
        "reason": "boom",
        "tokens": 64,
    }
    assert row["started_at"] == "2026-01-02T03:04:05.678+00:00" < row["ended_at"] and len(row["code_fingerprint"]) == 16
    assert row["schema_version"] == SCHEMA_VERSION and "gb_per_s" not in row and "implementation_version" not in row


def test_what_a_row_says_of_the_routing():
    """Of the first draw: loads 4, 3, 1 and 0 of which 2 each are held, one token of four with no row left, and weights' entropy."""
    cell = cell_of("pack", tokens=4, hidden=8, experts=4, top_k=2, dtype="fp32", capacity_factor=1.0)
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1]])
    inverse = torch.tensor([[0, -1], [1, 3], [-1, 4], [-1, -1]])
    weights = torch.tensor([[1.0, 3.0], [2.0, 2.0], [1.0, 0.0], [4.0, 4.0]])
    first = types.SimpleNamespace(inputs={"x": 1}, expected={"y": 2})
    given, known = [], [Assignment(ids, weights, inverse)]
    definition = types.SimpleNamespace()
    second, others = types.SimpleNamespace(inputs={"x": 3}, expected={"y": 4}), Assignment(torch.tensor([[0, 1]] * 4))
    definition.assignment = lambda *arguments: (
        given.append(arguments) or (known[0], others)[arguments[1] is second.inputs]
    )

    class Drawn(list):
        base = (first, second)

    sets = Drawn(range(5))  # sets 0, 2 and 4 hold the first draw
    found = outcome.routing(Job(cell, ("torch",), SETTINGS), definition, sets)
    assert given[0] == (cell, first.inputs, first.expected) and found["mean_active_experts"] == (3 * 3 + 2 * 2) / 5
    assert found["expert_load"] == [4, 3, 1, 0]
    assert (found["drop_rate"], found["capacity"], found["token_drop_rate"], found["rows"]) == (3 / 8, 2, 0.25, 5)
    quarters = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert found["gate_entropy"] == pytest.approx((quarters + 2 * math.log(2)) / 4)
    elsewhere = torch.tensor([[4, 4], [0, 4], [0, 1], [0, 1]])  # as ranks have it: the first token has no expert here
    known[0] = Assignment(elsewhere, None, torch.tensor([[-1, -1], [0, -1], [1, 2], [-1, -1]]))
    found = outcome.routing(Job(cell, ("torch",), SETTINGS), definition, sets)
    assert found["expert_load"] == [3, 2, 0, 0] and found["drop_rate"] == pytest.approx(1 / 5)
    assert found["token_drop_rate"] == pytest.approx(1 / 3), "of the tokens that have one"
    known[0] = Assignment(ids)
    gate = cell_of("gate", tokens=4, experts=4, top_k=2, dtype="fp32")
    found = outcome.routing(Job(gate, ("torch",), SETTINGS), definition, sets)
    assert not {"token_drop_rate", "gate_entropy", "rows"} & found.keys() and found["drop_rate"] == 0


class Gpu:
    """A GPU whose state is always the same."""

    sm_clock_mhz, power_w, slowdown_bits = (staticmethod(lambda value=value: value) for value in (1234, 567.0, 8))


def test_an_error_and_its_place_are_one_line_of_at_most_300_characters():
    """The place is what is kept of a longer one."""

    def said(text: str) -> str:
        with pytest.raises(ZeroDivisionError) as error:
            raise ZeroDivisionError(text)
        return faults.with_place(error.value)

    free = 300 - len(said(""))
    assert len(said("x" * free)) == len(said("x" * (free + 1))) == len(said("long\n" * 200)) == 300
    assert "\n" not in said("long\n" * 200) and re.search(r"test_worker\.py:\d+\)$", said("long\n" * 200))


@pytest.mark.parametrize(
    ("least", "least_us", "samples"), [(2, 0.0, 2), (2, 5000.0, 5), (7, 5000.0, 7), (1, 5001.0, 6)]
)
def test_a_block_has_enough_samples_and_time(least, least_us, samples):
    """Samples of 10 calls of 100 µs; the state of the GPU is that after the block."""
    one = Candidate("a", [], timer=types.SimpleNamespace(sample=lambda: 100.0, calls=10))
    sampling._block(one, Gpu(), least, least_us)
    assert one.blocks == [[100.0] * samples] and (one.clocks, one.powers, one.slow) == ([1234], [567.0], [8])
    sampling._block(one, None, 1)
    assert (one.clocks[1], one.powers[1], one.slow[1], one.blocks[1]) == (None, None, 0, [100.0])


def ticking(clock, name="a", time_of=lambda: 1.0):
    """A candidate whose samples take 2**-10 s of the clock each, whatever they say."""

    def sample():
        clock.now += 2**-10
        return time_of()

    timer = types.SimpleNamespace(sample=sample, calls=1, begin_turn=lambda: False, reached=lambda: [], returned=[])
    return Candidate(name, [], timer=timer)


def rounds(clock, monkeypatch, check_seconds=0.0, times=lambda n: 1000.0, samples=1, **change):
    """What `_rounds` says, the names in the order of their blocks, and those that were checked; the n-th sample says times(n)."""
    order, checked = [], []

    def candidate(name):
        return ticking(clock, name, lambda: order.append(name) or times(len(order)))

    def verify(job, one, sets):
        clock.now += check_seconds
        checked.append((job, one.name, sets))

    monkeypatch.setattr(sampling, "verify", verify)
    job, alive = (
        types.SimpleNamespace(settings=Settings(**vars(SETTINGS) | change), hash="h"),
        [candidate(name) for name in "abc"],
    )
    for one in alive:
        one.samples_per_block = samples
    said = sampling._rounds(job, alive, "sets", Gpu(), lambda name, step, action: action() or True)
    assert alive[0].clocks[0] == 1234
    return said, order, [(name, sets, one is job) for one, name, sets in checked]


def test_rounds(clock, monkeypatch):
    """Each once per round, in an order that follows from the job; checks take none of the sampling time."""
    said, order, checked = rounds(clock, monkeypatch, 100.0, min_blocks=5, max_seconds=0.1)
    assert (
        said == "converged" and len(order) == 15 and all(set(order[i : i + 3]) == set("abc") for i in range(0, 15, 3))
    )
    assert sorted(checked) == [("a", "sets", True), ("b", "sets", True), ("c", "sets", True)]
    assert order == rounds(clock, monkeypatch, 0.0, min_blocks=5, max_seconds=0.1)[1]
    assert len({tuple(order[i : i + 3]) for i in range(0, 15, 3)}) > 1, "not always the same order"


@pytest.mark.parametrize(("seconds", "done"), [(12 * 2**-10, 5), (12.5 * 2**-10, 5), (15 * 2**-10, 6), (0, 3)])
def test_more_than_the_longest_time_ends_the_rounds_and_checks_take_none_of_it(clock, monkeypatch, seconds, done):
    """Of rounds of 3 samples, at least three; whatever the clock says when it begins."""
    clock.now = 1000.0
    monkeypatch.setattr(sampling.secrets, "randbelow", lambda below: below - 3)
    found = rounds(clock, monkeypatch, 64.0, lambda n: 1000.0 * n, max_blocks=50, max_seconds=seconds)
    assert found[0] == "time cap" and len(found[1]) == 3 * done and len(found[2]) == 3


def test_a_width_that_is_as_narrow_as_asked_is_enough(clock, monkeypatch):
    """Constant times have none, but for the rounding of logarithms."""
    assert rounds(clock, monkeypatch, min_blocks=5, max_blocks=50, target_half_width=1e-9)[0] == "converged"


def test_convergence_is_that_of_the_published_interval_of_all_and_of_their_twins(clock, monkeypatch):
    """Of blocks with a slowdown bit nothing counts; a twin, or the last of several, that is not narrow keeps all sampling."""
    noisy = [10.0, 11.0, 9.0, 10.5, 9.5, 10.0]
    one = Candidate("a", [], blocks=[[value] for value in [*noisy, 99.0]], slow=[0] * 6 + [8])
    one.twin = Candidate("a", [], blocks=[[10.0]] * 7, slow=[0] * 7)
    found = candidate.summary(one)
    width = (found["ci_high_us"] - found["ci_low_us"]) / 2 / found["median_us"]
    assert sampling._width(one) == pytest.approx(width) and found["block_medians_us"] == noisy
    one.twin, one.blocks = one, [[10.0]] * 7
    assert sampling._width(one) == pytest.approx(0)
    one.twin = Candidate("a", [], blocks=[[value] for value in noisy], slow=[0] * 6)
    assert sampling._width(one) == pytest.approx(width)
    only_last = lambda n: 1000.0 + (n % 3 == 0) * n  # noqa: E731  (of three implementations in a fixed order)
    monkeypatch.setattr(sampling.random.Random, "sample", lambda self, entries, n: list(entries))
    assert rounds(clock, monkeypatch, 0.0, only_last, min_blocks=5, max_blocks=9)[0] == "block cap"


@pytest.mark.parametrize(("least", "most", "looks"), [(5, 20, [5, 10, 20]), (5, 12, [5, 10, 12]), (5, 5, [5])])
def test_the_width_is_looked_at_each_time_that_rounds_have_doubled(least, most, looks, clock, monkeypatch):
    """Every look is a chance to stop at an interval that is narrow by luck."""
    seen = []
    monkeypatch.setattr(sampling, "_width", lambda one: seen.append(len(one.blocks)) or math.inf)
    said, order, _ = rounds(clock, monkeypatch, min_blocks=least, max_blocks=most)
    assert seen == looks and said == "block cap" and len(order) == 3 * most


@pytest.mark.parametrize(("ticks", "length"), [(90, 1), (130, 2), (180, 3)])
def test_blocks_are_shorter_where_the_time_is_not_enough_for_the_rounds(ticks, length, clock, monkeypatch):
    """The first round, of 9 samples, takes 9 ticks: 20 rounds of as many do not fit in 90 or 130. The rounds that do are at least 20."""
    change = {"samples": 3, "min_blocks": 20, "max_blocks": 20, "max_seconds": ticks * 2**-10}
    said, order, _ = rounds(clock, monkeypatch, 0.0, lambda n: 1000.0 * n, **change)
    assert said == "block cap" and len(order) == 9 + 19 * 3 * length


def test_turns_are_short_unless_the_power_limit_binds(clock, monkeypatch):
    monkeypatch.setattr(sampling, "verify", lambda job, one, sets: None)
    one, job = ticking(clock), types.SimpleNamespace(settings=SETTINGS, hash="h")
    sampling.sample(job, [one], "sets", Gpu(), lambda name, step, action: action() or True)
    assert one.fields["turns"] == "short" and one.fields["converged"] and "converged" in one.fields["stop_reason"]


def test_a_span_is_what_a_block_took_on_the_clock(clock):
    one = ticking(clock)
    sampling._block(one, None, 3)
    sampling._block(one, None, 1)
    assert one.spans == [3e6 / 1024, 1e6 / 1024]


def test_checks_between_samples_are_at_rounds_that_nobody_can_foresee(clock, monkeypatch):
    """One of the least number of rounds, and a later one that may be the next, or is never reached."""
    asked: list[int] = []
    monkeypatch.setattr(sampling.secrets, "randbelow", lambda below: asked.append(below) or 0)
    assert len(rounds(clock, monkeypatch, 0.0, min_blocks=4, max_blocks=9, target_half_width=-1.0)[2]) == 2 * 3
    assert asked[-2:] == [4, 9]  # candidates draw before, when they are made
    monkeypatch.setattr(sampling.secrets, "randbelow", lambda below: below - 1)
    assert len(rounds(clock, monkeypatch, 0.0, min_blocks=4, max_blocks=9)[2]) == 3


@pytest.mark.parametrize(
    ("took", "milliseconds", "calls"), [(1.0, 1.0, 3), (2**-10, 10.0, 11), (2**-10, 0.1, 3), (0.25, 500e3, 2000)]
)
def test_warm_up_takes_at_least_so_long_and_three_calls(clock, took, milliseconds, calls):
    """The calls in their rotation."""
    made = []

    def call(name):
        clock.now += took
        made.append(name)

    one = Candidate("a", [lambda: call(0), lambda: call(1)])
    assert sampling.warm_up(one, milliseconds, "cpu") == calls == len(made) and made[:3] == [0, 1, 0]


def test_a_ratio_where_no_round_counts_for_both():
    """Then all rounds do."""
    base = Candidate("a", [], blocks=[[4.0, 8.0, 9.0], [6.0], [8.0]], slow=[8, 8, 0])
    one = Candidate("b", [], blocks=[[2.0], [1.0, 3.0, 9.0], [4.0]], slow=[0, 0, 8])
    found = outcome._ratio("speedup", base, one)
    assert found["speedup"] == pytest.approx(2.0)  # of 4, 2 and 2
    base.slow = [0, 0, 8]
    assert outcome._ratio("speedup", base, one)["speedup"] == pytest.approx(8**0.5), "4 and 2 in the rounds that count"


def test_what_was_sampled_is_forgotten_with_that_of_the_twin():
    """To sample again: what is known of the implementation stays."""
    one = Candidate("a", [], samples_per_block=3, twin=Candidate("a", []))
    for entry in one.entries:
        entry.blocks, entry.clocks, entry.powers, entry.slow, entry.energies = [[1.0]], [1], [2.0], [3], [4.0]
        entry.spans, entry.turns, entry.turns_laid = [5.0], [0], 6
    one.forget()
    assert [(entry.spans, entry.turns, entry.turns_laid) for entry in one.entries] == [([], [], 0)] * 2
    assert [(e.blocks, e.clocks, e.powers, e.slow, e.energies) for e in one.entries] == [([], [], [], [], [])] * 2
    assert one.samples_per_block == 3 and one.blocks is not one.twin.blocks


class Simulated:
    """A GPU whose ceilings are those of `states`, in turn, and where whatever runs is torch's on the CPU."""

    known, at, noise = None, "today", calibration.GpuCeilings.noise

    def __init__(self, states: list[dict[str, float]]) -> None:
        self.states, self.asked, self.sustained_for = iter(states), [], []
        self.capped = False

    def ceilings(self, *given):
        self.asked.append(given)
        return self

    def measure(self) -> dict[str, float]:
        return next(self.states)

    def sustained(self, *given) -> dict[str, float]:
        self.sustained_for.append(given)
        return dict(zip(("sustained_tflops", "dense_us"), next(self.lasting), strict=True))

    def state(self) -> dict[str, object]:
        return {"gpu_name": "a card", "other_gpu_processes": 0}

    def watch(self) -> None:
        """No other process."""

    def power_capped(self) -> bool:
        return self.capped

    def sm_clock_mhz(self) -> int:
        return 1980

    def power_w(self) -> float:
        return 300.0

    def slowdown_bits(self) -> int:
        return 0


@pytest.fixture
def simulated(clock, monkeypatch):
    """Put a simulated GPU in the place of one; `reset` says how often its memory statistics began anew."""

    def put(*states: dict[str, float]) -> Simulated:
        gpu, host = Simulated(list(states)), host_timer.HostTimer
        gpu.warm = iter((50.0, 10.0, 40.0, 20.0, 30.0, 1.0))
        timed: list[Any] = []
        memory = {"held": 1000, "most": 9000, "reset": 0}

        def reset() -> None:
            memory.update(most=1500, reset=memory["reset"] + 1)

        def timer(calls, interval_us, device, nbytes=0):
            assert device == "cuda" and interval_us == SETTINGS.interval_us
            if len(calls) == 1 and calls[0] in timed:
                return types.SimpleNamespace(sample=lambda: next(gpu.warm))
            timed.extend(calls)
            return host(calls, interval_us)

        def sets(job, definition, device, arena):
            assert device == "cuda"
            return Sets(job, definition, "cpu")

        def state_of_memory(name):
            return lambda: memory[name]

        for name, part in (
            ("reset_peak_memory_stats", reset),
            ("memory_allocated", state_of_memory("held")),
            ("max_memory_allocated", state_of_memory("most")),
            ("synchronize", lambda: None),
        ):
            monkeypatch.setattr(torch.cuda, name, part)
        monkeypatch.setattr(worker.provenance, "Gpu", lambda: gpu)
        monkeypatch.setattr(worker, "Sets", sets)
        monkeypatch.setattr(calibration, "GpuCeilings", gpu.ceilings)
        monkeypatch.setattr(timers, "device_timer", timer)
        gpu.memory = memory
        return gpu

    return put


ON_A_GPU = CEILINGS | {"stream_gb_per_s": 160.0}


def test_a_row_of_a_gpu(measured, simulated, monkeypatch):
    """Its memory beyond what was held before, the median of five warm samples, its state; blocks have clocks and powers."""
    monkeypatch.setattr(Sets, "cold", lambda sets, count: (len(sets), count))
    gpu = simulated(ON_A_GPU, ON_A_GPU)
    rows, _ = measured(Job(CELL, ("torch", "a"), SETTINGS), "cuda", a=lambda _: 100.0)
    row = rows["a"]
    assert (row["peak_memory_bytes"], row["warm_median_us"], gpu.memory["reset"]) == (500, 30.0, 1)
    assert (row["device"], row["gpu_name"], row["turns"]) == ("cuda", "a card", "short")
    assert (row["cold_sets"], row["cold"]) == (2, (2, 2)), "it is asked of the sets that were in the rotation"
    assert row["block_clocks_mhz"] == [1980] * 5 and row["block_powers_w"] == [300.0] * 5
    assert row["stream_gb_per_s"] == 160 and row["calibration_drift"] == 0 and "sustained_tflops" not in row
    # a row of 32 elements of 4 bytes for each of 64 tokens and 128 assignments, and 128 indices
    assert gpu.asked == [((1, 2), 64 * 32 * 4 + 128 * 4, 128 * 32 * 4)] and not gpu.sustained_for


def test_memory_is_what_binding_keeps_and_what_a_call_has_on_top(monkeypatch):
    """Of one set: 300 bytes since before bind, some of them made by the first calls; 500 at most during one more call."""
    state = {"held": 1000, "most": 9000, "calls": 0}

    def call():
        state["calls"] += 1
        state["held"] = 1300
        state["most"] = max(state["most"], 1800)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: state["held"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: state.update(most=state["held"]))
    before = memory.allocated("cuda")
    expected = {"workspace_bytes": 300, "transient_bytes": 500, "peak_memory_bytes": 800}
    assert memory.footprint(before, call) == expected and state["calls"] == 4
    assert memory.footprint(memory.allocated("cpu"), call) == {} and state["calls"] == 4


def test_one_set_is_enough(measured, simulated):
    """Of the only draw of a cell."""
    simulated(ON_A_GPU, ON_A_GPU)
    settings = Settings(**vars(SETTINGS) | {"check_seeds": 1})
    rows, _ = measured(Job(CELL, ("torch", "a"), settings), "cuda", a=lambda _: 100.0)
    assert (rows["a"]["cold_sets"], rows["a"]["peak_memory_bytes"], rows["a"]["status"]) == (1, 500, "ok")


def test_speed_ups_are_over_the_baseline_of_the_bench(measured, monkeypatch):
    """And a measurement says how long all of it took."""
    given, begin = [], time.perf_counter()
    monkeypatch.setattr(
        outcome, "speedups", lambda alive, rows, baseline: given.append((len(alive), set(rows), baseline))
    )
    rows, _ = measured(Job(CELL, ("torch", "a"), SETTINGS), a=lambda _: 100.0)
    assert given == [(1, {"a"}, "torch")]
    assert 0 < rows["a"]["measure_seconds"] <= time.perf_counter() - begin


@pytest.mark.parametrize("name", ["copy_gb_per_s", "stream_gb_per_s"])
@pytest.mark.parametrize(
    ("factors", "left", "drift", "mean"),
    [
        ((1.0, 1.04), 1, 0.04, 1.02),
        ((1.0, 1.06, 1.08), 2, 1.08 / 1.06 - 1, 1.07),
        ((1.0, 1.06, 1.2), 2, 1.2 / 1.06 - 1, 1.13),
        ((1.0, 0.9, 0.9), 2, 0.0, 0.9),
    ],
)
def test_a_gpu_is_sampled_again_once_where_a_ceiling_has_moved(name, factors, left, drift, mean, measured, simulated):
    """By more than 5 %: what was sampled is forgotten, and the ceilings of before are those of after."""
    simulated(*(ON_A_GPU | {name: ON_A_GPU[name] * factor} for factor in factors))
    rows, messages = measured(Job(CELL, ("torch", "a"), SETTINGS), "cuda", a=lambda _: 100.0)
    steps = [message[2] for message in messages if message[0] == "at"]
    assert steps.count("calibration") == 1 + left and steps.count("sampling") == 5 * left
    assert rows["a"]["blocks"] == 5 and rows["a"]["calibration_drift"] == pytest.approx(drift)
    assert rows["a"][name] == pytest.approx(ON_A_GPU[name] * mean)


def test_a_drift_of_a_product_that_a_bench_does_not_do(measured, simulated):
    simulated(ON_A_GPU, ON_A_GPU | {"peak_tflops": 8.0})
    rows, _ = measured(Job(CELL, ("torch", "a"), SETTINGS), "cuda", a=lambda _: 100.0)
    assert rows["a"]["calibration_drift"] == 0


@pytest.mark.parametrize(("rate", "peak"), [(1, 4.0), (2, 8.0)])
def test_the_peak_is_that_of_the_rate_of_products(rate, peak, measured, simulated, monkeypatch):
    simulated(ON_A_GPU, ON_A_GPU)
    job = Job(CELL, ("torch", "a"), SETTINGS)
    definition = supervisor.bench_of(job).definition()
    monkeypatch.setattr(definition, "cost", lambda *_: Cost(1, 2, ((1, 1, 1),), rate=rate))
    rows, _ = measured(job, "cuda", a=lambda _: 100.0)
    assert rows["a"]["peak_tflops"] == peak and rows["a"]["copy_gb_per_s"] == ON_A_GPU["copy_gb_per_s"]
    assert "sustained_tflops" not in rows["a"], "of nothing that ran in long turns"


@pytest.mark.parametrize(("peak", "sampled"), [(4e-5, 2), (4.0, 1)])
def test_a_product_that_a_bench_does_is_watched_where_it_binds(peak, sampled, simulated, monkeypatch):
    """And a bench with products is heavy; its ceiling is no stream."""
    states = [CEILINGS | {"peak_tflops": peak * factor} for factor in (1.0, 1.06, 1.07)]
    gpu, given, messages = simulated(*states), [], []
    monkeypatch.setattr(worker, "sample", lambda *arguments: given.append(arguments[-1]))
    cell = cell_of("router", tokens=8, hidden=16, experts=4, top_k=2, dtype="fp32")
    worker.run(Job(cell, ("torch",), SETTINGS), "cuda", [], messages.append)
    assert given == [False] * sampled and messages.count(("at", None, "calibration")) == 1 + sampled
    ((mix, read, write),) = gpu.asked
    assert mix is None and read > 0 < write


def test_costs_are_those_of_the_first_draw(measured, monkeypatch):
    """Of its inputs and its answers."""
    job, given = Job(CELL, ("torch", "a"), SETTINGS), []
    definition = supervisor.bench_of(job).definition()
    monkeypatch.setattr(
        definition, "cost", lambda *arguments: given.append(arguments) or Cost(1, 2, ((3, 4, 5),), rate=2)
    )
    binds, binding = [], calibration.binding
    monkeypatch.setattr(calibration, "binding", lambda *known: binds.append(known[1:]) or binding(*known))
    rows, _ = measured(job, a=lambda _: 100.0)
    assert binds == [(3, 3 * 4 * 5)], "FLOPs at twice the rate are half as many"
    first = definition.build(CELL, CELL.seed, "cpu")
    ((cell, inputs, _, expected),) = given
    assert cell == CELL and all(inputs[name].equal(tensor) for name, tensor in first.items())
    assert expected["packed"].equal(definition.reference(CELL, first)["packed"])
    assert (rows["a"]["read_bytes"], rows["a"]["write_bytes"], rows["a"]["compulsory_bytes"]) == (1, 2, 3)


@pytest.mark.parametrize(("capped", "heavy"), [(True, True), (False, True), (True, False)])
def test_long_turns_are_held_against_what_is_sustained(capped, heavy, measured, simulated, monkeypatch):
    """The rate of products after a turn's time, before the samples and after them; a bench without FLOPs is not even tried."""
    settings = Settings(**vars(SETTINGS) | {"turn_seconds": 0.25})
    gpu, given, limited = simulated(ON_A_GPU, ON_A_GPU | {"peak_tflops": 8.0 if capped else 4.0}), [], capped and heavy
    gpu.capped, gpu.lasting = capped, iter([(3.0, 50.0), (3.06, 51.5)])
    definition = supervisor.bench_of(Job(CELL, ("torch",), settings)).definition()
    monkeypatch.setattr(definition, "cost", lambda *_: Cost(1, 2, ((10**6, 1, 1),) if heavy else (), rate=2))

    def sample(job, alive, *others):
        given.append(others[-1])
        for one in alive:
            one.blocks, one.clocks, one.powers, one.slow = [[100.0]] * 5, [1] * 5, [1.0] * 5, [0] * 5
            one.fields["turns"] = "long" if capped and one.name == "b" else "short"

    monkeypatch.setattr(worker, "sample", sample)
    gpu.warm = iter([1.0] * 10)
    rows, messages = measured(Job(CELL, ("torch", "a", "b"), settings), "cuda", a=lambda _: 100.0, b=lambda _: 100.0)
    steps = [message[1:] for message in messages if message[0] == "at"]
    assert steps.count((None, "calibration")) == 2 + 2 * limited, "no implementation is to blame for what happens there"
    kind = FORMATS[CELL.dtype].torch_dtype
    assert set(given) == {limited} and gpu.sustained_for == [(0.25, ((10**6, 1, 1),), kind)] * 2 * limited
    names = ("sustained_tflops", "dense_us", "calibration_drift")
    for row in rows.values():  # a drift of what lasts, not of the burst
        assert [row.get(name) for name in names] == (
            pytest.approx([2 * 3.03, 50.75, 0.03]) if limited else [None, None, 0]
        )


def test_inputs_are_compared_after_a_step_where_an_audit_is_asked_for(clock, monkeypatch):
    """All of them, whatever became of the step; without an audit they are not."""
    looked: list[object] = []
    monkeypatch.setattr(worker, "unharmed", looked.append)
    monkeypatch.setattr(worker, "_entered", lambda job, name, *_: 1 / 0)
    monkeypatch.setattr(worker, "sample", lambda *_: None)
    worker.run(Job(CELL, ("torch",), SETTINGS), "cpu", ["torch"], lambda message: None)
    assert not looked
    worker.run(Job(CELL, ("torch",), SETTINGS), "cpu", ["torch"], lambda message: None, audit=True)
    (sets,) = looked
    assert isinstance(sets, Sets)


@pytest.mark.parametrize("entry", [0, 1])
def test_processes_of_an_implementation_that_is_not_admitted_are_ended(entry, monkeypatch):
    """Those of both entries, whichever fails; then what was written is mended."""
    done: list[object] = []
    forked = [types.SimpleNamespace(number=number, end=lambda n=number: done.append(n)) for number in range(2)]

    def isolated(job, name, sets, send, quiet, process):
        if process.number == entry:
            raise Failure("incorrect", "wrong")
        return Candidate(name, [])

    monkeypatch.setattr(worker, "_isolated", isolated)
    sets = types.SimpleNamespace(damage=lambda: done.append("mended"))
    with pytest.raises(Failure, match="wrong"):
        worker._entered(Job(CELL, ("torch",), SETTINGS, ("torch",)), "torch", sets, "cpu", print, None, forked)
    assert done == [0, 1, "mended"]


def test_who_fails_at_last_has_no_row(measured, monkeypatch):
    """Found out when it is checked again; the others have theirs."""
    checks = []

    def verify(job, one, sets, thorough=False):
        checks.append((one.name, thorough))
        if one.name == "a" and checks.count(("a", True)) == 2:
            raise Failure("incorrect", "wrong at last")

    monkeypatch.setattr(worker, "verify", verify)
    rows, messages = measured(Job(CELL, ("torch", "a", "b"), SETTINGS, ("b",)), a=lambda _: 100.0, b=lambda _: 100.0)
    assert rows.keys() == {"b"} and ("failed", "a", "incorrect", "wrong at last") in messages
    assert checks == [(name, True) for name in "abbabb"], "a twin is checked as well"


def test_what_cannot_run_is_unsupported(clock):
    """For its own reason; it is not even bound."""
    cell, messages = cell_of("layer", tokens=8, hidden=8, intermediate=8, experts=4, top_k=2, dtype="fp32"), []
    worker.run(Job(cell, ("torch_bmm",), SETTINGS), "cpu", ["torch_bmm"], messages.append)
    assert ("failed", "torch_bmm", "unsupported", "padded rows need a capacity factor") in messages
    assert messages[-1] == ("rows", {}) and "warming up" not in {message[2] for message in messages[:-1]}


def test_stages_by_themselves(clock):
    """The middle of seven samples of each, over all sets, with the timer that was used."""
    seen = []

    def stage(name, times):
        found = iter(times)

        def run(i):
            seen.append((name, i))
            clock.now += next(found) / 1e6

        return run

    router, rest = (
        stage("router", [1000.0] * 8 + [70, 10, 50, 20, 60, 30, 40, 5]),
        stage("rest", [1000.0] * 8 + [3] * 8),
    )
    calls = [
        types.SimpleNamespace(
            stages=(("router", functools.partial(router, i)), ("pack+combine", functools.partial(rest, i)))
        )
        for i in (0, 1)
    ]
    found = worker._stages(calls, Job(CELL, ("torch",), SETTINGS), "cpu")
    assert found["stage_us"] == [("router", pytest.approx(40.0)), ("pack+combine", pytest.approx(3.0))]
    assert found["stage_timer"] == [("router", "wall"), ("pack+combine", "wall")]
    assert seen[:15] == [("router", i % 2) for i in range(15)] and len(seen) == 30
    alone = [types.SimpleNamespace(stages=(("gate", lambda: None),))]
    assert worker._stages(alone, Job(CELL, ("torch",), SETTINGS), "cpu")["stage_timer"] == [("gate", "wall")]


def test_a_composite_says_what_its_stages_take():
    """Tried three times: on a busy machine nine samples of 10 us may say that work is left out."""
    cell = cell_of("routing", tokens=16, hidden=8, experts=4, top_k=2, dtype="fp32")
    quick = Settings(
        check_seeds=2, max_seconds=0.01, min_blocks=3, max_blocks=3, warmup_ms=0.1, interval_us=10, wall_calls=1
    )
    found: list[list] = []
    while len(found) < 3 and not (found and "torch" in found[-1][-1][1]):
        found.append([])
        worker.run(Job(cell, ("torch",), quick), "cpu", ["torch"], found[-1].append)
    assert "torch" in found[-1][-1][1], found
    row = found[-1][-1][1]["torch"]
    assert [name for name, _ in row["stage_us"]] == ["router", "permute", "pack", "combine"] and row[
        "layout"
    ] == "compact"


def test_a_row_keeps_what_a_tuner_chose(add_packs):
    """All that its call says once it has run; who has no tuner has no such field."""
    module = types.ModuleType("tuned_packs")

    def bind(problem, *, name, x, order, inverse, packed):
        work, chosen = torch_pack.bind(problem, x=x, order=order, inverse=inverse, packed=packed), []

        def call():
            work()
            chosen[:] = ["tile 128,"] * 400

        if name == "tuned":
            call.configuration = lambda: "\n".join(chosen)
        return call

    module.bind = bind
    add_packs(module, "name", ("tuned", "plain"))
    messages = []
    worker.run(Job(CELL, ("tuned", "plain"), SETTINGS), "cpu", ["tuned", "plain"], messages.append)
    assert (
        messages[-1][1]["tuned"]["configuration"] == " ".join(["tile 128,"] * 400)
        and "configuration" not in messages[-1][1]["plain"]
    )


def test_a_composite_says_what_the_tuners_of_its_parts_chose():
    parts = [
        types.SimpleNamespace(call=types.SimpleNamespace(configuration=lambda: "a")),
        types.SimpleNamespace(call=len),
        len,
    ]
    staged = composite.Staged(tuple(zip(("pack", "experts", "combine"), parts, strict=True)), None, {})
    assert staged.configuration() == "pack: a"
