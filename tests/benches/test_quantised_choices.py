"""Which tiles GEMMs with quantised weights get, that they fit a multiprocessor, and what is repacked when."""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")
import numpy as np
import torch

from moe_routing_kernels.experts import Experts, cute_quantised
from moe_routing_kernels.experts.cute_quantised import Config
from moe_routing_kernels.formats.quantisation import quantise
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.gemm.sm90 import schedule
from moe_routing_kernels.gemm.sm90.quantised_tile import SYSTEM_BYTES
from moe_routing_kernels.gemm.sm90.tile import SHARED_BYTES, Tile

SIZES = [(2048, 768, 128), (7168, 2048, 256), (2880, 2880, 128), (4096, 14336, 8), (352, 184, 60)]


def problem(weights="int4_g128", rows=512, hidden=2048, inner=768, experts=128, dtype="bf16", **more):
    return Experts(rows, hidden, inner, experts, dtype, more.pop("packed", dtype), weights, **more)


@pytest.mark.parametrize("weights", [name for name, form in WEIGHTS.items() if cute_quantised.takes(form, "bf16")])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_gemm_has_enough_stages(weights, sizes):
    """At least three, so that one is loaded while one is multiplied and one released, in what each of its blocks may have."""
    for rows in (1, 8, 60, 500, 4000, 16000, 60000, 300000):
        for gemm in cute_quantised.gemms(problem(weights, rows, *sizes)):
            rest = gemm.epi_tokens * gemm.epi_pitch * 2 * gemm.tile.warpgroups + 8 * (gemm.experts + 1)
            rest += (
                4 * (gemm.splits - 1) * 64 * gemm.tile.m_atoms * gemm.tile.tokens
            )  # accumulators that are handed over
            used = gemm.stages * (gemm.stage_bytes + 16) + rest + 1024  # barriers; where rows are aligned
            assert gemm.stages >= 3 and gemm.resident * (used + SYSTEM_BYTES) <= SHARED_BYTES + SYSTEM_BYTES
            assert gemm.stages >= 2 * gemm.splits and gemm.stages % gemm.splits == 0
            assert gemm.resident * gemm.threads <= 1024, "each has 64 registers, at least"
            if gemm.resident == 1:  # they move from those who load to those who multiply
                loads, multiplies = gemm.registers
                assert 128 * loads + 128 * gemm.tile.warpgroups * multiplies <= 65536


FEW = [Config(Tile(2, 1, 8), 2, 3), Config(Tile(2, 1, 8), 2, 2), Config(Tile(1, 1, 8), 2, 2), Config(Tile(2, 1, 8), 4)]
SHARED, TALL = Config(Tile(1, 2, 192, narrowest=128, grain=32)), Config(Tile(2, 2, 128))


@pytest.mark.parametrize(
    ("weights", "rows", "first", "second"),
    [  # the fastest of those that were measured (docs/notebook.md), at Qwen3-30B-A3B
        ("int4_g128", 8, FEW[0], FEW[2]),
        ("int4_g128", 64, FEW[1], FEW[3]),
        ("int2_g128", 512, FEW[1], FEW[3]),
        ("int4_g64", 8, FEW[2], FEW[2]),
        ("int4_g32", 8, Config(Tile(1, 1, 8), 3), Config(Tile(1, 1, 8), 3)),
        ("e4m3_g128", 8, FEW[2], FEW[2]),
        ("int8_g128", 512, Config(Tile(1, 2, 8), 2), Config(Tile(1, 2, 8), 2)),
        ("int4_g128", 128 * 16, Config(Tile(1, 2, 24), 2), Config(Tile(1, 2, 24), 2)),
        ("int2_g128", 128 * 16, Config(Tile(2, 2, 24)), Config(Tile(2, 2, 24))),
        ("int4_g128", 128 * 84, Config(Tile(2, 2, 96)), Config(Tile(2, 2, 96))),
        ("int4_g128", 128 * 85, SHARED, SHARED),
        ("int4_g128", 128 * 191, SHARED, SHARED),
        ("int4_g128", 128 * 192, TALL, TALL),
        ("int4_g128", 128 * 1024, TALL, TALL),
    ],
)
def test_configurations_of_qwen3(weights, rows, first, second):
    both = cute_quantised.gemms(problem(weights, rows=rows))
    assert [Config(one.tile, one.resident, one.splits) for one in both] == [first, second]
    assert (both[0].signals, both[1].waits) == (("early", "rows") if rows <= 4096 else ("", ""))
    assert all(one.few == (one.tile.tokens == 8) for one in both)


@pytest.mark.parametrize(
    ("rows", "experts", "tokens"),
    [
        (610, 8, (112, 112)),  # seed 003 has this, uneven: 16 tiles of weights for each of 8 experts
        (8 * 74, 8, (96, 96)),  # of so few on average hardly any has more
        (8 * 84, 8, (112, 112)),
        (9 * 80, 9, (96, 96)),  # 144 tiles are two waves, whatever they hold
    ],
)
def test_in_one_wave_a_tile_has_room_for_uneven_loads(rows, experts, tokens):
    both = cute_quantised.gemms(problem(rows=rows, hidden=4096, inner=2048, experts=experts))
    assert tuple(one.tile.tokens for one in both) == tokens and all(one.tile.m_atoms == 2 for one in both)


def test_a_short_depth_is_not_split_further_than_it_has_stages():
    """48 columns are one stage of the second gemm, and a split one would wait for a second that never comes."""
    first, second = cute_quantised.gemms(problem(rows=2, hidden=256, inner=48, experts=8))
    assert (first.splits, second.splits) == (2, 1)
    with pytest.raises(AssertionError, match="each has a stage"):
        replace(second, splits=2)
    with pytest.raises(AssertionError, match="share its rows or its depth"):
        replace(first, tile=Tile(1, 2, 8))


def test_a_tile_has_the_narrowest_form_that_holds_it(monkeypatch):
    monkeypatch.setattr(schedule.cutlass, "max", max)
    for tile in (cute_quantised._SHARED, Tile(2, 2, 176, narrowest=88)):
        for rows in range(1, tile.tokens + 1):
            assert schedule.n_of(0, rows, tile) == min(one for one in tile.n_sizes if one >= rows)
    with pytest.raises(AssertionError, match="the widest is one of them"):
        Tile(1, 2, 256, narrowest=128, grain=24)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weights": "bf16"}, "takes quantised weights, not bf16"),
        ({"weights": "nvfp4"}, "not nvfp4 with bf16"),
        ({"dtype": "fp32"}, "not int4_g128 with fp32"),
        ({"packed": "fp8_row"}, "rows need the format of the activations, bf16, not fp8_row"),
        ({"inner": 764}, "multiples of 8"),
        ({"hidden": 8}, "hidden and intermediate of 16, at least"),
        ({"experts": 1}, "needs 2 to 1024 experts"),
        ({}, None),
    ],
)
def test_what_it_does_not_take(changed, said):
    reason = cute_quantised.unsupported(problem(**changed))
    assert (said in reason) if said else reason is None


def test_weights_are_repacked_once_and_again_when_they_change():
    """For all calls that are bound with them; a copy of them is other weights."""
    parts = quantise(torch.randn(2, 64, 128), WEIGHTS["int4_g128"], "bf16")
    first, _ = cute_quantised.gemms(problem(hidden=128, inner=32, experts=2))
    one = cute_quantised.repacked(first, parts)
    assert cute_quantised.repacked(first, parts) is one
    copy = cute_quantised.repacked(first, {name: part.clone() for name, part in parts.items()})
    assert copy is not one and torch.equal(copy, one)
    parts["elements"][0, 0, 0] ^= 1
    other = cute_quantised.repacked(first, parts)
    assert np.count_nonzero(other.numpy() != one.numpy()) == 1
    parts["scales"][1, 5, 0] *= 2
    assert np.count_nonzero(cute_quantised.repacked(first, parts).numpy() != other.numpy()) == 1
