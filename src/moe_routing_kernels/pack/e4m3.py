"""Shared by the kernels that quantise to fp8: the formats that they can write, and GPUs without the conversion."""

import torch

from moe_routing_kernels.formats import LEAST_AMAX, Format
from moe_routing_kernels.target import Target

__all__ = ["ELEMENT", "LARGEST", "LEAST_AMAX", "no_conversion", "other_element"]
ELEMENT = "float8_e4m3fn"
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def other_element(packed: Format) -> str | None:
    """Why kernels that write e4m3 elements with float32 scales cannot write this format, or None."""
    if (packed.element, packed.scale, packed.zero_point) != (ELEMENT, "float32", None):
        return f"the kernel writes {ELEMENT} with float32 scales, not {packed.name}"
    return None


def no_conversion(packed: Format, target: Target | None = None) -> str | None:
    """Why a GPU by NVIDIA, the current one where no target is given, cannot convert to the format, or None."""
    target = target or Target.here()
    if packed.element == ELEMENT and target.vendor == "nvidia" and target.capability < (8, 9):
        major, minor = target.capability
        return f"conversion to {ELEMENT} needs compute capability 8.9, this GPU has {major}.{minor}"
    return None
