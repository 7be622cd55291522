"""Draws the pictures of docs/layouts.md from the layouts and row maps themselves: `python docs/img/draw.py` rewrites them.

Plain SVG text, the same bytes wherever it runs; a test compares.
"""

import itertools
import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
import numpy as np

from moe_routing_bench.workload.row_map import row_map
from moe_routing_kernels.cute.rows import RowTiling
from moe_routing_kernels.permute import RowLayout, capacity_of

sys.path.append(str(Path(__file__).parents[1]))
from layouts import DRAWN, OVERHANG, addresses

COLOURS = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6")
EMPTY, EDGE = "#ffffff", "#555555"
IDS = np.array([[0, 1], [0, 2], [0, 1], [1, 0], [0, 2], [0, 1]], np.int32)  # expert 0 is asked for by every token


def text(x: float, y: float, words: object, size: int = 11, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: object = "", dashed: bool = False) -> str:
    """A cell with its label."""
    dash = ' stroke-dasharray="3 2"' if dashed else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{EDGE}"{dash}/>'
    return shape + (text(x + width / 2, y + height / 2 + 4, words) if words != "" else "")


def svg(width: int, height: int, parts: list[str]) -> str:
    """One picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def vector_owners(tiling: RowTiling, blocks: int) -> list[tuple[int, int, int, int]]:
    """(address, block, thread, vector) of the first element of every vector, from `addresses`."""
    owners: list[tuple[int, int, int, int]] = []

    def own() -> None:  # outside of the traced function, where a loop would be one of the kernel's
        layout = addresses(tiling, blocks)
        for block, vector, thread in itertools.product(range(blocks), range(tiling.vectors), range(tiling.threads)):
            index = thread + tiling.threads * tiling.width * (vector + tiling.vectors * block)
            owners.append((int(layout(index)), block, thread, vector))

    @cute.jit
    def host(own: cutlass.Constexpr):
        own()

    host(own)
    return owners


def tiling_panel(tiling: RowTiling, top: int) -> list[str]:
    """Two blocks of a tiling: each cell a vector, labelled thread.vector, coloured by group; overhang is dashed."""
    parts, wide, tall = [], 46, 24
    padded = tiling.lanes * tiling.vectors * tiling.tiles
    for index, (address, block, thread, vector) in enumerate(vector_owners(tiling, 2)):
        group, lane = divmod(thread, tiling.lanes)
        tile = block * (tiling.threads // tiling.lanes) + group
        row, column = divmod(address // tiling.width, tiling.row_vectors)
        at = tile % tiling.tiles * tiling.lanes * tiling.vectors + vector * tiling.lanes + lane
        over = at >= tiling.row_vectors
        row, column = (tile // tiling.tiles, at) if over else (row, column)
        fill = EMPTY if over else COLOURS[group]
        parts.append(box(60 + wide * column, top + 18 + tall * row, wide, tall, fill, f"{thread}.{vector}", over))
        if index % tiling.threads == 0 and vector == 0:
            parts.append(text(52, top + 34 + tall * row, f"block {block}", anchor="end"))
    cut = "cover the row" if tiling.exact else "overhang the row: dashed cells fail the column check"
    title = f"hidden {tiling.hidden}: {tiling.row_vectors} vectors of {tiling.width}; {tiling.tiles} tiles of {padded // tiling.tiles} {cut}"
    return [text(60, top + 10, title, 12, "start"), *parts]


def row_tiling() -> str:
    """How two blocks of 16 threads cover the rows of a matrix."""
    parts = [
        *tiling_panel(DRAWN, 10),
        *tiling_panel(OVERHANG, 150),
        text(
            60, 288, "cell: thread.vector of one 4-element vector; colour: group of 4 lanes in its block", 11, "start"
        ),
    ]
    return svg(820, 300, parts)


def stack(title: str, layout: str, factor: float | None, left: int) -> list[str]:
    """The rows of one layout, from `row_map`."""
    tokens, top_k = IDS.shape
    capacity = None if factor is None else capacity_of(factor, tokens, top_k, 3)
    known = row_map(RowLayout(tokens, top_k, 3, capacity, layout), IDS)
    parts = [text(left + 45, 20, title, 12)]
    for row, assignment in enumerate(known.order):
        expert = int(np.searchsorted(known.offsets, row, "right")) - 1
        words = "" if assignment < 0 else f"{assignment // top_k}.{assignment % top_k}"
        parts.append(box(left, 30 + 22 * row, 90, 22, COLOURS[expert] if words else EMPTY, words, not words))
    for expert, (first, last) in enumerate(zip(known.offsets, known.offsets[1:], strict=False)):
        if last > first:
            parts.append(text(left + 96, 45 + 22 * int(first), f"e{expert} from {first}", anchor="start"))
    dropped = [f"{t}.{j}" for t, j in np.argwhere(known.inverse < 0)]
    if dropped:
        parts.append(text(left, 48 + 22 * len(known.order), f"dropped: {', '.join(dropped)}", anchor="start"))
    return parts


def row_maps() -> str:
    """The assignments of six tokens in the three row layouts."""
    parts = [text(60, 20, "topk_ids", 12)]
    for (token, choice), expert in np.ndenumerate(IDS):
        parts.append(box(15 + 45 * choice, 30 + 22 * token, 45, 22, COLOURS[expert], f"{token}.{choice} e{expert}"))
    for left, known in zip(
        (160, 340, 540),
        (("compact", "compact", None), ("padded, capacity 5", "padded", 1.25), ("blocks of 4", "block4", None)),
        strict=True,
    ):
        parts += stack(*known, left)
    return svg(720, 400, parts)


PICTURES = {"row-tiling.svg": row_tiling, "row-maps.svg": row_maps}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw())
