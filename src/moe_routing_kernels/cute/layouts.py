"""How (token, expert, slot, hidden) coordinates map to memory, as CuTe layouts; explained in docs/layouts.md.

A layout is a function from coordinates to offsets, in elements or rows, given by shape and stride. These are the affine
parts of what the kernels do; where a row goes is data (`row_map`) and no layout. Each function is called inside a host
`@cute.jit` function, where static layouts are evaluated while tracing, without a GPU, or inside a kernel.
"""

import cutlass.cute as cute

from moe_routing_kernels.cute.rows import RowTiling


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
