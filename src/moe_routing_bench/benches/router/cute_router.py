"""Router in CuTe DSL: projection, top-k and weights in one launch.

Strategy: a block multiplies a tile of tokens by all experts' weights over its part of H; each warp takes some of the experts
and issues warp-level tensor core products with float32 sums. The order of H within a product is free as long as both operands
share it, so 8 neighbouring elements, 16 bytes, are all that a lane needs of a row for two products: each thread copies its own
to shared memory and reads them back, asynchronously but without a barrier. H is cut into parts where tiles are few (decode),
so that many SMs read the weight: a block then writes its partial scores to a workspace and counts itself; the last one of a
tile adds the partials up, in the order of the parts whoever came last, so every run gives the same bits, and sets the count
back to zero, so that the launch can be repeated. The scores of a tile pass through a buffer to the warps' `gate_warp`.
Compulsory bytes and floor: see triton_router.

Invariant: a partial is written before its count is raised (release), and read after the last count was seen (acquire).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.benches.gate import cute_gate
from moe_routing_bench.benches.gate.cute_gate import THREADS, gate_warp
from moe_routing_bench.benches.gate.rules import WARP, Rule, rule_of
from moe_routing_bench.benches.router import split
from moe_routing_bench.benches.router.split import SMS, supports

__all__ = ["compile_for", "precompile", "prepare", "supports"]

WARPS = THREADS // WARP
ROWS, COLUMNS, DEPTH = 16, 8, 16  # of a product: tokens, experts, elements of H
QUAD = 4  # lanes that share a row of an operand
LANE = 8  # neighbouring elements of H that a lane loads: those of two products
CHUNK = QUAD * LANE
# Most 16-byte copies of a thread in flight: 96 KB a block, or 80, which beside the gate's leave room for two on an SM.
ALONE, PAIRED = 48, 40


@dataclass(frozen=True)
class Form:
    """What is fixed when the kernel is compiled, besides the rule."""

    rows: int  # products of 16 tokens in a tile
    parts: int  # that H is cut into, a block each
    chunks: int  # of 32 elements of H in a part
    flight: int  # chunks in flight
    team: int  # lanes that choose a token's experts, and
    each: int  # tokens of such a team, see `cute_gate`


def tiles_of(experts: int) -> int:
    """Products side by side, of COLUMNS experts each, that a warp computes."""
    return -(-experts // (COLUMNS * WARPS))


@cute.jit
def fetch(matrix: cute.Tensor, row: Int32, h: Int32, slot: cute.Tensor, exact: cutlass.Constexpr):
    """Start to copy LANE elements of a row of (rows, H) from h on to a slot of shared memory; zeros where H has ended,
    which it has nowhere if `exact`.

    A row that does not exist is the last one: nobody looks at its scores.
    """
    hidden = cutlass.const_expr(matrix.shape[1])
    width = cutlass.const_expr(math.gcd(hidden, LANE))
    start = Int64(cutlass.min(row, matrix.shape[0] - 1)) * hidden + Int64(h)
    held = cute.make_rmem_tensor((LANE,), matrix.element_type)
    held.fill(0)
    if cutlass.const_expr(width == LANE):
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), matrix.element_type, num_bits_per_copy=128)
        source = cute.make_tensor(matrix.iterator + cute.assume(start, divby=LANE), cute.make_layout((LANE,)))
        if cutlass.const_expr(exact):
            cute.copy(atom, source, slot)
        else:
            if h < hidden:
                cute.copy(atom, source, slot)
            if h >= hidden:
                cute.autovec_copy(held, slot)
    else:  # too narrow for an asynchronous copy
        source = cute.make_tensor(matrix.iterator + start, cute.make_layout((LANE,)))
        for v in cutlass.range_constexpr(LANE):
            if h + v < hidden:
                held[v] = source[v]
        cute.autovec_copy(held, slot)


@cute.jit
def fetch_chunk(
    x: cute.Tensor,
    weight: cute.Tensor,
    token: Int32,
    expert: Int32,
    h: Int32,
    slots: cute.Tensor,
    exact: cutlass.Constexpr,
):
    """Start to copy a lane's part of CHUNK elements of H: its experts of all tiles, then its tokens."""
    tiles = cutlass.const_expr(tiles_of(weight.shape[0]))
    for n in cutlass.range_constexpr(tiles):
        fetch(weight, expert + n * COLUMNS, h, slots[None, n], exact)
    for m in cutlass.range_constexpr(cute.size(slots, mode=[1]) - tiles):
        fetch(x, token + m * (ROWS // 2), h, slots[None, tiles + m], exact)


def left_register(i: int, upper: int) -> int:
    """Where a lane's left operand has the i-th of four elements of H, of its lower or upper token.

    The right operand has them in order, and sums have two neighbouring experts of the lower token before the upper's. That
    this is the layout of the instruction is held by `tests/benches/test_cute_router.py`.
    """
    return i // 2 * 4 + upper * 2 + i % 2


@cute.jit
def multiply(held: cute.Tensor, sums: cute.Tensor):
    """sums (4, rows, tiles) += the products of held (LANE, tiles + 2 rows): a lane's experts, then its tokens."""
    rows, tiles = cutlass.const_expr(cute.size(sums, mode=[1])), cutlass.const_expr(cute.size(sums, mode=[2]))
    atom = cute.make_mma_atom(cute.nvgpu.warp.MmaF16BF16Op(held.element_type, Float32, (ROWS, COLUMNS, DEPTH)))
    left = cute.make_rmem_tensor((8, rows), held.element_type)
    right = cute.make_rmem_tensor((4, tiles), held.element_type)
    for half in cutlass.range_constexpr(LANE // 4):
        for i in cutlass.range_constexpr(4):  # of H a lane has two neighbours in each half of a product
            for m in cutlass.range_constexpr(2 * rows):
                left[left_register(i, m % 2), m // 2] = held[half * 4 + i, tiles + m]
            for n in cutlass.range_constexpr(tiles):
                right[i, n] = held[half * 4 + i, n]
        cute.gemm(atom, sums, left, right, sums)


@cute.kernel
def router_kernel(
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    partial: cute.Tensor,
    count: cute.Tensor,
    logits: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    form: cutlass.Constexpr,
):
    """One block: 16 `rows` tokens, one part of H."""
    experts = cutlass.const_expr(weight.shape[0])
    tiles = cutlass.const_expr(tiles_of(experts))
    tokens = x.shape[0]
    thread, tile, part = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.block_idx()[1]
    warp, lane = thread // WARP, cute.arch.lane_idx()
    first_token, first_expert = tile * (ROWS * form.rows), warp * (tiles * COLUMNS)

    slots = cutlass.const_expr(tiles + 2 * form.rows)  # of a chunk and thread: only the thread itself reads them
    ring = cutlass.memory.SmemAllocator().allocate_tensor(
        x.element_type, cute.make_layout((LANE, THREADS, slots, form.flight)), byte_alignment=16
    )
    sums = cute.make_rmem_tensor((4, form.rows, tiles), Float32)
    sums.fill(0.0)
    exact = cutlass.const_expr(x.shape[1] == form.parts * form.chunks * CHUNK)
    expert, token = first_expert + lane // QUAD, first_token + lane // QUAD
    h = part * (form.chunks * CHUNK) + lane % QUAD * LANE
    for f in cutlass.range_constexpr(form.flight):
        fetch_chunk(x, weight, token, expert, h + f * CHUNK, ring[None, thread, None, f], exact)
        cute.arch.cp_async_commit_group()
    for step in range(form.chunks // form.flight):
        for f in cutlass.range_constexpr(form.flight):
            cute.arch.cp_async_wait_group(form.flight - 1)
            held = cute.make_rmem_tensor((LANE, slots), x.element_type)
            for slot in cutlass.range_constexpr(slots):
                cute.autovec_copy(ring[None, thread, slot, f], held[None, slot])
            multiply(held, sums)
            if cutlass.const_expr(form.chunks > form.flight):
                after = (step + 1) * form.flight + f
                if after < form.chunks:
                    fetch_chunk(x, weight, token, expert, h + after * CHUNK, ring[None, thread, None, f], exact)
            cute.arch.cp_async_commit_group()  # an empty one at the end, so that waiting counts alike

    last = part == 0
    if cutlass.const_expr(form.parts > 1):
        last = exchange(partial, count, sums, tile, part, thread, tokens - first_token, form)
    if last:
        for m in cutlass.range_constexpr(form.rows):
            for upper in cutlass.range_constexpr(2):
                token = first_token + m * ROWS + upper * (ROWS // 2) + lane // QUAD
                if token < tokens:
                    for n in cutlass.range_constexpr(tiles):
                        for i in cutlass.range_constexpr(2):
                            expert = first_expert + n * COLUMNS + lane % QUAD * 2 + i
                            if expert < experts:
                                logits[token, expert] = sums[upper * 2 + i, m, n]
        cute.arch.sync_threads()
        mine = cutlass.const_expr(ROWS * form.rows // WARPS)  # tokens of a warp
        for done in range(0, mine, WARP // form.team * form.each):
            gate_warp(logits, bias, ids, weights, first_token + warp * mine + done, rule, form.team, form.each)
            cute.arch.sync_warp()  # the next tokens use the same shared memory


@cute.jit
def exchange(
    partial: cute.Tensor,
    count: cute.Tensor,
    sums: cute.Tensor,
    tile: Int32,
    part: Int32,
    thread: Int32,
    live: Int32,
    form: cutlass.Constexpr,
):
    """Write this block's sums; in the last block of the tile, which is told so, replace them by those of all parts.

    A partial lies as its threads hold it: vectors of a thread and row are THREADS vectors apart. Rows from `live` on are
    neither written nor read.
    """
    rows, tiles = cutlass.const_expr(form.rows), cutlass.const_expr(cute.size(sums, mode=[2]))
    width = cutlass.const_expr(math.gcd(2 * tiles, 4))
    vectors = cutlass.const_expr(2 * tiles // width)
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=width * 32)
    back = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), Float32, num_bits_per_copy=width * 32)
    held = cute.make_rmem_tensor((width, vectors, 2, rows), Float32)
    pairs = cute.make_tensor(held.iterator, cute.make_layout((2, tiles, 2, rows)))
    for m in cutlass.range_constexpr(rows):
        for n in cutlass.range_constexpr(tiles):
            for i in cutlass.range_constexpr(4):
                pairs[i % 2, n, i // 2, m] = sums[i, m, n]
    block = cutlass.const_expr(THREADS * 4 * tiles * rows)  # elements of a partial
    for m in cutlass.range_constexpr(rows):
        for upper in cutlass.range_constexpr(2):
            if m * ROWS + upper * (ROWS // 2) + thread % WARP // QUAD < live:
                for v in cutlass.range_constexpr(vectors):
                    at = ((m * 2 + upper) * vectors + v) * (THREADS * width) + thread * width
                    start = cute.assume(Int64(tile * form.parts + part) * block + Int64(at), divby=width)
                    target = cute.make_tensor(partial.iterator + start, cute.make_layout((width,)))
                    cute.copy(back, held[None, v, upper, m], target)
    flag = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
    cute.arch.sync_threads()
    if thread == 0:
        before = cute.arch.atomic_add(count.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")
        flag[0] = before
    cute.arch.sync_threads()
    last = flag[0] == form.parts - 1
    if last:
        if thread == 0:
            count[tile] = 0
        held.fill(0.0)
        for p in cutlass.range_constexpr(form.parts):
            one = cute.make_rmem_tensor((width, vectors, 2, rows), Float32)
            one.fill(0.0)
            for m in cutlass.range_constexpr(rows):
                for upper in cutlass.range_constexpr(2):
                    if m * ROWS + upper * (ROWS // 2) + thread % WARP // QUAD < live:
                        for v in cutlass.range_constexpr(vectors):
                            at = ((m * 2 + upper) * vectors + v) * (THREADS * width) + thread * width
                            start = cute.assume(Int64(tile * form.parts + p) * block + Int64(at), divby=width)
                            source = cute.make_tensor(partial.iterator + start, cute.make_layout((width,)))
                            cute.copy(atom, source, one[None, v, upper, m])
            for e in cutlass.range_constexpr(cute.size(held)):
                held[e] = held[e] + one[e]
        for m in cutlass.range_constexpr(rows):
            for n in cutlass.range_constexpr(tiles):
                for i in cutlass.range_constexpr(4):
                    sums[i, m, n] = pairs[i % 2, n, i // 2, m]
    return last


@cute.jit
def router_host(
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    partial: cute.Tensor,
    count: cute.Tensor,
    logits: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    form: cutlass.Constexpr,
    stream: Any,
):
    tiles = cute.ceil_div(x.shape[0], ROWS * form.rows)
    router_kernel(x, weight, bias, partial, count, logits, ids, weights, rule, form).launch(
        grid=(tiles, form.parts, 1), block=(THREADS, 1, 1), stream=stream
    )


@functools.partial(cute_cache.cached, also=(cute_gate.__file__,))
def compile_for(
    arch: str, dtype: str, hidden: int, experts: int, top_k: int, rule: Rule, form: Form, keep: bool = False
) -> Any:
    """Compile the router for one architecture and shape class (no GPU needed).

    The result is called with x (T, H), weight (E, H), bias (E,) float32 (any where the rule has none), partial (words,)
    float32, count (tiles,) int32 zeros, logits (T, E) float32, ids (T, k) int32, weights (T, k) float32.
    """
    tokens, kind = cute.sym_int(), support.DTYPES[dtype]
    arguments = [
        support.matrix(kind, tokens, hidden),
        support.matrix(kind, experts, hidden),
        support.matrix(Float32, experts),
        support.matrix(Float32, cute.sym_int()),
        support.matrix(Int32, cute.sym_int()),
        support.matrix(Float32, tokens, experts),
        support.matrix(Int32, tokens, top_k),
        support.matrix(Float32, tokens, top_k),
        rule,
        form,
    ]
    return support.compile_kernel(router_host, arguments, arch, keep)


def _divisor(total: int, most: int) -> int:
    """The largest divisor up to `most`; where that is less than half of it, `most`, and something is padded."""
    fitting = max(n for n in range(1, most + 1) if total % n == 0)
    return fitting if 2 * fitting >= most else most


def choose(tokens: int, hidden: int, experts: int, rule: Rule) -> Form:
    """The form of a shape; a part is one round of loads where it can be."""
    tiles = tiles_of(experts)
    rows = 1
    while rows < 4 and tokens > ROWS * rows * SMS and 2 * rows * tiles <= 16:
        rows *= 2
    blocks, chunks = -(-tokens // (ROWS * rows)), -(-hidden // CHUNK)
    parts = _divisor(chunks, min(split.parts(tokens, hidden, ROWS * rows), chunks))
    each = -(-chunks // parts)
    fit = (ALONE if blocks * parts <= SMS else PAIRED) // (tiles + 2 * rows)
    flight = _divisor(each, min(each, max(2, fit))) if hidden % LANE == 0 else 1  # narrow loads are not asynchronous
    each += -each % flight
    team = max(rule.groups, 8) if experts <= 128 else WARP
    return Form(rows, -(-chunks // each), each, flight, team, 2 if team == WARP and experts <= 512 else 1)


def _compiled(cell: Any, arch: str) -> tuple[Any, Form]:
    rule = rule_of(cell)
    form = choose(cell.tokens, cell.hidden, cell.experts, rule)
    return compile_for(arch, cell.dtype, cell.hidden, cell.experts, cell.top_k, rule, form), form


def precompile(cell: Any, arch: str) -> None:
    """Put the kernel of a cell into the cache; needs no GPU."""
    _compiled(cell, arch)


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind x (T, H), router_weight (E, H), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    x, weight = inputs["x"], inputs["router_weight"]
    kernel, form = _compiled(cell, support.current_arch())
    blocks = -(-len(x) // (ROWS * form.rows))
    wide = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    padded = tiles_of(len(weight)) * COLUMNS * WARPS
    partial = wide(blocks * form.parts * form.rows * ROWS * padded if form.parts > 1 else 1)
    count = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    bias = inputs["bias"] if "bias" in inputs else wide(len(weight))
    logits = wide(len(x), len(weight))
    return functools.partial(
        kernel, x, weight, bias, partial, count, logits, outputs["topk_ids"], outputs["topk_weights"]
    )
