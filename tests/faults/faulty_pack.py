"""Implementations of `pack` that go wrong, one way each; loaded by the tests in place of real ones."""

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time

import torch

from moe_routing_bench.measure import timers


def bind(problem, *, x, order, inverse, packed, fault):
    """A correct pack that then commits its fault."""
    if fault in AT_ONCE:
        AT_ONCE[fault]()

    def pack():
        checked = bool(packed.isnan().all())  # poisoned, as it is before a check
        packed.copy_(x[order.long().clamp_min(0) // problem.top_k])
        packed[order < 0] = 0
        FAULTS.get(fault, _nothing)(x, packed, checked)

    return pack


def raises(error):
    def fault(x, packed, checked):
        raise error

    return fault


def wrong(x, packed, checked):
    packed[0, 0] += 1


def nan(x, packed, checked):
    packed[-1, -1] = float("nan")


def mutate(x, packed, checked):
    x[0, 0] += 1


def forks(session: bool, ends: int | None):
    """Leave a process behind that holds all that the worker has open; then go on, or end."""

    def fault(x, packed, checked):
        if not checked:
            return
        if os.fork() == 0:
            if session:
                os.setsid()
                if os.fork():
                    os._exit(0)
            time.sleep(600)
        if session:
            os.wait()
        if ends:
            os.kill(os.getpid(), ends)

    return fault


def starts(x, packed, checked):
    """Leave a command behind, in a session of its own."""
    if checked:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)


def closes(x, packed, checked):
    """Close everything that is open, the supervisor's pipe with it."""
    os.closerange(3, 1000)


def _nothing(x, packed, checked):
    pass


def inside(step, harm):
    """Harm others in calls of one step, once it was found right: what torch counts as a write in place is not seen."""

    def one(x, packed, checked):
        frame = sys._getframe()
        while frame := frame.f_back:
            if frame.f_code.co_name == step:
                return harm(x)

    return one


def other_input(x):
    x.numpy()[...] = 7


def broken_clock(*_):
    genuine = time.perf_counter
    timers.perf_counter = lambda: genuine()


def replaced_clock():
    time.perf_counter = lambda: 0.0
    raise ValueError("it cannot be bound")


AT_ONCE = {"clock_and_raise": replaced_clock}
LATE = {
    f"{name}_{step.strip('_')}": inside(step, harm)
    for name, harm in (("input", other_input), ("clock", broken_clock))
    for step in ("settle", "_block")
}
FAULTS = LATE | {
    "none": _nothing,
    "kill": lambda x, packed, checked: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda x, packed, checked: (
        faulthandler.disable(),
        ctypes.string_at(1),
    ),  # no pages of stacks in the log
    "abort": lambda x, packed, checked: (faulthandler.disable(), os.abort()),
    "leave": lambda x, packed, checked: os._exit(0),
    "hang": lambda x, packed, checked: time.sleep(600),
    "stop": lambda x, packed, checked: os.kill(os.getpid(), signal.SIGSTOP),
    "close": closes,
    "raise": raises(ValueError("the kernel was called wrongly")),
    "inside": lambda x, packed, checked: json.loads("{"),
    "exit": raises(SystemExit()),
    "exit_text": raises(SystemExit("a text")),
    "exit_large": raises(SystemExit(1 << 40)),
    "interrupt": raises(KeyboardInterrupt()),
    "surrogate": raises(ValueError("\udcff\n\0")),
    "huge": raises(ValueError("x" * 10**7)),
    "wrong": wrong,
    "nan": nan,
    "memory": lambda x, packed, checked: torch.empty(1 << 52),
    "hog": lambda x, packed, checked: [torch.ones(1 << 24) for _ in range(64)],  # 4 GiB, page by page
    "mutate": mutate,
    "orphan": forks(False, None),
    "orphan_of_killed": forks(False, signal.SIGKILL),
    "daemon": forks(True, None),
    "daemon_of_killed": forks(True, signal.SIGKILL),
    "command": starts,
}
