"""What one process may change of another that is stopped is seen, and whose doing it was; what a stopped process bears anyway is not."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_routing_bench.measure.bystanders import Bystanders, change, state
from moe_routing_bench.measure.candidate import Failure, Ruined


def stopped(threads: int = 0) -> int:
    """A child with so many more threads, which wait, stopped."""
    pid = os.fork()
    if pid == 0:
        for _ in range(threads):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        time.sleep(60)
        os._exit(0)
    while threads and len(os.listdir(f"/proc/{pid}/task")) <= threads:
        time.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    return pid


@pytest.fixture
def children() -> Iterator[list[int]]:
    found = [stopped(), stopped(1)]
    yield found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def last_thread(pid: int) -> int:
    return max(map(int, os.listdir(f"/proc/{pid}/task")))


REACHES = {
    "scheduling policy": lambda pid: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 7),
    "limits": lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (20, 20)),
    "pending signals": lambda pid: os.kill(pid, signal.SIGUSR2),
    "score for want of memory": lambda pid: Path(f"/proc/{pid}/oom_score_adj").write_text("900"),
}
if len(os.sched_getaffinity(0)) > 1:
    REACHES["cores"] = lambda pid: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})


@pytest.mark.parametrize("what", REACHES)
def test_what_has_changed_is_said(what: str, children: list[int]) -> None:
    was = state(children[0])
    assert was and change(was, state(children[0])) == ""
    REACHES[what](children[0])
    assert change(was, state(children[0])) == f"it has other {what}"


@pytest.mark.parametrize("what", ["scheduling policy", "priority", *(["cores"] if "cores" in REACHES else [])])
def test_each_thread_counts(what: str, children: list[int]) -> None:
    was = state(children[1])
    REACHES[what](last_thread(children[1]))
    assert was and change(was, state(children[1])) == f"it has other {what}"


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU])
def test_a_job_that_is_suspended_has_changed_nothing(number: int, children: list[int]) -> None:
    """Whoever suspends it, and lets it go on, sends signals to all of its processes."""
    was = state(children[0])
    os.kill(children[0], number)
    assert was and change(was, state(children[0])) == ""
    os.kill(children[0], signal.SIGCONT)
    assert change(was, state(children[0])) == ""


def test_a_thread_that_ends_while_it_is_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has not ended."""
    names = os.listdir(f"/proc/{os.getpid()}/task")
    monkeypatch.setattr(os, "listdir", lambda path: [*names, "999999999"])
    found = state(os.getpid())
    assert found and found.threads.keys() == set(names)


def of(*pids: int) -> SimpleNamespace:
    return SimpleNamespace(pids=set(pids))


def after(name: str, do: Callable[[], object], bystanders: Bystanders) -> None:
    do()
    bystanders.look(name)


def test_the_one_that_ran_has_done_it_and_may_change_itself(children: list[int]) -> None:
    """But for its priority."""
    first, second = children
    both = Bystanders({"first": [of(first)], "second": [of(second)]})
    after("first", lambda: resource.prlimit(first, resource.RLIMIT_NOFILE, (30, 30)), both)
    after("second", lambda: None, both)
    with pytest.raises(Ruined, match="the process of first: it has other limits") as caught:
        after("second", lambda: REACHES["limits"](first), both)
    assert caught.value.status == "incorrect"
    with pytest.raises(Ruined, match="the process of second: it has other pending signals"):
        after("torch", lambda: REACHES["pending signals"](second), Bystanders({"second": [of(second)]}))
    with pytest.raises(Failure, match="another scheduling policy or priority") as own:
        after("first", lambda: REACHES["priority"](first), Bystanders({"first": [of(first)]}))
    assert not isinstance(own.value, Ruined)


def test_a_rival_that_is_killed_has_not_ended_by_itself(children: list[int]) -> None:
    """One that ends in a step of its own has; nothing is looked for any more where it was."""
    first, second = children
    process = of(first)
    both = Bystanders({"first": [process], "second": [of(second)]})
    killed = stopped()
    process.pids.add(killed)
    again = Bystanders({"first": [process], "second": [of(second)]})
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    with pytest.raises(Ruined, match="it reached for the process of first: it has ended"):
        again.look("second")
    again.look("first")
    again.look("second")
    both.look("second")
