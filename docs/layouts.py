"""The layouts of layouts.md, evaluated without a GPU: `python docs/layouts.py` prints the rows of its tables.

A layout is a function from coordinates to offsets, in elements or rows, given by shape and stride. CuTe evaluates static layouts while it
traces a host function.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute

from moe_routing_kernels.cute.rows import RowTiling, row_tiling

DRAWN = RowTiling(hidden=64, width=4, vectors=2, lanes=4, threads=16, streaming=False)
OVERHANG = RowTiling(hidden=52, width=4, vectors=2, lanes=4, threads=16, streaming=False)


def vectors_of_row(tiling: RowTiling) -> cute.Layout:
    """(width, row_vectors) -> element of a row: the row divided into memory instructions."""
    return cute.logical_divide(cute.make_layout(tiling.hidden), cute.make_layout(tiling.width))


def thread_values(tiling: RowTiling) -> cute.Layout:
    """((lane, group), (element, vector)) -> element of the run of tiles that a thread block covers.

    The lanes of a group take neighbouring vectors; the complement of that access in a tile is what each thread repeats,
    and the complement of a tile in the block is what the groups are.
    """
    access = cute.make_layout((tiling.width, tiling.lanes))
    tile = tiling.width * tiling.lanes * tiling.vectors
    repeats = cute.complement(access, tile)
    groups = cute.complement(cute.make_layout(tile), tile * (tiling.threads // tiling.lanes))
    return cute.make_layout(
        ((tiling.lanes, groups.shape), (tiling.width, repeats.shape)),
        stride=((tiling.width, groups.stride), (1, repeats.stride)),
    )


def addresses(tiling: RowTiling, blocks: int) -> cute.Layout:
    """(thread, value, block) -> element of a contiguous (rows, hidden) matrix, for every thread of `blocks` blocks.

    Where tiles overhang the row, the overhang has addresses of the next row (the kernels check columns there), and the
    tiles of a row must divide the groups of a block, or these divide them: otherwise a row starts inside a block with a
    carry, composition raises, and only division with remainder (`rows.position`) says where.
    """
    values = thread_values(tiling)
    run = cute.size(values)
    padded = tiling.width * tiling.lanes * tiling.vectors * tiling.tiles
    matrix = cute.make_layout((padded, -(-run * blocks // padded)), stride=(1, tiling.hidden))
    everything = cute.make_layout((*values.shape, blocks), stride=(*values.stride, run))
    return cute.composition(matrix, everything)


def assignments(tokens: int, top_k: int) -> cute.Layout:
    """(choice, token) -> assignment: the index that `order` holds, and the offset in (T, k) `inverse` and `weights`."""
    return cute.make_layout((top_k, tokens))


def token_of(tokens: int, top_k: int) -> cute.Layout:
    """assignment -> token: stride 0 forgets the choice."""
    return cute.make_layout((top_k, tokens), stride=(0, 1))


def token_rows(tokens: int, top_k: int, hidden: int) -> cute.Layout:
    """(hidden, assignment) -> element of x (T, H): each token row seen k times, which is what pack reads."""
    rows = cute.make_layout((hidden, tokens))
    return cute.composition(rows, (cute.make_layout(hidden), token_of(tokens, top_k)))


def padded_rows(hidden: int, capacity: int, experts: int) -> cute.Layout:
    """(hidden, slot, expert) -> element of packed rows in the layout `padded`."""
    return cute.make_layout((hidden, capacity, experts))


def expert_starts(hidden: int, capacity: int, experts: int) -> cute.Layout:
    """expert -> first element in `padded` rows: the complement of one expert's rows in all."""
    return cute.complement(cute.make_layout((hidden, capacity)), hidden * capacity * experts)


def aligned_blocks(rows: int, block: int) -> cute.Layout:
    """(row in block, block) -> row in the layout blockN; all rows of a block are of one expert, which a table names."""
    return cute.logical_divide(cute.make_layout(rows), cute.make_layout(block))


SHOWN: dict[str, tuple[Callable, ...]] = {
    "row": (lambda: cute.make_layout(64),),
    "vectors_of_row": (vectors_of_row, DRAWN),
    "access": (lambda: cute.make_layout((4, 4)),),
    "complement of access in tile": (lambda: cute.complement(cute.make_layout((4, 4)), 32),),
    "complement of tile in block": (lambda: cute.complement(cute.make_layout(32), 128),),
    "thread_values": (thread_values, DRAWN),
    "addresses": (addresses, DRAWN, 2),
    "addresses, overhang": (addresses, OVERHANG, 2),
    "addresses, bf16, H=4096": (addresses, row_tiling(4096, "bf16", 4, 128), 16384),
    "addresses, bf16, H=7168": (addresses, row_tiling(7168, "bf16", 4, 128), 28672),
    "assignments": (assignments, 6, 2),
    "token_of": (token_of, 6, 2),
    "token_rows": (token_rows, 6, 2, 64),
    "padded_rows": (padded_rows, 64, 5, 3),
    "expert_starts": (expert_starts, 64, 5, 3),
    "aligned_blocks": (aligned_blocks, 16, 4),
}


def evaluated(build: Callable, *arguments: Any) -> tuple[str, Any, Any]:
    """The text, shape and stride of a static layout: outside the traced function the layout is gone."""
    found: dict[str, tuple[str, Any, Any]] = {}

    @cute.jit
    def host(found: cutlass.Constexpr):
        layout = build(*arguments)
        found["layout"] = (repr(layout), layout.shape, layout.stride)

    host(found)
    return found["layout"]


if __name__ == "__main__":
    for name, (build, *arguments) in SHOWN.items():
        print(f"| `{name}` | `{evaluated(build, *arguments)[0]}` |")
