"""Implementations of `pack` that are dishonest or broken, one way each; loaded by the tests in place of real ones."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

_MADE = {}  # what rogues remember from one call, or set, to the next


def forget():
    """Be as new as in a process of their own."""
    _MADE.clear()


def bind(problem, *, x, order, inverse, packed, rogue):
    """A right pack, handed to the rogue, which decides what becomes of it."""

    def work(out=packed):
        rows = x[order.long().clamp_min(0) // problem.top_k]
        out.copy_(rows.masked_fill(order[:, None] < 0, 0))  # nothing here waits for a device

    return ROGUES[rogue](work, x, packed)


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


ROGUES = {
    one.__name__: one
    for one in (
        honest,
        early,
        by_pointer,
        where_looked_at,
        once,
        of_last_set,
        one_answer,
        known_seed,
        every_other,
        now_and_then,
        half,
        shuffled,
        narrow,
        other_dtype,
        beyond,
        ahead,
        changes_input,
        restores_input,
        later,
        elsewhere,
        slow_clock,
        in_pool,
        already_right,
        where_changed,
        by_sample,
        last_row,
        whole_tiles,
        last_column,
        nearest_float,
        returns_input,
        returns_nothing_new,
        more_threads,
        other_cores,
    )
}
