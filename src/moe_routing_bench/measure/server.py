"""The warm server: imports the heavy libraries once, without touching CUDA, and forks a child for every job.

It also imports the harness, and does so again when a file of it has changed: a child never runs old code. It ends when idle.
"""

import array
import ast
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from types import ModuleType
from typing import Any

IDLE_SECONDS = 120
FIRST_BYTE_SECONDS = 1.0  # for which a caller may leave open what it asks for
PROGRAM = b" "  # how the request of a program begins
# Arrow imports pandas when it makes the first array, if there is one, its module for pandas with the first table, that of versions with the first file.
_OF_ARROW = ("pandas", "pyarrow.parquet", "pyarrow.pandas_compat", "pyarrow.vendored.version")
OF_CELLS = ("torch", "numpy", *_OF_ARROW, "nvtx", "filelock", "pynvml")
OF_PROGRAMS = ("scipy.stats", "seaborn", "annotated_types", "pydantic.main", "rich.progress", "typer", "yaml")
# Triton imports gluon for its first kernel, QuACK's kernels torch._dynamo.
_OF_GPU = ("triton", "cutlass", "triton.experimental.gluon", "torch._dynamo")
LEARNED = "learned"
_LEARNED = ("torch._dynamo",)  # imported once a program has: optimizers of torch import it, for a second
_HARNESS = (
    *("moe_routing_bench.measure.supervisor", "moe_routing_bench.measure.worker"),
    *("moe_routing_bench.store.contradictions", "moe_routing_bench.store.rows"),
)
_PACKAGES = ("moe_routing_bench", "moe_routing_kernels")
_RECENT_NS = 1_000_000_000  # a file that was changed so shortly before may change again without another time


def preload(names: "tuple[str, ...]" = OF_CELLS) -> None:
    """Import what children need; what is not installed is left out."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a GPU must not initialise CUDA: a fork would break
    # Read once, on import; the thread of a pool of compilers would be held against the implementation at work when it starts.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    gpu = os.path.exists("/dev/nvidiactl")
    for name in names + _OF_GPU * gpu:
        with contextlib.suppress(ImportError):
            __import__(name)
    if gpu and (cache := sys.modules.get("triton.runtime.cache")):
        cache.triton_key()  # a hash of all of Triton's files, remembered; the first kernel would wait 0.4 s for it
    # A child's garbage collector would walk all that is imported here, and so copy it: 0.3 s a child.
    gc.collect()
    gc.freeze()


class Harness:
    """The modules of this project that every cell needs, imported as their files are now."""

    def __init__(self) -> None:
        """None is imported."""
        self._files: dict[str, tuple[int, ...]] = {}

    def renew(self) -> None:
        """Import the modules, unless that is done and their files have stayed the same. Where it fails, or a file is so new that another
        edit might leave its times as they are, children import them, and say what is wrong."""
        if self._files and _states(self._files) == self._files:
            return
        _forget()
        self._files, began = {}, time.time_ns()
        try:
            for name in _HARNESS:
                importlib.import_module(name)
        except BaseException:
            _forget()
            return
        files = {module.__file__ for module in _ours().values() if module.__file__}
        states = _states(files | {os.path.dirname(file) for file in files})
        if any(not state or max(state[:2]) > began - _RECENT_NS for state in states.values()):
            _forget()
            return
        self._files = states
        gc.collect()
        gc.freeze()


def _ours() -> "dict[str, ModuleType]":
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES}


def _forget() -> None:
    for name in _ours():
        del sys.modules[name]
    importlib.invalidate_caches()


def _states(paths: Iterable[str]) -> "dict[str, tuple[int, ...]]":
    """When files and folders were changed, and which they are; nothing of those that are gone."""
    states: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            stat = os.stat(path)
            states[path] = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
        except OSError:
            states[path] = ()
    return states


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """One request: a line of Python's literals, and the caller's stdout and stderr."""
    data, fds = b"", array.array("i")
    while not data.endswith(b"\n"):
        part, extra, _, _ = connection.recvmsg(1 << 16, socket.CMSG_LEN(2 * fds.itemsize))
        for level, kind, payload in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload)
        if not part:
            break
        data += part
    return ast.literal_eval(data.decode("ascii")), list(fds)


def serve_one(connection: socket.socket, memory: "Memory") -> int:
    """In the child: become the caller's job, run it, and return its exit status."""
    request, fds = receive(connection)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for target, fd in zip((1, 2), fds, strict=False):
        os.dup2(fd, target)
    if request["arguments"][:1] == ["--module"]:
        try:
            return program(request["arguments"][1:], connection)
        finally:
            memory.keep(LEARNED, [name for name in _LEARNED if name in sys.modules])
    from moe_routing_bench.measure import supervisor

    return supervisor.main(request["arguments"], "warm", connection, memory)


def program(words: list[str], connection: socket.socket) -> int:
    """Run a module, the first of the words, with the others as its arguments; it ends with the caller, to which a sign of life goes every second."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while not select.select([connection], [], [], 1)[0]:
                connection.sendall(b".")
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__")
    return 0


def status(code: object) -> int:
    """The exit status that Python gives to what `sys.exit` was called with; a text is written to stderr."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def answer(connection: socket.socket, memory: "Memory") -> None:
    """In the child: run a request and answer it; never returns, whatever the request does."""
    code = 1
    try:
        code = serve_one(connection, memory)
    except SystemExit as error:
        code = status(error.code)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader is gone
                stream.flush()
        with contextlib.suppress(OSError):
            connection.sendall(f"{code}\n".encode())
        os._exit(code)


def offspring() -> "set[int]":
    """The children of this process, ended ones included."""
    pids: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children", "rb") as file:
            pids.update(map(int, file.read().split()))  # unless the thread has ended
    return pids


def reap(children: "set[int]", others: "set[int]") -> None:
    """Collect children that have ended; kill those that are neither forked here nor of `others`: they came when their parent
    was killed."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            children.discard(ended)
    for orphan in offspring() - children - others:
        os.kill(orphan, signal.SIGKILL)


class Memory:
    """What jobs tell later ones of the same server, by key: JSON, which a child writes to a pipe in one piece."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._known: dict[str, Any] = {}
        self._told, self._tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

    def get(self, key: str) -> Any:
        """What was kept last, or None."""
        return self._known.get(key)

    def keep(self, key: str, value: Any) -> None:
        """In a child: keep a value, unless it is too long or the pipe is full: it is made again then."""
        self._known[key] = value
        line = json.dumps([key, value]).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:
            with contextlib.suppress(OSError):
                os.write(self._tell, line)

    def learn(self) -> None:
        """In the server: take up what children have written."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._told, 1 << 16):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        self._known.update(map(json.loads, lines))

    def close(self) -> None:
        """In a process that is not to be believed: nothing can be kept."""
        for end in (self._told, self._tell):
            with contextlib.suppress(OSError):
                os.close(end)


def is_program(connection: socket.socket) -> bool:
    """Whether a caller begins to ask for a program. It is waited for, but not long: others wait meanwhile."""
    try:
        connection.settimeout(FIRST_BYTE_SECONDS)
        return connection.recv(1, socket.MSG_PEEK) == PROGRAM
    except OSError:
        return False
    finally:
        connection.settimeout(None)


def main(path: str) -> None:
    """Listen on the socket `path` until IDLE_SECONDS after the last call."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    preload()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a killed job leaves behind comes here
    others, children, listens = offspring(), set(), True
    harness, memory = Harness(), Memory()
    listener.bind(path)
    listener.listen(128)
    while True:
        busy = bool(children)
        ready, _, _ = select.select([listener], [], [], 1 if busy else IDLE_SECONDS * listens)
        reap(children, others)
        if ready:
            connection, _ = listener.accept()
            memory.learn()
            if is_program(connection):
                preload(OF_PROGRAMS + tuple(memory.get(LEARNED) or ()))
            else:
                harness.renew()
            if (child := os.fork()) == 0:
                listener.close()
                answer(connection, memory)
            children.add(child)
            connection.close()
        elif not listens:
            break
        elif not busy:  # calls that have come by now are still served
            listens = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1])
