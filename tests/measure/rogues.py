"""Implementations of `pack` that are dishonest or broken, one way each; loaded by the tests in place of real ones.

`ROGUES` has what becomes of each on a CPU and on a GPU, and `ISOLATED` those that only a process of their own stops.
"""

import _thread
import builtins
import gc
import os
import random
import signal
import statistics as of_python
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_MADE = {}  # what rogues remember from one call, or set, to the next


def forget():
    """Be as new as in a process of their own, and mend what no harness mends."""
    for mend in _MADE.pop("mend", ()):
        mend()
    if pool := _MADE.get("pool"):
        pool.shutdown(cancel_futures=True)
    _MADE.clear()


def bind(problem, *, x, order, inverse, packed, rogue):
    """A right pack, handed to the rogue, which decides what becomes of it."""

    def work(out=packed):
        rows = x[order.long().clamp_min(0) // problem.top_k]
        out.copy_(rows.masked_fill(order[:, None] < 0, 0))  # nothing here waits for a device

    return CALLS[rogue](work, x, packed)


def honest(work, x, packed):
    return work


def early(work, x, packed):
    """The answer is computed when the implementation is bound."""
    work()
    answer = packed.clone()
    return lambda: packed.copy_(answer)


def by_pointer(work, x, packed):
    """The answer is kept by the address of the input."""

    def call():
        if x.data_ptr() not in _MADE:
            work()
            _MADE[x.data_ptr()] = packed.clone()
        packed.copy_(_MADE[x.data_ptr()])

    return call


def where_looked_at(work, x, packed):
    """Works only where the output is poisoned."""
    return lambda: work() if packed.isnan().any() else None


def once(work, x, packed):
    """Works in the first few calls, until nobody is expected to look any more."""
    left = [8]

    def call():
        left[0] -= 1
        if left[0] > 0:
            work()

    return call


def of_last_set(work, x, packed):
    """The answer of the set before."""

    def call():
        last = _MADE.get("last")
        work()
        _MADE["last"] = packed.clone()
        if last is not None:
            packed.copy_(last)

    return call


def one_answer(work, x, packed):
    """All sets share the tensor that is returned."""

    def call():
        answer = _MADE.setdefault("shared", torch.empty_like(packed))
        work(answer)
        return {"packed": answer}

    return call


def known_seed(work, x, packed):
    """Right only for the values that were there when the implementation was bound."""
    known = x[0, 0].clone()
    return lambda: work() if x[0, 0] == known else packed.zero_()


def every_other(work, x, packed):
    """Every other call does nothing."""
    count = _MADE.setdefault("count", [0])

    def call():
        count[0] += 1
        if count[0] % 2:
            work()

    return call


def now_and_then(work, x, packed):
    """One call of seven is wrong."""
    count = _MADE.setdefault("count", [0])

    def call():
        work()
        count[0] += 1
        if count[0] % 7 == 0:
            packed[0, 0] += 1

    return call


def half(work, x, packed):
    """Half of the rows are written."""

    def call():
        kept = packed[: len(packed) // 2].clone()
        work()
        packed[: len(packed) // 2] = kept

    return call


def shuffled(work, x, packed):
    """All rows are there, two of them in each other's place."""

    def call():
        work()
        packed[:2] = packed[:2].flip(0)

    return call


def narrow(work, x, packed):
    """Computes in a narrower dtype."""

    def call():
        work()
        packed.copy_(packed.half())

    return call


def other_dtype(work, x, packed):
    """Returns an output of another dtype."""

    def call():
        work()
        return {"packed": packed.double()}

    return call


def beyond(work, x, packed):
    """Writes behind its output."""

    def call():
        work()
        packed.as_strided((1,), (1,), packed.storage_offset() + packed.numel()).fill_(1)

    return call


def ahead(work, x, packed):
    """Writes in front of its input."""

    def call():
        work()
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(1)

    return call


def changes_input(work, x, packed):
    def call():
        work()
        x[0, 0] += 1

    return call


def restores_input(work, x, packed):
    """Changes an input and puts it back."""

    def call():
        x.neg_()
        work()
        packed.neg_()
        x.neg_()

    return call


def later(work, x, packed):
    """Leaves the work to a thread that goes on after the call."""

    def finish():
        time.sleep(0.02)
        work()

    return lambda: threading.Thread(target=finish, name="later").start()


def elsewhere(work, x, packed):
    """Works on a stream that the timed one does not wait for."""
    stream = _MADE.setdefault("stream", torch.cuda.Stream())

    def call():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000)
            work()

    return call


def slow_clock(work, x, packed):
    """Makes the clock run slow."""
    genuine = time.perf_counter

    def call():
        work()
        time.perf_counter = lambda: genuine() / 10

    return call


def in_pool(work, x, packed):
    """Hands the work to a thread that was there before, and does not wait for it."""
    pool = _MADE.setdefault("pool", ThreadPoolExecutor(1))
    pool.submit(int)

    def finish():
        time.sleep(0.002)  # so that it has not begun when the last call returns
        work()

    return lambda: pool.submit(finish)


def already_right(work, x, packed):
    """Works only where the first element is not what it should be."""
    return lambda: None if packed[0, 0] in x[:, 0] else work()


def where_changed(work, x, packed):
    """Works only where the first input is another than in the call before."""
    last: list[float | None] = [None]

    def call():
        if last[0] != float(x[0, 0]):
            work()
        last[0] = float(x[0, 0])

    return call


def by_sample(work, x, packed):
    """Keeps answers by an element of the input."""

    def call():
        key = ("sample", float(x[0, 0]))
        if key not in _MADE:
            work()
            _MADE[key] = packed.clone()
        packed.copy_(_MADE[key])

    return call


def last_row(work, x, packed):
    """Leaves the last row out."""

    def call():
        kept = packed[-1].clone()
        work()
        packed[-1] = kept

    return call


def whole_tiles(work, x, packed):
    """Leaves out what is beyond the last whole tile of 16 rows."""

    def call():
        kept = packed[len(packed) // 16 * 16 :].clone()
        work()
        packed[len(packed) // 16 * 16 :] = kept

    return call


def last_column(work, x, packed):
    def call():
        kept = packed[:, -1].clone()
        work()
        packed[:, -1] = kept

    return call


def nearest_float(work, x, packed):
    """Off by the last bit of one element."""

    def call():
        work()
        packed[3, 4] = torch.nextafter(packed[3, 4], packed.new_tensor(9.0))

    return call


def returns_input(work, x, packed):
    """Returns an input as its output."""
    return lambda: {"packed": x}


def returns_nothing_new(work, x, packed):
    """Returns an output that aliases what it remembers of the call before."""

    def call():
        answer = _MADE.get("answer", packed)
        work()
        _MADE["answer"] = packed.clone()
        return {"packed": answer}

    return call


def more_threads(work, x, packed):
    """Takes another number of threads than it is given."""
    torch.set_num_threads(torch.get_num_threads() + 1)
    return work


def other_cores(work, x, packed):
    """Chooses its cores."""

    def call():
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        work()

    return call


def aliased(work, x, packed):
    """All sets with the values of one draw share one answer."""

    def call():
        key = ("answer", float(x[0, 0]))
        if key not in _MADE:
            _MADE[key] = torch.empty_like(packed)
            work(_MADE[key])
        return {"packed": _MADE[key]}

    return call


class Lazy(torch.Tensor):
    """Computes when it is read."""

    work: Callable[[], None]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        for one in args:
            if isinstance(one, Lazy):
                one.work()
        return super().__torch_function__(function, types, args, kwargs or {})


def lazy_tensor(work, x, packed):
    """Returns a tensor that is computed when it is read."""

    def call():
        lazy = packed.as_subclass(Lazy)
        lazy.work = work
        return {"packed": lazy}

    return call


def padded(work, x, packed):
    """The same, and takes as long as is plausible."""
    call = lazy_tensor(work, x, packed)

    def waiting():
        end = time.perf_counter() + 1e-5
        while time.perf_counter() < end:
            pass
        return call()

    return waiting


class LazyDict(dict):
    """Computes when it is read."""

    def __ror__(self, other):
        self.work()
        return other | dict(self)


def lazy_dictionary(work, x, packed):
    """Returns a dictionary that is computed when it is read."""

    def call():
        found = LazyDict(packed=packed)
        found.work = work
        return found

    return call


def lazy_name(work, x, packed):
    """Returns a dictionary whose key computes when it is hashed once more."""

    class Name(str):
        count = 0

        def __hash__(self):
            Name.count += 1
            if Name.count > 1:
                work()
            return super().__hash__()

    def call():
        Name.count = 0
        return {Name("packed"): packed}

    return call


def negative_view(work, x, packed):
    """Returns a view that is negated when it is read."""
    imaginary = torch.complex(torch.zeros_like(packed), torch.zeros_like(packed)).conj().imag

    def call():
        work()
        imaginary.copy_(packed)
        return {"packed": imaginary}

    return call


def moved_output(work, x, packed):
    """Moves its output to memory of its own, where it puts the answer later."""
    kept = packed.clone()

    def call():
        work(kept)
        packed.set_(kept)

    return call


def of_another_set(work, x, packed):
    """Writes its answer where the first set's output lies, and returns that."""

    def call():
        first = _MADE.setdefault("first", packed)
        work(first)
        return {"packed": first}

    return call


def after_a_burst(work, x, packed):
    """Works in a few calls of each set after a pause, and leaves the others out: outputs hold the answers already."""
    _MADE["sets"] = _MADE.get("sets", 0) + 1

    def call():
        float(x[0, 0])  # no graph captures a call that waits
        now = time.perf_counter()
        _MADE["left"] = 2 * _MADE["sets"] if now - _MADE.get("last", 0.0) > 1e-3 else _MADE["left"] - 1
        if _MADE["left"] > 0:
            work()
            end = time.thread_time() + 2e-4  # hard work
            while time.thread_time() < end:
                pass
        _MADE["last"] = time.perf_counter()

    return call


def at_random(work, x, packed):
    """Leaves out a call of five."""
    dice = random.Random()
    return lambda: work() if dice.random() > 0.2 else None


def until_trusted(work, x, packed):
    """Works until it has been called more often than before any first look."""
    count = _MADE.setdefault("calls", [0])

    def call():
        count[0] += 1
        if count[0] < 100:
            work()

    return call


class Burst:
    """Of one set: how often it was called with the values that it has, and whether that is oftener than in any check."""

    def __init__(self, x, least=2):
        self.x, self.least, self.known, self.count = x, least, None, 0

    def __call__(self):
        value = float(self.x[0, 0])
        self.count = self.count + 1 if value == self.known else 0
        self.known = value
        return self.count > self.least


def one_set_of_a_burst(work, x, packed):
    """Leaves one of its sets out where it is timed; the others take as long as ever."""
    burst, last = Burst(x), _MADE.get("sets", 0)
    _MADE["sets"] = last + 1
    return lambda: None if burst() and last == 1 else work()


def rows_of_a_burst(work, x, packed):
    """Leaves the last rows of an output as they were, where it is timed."""
    burst, part = Burst(x), last_row(work, x, packed)
    return lambda: part() if burst() else work()


def zeros_of_a_burst(work, x, packed):
    """Fills a set with zeros where it is timed, which is quicker."""
    burst, last = Burst(x), _MADE.get("sets", 0)
    _MADE["sets"] = last + 1
    return lambda: packed.zero_() if burst() and last == 2 else work()


def padded_burst(work, x, packed):
    """Does nothing where it is timed but let most of the time pass that the work took."""
    burst, spent = Burst(x), []

    def call():
        begin = time.perf_counter()
        if not burst():
            work()
            spent.append(time.perf_counter() - begin)
        while time.perf_counter() - begin < 0.9 * min(spent):
            pass

    return call


def after_random_calls(work, x, packed):
    """Leaves a set out after a number of calls that it has drawn."""
    burst, last = Burst(x, random.randrange(3, 8)), _MADE.get("sets", 0)
    _MADE["sets"] = last + 1
    return lambda: None if burst() and last == 0 else work()


def old_answer_of_a_burst(work, x, packed):
    """Returns what it has kept of a call before, where it is timed."""
    burst, kept = Burst(x), torch.empty_like(packed)

    def call():
        if not burst():
            work(kept)
        return {"packed": kept}

    return call


def lazy_in_a_burst(work, x, packed):
    """Returns a tensor that is computed when it is read, where it is timed."""
    burst, lazy = Burst(x), lazy_tensor(work, x, packed)
    return lambda: lazy() if burst() else work()


def wrapped_sampler(work, x, packed):
    """Halves the times of all samples."""
    from moe_routing_bench.measure import host_timer, timers

    for kind in (host_timer.HostTimer, timers.EventTimer):
        genuine = kind.sample
        kind.sample = lambda timer, genuine=genuine: genuine(timer) / 2
    return work


def shadowed_sampler(work, x, packed):
    """Finds the timer of its own calls, and gives it another method."""
    from moe_routing_bench.measure import host_timer, timers

    def call():
        work()
        for frame in sys._current_frames().values():
            while frame:
                timer = frame.f_locals.get("self")
                if isinstance(timer, (host_timer.HostTimer, timers.EventTimer)):
                    timer.sample = lambda: 0.1
                frame = frame.f_back

    return call


def mending_clock(work, x, packed):
    """Puts a clock in place for one reading; which is the last one of a sample."""
    from moe_routing_bench.measure import timers

    genuine = timers.perf_counter

    def call():
        begin = genuine()
        work()
        time.sleep(1e-3)

        def shown():
            timers.perf_counter = genuine
            return begin

        timers.perf_counter = shown

    return call


def wrapped_median(work, x, packed):
    """Halves what numpy says of the times of its cell."""
    genuine = np.median
    np.median = lambda *args, **kwargs: genuine(*args, **kwargs) / 2
    return work


def wrapped_below(work, x, packed):
    """The same, one level below."""
    place = np.lib._function_base_impl
    genuine = place._median
    place._median = lambda *args, **kwargs: genuine(*args, **kwargs) / 2
    return work


def of_the_standard_library(work, x, packed):
    """Takes the least for the median."""
    of_python.median = min
    return work


def other_code(work, x, packed):
    """Gives a function of the harness other code."""
    from moe_routing_bench import statistics

    def summarize(blocks):
        return {"median_us": 0.1}

    statistics.summarize.__code__ = summarize.__code__
    return work


def shadowed_name(work, x, packed):
    """Gives a module of the harness a function that is built in elsewhere."""
    from moe_routing_bench.measure import timers

    timers.min = lambda *args, **kwargs: 0.0
    return work


def built_in(work, x, packed):
    """Replaces a function that all code uses."""
    genuine = builtins.sorted
    builtins.sorted = lambda *args, **kwargs: genuine(*args, **kwargs)[::-1]
    return work


def equal_to_all(work, x, packed):
    """Registers a comparison that finds all tensors equal."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("ne.Tensor", lambda a, b: torch.zeros(a.shape, dtype=torch.bool), "CPU", allow_override=True)
    _MADE.setdefault("mend", []).append(library._destroy)
    return lambda: None


def no_mkldnn(work, x, packed):
    """Takes from torch the library that others compute with."""
    torch.backends.mkldnn.enabled = False
    return work


def other_precision(work, x, packed):
    """Makes the products of others more accurate, or less."""
    torch.set_float32_matmul_precision("medium")
    return work


class Seeing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeeingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def leaves_a_mode(work, x, packed):
    """Leaves a mode on, which sees what others call."""
    Seeing().__enter__()
    return work


def leaves_a_dispatcher(work, x, packed):
    """Leaves a mode of the dispatcher on."""
    SeeingBelow().__enter__()
    return work


def leaves_a_device(work, x, packed):
    """Leaves a default device, which each call of others then goes through."""
    torch.set_default_device("cpu")
    return work


def leaves_autocast(work, x, packed):
    torch.set_autocast_enabled("cpu", True)
    return work


def leaves_inference_mode(work, x, packed):
    guard = _MADE["guard"] = torch.inference_mode()
    guard.__enter__()
    return work


def hooks_modules(work, x, packed):
    """Has every module of others call it."""
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    return work


def flushes_denormals(work, x, packed):
    torch.set_flush_denormal(True)
    return work


def environment(work, x, packed):
    """Has programs that are started later found elsewhere."""
    os.environ["PATH"] = "/"
    return work


def collects(work, x, packed):
    """Has the collector run all the time."""

    def call():
        work()
        gc.set_threshold(1)

    return call


def profiles(work, x, packed):
    """Watches every call of Python."""

    def call():
        work()
        sys.setprofile(lambda *_: None)

    return call


def traces_memory(work, x, packed):
    """Has Python note where all memory comes from."""
    tracemalloc.start()
    return work


def rings(work, x, packed):
    """Has a signal come every millisecond."""
    signal.signal(signal.SIGVTALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-3, 1e-3)
    return work


def burns(work, x, packed):
    """Keeps a core busy while others run."""
    if "burning" not in _MADE:
        _MADE["burning"] = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        time.sleep(0.05)
    return work


def raw_thread(work, x, packed):
    """Leaves the work to a thread that `threading` does not know."""

    def finish():
        time.sleep(0.02)
        work()

    return lambda: _thread.start_new_thread(finish, ())


def on_another_core(work, x, packed):
    """Has another thread work, and waits for it: two cores where others have one."""
    pool = _MADE.setdefault("pool", ThreadPoolExecutor(1))

    def spin():
        work()
        end = time.thread_time() + 2e-4
        while time.thread_time() < end:
            pass

    return lambda: pool.submit(spin).result()


def other_stream(work, x, packed):
    """Leaves another stream the current one."""
    stream = _MADE.setdefault("stream", torch.cuda.Stream())
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)
    return work


@dataclass(frozen=True)
class Fate:
    """What a rogue's row says: a part of the reason on a CPU, or several of which it says one, and the statuses on a GPU.

    `cpu` is None where it is a GPU's alone, `gpu` where it is a CPU's alone.
    """

    cpu: str | tuple[str, ...] | None
    gpu: tuple[str, ...] | None = ("incorrect", "crashed")

    @property
    def reasons(self) -> tuple[str, ...]:
        return (self.cpu,) if isinstance(self.cpu, str) else self.cpu or ()


_DIFFER = "elements differ"
_HONEST = ("ok",)  # what it does on the host a graph repeats as it was captured, so the work is in every sample
_REPLACED = "was replaced"
_LATE = "after a timed turn"
_AFTER = "written after the call had returned"  # where a busy host lets the work come between two looks
_SHARED = "in memory of an input or of another set"
ROGUES = {
    "early": Fate(_DIFFER),
    "by_pointer": Fate(_DIFFER),
    "where_looked_at": Fate(_DIFFER),
    "once": Fate(_DIFFER, None),
    "of_last_set": Fate(_DIFFER),
    "one_answer": Fate(_SHARED),
    "known_seed": Fate(_DIFFER),
    "every_other": Fate(_DIFFER),
    "now_and_then": Fate(_DIFFER),
    "half": Fate(_DIFFER),
    "shuffled": Fate(_DIFFER),
    "narrow": Fate(_DIFFER),
    "other_dtype": Fate("packed: float64"),
    "beyond": Fate("bytes next to a tensor were written: packed"),
    "ahead": Fate("bytes next to a tensor were written: x"),
    "changes_input": Fate("inputs were changed: x"),
    "restores_input": Fate("inputs were written, if only to restore them: x"),
    "elsewhere": Fate(None),
    "later": Fate(("threads were left running", _AFTER)),
    "slow_clock": Fate("time.perf_counter was replaced"),
    "in_pool": Fate(("outputs were written after the call had returned", _DIFFER), None),
    "already_right": Fate(_DIFFER),
    "where_changed": Fate(_DIFFER),
    "by_sample": Fate(_DIFFER),
    "last_row": Fate(_DIFFER),
    "whole_tiles": Fate(_DIFFER),
    "last_column": Fate(_DIFFER),
    "nearest_float": Fate(_DIFFER),
    "returns_input": Fate((_SHARED, "packed: float32 of shape (64, 32)")),
    "returns_nothing_new": Fate((_SHARED, _DIFFER)),
    "more_threads": Fate("torch.get_num_threads() is", None),
    "other_cores": Fate("os.sched_getaffinity(0) is", None),
    "aliased": Fate(_SHARED),
    "lazy_tensor": Fate("packed: Lazy, not a plain tensor"),
    "padded": Fate("packed: Lazy, not a plain tensor"),
    "lazy_dictionary": Fate("returned in a LazyDict"),
    "lazy_name": Fate("not a plain dictionary"),
    "negative_view": Fate("a view that is computed when it is read"),
    "moved_output": Fate(_DIFFER),
    "of_another_set": Fate(_SHARED),
    "after_a_burst": Fate(("work is left out", _DIFFER)),
    "at_random": Fate(_DIFFER),
    "until_trusted": Fate(_DIFFER),
    "one_set_of_a_burst": Fate((_LATE, _DIFFER)),
    "rows_of_a_burst": Fate((_LATE, _DIFFER)),
    "zeros_of_a_burst": Fate((_LATE, _DIFFER)),
    "padded_burst": Fate((_LATE, _DIFFER, "work is left out")),
    "after_random_calls": Fate((_LATE, _DIFFER)),
    "old_answer_of_a_burst": Fate((_LATE, _DIFFER, "work is left out")),
    "lazy_in_a_burst": Fate((_LATE, "packed: Lazy, not a plain tensor", "work is left out")),
    "wrapped_sampler": Fate(_REPLACED),
    "shadowed_sampler": Fate((_REPLACED, "work is left out")),
    "mending_clock": Fate(_REPLACED, _HONEST),
    "wrapped_median": Fate("median was replaced"),
    "wrapped_below": Fate("_median was replaced"),
    "of_the_standard_library": Fate("statistics.median was replaced"),
    "other_code": Fate("the code of summarize was replaced"),
    "shadowed_name": Fate("timers.min was replaced"),
    "built_in": Fate("builtins.sorted was replaced"),
    "equal_to_all": Fate("other kernels than before", None),
    "no_mkldnn": Fate("torch.backends.mkldnn.enabled is False"),
    "other_precision": Fate("fp32_precision is"),
    "leaves_a_mode": Fate("the modes of torch"),
    "leaves_a_dispatcher": Fate("the modes of torch"),
    "leaves_a_device": Fate("the modes of torch"),
    "leaves_autocast": Fate("autocast is"),
    "leaves_inference_mode": Fate("torch.is_inference_mode_enabled() is True"),
    "hooks_modules": Fate("the hooks of all modules"),
    "flushes_denormals": Fate("whether denormals are kept is False"),
    "environment": Fate("os.environ: PATH is '/'"),
    "collects": Fate("gc is"),
    "profiles": Fate("sys.getprofile() is"),
    "traces_memory": Fate("tracemalloc.is_tracing() is True"),
    "rings": Fate("the timers of signals"),
    "burns": Fate("processes compute outside of calls"),
    "raw_thread": Fate(("threads were left running: number", _DIFFER, _AFTER)),
    "on_another_core": Fate("of the computing"),
    "other_stream": Fate(None),
}
# Those that read the harness's memory, or answer by the whole content of inputs: only a process of their own stops them, in which
# the answers are not, and in which inputs are new in every turn.
ISOLATED = {
    "stack inspection": "reads the expected answer from the frames of its callers",
    "search of the heap": "finds the expected answer with gc.get_objects",
    "memo by content": "keeps answers by a hash of all inputs, and copies them",
    "threads of C": "has a library's threads work, with torch given more than one thread",
    "own kernels of the dispatcher, taken back in time": "registers them for the moment of a comparison",
}
CALLS = {name: globals()[name] for name in ("honest", *ROGUES)}
