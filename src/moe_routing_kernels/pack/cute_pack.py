"""Pack in CuTe DSL: copy every token's row to the output rows of its k assignments, in one launch.

Strategy: token-major. A group of threads reads its token's row once into registers and writes it k times, so reads stay
at the compulsory T * H elements (gathering row by row reads up to k times that). Where padding rows are possible, the
group of token t also looks at `checked_rows` consecutive output rows and writes zeros to those whose order is -1; all
loads, indices included, are issued before the first store. With k = 1 a group handles an output row instead: it reads no
more, and its writes lie in sequence. Long copies go through shared memory (`cute_pack_bulk`).
Compulsory bytes: (T + R) * H * itemsize + 4 * T * k, and 4 * R more with padding; floor: a stream of that mix.

Invariant: every output row is written by exactly one group: `inverse` names the kept rows, `order` < 0 the others.
"""

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from moe_routing_kernels.cute import rows as cute_rows
from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, current_arch, fake_tensor, per_problem
from moe_routing_kernels.cute.rows import RowTiling, load_token, row_tiling, token_groups
from moe_routing_kernels.pack import Pack, choose_checked_rows, cute_pack_bulk, cute_pack_fp8
from moe_routing_kernels.pack.cute_pack_bulk import BulkConfig, bulk_config
from moe_routing_kernels.target import MEASURED, Target

ENOUGH_BLOCKS = 12  # per multiprocessor: fewer leave it partly idle, and threads then take fewer vectors each
MANY_BLOCKS = 32  # per multiprocessor
MANY_BYTES = 1 << 27  # written: below it, bulk copies take too long to begin
MANY_BYTES_OF_ODD_ROWS = 1 << 25  # the same for rows that no tiling covers exactly


@cute.kernel
def pack_kernel(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    tiling: cutlass.Constexpr,
    checked_rows: cutlass.Constexpr,
):
    """A group of `tiling.lanes` threads: a column tile of one token, and of the rows that it checks for padding."""
    # load
    token, column = cute_rows.position(tiling)
    fragment = cute.make_rmem_tensor((tiling.width, tiling.vectors), x.element_type)
    rows, sources = load_token(x, order, inverse, token, column, fragment, tiling, checked_rows)

    # store
    for j in cutlass.range_constexpr(rows.shape[0]):
        if rows[j] >= 0:
            cute_rows.store_row(fragment, packed, rows[j], column, tiling)
    if cutlass.const_expr(checked_rows > 0):
        fragment.fill(0)
        for i in cutlass.range_constexpr(checked_rows):
            if sources[i] < 0:
                cute_rows.store_row(fragment, packed, token * checked_rows + i, column, tiling)


@cute.kernel
def single_choice_kernel(x: cute.Tensor, order: cute.Tensor, packed: cute.Tensor, tiling: cutlass.Constexpr):
    """Row-major, for k = 1: a group reads a column tile of one output row from the token in `order`, or writes zeros."""
    row, column = cute_rows.position(tiling)
    fragment = cute.make_rmem_tensor((tiling.width, tiling.vectors), x.element_type)
    fragment.fill(0)
    if row < order.shape[0]:
        token = order[row]
        if token >= 0:
            cute_rows.load_row(x, token, column, fragment, tiling)
        cute_rows.store_row(fragment, packed, row, column, tiling)


@cute.jit
def pack_host(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    tiling: cutlass.Constexpr,
    checked_rows: cutlass.Constexpr,
    stream: Any,
):
    if cutlass.const_expr(inverse.shape[1] == 1):
        single_choice_kernel(x, order, packed, tiling).launch(
            grid=(tiling.blocks(order.shape[0]), 1, 1), block=(tiling.threads, 1, 1), stream=stream
        )
    else:
        groups = token_groups(x.shape[0], order.shape[0], checked_rows)
        pack_kernel(x, order, inverse, packed, tiling, checked_rows).launch(
            grid=(tiling.blocks(groups), 1, 1), block=(tiling.threads, 1, 1), stream=stream
        )


@cached
def compile_for(
    arch: str, dtype: str, top_k: int, config: RowTiling | BulkConfig, checked_rows: int, keep: bool = False
) -> Any:
    """Compile pack, through registers or by bulk copies, for one architecture and shape class (no GPU needed).

    `checked_rows` is the number of output rows that each group checks for padding; 0 promises that no row is padding.
    The result is called with x (T, H), order (R,), inverse (T, k), packed (R, H).
    """
    element = DTYPES[dtype]
    tokens, rows = cute.sym_int(), cute.sym_int()
    arguments = [
        fake_tensor(element, tokens, config.hidden),
        fake_tensor(Int32, rows),
        fake_tensor(Int32, tokens, top_k),
        fake_tensor(element, rows, config.hidden),
        config,
        checked_rows,
    ]
    host = cute_pack_bulk.pack_host if isinstance(config, BulkConfig) else pack_host
    return compile_kernel(host, arguments, arch, keep)


def choose(
    arch: str, tokens: int, hidden: int, dtype: str, top_k: int, padding: bool = False
) -> RowTiling | BulkConfig:
    """How rows are copied: by bulk copies where each row is written often and many bytes are written, else through registers.

    Rows that no tiling covers exactly go through registers more slowly, so that bulk copies pay for less. If many bytes are
    written, and each row twice, halves of rows are faster, but every warp would need zeros for padding in its shared memory.
    """
    written = tokens * top_k * hidden * DTYPES[dtype].width // 8
    tiling = choose_tiling(tokens, hidden, dtype, top_k, Target.named(arch).multiprocessors)
    bulk = bulk_config(arch, hidden, dtype, top_k, halved=top_k == 2 and written >= MANY_BYTES and not padding)
    least_k, least_bytes = (3, MANY_BYTES) if tiling.exact else (2, MANY_BYTES_OF_ODD_ROWS)
    return bulk if bulk and top_k >= least_k and written >= least_bytes else tiling


def choose_tiling(
    tokens: int, hidden: int, dtype: str, top_k: int, multiprocessors: int = MEASURED.multiprocessors
) -> RowTiling:
    """The row tiling for `tokens` rows: few rows are cut finer, so that they still occupy the whole GPU.

    Many rows are cut finer too: blocks that end sooner overlap better (docs/kernels.md).
    """
    vectors = 4
    tiling = row_tiling(hidden, dtype, vectors, threads=128)
    if top_k == 1 or tiling.blocks(tokens) >= multiprocessors * MANY_BLOCKS:
        vectors = 2 if top_k == 1 else 1
        tiling = row_tiling(hidden, dtype, vectors, threads=128)
    while vectors > 1 and tiling.blocks(tokens) < multiprocessors * ENOUGH_BLOCKS:
        vectors //= 2
        tiling = row_tiling(hidden, dtype, vectors, threads=128)
    return tiling


def unsupported(problem: Pack) -> str | None:
    """Why this problem cannot run, or None."""
    return cute_pack_fp8.unsupported(problem) if problem.packed_format.quantised else None


def precompile(problem: Pack, arch: str) -> None:
    """Put the kernel of a problem, with as many rows as it may have, into the cache; needs no GPU."""
    checked_rows = choose_checked_rows(problem, problem.rows)
    if problem.packed_format.quantised:
        cute_pack_fp8.precompile(problem, arch, checked_rows=checked_rows)
    else:
        _compiled(problem, arch, checked_rows)


@per_problem
def _compiled(problem: Pack, arch: str, checked_rows: int) -> Any:
    config = choose(arch, problem.tokens, problem.hidden, problem.dtype, problem.top_k, problem.padding)
    return compile_for(arch, problem.dtype, problem.top_k, config, checked_rows)


def bind(
    problem: Pack,
    *,
    x: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> Callable[[], None]:
    """Bind pack: x (T, H), order (R,) int32, inverse (T, k) int32 -> packed (R, H), copied or quantised."""
    checked_rows = choose_checked_rows(problem, len(order))
    if problem.packed_format.quantised:
        assert scales is not None, f"{problem.packed} has scales"
        return cute_pack_fp8.bind(
            problem, x=x, order=order, inverse=inverse, packed=packed, scales=scales, checked_rows=checked_rows
        )
    return functools.partial(_compiled(problem, current_arch(), checked_rows), x, order, inverse, packed)
