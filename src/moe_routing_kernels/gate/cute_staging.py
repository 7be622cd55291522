"""Copies of a warp's scores to shared memory, for the packed variant of the CuTe gate."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gate.cute_primitives import warp_tensor

VECTOR = 4  # scores of a wide access


@cute.jit
def stage_rows(logits: cute.Tensor, first_token: Int32, lane: Int32, threads: cutlass.Constexpr) -> cute.Tensor:
    """Copy the scores of a warp's tokens, of `threads` threads each -> (experts, tokens) in shared memory."""
    experts = cutlass.const_expr(logits.shape[1])
    # The stride lets the threads of a token, and neighbouring tokens, read different banks.
    stride = cutlass.const_expr((experts // VECTOR + (threads - experts // VECTOR) % 8) * VECTOR)
    rows = warp_tensor(Float32, (experts, (WARP // threads, stride)))
    copy_rows(logits, rows, first_token, lane, stride)
    return rows


def copy_row(source: Any, target: Any, count: int, apart: int) -> None:
    """Start to copy `count` vectors that are `apart` vectors apart."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
    )
    layout = cute.make_layout((VECTOR,))
    for c in range(count):
        at = c * apart * VECTOR
        cute.copy(atom, cute.make_tensor(source + at, layout), cute.make_tensor(target + at, layout))


@cute.jit
def copy_rows(logits: cute.Tensor, rows: cute.Tensor, first_token: Int32, lane: Int32, stride: cutlass.Constexpr):
    """Copy the scores of a warp's tokens to shared memory, rows (experts, tokens), and wait for them."""
    experts, tokens = cutlass.const_expr(rows.shape[0]), cutlass.const_expr(rows.shape[1])
    groups, final = cutlass.const_expr(experts // VECTOR), logits.shape[0] - 1
    width = cutlass.const_expr(math.gcd(groups, WARP))  # threads that copy a row
    start = Int64(first_token + lane // width) * experts + Int64(lane % width * VECTOR)
    source = logits.iterator + cute.assume(start, divby=VECTOR)
    target = rows.iterator + cute.assume(lane // width * stride + lane % width * VECTOR, divby=VECTOR)
    if first_token + (tokens - 1) <= final:
        for r in cutlass.range_constexpr(0, tokens, WARP // width):
            copy_row(source + r * experts, target + r * stride, groups // width, width)
    else:
        for r in cutlass.range(0, tokens, WARP // width, unroll=1):
            if first_token + lane // width + r <= final:
                from_row = cute.assume(Int32(r) * experts, divby=VECTOR)
                to_row = cute.assume(Int32(r) * stride, divby=VECTOR)
                copy_row(source + from_row, target + to_row, groups // width, width)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_warp()
