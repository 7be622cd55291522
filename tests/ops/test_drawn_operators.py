"""All operators together, drawn: sizes, layouts, dtypes, rules, capacities, activations and special values, against `dense` in float64.

Three ways to the same layer: `ops.layer`, `ops.fused_experts` behind the gate, and route, experts and combine. 1,200 cases, the same in each
run, FEW of them in the fast lane, the others in `make campaigns`; or as many new ones as OPERATOR_CASES says, with --timeout 0: 50,000 take twenty minutes.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import dense
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from activations import EVERY
from moe_routing_kernels import ops
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.gate import FUSED
from moe_routing_kernels.routers import ROUTERS

torch.set_num_threads(1)
CASES = int(os.environ.get("OPERATOR_CASES", "1200"))
FEW = 150
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMS = ("contiguous", "transposed", "expanded", "sliced")
ACTIVATIONS = (*EVERY, "swiglu_limit0.5")
SPECIAL = ("", "", "", "", "", "nan", "inf", "-inf")


class Case(NamedTuple):
    """A layer; tensors are drawn by `seed`."""

    seed: int
    way: str
    dtype: torch.dtype
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    rule: str
    biased: bool
    scale: float | None
    capacity: int | None
    layout: str
    activation: str
    forms: tuple[str, ...]  # of x, logits, w13, w2
    learns: tuple[bool, ...]  # x, logits, w13, w2, b13, b2, residual
    residual: bool
    outside: bool  # some ids are of no expert
    special: tuple[str, str]  # a number in a token, and in an expert's weights


@st.composite
def cases(draw: Any) -> Case:
    rule = draw(st.sampled_from(FUSED))
    grouped = rule.startswith("deepseek")
    experts = draw(st.sampled_from([16, 24] if grouped else [1, 2, 3, 5, 8]))
    most = min(experts, {"deepseek_v2": 3, "deepseek_v3": 4}[rule] * experts // 8 if grouped else experts)
    way = draw(st.sampled_from(["layer", "fused_experts", "stages"]))
    tokens, top_k = (
        draw(st.sampled_from([9, 7, 5, 3, 2, 1, 0])),
        draw(st.one_of(st.integers(1, min(most, 3)), st.just(most))),
    )
    capacity = draw(st.none() | st.integers(1, 4))
    layout = draw(st.sampled_from(["compact", "block64", *(["padded"] if capacity else [])]))
    return Case(
        seed=draw(st.integers(0, 2**31)),
        way=way,
        dtype=draw(st.sampled_from(DTYPES)),
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        hidden=draw(st.sampled_from([1, 2, 3, 5, 8])),
        intermediate=draw(st.sampled_from([1, 2, 3, 8])),
        rule=rule,
        biased=draw(st.booleans()),
        scale=draw(st.none() | st.sampled_from([2.827, 0.1 + 0.2, 1e-05, 1])),
        capacity=capacity,
        layout=layout if way == "stages" else "compact",
        activation=draw(st.sampled_from(ACTIVATIONS)),
        forms=tuple(draw(st.sampled_from(FORMS)) for _ in range(4)),
        learns=draw(st.just((True,) * 7) | st.tuples(*[st.booleans()] * 7)),
        residual=draw(st.booleans()),
        outside=way != "layer" and draw(st.booleans()),
        special=(draw(st.sampled_from(SPECIAL)), draw(st.sampled_from(SPECIAL))),
    )


def formed(tensor: Tensor, form: str) -> Tensor:
    """The tensor in another layout; an expanded one has the values of its first entry everywhere."""
    if form == "transposed":
        return tensor.mT.contiguous().mT
    if form == "expanded":
        return tensor[:1].expand(tensor.shape)
    if form == "sliced":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    return tensor


def tensors(case: Case) -> dict[str, Tensor | None]:
    """All arguments; logits lie on a grid, so that scores are often equal."""
    generator = torch.Generator().manual_seed(case.seed)
    known = activation_of(case.activation)
    wide = case.intermediate * (2 if known.gated else 1)
    shapes = {
        "x": (case.tokens, case.hidden),
        "logits": (case.tokens, case.experts),
        "w13": (case.experts, wide, case.hidden),
        "w2": (case.experts, case.hidden, case.intermediate),
        "b13": (case.experts, wide) if known.biased else None,
        "b2": (case.experts, case.hidden) if known.biased else None,
        "residual": (case.tokens, case.hidden) if case.residual else None,
    }
    found = {
        name: None if shape is None else torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        for name, shape in shapes.items()
    }
    found["logits"] = (2 * found["logits"]).round() / 2
    for name, form in zip(("x", "logits", "w13", "w2"), case.forms, strict=True):
        found[name] = formed(found[name], form)
    of_token, of_expert = case.special
    if of_token and case.tokens:
        found["x"] = found["x"].clone()
        found["x"][case.seed % case.tokens, -1] = float(of_token)
    if of_expert:
        name = ("w13", "w2")[case.seed % 2]
        found[name] = found[name].clone()
        found[name][case.seed % case.experts, 0, 0] = float(of_expert)
    found["bias"] = None
    if case.biased and ROUTERS[case.rule].bias:
        found["bias"] = torch.randn(case.experts, generator=generator, dtype=torch.float64)
        found["bias"] = found["bias"] if case.dtype == torch.float64 else found["bias"].float()
    return found


LEARNING = ("x", "logits", "w13", "w2", "b13", "b2", "residual")


def spoilt_ids(case: Case, ids: Tensor) -> Tensor:
    """Every third id is of no expert, if the case says so."""
    if not case.outside:
        return ids
    where = torch.arange(ids.numel()).view(ids.shape) % 3 == case.seed % 3
    return torch.where(where, torch.tensor([-1, case.experts, 2**31 - 1, -(2**31)])[case.seed % 4].int(), ids)


def run(case: Case, t: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The layer by our operators, and the ids that it used."""
    routing = (case.top_k, case.rule, t["bias"])
    ids, weights = ops.gate(t["logits"], *routing, case.scale)
    if case.way == "layer":
        given = (
            t["x"],
            t["logits"],
            t["w13"],
            t["w2"],
            *routing,
            case.capacity,
            case.activation,
            t["b13"],
            t["b2"],
            t["residual"],
        )
        return ops.layer(*given, scale=case.scale), ids
    ids = spoilt_ids(case, ids)
    ids = ids.long() if case.seed % 5 == 0 else ids
    if case.way == "fused_experts":
        return ops.fused_experts(
            t["x"], ids, weights, t["w13"], t["w2"], case.capacity, case.activation, t["b13"], t["b2"], t["residual"]
        ), ids
    _, offsets, order, inverse = ops.permute(ids, case.experts, case.capacity, case.layout)
    packed = ops.pack(t["x"], order, inverse)
    assert not packed[order < 0].any(), "rows of padding are zero"
    y = ops.experts(packed, offsets, t["w13"], t["w2"], case.activation, t["b13"], t["b2"])
    return ops.combine(y, inverse, weights, t["residual"]), ids


def by_definition(
    case: Case, t: dict[str, Tensor | None], ids: Tensor, between: Any
) -> tuple[Tensor, list[list[bool]]]:
    """The same in float64."""
    keeps = dense.kept(ids.tolist(), case.experts, case.capacity)
    at = torch.tensor(dense.chosen(case.rule, t["logits"], t["bias"], case.top_k)).view(case.tokens, case.top_k)
    weights = dense.weigh(case.rule, t["logits"], at, case.scale)
    given = (t["x"], t["w13"], t["w2"], between, t["b13"], t["b2"], t["residual"])
    return dense.combined(ids.tolist(), keeps, weights, *given), keeps


def gradients(output: Tensor, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    found = (
        torch.autograd.grad(output, list(inputs.values()), grad, allow_unused=True)
        if output.requires_grad
        else [None] * len(inputs)
    )
    return {
        name: torch.zeros_like(one) if got is None else got
        for (name, one), got in zip(inputs.items(), found, strict=True)
    }


def check(case: Case) -> None:
    t = tensors(case)
    names = [name for name, learns in zip(LEARNING, case.learns, strict=True) if learns and t[name] is not None]
    for name in names:
        t[name].requires_grad_()
    before = {name: (one.detach().clone(), one.stride()) for name, one in t.items() if one is not None}
    got, ids = run(case, t)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(case.seed + 1)).to(case.dtype)
    ours = gradients(got, {name: t[name] for name in names}, grad)
    for name, (values, stride) in before.items():
        torch.testing.assert_close(t[name].detach(), values, rtol=0, atol=0, equal_nan=True, msg=f"{name} was written")
        assert t[name].stride() == stride

    exact = {
        name: None if one is None else one.detach().double().requires_grad_(name in names) for name, one in t.items()
    }
    want_ids = torch.tensor(dense.chosen(case.rule, exact["logits"], exact["bias"], case.top_k)).view(
        case.tokens, case.top_k
    )
    assert torch.equal(ids.int(), spoilt_ids(case, want_ids.int()))
    want, keeps = by_definition(case, exact, ids, lambda sums: dense.inner(case.activation, sums))
    theirs = gradients(want, {name: exact[name] for name in names}, grad.double())

    # Roundings are of numbers as large as those of the same layer with all numbers positive, whose slopes are at least as large.
    large = {
        name: None
        if one is None
        else (one if name in ("logits", "bias") else one.detach().abs().nan_to_num(0, 0, 0))
        .detach()
        .requires_grad_(name in names)
        for name, one in exact.items()
    }
    most, _ = by_definition(case, large, ids, lambda sums: dense.plain(case.activation, sums))
    bounds = gradients(most, {name: large[name] for name in names}, grad.double().abs())

    spoilt_token = ~exact["x"].detach().isfinite().all(1)
    spoilt_expert = ~(
        exact["w13"].detach().flatten(1).isfinite().all(1) & exact["w2"].detach().flatten(1).isfinite().all(1)
    )
    token, expert = ~spoilt_token, ~spoilt_expert
    for t_, (of_token, inside) in enumerate(zip(ids.tolist(), keeps, strict=True)):
        for e, keep in zip(of_token, inside, strict=True):
            if keep:
                token[t_] &= not spoilt_expert[e]
                expert[e] &= not spoilt_token[t_]
    # A token without a kept row of a special expert or of its own special number.
    eps = torch.finfo(case.dtype).eps
    tiny = 1e-5 if case.dtype == torch.float16 else 1e-30  # float16 has no relative precision below
    for name, mine, other, bound in [
        ("output", got, want, most),
        *((name, ours[name], theirs[name], bounds[name]) for name in names),
    ]:
        clean = expert if name in ("w13", "w2", "b13", "b2") else token
        clean = torch.ones_like(token) if name == "residual" else clean
        assert mine.shape == other.shape and mine.dtype == case.dtype and (name != "output" or mine.is_contiguous())
        mine, other, bound = mine.detach().double()[clean], other.detach()[clean], bound.detach()[clean]
        if name == "logits":  # weights that renormalise take a mean away
            bound = bound.abs().sum(1, keepdim=True) + case.top_k * most.detach()[clean].abs().mul(
                grad.double().abs()[clean]
            ).sum(1, keepdim=True)
        wrong = ~((mine - other).abs() <= 16 * eps * (bound.abs() + other.abs()) + tiny)
        assert not wrong.any(), (
            f"{name}: {mine[wrong][:3].tolist()} for {other[wrong][:3].tolist()}, bound {bound.expand_as(other)[wrong][:3].tolist()}"
        )


drawn = partial(
    settings,
    deadline=None,
    database=None,
    derandomize="OPERATOR_CASES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)


@drawn(max_examples=FEW)
@given(case=cases())
def test_a_layer_is_that_of_its_definition(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.campaign
@drawn(max_examples=max(1, CASES - FEW))
@given(case=cases())
def test_any_layer_is_that_of_its_definition(case: Case) -> None:
    check(case)
