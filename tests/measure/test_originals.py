"""What the harness calls: each function that is replaced, and each code, is said and put back."""

import builtins
import random
import statistics
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_routing_bench import intervals, student
from moe_routing_bench import statistics as summaries
from moe_routing_bench.benches import checks
from moe_routing_bench.measure import host_timer, memory, originals, sampling, timers, verify
from moe_routing_bench.measure.candidate import Failure

PLACES = [
    (time, "perf_counter"),
    (timers, "perf_counter"),
    (torch.cuda.Event, "record"),
    (torch.cuda.Event, "elapsed_time"),
    (torch.cuda.Event, "query"),
    (torch.cuda.CUDAGraph, "replay"),
    (torch.cuda, "synchronize"),
    (torch.Tensor, "equal"),
    (torch.Tensor, "__ne__"),
    (torch, "stack"),
    (np, "median"),
    (np.lib._function_base_impl, "_median"),
    (statistics, "median"),
    (sampling, "median"),
    (summaries, "summarize"),
    (student, "half_width"),
    (intervals, "paired_ratio"),
    (random.Random, "sample"),
    (builtins, "sorted"),
    (checks, "both"),
    (memory, "digests"),
    (verify, "verify"),
    (host_timer.HostTimer, "sample"),
    (timers.GraphTimer, "_run"),
    (timers, "min"),  # shadows the builtin one
]


@pytest.fixture(scope="module")
def known():
    return originals.originals()


@pytest.mark.parametrize(("place", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_replaced_is_put_back(place, name, known) -> None:
    originals.genuine(known)
    before = vars(place).get(name)
    setattr(place, name, lambda *_, **__: 0.0)
    with pytest.raises(Failure, match=rf"\.{name} was replaced$") as failure:
        originals.genuine(known)
    assert failure.value.status == "incorrect" and vars(place).get(name) is before
    originals.genuine(known)


def test_code_is_put_back(known) -> None:
    before = summaries.summarize.__code__
    summaries.summarize.__code__ = (lambda blocks: {}).__code__
    with pytest.raises(Failure, match=r"^the code of summarize was replaced$"):
        originals.genuine(known)
    assert summaries.summarize.__code__ is before


def test_an_operator_has_the_kernels_of_before(known) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("equal", lambda *_: True, "CPU", allow_override=True)
    try:
        with pytest.raises(Failure, match="operators of torch have other kernels"):
            originals.genuine(known)
    finally:
        library._destroy()
    originals.genuine(known)


def test_a_shadowed_method_is_uncovered() -> None:
    timer = host_timer.HostTimer([lambda: None], 1)
    originals.unshadowed(timer)
    timer.sample = lambda: 0.1
    with pytest.raises(Failure, match=r"^HostTimer\.sample was replaced$"):
        originals.unshadowed(timer)
    assert timer.sample() > 0
    originals.unshadowed(SimpleNamespace(sample=1))
