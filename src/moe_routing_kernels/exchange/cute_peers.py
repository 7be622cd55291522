"""The memory of other ranks in CuTe DSL: tensors at their addresses, and flags by which thread blocks of ranks wait for each other."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import AddressSpace

from moe_routing_kernels.cute import VECTOR_BYTES, WARP
from moe_routing_kernels.cute.cache import fake_tensor
from moe_routing_kernels.cute.rows import RowTiling
from moe_routing_kernels.exchange import Letters

OUT, READ, BACK = 0, 1, 2  # slots of flags; from BACK on, one for each part of the way back


def tensor_at(element: Any, address: Any, shape: tuple[int, ...]) -> cute.Tensor:
    """A contiguous tensor at an address."""
    order = tuple(reversed(range(len(shape))))
    return cute.make_tensor(
        cute.make_ptr(element, address, AddressSpace.gmem, assumed_align=VECTOR_BYTES),
        cute.make_ordered_layout(shape, order=order),
    )


def position(tiling: RowTiling, letters: Letters) -> tuple[Any, Any, int]:
    """The thread's place in its group, the first column tile of a token that the group handles, and the groups of all blocks: the step to the next."""
    groups = tiling.threads // tiling.lanes
    thread = cute.arch.thread_idx()[0]
    lane, first = thread % tiling.lanes, cute.arch.block_idx()[0] * groups + thread // tiling.lanes
    return lane, first, letters.blocks * groups


def flag(peers: cute.Tensor, of: Any, slot: Any, source: Any, letters: Letters) -> Any:
    """The address of a flag, in the memory of rank `of`, of this block of the rank `source`."""
    block = cute.arch.block_idx()[0]
    number = (slot * letters.ranks + source) * letters.blocks + block
    return cute.make_ptr(Int32, peers[of] + letters.flags_at + Int64(number) * 4, AddressSpace.gmem, assumed_align=4)


@cute.jit
def say(peers: cute.Tensor, rank: Any, slot: Any, letters: cutlass.Constexpr):
    """Say to this block of all other ranks that the stores of this one have arrived. The second warp does: the first can wait meanwhile."""
    cute.arch.sync_threads()
    other = cute.arch.thread_idx()[0] - WARP
    if other >= 0 and other < letters.ranks and other != rank:
        cute.arch.fence_acq_rel_sys()
        cute.arch.store(flag(peers, other, slot, rank, letters), Int32(1), sem="release", scope="sys")


@cute.jit
def wait(peers: cute.Tensor, rank: Any, limit: Any, failed: Any, slot: Any, letters: cutlass.Constexpr):
    """Wait until the stores of this block of all other ranks have arrived."""
    other = cute.arch.thread_idx()[0]
    if other < letters.ranks and other != rank:
        theirs = flag(peers, rank, slot, other, letters)
        begin, waited = cute.arch.globaltimer(), Int64(0)
        come = cute.arch.load(theirs, Int32, sem="acquire", scope="sys")
        while come == 0 and waited < limit:
            come = cute.arch.load(theirs, Int32, sem="acquire", scope="sys")
            waited = cute.arch.globaltimer() - begin
        if come == 0:
            address = cute.make_ptr(Int32, failed, AddressSpace.gmem, assumed_align=4)
            cute.arch.store(address, Int32(other + 1), sem="relaxed", scope="sys")
        cute.arch.store(theirs, Int32(0), sem="relaxed", scope="sys")
    cute.arch.sync_threads()


@cute.jit
def goes(ids: cute.Tensor, rank: Any, local: cutlass.Constexpr) -> Any:
    """How many of a token's ids (k,) are of the experts of a rank."""
    count = Int32(0)
    for j in cutlass.range_constexpr(cute.size(ids)):
        here = ids[j] - rank * local
        count += Int32(cutlass.select_(here >= 0 and here < local, Int32(1), Int32(0)))
    return count


def place(letters: Letters) -> list[Any]:
    """What says where a rank is: the address of each rank's memory (N,) int64, its number, `limit` and the address `failed`."""
    return [fake_tensor(Int64, letters.ranks), Int32(1), Int64(1), Int64(1)]
