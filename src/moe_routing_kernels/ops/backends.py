"""Which kernel runs an operator on a GPU: CuTe DSL, else Triton, else plain torch, by what is installed and what it supports."""

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.formats import FORMATS, PLAIN

# Preferred first. A backend: its package, and the least compute capability that its compiler has.
BACKENDS = {"cute": ("cutlass", (8, 0)), "triton": ("triton", (7, 0))}
FORMAT_NAMES = {FORMATS[name].torch_dtype: name for name in PLAIN}  # of the dtypes that problems are described with
ALIGNED = 16  # bytes, at multiples of which kernels take tensors
_WARNED: set[tuple] = set()  # operators, arguments and layouts
MOST_PROBLEMS = 4096  # that are remembered: a choice costs an import, or the reasons of several kernels


@functools.lru_cache(MOST_PROBLEMS)
def kernel(problem: Any, capability: tuple[int, int]) -> ModuleType | None:
    """The kernel module of a problem (`kernels.gate.Gate`, `kernels.pack.Pack`, ...); None where plain torch must do.

    The module is ``kernels.<operation>.<backend>_<operation>``, and fits when its `unsupported` has no objection.
    """
    package = type(problem).__module__
    operation = package.rpartition(".")[2]
    for backend in BACKENDS:
        if not available(backend, capability):
            continue
        module = importlib.import_module(f"{package}.{backend}_{operation}")
        if not hasattr(module, "unsupported") or module.unsupported(problem) is None:
            return module
    return None


def available(backend: str, capability: tuple[int, int]) -> bool:
    """Whether a backend is wanted, installed, and compiles for a compute capability."""
    if backend not in BACKENDS:
        return False
    needed, least = BACKENDS[backend]
    return capability >= least and installed(needed)


def training(device: torch.device) -> str:
    """The backend that trains experts on a device, and its compute capability, such as ``cute 9.0``; empty where plain torch does."""
    if device.type != "cuda" or not available("cute", capability(device)):
        return ""
    return "cute {}.{}".format(*capability(device))


# What torch.compiler.assume_constant_result does, which loads the compiler: 2 s for all who import operators and compile nothing.
training._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


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
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()
