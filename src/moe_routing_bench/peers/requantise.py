"""Quantising rows between two products by our Triton kernel, for products of other packages that take e4m3 rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import between
from moe_routing_kernels.formats import empty_rows
from moe_routing_kernels.pack import triton_pack_fp8


def bind(problem: Experts, activated: Tensor) -> tuple[Callable[[], object], Tensor, Tensor]:
    """The call that quantises activated (R, I) as packed rows are, and what it writes: (R, I) e4m3 and their scales float32."""
    inner = empty_rows(problem.packed_format, len(activated), problem.intermediate, activated.device)
    itself = torch.arange(len(activated), dtype=torch.int32, device=activated.device)
    call = triton_pack_fp8.bind(
        between(problem), x=activated, order=itself, inverse=itself[:, None], **inner, checked_rows=0
    )
    return call, inner["packed"], inner["scales"]
