"""Shared by the kernels that quantise to fp8: the formats that they can write, and GPUs without the conversion."""

import torch

from moe_routing_kernels.formats import LEAST_AMAX, Format

__all__ = ["ELEMENT", "LARGEST", "LEAST_AMAX", "no_conversion", "other_element"]
ELEMENT = "float8_e4m3fn"
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def other_element(target: Format) -> str | None:
    """Why kernels that write e4m3 elements with float32 scales cannot write this format, or None."""
    if (target.element, target.scale, target.zero_point) != (ELEMENT, "float32", None):
        return f"the kernel writes {ELEMENT} with float32 scales, not {target.name}"
    return None


def no_conversion(target: Format) -> str | None:
    """Why the current CUDA device cannot convert to the format, or None; also where there is no device to ask."""
    if target.element == ELEMENT and torch.cuda.is_available():
        have = torch.cuda.get_device_capability()
        if have < (8, 9):
            return f"conversion to {ELEMENT} needs compute capability 8.9, this GPU has {have[0]}.{have[1]}"
    return None
