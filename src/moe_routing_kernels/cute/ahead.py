"""Compiles kernels ahead of time, in several processes, each of which runs `main`.

A kernel takes seconds of one core, most of them in the compiler, which holds Python's lock. Processes are programs, not forks or
spawned copies: a fork of a process that uses CUDA is broken, and a spawned one would run the user's script again.
"""

import contextlib
import os
import pickle
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable

from moe_routing_kernels.cute.cache import Asked
from moe_routing_kernels.errors import bad, one_line, whole

# The package is found by its file, because a loader of kernels may have imported it under another name, from a folder of another name.
_PROGRAM = """
import importlib.util
import sys

name, file, module = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, file)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
importlib.import_module(module).main()
"""


def compile_all(asked: Iterable[Asked], workers: int | None = None) -> int:
    """Compile the kernels that are not in the cache, with `workers` processes (None: one per core); returns how many were missing.

    Raises `UserError` where a process fails, with its last line. Kernels that other processes compiled stay in the cache. An
    interrupt ends all processes.
    """
    if workers is not None and (not whole(workers) or workers < 1):
        raise bad("workers", workers, "a whole number, at least 1, or None for one on each core")
    missing = sorted((kernel for kernel in asked if not kernel.path.exists()), key=variants, reverse=True)
    waiting: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    for kernel in missing:
        waiting.put(kernel)
    failures: list[str] = []
    running: list[subprocess.Popen[bytes]] = []
    count = min(len(missing), workers or len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=_feed, args=(waiting, failures, running)) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for process in running:
            process.kill()
        raise
    if failures:
        raise bad(
            "compiling ahead", failures[0], "kernels that compile", f"{len(failures)} of {count} processes failed"
        )
    return len(missing)


def variants(asked: Asked) -> int:
    """How many variants of its main loop a kernel has, on which the time to compile depends: the longest go first."""
    tiles = (getattr(argument, "tile", None) for argument in asked.arguments)
    return max((len(tile.n_sizes) for tile in tiles if hasattr(tile, "n_sizes")), default=0)


def _feed(waiting: "queue.SimpleQueue[Asked]", failures: list[str], running: "list[subprocess.Popen[bytes]]") -> None:
    """Start a process and hand it kernels, one after the other, until none is waiting or one fails."""
    package = sys.modules[__name__.partition(".")[0]]
    command = [sys.executable, "-c", _PROGRAM, package.__name__, str(package.__file__), __name__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        assert process.stdin and process.stdout, "both are pipes"
        running.append(process)
        with contextlib.suppress(queue.Empty, BrokenPipeError):
            while True:
                pickle.dump(waiting.get_nowait(), process.stdin)
                process.stdin.flush()
                if not process.stdout.readline():
                    break
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if process.wait():
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            failures.append(one_line(lines[-1] if lines else f"exit status {process.returncode}", 200))


def main() -> None:
    """Compile the kernels that come through standard input, and write a line per kernel."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the compiler may print
    while True:
        try:
            asked: Asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            asked.kernel()
        except Exception as error:  # anything the compiler raises, of many lines and in colours
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
            sys.exit(f"{asked.module.rpartition('.')[2]}: {type(error).__name__}: {one_line(text, 150)}")
        print("done", file=answers, flush=True)
