"""Compiles kernels ahead, in processes side by side; as a program, one of these processes.

A kernel takes seconds of one core, most of them in the compiler, which holds Python's lock. Processes are programs, not forks or
spawned copies: a fork of a process that uses CUDA is broken, and a spawned one would run the user's script again.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable

from moe_routing_bench.errors import bad, one_line
from moe_routing_bench.kernels.cute.cache import Asked


def compile_all(asked: Iterable[Asked], workers: int | None = None) -> int:
    """Compile those that are not in the cache, with `workers` processes (None: one for each core); returns how many these were.

    Raises `UserError` where a process fails, with its last line. What others compiled stays in the cache.
    """
    missing = sorted((one for one in asked if not one.path.exists()), key=_forms, reverse=True)
    waiting: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    for one in missing:
        waiting.put(one)
    failures: list[str] = []
    count = min(len(missing), workers or len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=_feed, args=(waiting, failures)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise bad(
            "compiling ahead", failures[0], "kernels that compile", f"{len(failures)} of {count} processes failed"
        )
    return len(missing)


def _forms(asked: Asked) -> int:
    """How often a kernel has its main loop, which says how long it compiles: the longest go first."""
    return max(
        (len(one.tile.widths) for one in asked.arguments if hasattr(getattr(one, "tile", None), "widths")), default=0
    )


def _feed(waiting: "queue.SimpleQueue[Asked]", failures: list[str]) -> None:
    """Hand kernels to a process of its own, one after the other, until none waits or one fails."""
    command = [sys.executable, "-m", __name__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        assert process.stdin and process.stdout, "both are pipes"
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
    """Compile what comes through standard input, and write a line for each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the compiler may print
    while True:
        try:
            asked: Asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        asked.kernel()
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
