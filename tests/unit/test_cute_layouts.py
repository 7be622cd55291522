"""The CuTe layouts of docs/layouts.md, evaluated on the CPU: shapes, bijectivity, bounds, and that the kernels do the same."""

import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute

from moe_routing_bench.workload.rows import row_map
from moe_routing_kernels.cute import layouts as layouts
from moe_routing_kernels.cute.compilation import DTYPES
from moe_routing_kernels.cute.rows import RowTiling, position, row_tiling
from moe_routing_kernels.permute.layout import RowLayout, capacity_of

DOCUMENT = Path(__file__).parents[2] / "docs/layouts.md"
TILINGS = {
    "one_tile": row_tiling(4096, "bf16", 4, 128),
    "seven_tiles": row_tiling(7168, "bf16", 4, 128),
    "short_rows": row_tiling(64, "bf16", 4, 128),
    "fp32": row_tiling(2048, "fp32", 2, 256),
    "overhang": row_tiling(2880, "bf16", 4, 128),
    "overhang_and_tiles": row_tiling(2880, "bf16", 2, 128),
    "odd": row_tiling(13, "fp32", 4, 128),
    "odd_and_tiles": row_tiling(4097, "bf16", 1, 128),
    "drawn": RowTiling(hidden=64, width=4, vectors=2, lanes=4, threads=16, streaming=False),
    "drawn_overhang": RowTiling(hidden=52, width=4, vectors=2, lanes=4, threads=16, streaming=False),
}


def evaluate(build, *arguments, coalesced: bool = False):
    """(text, shape, stride) of a static layout: traced in a host function; outside of it the layout is gone."""
    found = {}

    @cute.jit
    def host(found: cutlass.Constexpr):
        layout = build(*arguments)
        layout = cute.coalesce(layout) if coalesced else layout
        found["layout"] = (repr(layout), layout.shape, layout.stride)

    host(found)
    return found["layout"]


def flat(nested) -> list[int]:
    """The numbers of a shape or stride, first mode first."""
    return [n for one in nested for n in flat(one)] if isinstance(nested, tuple) else [int(nested)]


def offsets(build, *arguments) -> np.ndarray:
    """The offset of every coordinate, as an array with one axis for each mode of the flattened shape."""
    _, shape, stride = evaluate(build, *arguments)
    axes = np.meshgrid(*(np.arange(n) * d for n, d in zip(flat(shape), flat(stride), strict=True)), indexing="ij")
    return sum(axes)


@pytest.fixture(params=TILINGS)
def tiling(request) -> RowTiling:
    return TILINGS[request.param]


def whole_blocks(tiling: RowTiling, least: int = 2) -> int:
    """A number of blocks that covers whole rows."""
    groups = tiling.threads // tiling.lanes
    return math.lcm(groups, tiling.tiles) // groups * least


def test_a_block_covers_its_run_once(tiling: RowTiling) -> None:
    """Every element of a run has one thread and value; an instruction of a group touches consecutive elements."""
    values = offsets(layouts.thread_values, tiling)
    groups, run = tiling.threads // tiling.lanes, tiling.width * tiling.vectors * tiling.threads
    assert values.shape == (tiling.lanes, groups, tiling.width, tiling.vectors)
    assert np.array_equal(np.sort(values, axis=None), np.arange(run))
    access = values.transpose(1, 3, 0, 2).reshape(groups, tiling.vectors, -1)
    assert (np.diff(access) == 1).all()


def test_vectors_of_a_row_are_the_row(tiling: RowTiling) -> None:
    vectors = offsets(layouts.vectors_of_row, tiling)
    assert vectors.shape == (tiling.width, tiling.row_vectors)
    assert np.array_equal(vectors.flatten("F"), np.arange(tiling.hidden))
    assert evaluate(layouts.vectors_of_row, tiling, coalesced=True)[0] == f"{tiling.hidden}:1"


def by_the_kernels(tiling: RowTiling, blocks: int, monkeypatch) -> tuple[np.ndarray, np.ndarray]:
    """Address, and whether it is in the row, by (lane, group, element, vector, block): what the kernels compute.

    `position` is called with the index of every thread as a Python number; the rest is the loop of `load_row`.
    """
    groups = tiling.threads // tiling.lanes
    row = np.empty((tiling.lanes, groups, 1, 1, blocks), np.int64)
    first = np.empty_like(row)
    for block in range(blocks):
        for thread in range(tiling.threads):
            monkeypatch.setattr(cute.arch, "thread_idx", lambda thread=thread: (thread, 0, 0))
            monkeypatch.setattr(cute.arch, "block_idx", lambda block=block: (block, 0, 0))
            at = (thread % tiling.lanes, thread // tiling.lanes, 0, 0, block)
            row[at], first[at] = position(tiling)
    vector = first + (np.arange(tiling.vectors) * tiling.lanes).reshape(1, 1, 1, -1, 1)
    element = vector * tiling.width + np.arange(tiling.width).reshape(1, 1, -1, 1, 1)
    return row * tiling.hidden + element, np.broadcast_to(vector < tiling.row_vectors, element.shape)


def test_addresses_are_those_of_the_kernels(tiling: RowTiling, monkeypatch) -> None:
    """Each element of the rows once, none out of bounds; where tiles overhang the row, the column check drops the rest."""
    blocks = whole_blocks(tiling)
    kernels, inside = by_the_kernels(tiling, blocks, monkeypatch)
    in_order = offsets(layouts.addresses, tiling, blocks).ravel("F")  # composition may split the groups' mode in two
    assert np.array_equal(in_order, kernels.ravel("F"))
    rows = tiling.threads // tiling.lanes * blocks // tiling.tiles
    assert np.array_equal(np.sort(kernels[inside]), np.arange(rows * tiling.hidden))
    assert bool(inside.all()) == tiling.exact
    assert tiling.blocks(rows) == blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tiling_that_the_kernels_choose_is_a_layout(dtype: str) -> None:
    for hidden in (1, 8, 13, 85, 100, 151, 1536, 2047, 2048, 2688, 2816, 2880, 3584, 4097, 5000, 5120, 6144, 7168):
        for vectors in (1, 2, 4):
            tiling = row_tiling(hidden, dtype, vectors, 128)
            evaluate(layouts.addresses, tiling, whole_blocks(tiling))


def preset_rows() -> list[int]:
    """The hidden size of every model preset whose rows are at least as many vectors as a block has lanes."""
    presets = yaml.safe_load((DOCUMENT.parents[1] / "config/models.yaml").read_text())
    return sorted({preset["hidden"] for preset in presets.values() if preset["hidden"] >= 1024})


@pytest.mark.parametrize("vectors", [1, 2, 4])
@pytest.mark.parametrize("hidden", preset_rows())
def test_few_lanes_are_idle_on_the_rows_of_models(hidden: int, vectors: int) -> None:
    """At most an eighth, in blocks of whole warps, and in 16-byte vectors."""
    tiling = row_tiling(hidden, "bf16", vectors, 128)
    assert tiling.width == 8 and tiling.vectors <= vectors
    assert tiling.row_vectors >= 7 / 8 * tiling.covered
    assert tiling.lanes % 32 == 0 and 64 <= tiling.threads <= 256


def test_lanes_that_would_be_idle_become_fewer() -> None:
    """gpt-oss: 360 vectors are 2.8 times 128 lanes, and with two vectors per thread 1.4 times: then 64 lanes cover 3 tiles."""
    one, two = (row_tiling(2880, "bf16", vectors, 128) for vectors in (1, 2))
    assert (one.lanes, one.tiles, one.threads) == (128, 3, 128)
    assert (two.lanes, two.tiles, two.vectors) == (64, 3, 2) and two.threads // two.lanes in (1, 3)


def test_not_every_tiling_is_a_layout() -> None:
    """Three tiles that overhang the row, four groups: the next row starts inside a block, with a carry."""
    tiling = RowTiling(hidden=10, width=1, vectors=1, lanes=4, threads=16, streaming=False)
    assert (tiling.tiles, tiling.exact) == (3, False)
    with pytest.raises(Exception, match="unable to compute the following composition"):
        evaluate(layouts.addresses, tiling, whole_blocks(tiling))


TOKENS, EXPERTS, TOP_K, HIDDEN = 40, 4, 2, 6
IDS = np.stack([np.arange(TOKENS) % 3, np.full(TOKENS, 3)], axis=1).astype(np.int32)  # expert 3 gets every token


def known(layout: str, factor: float | None = None):
    """The layout and its row map of IDS."""
    capacity = None if factor is None else capacity_of(factor, TOKENS, TOP_K, EXPERTS)
    rows = RowLayout(TOKENS, TOP_K, EXPERTS, capacity, layout)
    return rows, row_map(rows, IDS)


def test_assignments_are_those_of_order() -> None:
    """(choice, token) counts as `row_map` does, and its token is the kernels' division."""
    _, rows = known("compact")
    index = offsets(layouts.assignments, TOKENS, TOP_K)
    assert np.array_equal(rows.order[rows.inverse], index.T)
    token = offsets(layouts.token_of, TOKENS, TOP_K).flatten("F")
    assert np.array_equal(token[rows.order], rows.order // TOP_K)


def test_pack_reads_each_token_row_for_each_choice() -> None:
    """In bounds of x, each element k times."""
    source = offsets(layouts.token_rows, TOKENS, TOP_K, HIDDEN)
    assert source.shape == (HIDDEN, TOP_K, TOKENS)
    assert np.array_equal(np.bincount(source.ravel(), minlength=TOKENS * HIDDEN), np.full(TOKENS * HIDDEN, TOP_K))


def test_padded_rows_are_those_of_the_row_map() -> None:
    """Bijective and in bounds; a kept assignment's row is (slot, expert) of the layout; experts start at the complement."""
    layout, rows = known("padded", 1.25)
    capacity = layout.capacity
    assert capacity == 25
    packed = offsets(layouts.padded_rows, HIDDEN, capacity, EXPERTS)
    assert np.array_equal(packed.flatten("F"), np.arange(len(rows.order) * HIDDEN))
    starts = offsets(layouts.expert_starts, HIDDEN, capacity, EXPERTS)
    assert np.array_equal(starts, rows.offsets[:-1] * HIDDEN)
    assert (rows.inverse < 0).sum() == TOKENS - capacity
    for token, choice in np.argwhere(rows.inverse >= 0):
        expert = IDS[token, choice]
        slot = int((IDS[:token] == expert).sum())  # the tokens before it that chose the expert
        assert packed[0, slot, expert] == rows.inverse[token, choice] * HIDDEN


def test_aligned_blocks_have_one_expert_each() -> None:
    """Bijective; every expert starts on a block; no block holds assignments of two experts."""
    layout, rows = known("block64")
    blocks = offsets(layouts.aligned_blocks, len(rows.order), layout.align)
    assert blocks.shape == (64, len(rows.order) // 64)
    assert np.array_equal(blocks.flatten("F"), np.arange(len(rows.order)))
    assert set(rows.offsets) <= set(blocks[0]) | {len(rows.order)}
    expert = np.where(rows.order < 0, -1, IDS.ravel()[rows.order])[blocks]
    for column in expert.T:
        assert len(set(column) - {-1}) <= 1


SHOWN = {
    "row": (lambda: cute.make_layout(64),),
    "vectors_of_row": (layouts.vectors_of_row, TILINGS["drawn"]),
    "access": (lambda: cute.make_layout((4, 4)),),
    "complement of access in tile": (lambda: cute.complement(cute.make_layout((4, 4)), 32),),
    "complement of tile in block": (lambda: cute.complement(cute.make_layout(32), 128),),
    "thread_values": (layouts.thread_values, TILINGS["drawn"]),
    "addresses": (layouts.addresses, TILINGS["drawn"], 2),
    "addresses, overhang": (layouts.addresses, TILINGS["drawn_overhang"], 2),
    "addresses, bf16, H=4096": (layouts.addresses, TILINGS["one_tile"], 16384),
    "addresses, bf16, H=7168": (layouts.addresses, TILINGS["seven_tiles"], 28672),
    "assignments": (layouts.assignments, 6, 2),
    "token_of": (layouts.token_of, 6, 2),
    "token_rows": (layouts.token_rows, 6, 2, 64),
    "padded_rows": (layouts.padded_rows, 64, 5, 3),
    "expert_starts": (layouts.expert_starts, 64, 5, 3),
    "aligned_blocks": (layouts.aligned_blocks, 16, 4),
}


def test_the_document_shows_what_is_computed() -> None:
    """Every row `name` | `layout` of its tables."""
    shown = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", DOCUMENT.read_text(), flags=re.M))
    assert shown == {name: evaluate(*call)[0] for name, call in SHOWN.items()}


def test_the_pictures_are_as_drawn() -> None:
    """The script gives the files in the repository byte for byte."""
    folder = DOCUMENT.parent / "img"
    pictures = runpy.run_path(str(folder / "draw.py"))["PICTURES"]
    assert {path.name for path in folder.glob("*.svg")} == set(pictures)
    for name, draw in pictures.items():
        assert draw() == (folder / name).read_text(), name
