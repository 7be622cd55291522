"""What operators ask of a device and of tensors before a kernel runs: the target, formats, contiguous and aligned data."""

import functools
import warnings

import torch
from torch import Tensor

from moe_routing_kernels.choices.chooser import unmet
from moe_routing_kernels.formats import FORMATS, PLAIN
from moe_routing_kernels.implementations import listed
from moe_routing_kernels.target import Target

FORMAT_NAMES = {FORMATS[name].torch_dtype: name for name in PLAIN}  # of the dtypes that problems are described with
ALIGNED = 16  # bytes, at multiples of which kernels take tensors
_WARNED: set[tuple] = set()  # operators, arguments and layouts


def training(device: torch.device) -> str:
    """The backend that trains experts on a device, and its compute capability, such as ``cute 9.0``; empty where plain torch does."""
    return _training(target(device))


# What torch.compiler.assume_constant_result does, which loads the compiler: 2 s for all who import operators and compile nothing.
training._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _training(here: Target) -> str:
    if any(unmet(candidate.requires, here) for candidate in listed("experts") if candidate.trains):
        return ""
    return "cute {}.{}".format(*here.capability)


@functools.cache
def trained_on(backend: str) -> Target:
    """The target that `training` names: ``cute 9.0`` is of sm_90a."""
    major, _, minor = backend.partition(" ")[2].partition(".")
    return Target.of(f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}")


@functools.cache
def target(device: torch.device) -> Target:
    """The target of a device."""
    return Target.here(device)


def warn_of_copies(operator: str, **tensors: Tensor | None) -> None:
    """Warn of tensors in a layout that `ready` copies on every call of an operator: once per operator, argument and layout.

    Not in compiled code and not in a capture, where a warning would be an effect, nor on the CPU, which takes any strides.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if tensor is None or tensor.device.type == "cpu" or (tensor.is_contiguous() and _aligned(tensor)):
            continue
        order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        layout = (operator, name, order, _aligned(tensor))
        if layout in _WARNED or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            continue
        _WARNED.add(layout)
        warnings.warn(
            f"ops.{operator} copies {name} {tuple(tensor.shape)} of strides {tensor.stride()} on every call, as kernels take contiguous "
            f"tensors at multiples of {ALIGNED} bytes; hint: keep a contiguous copy",
            stacklevel=3,
        )


def _aligned(tensor: Tensor) -> bool:
    return tensor.storage_offset() * tensor.element_size() % ALIGNED == 0


def ready(tensor: Tensor) -> Tensor:
    """The tensor as kernels want it: contiguous, and 16-byte aligned, which a view into the middle of another may not be."""
    tensor = tensor.contiguous()
    # A tensor without elements is contiguous whatever its strides, but a kernel checks them.
    fits = tensor.numel() > 0 and tensor.data_ptr() % ALIGNED == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
