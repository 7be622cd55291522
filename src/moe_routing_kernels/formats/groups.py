"""How elements lie: groups of neighbours that share a scale, their ranges and views; and codes of less than a byte, packed in bytes."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.formats.weights import WeightFormat


def ranges(w: Tensor, weight_format: WeightFormat) -> tuple[Tensor, Tensor]:
    """Least and largest element of each group of w (N, K), 0 included: two tensors of `weight_format.scale_shape`."""
    size = weight_format.group_of(w.shape[1])
    tiles = F.pad(w, (0, -w.shape[1] % size, 0, -w.shape[0] % weight_format.rows)).unflatten(1, (-1, size))
    tiles = tiles.unflatten(0, (-1, weight_format.rows))
    return tiles.amin((1, 3)).clamp_max(0), tiles.amax((1, 3)).clamp_min(0)


def of_rows(scales: Tensor, weight_format: WeightFormat, rows: int) -> Tensor:
    """Scales (..., blocks, groups) of blocks of rows, repeated for each row: (..., rows, groups)."""
    if weight_format.rows == 1:
        return scales
    return scales[..., torch.arange(rows, device=scales.device) // weight_format.rows, :]


def views(x: Tensor, weight_format: WeightFormat) -> Iterator[tuple[Tensor, slice]]:
    """Views (..., groups, size) of x (..., K), with the slice of their groups: first all whole groups, then a shorter last one."""
    columns = x.shape[-1]
    size = weight_format.group_of(columns)
    whole = columns // size
    if whole:
        yield x[..., : whole * size].unflatten(-1, (whole, size)), slice(whole)
    if columns > whole * size:
        yield x[..., whole * size :].unsqueeze(-2), slice(whole, None)


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once on every device: CUDA multiplies by the reciprocal of a host number."""
    return x / x.new_tensor(by)


def rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in their dtype, at least its smallest normal number: below it, rounding would move them by more than its roundoff.

    A group of zeros gets the smallest normal number, too.
    """
    return scales.clamp_min(torch.finfo(dtype).smallest_normal).to(dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., K) uint8 below 2 ** bits -> (..., K * bits / 8) uint8; K * bits is a multiple of 8."""
    each = 8 // bits
    fields = codes.unflatten(-1, (-1, each))
    packed = torch.zeros_like(fields[..., 0])
    for i in range(each):
        packed |= fields[..., i] << (bits * i)
    return packed


def unpack(elements: Tensor, bits: int, out: Tensor) -> None:
    """Elements (..., K * bits / 8) uint8 -> out (..., K), the codes as numbers of the dtype of `out`."""
    each = 8 // bits
    if each == 1:
        out.copy_(elements)
        return
    fields = out.unflatten(-1, (-1, each))
    for i in range(each):
        fields[..., i].copy_((elements >> (bits * i)) & (2**bits - 1))
