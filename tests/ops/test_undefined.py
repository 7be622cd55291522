"""Rows that belong to no expert hold undefined numbers, which nothing reads: neither an output nor a gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from undefined import IDS, POISONS, spoil, undefined_products, uninitialised

from moe_routing_kernels import ops
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.ops import backends, cuda, reference
from moe_routing_kernels.ops import transformers as plugin
from moe_routing_kernels.permute import LAYOUTS
from moe_routing_kernels.target import Target

torch.set_num_threads(1)
TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 6, 4, 8, 8
ACTIVATIONS = ("swiglu", "swiglu_oai")
ALL_ACTIVATIONS = ("swiglu", "geglu", "relu2", "swiglu_oai")


@pytest.fixture(params=POISONS.values(), ids=POISONS)
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """What undefined rows hold, in buffers of torch and behind products."""
    undefined_products(monkeypatch, request.param)
    with uninitialised():
        yield request.param


def drawn(activation: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x (T, H), weights (T, 2), w13, w2 and biases where the activation has them, all of which require a gradient."""
    torch.manual_seed(17)
    wide = INTERMEDIATE * (1 if activation == "relu2" else 2)
    shapes = [(TOKENS, HIDDEN), (TOKENS, 2), (EXPERTS, wide, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)]
    shapes += [(EXPERTS, wide), (EXPERTS, HIDDEN)] if activation == "swiglu_oai" else []
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def whole(ids: Tensor, capacity: int | None, activation: str, *given: Tensor) -> Tensor:
    x, weights, *network = given
    return ops.fused_experts(x, ids, weights, *network[:2], capacity, activation, *network[2:])


def stages(ids: Tensor, capacity: int | None, layout: str, activation: str, *given: Tensor) -> Tensor:
    x, weights, *network = given
    _, offsets, order, inverse = ops.permute(ids, EXPERTS, capacity, layout)
    rows = ops.pack(x, order, inverse)
    return ops.combine(ops.experts(rows, offsets, *network[:2], activation, *network[2:]), inverse, weights)


def by_hand(ids: Tensor, capacity: int | None, activation: str, *given: Tensor) -> Tensor:
    """Token by token: the sum over the choices that an expert keeps."""
    x, weights, *network = given
    w13, w2, b13, b2 = network + [torch.zeros(EXPERTS, 1).to(x)] * (4 - len(network))
    taken, rows = [0] * EXPERTS, []
    for token in range(TOKENS):
        total = 0 * (x[token] + weights[token].sum() + sum(entry.sum() for entry in network))
        for choice, expert in enumerate(ids[token].tolist()):
            if not 0 <= expert < EXPERTS:
                continue
            taken[expert] += 1
            if capacity is None or taken[expert] <= capacity:
                inner = reference.activate(activation, w13[expert] @ x[token] + b13[expert])
                total = total + weights[token, choice] * (w2[expert] @ inner + b2[expert])
        rows.append(total)
    return torch.stack(rows)


def results(function, given: list[Tensor], *options) -> list[Tensor]:
    """Output and gradients."""
    output = function(*options, *given)
    torch.manual_seed(18)
    return [output.detach(), *torch.autograd.grad(output, given, torch.randn_like(output))]


def compare(got: list[Tensor], want: list[Tensor], **tolerance: float) -> None:
    for entry, right in zip(got, want, strict=True):
        assert right.isfinite().all()
        torch.testing.assert_close(entry, right, **tolerance)


@pytest.mark.parametrize("capacity", [None, 1], ids=["all", "dropped"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", IDS)
def test_a_layer_reads_rows_of_experts_alone(name: str, activation: str, capacity: int | None, poison: float) -> None:
    """With training and without; the weights of what is dropped may be NaN."""
    ids, given = torch.tensor(IDS[name]), drawn(activation)
    options = (ids, capacity, activation)
    want = results(by_hand, given, *options)
    compare(results(whole, given, *options), want)
    with torch.no_grad():
        given[1][(ids < 0) | (ids >= EXPERTS)] = torch.nan
        compare([whole(*options, *given)], want[:1])
    compare(results(whole, given, *options), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", IDS)
def test_the_stages_of_a_layer_do_so(name: str, activation: str, layout: str, poison: float) -> None:
    ids, given = torch.tensor(IDS[name]), drawn(activation)
    want = results(by_hand, given, ids, 1, activation)
    with torch.no_grad():
        given[1][(ids < 0) | (ids >= EXPERTS)] = torch.nan
    compare(results(stages, given, ids, 1, layout, activation), want)


def test_router_and_all(poison: float) -> None:
    """A token whose logits hold NaN, the first of all, takes no row: every other gradient is as without it."""
    x, _, w13, w2 = drawn("swiglu")
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    others = torch.arange(TOKENS) > 0

    def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return ops.layer(x, logits, w13, w2, 2, capacity=2, residual=x)

    want = results(layer, [x[others].detach().requires_grad_(), logits[others].requires_grad_(), w13, w2])
    broken = logits.detach().clone()
    broken[0, 2] = torch.nan
    output = layer(x, broken.requires_grad_(), w13, w2)
    torch.manual_seed(18)
    grad = torch.cat([torch.ones(1, HIDDEN), torch.randn(TOKENS - 1, HIDDEN, dtype=torch.float64)])
    d_x, d_logits, d_w13, d_w2 = torch.autograd.grad(output, (x, broken, w13, w2), grad)
    torch.manual_seed(18)
    compare([output[others].detach(), d_x[others], d_logits[others], d_w13, d_w2], want)
    assert torch.equal(output[0], x[0]) and torch.equal(d_x[0], grad[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["grouped_products", "blocks"])
@pytest.mark.parametrize("activation", ALL_ACTIVATIONS)
def test_gradients_on_cuda(activation: str, dtype: torch.dtype, poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels of ours; rows of no expert hold anything, of the inputs and of every product."""
    monkeypatch.setattr(backends, "target", lambda device: Target.of("sm_90a"))
    monkeypatch.setattr(cuda, "grouped_mm", F.grouped_mm)
    offsets = torch.tensor([0, 3, 3, 9, 9], dtype=torch.int32)
    torch.manual_seed(17)
    _, _, w13, w2, *biases = (entry.detach() for entry in drawn(activation, dtype))
    for weights in (w13, w2):  # of experts without rows, the last of which has the blocks that are too many
        weights[[1, 3]] = torch.inf
    rows, grad = (torch.randn(12, HIDDEN).to(dtype) for _ in range(2))
    b13, b2 = biases or (None, None)
    rest = (offsets, w13, w2, activation, b13, b2, None, (True, True, True, bool(biases), bool(biases)))
    want = reference.experts_backward(grad, rows, *rest)
    for entry in (rows, grad):
        spoil(entry, offsets, poison)
    got = cuda.experts_backward(grad, rows, *rest)
    for entry, right in zip([got[0][:9], *got[1:]], [want[0][:9], *want[1:]], strict=True):
        if right is not None:
            assert float((entry - right).double().norm() / right.double().norm()) < 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_padding_have_no_weight(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel multiplies the gradient of a row by its weight: that of padding is 0, whatever the first token's weights are."""
    cute_training = pytest.importorskip("moe_routing_kernels.experts.cute_training")
    ids = torch.tensor(IDS["some_elsewhere"])[[1, 0, 2, 3, 4, 5]]  # the first token has no row
    _, offsets, order, inverse = ops.permute(ids, EXPERTS, 3, layout)
    x, weights, w13, w2 = (entry.detach() for entry in drawn("swiglu", torch.float32))
    weights[0] = torch.nan
    seen = []

    def backward(problem: Experts, grad: Tensor, rows: Tensor, *rest, wanted: tuple[bool, ...]):
        seen.append(rest[-1])
        return torch.zeros_like(rows), torch.zeros_like(w13), torch.zeros_like(w2), torch.zeros(len(rows))

    monkeypatch.setattr(cute_training, "backward", backward)
    monkeypatch.setattr(cuda, "pack", reference.pack)
    monkeypatch.setattr(cuda, "keeps_preact", lambda *_: True)
    packed = ops.pack(x, order, inverse)
    sums = torch.zeros(len(order), 2 * INTERMEDIATE)
    cuda.layer_backward(x, packed, order, inverse, offsets, weights, w13, w2, "swiglu", sums, [True] * 4)
    (scales,) = seen
    assert not scales[order < 0].any() and scales[order >= 0].isfinite().all() and (order < 0).any()


class Network(torch.nn.Module):
    """Experts as transformers describes them: with biases, learned activations and norms, transposed weights."""

    def __init__(self, gated: bool = True, transposed: bool = False, biased: bool = False, normed: bool = False):
        super().__init__()
        torch.manual_seed(19)
        wide, first = INTERMEDIATE * (1 + gated), "gate_up_proj" if gated else "up_proj"
        self.num_experts, self.has_gate, self.is_transposed, self.has_bias = EXPERTS, gated, transposed, biased
        self.has_post_expert_norm, self.is_concatenated, self.first = normed, True, first
        for name, width, inner in ((first, wide, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
            weight = torch.randn(EXPERTS, width, inner)
            setattr(self, name, torch.nn.Parameter(weight.mT.contiguous() if transposed else weight))
            if biased:
                setattr(self, f"{name}_bias", torch.nn.Parameter(torch.randn(EXPERTS, width)))
        self.act_fn = torch.nn.PReLU(INTERMEDIATE)
        if normed:
            self.post_expert_norm = torch.nn.LayerNorm(HIDDEN)

    def _apply_gate(self, sums: Tensor) -> Tensor:
        gate, up = sums.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=7)) * (up + 1)

    def expert(self, row: Tensor, expert: int) -> Tensor:
        for name in (self.first, "down_proj"):
            weight = getattr(self, name)[expert]
            row = row @ (weight if self.is_transposed else weight.T)
            row = row + getattr(self, f"{name}_bias")[expert] if self.has_bias else row
            if name == self.first:
                row = (self._apply_gate if self.has_gate else self.act_fn)(row[None])[0]
        return self.post_expert_norm(row) if self.has_post_expert_norm else row


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    "form",
    [{"biased": True}, {"biased": True, "transposed": True}, {"gated": False}, {"normed": True}],
    ids=["biases", "transposed", "learned_activation", "learned_norm"],
)
def test_experts_of_transformers(form: dict, name: str, poison: float) -> None:
    """Every parameter between and behind the products gets the gradient of rows that are of an expert."""
    pytest.importorskip("transformers")
    module, ids = Network(**form), torch.tensor(IDS[name])
    torch.manual_seed(17)
    x, weights = torch.randn(TOKENS, HIDDEN).requires_grad_(), torch.rand(TOKENS, 2).requires_grad_()
    given = [x, weights, *module.parameters()]

    def loop(*_: Tensor) -> Tensor:
        rows = []
        for token, chosen in enumerate(ids.tolist()):
            row = 0 * (x[token] + weights[token].sum() + sum(entry.sum() for entry in module.parameters()))
            for choice, expert in enumerate(chosen):
                if 0 <= expert < EXPERTS:
                    row = row + weights[token, choice] * module.expert(x[token], expert)
            rows.append(row)
        return torch.stack(rows)

    got = results(lambda *_: plugin.experts(module, x, ids, weights), given)
    compare(got, results(loop, given), rtol=1e-4, atol=1e-4)


def test_the_poison_reaches_what_reads_it(poison: float) -> None:
    """The tests above can fail: a sum over all rows is spoilt."""
    offsets = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32)
    _, _, w13, w2 = drawn("swiglu")
    rows = torch.ones(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = ops.experts(rows, offsets, w13, w2)
    (gradient,) = torch.autograd.grad(y[:3].sum(), rows)
    plain = F.grouped_mm(torch.ones(5, 8).bfloat16(), torch.ones(4, 8, 8).bfloat16(), offs=offsets[1:])
    for outcome in (y, gradient, plain):
        torch.testing.assert_close(outcome[3:], torch.full_like(outcome[3:], poison), equal_nan=True)
