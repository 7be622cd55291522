"""Tensors and arrays of numbers as torch saves them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces.checks import MOST_VALUES, check_exact, check_most
from moe_routing_kernels.errors import bad


def array(value: Any, where: object) -> NDArray[Any]:
    """A tensor or an array of numbers as an array: floating point as float64, for numpy has no bfloat16."""
    import torch

    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f":
            return value
        value = torch.from_numpy(value)

    if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
        raise bad("ids", f"{value.layout} of {value.dtype} in {where}", "a dense tensor of whole numbers")
    value = value.detach()
    if not value.is_floating_point():
        return value.numpy()
    check_most(value.numel(), where, MOST_VALUES)  # a tensor may repeat few bytes, which are now copied
    wide = value.double().numpy()
    if wide.size and np.isfinite(wide).all() and (wide == np.rint(wide)).all():
        check_exact(float(np.abs(wide).max()), 2 / torch.finfo(value.dtype).eps, value.dtype, where)
    return wide


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array."""
    import torch

    return isinstance(value, (torch.Tensor, np.ndarray))
