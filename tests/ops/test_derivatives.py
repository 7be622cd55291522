"""Derivatives: those that are offered are right, and no other passes for zero: one line says which operator has which."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from campaign import sampled
from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.ops import backends

torch.set_num_threads(1)
TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 4, 3, 6, 4
IDS = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
_, OFFSETS, ORDER, INVERSE = ops.permute(IDS, EXPERTS, 2)


def drawn(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(17)
    shapes = {"x": (TOKENS, HIDDEN), "logits": (TOKENS, EXPERTS), "weights": (TOKENS, 2), "y": (len(ORDER), HIDDEN)}
    shapes |= {"w13": (EXPERTS, 2 * INTERMEDIATE, HIDDEN), "w2": (EXPERTS, HIDDEN, INTERMEDIATE)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


TENSORS = drawn()


def of(name: str, function: Callable) -> tuple[str, Callable[[Tensor], Tensor]]:
    """A function of the tensor of that name alone."""
    return name, lambda tensor: function(**TENSORS | {name: tensor})


def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, **_: Tensor) -> Tensor:
    return ops.layer(x, logits, w13, w2, 2, capacity=2, residual=x)


def fused(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, **_: Tensor) -> Tensor:
    return ops.fused_experts(x, IDS, weights, w13, w2, 2)


def experts(y: Tensor, w13: Tensor, w2: Tensor, **_: Tensor) -> Tensor:
    return ops.experts(y, OFFSETS, w13, w2)[: OFFSETS[-1]]


def combine(y: Tensor, weights: Tensor, x: Tensor, **_: Tensor) -> Tensor:
    return ops.combine(y, INVERSE, weights, x)


TWICE = {
    "gate": of("logits", lambda logits, **_: ops.gate(logits, 2)[1]),
    "pack": of("x", lambda x, **_: ops.pack(x, ORDER, INVERSE)),
}
ONCE = {
    "experts_rows": of("y", experts),
    "experts_w13": of("w13", experts),
    "experts_w2": of("w2", experts),
    "combine_y": of("y", combine),
    "combine_weights": of("weights", combine),
    "layer_x": of("x", layer),
    "layer_logits": of("logits", layer),
    "layer_w2": of("w2", layer),
    "fused_weights": of("weights", fused),
    "fused_w13": of("w13", fused),
}
ALL = TWICE | ONCE
# A fullgraph wraps ours; and torch refuses its own derivatives of autograd functions.
ERRORS = (UserError, torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError)
refused = functools.partial(pytest.raises, UserError)


@pytest.mark.parametrize("case", ALL)
def test_first_derivatives(case: str) -> None:
    """Numerical differentiation; with several cotangents at a time, too."""
    name, function = ALL[case]
    given = TENSORS[name].clone().requires_grad_()
    assert torch.autograd.gradcheck(function, given, check_batched_grad=True)


@pytest.mark.parametrize("case", TWICE)
def test_second_derivatives_of_gate_and_pack(case: str) -> None:
    name, function = TWICE[case]
    assert torch.autograd.gradgradcheck(function, TENSORS[name].clone().requires_grad_())


@pytest.mark.parametrize("backend", ["", "cute 9.0"], ids=["recomputed", "kept"])
@pytest.mark.parametrize("case", ONCE)
def test_no_other_second_derivative_is_zero(case: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With respect to the input and to the cotangent."""
    monkeypatch.setattr(backends, "training", lambda device: backend)
    if backend:
        pytest.importorskip("cutlass")
        rows = {"bf16": torch.bfloat16}["bf16"]
        sizes = {"x": (TOKENS, 16), "y": (len(ORDER), 16), "w13": (EXPERTS, 32, 16), "w2": (EXPERTS, 16, 16)}
        wide = {"logits": TENSORS["logits"].float(), "weights": TENSORS["weights"].float()}
        monkeypatch.setattr(
            f"{__name__}.TENSORS", {name: torch.randn(size, dtype=rows) for name, size in sizes.items()} | wide
        )
    name, function = ONCE[case]
    given = TENSORS[name].clone().requires_grad_()
    output = function(given)
    if not case.startswith("combine"):  # which is linear in each
        (gradient,) = torch.autograd.grad(output, given, torch.ones_like(output), create_graph=True, retain_graph=True)
        assert gradient.requires_grad, "the second derivative passes for zero"
    cotangent = torch.ones_like(output).requires_grad_()
    (gradient,) = torch.autograd.grad(output, given, cotangent, create_graph=True)
    for what in (cotangent,) if case.startswith("combine") else (given, cotangent):
        with refused(match="derivative of (experts|combine|layer): got 'the second'; allowed: the first") as caught:
            torch.autograd.grad(gradient.sum(), what, retain_graph=True)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ALL)
def test_forward_mode_is_refused(case: str) -> None:
    """With dual numbers and in torch.func, alone and within another transform; none gives a tangent of zero."""
    name, function = ALL[case]
    given, tangent = TENSORS[name], torch.ones_like(TENSORS[name])
    for learns in (False, True):
        with forward_ad.dual_level(), refused(match="derivative of .*forward mode"):
            function(forward_ad.make_dual(given.clone().requires_grad_(learns), tangent))
    with torch.no_grad(), forward_ad.dual_level(), refused(match="forward mode"):
        function(forward_ad.make_dual(given, tangent))
    transforms = {
        "jvp": lambda: torch.func.jvp(function, (given,), (tangent,)),
        "jacfwd": lambda: torch.func.jacfwd(function)(given),
        "vmapped": lambda: torch.func.jvp(
            torch.vmap(function), (torch.stack([given] * 2),), (torch.ones(2, *given.shape).double(),)
        ),
    }
    for transform, run in transforms.items():
        with refused(match="derivative of .*(forward mode|torch.func)"):
            run()
            pytest.fail(f"{transform} passed")


@pytest.mark.parametrize("case", ALL)
def test_derivatives_of_torch_func_are_refused(case: str) -> None:
    name, function = ALL[case]
    for transform in (torch.func.grad, torch.func.hessian):
        with refused(match=r"derivative of (gate|pack|experts|combine): .*torch.func"):
            transform(lambda given: function(given).square().sum())(TENSORS[name])
    with refused(match=r"derivative of .*torch.func"):
        torch.func.jacrev(function)(TENSORS[name])


@pytest.mark.parametrize("case", ALL)
def test_a_tangent_of_a_cotangent_is_refused(case: str) -> None:
    """A backward pass is linear in the cotangent, whose tangent it would drop."""
    name, function = ALL[case]
    given = TENSORS[name].clone().requires_grad_()
    output = function(given)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
        if case == "gate":  # plain torch
            (gradient,) = torch.autograd.grad(output, given, cotangent, retain_graph=True)
            torch.testing.assert_close(*forward_ad.unpack_dual(gradient))
            return
        with refused(match="derivative of .*forward mode"):
            torch.autograd.grad(output, given, cotangent)


@pytest.mark.parametrize("case", ALL)
def test_vmap_is_right(case: str) -> None:
    """With gradients: an operator is called for each element."""
    name, function = ALL[case]
    outcome = []
    for transform in (torch.vmap(function), lambda several: torch.stack([function(entry) for entry in several])):
        several = torch.stack([TENSORS[name], 2 * TENSORS[name]]).requires_grad_()
        output = transform(several)
        outcome.append([output, *torch.autograd.grad(output.square().sum(), several)])
    for got, right in zip(*outcome, strict=True):
        torch.testing.assert_close(got, right)


FEED = torch.ops.moe_routing_kernels.feed


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "swiglu_oai"])
def test_feed_has_first_derivatives(activation: str) -> None:
    """Though `ops` calls it where nothing needs any: within vmap that cannot be seen."""
    wide = INTERMEDIATE * (1 if activation == "relu2" else 2)
    biases = [torch.randn(EXPERTS, size).double().requires_grad_() for size in (wide, HIDDEN)]
    biases = biases if activation == "swiglu_oai" else []
    given = [TENSORS["x"].clone(), TENSORS["w13"][:, :wide].contiguous(), TENSORS["w2"].clone()]

    def feed(x: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None = None, b2: Tensor | None = None) -> Tensor:
        return FEED(x, ORDER, INVERSE, OFFSETS, w13, w2, activation, b13, b2, None, None)[: OFFSETS[-1]]

    assert torch.autograd.gradcheck(feed, [*(tensor.requires_grad_() for tensor in given), *biases])
    output = feed(*given, *biases)
    (gradient,) = torch.autograd.grad(output.square().sum(), given[1], create_graph=True, retain_graph=True)
    with refused(match="derivative of experts: got 'the second'"):
        gradient.sum().backward()
    with forward_ad.dual_level(), refused(match="derivative of feed: .*forward mode"):
        torch.autograd.grad(output, given[0], forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output)))


@pytest.mark.parametrize(
    ("case", "whole"),
    sampled(
        [*((case, True) for case in ("pack", "combine_y", "layer_x", "gate")), ("pack", False), ("layer_x", False)],
        [("combine_y", True), ("layer_x", True), ("pack", False)],
        unpack=True,
    ),
)
def test_nor_are_they_zero_when_compiled(case: str, whole: bool) -> None:
    """Within compiled code, and around it, compiled before."""
    name, function = ALL[case]
    given, tangent = TENSORS[name], torch.ones_like(TENSORS[name])

    def dual(function: Callable[[Tensor], Tensor]) -> Tensor | None:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(given, tangent))).tangent

    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=whole)
    torch.compiler.reset()
    alone = compiled(function)
    torch.testing.assert_close(alone(given), function(given))
    for run in (
        lambda: dual(alone),
        lambda: compiled(dual)(function),
        lambda: compiled(lambda given: torch.func.jvp(function, (given,), (tangent,))[1])(given),
        lambda: compiled(torch.func.grad(lambda given: function(given).sum()))(given),
    ):
        with pytest.raises(ERRORS, match=r"derivative of|functorch transforms"):
            run()
    torch.testing.assert_close(alone(given), function(given))


def test_second_derivatives_of_compiled_code_are_refused_by_torch() -> None:
    name, function = ALL["layer_x"]
    torch.compiler.reset()
    given = TENSORS[name].clone().requires_grad_()
    output = torch.compile(function, backend="aot_eager", fullgraph=True)(given)
    (gradient,) = torch.autograd.grad(output.square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(gradient.sum(), given)
