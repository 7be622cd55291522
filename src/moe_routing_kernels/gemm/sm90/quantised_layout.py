"""The layout in which our kernels read quantised weights: blocks of 64 rows and 128 neighbours along K, in the order in which a warpgroup reads them.

A thread of a warpgroup holds four registers, of two 16-bit numbers each, of wgmma's operand A (64 rows times 16 of K). It needs 32 such
registers per block, numbered 4 * k16 + 2 * upper half of the 16 + rows 8 to 15 of its warp's 16. A 32-bit word holds 16 / bits of
them: register f of a word has its first code from bit `bits` * f on and its second 16 bits above, so that a mask takes two codes out
as they lie in the register. A thread's words come in vectors of 16 bytes; neighbouring threads have neighbouring vectors: one load without a
bank conflict. The bits of 4-bit floats are spread over a half of a word as `FLOAT4_BITS` has it. Scales follow the codes of their block, and
zero points the scales:

    block = codes [vector][thread][4 words], then [warp][lane / 4][group][scales of two rows 8 apart, zero points of both]

Scales and zero points are numbers of the activations' format. Scales of floats are multiplied by the power of two by which a number is too small
once its bits stand where a 16-bit float has them; zero points of 8-bit codes with bf16 are 128 less. Scales of a row or of blocks of 128 x 128 are
repeated: 3 % of the bytes of 4-bit codes. Rows beyond the weights' last have the scale 0; beyond K, codes 0 meet zeros of the tokens.

Rows that are gates and ups are interleaved, 8 and 8: a thread's two rows are a gate and its up (`grouped_gemm`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # rows of a block: M of wgmma
DEPTH = 128  # of a block, along K
ROW = -1  # `group` of codes with one scale per row
GROUPS = (32, 64, 128, ROW)
_PAIRS = 32  # of rows 8 apart
_THREADS = 128
_VECTOR = 4  # words that a thread loads at a time
FLOATS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}  # bits by kind
_FOLDED = {  # exponents
    **{("e4m3", "bf16"): 120, ("e5m2", "bf16"): 112, ("e2m1", "bf16"): 126},
    **{("e4m3", "fp16"): 8, ("e5m2", "fp16"): 8, ("e2m1", "fp16"): 14},
}
# At which bits of a half of a word a 4-bit float has its mantissa, its exponent (low bit first) and its sign, per register. Most are as far
# apart as in a 16-bit float: one shift brings them to their places. No other order of 16 bits takes fewer instructions (all were tried).
FLOAT4_BITS = {
    "bf16": ((0, 1, 2, 9), (3, 4, 5, 12), (6, 7, 8, 15), (10, 11, 13, 14)),
    "fp16": ((0, 1, 2, 6), (3, 4, 5, 9), (7, 8, 11, 13), (12, 10, 14, 15)),
}
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Codes:
    """A format of weights for activations of `dtype`."""

    kind: str  # int, e4m3, e5m2 or e2m1
    bits: int  # 8, 4 or 2
    zeros: bool  # zero points per group; else integers have the zero point 2 ** (bits - 1)
    group: int  # neighbours along K that share a scale: one of GROUPS
    dtype: str  # bf16 or fp16

    def __post_init__(self) -> None:
        """Check the kernel's assumptions."""
        assert self.kind in ("int", *FLOATS) and self.bits in (8, 4, 2) and self.dtype in _TORCH, self
        assert self.kind == "int" or (self.bits == FLOATS[self.kind] and not self.zeros), self
        assert self.group in GROUPS, self

    @property
    def fields(self) -> int:
        """Registers whose codes a word holds."""
        return 16 // self.bits

    @property
    def words(self) -> int:
        """Words of codes that a thread has of a block."""
        return 2 * self.bits

    @property
    def groups(self) -> int:
        """Groups of a block along K."""
        return 1 if self.group == ROW else DEPTH // self.group

    @property
    def parameters(self) -> int:
        """Words of scales and zero points per group and pair of rows."""
        return 2 if self.zeros else 1

    @property
    def block_words(self) -> int:
        """Words of a block: a multiple of 32, that is of 128 bytes."""
        return self.words * _THREADS + _PAIRS * self.groups * self.parameters


def m_blocks_of(rows: int, gated: bool) -> int:
    """Blocks of 64 rows that `rows` rows of weights need, gates and ups in equal parts where they are gated."""
    return -(-(rows // 2) // (ROWS // 2)) if gated else -(-rows // ROWS)


def repack(elements: Tensor, scales: Tensor, zeros: Tensor | None, codes: Codes, gated: bool) -> Tensor:
    """Elements (E, N, K * bits / 8) uint8 or (E, N, K) of 8-bit floats, scales (E, N, groups) or (E, N / 128, K / 128), zeros likewise or
    None -> int32 (E, m_blocks, K / 128, `codes.block_words`), rounded up.

    Raises ValueError where a scale is not finite in the activations' format once it is multiplied.
    """
    experts, rows, packed = elements.shape
    columns = packed * 8 // codes.bits
    m_blocks, blocks = m_blocks_of(rows, gated), -(-columns // DEPTH)
    out = torch.empty(experts, m_blocks, blocks, codes.block_words, dtype=torch.int32, device=elements.device)
    for expert in range(experts):  # one at a time: intermediates are several times as large as the weights
        plain = _unpacked(elements[expert].view(torch.uint8), codes.bits)
        out[expert, ..., : codes.words * _THREADS] = _words(_by_m_blocks(plain, m_blocks, blocks * DEPTH, gated), codes)
        parameters = [_of_rows(scales[expert], rows) * 2.0 ** _FOLDED.get((codes.kind, codes.dtype), 0)]
        if zeros is not None:
            parameters.append(
                _of_rows(zeros[expert], rows) - (128.0 if (codes.bits, codes.dtype) == (8, "bf16") else 0.0)
            )
        out[expert, ..., codes.words * _THREADS :] = _parameters(parameters, m_blocks, blocks, codes, gated)
    return out


def _unpacked(elements: Tensor, bits: int) -> Tensor:
    """Bytes (N, K * bits / 8), the first code of a byte in its low bits -> codes (N, K) int32."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=elements.device)
    return ((elements.int()[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _by_m_blocks(x: Tensor, m_blocks: int, columns: int, gated: bool) -> Tensor:
    """x (N, C) -> (m_blocks, 64, columns), zeros where x ends; gates and ups in turns of 8 rows."""
    if gated:
        halves = F.pad(x.unflatten(0, (2, -1)), (0, columns - x.shape[1], 0, m_blocks * ROWS // 2 - x.shape[0] // 2))
        return halves.unflatten(1, (m_blocks, -1, 8)).permute(1, 2, 0, 3, 4).reshape(m_blocks, ROWS, columns)
    return F.pad(x, (0, columns - x.shape[1], 0, m_blocks * ROWS - x.shape[0])).unflatten(0, (m_blocks, ROWS))


def _words(x: Tensor, codes: Codes) -> Tensor:
    """Codes (m_blocks, 64, K) int32 -> the words of each block: (m_blocks, K / 128, `codes.words` * 128) int32."""
    # Row: warp, half, eighth. Column: block, k16, half, quarter, which of two.
    axes = x.unflatten(2, (-1, 8, 2, 4, 2)).unflatten(1, (4, 2, 8))
    # -> m_block, block | k16, half of K, half of rows | warp, eighth, quarter | which
    axes = axes.permute(0, 4, 5, 6, 2, 1, 3, 7, 8)
    # -> m_block, block, word, field, thread, which
    fields = axes.flatten(2, 4).unflatten(2, (codes.words, codes.fields)).flatten(4, 6)
    words = torch.zeros_like(fields[:, :, :, 0, :, 0])
    for field in range(codes.fields):
        for which in range(2):
            words |= _placed(fields[:, :, :, field, :, which], field, codes) << 16 * which
    vectors = words.unflatten(2, (-1, _VECTOR)).transpose(3, 4)  # m_block, block, vector, thread, word of it
    return vectors.flatten(2)


def _placed(x: Tensor, field: int, codes: Codes) -> Tensor:
    """The codes of a register, int32, at their bits of a half of a word."""
    if codes.kind != "e2m1":
        return x << codes.bits * field
    bits = FLOAT4_BITS[codes.dtype][field]
    return torch.stack([(x >> bit & 1) << place for bit, place in enumerate(bits)]).sum(0, dtype=x.dtype)


def _of_rows(parameters: Tensor, rows: int) -> Tensor:
    """Scales or zero points (rows, groups), or (rows / 128, groups) of blocks, of each row: (rows, groups) float32."""
    if len(parameters) == rows:
        return parameters.float()
    return parameters.float().repeat_interleave(128, dim=0)[:rows]


def _parameters(parameters: list[Tensor], m_blocks: int, blocks: int, codes: Codes, gated: bool) -> Tensor:
    """Scales and zero points (N, groups) float32 -> their words (m_blocks, blocks, 32 * groups * parameters) int32."""
    rounded_parameters = []
    for parameter in parameters:
        expanded = parameter.expand(-1, blocks) if codes.group == ROW else parameter
        rounded = _by_m_blocks(expanded, m_blocks, blocks * codes.groups, gated).to(_TORCH[codes.dtype])
        if not rounded.isfinite().all():
            raise ValueError(f"scales beyond the range of {codes.dtype} once {codes.kind} needs them")
        rounded_parameters.append(rounded.unflatten(2, (blocks, -1)).unflatten(1, (4, 2, 8)))
    both = torch.stack(rounded_parameters, dim=-1).permute(
        0, 4, 1, 3, 5, 6, 2
    )  # m_block, block, warp, eighth, group, parameter, half
    return both.contiguous().view(torch.int32).flatten(2)
