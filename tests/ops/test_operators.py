"""What torch.library asks of every operator, for every layout of its inputs, dtype and optional argument."""

import pytest
import torch
from operator_cases import DTYPES, LAYOUTS, cases, check_outputs, laid
from torch import Tensor
from torch.library import opcheck

torch.set_num_threads(1)
LIBRARY = torch.ops.moe_routing_bench
BACKENDS = ("", "cute 9.0")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_contiguous_and_their_storage_is_new(layout: str, dtype: torch.dtype) -> None:
    """And no layout of the inputs changes a bit of them."""
    pytest.importorskip("cutlass")
    for name, given in cases(layout, dtype, backends=BACKENDS):
        check_outputs(name, given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_keep_the_rules_of_torch_library(layout: str, dtype: torch.dtype) -> None:
    """Schema, autograd registration, and fakes that have the shapes, dtypes and strides of real outputs."""
    pytest.importorskip("cutlass")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, given in cases(layout, dtype, backends=BACKENDS):
        opcheck(getattr(LIBRARY, name.partition("-")[0]).default, given, test_utils=checks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_traced_with_dynamic_shapes(layout: str) -> None:
    """With gradients of all that is differentiable, in three forms of each operator."""
    traced = dict.fromkeys(("gate",), 3)  # torch 2.13 adds the ids of gate to its weights in place: test_gate
    for name, given in cases(layout, torch.float32):
        operator = name.partition("-")[0]
        traced[operator] = traced.get(operator, 0) + 1
        if traced[operator] > 3:
            continue
        learns = not operator.endswith("_backward") and operator not in ("feed", "permute")
        leaves = [one.detach().requires_grad_(learns and one.is_floating_point()) if isinstance(one, Tensor) else one for one in given]  # fmt: skip
        opcheck(getattr(LIBRARY, operator).default, tuple(leaves), test_utils="test_aot_dispatch_dynamic")


def test_the_layouts_are_what_they_are_called() -> None:
    tensor = torch.randn(5, 16)
    strides = {layout: laid(tensor, layout).stride() for layout in LAYOUTS}
    assert strides == {"contiguous": (16, 1), "transposed": (1, 5), "expanded": (0, 1), "sliced": (19, 1), "empty": (16, 1)}  # fmt: skip
    assert laid(tensor, "sliced").data_ptr() % 16
