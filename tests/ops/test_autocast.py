"""Operators under autocast: the bits that they have without it, in both directions, and one line for arguments of two dtypes."""

import pytest
import torch

from activations import EVERY
from moe_routing_kernels import ops
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.ops.library import compute_dtype

AUTOCAST = (torch.bfloat16, torch.float16)
PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def layer(activation, dtype):
    """A layer's arguments, of which all but the ids require a gradient, and the gradient of its result."""
    torch.manual_seed(17)
    known = activation_of(activation)
    wide = (2 if known.gated else 1) * 24
    shapes = [(9, 32), (9, 4), (4, wide, 32), (4, 32, 24), *([(4, wide), (4, 32)] if known.biased else [])]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes], torch.randn(9, 32).to(dtype)


def run(activation, inputs, grad, **options):
    """Output and gradients of every operator in one: gate, permute, pack, experts and combine."""
    x, logits, w13, w2, *biases = inputs
    names = dict(zip(("b13", "b2"), biases, strict=False))
    output = ops.layer(x, logits, w13, w2, 2, activation=activation, residual=x, **names, **options)
    return [output, *torch.autograd.grad(output, inputs, grad)]


@pytest.mark.parametrize("cast", AUTOCAST, ids=str)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("activation", EVERY)
def test_autocast_changes_no_bit(activation, dtype, cast):
    inputs, grad = layer(activation, dtype)
    wanted = run(activation, inputs, grad)
    with torch.autocast("cpu", dtype=cast):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == cast
        found = run(activation, inputs, grad)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == cast, "autocast is on again"
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_steps_alone_change_no_bit():
    """Each operator, in inference."""
    (x, logits, w13, w2), _ = layer("swiglu", torch.float32)

    def steps():
        routed = ops.route(x, logits, 2)
        y = ops.experts(routed.packed, routed.offsets, w13, w2)
        return [*routed, y, ops.combine(y, routed.inverse, routed.topk_weights), ops.layer(x, logits, w13, w2, 2)]

    with torch.no_grad():
        wanted = steps()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all(map(torch.equal, steps(), wanted))


def test_compiled_whole_it_changes_no_bit():
    inputs, grad = layer("swiglu_limit10", torch.float32)
    wanted = run("swiglu_limit10", inputs, grad)

    def cast(x, logits, w13, w2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.layer(x, logits, w13, w2, 2, activation="swiglu_limit10", residual=x)

    torch.compiler.reset()
    output = torch.compile(cast, fullgraph=True, backend="aot_eager")(*inputs)
    for got, want in zip([output, *torch.autograd.grad(output, inputs, grad)], wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("narrow", ["x", "w13", "w2", "residual"])
def test_two_dtypes_are_one_line(narrow):
    (x, logits, w13, w2), _ = layer("swiglu", torch.float32)
    given = {"x": x, "w13": w13, "w2": w2, "residual": x}
    given[narrow] = given[narrow].detach().bfloat16()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UserError, match=r"^(w13|w2|residual): got .* of torch\.") as e,
    ):
        ops.layer(logits=logits, top_k=2, **given)
    assert "\n" not in str(e.value)


def test_products_are_in_the_dtype_of_autocast_but_in_double_precision():
    """As those of torch."""
    for dtype, wanted in (
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float64),
    ):
        x = torch.ones(2, 2, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compute_dtype(x, x) == (x @ x).dtype == wanted
        assert compute_dtype(x.float(), x) == dtype, "without autocast that of the weights"
