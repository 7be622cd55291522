"""The operators pack and combine: gradients, what torch.library asks for, numerics, and bad input."""

import functools

import pytest
import torch
from ops_cases import close, data, routing
from torch import Tensor

from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.ops import reference

torch.set_num_threads(1)
LIBRARY = torch.ops.moe_routing_kernels
# name: tokens, experts, top_k, layout, capacity factor
ROUTINGS = {
    "compact": (5, 4, 2),
    "one_token": (1, 3, 2),
    "every_expert": (3, 4, 4),
    "dropped": (6, 3, 2, "compact", 0.5),
    "padded": (4, 3, 2, "padded", 1.25),
}
TRACED = ("compact", "one_token", "dropped")  # sizes of which torch.compile makes different graphs


@pytest.fixture(params=[*ROUTINGS, "all_dropped"])
def known(request) -> tuple[Tensor, Tensor]:
    """(order, inverse) of one routing."""
    if request.param == "all_dropped":
        return tuple(torch.full_like(one, -1) for one in routing(3, 4, 2))
    return routing(*ROUTINGS[request.param])


def leaves(known: tuple[Tensor, Tensor], hidden: int, dtype: torch.dtype) -> list[Tensor]:
    """x (T, H), y (R, H) and weights (T, k), each of which requires a gradient."""
    torch.manual_seed(17)
    x, y, weights = data(len(known[0]), hidden, known[1], dtype)
    return [one.requires_grad_() for one in (x, y, weights)]


def test_gradients_are_those_of_the_functions(known) -> None:
    """Numerical differentiation in float64, of each operator, with and without residual; of pack also twice."""
    order, inverse = known
    x, y, weights = leaves(known, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda x: ops.pack(x, order, inverse), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.pack(x, order, inverse), x)
    assert torch.autograd.gradcheck(lambda y, w: ops.combine(y, inverse, w), (y, weights))
    assert torch.autograd.gradcheck(lambda y, w, r: ops.combine(y, inverse, w, r), (y, weights, x))
    for frozen in (0, 1):
        inputs = [one.detach().requires_grad_(i != frozen) for i, one in enumerate((y, weights))]
        assert torch.autograd.gradcheck(lambda y, w: ops.combine(y, inverse, w), inputs)


def test_operators_keep_the_rules_of_torch_library(known, request: pytest.FixtureRequest) -> None:
    """Schema, fake implementation, autograd registration; and tracing with dynamic shapes, which sees sizes alone."""
    order, inverse = known
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if request.node.callspec.params["known"] in TRACED:
        checks = (*checks, "test_aot_dispatch_dynamic")
    opcheck = functools.partial(torch.library.opcheck, test_utils=checks)
    x, y, weights = leaves(known, 4, torch.float32)
    grad = torch.randn_like(x)
    opcheck(LIBRARY.pack.default, (x, order, inverse))
    for residual in (x, None):
        opcheck(LIBRARY.combine.default, (y, inverse, weights, residual))
    y, weights = y.detach(), weights.detach()
    for arguments in ((y, inverse, weights, len(y)), (None, inverse, weights, len(y)), (y, inverse, weights, None)):
        opcheck(LIBRARY.combine_backward.default, (grad, *arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_is_one_rounding_of_float64(known, dtype: torch.dtype) -> None:
    """Outputs and every gradient against the same in float64; what may not be used is NaN."""
    order, inverse = known
    torch.manual_seed(17)
    x, y, weights = data(len(order), 33, inverse, dtype, spoil=True)
    grad, exact = torch.randn_like(x), torch.finfo(dtype).eps / 2

    def results(x: Tensor, y: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
        x, y, weights = (one.detach().requires_grad_() for one in (x, y, weights))
        combined, packed = ops.combine(y, inverse, weights, x), ops.pack(x, order, inverse)
        d_x = torch.autograd.grad(packed, x, y.detach().nan_to_num())
        return [combined, *torch.autograd.grad(combined, (y, weights, x), grad), *d_x]

    got = results(x, y, weights, grad)
    wide = [one.double() for one in (x, y, weights, grad)]
    want, terms = results(*wide), results(*(one.abs() for one in wide))
    assert [one.dtype for one in got] == [dtype, dtype, torch.float32, dtype, dtype]
    for i, (one, exactly, size) in enumerate(zip(got, want, terms, strict=True)):
        close(one, exactly, size, 2.0**-24 if i == 2 else exact)
    _, d_y, d_weights, d_residual, _ = got
    assert not d_weights[inverse < 0].any() and not d_y[order < 0].any() and torch.equal(d_residual, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_may_have_the_dtype_of_rows(known, dtype: torch.dtype) -> None:
    """As a router in 16 bits gives them: the sums are those of the same weights in float32, their gradient that of these, rounded."""
    order, inverse = known
    torch.manual_seed(17)
    _, y, weights = data(len(order), 33, inverse, dtype)
    narrow = weights.to(dtype)
    grad = torch.randn(len(inverse), 33, dtype=dtype)
    found = {}
    for given in (narrow, narrow.float()):
        rows, given = y.detach().requires_grad_(), given.detach().requires_grad_()
        combined = ops.combine(rows, inverse, given)
        with torch.no_grad():
            assert torch.equal(ops.combine(rows, inverse, given), combined)
        found[given.dtype] = [combined, *torch.autograd.grad(combined, (rows, given), grad)]
    for one, wide in zip(found[dtype], found[torch.float32], strict=True):
        assert one.dtype == dtype and torch.equal(one, wide.to(dtype))


def test_reference_is_the_definition() -> None:
    """pack against its formula; combine and its gradients against torch's own autograd of gather, multiply, sum."""
    order, inverse = routing(6, 3, 2, "padded", 1.0)
    x, y, weights = leaves((order, inverse), 5, torch.float64)
    rows = torch.where((order >= 0)[:, None], x[order.clamp_min(0).long() // 2], 0)
    assert torch.equal(reference.pack(x, order, inverse), rows)
    kept = inverse >= 0
    assert not kept.all() and (order < 0).any()
    masked = torch.where(kept, weights, 0)
    plain = (y[inverse.clamp_min(0).long()] * masked[..., None]).sum(1)
    torch.testing.assert_close(reference.combine(y, inverse, weights, None), plain)
    grad = torch.randn_like(plain)
    want = torch.autograd.grad(plain, (y, weights), grad)
    with torch.no_grad():
        got = reference.combine_backward(grad, y, inverse, weights, len(y))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_what_no_gradient_needs_is_not_kept() -> None:
    """With weights that need no gradient the expert rows, the largest tensor, are not saved for the backward."""
    order, inverse = routing(5, 4, 2)
    _, y, weights = leaves((order, inverse), 4, torch.float32)
    saved = {}
    for needed in (True, False):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            ops.combine(y, inverse, weights.detach().requires_grad_(needed))
        saved[needed] = kept.count(y.shape)
    assert saved == {True: 1, False: 0}


def test_bad_input_is_explained() -> None:
    order, inverse = routing(5, 4, 2)
    x, y, weights = data(len(order), 4, inverse, torch.float32)
    for call, what in (
        (lambda: ops.pack(x[0], order, inverse), r"x: got '\(4,\) of torch.float32'; allowed: two dimensions"),
        (lambda: ops.pack(x.int(), order, inverse), "x: got"),
        (lambda: ops.pack(x, order.long(), inverse), r"order: .* allowed: '?\(R,\) of torch.int32"),
        (lambda: ops.pack(x, order, inverse.long()), "inverse: got"),
        (lambda: ops.pack(x[:3], order, inverse), "x: .* 5 rows"),
        (lambda: ops.combine(y, inverse, weights[:3]), r"weights: got '\(3, 2\) of torch.float32'; allowed: \(5, 2\)"),
        (lambda: ops.combine(y, inverse, weights.half()), "weights: got"),
        (lambda: ops.combine(y, inverse, weights, x.double()), "residual: got"),
        (lambda: ops.combine(y, inverse, weights, x[:1]), "residual: got"),
    ):
        with pytest.raises(UserError, match=what):
            call()
