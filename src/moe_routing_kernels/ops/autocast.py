"""Autocast: operators take no part in it, and the experts of a model are cast as the library's own products are.

Under ``torch.autocast`` an operator computes in the dtypes of its arguments, as without: its sums stay in float32, and arguments of two
dtypes are refused. Without a rule of its own, the plain torch inside an operator would be cast, and lose precision in silence.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_KEYS = ("AutocastCPU", "AutocastCUDA")


def leave_out(namespace: str, *modules: ModuleType) -> torch.library.Library:
    """Make the custom operators of modules run, on CPU and CUDA, as if autocast were off. The result must live as long as they do."""
    rules = torch.library.Library(namespace, "FRAGMENT")
    first, second = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in _KEYS)
    named = {
        name: value for module in modules for name, value in vars(module).items()
    }  # one may import another's operators
    for name, value in named.items():
        if (operator := getattr(value, "_opoverload", None)) is not None:
            for key in _KEYS:
                rules.impl(name, _rule(operator, first | second), key, with_keyset=True)
    return rules


def _rule(operator: Any, keys: Any) -> Any:
    def run(_: Any, *arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*arguments, **options)

    return run


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of products of x and weight: that of autocast where it is on and takes them, else that of the weights.

    So do the library's own products: an eager one under autocast, and a grouped one, which casts rows to the weights' dtype.
    """
    device = x.device.type
    on = torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, weight.dtype)
    return torch.get_autocast_dtype(device) if on else weight.dtype
