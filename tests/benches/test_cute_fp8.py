"""Scales of GEMMs of 8-bit floats, on arrays in place of the DSL, and which problems and tiles there are."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")
from moe_routing_kernels.experts import Experts, cute_fp8
from moe_routing_kernels.gemm.sm90 import epilogue, fp8_across, fp8_mainloop, fp8_upright
from moe_routing_kernels.gemm.sm90.fp8_mainloop import Fp8Gemm
from moe_routing_kernels.gemm.sm90.tile import Tile

THREADS = np.arange(128)


class Memory:
    """A pointer, per thread, into numbers."""

    def __init__(self, numbers, at: Any = 0):
        self.numbers, self.at = numbers, at

    def __add__(self, offset):
        return Memory(self.numbers, self.at + offset)


def copy(source, target):
    """A thread's neighbouring numbers: `target` is (count, threads)."""
    memory, shape = source
    target[:] = memory.numbers[memory.at + np.arange(shape[0])[:, None]]


@pytest.fixture
def lanes(monkeypatch):
    arch = SimpleNamespace(lane_idx=lambda: THREADS % 32, warp_idx=lambda: THREADS // 32)
    cute = SimpleNamespace(
        arch=arch,
        make_rmem_tensor=lambda shape, _: np.zeros((*shape, 128)),
        make_layout=lambda shape: shape,
        make_tensor=lambda memory, shape: (memory, shape),
        assume=lambda place, divby: place,
        autovec_copy=copy,
    )
    for module in (fp8_mainloop, fp8_upright):
        monkeypatch.setattr(module, "cute", cute)
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(min=np.minimum))
    monkeypatch.setattr(epilogue, "cute", cute)


@pytest.mark.parametrize("columns", [768, 1408, 184])
@pytest.mark.parametrize("activation", ["swiglu", "relu2", ""])
@pytest.mark.parametrize("tile", [Tile(1, 2, 16), Tile(2, 2, 24)])
def test_acc_are_scaled_by_the_blocks_of_their_rows_and_tokens(lanes, columns, activation, tile):
    """Steps of a gemm with drawn acc of each: thread by thread, against scales that are spread over the whole matrix."""
    gemm = Fp8Gemm(columns, 192, 3, activation, tile)
    wide, rng = columns * (2 if gemm.gated else 1), np.random.default_rng(5)
    stages, index, m_atoms, eights = 3, 2, tile.m_atoms, tile.tokens // 8
    w_scales, x_scales = rng.random((3, gemm.blocks, gemm.k_tiles)), rng.random((stages, tile.tokens))
    warp, lane = THREADS // 32, THREADS % 32
    tokens = 8 * np.arange(eights)[:, None] + 2 * (lane % 4) + np.arange(2)[:, None, None]  # token, eight, thread
    for part in range(gemm.m_tiles * tile.sharing):
        column, expert = part * gemm.width, 1
        blocks = fp8_mainloop.scale_places(expert, column, gemm)
        acc: Any = rng.random((2, 2, eights, m_atoms, 128))
        expected = acc.copy()
        for k in range(gemm.k_tiles):
            block_acc: Any = rng.random((2, 2, eights, 128))
            for m_atom in range(m_atoms):
                scales = [w_scales.ravel()[start + k] for start in blocks[m_atom]]
                memory: Any = SimpleNamespace(iterator=Memory(x_scales.ravel()))
                fp8_mainloop.promote(acc, block_acc, m_atom, scales, memory, index)
                for half in range(2):
                    if gemm.gated:
                        row = column + 32 * m_atom + 8 * warp + lane // 4
                        inside, row = row < columns, row + half * columns
                    else:
                        row = column + 64 * m_atom + 16 * warp + lane // 4 + 8 * half
                        inside = row < columns
                    factor = w_scales[expert, np.minimum(row, wide - 1) // 128, k] * x_scales[index][tokens]
                    expected[:, half, :, m_atom] += np.where(inside, factor * block_acc[:, half], 0)
                    acc[:, half, :, m_atom][..., ~inside] = expected[:, half, :, m_atom][..., ~inside]  # never stored
        np.testing.assert_allclose(acc, expected, rtol=1e-12)


# columns, activation, tile
UPRIGHT = [
    (768, "swiglu", Tile(2, 2, 128)),
    (320, "geglu", Tile(2, 2, 128)),
    (768, "relu2", Tile(2, 2, 128)),
    (272, "", Tile(2, 2, 128)),
    (768, "swiglu", Tile(4, 2, 128, across=True)),
    (320, "geglu", Tile(4, 2, 128, across=True)),
    (784, "", Tile(4, 2, 128, across=True)),
    (784, "", Tile(3, 2, 128, across=True)),
]


@pytest.mark.parametrize(("columns", "activation", "tile"), UPRIGHT)
def test_upright_acc_are_scaled_by_the_blocks_of_their_rows_and_tokens(lanes, columns, activation, tile):
    """As above, with tokens on the M side: gates and ups in turns of 8 columns, whose blocks of 128 begin where they will."""
    gemm = Fp8Gemm(columns, 192, 3, activation, tile, upright=True)
    wide, rng = columns * (2 if gemm.gated else 1), np.random.default_rng(6)
    stages, index, expert, eights = 3, 1, 2, gemm.mma_rows // 8
    w_scales, x_scales = rng.random((3, gemm.blocks, gemm.k_tiles)), rng.random((128, stages))
    warp, lane = THREADS // 32, THREADS % 32
    for part, n in itertools.product(range(gemm.m_tiles * tile.parts), range(gemm.sums)):
        column = part * gemm.width
        if tile.across:
            places, kinds = fp8_across.places_of(expert, column, gemm)[n], fp8_across.kinds_of(column, gemm)
        else:
            places = fp8_upright.scale_places(expert, column, gemm)
            kinds = [eight % len(places) for eight in range(eights)]
        atom, first = (
            (int(rng.integers(2)), n * gemm.mma_rows) if tile.across else (n, 0)
        )  # of tokens, and row of weights
        inside = first + 2 * (lane % 4) + np.arange(2)[:, None, None] + 8 * np.arange(eights)[:, None]
        if gemm.gated:
            offset = column + inside // 16 * 8 + inside % 8
            row, stored = offset + inside % 16 // 8 * columns, offset < columns
        else:
            row, stored = column + inside, column + inside < columns
        acc: Any = rng.random((2, 2, eights, gemm.sums, 128))
        expected = acc.copy()
        for k in range(gemm.k_tiles):
            block_acc: Any = rng.random((2, 2, eights, 128))
            factors: Any = np.zeros((2, len(places), 128))
            scales: Any = x_scales
            fp8_upright.load_factors(factors, atom, [w_scales.ravel()[start + k] for start in places], scales, index)
            fp8_upright.promote(acc, block_acc, n, factors, kinds)
            for half in range(2):
                token = 64 * atom + 16 * warp + lane // 4 + 8 * half
                factor = w_scales[expert, np.minimum(row, wide - 1) // 128, k] * x_scales[token, index]
                expected[:, half, :, n] += factor * block_acc[:, half]
        got, expected = acc.swapaxes(1, 2), expected.swapaxes(1, 2)  # columns and eights first
        stored = np.broadcast_to(stored[:, :, None, None], got.shape)
        np.testing.assert_allclose(got[stored], expected[stored], rtol=1e-12)


def test_what_stands_upright():
    """Gates of a warpgroup need one scale, and so do its ups: 64 columns from a multiple of 64 on lie in one block of 128."""
    given = {"rows": 128 * 57, "hidden": 2048}
    for inner, activation, up in (
        (768, "swiglu", True),
        (320, "swiglu", True),
        (208, "swiglu", False),
        (208, "relu2", True),
    ):
        first, second = cute_fp8.gemms(problem(intermediate=inner, activation=activation, **given))
        assert (first.upright, second.upright) == (up, True), (inner, activation)
        assert first.stages >= 3 and second.stages >= 3 and second.tile == Tile(2, 2, 64)
    tall = cute_fp8.gemms(problem(rows=128 * 512, hidden=2048))
    assert all(one.upright and one.tile == Tile(2, 2, 128) for one in tall)
    assert not any(one.upright for one in cute_fp8.gemms(problem(**given | {"rows": 128 * 56})))
    biased = cute_fp8.gemms(problem(hidden=2880, intermediate=2880, activation="swiglu_oai", rows=128 * 100))
    assert not any(one.upright for one in biased), "acc begin with biases where tokens are on the N side"
    with pytest.raises(AssertionError):
        Fp8Gemm(208, 1024, 8, "swiglu", Tile(2, 2, 128), upright=True)


def test_variants_are_of_upright_gemms():
    """By default as they were fastest; the first gemm alone quantises, and with few rows nothing changes."""
    unfused = cute_fp8.Variant(fused=False)
    many, few = problem(rows=128 * 512), problem(rows=128 * 56)
    assert cute_fp8.gemms(many) == cute_fp8.gemms(many, cute_fp8.Variant())
    first, second = cute_fp8.gemms(many)
    assert (first.quantises, second.quantises) == (True, False)
    assert not any(one.quantises for one in cute_fp8.gemms(many, unfused))
    assert cute_fp8.gemms(few, unfused) == cute_fp8.gemms(few)
    with pytest.raises(AssertionError):
        Fp8Gemm(768, 1024, 8, "swiglu", Tile(2, 2, 128), quantises=True)


def test_tiles_across_are_of_tall_tiles_and_of_whole_scales():
    """Not the default; a first gemm without gates would have the columns of two scales, and a short sum has no lead."""
    option = cute_fp8.Variant(across=(4, 3), lead=3)
    first, second = cute_fp8.gemms(problem(rows=128 * 512), option)
    assert (first.tile, second.tile) == (Tile(4, 2, 128, across=True), Tile(3, 2, 128, across=True))
    assert (first.lead, second.lead, first.m_tiles, second.m_tiles) == (3, 3, 6, 11)
    assert (first.width, second.width, first.tile.m, second.tile.m, first.sums, second.sums) == (
        128,
        192,
        256,
        192,
        2,
        1,
    )
    assert cute_fp8.gemms(problem(rows=128 * 300), option) == cute_fp8.gemms(problem(rows=128 * 300))
    first, second = cute_fp8.gemms(problem(rows=128 * 512, activation="relu2", intermediate=256), option)
    assert (first.tile.across, second.tile.across, second.lead) == (False, True, 0)
    refused: list[tuple[Tile, dict[str, Any]]] = [
        (Tile(3, 2, 128, across=True), {}),
        (Tile(4, 2, 128, across=True), {"columns": 208}),
        (Tile(4, 2, 128, across=True), {"upright": False}),
        (Tile(4, 2, 128, across=True), {"lead": 5}),
        (Tile(2, 2, 128), {"lead": 1, "inner": 128}),
    ]
    for tile, changed in refused:
        given = {"columns": 768, "inner": 1024, "experts": 8, "activation": "swiglu", "upright": True} | changed
        with pytest.raises(AssertionError):
            Fp8Gemm(tile=tile, **given)


def problem(**changed: Any):
    given: dict[str, Any] = {
        **{"rows": 512, "hidden": 2048, "intermediate": 768, "experts": 128},
        **{"dtype": "bf16", "packed": "fp8_block128", "weights": "e4m3_block128"},
    }
    return Experts(**given | changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"weights": "e4m3_g128"},
            "rows and weights of bf16, fp8_block128, e4m3_block128, not bf16, fp8_block128, e4m3_g128",
        ),
        ({"packed": "bf16"}, "not bf16, bf16, e4m3_block128"),
        ({"dtype": "fp16"}, "not fp16, fp8_block128, e4m3_block128"),
        ({"intermediate": 776}, "multiples of 16"),
        ({"experts": 1}, "needs 2 to 1024 experts"),
        ({}, None),
        ({"hidden": 2880, "intermediate": 2880, "activation": "swiglu_oai"}, None),
    ],
)
def test_what_it_does_not_take(changed, said):
    reason = cute_fp8.unsupported(problem(**changed))
    assert (said in reason) if said else reason is None


@pytest.mark.parametrize(
    "sizes", [(2048, 768, 128), (7168, 2048, 256), (2880, 2880, 128), (4096, 14336, 8), (352, 192, 1024)]
)
def test_tiles_fit_registers_and_have_three_stages(sizes):
    hidden, inner, experts = sizes
    for rows in (8, 500, 4000, 16000, 300000):
        for gemm in cute_fp8.gemms(problem(rows=rows, hidden=hidden, intermediate=inner, experts=experts)):
            assert gemm.stages >= 3 and gemm.k_tiles == -(-gemm.inner // 64), gemm
            assert (gemm.tile.m_atoms + 1) * gemm.tile.tokens // 2 <= 192  # registers of both acc
            assert gemm.arrivals == 97 and gemm.stage_bytes - gemm.tma_bytes == 4 * gemm.tile.tokens
    with pytest.raises(AssertionError, match="fill registers"):
        Fp8Gemm(768, 1024, 8, "", Tile(2, 2, 136))
