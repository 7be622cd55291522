"""How a gemm's epilogue rounds, quantises and orders its accumulators, on arrays in place of the DSL, against rows that torch quantises.

Lanes are arrays of the 128 threads of a warpgroup. Where `stmatrix` writes what a lane holds is written here as the PTX ISA has it
(9.7.14.5.16), not taken from the kernel.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")
import torch

from moe_routing_kernels.formats import FORMATS, LEAST_AMAX
from moe_routing_kernels.gemm.sm90 import fp8_mainloop, fp8_quantise
from moe_routing_kernels.gemm.sm90.fp8_mainloop import Fp8Gemm
from moe_routing_kernels.gemm.sm90.tile import RESERVED, SHARED_BYTES, Tile

THREADS = np.arange(128)
WARP, LANE = THREADS // 32, THREADS % 32
TILE, ACROSS = Tile(2, 2, 128), Tile(4, 2, 128, across=True)


class Memory:
    """A pointer, per thread, into bytes."""

    def __init__(self, numbers, at: Any = 0):
        self.numbers, self.at = numbers, at

    def __add__(self, offset):
        return Memory(self.numbers, self.at + offset)


class Registers:
    """Numbers of each thread, (count, threads)."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __setitem__(self, at, value):
        self.numbers[at] = value

    def store(self, numbers):
        self.numbers = numbers

    def load(self):
        return self

    def to(self, dtype):
        return e4m3(self.numbers)


def e4m3(numbers):
    """Bytes of float32, saturated as the kernel's conversion does it."""
    return torch.tensor(numbers).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def bf16(numbers):
    """The bits of float32, rounded."""
    return torch.tensor(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def number(bits):
    return (bits << np.uint32(16)).view(np.float32)


def stmatrix(atom, held, target):
    """A warp's four 8 x 8 matrices of 16 bits: lane 8 q + r gives row r of matrix q, lane l holds two elements of row l / 4 of each."""
    (registers, _), (memory, _) = held, target
    numbers = registers.numbers[registers.at : registers.at + 16].reshape(4, 4, 128)  # matrix, byte
    for thread in THREADS:
        for matrix in range(4):
            address = memory.at[thread // 32 * 32 + 8 * matrix + thread % 32 // 4] + thread % 4 * 4
            memory.numbers[thread // 32, address : address + 4] = numbers[matrix, :, thread]


@pytest.fixture
def lanes(monkeypatch):
    cute = SimpleNamespace(
        arch=SimpleNamespace(
            lane_idx=lambda: LANE,
            warp_idx=lambda: WARP,
            fmax=np.maximum,
            rcp_approx=lambda x: np.float32(1) / np.maximum(x, np.float32(LEAST_AMAX)),
        ),
        make_rmem_tensor=lambda shape, _: Registers(np.zeros((*shape, 128), np.float32)),
        make_layout=lambda shape: shape,
        make_tensor=lambda memory, shape: (memory, shape),
        make_copy_atom=lambda *_: None,
        recast_tensor=lambda held, _: SimpleNamespace(iterator=Pairs(held.numbers)),
        recast_ptr=lambda memory, dtype: memory,
        assume=lambda place, divby: place,
        copy=stmatrix,
    )
    for name, found in {
        "cute": cute,
        "Float32": np.float32,
        "cutlass": SimpleNamespace(select_=np.where),
        "activate": lambda gate, up, _: gate if up is None else gate * up,
        "rounded_pair": lambda low, high: bf16(low) | bf16(high) << 16,
        "numbers_of": lambda word: [number(word & 0xFFFF), number(word >> 16)],
        "magnitudes": lambda word: word & 0x7FFF7FFF,
        "larger": lambda a, b: np.maximum(a & 0xFFFF, b & 0xFFFF) | np.maximum(a >> 16, b >> 16) << 16,
    }.items():
        monkeypatch.setattr(fp8_quantise, name, found)


class Pairs:
    """A pointer into bytes of threads' registers that counts pairs of them."""

    def __init__(self, numbers, at=0):
        self.numbers, self.at = numbers, at

    def __add__(self, offset):
        return Pairs(self.numbers, self.at + 2 * offset)


def spread(rows, slab, gated):
    """The accumulators (2 columns, 2 tokens 8 apart, eights) of a slab per thread, of (tokens, columns) and, gated, of ups behind."""
    token, width = 64 * slab + 16 * WARP + LANE // 4, rows.shape[1]
    found = np.zeros((2, 2, width // 8, 128), np.float32)
    for eight in range(width // 8):
        for half in range(2):
            for i in range(2):
                inside = 2 * (LANE % 4) + i
                column = (eight // 2 * 8 + inside + width // 2 * (eight % 2)) if gated else 8 * eight + inside
                found[i, half, eight] = rows[token + 8 * half, column]
    return found


@pytest.mark.parametrize(("activation", "tile"), [("swiglu", TILE), ("relu2", TILE), ("swiglu", ACROSS)])
def test_rows_are_those_that_are_rounded_and_then_quantised(lanes, activation, tile):
    """Elements and scales of 128 tokens; in one group, of zeros, the scale is 1."""
    gemm = Fp8Gemm(768, 1024, 8, activation, tile, upright=True, quantises=True)
    rng, width = np.random.default_rng(3), gemm.width
    columns = 2 * width if gemm.gated else width
    rows = (rng.standard_normal((128, columns)) * 2.0 ** rng.integers(-20, 20, (128, 1))).astype(np.float32)
    rows[5] = 0
    activated = rows[:, :width] * rows[:, width:] if gemm.gated else rows
    rounded = torch.tensor(activated).bfloat16().float().numpy()
    for slab in range(2):
        acc: Any = spread(rows, slab, gemm.gated)[:, :, :, None]
        words: Any = np.zeros((width // 4, 1, 128), np.uint32)
        largest = fp8_quantise.round_mma(acc, words, 0, gemm)
        factors = []
        for half in range(2):
            token = fp8_quantise.token_of(slab, half)
            amax = largest[half].reshape(32, 4).max(1).repeat(4)  # of the four lanes that a token has
            np.testing.assert_array_equal(amax, abs(rounded).max(1)[token])
            scale, factor = fp8_quantise.scale_and_factor(amax)
            np.testing.assert_array_equal(scale, np.where(amax < LEAST_AMAX, 1, amax * np.float32(1 / 448)))
            factors.append(factor)
        for start in range(0, width, 64):
            memory = np.zeros((4, 16 * gemm.epi_pitch), np.uint8)  # a part of the buffer per warp
            part: Any = [words[start // 4 + n, 0] for n in range(16)]
            held_factors: Any = np.array(factors)
            place: Any = Memory(memory)
            fp8_quantise.quantise_part(part, held_factors, place, gemm.epi_pitch)
            held = memory.reshape(4, 16, gemm.epi_pitch)[:, :, :64].copy().view(np.uint32).reshape(64, 4, 4)
            got = np.stack(fp8_quantise.in_order([held[..., n] for n in range(4)]), axis=-1)
            got = np.ascontiguousarray(got).view(np.uint8).reshape(64, 64)
            token = 64 * slab + np.arange(64)
            amax = abs(rounded).max(1)[token]
            factor = np.where(amax < LEAST_AMAX, 1, np.float32(448) * (np.float32(1) / np.maximum(amax, LEAST_AMAX)))
            expected = e4m3(rounded[token, start : start + 64] * factor.astype(np.float32)[:, None])
            np.testing.assert_array_equal(got, expected)
            assert len(np.unique(got)) > 100


@pytest.mark.parametrize("columns", [768, 320, 64])
@pytest.mark.parametrize("activation", ["geglu", "relu2"])
@pytest.mark.parametrize("tokens", [64, 128])
def test_largest_values_fit_beside_the_stages(columns, activation, tokens):
    """The kernel's shared memory, and blocks of columns as the formats count them."""
    gemm = Fp8Gemm(columns, 1024, 1024, activation, Tile(2, 2, tokens), upright=True, quantises=True)
    places = 4 * tokens * 2 * gemm.slots
    buffers, tables = 2 * gemm.epi_tokens * gemm.epi_pitch, 2 * 4 * (gemm.experts + 1)
    assert gemm.stages * gemm.stage_bytes + places + buffers + tables + RESERVED <= SHARED_BYTES
    groups = FORMATS["fp8_block128"].scales_per_row(columns)
    firsts = range(0, columns, gemm.width)
    assert {first // fp8_mainloop.BLOCK for first in firsts} == set(range(groups))
