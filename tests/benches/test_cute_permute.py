"""How the CuTe permute cuts assignments into tiles and blocks: all are covered, no block is idle, shared memory suffices."""

import pytest

pytest.importorskip("cutlass")
from moe_routing_kernels.permute import Permute, cute_permute
from moe_routing_kernels.permute.cute_chunks import groups_of
from moe_routing_kernels.target import MEASURED

SHARED_MEMORY = 227 << 10  # bytes that a block can have on sm_90; sm_80 has 163 KB
COUNTS = [1, 31, 1024, 1025, 8192, 8193, 65536, 65537, 131072, 360440, 655360, 1081344, 1081345, 2400000, 20000000]


@pytest.mark.parametrize("assignments", COUNTS)
def test_tiles_cover_the_assignments_and_leave_no_block_idle(assignments: int) -> None:
    for experts in (1, 8, 60, 128, 512, 896, 1024):
        check_tiles(assignments, experts)


def check_tiles(assignments: int, experts: int) -> None:
    config, blocks = cute_permute.config_of(Permute(assignments, experts, 1, assignments), "sm_90a")
    tile = config.threads * config.items_per_thread
    tiles = -(-assignments // (blocks * tile))  # of a block, as the kernels compute it
    assert (blocks - 1) * tiles * tile < assignments <= blocks * tiles * tile
    assert config.single_block == (blocks == 1) and config.overlap == (blocks > 1)
    assert tile <= 1 << 16, "a position in the tile has 16 bits"
    warps = config.threads // 32
    assert 4 * (experts * (warps + 7) + tile) <= SHARED_MEMORY
    if assignments > 65536:
        assert blocks <= MEASURED.multiprocessors, "blocks fill an SM each"


@pytest.mark.parametrize(("assignments", "experts", "batches"), [(32768, 128, 1), (163840, 128, 1), (360440, 512, 4)])
def test_few_batches_of_loads_add_up_the_chunks(assignments: int, experts: int, batches: int) -> None:
    config, blocks = cute_permute.config_of(Permute(assignments, experts, 1, assignments), "sm_90a")
    at_once = groups_of(experts, config.threads) * config.chunks_at_once
    assert at_once * (batches - 1) < blocks <= at_once * batches < 2 * blocks + at_once


@pytest.mark.parametrize(
    ("assignments", "experts", "few"), [(32768, 8, True), (131072, 8, True), (32768, 60, False), (16, 8, False)]
)
def test_a_thread_loads_one_count_where_a_block_has_enough(assignments: int, experts: int, few: bool) -> None:
    config, blocks = cute_permute.config_of(Permute(assignments, experts, 1, assignments), "sm_90a")
    assert config.few_chunks == few
    assert not few or blocks * experts <= config.threads
