"""The processes of isolated implementations while another implementation runs: stopped, and so unchanged. Linux alone.

The kernel lets processes of one user renice, pin, limit and signal each other. Only the implementation that has just run can have done it.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_routing_bench.measure import processes
from moe_routing_bench.measure.candidate import Failure, Ruined
from moe_routing_bench.measure.runners import Process

# SIGCONT to SIGTTOU, which all processes of a suspended job get.
_STOPPING = sum(1 << number - 1 for number in range(18, 23))


class Thread(NamedTuple):
    """What the kernel says of a thread that its own code does not change while it is stopped."""

    policy: str
    nice: str
    priority: str
    cpus: str
    memories: str
    tracer: str
    signals: int


class State(NamedTuple):
    """The same of a process, with its limits."""

    threads: Mapping[str, Thread]
    limits: str
    oom_score: str


_WORDS = {
    "policy": "scheduling policy",
    "nice": "priority",
    "priority": "real-time priority",
    "cpus": "cores",
    "memories": "memory nodes",
    "tracer": "tracer",
    "signals": "pending signals",
    "limits": "limits",
    "oom_score": "score for want of memory",
}


def state(pid: int) -> State | None:
    """What the kernel says of a process; None where it has ended."""
    folder = f"/proc/{pid}"
    try:
        found = {name: _thread(f"{folder}/task/{name}") for name in os.listdir(f"{folder}/task")}
        threads = {name: one for name, one in found.items() if one}
        return State(threads, _read(f"{folder}/limits"), _read(f"{folder}/oom_score_adj"))
    except processes.GONE:
        return None


def _thread(folder: str) -> Thread | None:
    """What the kernel says of a thread; None where it was ending."""
    numbers = processes.stat(folder)
    try:
        lines = _read(f"{folder}/status").splitlines() if numbers else []
    except processes.GONE:
        lines = []
    if not lines:
        return None
    told = {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
    signals = (int(told["SigPnd"], 16) | int(told["ShdPnd"], 16)) & ~_STOPPING
    cpus, memories, tracer = (told.get(name, "") for name in ("Cpus_allowed", "Mems_allowed", "TracerPid"))
    return Thread(numbers[38], numbers[16], numbers[37], cpus, memories, tracer, signals)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def change(was: State, now: State | None) -> str:
    """What differs, in words; empty where nothing does."""
    if now is None:
        return "it has ended"
    found = [name for name in ("limits", "oom_score") if getattr(was, name) != getattr(now, name)]
    pairs = [(one, now.threads[name]) for name, one in was.threads.items() if name in now.threads]  # some were ending
    found += [name for name in Thread._fields if any(getattr(a, name) != getattr(b, name) for a, b in pairs)]
    return f"it has other {' and '.join(_WORDS[name] for name in found)}" if found else ""


class Bystanders:
    """The processes of all isolated implementations, by name, as they were when each was last stopped."""

    def __init__(self, isolated: Mapping[str, Sequence[Process]]) -> None:
        """All of them are stopped."""
        self._isolated = isolated
        self._known = {name: self._states(name) for name in isolated}
        self._ranks = {pid: _rank(one) for states in self._known.values() for pid, one in states.items()}

    def look(self, name: str) -> None:
        """After a step of an implementation: `Ruined` where the process of another has changed, `Failure` where its own has another priority."""
        for other, states in self._known.items():
            for pid, was in states.items() if other != name else ():
                if said := change(was, state(pid)):
                    raise Ruined("incorrect", f"it reached for the process of {other}: {said}")
        if name in self._known:
            self._known[name] = self._states(name)
            if any(_rank(one) != self._ranks[pid] for pid, one in self._known[name].items()):
                raise Failure("incorrect", "its process has another scheduling policy or priority")

    def _states(self, name: str) -> dict[int, State]:
        """The states of the processes that have not ended."""
        found = {pid: state(pid) for process in self._isolated[name] for pid in process.pids}
        return {pid: one for pid, one in found.items() if one}


def _rank(one: State) -> set[tuple[str, str, str]]:
    """How its threads are scheduled."""
    return {(thread.policy, thread.nice, thread.priority) for thread in one.threads.values()}
