"""What warps multiply where a quantised gemm has tiles of 8 tokens, on arrays in place of the DSL, against the weights that the formats give.

Lanes are arrays of the 128 threads of a warpgroup. Numbers are float64, where a subtraction of accumulators loses nothing: what is off was loaded
or multiplied wrongly. Which numbers ldmatrix gives to a lane, and where those of mma stand in its matrices, is written here as the PTX
ISA has it (ldmatrix .m8n8.x4, fragments of mma .m16n8k16 of 16-bit floats), not taken from the kernel.
"""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("cutlass")
import torch
from test_quantised_layout import FRAGMENTS, THREADS, Held, Memory, aligned, halves, lanes, quantised, rows_of  # noqa: F401 (a fixture)

from moe_routing_kernels.experts.cute_quantised import codes_of
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.formats.quantisation import dequantise
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.gemm.sm90 import quantised_warp
from moe_routing_kernels.gemm.sm90.quantised_layout import repack
from moe_routing_kernels.gemm.sm90.quantised_tile import QuantisedGemm
from moe_routing_kernels.gemm.sm90.tile import Tile

pytestmark = pytest.mark.usefixtures("lanes")
WARP, LANE = THREADS // 32, THREADS % 32
ROW, PAIR = LANE // 4, 2 * (LANE % 4)  # where a lane has two of 8 x 8 numbers
TOKENS, DEPTH = 8, 128  # of a stage
# Rows and columns, which fill no block, the slabs of a tile, and the warpgroups that split it.
SIZES = [(136, 296, 2, 2), (104, 160, 1, 1)]
# Every format, in one of both types (test_quantised_layout has both), one of both sizes, gated or not.
CASES = [
    (*case[:3], *SIZES[(place // 4 + place) % 2]) for place, case in enumerate(FRAGMENTS) if place % 2 == place // 6 % 2
]


class Registers(Held):
    """Those of any type: words, or numbers, all as float64. What is in them at first is no number."""

    def __init__(self, shape, dtype=None, words=None):
        self.shape = self.layout = tuple(np.hstack(shape).tolist())
        start, kind = (0x7FFF7FFF, np.uint32) if dtype is np.uint32 else (np.nan, np.float64)
        self.words = np.full((np.prod(self.shape), 128), start, kind) if words is None else words
        self.element_type, self.iterator, self.fill = dtype, Memory(self.words), self.words.fill

    def __getitem__(self, at):
        if isinstance(at, tuple) and at[0] is None:
            size = np.prod(self.shape[:-1])
            return Registers(self.shape[:-1], self.element_type, self.words[at[-1] * size : (at[-1] + 1) * size])
        return super().__getitem__(at)


def recast(pointer, swizzle=(3, 4, 3), dtype=""):
    """Words of registers as numbers of 16 bits, the lower ones first; of shared memory, a pointer that does not permute."""
    words = getattr(pointer, "words", pointer)
    if words.ndim == 1:
        assert swizzle[0] == 0, "addresses are permuted already"
        return Memory(words)
    bits = (np.stack(halves(words), 1) & 0xFFFF).astype(np.uint16).reshape(-1, 128)
    return Memory(torch.from_numpy(bits.view(np.int16)).view(FORMATS[dtype].torch_dtype).double().numpy())


def tensor(pointer, shape):
    """Shared memory remains a pointer."""
    if pointer.words.ndim == 1:
        return pointer
    return Registers(shape, words=pointer.words[pointer.at :][: np.prod(np.hstack(shape))])


def ldmatrix(atom, source, target):
    """Lane 8 q + r names row r of matrix q, of which lane l gets two numbers of row l / 4."""
    assert atom == {"transpose": False, "num_matrices": 4} and (source.at % 8 == 0).all()
    for q in range(4):
        row = source.at[32 * WARP + 8 * q + ROW]
        for half in range(2):
            target.words[2 * q + half] = source.words[row + PAIR + half]


def mma(atom, target, a, b, c):
    """Of each of four warps, 16 x 16 times 16 x 8."""
    assert atom[1:] == (np.float64, (16, 8, 16)) and (a.shape, b.shape) == ((2, 2, 2, 1), (2, 2, 1))
    left, right = np.empty((4, 16, 16)), np.empty((4, 16, 8))
    for n in range(8):
        left[WARP, ROW + 8 * (n // 2 % 2), PAIR + 8 * (n // 4) + n % 2] = a.words[n]
    for n in range(4):
        right[WARP, PAIR + 8 * (n // 2) + n % 2, ROW] = b.words[n]
    done = left @ right
    for n in range(4):
        target.words[n] = c.words[n] + done[WARP, ROW + 8 * (n // 2), PAIR + n % 2]


@pytest.fixture(autouse=True)
def mma_calls(monkeypatch):
    """Numpy in place of the DSL. Barriers point to what is called with the index of their stage. Counts the MMAs."""
    made, same = Mock(side_effect=mma), lambda value, *_: value
    arch = SimpleNamespace(
        lane_idx=lambda: LANE, mbarrier_wait=lambda at, phase: at.words(at.at, phase), sync_warp=Mock()
    )
    held = {"make_rmem_tensor": Registers, "make_tensor": tensor, "make_layout": same, "size": lambda it: len(it.words)}
    pointers = {"recast_ptr": recast, "make_swizzle": lambda *bits: bits, "assume": aligned}
    done = {"make_copy_atom": same, "copy": ldmatrix, "make_mma_atom": same, "gemm": made}
    loops = {"range_constexpr": range, "range": lambda *bounds, unroll: range(*bounds), "const_expr": same}
    fakes = {
        "cute": SimpleNamespace(arch=arch, **held, **pointers, **done),
        "cutlass": SimpleNamespace(**loops),
        "warp": SimpleNamespace(LdMatrix8x8x16bOp=lambda **kind: kind, MmaF16BF16Op=lambda *kind: kind),
        "tokens_of": quantised_warp.tokens_of.__wrapped__,
        "release": lambda at: at.words(at.at),
        "skip": lambda at, phase, steps, stages: ((at + steps) % stages, phase ^ (at + steps) // stages % 2),
        **{"Float32": np.float64, "Int32": int, "Uint32": np.uint32},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(quantised_warp, name, fake)
    return made


def written(x):
    """A stage of tokens x (8, 128) as TMA writes it: halves of 128 bytes per token, whose pieces of 16 are permuted."""
    token, column = np.indices(x.shape)
    stage = np.empty(x.size)
    stage[column // 64 * 512 + token * 64 + (column % 64 // 8 ^ token) * 8 + column % 8] = x
    return stage


def multiply(words, x, dtype, gemm):
    """All that a tile's warpgroups multiply, of words (slabs, blocks, words) and x (8, 128 blocks): (slabs, 64, 8).

    A stage has its block from when it is waited for until it is released. The ring turns over after the first one.
    """
    stages, each = gemm.stages, gemm.tile.m_atoms
    slabs, ring, held = range(-(-len(words) // each) * each), np.full((stages, TOKENS * DEPTH), np.nan), {}

    def fill(index, phase):
        block = (index + 1) % stages
        assert phase == (block > 0)
        ring[index] = written(x[:, block * DEPTH : (block + 1) * DEPTH])
        for slab in slabs:
            held[None, slab, index] = SimpleNamespace(iterator=Memory(words[min(slab, len(words) - 1), block]))

    def clear(index):
        ring[index] = np.nan
        for slab in slabs:
            del held[None, slab, index]

    tokens = SimpleNamespace(element_type=dtype, iterator=ring.reshape(-1))
    full, empty, out = Memory(fill), Memory(clear), np.zeros((len(slabs), 64, TOKENS))
    for share, consumer in np.ndindex(len(slabs) // each, gemm.splits):
        acc = Registers((4, each), words=np.full((4 * each, 128), np.nan if consumer else 0.0))
        place = (stages - 1, 0, share, consumer)  # the last stage, before the ring's phase changes
        quantised_warp.mainloop.__wrapped__(TOKENS, held, tokens, acc, full, empty, *place, 0, gemm)
        assert not held, "a stage is not released"
        for slab, n in np.ndindex(each, 4):
            out[share * each + slab, 16 * WARP + ROW + 8 * (n // 2), PAIR + n % 2] += acc.words[4 * slab + n]
    return out[: len(words)]


def given(name, dtype, gated, rows, columns, slabs, splits):
    """The numbers of drawn weights (2, rows, columns), those of integers not rounded to the activations' format, their words, and the gemm."""
    parts, dense = quantised(name, dtype, rows, columns)
    codes, exact = codes_of(WEIGHTS[name], dtype), dense.double()
    if codes.kind == "int":
        dequantise(parts, WEIGHTS[name], exact)
    shape = (rows // 2 if gated else rows, columns, 2, "swiglu" if gated else "", Tile(slabs, 1, TOKENS))
    words = repack(parts["elements"], parts["scales"], parts.get("zeros"), codes, gated)
    gemm = QuantisedGemm(*shape, codes=codes, resident=splits, splits=splits)
    return exact.numpy(), words.numpy().view(np.uint32), gemm


@pytest.mark.parametrize(("name", "dtype", "gated", "rows", "columns", "slabs", "splits"), CASES)
def test_sums_are_those_of_the_weights(name, dtype, gated, rows, columns, slabs, splits):
    """Of integers those of code less zero point times scale, which nothing rounds; 0 beyond the rows."""
    w, words, gemm = given(name, dtype, gated, rows, columns, slabs, splits)
    x = torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(5)).to(FORMATS[dtype].torch_dtype)
    x, where = x.double().numpy(), rows_of(rows, gated)
    padded = np.pad(x, ((0, 0), (0, -columns % DEPTH)))
    for expert in range(2):
        got, mine = multiply(words[expert], padded, dtype, gemm), w[expert, where[where >= 0]]
        assert (got[where < 0] == 0).all()
        assert (np.abs(got[where >= 0] - mine @ x.T) <= 1e-12 * (np.abs(mine) @ np.abs(x.T))).all()


def test_tokens_are_loaded_as_the_right_operand():
    """Of each step of 16, from a stage among others."""
    x, stages = np.arange(TOKENS * DEPTH).reshape(TOKENS, DEPTH), np.full((4, TOKENS * DEPTH), np.nan)
    stages[2] = written(x)
    got = quantised_warp.tokens_of(SimpleNamespace(element_type="bf16", iterator=stages.reshape(-1)), 2).words
    for step, n in np.ndindex(8, 4):
        assert (got[4 * step + n] == x[ROW, 16 * step + 8 * (n // 2) + PAIR + n % 2]).all()


@pytest.mark.parametrize("slabs", [1, 2])
@pytest.mark.parametrize(
    ("name", "once", "each"),
    [
        ("int4_g32", 1, 1),
        ("int4z_g32", 0, 2),
        ("int8z_g64", 0, 2),
        ("int8_g128", 0, 1),
        ("e4m3_row", 0, 1),
        ("mxfp4", 0, 1),
    ],
)
def test_offsets_without_zero_points_are_summed_once(mma_calls, name, once, each, slabs):
    """For all slabs of a stage, by 8 MMAs; with zero points for each slab, and never where nothing is subtracted."""
    _, words, gemm = given(name, "bf16", False, 64 * slabs, DEPTH, slabs, 1)
    multiply(words[0], np.zeros((TOKENS, DEPTH)), "bf16", gemm)
    assert mma_calls.call_count == 8 * (once + each * slabs)
