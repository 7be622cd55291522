"""vLLM's `moe_wna16_marlin_gemm` in plain torch, which finds each code where a thread of the kernel has it."""

import torch
from torch import Tensor

UINT4, UINT4B8, UINT8B128 = 1125899906843648, 1125899907892224, 1125899923621888  # of vLLM's scalar_type.py
E4M3, E2M1 = 2814749767172868, 562949953487106
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def codes(words: Tensor, bits: int, columns: int, rows: int) -> Tensor:
    """Words (K / 16, N * bits / 2) -> codes (K, N): which thread of a product m16n8k16 has a column and row of weights, and where."""
    k, n = torch.arange(columns)[:, None], torch.arange(rows)
    thread, product = n % 8 * 4 + k % 8 // 2, n // 16 % 4
    at = n // 8 % 2 * 4 + k % 16 // 8 * 2 + k % 2  # of the 8 codes of a thread and two products
    if bits == 4:
        word, place = thread * 4 + product, at // 2 + at % 2 * 4
    else:
        word, place = (thread * 4 + product) * 2 + at // 4, at % 4 // 2 + at % 2 * 2
    word = word + n // 64 * 32 * bits
    return (words[k // 16, word].long() >> (bits * place)) & (2**bits - 1)


def of_strips(rows: int) -> Tensor:
    """Where the scales of each row are among those of a group."""
    n = torch.arange(rows)
    return n // 64 * 64 + n % 8 * 8 + n % 64 // 8


def of_rows(rows: int) -> Tensor:
    """Where the scales of each whole row, and biases, are."""
    n = torch.arange(rows)
    return n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2


def weights(kind: int, words: Tensor, scales: Tensor, zeros: Tensor | None, columns: int, rows: int) -> Tensor:
    """One expert's weights (K, N) float32."""
    found = codes(words, 8 if kind in (UINT8B128, E4M3) else 4, columns, rows)
    group = torch.arange(columns) * len(scales) // columns
    place = of_rows(rows) if len(scales) == 1 else of_strips(rows)
    if kind == E2M1:
        place = place // 4 * 4 + torch.tensor([0, 2, 1, 3])[place % 4]
    each = scales.float()[group][:, place]
    if kind == E2M1:
        return torch.tensor(NUMBERS + tuple(-one for one in NUMBERS))[found] * each
    if kind == E4M3:
        bias = 120 if scales.dtype == torch.bfloat16 else 8
        return found.to(torch.uint8).view(torch.float8_e4m3fn).float() * (each * 2.0**-bias)
    if kind == UINT4:
        assert zeros is not None
        at = of_strips(rows)
        zero = (zeros.long()[:, at // 8] >> (4 * (at % 8 // 2 + at % 2 * 4))) & 15
        return (found - zero[group]) * each
    return (found - {UINT4B8: 8, UINT8B128: 128}[kind]) * each


def marlin_gemm(
    a,
    c,
    words,
    bias,
    scales,
    a_scales,
    whole,
    zeros,
    locks,
    order,
    blocks,
    total,
    weight,
    block,
    k,
    weighted,
    kind,
    m,
    n,
    depth,
    *how,
) -> Tensor:
    """The operator, with what `marlin` may not give it asserted."""
    assert (a_scales, whole, k, weighted, how) == (None, None, 1, False, (False, True, False, -1, -1, -1))
    assert a.shape == (m, depth) and c.shape == (m, n) and a.is_contiguous() and weight.dtype == torch.float32
    assert all(one is None or one.is_contiguous() for one in (words, scales, zeros, bias, c, order, blocks))
    assert (zeros is None) == (kind != UINT4) and locks.eq(0).all() and scales.shape[2] == n
    assert scales.dtype == (torch.float8_e8m0fnu if kind == E2M1 else a.dtype) and len(order) == len(blocks) * block
    for number in range(int(total) // block):
        expert, rows = int(blocks[number]), order[number * block : (number + 1) * block]
        rows = rows[rows < m].long()
        one = weights(kind, words[expert], scales[expert], None if zeros is None else zeros[expert], depth, n)
        sums = a[rows].float() @ one
        c[rows] = (sums if bias is None else sums + bias[expert, of_rows(n)].float()).to(c.dtype)
    return c
