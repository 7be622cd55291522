"""Exchange in CuTe DSL: each kernel stores into the memory of other GPUs, says that its stores have arrived, and waits for theirs.

Strategy: a row per (token, rank) that has some of the token's experts. A group of threads holds a column tile of one token: out, it reads
the tile once and stores it to every such rank, with the ids and weights; back, it stores the tile of each sum to the rank of its
token, then adds up the sums that came for its own. Rows have fixed places (rank, token), so that nothing is counted before. Block b of a
rank sets a flag on every other rank after its stores and waits for the flags of their blocks b, which handle the same tokens: out
and back take one launch each, and the host waits for nothing. Back goes in parts with a flag each: what came of one is added up
while the next is on the wire.

Compulsory bytes on the wire: b H + 8 k for each (token, other rank), and b H back; floor: a copy between GPUs.

Invariants:
- All blocks of a grid are resident, else blocks of two ranks could wait for each other: there are no more than multiprocessors.
- Calls of a mailbox go out and back in turn. A rank goes out again only after the sums of all others have come, which they send after their
  experts have read its rows; so rows, sums and flags are free when they are written again, and a block that waits clears the flag. Where rows are
  copied, as for gradients, a kernel of one block after the copy says that they were read; then a rank may go out twice.
- Sums are added in the order of ranks, so results are the same bits in each run.

A wait ends after `limit` nanoseconds; the number of the rank that did not come, plus 1, is then stored to `failed`, which the host reads.

Design: rows with fixed places per token as in DeepEP's low-latency kernels, one row per (token, rank) as in its others.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute import rows as cute_rows
from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, fake_tensor
from moe_routing_kernels.cute.rows import RowTiling, row_tiling
from moe_routing_kernels.exchange import Letters, cute_back
from moe_routing_kernels.exchange.cute_peers import OUT, READ, goes, place, position, say, tensor_at, wait
from moe_routing_kernels.target import Target

THREADS = 512
MOST_VECTORS = 8  # of a row that a thread holds
MOST_PARTS = 4  # of the way back


@cute.jit
def send_choices(
    ids: cute.Tensor,
    weights: cute.Tensor,
    token: Any,
    lane: Any,
    peers: cute.Tensor,
    rank: Any,
    tiling: cutlass.Constexpr,
    letters: cutlass.Constexpr,
):
    """A token's ids and weights to every rank; of a token beyond the last, ids -1."""
    for step in cutlass.range_constexpr(letters.ranks):
        to = (rank + step) % letters.ranks
        of_ids = tensor_at(Int32, peers[to] + letters.ids_at, letters.choices)
        of_weights = tensor_at(cutlass.Float32, peers[to] + letters.weights_at, letters.choices)
        for start in cutlass.range_constexpr(0, letters.top_k, tiling.lanes):
            choice, row = start + lane, rank * letters.tokens + token
            if choice < letters.top_k:
                here = Int32(-1)
                if token < ids.shape[0]:
                    here = ids[token, choice] - to * letters.local
                    of_weights[row, choice] = weights[token, choice]
                of_ids[row, choice] = cutlass.select_(here >= 0 and here < letters.local, here, Int32(-1))


@cute.kernel
def out_kernel(
    x: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    peers: cute.Tensor,
    rank: Int32,
    limit: Int64,
    failed: Int64,
    tiling: cutlass.Constexpr,
    letters: cutlass.Constexpr,
):
    """Rows of x (T, H), with ids (T, k) and weights (T, k), to the ranks of their experts. Ids count from a rank's first expert, -1 elsewhere."""
    element = x.element_type
    lane, first, groups = position(tiling, letters)
    for unit in cutlass.range(first, letters.tokens * tiling.tiles, groups):
        token, tile = unit // tiling.tiles, unit % tiling.tiles
        column = tile * (tiling.lanes * tiling.vectors) + lane
        fragment = cute.make_rmem_tensor((tiling.width, tiling.vectors), element)
        fragment.fill(0)
        chosen = cute.make_rmem_tensor((letters.top_k,), Int32)
        chosen.fill(-1)
        if token < x.shape[0]:
            cute.autovec_copy(ids[token, None], chosen)
            cute_rows.load_row(x, token, column, fragment, tiling)
        for step in cutlass.range_constexpr(letters.ranks):  # each rank begins with another one
            to = (rank + step) % letters.ranks
            if goes(chosen, to, letters.local) > 0:
                rows = tensor_at(element, peers[to], (letters.rows, letters.hidden))
                cute_rows.store_row(fragment, rows, rank * letters.tokens + token, column, tiling)
        if tile == 0:
            send_choices(ids, weights, token, lane, peers, rank, tiling, letters)
    say(peers, rank, OUT, letters)
    wait(peers, rank, limit, failed, OUT, letters)


@cute.jit
def out_host(
    x: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    peers: cute.Tensor,
    rank: Int32,
    limit: Int64,
    failed: Int64,
    tiling: cutlass.Constexpr,
    letters: cutlass.Constexpr,
    stream: Any,
):
    out_kernel(x, ids, weights, peers, rank, limit, failed, tiling, letters).launch(
        grid=(letters.blocks, 1, 1), block=(tiling.threads, 1, 1), stream=stream
    )


@cute.kernel
def read_kernel(peers: cute.Tensor, rank: Int32, limit: Int64, failed: Int64, letters: cutlass.Constexpr):
    """Wait until all ranks have read what came."""
    say(peers, rank, READ, letters)
    wait(peers, rank, limit, failed, READ, letters)


@cute.jit
def read_host(peers: cute.Tensor, rank: Int32, limit: Int64, failed: Int64, letters: cutlass.Constexpr, stream: Any):
    read_kernel(peers, rank, limit, failed, letters).launch(grid=(1, 1, 1), block=(2 * WARP, 1, 1), stream=stream)


def choose(
    ranks: int, local: int, tokens: int, hidden: int, top_k: int, dtype: str, multiprocessors: int
) -> tuple[Letters, RowTiling]:
    """Where everything lies, and how rows are cut: few rows are cut finer, so that they still occupy all multiprocessors."""
    itemsize, vectors = DTYPES[dtype].width // 8, 2 * MOST_VECTORS
    blocks = 0
    while blocks < multiprocessors and vectors > 1:
        vectors //= 2
        tiling = row_tiling(hidden, dtype, vectors, threads=THREADS, streaming=False)
        blocks = tiling.blocks(tokens)
    turns = -(-blocks // multiprocessors)  # tiles that a group handles, one after the other
    parts = -(-turns // -(-turns // MOST_PARTS))
    return Letters(ranks, local, tokens, hidden, top_k, itemsize, min(blocks, multiprocessors), parts), tiling


def of_choices(
    ranks: int, local: int, tokens: int, hidden: int, top_k: int, dtype: str, multiprocessors: int
) -> tuple[Letters, RowTiling]:
    """The same for a float32 per choice of each row, whole vectors of them."""
    return choose(ranks, local, tokens, -(-top_k // 4) * 4, top_k, "fp32", multiprocessors)


@cached
def compile_out(arch: str, dtype: str, letters: Letters, tiling: RowTiling, keep: bool = False) -> Any:
    """Compile the way out for one architecture (no GPU needed). The result is called with x (T, H), ids (T, k), weights (T, k) and `place`."""
    tokens, element = cute.sym_int(), DTYPES[dtype]
    arguments = [
        fake_tensor(element, tokens, letters.hidden),
        fake_tensor(Int32, tokens, letters.top_k),
        fake_tensor(cutlass.Float32, tokens, letters.top_k),
        *place(letters),
        tiling,
        letters,
    ]
    return compile_kernel(out_host, arguments, arch, keep)


@cached
def compile_read(arch: str, letters: Letters, keep: bool = False) -> Any:
    """Compile the wait for all ranks for one architecture (no GPU needed). The result is called with `place`."""
    return compile_kernel(read_host, [*place(letters), letters], arch, keep)


def precompile(
    ranks: int,
    local: int,
    tokens: int,
    hidden: int,
    top_k: int,
    dtype: str,
    target: Target,
    *,
    training: bool = False,
) -> None:
    """Put both kernels of ranks on such GPUs into the cache, and those of gradients if asked for; needs no GPU."""
    sizes = (ranks, local, tokens, hidden, top_k, dtype, target.multiprocessors)
    letters, tiling = choose(*sizes)
    compile_out(target.arch, dtype, letters, tiling)
    cute_back.compile_back(target.arch, dtype, letters, tiling, False)
    if training:
        choices, tiling = of_choices(*sizes)
        cute_back.compile_back(target.arch, "fp32", choices, tiling, False)
        compile_read(target.arch, letters)
