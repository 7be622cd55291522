"""Processes of a job: a worker ends with its supervisor, a runner with its worker, and what an implementation starts with them. Linux alone."""

import contextlib
import ctypes
import os
import signal
import time

_PDEATHSIG, _DUMPABLE, _DROP_FROM_BOUNDS, _CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 4, 24, 36, 38  # of prctl
_CAPABILITY_VERSION = 0x20080522
_EMPTY_LOOKS = 3  # one look may miss a child: Linux's list skips one where another leaves it meanwhile, or the parent has not stopped yet
GONE = (FileNotFoundError, ProcessLookupError)  # of what is read of a process: before it is opened, and after
_LOOKING_IN = (17, 19, 21)  # CAP_SYS_RAWIO, CAP_SYS_PTRACE, CAP_SYS_ADMIN


def adopt() -> None:
    """From now on the orphans among this process's descendants become its children, whatever session they are in."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have this process, which `parent` has just forked, killed when that ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before this was asked for
        os._exit(1)


def first_to_go() -> None:
    """Have the kernel rather kill this process than its parent where memory runs out."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(min(1000, score + 500)))


def offspring() -> set[int]:
    """The children of this process, ended ones included."""
    return _children("self")


def _children(process: object) -> set[int]:
    """The children of all threads of a process; none where it has ended. Listed: `glob` takes five times as long."""
    pids: set[int] = set()
    with contextlib.suppress(*GONE):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(*GONE), open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                pids.update(map(int, file.read().split()))
    return pids


def cpu_seconds(pid: int) -> float:
    """How long all threads of a process have computed so far; 0 where there is none."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the kernel's number of the CPU clock of another process
    except OSError:
        return 0.0


def cpu_seconds_below(pid: int) -> float:
    """How long what a process has started has computed, ended or not, in steps of 10 ms."""
    ticks = sum(_ticks(pid)[2:]) + sum(sum(_ticks(each)) for each in descendants(pid))
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> list[int]:
    """What a process has computed as a user and in the kernel, and its children that it has waited for; nothing where there is none."""
    return [int(word) for word in stat(f"/proc/{pid}")[11:15]]


def sweep(known: set[int], seconds: float) -> set[int]:
    """Kill all children but the `known` ones, and what these leave to this process in turn; returns which there were.

    Gives up after so many seconds on what no signal ends.
    """
    pids: set[int] = set()
    deadline = time.monotonic() + seconds
    while (left := offspring() - known) and time.monotonic() < deadline:
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
        pids |= left
    return pids


def status(code: object) -> int:
    """The exit status that Python gives to what `sys.exit` was called with."""
    return int(code or 0) & 0xFF if code is None or isinstance(code, int) else 1


def descendants(pid: int) -> set[int]:
    """All processes below `pid`, ended ones that nothing has waited for included."""
    below: set[int] = set()
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop()) - below
        below |= children
        waiting += children
    return below


def running(pids: set[int]) -> set[int]:
    """Those of the processes that have not ended."""
    return {pid for pid in pids if _state(pid) not in ("Z", "X", "")}


def ready(pids: set[int]) -> set[int]:
    """Those of the processes that compute, or would if a core were free."""
    return {pid for pid in pids if _state(pid) == "R"}


def _state(pid: int) -> str:
    """The state letter that the kernel gives a process; empty where there is none."""
    return next(iter(stat(f"/proc/{pid}")), "")


def stat(folder: str) -> list[str]:
    """What the kernel counts of the process or thread of a folder, from the third field of proc(5) on; nothing where it has ended."""
    try:
        with open(f"{folder}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except GONE:
        return []


def end_tree(pid: int, seconds: float) -> None:
    """Kill a child, which must not run meanwhile, and all processes below it. The child is waited for; gives up after so many seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more while those below it are counted
    deadline, empty = time.monotonic() + seconds, 0
    while empty < _EMPTY_LOOKS and time.monotonic() < deadline:
        left = running(descendants(pid))
        empty = 0 if left else empty + 1
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def keep_to_itself() -> None:
    """From now on other processes of the same user may neither read nor write this process's memory, nor trace it, unless they have
    the right to trace all."""
    ctypes.CDLL(None).prctl(_DUMPABLE, 0)


def renounce() -> None:
    """Give up the rights of a superuser to look into other processes (raw I/O, trace, administer), for this process and all that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (
        ctypes.c_uint32 * 6
    )()  # effective, permitted and inheritable ones: of the first 32 rights, then of the others
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for right in _LOOKING_IN:
        libc.prctl(_DROP_FROM_BOUNDS, right, 0, 0, 0)  # refused to a process that has no rights, which needs none
        for kind in range(3):
            sets[kind] &= ~(1 << right)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def close_all_but(*descriptors: int) -> None:
    """Have all descriptors lead to nothing but these, the three standard ones, and those of devices, which libraries of a GPU hold.

    The numbers stay taken: a library closes its own once more, as Arrow does in whatever is forked, and would end that where none is open.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            if (
                number > 2
                and number not in descriptors
                and not os.readlink(f"/proc/self/fd/{name}").startswith("/dev/")
            ):
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
