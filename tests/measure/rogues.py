"""Implementations of `pack` that are dishonest or broken, one way each; loaded by the tests in place of real ones."""

import threading
import time

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


ROGUES = {one.__name__: one for one in (
    honest, early, by_pointer, where_looked_at, once, of_last_set, one_answer, known_seed, every_other, now_and_then, half, shuffled,
    narrow, other_dtype, beyond, ahead, changes_input, restores_input, later, elsewhere, slow_clock,
)}  # fmt: skip
