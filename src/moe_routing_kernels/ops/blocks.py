"""Experts in plain torch that read nothing on the host: batched GEMMs over blocks of rows, each of a single expert.

What runs on CUDA where no kernel does, such as float32 and float64: it can be captured in a CUDA graph, forward and backward.

Strategy: the rows of each expert are cut into blocks of the mean of rows per expert, rounded up to a power of two, at least `LEAST` and
at most `MOST` rows. R / height + E blocks suffice whatever the routing; lanes without a row are zero. A block multiplies a copy of its
expert's weights, so that as many blocks go into a batched GEMM as their copies fit `COPIES` bytes. The gradients of weights are added
up in `reference.wide`, block by block: an addition of many at a time would need atomics.

FLOPs: up to three times those of the rows, as lanes idle. Bytes: the weights of each block, three times.

Invariants: the same bits in each run; rows of no expert are zero in every result, and add nothing to any gradient.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_routing_kernels.experts.common import experts_of_rows
from moe_routing_kernels.ops.reference import activated, activation_gradient, wide

LEAST, MOST = 8, 128  # rows of a block
COPIES = 256 << 20  # bytes of weights that are copied at a time


class Blocks(NamedTuple):
    """Which rows lie in which lanes of blocks of equal height."""

    expert: Tensor  # (B,) of each block
    row: Tensor  # (B, height) of each lane
    empty: Tensor  # (B, height, 1) whether a lane has no row
    lane: Tensor  # (R,) of each row, in all blocks
    nowhere: Tensor  # (R, 1) whether a row is of no expert

    def cut(self, rows: Tensor) -> Tensor:
        """rows (R, H) -> (B, height, H), zero where a lane has no row."""
        return rows.index_select(0, self.row.flatten()).view(*self.row.shape, -1).masked_fill_(self.empty, 0)

    def joined(self, lanes: Tensor) -> Tensor:
        """(B, height, H) -> rows (R, H), zero where a row is of no expert."""
        return lanes.flatten(0, 1).index_select(0, self.lane).masked_fill_(self.nowhere, 0)

    def parts(self, *weights: Tensor) -> Iterator[slice]:
        """Blocks whose copies of the weights (E, ...) fit `COPIES` bytes."""
        size = sum(weight[0].numel() * max(4, weight.element_size()) for weight in weights)
        step = max(1, COPIES // max(1, size))
        for first in range(0, len(self.expert), step):
            yield slice(first, first + step)


def blocks_of(offsets: Tensor, rows: int) -> Blocks:
    """The blocks of `rows` rows, at least one, that offsets (E + 1,) gives to experts."""
    experts, starts = len(offsets) - 1, offsets.long()
    height = min(MOST, max(LEAST, 1 << max(0, (rows - 1) // experts).bit_length()))
    first = torch.nn.functional.pad(((starts.diff() + height - 1) // height).cumsum(0), (1, 0))
    number = torch.arange(rows // height + min(experts, rows), device=offsets.device)
    expert = torch.searchsorted(first[1:], number, right=True).clamp_max(experts - 1)
    row = (starts[expert] + (number - first[expert]) * height).unsqueeze(1) + torch.arange(
        height, device=offsets.device
    )
    empty = (row >= starts[expert + 1].unsqueeze(1)).unsqueeze(2)  # all lanes of a block beyond the last
    of_row, numbers = experts_of_rows(starts, rows), torch.arange(rows, device=offsets.device)
    inside = numbers - starts[of_row]
    lane = (first[of_row] + inside // height) * height + inside % height
    nowhere = (numbers >= starts[-1]).unsqueeze(1)
    return Blocks(expert, row.clamp_max(rows - 1), empty, lane.clamp_max(len(number) * height - 1), nowhere)


def experts(
    rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, activation: str, b13: Tensor | None, b2: Tensor | None
) -> Tensor:
    """rows (R, H), offsets (E + 1,), w13 (E, N, H), w2 (E, H, I), biases -> y (R, H); zero in rows of no expert."""
    if not rows.numel():
        return rows.new_zeros(rows.shape)
    blocks = blocks_of(offsets, rows.shape[0])
    x = blocks.cut(rows)
    y = x.new_empty(x.shape)
    for part in blocks.parts(w13, w2):
        chosen = blocks.expert[part]
        inner = activated(activation, _gemm(x[part], w13, b13, chosen), rows.dtype)
        y[part] = _gemm(inner, w2, b2, chosen)
    return blocks.joined(y)


def _gemm(x: Tensor, weights: Tensor, biases: Tensor | None, chosen: Tensor) -> Tensor:
    """Blocks x (b, height, K) times weights (E, N, K) of the chosen experts (b,), and their biases -> (b, height, N), of `wide`."""
    dtype = wide(x.dtype)
    out = torch.bmm(x.to(dtype), weights.index_select(0, chosen).to(dtype).mT)
    return out if biases is None else out.add_(biases.index_select(0, chosen).unsqueeze(1))


def experts_backward(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    b2: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """grad (R, H) of y -> those of rows, w13, w2, b13 and b2 that are `wanted`, None for each other one."""
    likes = (grad, w13, w2, b13, b2)
    pairs = zip(likes, wanted, strict=True)
    totals = [
        like.new_zeros(like.shape, dtype=wide(like.dtype)) if of_it and like is not None else None
        for like, of_it in pairs
    ]
    if grad.numel() and any(wanted):
        blocks = blocks_of(offsets, grad.shape[0])
        totals[0] = _add_up(blocks, blocks.cut(grad), blocks.cut(rows), w13, w2, activation, b13, totals)
    return [total if total is None else total.to(grad.dtype) for total in totals]


def _add_up(
    blocks: Blocks,
    grad: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    b13: Tensor | None,
    totals: list[Tensor | None],
) -> Tensor | None:
    """Add the gradients of weights and biases to those `totals` that are there, and return that of rows, if it is: (R, H)."""
    d_rows, d_w13, d_w2, d_b13, d_b2 = totals
    through = d_rows is not None or d_w13 is not None or d_b13 is not None
    d_x = None if d_rows is None else grad.new_empty(grad.shape)
    for part in blocks.parts(w13, w2):
        chosen, empty, d_y = blocks.expert[part], blocks.empty[part], grad[part].to(wide(grad.dtype))
        if d_b2 is not None:
            _add(d_b2, chosen, d_y.sum(1))
        if not through and d_w2 is None:
            continue
        preact = _gemm(x[part], w13, b13, chosen)
        if d_w2 is not None:  # an infinite weight makes NaN of a lane without a row
            inner = activated(activation, preact, grad.dtype).masked_fill_(empty, 0)
            _add(d_w2, chosen, torch.bmm(d_y.mT, inner))
        if not through:
            continue
        d_inner = torch.bmm(d_y, w2.index_select(0, chosen).to(d_y.dtype))
        d_preact = activation_gradient(activation, preact, d_inner).masked_fill_(empty, 0)
        if d_b13 is not None:
            _add(d_b13, chosen, d_preact.sum(1))
        if d_w13 is not None:
            _add(d_w13, chosen, torch.bmm(d_preact.mT, x[part].to(d_preact.dtype)))
        if d_x is not None:
            d_x[part] = torch.bmm(d_preact, w13.index_select(0, chosen).to(d_preact.dtype))
    return None if d_x is None else blocks.joined(d_x)


def _add(total: Tensor, chosen: Tensor, gradients: Tensor) -> None:
    """Add the gradients (b, ...) of blocks to the total (E, ...) of their experts (b,), one after another."""
    for block in range(len(chosen)):
        total.index_add_(0, chosen[block : block + 1], gradients[block : block + 1])
