"""How kernels cut rows among threads, and the page that explains it: every element once, few lanes idle, tables as computed."""

import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("cutlass")
import cutlass.cute as cute

from moe_routing_kernels.cute.cache import DTYPES
from moe_routing_kernels.cute.rows import RowTiling, position, row_tiling

DOCS = Path(__file__).parents[2] / "docs"
TILINGS = {
    "one_tile": row_tiling(4096, "bf16", 4, 128),
    "seven_tiles": row_tiling(7168, "bf16", 4, 128),
    "short_rows": row_tiling(64, "bf16", 4, 128),
    "fp32": row_tiling(2048, "fp32", 2, 256),
    "overhang": row_tiling(2880, "bf16", 4, 128),
    "overhang_and_tiles": row_tiling(2880, "bf16", 2, 128),
    "odd": row_tiling(13, "fp32", 4, 128),
    "odd_and_tiles": row_tiling(4097, "bf16", 1, 128),
    "four_groups": RowTiling(hidden=64, width=4, vectors=2, lanes=4, threads=16, streaming=False),
    "four_groups_overhang": RowTiling(hidden=52, width=4, vectors=2, lanes=4, threads=16, streaming=False),
}


@pytest.fixture(params=TILINGS)
def tiling(request) -> RowTiling:
    return TILINGS[request.param]


def whole_blocks(tiling: RowTiling, least: int = 2) -> int:
    """A number of blocks that covers whole rows."""
    groups = tiling.threads // tiling.lanes
    return math.lcm(groups, tiling.tiles) // groups * least


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


def test_every_element_of_the_rows_has_one_thread(tiling: RowTiling, monkeypatch) -> None:
    """None out of bounds: where tiles overhang the row, the column check drops the rest. A group's access is contiguous."""
    blocks = whole_blocks(tiling)
    addresses, inside = by_the_kernels(tiling, blocks, monkeypatch)
    rows = tiling.threads // tiling.lanes * blocks // tiling.tiles
    assert np.array_equal(np.sort(addresses[inside]), np.arange(rows * tiling.hidden))
    assert bool(inside.all()) == tiling.exact and tiling.blocks(rows) == blocks
    access = addresses.transpose(1, 3, 4, 0, 2).reshape(-1, tiling.lanes * tiling.width)
    assert (np.diff(access) == 1).all()


def preset_rows() -> list[int]:
    """The hidden size of every model preset whose rows are at least as many vectors as a block has lanes."""
    presets = yaml.safe_load((DOCS.parent / "config/models.yaml").read_text())
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


@pytest.fixture(scope="module")
def page() -> dict:
    """What docs/layouts.py defines."""
    return runpy.run_path(str(DOCS / "layouts.py"))


def test_the_page_shows_what_is_computed(page: dict) -> None:
    """Every row `name` | `layout` of its tables."""
    shown = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", (DOCS / "layouts.md").read_text(), flags=re.M))
    assert shown == {name: page["evaluated"](*call)[0] for name, call in page["SHOWN"].items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tiling_that_the_kernels_choose_is_a_layout(dtype: str, page: dict) -> None:
    for hidden in (1, 13, 100, 151, 1536, 2048, 2880, 4097, 5000, 7168):
        for vectors in (1, 2, 4):
            tiling = row_tiling(hidden, dtype, vectors, 128)
            page["evaluated"](page["addresses"], tiling, whole_blocks(tiling))


def test_the_pictures_are_as_drawn() -> None:
    """The script gives the files in the repository byte for byte."""
    pictures = runpy.run_path(str(DOCS / "img/draw.py"))["PICTURES"]
    assert {path.name for path in (DOCS / "img").glob("*.svg")} == set(pictures)
    for name, draw in pictures.items():
        assert draw() == (DOCS / "img" / name).read_text(), name
