"""Dequantise weights into a workspace in Triton: integers and floats of 8 bits, in one pass.

Strategy: a program has the columns of one group, or 128 of a wider one, in as many rows as make `ELEMENTS` elements; it loads a scale (and
zero point) per row, the codes a byte at a time, and spreads the codes of a byte over neighbouring lanes. Code times scale is computed in
float32 and rounded once, as in `formats.quantisation`: both write the same bits.

Compulsory bytes per weight: bits / 8 read, its share of scales and zero points, 2 written in 16 bits; floor: a stream of that mix.
"""

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.formats.weights import WeightFormat

ELEMENTS = 4096  # of a program: 128 threads with four 16-byte vectors of bf16 each
WIDEST = 128  # columns of a program
CODECS = ("integers", "float8")


@triton.jit
def dequantise_kernel(
    elements_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    INTEGERS: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: COLUMNS columns of ROWS of the rows of all experts, N each, in blocks of BLOCK_ROWS rows and GROUP columns."""
    chunks: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    blocks: tl.constexpr = (N + BLOCK_ROWS - 1) // BLOCK_ROWS
    each: tl.constexpr = 8 // BITS
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = chunk * COLUMNS
    live = row < rows
    block = row // N * blocks + row % N // BLOCK_ROWS
    group = block * groups + first // GROUP
    # load
    scale = tl.load(scales_ptr + group, mask=live).to(tl.float32)
    byte = first // each + tl.arange(0, COLUMNS // each)
    mask = live[:, None] & (byte < K // each)[None, :]
    stored = tl.load(elements_ptr + row[:, None] * (K // each) + byte[None, :], mask=mask)
    # decode
    if INTEGERS:
        shifts = BITS * tl.arange(0, each)
        codes = (stored.to(tl.int32)[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)
        codes = tl.reshape(codes, (ROWS, COLUMNS))
        if ZEROS:
            codes -= tl.load(zeros_ptr + group, mask=live).to(tl.int32)[:, None]
        else:
            codes -= 2 ** (BITS - 1)
        value = codes.to(tl.float32)
    else:
        value = stored.to(tl.float32)
    # store
    column = first + tl.arange(0, COLUMNS)
    out = out_ptr + row[:, None] * K + column[None, :]
    result = (value * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out, result, mask=live[:, None] & (column < K)[None, :])


def unsupported(problem: Experts) -> str | None:
    """Why weights cannot be dequantised by this kernel, or None."""
    form = problem.quantised_weights
    if form is None or form.codec in CODECS:
        return None
    return f"dequantises {' and '.join(CODECS)}, not {form.name}"


def launcher(parts: Mapping[str, Tensor], weight_format: WeightFormat, out: Tensor) -> Callable[[], None]:
    """Bind the parts of weights (E, N, K) by the names of `formats.weights`; the call writes `out` (E, N, K), contiguous."""
    experts, height, width = out.shape
    rows, columns = experts * height, min(weight_format.group_of(width), WIDEST)
    columns = columns if columns in (16, 32, 64) else WIDEST  # a row may be narrower
    most = ELEMENTS // columns
    grid = (triton.cdiv(rows, most) * triton.cdiv(width, columns),)
    scales, elements = parts["scales"], parts["elements"]
    tensors = (elements, scales, parts.get("zeros", scales), out, rows, height, width)
    sizes = {
        "BITS": weight_format.bits,
        "GROUP": weight_format.group_of(width),
        "BLOCK_ROWS": weight_format.rows,
        "ROWS": most,
        "COLUMNS": columns,
    }
    kinds = {"INTEGERS": elements.dtype == torch.uint8, "ZEROS": weight_format.zero_points}
    return lambda: dequantise_kernel[grid](*tensors, **sizes, **kinds)
