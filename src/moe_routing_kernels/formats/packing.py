"""Codes of less than a byte in bytes, the first of a byte in its low bits."""

import torch
from torch import Tensor


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
