"""Experts in Triton: two grouped GEMMs over rows sorted by expert, with the activation in the epilogue of the first.

Strategy: a program computes a tile of an expert's rows and some columns. It finds its tile's expert and rows from the offsets,
so nothing is read on the host and no row is padded: the grid is as large as any routing can need, and programs without a tile
end at once. Tiles that run at the same time share rows and weights in the L2 cache. The first GEMM has a gate and an up
accumulator, and writes the activated result, rounded once. Rows may be gathered
through `order` as they are loaded (`gather`), so that no packed copy is needed. With few rows per expert, tiles are
low and steps along the inner dimension long: then the weights' bytes set the time.

FLOPs: 6 R H I for R rows; floor at Qwen3-30B-A3B, T=16384 (R=131072, H=2048, I=768): 1.24 TFLOP, 1.6 ms at 780 TFLOP/s and
1.9 ms at the 660 TFLOP/s that the power limit leaves. Bytes: the weights of every expert that has a row, once; at T=64
(E=128) 1.2 GB, 0.28 ms at 4.25 TB/s.

Invariant: a row is written by the programs of its own expert alone; rows of no expert are neither read nor written.

`gather` is pack and experts fused: the first GEMM gathers token rows as it loads them; no packed copy is written or read. It saves 2 R H elements of traffic, at T=16384, k=8, H=2048 in bf16 1.07 GB, 0.25 ms at 4.25 TB/s; each column tile gathers its
rows anew, mostly from the L2 cache.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_routing_kernels.activations import Activation, activation_of
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import mixed_formats
from moe_routing_kernels.layer import Layer

GROUP = 8  # rows of tiles that share weights: 1024 rows of an expert
MOST_STAGES = 4
_NONE = Activation("", gated=False)  # of the second GEMM, whose accumulators are stored as they are
LEAST_SHARED = 99 << 10  # bytes of shared memory that a program may have on any GPU since compute capability 8.0


@dataclass(frozen=True)
class Tiling:
    """The work of a program: rows x columns of the result, `step` elements of the inner dimension at a time."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


@triton.jit
def locate(
    offsets_ptr, program, experts, SPAN: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr
):
    """A program's tile: its expert (at least `experts` where it has no tile), its first row, the expert's end, its column tile.

    The tiles of an expert are taken in groups of up to GROUP rows of tiles, column by column: tiles that run at the same time
    share rows and weights, which are then read from memory once per group, not once per row of tiles.
    """
    expert = tl.arange(0, SPAN)
    first = tl.load(offsets_ptr + expert, mask=expert < experts, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < experts, other=0)
    tiles = (end - first + ROWS - 1) // ROWS
    owner = tl.sum((tl.cumsum(tiles * PARTS, 0) <= program).to(tl.int32), 0)
    inside = program - tl.sum(tl.where(expert < owner, tiles * PARTS, 0), 0)
    group = inside // (GROUP * PARTS)
    high = tl.minimum(tl.sum(tl.where(expert == owner, tiles, 0), 0) - group * GROUP, GROUP)
    high = tl.maximum(high, 1)  # programs without a tile
    inside = inside % (GROUP * PARTS)
    row = tl.sum(tl.where(expert == owner, first, 0), 0) + (group * GROUP + inside % high) * ROWS
    return owner, row, tl.sum(tl.where(expert == owner, end, 0), 0), inside // high


@triton.jit
def load_step(pointers, k, inside, K: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of operands along the inner dimension; `inside` says which columns are real, where not all tiles are whole."""
    if WHOLE and K % STEP == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside & (k < K), other=0.0)


@triton.jit
def activate(gate, up, VALUE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr):
    """An activation of float32 pre-activations, as `Activation` describes it; `relu2` reads the gate alone. NaN is propagated."""
    keep: tl.constexpr = tl.PropagateNan.ALL
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, keep)
        up = tl.minimum(tl.maximum(up, -LIMIT, keep), LIMIT, keep)
    if VALUE == "relu2":
        positive = tl.maximum(gate, 0.0, keep)
        return positive * positive
    if VALUE == "gelu":  # by tanh: x (1 + tanh(z)) / 2 = x sigmoid(2 z)
        value = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ALPHA == 1:
        value = gate * tl.sigmoid(gate)
    else:
        value = gate * tl.sigmoid(ALPHA * gate)
    if SHIFT != 0:
        up = up + SHIFT
    return value * up


@triton.jit
def grouped_kernel(
    x_ptr,
    order_ptr,
    offsets_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    experts,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    VALUE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    TOP_K: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: a tile of out (R, N) = x (R, K) w^T for the expert of its rows, w (E, N, K).

    GATED: w is (E, 2 N, K), the gate above the up projection. BIASED: the bias of w's rows is added. VALUE, LIMIT, ALPHA and
    SHIFT: the activation of the accumulators (`Activation`), or none where VALUE is empty. TOP_K above
    0: row r is the token order[r] // TOP_K of x (T, K).
    """
    parts: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    expert, first, end, part = locate(offsets_ptr, tl.program_id(0), experts, SPAN, ROWS, parts, GROUP)
    if expert < experts:
        row = first + tl.arange(0, ROWS)
        source = tl.minimum(row, end - 1)  # rows beyond the expert's last are computed, but not written
        if TOP_K > 0:
            # Padding rows are computed, too, from any token.
            source = tl.maximum(tl.load(order_ptr + source), 0) // TOP_K
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, STEP)
        x_at = x_ptr + source.to(tl.int64)[:, None] * K + k[None, :]
        wide: tl.constexpr = 2 * N if GATED else N
        w_at = w_ptr + (expert.to(tl.int64) * wide + column)[None, :] * K + k[:, None]
        whole: tl.constexpr = N % COLUMNS == 0
        # main loop
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        up_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K, STEP):
            x = load_step(x_at + start, start + k[None, :], True, K, STEP, True)
            w = load_step(w_at + start, start + k[:, None], (column < N)[None, :], K, STEP, whole)
            acc = tl.dot(x, w, acc)
            if GATED:
                w = load_step(w_at + N * K + start, start + k[:, None], (column < N)[None, :], K, STEP, whole)
                up_acc = tl.dot(x, w, up_acc)
        # epilogue
        if BIASED:
            bias_at = bias_ptr + expert * wide + column
            acc += tl.load(bias_at, mask=column < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_acc += tl.load(bias_at + N, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if VALUE != "":
            acc = activate(acc, up_acc, VALUE, LIMIT, ALPHA, SHIFT)
        written = (row < end)[:, None] & (column < N)[None, :]
        out_at = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=written)


def choose(rows_per_expert: float, gated: bool, shared_bytes: int) -> Tiling:
    """The tiling for a mean of rows per expert: 128 rows high where experts have as many, else as low as tensor cores allow."""
    rows = min(128, max(16, triton.next_power_of_2(int(rows_per_expert))))
    if rows >= 64:
        columns, step, warps = 128 if gated else 256, 64, rows // 16
    else:
        columns, step, warps = 64, 128, 4
    stage = 2 * step * (rows + (2 if gated else 1) * columns)  # bytes
    return Tiling(rows, columns, step, warps, max(2, min(MOST_STAGES, shared_bytes // stage)))


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.packed not in ("bf16", "fp16"):
        return f"takes bf16 and fp16 rows, not {problem.packed}: tensor cores round float32"
    return mixed_formats(problem)


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I) and biases, all contiguous -> y (R, H)."""
    return launcher(problem, packed, packed, 0, offsets, (w13, w2), (b13, b2), y)


def launcher(
    problem: Experts,
    x: Tensor,
    order: Tensor,
    top_k: int,
    offsets: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    y: Tensor,
) -> Callable[[], None]:
    """Both launches -> y (R, H). Row r is x[r], or x[order[r] // top_k] with `top_k` above 0."""
    activated = torch.empty((len(y), problem.intermediate), dtype=y.dtype, device=y.device)
    known = activation_of(problem.activation)
    share = problem.mean_rows / problem.rows
    up = _launch(x, order, top_k, offsets, weights[0], biases[0], activated, known, share)
    down = _launch(activated, order, 0, offsets, weights[1], biases[1], y, _NONE, share)

    def run() -> None:
        up()
        down()

    return run


def _launch(
    x: Tensor,
    order: Tensor,
    top_k: int,
    offsets: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: Activation,
    share: float,
) -> Callable[[], None]:
    """One GEMM, compiled and loaded: neither may happen while a CUDA graph is captured. Experts have a `share` of its rows on average."""
    (rows, n), experts = out.shape, len(w)
    tiling = choose(share * rows / experts, activation.gated, _shared_bytes(out.device))
    tiles = rows // tiling.rows + min(experts, rows)  # at most: each expert may have one tile that is not full
    grid = (tiles * triton.cdiv(n, tiling.columns),)
    arguments = (
        *(x, order, offsets, w, w if bias is None else bias, out, experts, n, x.shape[1]),
        *(activation.gated, bias is not None, activation.value, activation.limit, activation.alpha, activation.shift),
        *(top_k, triton.next_power_of_2(experts)),
        *(tiling.rows, tiling.columns, tiling.step, GROUP),
    )
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    if not triton.knobs.runtime.interpret:
        _ = grouped_kernel.warmup(*arguments, grid=grid, **options).run
    return functools.partial(grouped_kernel[grid], *arguments, **options)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Most shared memory of a program, in bytes."""
    if device.type != "cuda":
        return LEAST_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def unsupported_gather(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return problem.repacked or unsupported(problem.experts)


def bind_gather(
    problem: Layer,
    *,
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), order (R,) int32, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), biases -> y (R, H)."""
    return launcher(problem.experts, x, order, problem.layout.top_k, offsets, (w13, w2), (b13, b2), y)
