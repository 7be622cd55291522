"""The process of one isolated implementation: imports it, binds it to memory that the judge shares, and runs it when it is told to.

It is forked before the judge draws inputs, holds no expected answers, and its word is trusted in nothing: the judge takes the time and
looks at outputs. Requests are pickled; replies are JSON, which cannot make the judge run anything. The judge stops the process
between requests.
"""

import contextlib
import io
import json
import os
import pickle
import random
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import memory, processes, sharing, timers
from moe_routing_bench.measure.candidate import Candidate, Failure
from moe_routing_bench.measure.faults import described
from moe_routing_bench.measure.sampling import warm_up
from moe_routing_kernels.target import Target

MOST_BYTES = 1 << 17  # of a request; of a reply
MOST_DESCRIPTORS = 200
STEPS = {
    "join": "joining",
    "link": "joining",
    "bind": "preparing",
    "warm": "warming up",
    "rotate": "sampling",
    "run": "sampling",
}


@dataclass(frozen=True)
class Sets:
    """The tensors of all sets, to be sent: of each operand the memory of all sets with guard bytes, and one set's dtype and shape; and
    the tensors that all sets share."""

    stacked: Mapping[str, tuple[sharing.Handle, torch.dtype, tuple[int, ...]]]
    shared: Mapping[str, sharing.Handle]

    def attached(self, descriptors: list[int]) -> list[dict[str, Tensor]]:
        """The operands of each set in this process."""
        stacked = {
            name: [memory.inside(row, dtype, shape) for row in handle.attached(descriptors)]
            for name, (handle, dtype, shape) in self.stacked.items()
        }
        shared = {name: handle.attached(descriptors) for name, handle in self.shared.items()}
        return [dict(zip(stacked, tensors, strict=True)) | shared for tensors in zip(*stacked.values(), strict=True)]


def serve(
    made: "Callable[[], Bound]", threads: int, link: socket.socket, kept: Sequence[int], judge: int, alone: bool
) -> None:
    """The whole life of a runner that `judge` has just forked; never returns. `made` makes what answers; `kept` are descriptors that it needs.
    An `alone` one takes no memory from other processes, which may then not look into its own."""
    try:
        os.setpgid(0, 0)
        processes.end_with(judge)
        processes.adopt()
        processes.close_all_but(link.fileno(), *kept)
        for number, stream in ((1, "stdout"), (2, "stderr")):  # those of before may lead to descriptors that are closed
            raw, encoding = io.FileIO(number, "wb", closefd=False), getattr(getattr(sys, stream), "encoding", None)
            setattr(sys, stream, io.TextIOWrapper(io.BufferedWriter(raw), encoding, "replace", line_buffering=True))
        processes.renounce()
        if alone:
            processes.keep_to_itself()
        random.seed()
        torch.seed()
        torch.set_num_threads(threads)
        runner = made()
        while True:
            data, descriptors, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_DESCRIPTORS)
            if not data:
                break
            request, *arguments = pickle.loads(data)
            link.send(runner.answer(request, arguments, descriptors))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


class Rotation:
    """Calls of all sets, one after the other. `returned` is what the last call of each returned."""

    rotations = 1  # of `several`

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.returned = calls, [None] * len(calls)

    def once(self) -> None:
        """Every call once."""
        for i, call in enumerate(self.calls):
            self.returned[i] = call()

    several = once


class GraphRotation(Rotation):
    """The same as CUDA graphs: of one rotation, and of as many as fill an interval."""

    def __init__(self, calls: list[Any], interval_us: float) -> None:
        """Capture both. Raises RuntimeError where the calls cannot be captured."""
        super().__init__(calls)
        self._one = self._several = self._captured(1)
        self.once()
        rotation_us = _microseconds(self.once)
        self.rotations = max(1, min(ceil(interval_us / rotation_us), timers.MOST_NODES // len(calls)))
        if self.rotations > 1:
            self._several = self._captured(self.rotations)

    def _captured(self, rotations: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with timers.capture(graph):
                for _ in range(rotations):
                    returned = [call() for call in self.calls]
        return graph, returned

    def once(self) -> None:
        """Replay the graph of one rotation."""
        graph, self.returned = self._one
        graph.replay()

    def several(self) -> None:
        """Replay the graph of several."""
        graph, self.returned = self._several
        graph.replay()


def on_gpu(calls: list[Any], interval_us: float) -> Rotation:
    """Graphs where the calls can be captured; else launches one by one."""
    try:
        return GraphRotation(calls, interval_us)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
    return Rotation(calls)


def _microseconds(run: Callable[[], object]) -> float:
    """How long something takes on the device, for a guess."""
    torch.cuda.synchronize()
    begin = perf_counter()
    run()
    torch.cuda.synchronize()
    return max((perf_counter() - begin) * 1e6, 0.1)


class Bound:
    """What a runner does for a request. `shown` is a file for the outputs of stages."""

    def __init__(self, job: Job, name: str, device: str, shown: int) -> None:
        self._job, self._name, self._device, self._shown = job, name, device, shown
        self._rotation = Rotation([])
        self._bound: list[Any] = []
        self._tensors: list[dict[str, Tensor]] = []

    def answer(self, request: str, arguments: list[Any], descriptors: list[int]) -> bytes:
        """The reply, or the status and reason of what the implementation raised."""
        try:
            reply = getattr(self, f"_{request}")(*arguments, *([descriptors] if descriptors else []))
        except Failure as failure:
            reply = {"status": failure.status, "reason": failure.reason}
        except (Exception, SystemExit) as error:
            status, reason = described(error)
            if status == "crashed":
                with contextlib.suppress(OSError, ValueError):
                    traceback.print_exc()
            reply = {"status": status, "reason": f"{STEPS.get(request, request)}: {reason}"}
        return json.dumps(reply or {}).encode()

    def _rest(self) -> None:
        """Nothing, which takes as long as the hand-over."""

    def _bind(self, sets: Sets, descriptors: list[int] | None = None) -> dict[str, int]:
        """Import, bind, warm up and capture; says how many sets take part, how many rotations a run holds, and whether calls are launched one by one."""
        settings = self._job.settings
        calls = self._calls(sets.attached(descriptors or []))
        warmup_calls = warm_up(Candidate(self._name, calls), settings.warmup_ms, self._device)
        self._rotation = Rotation(calls) if self._device == "cpu" else on_gpu(calls, settings.interval_us)
        self._wait()
        rotation = self._rotation
        launched = self._device != "cpu" and not isinstance(rotation, GraphRotation)
        said = {"sets": len(rotation.calls), "rotations": rotation.rotations, "launched": launched}
        return {"warmup_calls": warmup_calls} | said

    def _calls(self, tensors: list[dict[str, Tensor]]) -> list[Any]:
        """The implementation, bound to the operands of each set."""
        bench, cell = bench_of(self._job), self._job.cell
        if reason := bench.supports(self._name, cell, Target.here(torch.device(self._device))):
            raise Failure("unsupported", reason)
        self._tensors = tensors
        writes = [name for name in bench.writes if name not in self._kept()]
        self._bound = [_written(bench.bind(self._name, cell, each), each, writes) for each in tensors]
        return self._bound

    def _kept(self) -> tuple[str, ...]:
        """The outputs that stay where a call returns them."""
        return ()

    def _rotate(self, count: int) -> dict[str, Any] | None:
        """Call every set in turn, so many times."""
        for _ in range(count):
            self._rotation.once()
        self._wait()

    def _run(self, count: int) -> None:
        """The same on a GPU, in graphs of several rotations."""
        for _ in range(count):
            self._rotation.several()
        self._wait()

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _limit(self, count: int) -> None:
        """Let only the first sets take part, launched one by one."""
        self._rotation = Rotation(self._bound[:count])

    def _show(self, i: int, wanted: tuple[str, ...]) -> dict[str, Any]:
        """Write what the call of set i returned to the file, the `wanted` tensors or all but operands: dtype, shape and place of each."""
        returned = self._rotation.returned[i]
        tensors = {} if not isinstance(returned, dict) else returned
        forms, place = [], 0
        for name, tensor in tensors.items():
            if name in wanted or not (wanted or name in self._tensors[0]):
                data = memory.as_bytes(tensor.detach()).cpu().numpy()
                os.pwrite(self._shown, data.data, place)
                forms.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place))
                place += data.nbytes
        return {"shown": forms}


def _written(call: Any, tensors: Mapping[str, Tensor], writes: Sequence[str]) -> Any:
    """A call that leaves its outputs in the given ones: those that it returns in place of them are copied, which is in its time."""

    def whole() -> object:
        returned = call()
        if isinstance(returned, dict):
            for name in writes:
                if name in returned and returned[name] is not tensors[name]:
                    _same_form(name, returned[name], tensors[name])
                    tensors[name].copy_(returned[name])
        return returned

    return whole


def _same_form(name: str, tensor: Tensor, asked: Tensor) -> None:
    if type(tensor) is not Tensor:
        raise Failure("incorrect", f"{name}: {type(tensor).__name__}, not a plain tensor")
    if (tensor.dtype, tensor.shape) != (asked.dtype, asked.shape):
        kinds = [f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in (tensor, asked)]
        raise Failure("incorrect", f"{name}: {kinds[0]}, not {kinds[1]}")
