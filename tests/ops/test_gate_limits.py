"""The gate where scores, sums and slopes vanish or are infinite: one result in all rules, dtypes and directions."""

import os

import pytest
import torch
from gate_limits import SPECIAL, biases, check, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.gate import FUSED
from moe_routing_kernels.routers import ROUTERS, scaled
from moe_routing_kernels.routers.formulas import softmax

torch.set_num_threads(1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CASES = int(os.environ.get("GATE_CASES", "200"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", FUSED)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_ids_weights_and_gradients_have_the_limit(rule: str, dtype: torch.dtype, top_k: int) -> None:
    logits = rows(16, dtype)
    check(logits, top_k, rule, None)
    if ROUTERS[rule].bias:
        for bias in biases(16, dtype).values():
            check(logits, top_k, rule, bias)


@pytest.mark.parametrize("rule", ["deepseek_v3", "sigmoid_renorm", "sqrtsoftplus_renorm"])
@pytest.mark.parametrize("low", [-89.0, -95.0, -120.0, -1e4])
def test_scores_that_vanish_give_a_layer_of_zeros(rule: str, low: float) -> None:
    """Of NaN weights a layer's rows were NaN."""
    logits = torch.full((3, 16), low, requires_grad=True)
    x, w13, w2 = torch.ones(3, 4), torch.ones(16, 6, 4), torch.ones(16, 4, 3)
    out = ops.layer(x, logits, w13, w2, 2, rule)
    out.sum().backward()
    assert out.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    if low < -1000:
        assert not out.any()


@pytest.mark.parametrize("rule", FUSED)
def test_second_derivatives_are_finite_everywhere(rule: str) -> None:
    for dtype in (torch.float32, torch.float64):
        logits = rows(16, dtype).requires_grad_()
        weights = ops.gate(logits, 3, rule)[1]
        (first,) = torch.autograd.grad((weights * torch.arange(3)).sum(), logits, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), logits)
        assert first.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("rule", FUSED)
def test_the_rule_itself_has_the_same_limits(rule: str) -> None:
    """`routers`, which the benches take as the reference, and the operators agree."""
    for dtype in (torch.float64, torch.float32):
        logits = rows(16, dtype)
        ids, weights = ROUTERS[rule].load()(logits, 3)
        want_ids, want = ops.gate(logits, 3, rule)
        score = ROUTERS[rule].score(logits)
        assert torch.equal(score.gather(1, ids.long()), score.gather(1, want_ids.long()))
        torch.testing.assert_close(weights.double(), want.double(), rtol=1e-6, atol=1e-7)
    logits = rows(16, torch.float32).requires_grad_()
    ROUTERS[rule].load()(logits, 3)[1].sum().backward()
    finite = logits.detach().amax(1).isfinite()
    assert logits.grad is not None and logits.grad[finite].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_softmax_tells_infinity_from_the_largest_number(dtype: torch.dtype) -> None:
    """A model may mask logits by the least number, or by -inf. NaN stays NaN, in the derivative, too."""
    inf, most = torch.inf, torch.finfo(dtype).max
    rows = [
        (inf, most, 0),
        (most, most, -inf),
        (-most, -inf, -inf),
        (-inf, -inf, -inf),
        (inf, inf, -inf),
        (0, -most, -inf),
    ]
    want = [(1, 0, 0), (0.5, 0.5, 0), (1, 0, 0), (1 / 3, 1 / 3, 1 / 3), (0.5, 0.5, 0), (1, 0, 0)]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    shares = softmax(logits)
    torch.testing.assert_close(shares, torch.tensor(want, dtype=dtype))
    (slopes,) = torch.autograd.grad(shares, logits, torch.tensor([[1.0, -2.0, 4.0]], dtype=dtype).expand_as(shares))
    assert slopes.isfinite().all() and not slopes[[0, 2, 3, 4, 5]].any() and slopes[1].any()
    for token in ((torch.nan, 0, 1), (torch.nan, inf, -inf)):
        logits = torch.tensor(token, dtype=dtype, requires_grad=True)
        shares = softmax(logits)
        shares[2].backward()
        assert logits.grad is not None and shares.isnan().all() and logits.grad.isnan().all()


@given(st.data())
@settings(max_examples=CASES, deadline=None, derandomize=True)
def test_any_logits(data: st.DataObject) -> None:
    rule, dtype = data.draw(st.sampled_from(FUSED)), data.draw(st.sampled_from(DTYPES))
    experts = data.draw(st.sampled_from([16, 24, 64] if "groups" in ROUTERS[rule].options else [1, 2, 5, 16, 33]))
    keep = experts // 8 * 3 if "groups" in ROUTERS[rule].options else experts
    top_k = data.draw(st.integers(1, min(keep, 8)))
    value = st.sampled_from(SPECIAL) | st.floats(-30, 30, width=32)
    tokens = data.draw(st.lists(st.lists(value, min_size=experts, max_size=experts), min_size=1, max_size=3))
    logits = torch.tensor(tokens, dtype=torch.float64).to(dtype)
    named = biases(experts, dtype) if ROUTERS[rule].bias else {}
    check(logits, top_k, rule, data.draw(st.sampled_from([None, *named.values()])))


@pytest.mark.parametrize("rule", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_scale_multiplies_weights_and_gradients(rule: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    logits = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    base, own = ops.gate(logits, 3, rule)[1], ROUTERS[rule].scale
    (slope,) = torch.autograd.grad(base.square().sum(), logits)
    for scale in (0.5, 2.827, own):
        got = ops.gate(logits, 3, rule, scale=scale)[1]
        torch.testing.assert_close(got, base * (scale / own), rtol=1e-6, atol=0)
        (changed,) = torch.autograd.grad(got.square().sum(), logits)
        torch.testing.assert_close(changed, slope * (scale / own) ** 2, rtol=1e-5, atol=1e-9)
        named = ROUTERS[scaled(rule, scale)].load()(logits.detach(), 3)[1]
        torch.testing.assert_close(named.to(dtype), got.detach(), rtol=1e-6, atol=1e-7)


def test_every_operator_with_a_rule_takes_a_scale() -> None:
    torch.manual_seed(3)
    x, logits, w13, w2 = torch.randn(5, 4), torch.randn(5, 6), torch.randn(6, 6, 4), torch.randn(6, 4, 3)
    once = ops.layer(x, logits, w13, w2, 2, "sigmoid_renorm")
    torch.testing.assert_close(ops.layer(x, logits, w13, w2, 2, "sigmoid_renorm", scale=2.5), 2.5 * once)
    routed, same = ops.route(x, logits, 2, "llama4", scale=0.25), ops.route(x, logits, 2, "llama4")
    torch.testing.assert_close(routed.topk_weights, same.topk_weights / 4)
    assert torch.equal(routed.topk_ids, same.topk_ids)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), True, "2"])
def test_a_scale_that_is_none_is_refused(scale: object) -> None:
    with pytest.raises(UserError, match=r"^scale: got .*; allowed: "):
        ops.gate(torch.randn(2, 4), 1, "llama4", scale=scale)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "sigmoid_renorm_x1",
        "sigmoid_renorm_x2.0",
        "sigmoid_renorm_x02",
        "x_x2",
        "llama4_x0",
        "llama4_x1e999",
        "llama4_x",
        "llama4_x1..5",
    ],
)
def test_a_scaled_rule_has_one_name(name: str) -> None:
    assert name not in ROUTERS
    with pytest.raises(KeyError):
        ROUTERS[name]
    with pytest.raises(UserError, match=r"^rule: got "):
        ops.gate(torch.randn(2, 4), 1, name)


def test_a_scaled_rule_keeps_its_options() -> None:
    rule = ROUTERS["deepseek_v3_x0.125"]
    assert (rule.scale, rule.options["groups"], rule.bias) == (0.125, 8, True)
    assert scaled("deepseek_v3_x0.125", 2.5) == "deepseek_v3" and scaled("deepseek_v3_x0.125", 3) == "deepseek_v3_x3"
    with pytest.raises(UserError, match=r"^experts for router deepseek_v3_x0\.125"):
        rule.check(12, 2)
