"""The way back of an exchange in CuTe DSL: what `cute_exchange` says of it."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from moe_routing_kernels.cute import rows as cute_rows
from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, fake_tensor
from moe_routing_kernels.cute.rows import RowTiling
from moe_routing_kernels.exchange import Letters
from moe_routing_kernels.exchange.cute_peers import BACK, goes, place, position, say, tensor_at, wait

LOADS_IN_FLIGHT = 16  # vectors that a thread loads before the first use


def at_once(tiling: RowTiling) -> int:
    """The ranks whose sums a thread loads before it adds them up."""
    return max(1, LOADS_IN_FLIGHT // tiling.vectors)


def tiles_of_a_part(tiling: RowTiling, letters: Letters) -> int:
    """Column tiles that the groups of all blocks send, or add up, in a part of the way back: as many turns of all groups in each."""
    groups = letters.blocks * (tiling.threads // tiling.lanes)
    return -(-letters.tokens * tiling.tiles // (groups * letters.parts)) * groups


@cute.jit
def send(
    y: cute.Tensor,
    came: cute.Tensor,
    peers: cute.Tensor,
    rank: Any,
    begin: Any,
    end: Any,
    tiling: cutlass.Constexpr,
    letters: cutlass.Constexpr,
):
    """Sums of the column tiles from `begin` to `end`, one for each group, to the ranks of their tokens."""
    lane, first, groups = position(tiling, letters)
    for unit in cutlass.range(begin + first, end, groups):
        token, column = unit // tiling.tiles, unit % tiling.tiles * (tiling.lanes * tiling.vectors) + lane
        for step in cutlass.range_constexpr(1, letters.ranks):
            to = (rank + step) % letters.ranks
            row = to * letters.tokens + token
            of_row = cute.make_rmem_tensor((letters.top_k,), Int32)
            cute.autovec_copy(came[row, None], of_row)
            if goes(of_row, 0, letters.local) > 0:
                fragment = cute.make_rmem_tensor((tiling.width, tiling.vectors), y.element_type)
                cute_rows.load_row(y, row, column, fragment, tiling)
                sums = tensor_at(y.element_type, peers[to] + letters.sums_at, (letters.rows, letters.hidden))
                cute_rows.store_row(fragment, sums, rank * letters.tokens + token, column, tiling)


@cute.jit
def add_up(
    y: cute.Tensor,
    ids: cute.Tensor,
    residual: cute.Tensor,
    combined: cute.Tensor,
    peers: cute.Tensor,
    rank: Any,
    begin: Any,
    end: Any,
    tiling: cutlass.Constexpr,
    letters: cutlass.Constexpr,
    add: cutlass.Constexpr,
):
    """What came for the column tiles from `begin` to `end`, one for each group."""
    element = y.element_type
    lane, first, groups = position(tiling, letters)
    shape = cutlass.const_expr((tiling.width, tiling.vectors))
    for unit in cutlass.range(begin + first, min(end, ids.shape[0] * tiling.tiles), groups):
        token, column = unit // tiling.tiles, unit % tiling.tiles * (tiling.lanes * tiling.vectors) + lane
        chosen = cute.make_rmem_tensor((letters.top_k,), Int32)
        cute.autovec_copy(ids[token, None], chosen)
        total = cute.make_rmem_tensor(shape, cutlass.Float32)
        total.fill(0.0)
        if cutlass.const_expr(add):
            start = cute.make_rmem_tensor(shape, element)
            start.fill(0)
            cute_rows.load_row(residual, token, column, start, tiling)
            total.store(start.load().to(cutlass.Float32))
        for start_rank in cutlass.range_constexpr(0, letters.ranks, at_once(tiling)):
            terms = cute.make_rmem_tensor((*shape, min(at_once(tiling), letters.ranks - start_rank)), element)
            terms.fill(0)
            for j in cutlass.range_constexpr(terms.shape[2]):
                source = cutlass.const_expr(start_rank + j)
                if goes(chosen, source, letters.local) > 0:
                    base = cutlass.select_(source == rank, y.iterator.toint(), peers[rank] + letters.sums_at)
                    sums = tensor_at(element, base, (letters.rows, letters.hidden))
                    row = source * letters.tokens + token
                    cute_rows.load_row(sums, row, column, terms[None, None, j], tiling)
            for j in cutlass.range_constexpr(terms.shape[2]):
                total.store(total.load() + terms[None, None, j].load().to(cutlass.Float32))
        result = cute.make_rmem_tensor(shape, element)
        result.store(total.load().to(element))
        cute_rows.store_row(result, combined, token, column, tiling)


@cute.kernel
def back_kernel(
    y: cute.Tensor,
    came: cute.Tensor,
    ids: cute.Tensor,
    residual: cute.Tensor,
    combined: cute.Tensor,
    peers: cute.Tensor,
    rank: Int32,
    limit: Int64,
    failed: Int64,
    tiling: cutlass.Constexpr,
    letters: cutlass.Constexpr,
    add: cutlass.Constexpr,
):
    """Sums y (N tokens, H) of rows that came with the ids `came` (N tokens, k), back to the ranks of their tokens; combined (T, H), of tokens with
    ids (T, k), is what came for this rank's own, added up, with the residual where `add`. A part is added up while the next one is on the wire."""
    tiles, step = (
        cutlass.const_expr(letters.tokens * tiling.tiles),
        cutlass.const_expr(tiles_of_a_part(tiling, letters)),
    )
    for part in cutlass.range(letters.parts + 1):
        if part < letters.parts:
            send(y, came, peers, rank, part * step, min((part + 1) * step, tiles), tiling, letters)
            say(peers, rank, BACK + part, letters)
        if part > 0:
            wait(peers, rank, limit, failed, BACK + part - 1, letters)
            begin, end = (part - 1) * step, min(part * step, tiles)
            add_up(y, ids, residual, combined, peers, rank, begin, end, tiling, letters, add)


@cute.jit
def back_host(
    y: cute.Tensor,
    came: cute.Tensor,
    ids: cute.Tensor,
    residual: cute.Tensor,
    combined: cute.Tensor,
    peers: cute.Tensor,
    rank: Int32,
    limit: Int64,
    failed: Int64,
    tiling: cutlass.Constexpr,
    letters: cutlass.Constexpr,
    add: cutlass.Constexpr,
    stream: Any,
):
    back_kernel(y, came, ids, residual, combined, peers, rank, limit, failed, tiling, letters, add).launch(
        grid=(letters.blocks, 1, 1), block=(tiling.threads, 1, 1), stream=stream
    )


@cached
def compile_back(arch: str, dtype: str, letters: Letters, tiling: RowTiling, add: bool, keep: bool = False) -> Any:
    """Compile the way back for one architecture (no GPU needed). The result is called with y (N tokens, H), the ids that came (N tokens, k), ids
    (T, k), residual (T, H), which is read only with `add`, combined (T, H) and `place`."""
    tokens, element = cute.sym_int(), DTYPES[dtype]
    arguments = [
        fake_tensor(element, letters.rows, letters.hidden),
        fake_tensor(Int32, letters.rows, letters.top_k),
        fake_tensor(Int32, tokens, letters.top_k),
        fake_tensor(element, tokens, letters.hidden),
        fake_tensor(element, tokens, letters.hidden),
        *place(letters),
        tiling,
        letters,
        add,
    ]
    return compile_kernel(back_host, arguments, arch, keep)
