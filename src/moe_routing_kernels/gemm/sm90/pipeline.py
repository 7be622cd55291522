"""The ring of stages between the producer and the consumers of a thread block, and the named barriers of its warpgroups.

A stage has two mbarriers: `full` completes when its data has arrived, `empty` when each consumer warp has read it. Both are waited for by
parity, which tells a phase from the next only. The producer waits for the parity opposite to its phase, so its first round passes.

`cutlass.pipeline` has classes for this. They count arrivals of one kind per barrier, where gathered rows need those of TMA and of
asynchronous copies at the same `full`, and have no way over another warpgroup's stages (`skip`), which ping-pong takes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

# Named barriers, by number; 0 is that of `sync_threads`.
EPILOGUE = 1  # from it on: one per consumer warpgroup, around its buffer
MAINLOOP = (
    3  # from it on: one per consumer warpgroup of a ping-pong, whose turn it is; where none takes turns, all consumers'
)
LEAD = MAINLOOP + 1  # where none takes turns: the first of two warpgroups lets the second begin


def allocate_barriers(allocator: Any, stages: int) -> tuple[cute.Pointer, cute.Pointer]:
    """The `full` and the `empty` mbarriers of the stages."""
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    return full, empty


@cute.jit
def init_barriers(
    full: cute.Pointer,
    empty: cute.Pointer,
    stages: cutlass.Constexpr,
    arrivals: cutlass.Constexpr,
    warps: cutlass.Constexpr,
):
    """By one thread: `full` expects `arrivals` per phase, `empty` those of `warps` consumer warps."""
    for i in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(full + i, arrivals)
        cute.arch.mbarrier_init(empty + i, warps)
    cute.arch.mbarrier_init_fence()


@cute.jit
def release(empty: cute.Pointer, cluster: cutlass.Constexpr = 1):
    """By a consumer warp: a stage has been read; each block of the cluster is told, as all of them fill it."""
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(cluster > 1):
        if lane < cluster:
            cute.arch.mbarrier_arrive(empty, lane)
    elif lane == 0:
        cute.arch.mbarrier_arrive(empty)


def advance(index: Any, phase: Any, stages: int) -> tuple[Any, Any]:
    """The next stage of the ring, and its phase."""
    last = index == stages - 1
    return cutlass.select_(last, Int32(0), index + 1), cutlass.select_(last, phase ^ 1, phase)


def skip(index: Any, phase: Any, count: int, stages: int) -> tuple[Any, Any]:
    """The stage `count` further in the ring, and its phase."""
    index = index + count % stages
    over = index >= stages
    phase = phase ^ (count // stages % 2)
    return cutlass.select_(over, index - stages, index), cutlass.select_(over, phase ^ 1, phase)
