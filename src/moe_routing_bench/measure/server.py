"""The warm server: imports the heavy libraries once, without touching CUDA, and forks a child for every cell.

It imports nothing of this project, so it never holds old code: the child imports the project afresh. It ends when idle.
"""

import array
import contextlib
import ctypes
import gc
import glob
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading

IDLE_SECONDS = 120
_PRELOAD = (
    "torch",
    "numpy",
    "pandas",
    "scipy.stats",
    "pyarrow.parquet",
    "nvtx",
    "filelock",
    "seaborn",
    "pynvml",
    "triton",
    "annotated_types",
    "torch._dynamo",  # which every optimizer of torch and every kernel of QuACK imports
    "pydantic.main",
    "rich.progress",
    "typer",
    "yaml",
)
_OF_GPU = ("cutlass", "triton.experimental.gluon")  # which Triton imports for its first kernel


def preload() -> None:
    """Import what every child needs; what is not installed is left out."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a GPU must not initialise CUDA: a fork would break
    # Read once, on import; the thread of a pool of compilers would be held against whoever is at work when it starts.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    gpu = os.path.exists("/dev/nvidiactl")
    for name in _PRELOAD + _OF_GPU * gpu:
        with contextlib.suppress(ImportError):
            __import__(name)
    if gpu and (cache := sys.modules.get("triton.runtime.cache")):
        cache.triton_key()  # a hash of all of Triton's files, remembered; the first kernel would wait 0.4 s for it
    # A child's garbage collector would walk all that is imported here, and so copy it: 0.3 s a child.
    gc.collect()
    gc.freeze()


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """One request: a JSON text that ends the stream, and the caller's stdout and stderr."""
    data, fds = b"", array.array("i")
    while not data.endswith(b"\n"):
        part, extra, _, _ = connection.recvmsg(1 << 16, socket.CMSG_LEN(2 * fds.itemsize))
        for level, kind, payload in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload)
        if not part:
            break
        data += part
    return json.loads(data), list(fds)


def serve_one(connection: socket.socket) -> int:
    """In the child: become the caller's job, run it, and return its exit status."""
    request, fds = receive(connection)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for target, fd in zip((1, 2), fds, strict=False):
        os.dup2(fd, target)
    if request["arguments"][:1] == ["--module"]:
        return program(request["arguments"][1:], connection)
    from moe_routing_bench.measure import supervisor

    return supervisor.main(request["arguments"], "warm", connection)


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


def answer(connection: socket.socket) -> None:
    """In the child: run a request and answer it; never returns, whatever the request does."""
    code = 1
    try:
        code = serve_one(connection)
    except SystemExit as error:
        code = status(error.code)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        with contextlib.suppress(OSError):
            connection.sendall(f"{code}\n".encode())
        os._exit(code)


def offspring() -> "set[int]":
    """The children of this process, ended ones included."""
    found: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:  # the thread has ended
            found.update(map(int, file.read().split()))
    return found


def reap(children: "set[int]", others: "set[int]") -> None:
    """Collect children that have ended; kill those that are neither forked here nor of `others`: they came when their parent
    was killed."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            children.discard(ended)
    for orphan in offspring() - children - others:
        os.kill(orphan, signal.SIGKILL)


def main(path: str) -> None:
    """Listen on the socket `path` until nobody has called for IDLE_SECONDS."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    preload()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a killed job leaves behind comes here
    others, children, listens = offspring(), set(), True
    listener.bind(path)
    listener.listen(128)
    while True:
        busy = bool(children)
        ready, _, _ = select.select([listener], [], [], 1 if busy else IDLE_SECONDS * listens)
        reap(children, others)
        if ready:
            connection, _ = listener.accept()
            if (child := os.fork()) == 0:
                listener.close()
                answer(connection)
            children.add(child)
            connection.close()
        elif not listens:
            break
        elif not busy:  # whoever has called by now is still served
            listens = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1])
