"""Pack by bulk copies (sm_90, sm_100): rows pass through shared memory, and no thread holds any part of them in registers.

Strategy: token-major, as in cute_pack, but a warp handles one piece of a token's row: its first lane issues one bulk
load and, when that has arrived, one bulk store for each of the k rows. A row is then written in few large transactions,
and the bytes in flight are bounded by shared memory, not by registers.

Compulsory bytes and floor: as in cute_pack.

Invariants: only the lane that awaits the load reads the piece, by stores of the same (async) proxy, so no fence is
needed; zeros for padding are written by threads and need one. A block ends when its stores have read shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.cute import VECTOR_BYTES, WARP
from moe_routing_kernels.cute.cache import DTYPES
from moe_routing_kernels.cute.rows import token_groups

PIECE_BYTES = 5760  # at most: pieces of 6144 are slower again, so that a row of 12288 takes three of 4096 (H200)
LEAST_BYTES = 1024  # of a piece of a longer row
WARPS = 4  # per block, unless it has a single warp
EVICT_FIRST = 0x12F0000000000000  # L2 policy of data used once, as createpolicy.fractional.L2::evict_first encodes it


@dataclass(frozen=True)
class BulkConfig:
    """How warps cover rows of `hidden` elements, fixed when the kernel is compiled."""

    hidden: int  # elements of a row
    pieces: int  # equal parts of a row: a warp moves one of them
    warps: int = WARPS  # per block

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return self.hidden // self.pieces


def bulk_config(arch: str, hidden: int, dtype: str, top_k: int, halved: bool = False) -> BulkConfig | None:
    """The configuration with the fewest equal pieces of a row; None where bulk copies cannot run.

    Where `halved`, a row of one piece is cut into two if possible, each copied by a block of one warp. Bulk copies cannot run on
    architectures other than sm_9x and sm_10x, where a row has no such pieces of whole 16-byte vectors, or with more choices than
    lanes.
    """
    row = hidden * DTYPES[dtype].width // 8
    generation = int(arch.removeprefix("sm_").rstrip("a")) // 10
    if generation not in (9, 10) or row % VECTOR_BYTES or top_k > WARP:
        return None
    vectors = row // VECTOR_BYTES
    if halved and row <= PIECE_BYTES and vectors % 2 == 0 and row // 2 >= LEAST_BYTES:
        return BulkConfig(hidden, 2, warps=1)
    pieces = next(n for n in range(1, vectors + 1) if vectors % n == 0 and row // n <= PIECE_BYTES)
    return BulkConfig(hidden, pieces) if pieces == 1 or row // pieces >= LEAST_BYTES else None


@cute.jit
def piece_of(matrix: cute.Tensor, row: Any, part: Any, config: cutlass.Constexpr):
    """Part `part` of a row of a (rows, hidden) tensor, addressed with 64 bits."""
    offset = Int64(row) * config.hidden + Int64(part * config.piece)
    offset = cute.assume(offset, divby=VECTOR_BYTES * 8 // matrix.element_type.width)
    return cute.make_tensor(matrix.iterator + offset, cute.make_layout((config.piece,)))


@cute.jit
def load_piece(source: cute.Tensor, stage: cute.Tensor, arrived: cute.Pointer, config: cutlass.Constexpr):
    """Issue the load of a piece into `stage`; `arrived` completes its first phase when it is there."""
    bits = cutlass.const_expr(config.piece * source.element_type.width)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), source.element_type, num_bits_per_copy=bits)
    cute.arch.mbarrier_arrive_and_expect_tx(arrived, bits // 8)
    cute.copy(atom, source, stage, mbar_ptr=arrived, cache_policy=Int64(EVICT_FIRST))


@cute.jit
def store_piece(stage: cute.Tensor, target: cute.Tensor, config: cutlass.Constexpr):
    """Issue the store of a piece from shared memory; it is PTX because the copy atom has no cache policy."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [{$r0}], [{$r1}], {$r2}, {$r3};",
        read_only_args=[
            target.iterator,
            stage.iterator,
            Int32(config.piece * target.element_type.width // 8),
            Int64(EVICT_FIRST),
        ],
    )


@cute.jit
def clear(zeros: cute.Tensor, config: cutlass.Constexpr):
    """Fill a piece of shared memory with zeros for bulk stores, by all threads of the block."""
    width = cutlass.const_expr(VECTOR_BYTES * 8 // zeros.element_type.width)
    vector = cute.make_rmem_tensor((width,), zeros.element_type)
    vector.fill(0)
    vectors = cute.make_tensor(zeros.iterator, cute.make_layout((width, config.piece // width)))
    for i in range(cute.arch.thread_idx()[0], config.piece // width, config.warps * WARP):
        cute.autovec_copy(vector, vectors[None, i])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()


@cute.kernel
def pack_kernel(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    config: cutlass.Constexpr,
    checked_rows: cutlass.Constexpr,
):
    """A warp: a piece of one token, and of the rows that it checks for padding. Lane j holds row j and order j."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP), cute.arch.lane_idx()
    unit = cute.arch.block_idx()[0] * config.warps + warp
    token, part = unit // config.pieces, unit % config.pieces
    allocator = cutlass.memory.SmemAllocator()
    stages = allocator.allocate_tensor(
        x.element_type, cute.make_layout((config.piece, config.warps)), byte_alignment=128
    )
    barriers = allocator.allocate_tensor(Int64, cute.make_layout(config.warps), byte_alignment=8)
    # load
    stage, arrived = stages[None, warp], barriers.iterator + warp
    row, source = Int32(-1), Int32(0)
    if lane == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        if token < x.shape[0]:
            load_piece(piece_of(x, token, part, config), stage, arrived, config)
    if lane < inverse.shape[1] and token < x.shape[0]:
        row = inverse[token, lane]
    zeros = None
    if cutlass.const_expr(checked_rows > 0):
        if lane < checked_rows and token * checked_rows + lane < order.shape[0]:
            source = order[token * checked_rows + lane]
        zeros = allocator.allocate_tensor(x.element_type, cute.make_layout(config.piece), byte_alignment=128)
        clear(zeros, config)

    # store
    rows = [cute.arch.shuffle_sync(row, j) for j in range(inverse.shape[1])]
    padding = cute.arch.vote_ballot_sync(source < 0)
    if lane == 0:
        if token < x.shape[0]:
            cute.arch.mbarrier_wait(arrived, 0)
        for j in cutlass.range_constexpr(len(rows)):
            if rows[j] >= 0:
                store_piece(stage, piece_of(packed, rows[j], part, config), config)
        for i in cutlass.range_constexpr(checked_rows):
            if padding & (1 << i) != 0:
                store_piece(zeros, piece_of(packed, token * checked_rows + i, part, config), config)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def pack_host(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    config: cutlass.Constexpr,
    checked_rows: cutlass.Constexpr,
    stream: Any,
):
    units = token_groups(x.shape[0], order.shape[0], checked_rows) * config.pieces
    pack_kernel(x, order, inverse, packed, config, checked_rows).launch(
        grid=(cute.ceil_div(units, config.warps), 1, 1), block=(config.warps * WARP, 1, 1), stream=stream
    )
