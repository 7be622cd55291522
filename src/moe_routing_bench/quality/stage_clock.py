"""Time by stage of a training step, forwards and backwards, from marks on the tensors that pass between stages.

A mark is the identity. When its turn comes in the forward or in the backward pass, it says which stage begins. The
backward pass runs the nodes of the graph in the reverse order of their creation, so its stages come in reverse.
"""

import itertools
import time
from collections import defaultdict

import torch
from torch import Tensor

STAGES = ("router", "dispatch", "experts", "combine", "rest")


class Clock:
    """The clock of every step that is not profiled: it does nothing."""

    def mark(self, x: Tensor, forward: str, backward: str) -> Tensor:
        """Return `x`; the stage `forward` begins here, and on the way back the stage `backward`."""
        return x


NO_CLOCK = Clock()


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.stage = clock, backward
        clock.begin(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        ctx.clock.begin(ctx.stage)
        return grads[0], None, None, None


class StageClock(Clock):
    """Collects the moments at which stages begin; on a GPU they are events, so that nothing waits."""

    def __init__(self, device: str) -> None:
        """`device` is the type of the device that the model is on."""
        self._events = device == "cuda"
        self._log: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, x: Tensor, forward: str, backward: str) -> Tensor:
        """See `Clock.mark`."""
        return _Mark.apply(x, self, forward, backward)  # type: ignore[return-value]

    def begin(self, stage: str) -> None:
        """Begin a stage and end the one before."""
        if self._events:
            # an external event is part of the captured graph, and each replay records it anew
            event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
            event.record()
            self._log.append((stage, event))
        else:
            self._log.append((stage, time.perf_counter()))

    def stop(self) -> dict[str, float]:
        """Milliseconds by stage since the first `begin`; empties the log."""
        self.begin("")
        total = self.read()
        self._log = []
        return total

    def read(self) -> dict[str, float]:
        """Milliseconds by stage between the moments of the log; where they were captured, those of the last replay."""
        if self._events:
            torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for (stage, start), (_, end) in itertools.pairwise(self._log):
            if isinstance(start, float) and isinstance(end, float):
                total[stage] += 1e3 * (end - start)
            elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                total[stage] += start.elapsed_time(end)
        return {stage: total[stage] for stage in STAGES}
