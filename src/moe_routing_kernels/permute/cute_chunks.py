"""Counts of each expert's assignments: per chunk, and over all chunks before a block's chunk."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

# adding up chunks
VECTOR = 2  # neighbouring experts per thread
MOST_GROUPS = 16  # threads per expert: more would wait for each other's atomics


def shared(shape: Any) -> cute.Tensor:
    """Int32 counters in shared memory."""
    return cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)


@cute.jit
def lanes_with(expert: Int32, valid: Boolean, experts: cutlass.Constexpr) -> Uint32:
    """The lanes of the warp that hold the same expert, for lanes that are valid."""
    mask = Uint32(cute.arch.vote_ballot_sync(valid))
    for bit in cutlass.range_constexpr(max(1, (experts - 1).bit_length())):
        on = (expert >> bit) & 1 == 1
        votes = Uint32(cute.arch.vote_ballot_sync(on))
        mask = mask & Uint32(cutlass.select_(on, votes, ~votes))
    return mask


@cute.jit
def expert_at(ids: cute.Tensor, at: Int32, experts: cutlass.Constexpr) -> Int32:
    """The id at a position, which may be out of range."""
    expert = ids[at]
    if cutlass.const_expr(ids.element_type is Int64):  # the low half alone may be in range
        expert = Int32(cutlass.select_(expert >= 0 and expert < experts, expert, Int64(-1)))
    return expert


@cute.kernel
def count_kernel(ids: cute.Tensor, partial: cute.Tensor, order: cute.Tensor, config: cutlass.Constexpr):
    """One block: how often each expert occurs in its chunk; clears its share of `order`."""
    experts, threads, items = cutlass.const_expr(partial.shape[1]), config.threads, config.items_per_thread
    if cutlass.const_expr(config.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    counters = shared(experts)
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    blocks, n = partial.shape[0], ids.shape[0]
    for expert in range(thread, experts, threads):
        counters[expert] = 0
    cute.arch.sync_threads()

    # count
    tiles = cute.ceil_div(n, blocks * threads * items)
    lower_lanes = cute.arch.lanemask_lt()
    for tile in range(tiles):
        start = (block * tiles + tile) * (threads * items) + thread
        expert_ids = cute.make_rmem_tensor((items,), Int32)
        expert_ids.fill(-1)
        for r in cutlass.range_constexpr(items):
            if start + r * threads < n:
                expert_ids[r] = expert_at(ids, start + r * threads, experts)
        for r in cutlass.range_constexpr(items):
            valid = expert_ids[r] >= 0 and expert_ids[r] < experts
            mask = lanes_with(expert_ids[r], valid, experts)
            if valid and mask & Uint32(lower_lanes) == 0:
                cute.arch.atomic_add(counters.iterator + expert_ids[r], Int32(cute.arch.popc(mask)))
    # store
    for row in range(block * threads + thread, order.shape[0], blocks * threads):
        order[row] = -1
    cute.arch.sync_threads()
    for expert in range(thread, experts, threads):
        partial[block, expert] = counters[expert]


def groups_of(experts: int, threads: int) -> int:
    """How many of a block's threads share the chunks of an expert when they add them up."""
    return max(1, min(threads // (experts // math.gcd(experts, VECTOR)), MOST_GROUPS))


@cute.jit
def add_few_chunks(partial: cute.Tensor, before: cute.Tensor, loads: cute.Tensor, thread: Int32, block: Int32):
    """`add_chunks` where the block has a thread per chunk and expert, so that each loads one count."""
    experts = cutlass.const_expr(partial.shape[1])
    expert, chunk = thread % experts, thread // experts
    if chunk < partial.shape[0]:
        count = partial[chunk, expert]
        cute.arch.atomic_add(before.iterator + expert, Int32(cutlass.select_(chunk < block, count, Int32(0))))
        cute.arch.atomic_add(loads.iterator + expert, count)


@cute.jit
def add_chunks(
    partial: cute.Tensor,
    before: cute.Tensor,
    loads: cute.Tensor,
    thread: Int32,
    block: Int32,
    config: cutlass.Constexpr,
):
    """Each expert's assignments in the chunks before `block`'s, and in total: partial (blocks, E) -> before, loads (E,).

    A thread loads neighbouring experts of every `groups`-th chunk, as many at once as registers allow: each batch of loads
    waits for the L2 cache once, however large it is.
    """
    experts, blocks = cutlass.const_expr(partial.shape[1]), partial.shape[0]
    width, batch = cutlass.const_expr(math.gcd(experts, VECTOR)), cutlass.const_expr(config.chunks_at_once)
    vectors, groups = cutlass.const_expr(experts // width), cutlass.const_expr(groups_of(experts, config.threads))
    columns = cutlass.const_expr(min(config.threads, vectors))
    for first in cutlass.range_constexpr(0, vectors, config.threads):
        vector, group = first + thread % columns, thread // columns
        if vector < vectors and group < groups:
            earlier, total = cute.make_rmem_tensor((width,), Int32), cute.make_rmem_tensor((width,), Int32)
            earlier.fill(0)
            total.fill(0)
            for start in range(group, blocks, groups * batch):
                counts = cute.make_rmem_tensor((width, batch), Int32)
                counts.fill(0)
                for u in cutlass.range_constexpr(batch):
                    if start + u * groups < blocks:
                        at = cute.assume((start + u * groups) * experts + vector * width, divby=width)
                        source = cute.make_tensor(partial.iterator + at, cute.make_layout((width,)))
                        cute.autovec_copy(source, counts[None, u])
                for u in cutlass.range_constexpr(batch):
                    for v in cutlass.range_constexpr(width):
                        total[v] += counts[v, u]
                        earlier[v] += Int32(cutlass.select_(start + u * groups < block, counts[v, u], Int32(0)))
            for v in cutlass.range_constexpr(width):
                cute.arch.atomic_add(before.iterator + (vector * width + v), earlier[v])
                cute.arch.atomic_add(loads.iterator + (vector * width + v), total[v])
