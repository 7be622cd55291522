"""What a thread of a quantised gemm loads and dequantises, on arrays in place of the DSL, against the weights that the formats give.

Lanes are arrays of the 128 threads of a warpgroup. Where their registers stand in the left operand of wgmma is written here as the PTX
ISA has it (9.7.15.5.1, figures of .m64k16 fragments), not taken from the kernel.
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")
import torch

from campaign import sampled
from moe_routing_kernels.experts.cute_quantised import codes_of, takes
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.formats.quantisation import dequantise, quantise
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.gemm.sm90 import dequantise as dequantise_codes
from moe_routing_kernels.gemm.sm90 import quantised_mainloop
from moe_routing_kernels.gemm.sm90.quantised_layout import FLOAT4_BITS, m_blocks_of, repack
from moe_routing_kernels.gemm.sm90.quantised_mainloop import BATCH, BATCHES
from moe_routing_kernels.gemm.sm90.quantised_tile import QuantisedGemm
from moe_routing_kernels.gemm.sm90.tile import Tile

THREADS = np.arange(128)
TAKEN = [name for name, form in WEIGHTS.items() if takes(form, "bf16")]


class Memory:
    """A pointer, per thread, into words."""

    def __init__(self, words, at=0):
        self.words, self.at = words, at

    def __add__(self, offset):
        return Memory(self.words, self.at + offset)


class Held:
    """A thread's registers as an array of words, first mode fastest; the last mode may be left out by `None` before it."""

    def __init__(self, shape, _dtype=None):
        self.shape, self.words = shape, np.zeros((int(np.prod(shape)), 128), np.uint32)
        self.iterator = self.words

    def place(self, at):
        at = at if isinstance(at, tuple) else (at,)
        return at[0] if len(at) == 1 else np.ravel_multi_index(at, self.shape, order="F")

    def __getitem__(self, at):
        if isinstance(at, tuple) and at[0] is None:
            return self.words[at[1] * self.shape[0] : (at[1] + 1) * self.shape[0]]
        return self.words[self.place(at)]

    def __setitem__(self, at, value):
        self.words[self.place(at)] = value


def aligned(place, divby):
    assert (np.asarray(place) % divby == 0).all(), "an address that is not a multiple of what is loaded there"
    return place


def copy(source, target):
    memory, shape = source
    target[:] = memory.words[memory.at + np.arange(shape[0])[:, None]]


def halves(word):
    return np.asarray(word, np.uint32), np.asarray(word, np.uint32) >> 16


def arithmetic(operation, a, b, dtype):
    """Both halves by torch, which rounds to nearest and keeps subnormal numbers."""
    kind = FORMATS[dtype].torch_dtype
    a, b = (
        torch.from_numpy(np.broadcast_to(word, (128,)).astype(np.uint32).view(np.int16).copy()).view(kind)
        for word in (a, b)
    )
    done = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[operation](a, b)
    return done.view(torch.int16).numpy().view(np.uint32)


@pytest.fixture
def lanes(monkeypatch):
    """Numpy in place of the DSL, whose registers are 32-bit words."""
    cute = SimpleNamespace(
        arch=SimpleNamespace(thread_idx=lambda: (THREADS, 0, 0)),
        make_rmem_tensor=Held,
        make_layout=lambda shape: shape,
        make_tensor=lambda memory, shape: (memory, shape) if isinstance(memory, Memory) else memory,
        assume=aligned,
        autovec_copy=copy,
    )
    monkeypatch.setattr(quantised_mainloop, "cute", cute)
    for module in (quantised_mainloop, dequantise_codes):
        monkeypatch.setattr(module, "Uint32", np.uint32)
        monkeypatch.setattr(module, "both", lambda word, half: (halves(word)[half] & 0xFFFF) * np.uint32(0x10001))
    monkeypatch.setattr(dequantise_codes, "arithmetic", arithmetic)
    pattern = dequantise_codes.pattern_of
    monkeypatch.setattr(dequantise_codes, "constant", lambda number, dtype: np.uint32(pattern(number, dtype) * 0x10001))


def operand(registers, dtype):
    """Registers (4, slabs, steps) of a batch as the matrices that the tensor cores take: (slabs, 64, 16 steps)."""
    _, slabs, steps = registers.shape
    matrix = torch.full((slabs, 64, 16 * steps), torch.nan, dtype=FORMATS[dtype].torch_dtype)
    warp, lane = THREADS // 32, THREADS % 32
    for slab in range(slabs):
        for step in range(steps):
            for n in range(4):
                row, column = 16 * warp + lane // 4 + 8 * (n % 2), 16 * step + 2 * (lane % 4) + 8 * (n // 2)
                for half, bits in enumerate(halves(registers[n, slab, step])):
                    numbers = torch.from_numpy((bits & 0xFFFF).astype(np.uint16).view(np.int16)).view(matrix.dtype)
                    matrix[slab, row, column + half] = numbers
    return matrix


def fragments(words, gemm, dtype):
    """All numbers that a tile's warpgroup dequantises, of words (slabs, blocks, words): (slabs, 64, 128 blocks)."""
    slabs, blocks, _ = words.shape
    found = []
    for slab in range(0, slabs, gemm.tile.m_atoms):
        strip = []
        for block in range(blocks):
            stage: list[Any] = [
                SimpleNamespace(iterator=Memory(words[min(slab + n, slabs - 1), block]))
                for n in range(gemm.tile.m_atoms)
            ]
            parameters = [quantised_mainloop.parameters_of(one, gemm) for one in stage]
            mask = dequantise_codes.masks(np.uint32(0), gemm.codes)
            for batch in range(BATCHES):
                registers = quantised_mainloop.dequantise(stage, parameters, batch, mask, gemm)
                assert registers.shape == (4, gemm.tile.m_atoms, BATCH)
                strip.append(operand(registers, dtype))
        found.append(torch.cat(strip, dim=2))
    return torch.cat(found)[:slabs]


def rows_of(rows, gated):
    """Which row of the weights a row of a slab is: (slabs, 64), -1 beyond them."""
    slabs, inside = m_blocks_of(rows, gated), np.arange(64)
    if not gated:
        found = 64 * np.arange(slabs)[:, None] + inside
        return np.where(found < rows, found, -1)
    column = 32 * np.arange(slabs)[:, None] + inside // 16 * 8 + inside % 8
    return np.where(column < rows // 2, column + inside % 16 // 8 * (rows // 2), -1)


@functools.cache
def quantised(name, dtype, rows, columns):
    """Parts of drawn weights (2, rows, columns), and the numbers that they stand for, rounded to the activations' format."""
    w = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(7)) * 0.05
    w[0, 3] *= 40  # an outlier row
    w[1, :, 5:9] = 0
    parts = quantise(w, WEIGHTS[name], dtype)
    if WEIGHTS[name].scale:  # float32 scales are rounded first
        parts["scales"] = parts["scales"].to(FORMATS[dtype].torch_dtype).float()
    dense = torch.empty(w.shape, dtype=torch.float64)
    dequantise(parts, WEIGHTS[name], dense)
    return parts, dense.to(FORMATS[dtype].torch_dtype)


SIZES = [(136, 296, 1), (64, 128, 2)]
# Every format in both types, one of them gated, at a size that changes from one pair of formats to the next.
FRAGMENTS = [
    (name, dtype, (place + (dtype == "fp16")) % 2 == 1, *SIZES[place // 2 % 2])
    for place, name in enumerate(TAKEN)
    for dtype in ("bf16", "fp16")
]


@pytest.mark.parametrize(
    ("name", "dtype", "gated", "rows", "columns", "slabs"), sampled(FRAGMENTS, FRAGMENTS[::3], unpack=True)
)
def test_fragments_are_the_dequantised_weights(lanes, name, dtype, gated, rows, columns, slabs):
    """Bit by bit, at sizes that fill no block; what is beyond the rows is 0, beyond the columns it is finite."""
    parts, dense = quantised(name, dtype, rows, columns)
    codes = codes_of(WEIGHTS[name], dtype)
    gemm = QuantisedGemm(
        rows // 2 if gated else rows, columns, 2, "swiglu" if gated else "", Tile(slabs, 1, 8), codes=codes
    )
    words = repack(parts["elements"], parts["scales"], parts.get("zeros"), codes, gated)
    assert words.shape == (2, gemm.m_blocks, gemm.k_tiles, codes.block_words) and codes.block_words % 32 == 0
    for expert in range(2):
        got = fragments(words[expert].numpy().view(np.uint32), gemm, dtype)
        assert got.isfinite().all()
        where = rows_of(rows, gated)
        assert sorted(where[where >= 0]) == list(range(rows))
        assert (got[torch.from_numpy(where < 0)] == 0).all()
        inside = got[torch.from_numpy(where >= 0)][:, :columns]
        assert (inside == dense[expert, torch.from_numpy(where[where >= 0])]).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "bits"), [("integers", 8), ("integers", 4), ("integers", 2), ("e4m3", 8), ("e5m2", 8)]
)
def test_every_code_becomes_its_number(lanes, kind, bits, dtype):
    """All codes, at every place of a word, with every zero point."""
    name = f"int{bits}z_row" if kind == "integers" else f"{kind}_row"
    codes = codes_of(WEIGHTS[name], dtype)
    numbers = torch.arange(2**bits, dtype=torch.uint8)
    if kind != "integers":
        numbers = numbers[numbers.view(getattr(torch, WEIGHTS[name].element)).float().isfinite()]
    less = 128 if (bits, dtype) == (8, "bf16") else 0
    fold = {("e4m3", "bf16"): 120, ("e5m2", "bf16"): 112, ("e4m3", "fp16"): 8, ("e5m2", "fp16"): 8}.get(
        (kind, dtype), 0
    )
    scale, mask = dequantise_codes.constant(2.0**fold, dtype), dequantise_codes.masks(np.uint32(0), codes)
    for zero in range(2**bits) if kind == "integers" else (0,):
        subtrahend = dequantise_codes.subtrahends(dequantise_codes.constant(float(zero - less), dtype), codes)
        for field in range(codes.fields):
            lower = numbers.numpy().astype(np.uint32).repeat(-(-128 // len(numbers)))
            for first in range(0, len(lower), 128):
                mine = np.resize(lower[first : first + 128], 128)
                noise = np.uint32(0xA5A5A5A5) & ~np.uint32((2**bits - 1) << bits * field) & np.uint32(0xFFFF)
                word = mine << np.uint32(bits * field) | noise | mine[::-1] << np.uint32(16 + bits * field)
                got = dequantise_codes.register(word, field, scale, subtrahend, mask, codes)
                for half, given in ((0, mine), (1, mine[::-1])):
                    value = torch.from_numpy((halves(got)[half] & 0xFFFF).astype(np.uint16).view(np.int16).copy())
                    if kind == "integers":
                        wanted = torch.from_numpy(given.astype(np.float32)) - zero
                    else:
                        wanted = (
                            torch.from_numpy(given.astype(np.uint8).copy())
                            .view(getattr(torch, WEIGHTS[name].element))
                            .float()
                        )
                    assert (value.view(FORMATS[dtype].torch_dtype).float() == wanted).all(), (zero, field)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_4_bit_float_becomes_its_number(lanes, dtype):
    """At every place of a word, whatever stands at the others, the subnormal number and both zeros too."""
    codes, sizes = codes_of(WEIGHTS["mxfp4"], dtype), [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert sorted(sum(FLOAT4_BITS[dtype], ())) == list(range(16)), "each bit of a half of a word is one code's"
    scale = dequantise_codes.constant(2.0 ** {"bf16": 126, "fp16": 14}[dtype], dtype)
    lower = np.arange(128, dtype=np.uint32) % 16
    for field, bits in enumerate(FLOAT4_BITS[dtype]):
        spread = sum((lower >> np.uint32(n) & np.uint32(1)) << np.uint32(bit) for n, bit in enumerate(bits))
        others = np.uint32(0xFFFF & ~sum(1 << bit for bit in bits))
        for noise in (np.uint32(0), np.uint32(0xA5A5), np.uint32(0xFFFF)):
            word = (spread | noise & others) | (spread[::-1] | noise & others) << np.uint32(16)
            got = dequantise_codes.register(word, field, scale, {0: None}, {}, codes)
            for half, given in ((0, lower), (1, lower[::-1])):
                value = torch.from_numpy((halves(got)[half] & 0xFFFF).astype(np.uint16).view(np.int16).copy())
                wanted = [-sizes[code - 8] if code > 7 else sizes[code] for code in given.tolist()]
                assert value.view(FORMATS[dtype].torch_dtype).tolist() == wanted, (field, noise)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_scales_of_usual_weights_keep_their_precision(kind):
    """Beside fp16, a scale of e5m2 is a 57344th of the largest weight: subnormal, unless a power of two is folded into it."""
    codes = codes_of(WEIGHTS[f"{kind}_block128"], "fp16")
    w = torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(3)) * 2048**-0.5
    parts = quantise(w, WEIGHTS[f"{kind}_block128"], "fp16")
    block = repack(parts["elements"], parts["scales"], None, codes, False)[0, 0, 0]
    held = block[codes.words * THREADS.size :].view(torch.float16).double()
    assert (held / held[0] == 1).all() and held[0] >= torch.finfo(torch.float16).tiny, "one scale, and a normal number"
    exponent = torch.log2(held[0] / parts["scales"][0, 0, 0]).round()
    assert abs(held[0] / 2**exponent / parts["scales"][0, 0, 0].double() - 1) <= 2**-11


def test_scales_that_the_format_does_not_hold_are_refused():
    """e4m3 beside bf16 takes scales below 2 ** 8: those of weights up to 448 * 256."""
    codes = codes_of(WEIGHTS["e4m3_row"], "bf16")
    elements, scales = torch.zeros(2, 64, 128, dtype=torch.float8_e4m3fn), torch.full((2, 64, 1), 255.0)
    assert repack(elements, scales, None, codes, False).shape == (2, 1, 1, codes.block_words)
    with pytest.raises(ValueError, match="scales beyond the range of bf16"):
        repack(elements, scales + 1, None, codes, False)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_scales_of_4_bit_floats_are_below_4(dtype):
    """Those of weights up to 12; a scale that is no number (e8m0's 255) is refused too."""
    codes, elements = codes_of(WEIGHTS["mxfp4"], dtype), torch.zeros(2, 64, 64, dtype=torch.uint8)
    for exponent, fits in ((128, True), (129, False), (255, False)):
        scales = torch.full((2, 64, 4), exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        if fits:
            assert repack(elements, scales, None, codes, False).shape == (2, 1, 1, codes.block_words)
            continue
        with pytest.raises(ValueError, match=f"scales beyond the range of {dtype}"):
            repack(elements, scales, None, codes, False)


def test_a_block_of_codes_is_as_large_as_the_format_says():
    """Of 64 x 128 weights with groups of 128: codes, and 2 bytes per scale and zero point; rows of one scale repeat it."""
    for name, each in (
        ("int4_g128", 2),
        ("int4z_g128", 4),
        ("int2_g32", 8),
        ("int8z_g64", 8),
        ("e4m3_row", 2),
        ("mxfp4", 8),
    ):
        codes = codes_of(WEIGHTS[name], "bf16")
        assert codes.block_words * 4 == 64 * (128 * codes.bits // 8 + each), name
