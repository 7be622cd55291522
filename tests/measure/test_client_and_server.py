"""Client and warm server in one process: what is asked and answered over a socket, and what becomes of children."""

import contextlib
import ctypes
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forks
from moe_routing_bench.measure import client, server, supervisor


class Replaced(BaseException):
    """The process would have become, or ended as, what `said` says."""

    def __init__(self, *said: object) -> None:
        super().__init__(said)
        self.said = said


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: of a socket's path Linux takes 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would replace or end this process raises instead."""

    def replaced(*said: object) -> None:
        raise Replaced(*said)

    monkeypatch.setattr(os, "execv", replaced)
    monkeypatch.setattr(os, "_exit", replaced)


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Run in a thread, which has to end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


def called(path: str) -> socket.socket | None:
    """A client's connection, with what `socket` adds to it."""
    connection = client.connect(path)
    return connection and socket.socket(fileno=connection.detach())


@pytest.fixture
def listener(tmp_path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "s.sock"))
        one.listen(4)
        yield one


# -- the client


def test_one_socket_for_each_way_of_running(tmp_path, monkeypatch) -> None:
    """Another interpreter, source tree, device, path, number of threads, SLURM job, or anything that is inherited has another
    server; nobody else may enter."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in client._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    first = client.socket_path()
    folder = tmp_path / f"moe-routing-bench-{os.getuid()}"
    assert Path(first).parent == folder and folder.stat().st_mode & 0o777 == 0o700
    assert first == client.socket_path() and first.endswith(".sock") and len(Path(first).stem) == 16
    found = {first}
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.setenv(name, "1")
        found.add(client.socket_path())
    monkeypatch.setattr(sys, "executable", "/other/python")
    found.add(client.socket_path())
    (tmp_path / "server.py").touch()
    monkeypatch.setattr(client, "SERVER", str(tmp_path / "server.py"))
    found.add(client.socket_path())
    os.utime(tmp_path / "server.py", ns=(1, 1))
    found.add(client.socket_path())
    monkeypatch.setattr(client, "inherited", lambda: ["another"])
    found.add(client.socket_path())
    assert len(found) == 10
    folder.chmod(0o755)
    with pytest.raises(SystemExit, match=f"got drwxr-xr-x of user {os.getuid()}; allowed: a folder of mode 700"):
        client.socket_path()


def fewer_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


CHANGES = {
    "niceness": lambda: os.nice(1),
    "umask": lambda: os.umask(0o027),
    "affinity": lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:]),
    "limits": fewer_files,
    "mounts": lambda: os.stat("/") if ctypes.CDLL(None).unshare(0x20000) == 0 else os._exit(2),
    "groups": lambda: os.setgroups([12345]),
}


def test_the_client_imports_small_modules_alone(tmp_path) -> None:
    """It is started for every cell; and it finds the temporary folder that other processes have."""
    script = f"""import sys
sys.path.append({str(Path(client.__file__).parent)!r})
import client
found, large = client.temporary_folder(), {{"contextlib", "hashlib", "json", "socket", "subprocess", "tempfile"}} & {{*sys.modules}}
import tempfile
print(found == tempfile.gettempdir(), large)"""
    (tmp_path / "folder").mkdir()
    clean = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    for given, large in (
        ({}, "set()"),
        ({"TMPDIR": f"{tmp_path}/x/../folder"}, "set()"),
        ({"TMPDIR": "", "TMP": str(tmp_path / "folder")}, "set()"),
        ({"TMPDIR": str(tmp_path / "none")}, "tempfile"),
    ):
        words = [sys.executable, "-I", "-S", "-c", script]
        done = subprocess.run(words, env=clean | given, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith("True ") and large in done.stdout, (given, done)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.fault("other surroundings")
def test_what_a_server_inherits_is_its_caller_s(change) -> None:
    """Whoever has other surroundings than the one who started a server is served by another."""
    if (child := os.fork()) == 0:
        try:
            before = client.inherited()
            unchanged = before == client.inherited()
            CHANGES[change]()
            os._exit(0 if unchanged and client.inherited() != before else 1)
        except OSError:
            os._exit(2)
        finally:
            os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 2:
        pytest.skip("needs other rights, or a second CPU")
    assert code == 0


def test_the_longest_folder_of_a_socket(tmp_path, monkeypatch) -> None:
    """107 bytes are what Linux takes; one more, and the socket is below /tmp."""
    monkeypatch.setattr(client.os, "mkdir", lambda *_: None)
    monkeypatch.setattr(client.os, "lstat", lambda _: os.stat_result([0o40700, 0, 0, 0, os.getuid(), 0, 0, 0, 0, 0]))
    name = f"/moe-routing-bench-{os.getuid()}"
    for length, below in ((client.LONGEST_FOLDER, False), (client.LONGEST_FOLDER + 1, True)):
        monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - len(name) - 1))
        found = client.socket_path()
        assert found.startswith("/tmp/moe-routing-bench") == below and (below or len(found) == 107)
        with socket.socket(socket.AF_UNIX) as one, pytest.raises(FileNotFoundError):  # and not OSError: too long
            one.connect(found)


def test_nobody_listens(tmp_path, listener) -> None:
    """No socket, or one that a killed server has left."""
    assert client.connect(str(tmp_path / "none.sock")) is None
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    assert client.connect(str(tmp_path / "dead.sock")) is None
    with called(str(tmp_path / "s.sock")) as one, listener.accept()[0] as other:
        other.sendall(b"x")
        assert one.recv(9) == b"x"
    with pytest.raises(OSError, match="too long"):
        client.connect("x" * 200)


class Started:
    """A server's process: listens after some polls, or has ended."""

    polls, listens, code = 0, 3, None
    given: dict

    def __init__(self, words, **given) -> None:
        type(self).words, type(self).given = words, given

    def poll(self):
        type(self).polls += 1
        if self.polls == self.listens:
            type(self).socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(self.words[-1])
            self.socket.listen(1)
        return self.code


@pytest.fixture
def started(monkeypatch) -> Iterator[type[Started]]:
    class One(Started):
        socket = None

    monkeypatch.setattr(subprocess, "Popen", One)
    monkeypatch.setattr(client.time, "sleep", {120 / 6000: None, 0: None}.__getitem__)  # 6000 looks in two minutes
    yield One
    if One.socket:
        One.socket.close()


def test_a_server_is_started_when_there_is_none(tmp_path, started) -> None:
    """In a session of its own, without the caller's files; its log lies beside the socket."""
    path = str(tmp_path / "new.sock")
    with contextlib.closing(client.connected(path)):
        pass
    assert started.polls == 3 and started.words == [sys.executable, "-P", client.SERVER, path]
    given = started.given
    assert given.pop("stdout") is given.pop("stderr") and given == {"stdin": -3, "start_new_session": True}
    assert Path(path + ".log").exists() and Path(path + ".lock").exists() and Path(client.SERVER).name == "server.py"


def test_a_server_that_is_there_is_not_started_again(tmp_path, listener, started, monkeypatch) -> None:
    """Nor one that somebody else started while this one waited for the lock."""
    with contextlib.closing(client.connected(str(tmp_path / "s.sock"))):
        pass
    assert started.polls == 0 and not (tmp_path / "s.sock.lock").exists()
    tries, connect, slept = [], client.connect, []
    monkeypatch.setattr(client.time, "sleep", slept.append)
    monkeypatch.setattr(
        client, "connect", lambda path: tries.append(path) or (connect(path) if len(tries) > 1 else None)
    )
    with contextlib.closing(client.connected(str(tmp_path / "s.sock"))):
        pass
    assert len(tries) == 2 and slept == [0] and not hasattr(started, "words")


def test_only_one_waits_for_a_server_to_start(tmp_path, started, monkeypatch) -> None:
    """Under a lock that the others wait for."""
    locks = []
    flock = client.fcntl.flock
    monkeypatch.setattr(client.fcntl, "flock", lambda file, how: locks.append(how) or flock(file, how))
    path = str(tmp_path / "new.sock")
    client.connected(path).close()
    assert locks == [client.fcntl.LOCK_EX | client.fcntl.LOCK_NB]
    Path(path).unlink()
    with open(path + ".lock") as other:
        flock(other, client.fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="did not start"):
            client.connected(path)
    assert len(locks) == 6001 and started.polls == 3, "who waits starts none, and does not wait for ever"


@pytest.mark.parametrize(("code", "polls"), [(1, 1), (0, 1), (None, 6000)])
def test_a_server_that_does_not_start(code, polls, tmp_path, started) -> None:
    """It has ended, or has not listened for two minutes."""
    started.code, started.listens = code, -1
    with pytest.raises(SystemExit) as end:
        client.connected(str(tmp_path / "new.sock"))
    assert started.polls == polls
    assert end.value.code == f"error: the warm server did not start: see {tmp_path}/new.sock.log; {client.COLD}"


@pytest.mark.parametrize(
    ("arguments", "worker", "module", "left"),
    [
        (["--cold", "out", "spec"], None, "moe_routing_bench.measure.supervisor", ["out", "spec"]),
        (["out", "spec"], "cold", "moe_routing_bench.measure.supervisor", ["out", "spec"]),
        (
            ["--cold", "--running", "--module", "moe_routing_bench.cli", "list", "-x"],
            None,
            "moe_routing_bench.cli",
            ["list", "-x"],
        ),
        (["--running", "--module", "moe_routing_bench.cli", "list"], None, "moe_routing_bench.cli", ["list"]),
    ],
)
def test_without_a_server_the_process_becomes_the_job(arguments, worker, module, left, ends, monkeypatch) -> None:
    """Where it is asked for, or with --running where none listens."""
    monkeypatch.delenv("MOE_ROUTING_BENCH_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("MOE_ROUTING_BENCH_WORKER", worker)
    monkeypatch.setattr(client, "socket_path", lambda: "/nowhere/at.all")
    monkeypatch.setattr(client, "connect", lambda path: None)
    with pytest.raises(Replaced) as end:
        client.main(arguments)
    assert end.value.said == (sys.executable, [sys.executable, "-m", module, *left])


@pytest.mark.parametrize(
    ("parts", "status", "error"),
    [
        ([b"0\n"], 0, ""),
        ([b".", b"..1", b"30\n"], 130, ""),
        ([b"0\n", "held"], 0, ""),
        ([b".1\n.", b"."], 1, ""),  # signs of life that another thread gave while the answer was on its way
        ([b"."], None, "error: the job was killed before it could answer"),
        ([b"1"], None, "error: the job was killed before it could answer"),
        ([b".", "held"], None, "error: the warm server has given no sign of life for 1 s: is it stopped?"),
    ],
)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.fault("reply")
def test_what_the_client_asks(parts, status, error, running, tmp_path, listener, monkeypatch) -> None:
    """Arguments, folder and environment, with its own stdout and stderr; the answer is the exit status, for which nobody waits
    until the end of the stream."""
    monkeypatch.setattr(client, "SILENT_SECONDS", 1 if "held" in parts else 60)
    over = threading.Event()
    monkeypatch.delenv("MOE_ROUTING_BENCH_WORKER", raising=False)
    monkeypatch.setenv("SOMETHING", "é")
    monkeypatch.setattr(client, "socket_path", lambda: str(tmp_path / "s.sock"))
    monkeypatch.setattr(client, "connected", client.connect)  # starts no server here
    monkeypatch.setattr(client, "connect", client.connect if running else None)
    asked = []

    def answer() -> None:
        with listener.accept()[0] as connection:
            request, fds = server.receive(connection)
            asked.append((request, [os.fstat(fd).st_ino for fd in fds]))
            for fd in fds:
                os.close(fd)
            for part in parts:
                if part == "held":
                    over.wait(60)
                    return
                with contextlib.suppress(BrokenPipeError):  # a client that has its answer waits for no more
                    connection.sendall(part)
                time.sleep(0.01)

    with beside(answer):
        if error:
            with pytest.raises(SystemExit, match=re.escape(error)):
                client.main([*["--running"] * running, "out", "spec {}"])
        else:
            assert client.main([*["--running"] * running, "out", "spec {}"]) == status
        over.set()
    assert asked == [
        (
            {"arguments": ["out", "spec {}"], "cwd": os.getcwd(), "env": dict(os.environ)},
            [os.fstat(fd).st_ino for fd in (1, 2)],
        )
    ]


# -- the server


def test_a_request_may_come_in_parts() -> None:
    """The files are with its first byte; it ends with a line, or with the stream."""
    for last in (b'"}\n', b'"}'):
        here, there = socket.socketpair()
        with here, there, open(os.devnull) as one:
            socket.send_fds(here, [b"{"], [one.fileno(), one.fileno()])

            def send(here=here, last=last) -> None:
                for part in (b'"a": "', b"x" * 200_000, last):
                    here.sendall(part)
                    time.sleep(0.01)
                here.shutdown(socket.SHUT_WR)

            with beside(send):
                request, fds = server.receive(there)
            assert request == {"a": "x" * 200_000} and len(fds) == 2
            for fd in fds:
                assert os.fstat(fd).st_rdev == os.fstat(one.fileno()).st_rdev
                os.close(fd)


@pytest.mark.parametrize(("arguments", "how"), [(["out", "spec"], "job"), (["--module", "a.program", "-x"], "program")])
def test_a_child_becomes_its_caller(arguments, how, tmp_path, monkeypatch) -> None:
    """Its folder, its environment and nothing of the server's, its files; then the job or the command is run."""
    became, memory = [], server.Memory()
    monkeypatch.setattr(supervisor, "main", lambda *given: became.append(("job", *given)) or 5)
    monkeypatch.setattr(server, "program", lambda *given: became.append(("program", *given)) or 6)
    monkeypatch.chdir("/")
    here, there = socket.socketpair()
    with here, there, open(tmp_path / "o", "w") as out, open(tmp_path / "e", "w") as err:
        files = [os.fstat(one.fileno()).st_ino for one in (out, err)]
        socket.send_fds(here, [b"{"], [out.fileno(), err.fileno()])
        here.sendall(
            json.dumps({"arguments": arguments, "cwd": str(tmp_path), "env": {"NEW": "2"}})[1:].encode() + b"\n"
        )
        with monkeypatch.context() as one:  # pytest itself needs both before and after
            one.setattr(os, "environ", {"OLD": "1"})
            one.setattr(os, "dup2", lambda fd, target: became.append((os.fstat(fd).st_ino, target)))
            code, environ = server.serve_one(there, memory), os.environ
        given = ("job", arguments, "warm", there, memory) if how == "job" else ("program", arguments[1:], there)
    assert became == [(files[0], 1), (files[1], 2), given]
    assert code == (5 if how == "job" else 6) and environ == {"NEW": "2"} and os.getcwd() == str(tmp_path)


@pytest.mark.parametrize("unread", [False, True])
def test_a_command_ends_with_its_caller(unread, ends, monkeypatch) -> None:
    """It has the arguments of a command line; when the caller closes the connection, the process ends."""
    ran, ended = [], threading.Event()
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(server.runpy, "run_module", lambda *given, **named: ran.append((given, named, list(sys.argv))))
    monkeypatch.setattr(os, "_exit", lambda code: ran.append(code) or ended.set())
    here, there = socket.socketpair()
    with there:
        before = {thread.name for thread in threading.enumerate()}
        assert server.program(["a.program", "list", "-x"], there) == 0
        assert ran == [(("a.program",), {"run_name": "__main__"}, ["pytest", "list", "-x"])]
        (watch,) = [thread for thread in threading.enumerate() if thread.name not in before]
        assert watch.daemon and not ended.wait(0.05)
        assert here.recv(9) == b"."
        there.sendall(b"unread" * unread)  # resets the connection, which is an end too
        here.close()
        assert ended.wait(60) and ran[1:] == [1]


def test_a_command_gives_a_sign_of_life_every_second(ends, monkeypatch) -> None:
    """Until something can be read, which is the end of the stream."""
    asked, said, ended = [], [], threading.Event()
    connection = types.SimpleNamespace(sendall=said.append)

    def select(readers, writers, errors, seconds):
        asked.append((readers, writers, errors, seconds))
        if len(asked) > 3:
            raise OSError
        return readers if len(asked) == 3 else [], [], []

    monkeypatch.setattr(server, "select", types.SimpleNamespace(select=select))
    monkeypatch.setattr(server.runpy, "run_module", lambda *_, **__: ended.wait(5))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    server.program(["a.program"], connection)
    assert asked == [([connection], [], [], 1)] * 3 and said == [b"."] * 2


ENDED: list[int] = []  # exit statuses of children, in the order in which they were collected


@pytest.fixture
def children(monkeypatch) -> list[int]:
    """Those of this test: the process may have others, which are none of the server's. Only they may end as the server does."""
    known, fork, waitpid, leave, process = [], os.fork, os.waitpid, os._exit, os.getpid()

    def end(code: object) -> None:
        assert os.getpid() != process
        leave(code if isinstance(code, int) else 99)

    def counted() -> int:
        child = fork()
        known.extend([child] if child else [])
        return child

    def wait(which: int, options: int) -> tuple[int, int]:
        assert which == -1
        if not known:
            raise ChildProcessError
        for child in known:
            if (found := waitpid(child, options))[0]:
                known.remove(child)
                ENDED.append(os.waitstatus_to_exitcode(found[1]))
                return found
        return 0, 0

    ENDED.clear()
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "fork", counted)
    monkeypatch.setattr(os, "waitpid", wait)
    monkeypatch.setattr(server.Harness, "renew", lambda self: None)  # this process has the package already
    return known


def test_ended_children_are_collected(children) -> None:
    """As many as there are, and nothing else is touched."""
    known, others = set(children), server.offspring()
    hold, release = os.pipe()
    for kind in ("waits", "ends", "ends"):
        if os.fork() == 0:
            os.close(release)
            if kind == "waits":
                os.read(hold, 1)
            os._exit(0)
    known = set(children)
    waits, deadline = children[0], time.monotonic() + 60
    for child in children[1:]:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    server.reap(known, others)
    assert children == [waits] and known == {waits}
    os.close(release)
    while time.monotonic() < deadline and known:
        server.reap(known, others)
        time.sleep(0.005)
    assert children == [] and not known
    os.close(hold)


@pytest.mark.fault("orphan")
def test_what_a_killed_job_leaves_is_killed(children) -> None:
    """It has no parent but the server."""
    others = server.offspring()
    orphan = os.fork()
    if orphan == 0:
        time.sleep(60)
    server.reap(set(), others)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and children:
        server.reap(set(), others)
        time.sleep(0.005)
    assert children == [] and ENDED == [-signal.SIGKILL]


@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_imported_beforehand(gpu, monkeypatch) -> None:
    """What is installed of the tables, without what is of no use here; and Triton's key, for kernels."""
    asked, environ, keys = [], {}, []

    def import_(name):
        asked.append(name)
        if name == "pandas":
            raise ImportError

    with monkeypatch.context() as one:
        one.setattr(os, "environ", environ)
        one.setattr(os.path, "exists", {"/dev/nvidiactl": gpu}.__getitem__)
        one.setattr(server, "__import__", import_, raising=False)
        one.setitem(sys.modules, "triton.runtime.cache", types.SimpleNamespace(triton_key=lambda: keys.append(1)))
        server.preload()
        one.delitem(sys.modules, "triton.runtime.cache")
        server.preload()  # where Triton is not installed
    assert asked[: len(asked) // 2] == [*server.OF_CELLS, *(server._OF_GPU if gpu else ())]
    assert ("cutlass" in asked) == gpu == len(keys)
    assert environ == {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def test_a_child_of_the_server_writes_its_file_without_imports(tmp_path) -> None:
    """Each cell would import the same modules again."""
    code = f"""import sys
from pathlib import Path
from moe_routing_bench.store import rows
before = set(sys.modules)
rows.write(Path({str(tmp_path / "a.parquet")!r}), [{{"bench": "gate", "implementation": "torch", "status": "ok"}}], "spec")
print(set(sys.modules) - before)"""
    words = [forks.programs() / forks.PYTHON, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_worker_of_the_server_compiles_without_a_pool() -> None:
    """Its processes would outlive a kill, and its thread, which starts late, was held against an implementation that was at work."""
    code = "import torch._inductor.config as c; print(c.compile_threads)"
    words = [forks.programs() / forks.PYTHON, "-c", code]  # a child of a server, which has done what its `preload` does
    environ = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    assert subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout == "1\n"


def answers(code: object) -> int:
    """What the child of a request does: its code, or how it ends without one."""
    if isinstance(code, int):
        return code
    raise {
        "exit": SystemExit(3),
        "leaves": SystemExit(),
        "says": SystemExit("a text \udcff"),
        "large": SystemExit(256 + 7),
        "fails": RuntimeError("a fault"),
        "interrupted": KeyboardInterrupt(),
    }[code]


def test_every_caller_is_answered(tmp_path, children, monkeypatch) -> None:
    """By a child of its own, until nobody has called for a while; a socket that was left over is replaced."""
    path = tmp_path / "s.sock"
    path.touch()
    order = []
    monkeypatch.setattr(server, "IDLE_SECONDS", 60)
    monkeypatch.setattr(server, "preload", lambda: order.append(path.exists()))
    monkeypatch.setattr(server, "serve_one", lambda connection, _: answers(json.loads(connection.recv(64))))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    replies, process = {}, os.getpid()

    def call() -> None:
        deadline = time.monotonic() + 60
        for code in (0, 7, "exit", "leaves", "says", "large", "fails", "interrupted"):
            while not (connection := called(str(path))) and time.monotonic() < deadline:
                time.sleep(0.005)
            if code == "interrupted":
                monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)  # from the next call on
            with connection:
                connection.sendall(json.dumps(code).encode())
                replies[code] = connection.makefile().read()

    with beside(call):
        server.main(str(path))
        assert os.getpid() == process, "a child came back"
    assert replies == {
        0: "0\n",
        7: "7\n",
        "exit": "3\n",
        "leaves": "0\n",
        "says": "1\n",
        "large": "7\n",
        "fails": "1\n",
        "interrupted": "1\n",
    }
    assert order == [False], "preloaded before anybody can call"
    assert not path.exists() and not children and sorted(ENDED) == [0, 0, 1, 1, 1, 3, 7, 7]


def test_a_caller_that_has_gone_is_not_answered(tmp_path, children, monkeypatch) -> None:
    """Its child ends as it would have, and nothing of it comes back."""
    path, process = str(tmp_path / "s.sock"), os.getpid()
    monkeypatch.setattr(server, "IDLE_SECONDS", 60)
    monkeypatch.setattr(server, "preload", lambda: None)
    monkeypatch.setattr(
        server, "serve_one", lambda connection, _: len(connection.makefile().read())
    )  # until it has gone

    def call() -> None:
        deadline = time.monotonic() + 60
        while not (connection := called(path)) and time.monotonic() < deadline:
            time.sleep(0.005)
        with connection:
            monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)  # after this call
            connection.sendall(b"seven..")
            connection.shutdown(socket.SHUT_RDWR)  # the child may hold this end as well

    with beside(call):
        try:
            server.main(path)
        finally:
            if os.getpid() != process:
                os._exit(99)
    assert ENDED == [7]


def test_a_server_with_a_busy_child_is_not_idle(tmp_path, children, monkeypatch) -> None:
    """It looks every second whether the child has ended, and waits on until then, and so do its callers."""
    path, waited, select = tmp_path / "s.sock", [], server.select.select  # the server's alone: other threads wait, too
    asked = []  # of Linux: that orphans come here

    def look(*given):
        waited.append(given[3])
        if (ready := select(*given))[0]:
            monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)  # not before: a caller may come late on a busy machine
        return ready

    monkeypatch.setattr(server, "select", types.SimpleNamespace(select=look))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(prctl=lambda *given: asked.append(given)))
    monkeypatch.setattr(server, "IDLE_SECONDS", 60)
    monkeypatch.setattr(server, "preload", lambda: None)
    monkeypatch.setattr(server, "serve_one", lambda connection, _: time.sleep(0.5) or 0)
    begin, replied = time.monotonic(), []

    def call() -> None:
        while not (connection := called(str(path))):
            time.sleep(0.005)
        path.unlink()  # somebody cleans up: the server ends all the same
        with connection:
            replied.append(connection.makefile().read())

    with beside(call):
        server.main(str(path))
        assert time.monotonic() - begin > 0.5
    assert replied == ["0\n"] and set(waited) == {60, 1, 0.05, 0} and asked == [(36, 1)]
