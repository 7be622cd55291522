"""Plug-ins of `dispatch` of which one rank is lost, hangs, fails or lies."""

import os
import signal
import time
from collections.abc import Callable

import torch.distributed as dist

from moe_routing_bench.benches import messages
from moe_routing_bench.benches.plugins import Plugin
from moe_routing_bench.measure import rank_process

LOST = 1  # the rank

KILLED_PREPARING = Plugin(bench="dispatch", name="killed_preparing", options={"rogue": "killed", "after": -1})
KILLED_WARMING_UP = Plugin(bench="dispatch", name="killed_warming_up", options={"rogue": "killed", "after": 1})
KILLED_SAMPLING = Plugin(bench="dispatch", name="killed_sampling", options={"rogue": "killed", "after": 130})
HANGS_PREPARING = Plugin(bench="dispatch", name="hangs_preparing", options={"rogue": "hangs", "after": -1})
HANGS_SAMPLING = Plugin(bench="dispatch", name="hangs_sampling", options={"rogue": "hangs", "after": 130})
RAISES = Plugin(bench="dispatch", name="raises", options={"rogue": "raises", "after": 1})
LEFT_OUT = Plugin(bench="dispatch", name="left_out", options={"rogue": "left_out", "after": 0})
CLOCK = Plugin(bench="dispatch", name="clock", options={"rogue": "clock", "after": -1})
SLOW_CLOCK = Plugin(bench="dispatch", name="slow_clock", options={"rogue": "slow_clock", "after": -1})

_CALLS: list[int] = []


def bind(problem, *, rogue: str, after: int, **tensors) -> Callable[[], object]:
    """`torch_all_to_all`, but for what one rank does from its call number `after` on, of all sets; -1: when it is bound."""
    call, act = messages.bind_dispatch(problem, **tensors), globals()[f"_{rogue}"]
    lost = dist.get_rank() == LOST or "clock" in rogue  # where one is honest, the slowest is
    if lost and after < 0:
        act(tensors)

    def faulty() -> None:
        call()
        _CALLS.append(0)
        if lost and 0 <= after < len(_CALLS):
            act(tensors)

    return faulty


def _killed(tensors) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(tensors) -> None:
    time.sleep(1000)


def _raises(tensors) -> None:
    raise ValueError("no such row")


def _left_out(tensors) -> None:
    """Rows that the other rank has sent, and this one does not keep."""
    tensors["received"][: int(tensors["counts"].sum())] = 0


def _clock(tensors) -> None:
    """Tenfold faster by the clock of its process."""
    if not _CALLS:
        _CALLS.append(0)
        genuine = rank_process.perf_counter_ns
        rank_process.perf_counter_ns = lambda: genuine() // 10


def _slow_clock(tensors) -> None:
    """Faster by less than a third, by the clock of its process."""
    if not _CALLS:
        _CALLS.append(0)
        genuine = rank_process.perf_counter_ns
        rank_process.perf_counter_ns = lambda: genuine() * 7 // 10
