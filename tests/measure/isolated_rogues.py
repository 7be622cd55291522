"""Plug-ins of `pack` that reach for what an implementation must not have: clocks, counts, answers, the time between turns, rivals."""

import _thread
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import numpy
import torch

from moe_routing_bench.benches.plugins import Plugin

HONEST = Plugin(bench="pack", name="honest", options={"rogue": "honest"})
SLOW = Plugin(bench="pack", name="slow", options={"rogue": "slow"})
RAW_THREAD = Plugin(bench="pack", name="raw_thread", options={"rogue": "raw_thread"})
LAZY = Plugin(bench="pack", name="lazy", options={"rogue": "lazy"})
LOOP_COUNT = Plugin(bench="pack", name="loop_count", options={"rogue": "loop_count"})
OF_THE_STACK = Plugin(bench="pack", name="of_the_stack", options={"rogue": "of_the_stack"})
OF_THE_HEAP = Plugin(bench="pack", name="of_the_heap", options={"rogue": "of_the_heap"})
OF_THE_JUDGE = Plugin(bench="pack", name="of_the_judge", options={"rogue": "of_the_judge"})
MEMO = Plugin(bench="pack", name="memo", options={"rogue": "memo"})
MEDIAN = Plugin(bench="pack", name="median", options={"rogue": "median"})
CLOCK = Plugin(bench="pack", name="clock", options={"rogue": "clock"})
BACKENDS = Plugin(bench="pack", name="backends", options={"rogue": "backends"})
MODES = Plugin(bench="pack", name="modes", options={"rogue": "modes"})
AFTER_A_BURST = Plugin(bench="pack", name="after_a_burst", options={"rogue": "after_a_burst"})
DAEMON = Plugin(bench="pack", name="daemon", options={"rogue": "daemon"})
EARLY_REPLY = Plugin(bench="pack", name="early_reply", options={"rogue": "early_reply"})
RESTS = Plugin(bench="pack", name="rests", options={"rogue": "rests"})
KILLED = Plugin(bench="pack", name="killed", options={"rogue": "killed"})
LEFT_OVER = Plugin(bench="pack", name="left_over", options={"rogue": "left_over"})
CLAIMS = Plugin(bench="pack", name="claims", options={"rogue": "claims"})
FEWER_SETS = Plugin(bench="pack", name="fewer_sets", options={"rogue": "fewer_sets"})
SEEN_AGAIN = Plugin(bench="pack", name="seen_again", options={"rogue": "seen_again"})
LAST_ROTATION = Plugin(bench="pack", name="last_rotation", options={"rogue": "last_rotation"})
OF_A_RIVAL = Plugin(bench="pack", name="of_a_rival", options={"rogue": "of_a_rival"})
REACHES = Plugin(bench="pack", name="reaches", options={"rogue": "reaches"})
HASTY = Plugin(bench="pack", name="hasty", options={"rogue": "hasty"})
PATCHED = Plugin(bench="pack", name="patched", options={"rogue": "patched"})

_MADE: dict = {}


def bind(problem, *, x, order, inverse, packed, rogue):
    """A right pack, handed to the rogue, which decides what becomes of it."""

    def work(out=packed):
        rows = x[order.long().clamp_min(0) // problem.top_k]
        out.copy_(rows.masked_fill(order[:, None] < 0, 0))

    return globals()[f"_{rogue}"](work, x, packed)


def _honest(work, x, packed):
    return work


def _slow(work, x, packed):
    """What `memo` leaves out: five times the work."""

    def call():
        for _ in range(5):
            work()

    return call


def _raw_thread(work, x, packed):
    """Leaves the work to a thread that `threading` does not know."""
    return lambda: _thread.start_new_thread(work, ())


class Lazy(torch.Tensor):
    """A tensor that is computed when it is looked at."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for one in args:
            if isinstance(one, Lazy):
                one.work()
        return super().__torch_function__(func, types, args, kwargs or {})


def _lazy(work, x, packed):
    def call():
        answer = torch.empty_like(packed).as_subclass(Lazy)
        answer.work = work
        return {"packed": answer}

    return call


def _loop_count(work, x, packed):
    """Works in the last rotation alone, where the loop of the harness says which it is: on a GPU the one that captures a graph."""

    def call():
        frame = sys._getframe()
        while frame and not {"count", "rotations"} & frame.f_locals.keys():
            frame = frame.f_back
        said = frame.f_locals if frame else {}
        if said.get("_", 0) == said.get("count", said.get("rotations", 1)) - 1:
            work()

    return call


def _of_the_stack(work, x, packed):
    """Copies what some frame expects."""

    def call():
        frame = sys._getframe()
        while frame:
            for value in frame.f_locals.values():
                if isinstance(value, dict) and isinstance(value.get("packed"), torch.Tensor):
                    packed.copy_(value["packed"])
            frame = frame.f_back

    return call


def _of_the_heap(work, x, packed):
    """Copies a tensor of the output's kind that starts with a row of the input and is none of the outputs."""

    def call():
        _MADE["searches"] = _MADE.get("searches", 0) + 1
        for one in gc.get_objects() if _MADE["searches"] < 5 else ():
            like = type(one) is torch.Tensor and one.shape == packed.shape and one is not packed
            with contextlib.suppress(Exception):
                if like and one[0].tolist() in x.tolist():
                    packed.copy_(one)

    return call


def _of_the_judge(work, x, packed):
    """Opens the memory of the process that checks."""
    with open(f"/proc/{os.getppid()}/mem", "rb"):
        return work


def _rivals():
    """The processes of other implementations, which the judge has stopped."""
    parent = os.getppid()
    children = (Path(f"/proc/{parent}/task/{task}/children") for task in os.listdir(f"/proc/{parent}/task"))
    return {int(pid) for path in children for pid in path.read_text().split()} - {os.getpid()}


def _of_a_rival(work, x, packed):
    """Opens the memory of the processes of other implementations, to slow their code down."""
    for pid in _rivals():
        open(f"/proc/{pid}/mem", "r+b").close()
    return work


def _reaches(work, x, packed):
    """Leaves rivals last in line for one core, with little time, and a signal that ends them when they may run."""

    def call():
        for pid in _rivals() if "reached" not in _MADE else ():
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, pid, 19)
            resource.prlimit(pid, resource.RLIMIT_CPU, (3600, 3600))
            os.kill(pid, signal.SIGUSR1)
        _MADE["reached"] = True
        work()

    return call


def _hasty(work, x, packed):
    """Schedules its own process in another way than the others."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return work


def _memo(work, x, packed):
    """Keeps answers by all of the input."""

    def call():
        key = x.cpu().numpy().tobytes()
        if key not in _MADE:
            _slow(work, x, packed)()
            _MADE[key] = packed.clone()
        packed.copy_(_MADE[key])

    return call


def _median(work, x, packed):
    """Tenfold faster by the statistics of its process."""
    genuine = numpy.median
    numpy.median = lambda *some, **more: genuine(*some, **more) / 10
    return work


def _clock(work, x, packed):
    """Tenfold faster by the clock of its process."""
    genuine = time.perf_counter
    time.perf_counter = lambda: genuine() / 10
    return work


def _backends(work, x, packed):
    """Turns off what rivals compute with."""
    torch.backends.mkldnn.enabled = False
    return work


def _modes(work, x, packed):
    """Leaves a mode on that makes every function of torch slow."""

    class Late(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            time.sleep(1e-5)
            return func(*args, **(kwargs or {}))

    if "mode" not in _MADE:
        _MADE["mode"] = Late()
        _MADE["mode"].__enter__()
        torch.set_default_device("cpu")
    return work


def _after_a_burst(work, x, packed):
    """Does nothing once the calls of a while have been many."""

    def call():
        now = time.monotonic()
        burst = [then for then in _MADE.get("burst", []) if then > now - 0.02][-40:]
        _MADE["burst"] = [*burst, now]
        if len(burst) < 40:
            work()

    return call


def _daemon(work, x, packed):
    """Starts a process that nothing is the parent of, and that keeps a core busy."""
    if "daemon" not in _MADE:
        _MADE["daemon"] = True
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                end = time.monotonic() + 600
                while time.monotonic() < end:
                    pass
            os._exit(0)
        os.wait()
    return work


def _early_reply(work, x, packed):
    """Says that it has done before it has."""

    def call():
        for number in range(3, 100):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
                link.send(b"{}")
        time.sleep(1e-3)
        work()

    return call


def _rests(work, x, packed):
    """Never comes back."""
    return lambda: time.sleep(3600)


def _killed(work, x, packed):
    """Is killed."""

    def call():
        work()
        os.kill(os.getpid(), 9)

    return call


def _left_over(work, x, packed):
    """Is `crashed` where its buffer holds what another implementation has answered."""
    answer = torch.empty_like(packed)
    work(answer)
    if torch.equal(answer, packed):
        raise RuntimeError("found the answer of another implementation")
    return work


def _claims(work, x, packed):
    """Says that a run holds four rotations, and makes three."""
    from moe_routing_bench.measure import runner

    class Three(runner.Rotation):
        rotations = 4

        def several(self):
            for _ in range(3):
                self.once()

    if "claims" not in _MADE:
        _MADE["claims"], runner.Rotation = True, Three
    return work


def _fewer_sets(work, x, packed):
    """Says that one set takes part, which stays in the cache."""
    from moe_routing_bench.measure import runner

    genuine = runner.Rotation.__init__
    if "fewer" not in _MADE:
        _MADE["fewer"], runner.Rotation.__init__ = True, lambda self, calls: genuine(self, calls[:1])
    return work


def _seen_again(work, x, packed):
    """Is `crashed` where a set has the same values in so many calls in a row that a quarter could be left out unseen: those of some sets, by
    a comparison of the whole input."""
    known, count = x.clone(), [0]

    def call():
        count[0] = count[0] + 1 if torch.equal(x, known) else 0
        known.copy_(x)
        if count[0] > 10:
            raise RuntimeError("the same values in ten calls")
        work()

    return call


def _last_rotation(work, x, packed):
    """Is `crashed` where a turn has rotations between the first and the last: some of these could be left out unseen."""

    def call():
        frame = sys._getframe()
        while frame and not {"count", "_"} <= frame.f_locals.keys():
            frame = frame.f_back
        if frame and 0 < frame.f_locals["_"] < frame.f_locals["count"] - 1:
            raise RuntimeError("a rotation that no output shows")
        work()

    return call


def _patched(work, x, packed):
    """Is `crashed` where few columns of an input have changed: what the output holds would be right but for these."""
    known = x.clone()

    def call():
        changed = int((x != known).any(0).sum())
        known.copy_(x)
        if 0 < changed <= 2:
            raise RuntimeError("two columns are new")
        work()

    return call
