"""Who ends with whom: what is asked of Linux, what is swept up, and exit statuses. Children here are numbers that are told of."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from moe_routing_bench.measure import processes, server


@pytest.mark.parametrize("status", [processes.status, server.status])
@pytest.mark.parametrize(
    ("code", "found"), [(None, 0), (0, 0), (True, 1), (3, 3), (256 + 5, 5), (-1, 255), ("3", 1), ("", 1), (2.0, 1)]
)
def test_exit_statuses_are_python_s(code, found, status) -> None:
    """`sys.exit` takes anything: numbers are statuses, of which 8 bits count, and all else is a text of a failure."""
    assert status(code) == found


def test_a_text_is_said_by_the_server(capsys) -> None:
    server.status("no such thing")
    assert capsys.readouterr().err == "no such thing\n"


def test_what_is_asked_of_linux(monkeypatch) -> None:
    """To adopt orphans; to be killed with the parent, and where that has ended by now to leave at once."""
    asked, left = [], []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *given: asked.append((name, *given))))
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(os, "getppid", lambda: 17)
    processes.adopt()
    processes.end_with(17)
    assert asked == [(None, 36, 1), (None, 1, signal.SIGKILL)] and not left
    processes.end_with(16)
    assert asked[2:] == asked[1:2] and left == [1]


@pytest.mark.parametrize("one", [processes, server])
def test_children_of_all_threads_are_counted(one, tmp_path, monkeypatch) -> None:
    """A thread that ends meanwhile has none."""
    for name, text in {"first": "12 345 ", "second": "6 ", "third": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "children").write_text(text)
    threads = [f"../../..{tmp_path}/{name}" for name in ("first", "gone", "third", "second")]
    with monkeypatch.context() as system:
        system.setattr(os, "listdir", {"/proc/self/task": threads}.__getitem__)
        assert one.offspring() == {12, 345, 6}


class Children:
    """Children by their numbers: each shows when those before it are swept up; a second passes with every pause."""

    def __init__(self, *generations: set[int], deaf: int = 0) -> None:
        self.generations, self.deaf, self.now = list(generations), deaf, 0.0
        self.killed: list[int] = []
        self.waited: list[int] = []

    def offspring(self) -> set[int]:
        return {1} | self.generations[0] if self.generations else {1}

    def kill(self, child: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(child)
        raise ProcessLookupError  # it ended by itself, which changes nothing

    def waitpid(self, child: int, options: int) -> tuple[int, int]:
        assert options == os.WNOHANG and child in self.killed
        self.waited.append(child)
        raise ChildProcessError  # somebody else has waited for it

    def pause(self, seconds: float) -> None:
        assert seconds == 0.001
        self.now += 1
        if self.deaf not in self.generations[0]:
            self.generations.pop(0)


@pytest.mark.parametrize(
    ("generations", "seconds", "found", "pauses"),
    [
        ([], 5.0, set(), 0),
        ([{2, 3}, {4}], 5.0, {2, 3, 4}, 2),
        ([{2, 9}, {4}], 3.0, {2, 9}, 3),  # no signal ends the ninth
        ([{2}], 0.0, set(), 0),
    ],
)
def test_what_is_swept_up(generations, seconds, found, pauses, monkeypatch) -> None:
    """All but those that are known, and what these leave in turn, for so long."""
    one = Children(*generations, deaf=9)
    monkeypatch.setattr(processes, "offspring", one.offspring)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: one.now, sleep=one.pause))
    with monkeypatch.context() as system:
        system.setattr(os, "kill", one.kill)
        system.setattr(os, "waitpid", one.waitpid)
        swept = processes.sweep({1}, seconds)
    assert swept == found == set(one.killed) == set(one.waited) and one.now == pauses


class Closed:
    """A stream that nobody reads any more."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        raise self.error


class Left(BaseException):
    """The process would have ended."""


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("error", [OSError("gone"), ValueError("closed")])
@pytest.mark.parametrize(
    ("end", "code"),
    [(None, 7), (SystemExit(3), 3), (SystemExit("a text"), 1), (KeyboardInterrupt(), 1), (RuntimeError("boom"), 1)],
)
def test_every_request_is_answered_once(end, code, error, heard, monkeypatch) -> None:
    """With the status that the process then leaves with, also where nobody listens any more."""
    said, flushed = [], []

    def serve(connection, memory) -> int:
        if end:
            raise end
        return 7

    def send(data: bytes) -> None:
        said.append(data)
        if not heard:
            raise BrokenPipeError

    def leave(status: int) -> None:
        said.append(status)
        raise Left

    monkeypatch.setattr(server, "serve_one", serve)
    for name in ("stdout", "stderr"):
        stream = Closed(error)
        monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(stream, "flush", lambda name=name, flush=stream.flush: flushed.append(name) or flush())
    with monkeypatch.context() as one:
        one.setattr(os, "_exit", leave)
        with pytest.raises(Left):
            server.answer(SimpleNamespace(sendall=send), server.Memory())
    assert said == [f"{code}\n".encode(), code] and flushed[-2:] == ["stdout", "stderr"]


def forked(run: Callable[[], object]) -> int:
    """A child that runs this, and never the rest of the tests: it ends with 0 where that is true."""
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if run() else 1)
        finally:
            os._exit(1)
    return child


def test_a_tree_ends_with_what_has_left_its_session():
    """A grandchild in a session of its own is below its parent until that ends, then below the subreaper."""
    read, write = os.pipe()

    def daemon_of() -> None:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)

    def parent() -> None:
        processes.adopt()
        forked(daemon_of)
        os.wait()
        time.sleep(60)

    child = forked(parent)
    daemon = int(os.read(read, 20))
    while daemon not in processes.descendants(child):
        time.sleep(0.001)
    assert processes.running({daemon, child}) == {daemon, child}
    processes.end_tree(child, 2.0)
    assert not processes.running({daemon, child})


def test_processes_below_others_are_found_and_ended():
    """Three in a row, each of which has started the next."""
    shell = subprocess.Popen(["sh", "-c", "sh -c 'sleep 60 & echo $!; wait' & wait"], stdout=subprocess.PIPE, text=True)
    with shell:
        last = int(shell.stdout.readline())
        below = processes.descendants(shell.pid)
        assert last in below and len(below) == 2
        processes.end_tree(shell.pid, 2.0)
    deadline = time.monotonic() + 10  # a signal that was sent takes effect when the process gets a core
    while processes.running(below) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not processes.running(below)


def test_a_look_that_misses_a_child_is_not_the_last(monkeypatch):
    """Linux may leave a child out of the list where another child ends meanwhile."""
    read, write = os.pipe()

    def parent() -> None:
        os.write(write, str(forked(lambda: time.sleep(60))).encode())
        time.sleep(60)

    child = forked(parent)
    below, looks = int(os.read(read, 20)), []
    seen = processes.descendants
    monkeypatch.setattr(
        processes, "descendants", lambda pid: looks.append(pid) or (seen(pid) if len(looks) > 1 else set())
    )
    processes.end_tree(child, 2.0)
    assert not processes.running({below, child})


def test_the_time_that_another_process_computes():
    """In any of its threads; none where it has ended."""

    def compute() -> None:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)

    def compute_in_a_thread() -> None:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()

    child = forked(compute_in_a_thread)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    assert 0.05 <= processes.cpu_seconds(child) < 0.5
    processes.end_tree(child, 1.0)
    assert processes.cpu_seconds(child) == 0


def test_what_children_have_computed_counts_whether_they_are_waited_for_or_not():
    """A process that leaves its work to another one has done it: 60 ms in one that it has waited for, 60 in one that it has not, 40 in a child of that."""

    def compute(seconds: float) -> None:
        while time.process_time() < seconds:
            pass

    def parent() -> None:
        waited_for = forked(lambda: compute(0.06))
        os.waitpid(waited_for, 0)

        def second() -> None:
            os.waitpid(forked(lambda: compute(0.04)), 0)
            compute(0.06)

        os.waitid(os.P_PID, forked(second), os.WEXITED | os.WNOWAIT)
        os.kill(os.getpid(), signal.SIGSTOP)

    child = forked(parent)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    assert 0.12 <= processes.cpu_seconds_below(child) < 0.5 and processes.cpu_seconds(child) < 0.1
    processes.end_tree(child, 1.0)
    assert processes.cpu_seconds_below(child) == 0


def test_a_process_keeps_its_memory_from_one_that_has_renounced():
    """Not even root reads it."""
    code = "import sys; from moe_routing_bench.measure import processes; processes.renounce(); open(f'/proc/{sys.argv[1]}/mem', 'rb')"

    def keep() -> None:
        processes.keep_to_itself()
        os.kill(os.getpid(), signal.SIGSTOP)

    child = forked(keep)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    done = subprocess.run([sys.executable, "-c", code, str(child)], capture_output=True, text=True, check=False)
    processes.end_tree(child, 1.0)
    assert done.returncode == 1 and "PermissionError" in done.stderr, done.stderr


def test_descriptors_but_a_few_lead_to_nothing():
    def close() -> bool:
        kept, closed, device = os.pipe()[0], os.pipe()[0], os.open("/dev/zero", os.O_RDONLY)
        processes.close_all_but(kept)
        left = {number: os.readlink(f"/proc/self/fd/{number}") for number in (kept, closed, device)}
        return left[kept].startswith("pipe:") and left[closed] == os.devnull and left[device] == "/dev/zero"

    assert os.waitpid(forked(close), 0)[1] == 0


def test_what_is_forked_without_descriptors_may_fork():
    """Arrow closes in each fork the pipe that it waits for signals at, and ends the process where that cannot be closed."""
    script = (
        "import io, os, pyarrow.csv as csv; from moe_routing_bench.measure import processes; "
        "csv.read_csv(io.BytesIO(b'a\\n1')); "
        "processes.close_all_but(); os.write(1, b'%d' % os.wait()[1] if os.fork() else b''); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0", "")
