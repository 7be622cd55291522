"""The operators experts and layer: their definition, gradients, what torch.library asks for, and bad input."""

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from activations import EVERY
from moe_routing_kernels import ops
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.ops import backends, reference
from moe_routing_kernels.target import CPU, Target

torch.set_num_threads(1)
HIDDEN, INTERMEDIATE, ROWS = 6, 4, 9
OFFSETS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)  # the second expert has no rows, the last two rows no expert


def drawn(activation: str, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor | None]:
    """rows (R, H), w13 (E, N, H), w2 (E, H, I), b13, b2, all of which require a gradient."""
    torch.manual_seed(17)
    experts, wide = len(OFFSETS) - 1, INTERMEDIATE * (1 if activation == "relu2" else 2)
    shapes = [(ROWS, HIDDEN), (experts, wide, HIDDEN), (experts, HIDDEN, INTERMEDIATE)]
    if activation == "swiglu_oai":
        shapes += [(experts, wide), (experts, HIDDEN)]
    found = [(scale * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]
    return found + [None] * (5 - len(found))


def run(activation: str, rows: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None = None, b2: Tensor | None = None):
    """The operator's rows that are of an expert."""
    return ops.experts(rows, OFFSETS, w13, w2, activation, b13, b2)[: OFFSETS[-1]]


def by_hand(
    activation: str, rows: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None = None, b2: Tensor | None = None
):
    """Row by row, from the formulas."""
    found = []
    for e, (first, end) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        for row in rows[first:end]:
            sums = w13[e] @ row if b13 is None else w13[e] @ row + b13[e]
            gate, up = sums[:INTERMEDIATE], sums[INTERMEDIATE:]
            if activation == "relu2":
                inner = torch.where(sums > 0, sums * sums, 0)
            elif activation == "swiglu":
                inner = gate / (1 + torch.exp(-gate)) * up
            elif activation == "geglu":
                inner = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
            else:
                limit, alpha, shift = (10, 1, 0) if activation == "swiglu_limit10" else (7, 1.702, 1)
                gate = torch.where(gate > limit, limit, gate)
                up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
                inner = gate / (1 + torch.exp(-alpha * gate)) * (up + shift)
            found.append(w2[e] @ inner if b2 is None else w2[e] @ inner + b2[e])
    return torch.stack(found)


@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["small", "clamped"])
@pytest.mark.parametrize("activation", EVERY)
def test_output_and_gradients_are_those_of_the_formulas(activation: str, scale: float) -> None:
    inputs = drawn(activation, torch.float64, scale)
    given = [one for one in inputs if one is not None]
    torch.manual_seed(18)
    grad = torch.randn(int(OFFSETS[-1]), HIDDEN, dtype=torch.float64)
    got, want = run(activation, *inputs), by_hand(activation, *inputs)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(one, given, grad) for one in (got, want)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    d_rows, d_w13, d_w2 = gradients[0][:3]
    assert not d_rows[OFFSETS[-1] :].any() and not d_w13[1].any() and not d_w2[1].any()
    limit = activation_of(activation).limit
    if limit is not None and scale > 1:
        sums = torch.cat([given[0][:3] @ given[1][0].T, given[0][3:7] @ given[1][2].T])
        assert (sums[:, :INTERMEDIATE] > limit).any() and (sums[:, INTERMEDIATE:] < -limit).any()


@pytest.mark.parametrize("activation", EVERY)
def test_slopes_at_the_limit_and_of_what_is_no_number(activation: str) -> None:
    """Those of torch's automatic differentiation of the formula, at each pair of special values; values as the formula's."""
    limit = activation_of(activation).limit or 7.0
    sides = [
        side
        for at in (-limit, limit)
        for side in (at, torch.nextafter(*torch.tensor([at, 2 * at]).double()).item(), 0.999 * at)
    ]
    special = torch.tensor([*sides, 0.0, -0.0, 1.5, 1e30, -1e30, torch.inf, torch.nan], dtype=torch.float64)
    sums = torch.cartesian_prod(special, special) if activation_of(activation).gated else special[:, None]
    sums = sums.clone().requires_grad_()
    value = activate(activation, sums)
    (want,) = torch.autograd.grad(value, sums, torch.full_like(value, 0.5))
    got = reference.activation_gradient(activation, sums.detach(), torch.full_like(value, 0.5))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-300, equal_nan=True)
    known = activation_of(activation)
    assert bool(value.isnan()[sums.isnan().any(1)].all()), "no NaN is lost"
    if known.limit is not None:
        assert (
            not got.detach()[:, 0][sums[:, 0] > limit].any() and not got.detach()[:, 1][sums[:, 1].abs() > limit].any()
        )
        finite = ~sums.isnan().any(1) & (sums[:, 0] > -1e3)
        assert bool(value[finite].abs().le((limit + known.shift) * limit).all()), "infinity is clamped"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_is_one_rounding(dtype: torch.dtype) -> None:
    for activation in EVERY:
        inputs = drawn(activation, dtype)
        got = run(activation, *inputs)
        want = run(activation, *(one if one is None else one.double() for one in inputs))
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_shapes_are_those_of_the_backend_that_is_named() -> None:
    """Not of what is installed: torch keeps compiled graphs on disk, and a process with other packages or another GPU may load them."""
    pytest.importorskip("cutlass")
    library = torch.ops.moe_routing_kernels
    with FakeTensorMode():
        x, w13, w2 = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4, 64), (3, 64, 64), (3, 64, 32)))
        inverse, order, offsets = (torch.empty(size, dtype=torch.int32) for size in ((4, 2), (9,), (4,)))
        given = (x, order, inverse, offsets, torch.empty(4, 2), w13, w2, "swiglu", None, None, x)
        assert [one.shape for one in library.layer_training(*given, "")] == [(4, 64), (9, 64), (9, 64), (0,)]
        assert [one.shape for one in library.layer_training(*given, "cute 9.0")] == [(4, 64), (9, 64), (0,), (9, 64)]
        rows = (x, offsets, w13, w2, "swiglu", None, None)
        assert [one.shape for one in library.experts_training(*rows, "")] == [(4, 64), (0,)]
        assert [one.shape for one in library.experts_training(*rows, "cute 9.0")] == [(4, 64), (4, 64)]


@pytest.mark.parametrize(
    ("device", "target", "named"),
    [
        ("cpu", CPU, ""),
        ("cuda", Target.of("sm_90a"), "cute 9.0"),
        ("cuda", Target.of("sm_86"), "cute 8.6"),
        ("cuda", Target.of("sm_75"), ""),
    ],
)
def test_graphs_name_the_backend_that_trains(
    monkeypatch: pytest.MonkeyPatch, device: str, target: Target, named: str
) -> None:
    """Of a layer and of experts alone, compiled whole."""
    monkeypatch.setattr(chooser, "installed", lambda package: package == "cutlass")
    monkeypatch.setattr(backends, "target", lambda _: target)
    backends._training.cache_clear()
    found = backends.training(torch.device(device))
    assert found == named
    monkeypatch.setattr(backends, "training", torch.compiler.assume_constant_result(lambda _: found))
    told = []

    def record(graph: torch.fx.GraphModule, _) -> object:
        told.extend(node.args[-1] for node in graph.graph.nodes if "training" in str(node.target))
        return graph.forward

    rows, w13, w2, *_ = drawn("swiglu", torch.float32)
    torch.compiler.reset()
    torch.compile(ops.experts, fullgraph=True, backend=record)(rows, OFFSETS, w13, w2)
    torch.compile(whole, fullgraph=True, backend=record)(rows, torch.randn(ROWS, 3), w13, w2)
    assert told == [named, named]


def whole(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """A layer with drops and a residual."""
    return ops.layer(x, logits, w13, w2, 2, "softmax_topk", capacity=3, residual=x)


def test_a_layer_is_the_sum_over_kept_choices() -> None:
    """Output and gradients in float64 against a loop over tokens, and the same compiled whole."""
    torch.manual_seed(17)
    shapes = ((7, HIDDEN), (7, 3), (3, 2 * INTERMEDIATE, HIDDEN), (3, HIDDEN, INTERMEDIATE))
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    x, logits, w13, w2 = inputs
    weights, ids = logits.softmax(1).topk(2)
    taken, rows, dropped = [0, 0, 0], [], 0
    for token in range(7):
        total = x[token]
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            taken[expert] += 1
            if taken[expert] > 3:
                dropped += 1
                continue
            gate, up = (w13[expert] @ x[token]).chunk(2)
            total = total + weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    assert dropped > 1
    want, grad = torch.stack(rows), torch.randn(7, HIDDEN, dtype=torch.float64)
    exact = [want, *torch.autograd.grad(want, inputs, grad)]
    torch.compiler.reset()
    for function in (whole, torch.compile(whole, fullgraph=True, backend="aot_eager")):
        output = function(*inputs)
        for got, right in zip([output, *torch.autograd.grad(output, inputs, grad)], exact, strict=True):
            torch.testing.assert_close(got, right)


def test_a_layer_behind_a_router_of_its_own() -> None:
    """Ids that no rule of ours would choose: one expert twice, and -1 for a token that has one expert only."""
    torch.manual_seed(17)
    shapes = ((3, HIDDEN), (3, 2), (3, 2 * INTERMEDIATE, HIDDEN), (3, HIDDEN, INTERMEDIATE))
    x, weights, w13, w2 = inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    ids = torch.tensor([[2, 2], [-1, 0], [0, 2]], dtype=torch.int32)

    def expert(token: int, one: int) -> Tensor:
        gate, up = (w13[one] @ x[token]).chunk(2)
        return w2[one] @ (torch.nn.functional.silu(gate) * up)

    chosen = [[2, 2], [None, 0], [0, 2]]
    terms = [
        [weights[t, j] * expert(t, one) for j, one in enumerate(ones) if one is not None]
        for t, ones in enumerate(chosen)
    ]
    want, grad = torch.stack([sum(ones, x[t]) for t, ones in enumerate(terms)]), torch.randn(3, HIDDEN).double()
    got = ops.fused_experts(x, ids, weights, w13, w2, residual=x)
    found = torch.autograd.grad(got, inputs, grad)
    for one, right in zip([got, *found], [want, *torch.autograd.grad(want, inputs, grad)], strict=True):
        torch.testing.assert_close(one, right)
    with torch.no_grad():
        for same in (ids, ids.long()):
            assert torch.equal(ops.fused_experts(x, same, weights, w13, w2, residual=x), got)
    for arguments, what in (
        ((x, ids.short(), weights, w13, w2), r"topk_ids: got '\(3, 2\) of torch.int16'"),
        ((x[:2], ids, weights, w13, w2), "x: got"),
        ((x, ids, weights.float(), w13, w2), r"weights: got .* allowed: '?\(3, 2\) of torch.float64"),
        ((x, ids, weights, w13[:2], w2), "w13: got"),
    ):
        with pytest.raises(UserError, match=what):
            ops.fused_experts(*arguments)
    with pytest.raises(UserError, match=r"logits: got \(3, 4\); allowed: \(T, 3\): w2 has 3 experts"):
        ops.layer(x, torch.zeros(3, 4).double(), w13, w2, 2)


def test_bad_input_is_explained() -> None:
    rows, w13, w2, b13, b2 = (one.detach() for one in drawn("swiglu_oai", torch.float32))
    for arguments, what in (
        ((rows[0], OFFSETS, w13, w2), r"rows: got '\(6,\) of torch.float32'"),
        ((rows, OFFSETS, w13, w2, "gelu"), "activation: got 'gelu'"),
        ((rows, OFFSETS, w13, w2[:, :5]), r"w2: got .* allowed: '?\(E, 6, I\)"),
        ((rows, OFFSETS, w13, w2.double()), "w2: got"),
        ((rows, OFFSETS, w13[:, :7], w2), r"w13: got .* allowed: '?\(3, 8, 6\)"),
        ((rows, OFFSETS, w13, w2, "relu2"), r"w13: got .* allowed: '?\(3, 4, 6\)"),
        ((rows, OFFSETS[:3], w13, w2), r"offsets: got .* allowed: '?\(4,\) of torch.int32"),
        ((rows, OFFSETS.long(), w13, w2), "offsets: got"),
        ((rows, OFFSETS, w13, w2, "swiglu", b13), "b13: got 'a bias'"),
        ((rows, OFFSETS, w13, w2, "swiglu_oai", b13), "b2: got 'none'.*hint: swiglu_oai_unbiased has none"),
        ((rows, OFFSETS, w13, w2, "swiglu_oai_unbiased", b13, b2), "b13: got 'a bias'"),
        ((rows, OFFSETS, w13, w2, "swiglu_limit10", b13, b2), "b13: got 'a bias'"),
        (
            (rows, OFFSETS, w13, w2, "swiglu_limit10.0"),
            "activation: got 'swiglu_limit10.0'; allowed: swiglu, .*swiglu_limit<number>",
        ),
        ((rows, OFFSETS, w13, w2, None), "activation: got None"),
        ((rows, OFFSETS, w13, w2, "swiglu_oai", b13, b2[:, :2]), "b2: got"),
        ((rows, OFFSETS.to("meta"), w13, w2), "device of offsets"),
    ):
        with pytest.raises(UserError, match=what):
            ops.experts(*arguments)


def test_no_rows_at_all() -> None:
    rows, w13, w2 = (one.detach() for one in drawn("swiglu", torch.float32)[:3])
    none = torch.zeros(4, dtype=torch.int32)
    assert ops.experts(rows[:0], none, w13, w2).shape == (0, HIDDEN)
    assert not reference.experts(rows, none, w13, w2, "swiglu", None, None).any()


@pytest.mark.parametrize("size", [1.0, 300.0], ids=["a row", "an activated number"])
def test_what_float16_cannot_hold_is_infinite(size: float) -> None:
    """On every device, as kernels write both in float16: a weight of 1/8 that follows cannot make it finite again."""
    x = torch.full((1, 8), size, dtype=torch.float16)
    w13, w2 = torch.full((2, 16, 8), 10.0, dtype=torch.float16), torch.full((2, 8, 8), 10.0, dtype=torch.float16)
    _, offsets, order, inverse = ops.permute(torch.zeros(1, 1, dtype=torch.int32), 2)
    y = ops.experts(ops.pack(x, order, inverse), offsets, w13, w2)
    exact = 80 * (80 * size) ** 2  # of rows; activated numbers are an eightieth
    assert exact > 65504 and (size == 1 or exact / 80 > 65504)
    assert (y == torch.inf).all()
    assert (ops.combine(y, inverse, torch.full((1, 1), 1 / 8)) == torch.inf).all()
    w2[:, :, ::2] = -10.0  # the exact row is 0; that of an infinite number is none
    y = ops.experts(ops.pack(x, order, inverse), offsets, w13, w2)
    assert (y.isnan() if size > 1 else y == 0).all()


def test_an_activated_number_is_infinite_exactly_where_float16_rounds_it_to_infinity() -> None:
    """65519 is 65504 there, 65520 is not."""
    roots = torch.linspace(255.9, 256.1, 4001, dtype=torch.float64).float()[None]
    exact = reference.activated("relu2", roots, torch.float32)
    assert (exact > 65504).any() and (exact < 65520).any()
    rows = reference.activated("relu2", roots, torch.float16)
    assert torch.equal(rows.isinf(), exact.half().isinf()) and torch.equal(rows.half(), exact.half())


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_a_token_with_a_nan_among_its_logits_has_its_residual_alone(residual: bool) -> None:
    torch.manual_seed(17)
    x, logits, w13, w2 = (torch.randn(shape) for shape in ((5, 4), (5, 3), (3, 4, 4), (3, 4, 2)))
    given = torch.randn(5, 4) if residual else None
    want = ops.layer(x, logits, w13, w2, 2, residual=given)
    logits[3, 1] = torch.nan
    logits.requires_grad_()
    got = ops.layer(x, logits, w13, w2, 2, residual=given)
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    others = torch.arange(5) != 3
    assert torch.equal(got[others], want[others]) and gradient[others].isfinite().all()
    assert torch.equal(got[3], torch.zeros(4) if given is None else given[3]) and gradient[3].isnan().all()
