"""What torch.library asks of every operator, for every layout of its inputs, dtype and optional argument."""

import pytest
import torch
import torch._inductor.config
import torch._inductor.cpu_vec_isa
from operator_cases import DTYPES, EACH, LAYOUTS, cases, check_outputs, laid
from torch import Tensor
from torch.library import opcheck

from campaign import sampled
from moe_routing_bench.store import platforms
from moe_routing_kernels import ops
from moe_routing_kernels.ops.library import contiguous

torch.set_num_threads(1)
LIBRARY = torch.ops.moe_routing_kernels
BACKENDS = ("", "cute 9.0")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_contiguous_and_their_storage_is_new(layout: str, dtype: torch.dtype) -> None:
    """And no layout of the inputs changes a bit of them."""
    pytest.importorskip("cutlass")
    for name, given in cases(layout, dtype, backends=BACKENDS):
        check_outputs(name, given)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    sampled(EACH, [*((layout, torch.float32) for layout in LAYOUTS), ("contiguous", torch.bfloat16)], unpack=True),
)
def test_they_keep_the_rules_of_torch_library(layout: str, dtype: torch.dtype) -> None:
    """Schema, autograd registration, and fakes that have the shapes, dtypes and strides of real outputs."""
    pytest.importorskip("cutlass")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, given in cases(layout, dtype, backends=BACKENDS):
        opcheck(getattr(LIBRARY, name.partition("-")[0]).default, given, test_utils=checks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(LAYOUTS, ["contiguous", "empty"]))
def test_they_are_traced_with_dynamic_shapes(layout: str) -> None:
    """With gradients of all that is differentiable: three forms of each operator, and one in other layouts."""
    forms = 3 if layout == "contiguous" else 1
    traced = dict.fromkeys(("gate",), forms)  # torch 2.13 adds the ids of gate to its weights in place: test_gate
    for name, given in cases(layout, torch.float32):
        operator = name.partition("-")[0]
        traced[operator] = traced.get(operator, 0) + 1
        if traced[operator] > forms:
            continue
        learns = not operator.endswith("_backward") and operator not in ("feed", "permute")
        leaves = [
            entry.detach().requires_grad_(learns and entry.is_floating_point()) if isinstance(entry, Tensor) else entry
            for entry in given
        ]
        opcheck(getattr(LIBRARY, operator).default, tuple(leaves), test_utils="test_aot_dispatch_dynamic")


def test_results_in_any_strides_become_contiguous() -> None:
    """The rule that fakes rely on, whatever an implementation returns; what is not asked for is (0,) of the first input's dtype."""
    transposed, like = torch.randn(3, 2).T, torch.randn(1, dtype=torch.float64)
    alone, (first, none) = contiguous(transposed, like), contiguous((transposed, None), like)
    for tensor in (alone, first):
        assert tensor.is_contiguous() and torch.equal(tensor, transposed)
    assert none.shape == (0,) and none.dtype == torch.float64


def test_the_layouts_are_what_they_are_called() -> None:
    tensor = torch.randn(5, 16)
    strides = {layout: laid(tensor, layout).stride() for layout in LAYOUTS}
    assert strides == {
        "contiguous": (16, 1),
        "transposed": (1, 5),
        "expanded": (0, 1),
        "sliced": (19, 1),
        "empty": (16, 1),
    }
    assert laid(tensor, "sliced").data_ptr() % 16


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
def test_graphs_that_torch_kept_run(layout: str) -> None:
    """Of before a backward operator was told what is wanted: without that argument, all is."""
    checked = set()
    for name, given in cases(layout, torch.float32):
        operator = name.partition("-")[0]
        if operator in ("experts_backward", "layer_backward") and all(given[-1][:3]):
            outputs = getattr(LIBRARY, operator)(*given[:-1])
            for got, want in zip(outputs, getattr(LIBRARY, operator)(*given), strict=True):
                assert torch.equal(got, want), name
            opcheck(getattr(LIBRARY, operator).default, given[:-1], test_utils="test_faketensor")
            checked.add(operator)
    assert len(checked) == 2


@pytest.mark.slow
@pytest.mark.skipif(platforms.missing(("compiler",), "cpu") is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("layout", sampled(["transposed", "expanded", "sliced"], ["transposed"]))
def test_training_is_compiled_for_every_layout(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inductor, whose code asserts the strides that fakes have; of a layer, and of experts alone."""
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "valid_vec_isa_list", list)
    offsets = torch.tensor([0, 1, 2, 3, 5], dtype=torch.int32)

    def whole(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return ops.layer(x, logits, w13, w2, 2, residual=x) + ops.experts(x, offsets, w13, w2)

    torch.manual_seed(17)
    shapes = ((5, 16), (5, 4), (4, 48, 16), (4, 16, 24))
    given = [laid(torch.randn(shape), layout).requires_grad_() for shape in shapes]
    torch.compiler.reset()
    results = []
    with torch._inductor.config.patch(fx_graph_cache=False):  # which may hold graphs of an earlier version
        for function in (torch.compile(whole, fullgraph=True), whole):
            output = function(*given)
            results.append([output, *torch.autograd.grad(output.square().sum(), given)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
