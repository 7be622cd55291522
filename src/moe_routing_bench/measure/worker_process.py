"""The process of a worker: a fork of its supervisor that imports the harness, and then measures the job that it is given.

`measure` starts its first worker before it reads its options: torch takes longer to import than all that the command itself needs.
"""

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

from moe_routing_bench import children
from moe_routing_bench.measure import processes
from moe_routing_bench.measure.faults import MemoryKills

_GRACE_SECONDS = 2.0
_early: "list[WorkerProcess]" = []  # at most one


class WorkerProcess:
    """A worker without a job. `pid` is its process, `receive` has its messages, `kills` counts what the kernel has killed since."""

    def __init__(self, memory: Any = None) -> None:
        """Start it. The process loses its way to `memory` (`server.Memory`), because implementations will run in it."""
        self.kills, supervisor = MemoryKills(), os.getpid()
        asked, self._ask = Pipe(duplex=False)
        self.receive, send = Pipe(duplex=False)
        with children.uninterrupted() as self._interrupts:
            self.pid = os.fork()
        if self.pid == 0:
            self._ask.close()
            self.receive.close()
            if memory:
                memory.close()
            _child(asked, send, supervisor)
        asked.close()
        send.close()

    def heed(self) -> None:
        """Raise KeyboardInterrupt if an interrupt came while it was started."""
        if self._interrupts:
            raise KeyboardInterrupt

    def give(self, *request: Any) -> None:
        """Have it call `worker.run` with these arguments, and with `send` after the first three, in this process's environment."""
        with self._ask, contextlib.suppress(OSError):  # it has ended, as its messages show
            self._ask.send((dict(os.environ), *request))


@contextlib.contextmanager
def beforehand() -> Iterator[None]:
    """Start a worker now for the first job of the block. It says nothing, and ends with the block, where there is no job."""
    _early.append(WorkerProcess())
    try:
        _early[0].heed()
        yield
    finally:
        for worker in _early:
            processes.end_tree(worker.pid, _GRACE_SECONDS)
            worker.receive.close()
        _early.clear()


def next_worker(memory: Any = None) -> WorkerProcess:
    """The worker that was started beforehand, or else a new one."""
    return _early.pop() if _early else WorkerProcess(memory)


def _child(asked: Connection, send: Connection, supervisor: int) -> None:
    """The forked worker; never returns, whatever an implementation raises."""
    code = 1
    try:
        os.setpgid(0, 0)
        processes.end_with(supervisor)
        processes.first_to_go()
        processes.adopt()  # so that it sees what an implementation starts
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that would outlive a kill
        gc.disable()  # collections while torch is imported would take an eighth of that time, and find nothing
        try:
            from moe_routing_bench.measure import worker
        finally:  # an error is a reason of rows: without a job there is none
            gc.freeze()  # as a warm server does: no collection goes through these modules while samples are taken
            gc.enable()
            environment, job, device, names, *options = asked.recv()
            asked.close()
        os.environ.update(environment)
        worker.run(job, device, names, send.send, *options)
        code = 0
    except SystemExit as error:
        code = processes.status(error.code)
    except BaseException as error:
        traceback.print_exc()
        # The supervisor has ended, or the worker itself could not be imported.
        with contextlib.suppress(OSError, ImportError, MemoryError):
            from moe_routing_bench.measure import faults

            status, text = faults.described(error)
            send.send(("died", text, status))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader is gone
                stream.flush()
        os._exit(code)
