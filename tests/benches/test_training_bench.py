"""The bench `training`: its reference by hand and against automatic differentiation, what its check finds, and its implementations."""

import importlib
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from activations import EVERY
from moe_routing_bench.benches.checks import Cost, tolerance
from moe_routing_bench.benches.experts import definition as experts
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.benches.training import definition, step
from moe_routing_bench.config.expand import cell_of
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.gate import FUSED
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.permute import RowLayout
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.target import Target
from moe_routing_kernels.training import torch_layers

BENCH = BENCHES["training"]
torch.set_num_threads(1)
SHAPE = {"tokens": 40, "hidden": 24, "intermediate": 16, "experts": 5, "top_k": 2, "dtype": "fp32"}
GRADIENTS = ("d_x", "d_logits", "d_w13", "d_w2")


def case(**axes):
    """A cell, its inputs and the reference."""
    cell = cell_of("training", **SHAPE | axes)
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    return cell, inputs, definition.reference(cell, inputs)


def rounded(inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference in the formats of the outputs: what passes."""
    outputs = {name: expected[name].float() for name in BENCH.writes}
    return {name: one.to(inputs["x"].dtype) if name != "d_logits" else one for name, one in outputs.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("factor", [None, 0.75])
def test_two_tokens_by_hand(factor: float | None, dtype: str) -> None:
    """Experts x -> w2 relu(w13 x)^2 of one element; with a capacity of one row, the second token has none left."""
    sizes = {"tokens": 2, "hidden": 1, "intermediate": 1, "experts": 3, "top_k": 2}
    cell = cell_of("training", **sizes, activation="relu2", capacity_factor=factor, dtype=dtype)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    numbers = {
        "x": [[1.0], [2.0]],
        "d_combined": [[1.0], [10.0]],
        "w13": [[[1.0]], [[2.0]], [[5.0]]],
        "w2": [[[1.0]], [[3.0]], [[7.0]]],
    }
    logits = torch.tensor([[math.log(3), 0, -9], [0, math.log(3), -9]])
    inputs = {name: torch.tensor(one, dtype=kind) for name, one in numbers.items()} | {"logits": logits}
    with torch.device("meta"):
        expected = definition.reference(cell, inputs)
    whole = {
        "combined": [[3.75], [37.0]],
        "d_x": [[7.5], [370.0]],
        "d_logits": [[-2.0625, 2.0625, 0.0], [-82.5, 82.5, 0.0]],
        "d_w13": [[[21.5]], [[363.0]], [[0.0]]],
        "d_w2": [[[10.75]], [[121.0]], [[0.0]]],
    }
    dropped = {
        "combined": [[3.75], [0.0]],
        "d_x": [[7.5], [0.0]],
        "d_logits": [[-2.0625, 2.0625, 0.0], [0.0, 0.0, 0.0]],
        "d_w13": [[[1.5]], [[3.0]], [[0.0]]],
        "d_w2": [[[0.75]], [[1.0]], [[0.0]]],
    }
    for name, want in (dropped if factor else whole).items():
        torch.testing.assert_close(expected[name].double(), torch.tensor(want).double(), rtol=1e-6, atol=1e-6)
        assert expected[name].dtype == (torch.float64 if dtype == "fp32" or name == "d_logits" else torch.float32)
    outputs = rounded(inputs, expected)
    kept, size = 2 if factor else 4, 4 if dtype == "fp32" else 2
    forward, by_weights = (kept, 1, 1), (1, kept, 1)
    products = (forward, forward, *(forward, by_weights) * 2)
    cost = Cost(24 + 4 * size + 2 * 2 * size, 24 + 4 * size + 3 * 2 * size, products)
    assert definition.cost(cell, inputs, outputs, expected) == cost
    found = definition.assignment(cell, inputs, expected)
    assert found.ids is expected["topk_ids"] and found.inverse is expected["inverse"]


def differentiated(cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Result and gradients by automatic differentiation in float64 of the experts of another bench, token by token."""
    leaves = {name: inputs[name].double().requires_grad_() for name in ("x", "logits", "w13", "w2")}
    given = inputs | leaves
    ids, weights = ROUTERS[cell.router].load()(leaves["logits"], cell.top_k, inputs.get("bias"))
    kept = definition.reference(cell, inputs)["inverse"] >= 0
    rows = []
    for token in range(cell.tokens):
        row = torch.zeros(cell.hidden, dtype=torch.float64)
        for slot in range(cell.top_k):
            if kept[token, slot]:
                y = experts.apply(cell, leaves["x"][token : token + 1], given, int(ids[token, slot]))
                row = row + weights[token, slot] * y[0]
        rows.append(row)
    combined = torch.stack(rows)
    gradients = torch.autograd.grad(combined, list(leaves.values()), inputs["d_combined"].double())
    return {"combined": combined.detach()} | dict(zip(GRADIENTS, gradients, strict=True))


@pytest.mark.parametrize(
    "axes",
    [
        *({"activation": name} for name in EVERY),
        *({"router": name, "experts": 16, "top_k": 3, "tokens": 9} for name in FUSED),
        {"capacity_factor": 0.5, "skew": 1.0},
        {"top_k": 1, "router": "sigmoid_renorm"},
    ],
    ids=lambda axes: "-".join(map(str, axes.values())),
)
def test_the_reference_is_what_differentiation_finds(axes: dict) -> None:
    """Biases of an activation that has them take part, though they have no gradient here."""
    cell, inputs, expected = case(**{"tokens": 20} | axes)
    for name, want in differentiated(cell, inputs).items():
        scale = float(expected["logit_sums"].norm() if name == "d_logits" else want.norm())
        assert float((expected[name] - want).norm()) < 1e-6 * scale, name  # a rule's weights are float32
    sums = inputs["x"].double() @ inputs["w13"][0].double().T + (inputs["b13"][0] if "b13" in inputs else 0)
    limit = activation_of(cell.activation).limit
    assert limit is None or ((sums > limit).any(0).any() and (sums[:, SHAPE["intermediate"] :] < -limit).any())


def test_products_are_those_of_either_direction() -> None:
    """Of 40 rows: both forward, then of each the gradient of its rows and that of its weights, summed over rows."""
    cell, inputs, expected = case(tokens=20, top_k=2, hidden=24, intermediate=16)
    rows, hidden, wide, inner = 40, 24, 32, 16
    found = definition.cost(cell, inputs, rounded(inputs, expected), expected)
    assert found.products == (
        (rows, hidden, wide),
        (rows, inner, hidden),
        (rows, wide, hidden),
        (hidden, rows, wide),
        (rows, hidden, inner),
        (inner, rows, hidden),
    )
    assert found.flops == 3 * 6 * rows * hidden * inner


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_output_is_compared(dtype: str) -> None:
    """Each scaled by a hundredth (by a tenth among roundings of bf16), not written, or of other tokens or experts."""
    cell, inputs, expected = case(skew=0.5, dtype=dtype)
    good = rounded(inputs, expected)
    found = definition.check(cell, inputs, good, expected)
    assert found.error is None and found.mismatches == 0
    assert found.tolerance == max(tolerance(dtype, n) for n in definition.roundings(cell, False, False).values())
    for name in BENCH.writes:
        much = 1.01 if dtype == "fp32" else 1.1
        unwritten = good[name].clone()
        unwritten.view(-1)[-1] = torch.nan
        for wrong in (good[name] * much, good[name].roll(1, 0), unwritten):
            error = definition.check(cell, inputs, good | {name: wrong}, expected).error
            assert error and error.startswith(name), (name, error)


@pytest.mark.parametrize(("share", "right"), [(2.98, True), (3.02, False)])
def test_the_gradient_of_logits_is_held_against_its_terms(share: float, right: bool) -> None:
    """Twice the limit of a gate in float32 for terms of its size, and once for as large sums; the gradient itself is 0."""
    cell, inputs, expected = case(dtype="bf16")
    gate = tolerance("fp32", 16)
    like = torch.ones_like(expected["d_logits"])
    expected |= {"d_logits": 0 * like, "logit_terms": 2 * gate / tolerance("bf16", 7) * like, "logit_sums": like}
    outputs = rounded(inputs, expected) | {"d_logits": share * gate * like}
    error = definition.check(cell, inputs, outputs, expected).error
    assert error is None if right else error and error.startswith("d_logits: ")


def test_faults_that_are_easily_made() -> None:
    """Gradients that are added up, weighed twice or not at all; a gate whose normalisation has no gradient; gate for up."""
    cell, inputs, expected = case(experts=8, top_k=3)
    good = rounded(inputs, expected)
    inner = SHAPE["intermediate"]
    ids, weights = expected["topk_ids"].long(), expected["topk_weights"]
    share = torch.zeros_like(inputs["logits"]).scatter_(1, ids, weights.float())
    unweighted = inputs | {"logits": torch.zeros_like(inputs["logits"]).scatter_(1, ids, 20.0)}
    for wrong in (
        {"d_w2": 2 * good["d_w2"]},
        {"d_w13": good["d_w13"].roll(inner, 1)},
        {"d_logits": good["d_logits"] + 0.01 * share},
        {"d_logits": good["d_logits"] * share},
        {"d_x": definition.reference(cell, unweighted)["d_x"].float()},
    ):
        assert definition.check(cell, inputs, good | wrong, expected).error


def test_an_expert_with_few_tokens_counts_as_much_as_others() -> None:
    """And one without a token gets zeros: what lay in memory is found, however small."""
    cell, inputs, expected = case(tokens=2000, experts=16, top_k=1, skew=3.7, dtype="bf16")
    good = rounded(inputs, expected)
    loads = expected["topk_ids"].flatten().bincount(minlength=16)
    rare, none = int(loads.masked_fill(loads == 0, 9999).argmin()), int(loads.argmin())
    assert loads.max() > 1000 * loads[rare] and loads[none] == 0
    for name in ("d_w13", "d_w2"):
        for expert, change in ((rare, lambda one: one * 1.2), (none, lambda one: one + 1e-20)):
            wrong = good[name].clone()
            wrong[expert] = change(wrong[expert])
            error = definition.check(cell, inputs, good | {name: wrong}, expected).error
            assert error and error.startswith(f"{name} of expert {expert}: ")


def test_roundings_and_what_an_implementation_declares() -> None:
    """By output, in the order of `writes`; sums over k choices, and over two tiles of I."""
    cells = {dtype: cell_of("training", **SHAPE | {"dtype": dtype, "intermediate": 200}) for dtype in ("bf16", "fp32")}
    plain = definition.roundings(cells["bf16"], False, False)
    assert plain == {"combined": 6, "d_x": 8, "d_logits": 7, "d_w13": 7, "d_w2": 6} and set(plain) == set(BENCH.writes)
    assert definition.roundings(cells["bf16"], True, True) == plain | {"combined": 8, "d_x": 10, "d_logits": 11}
    own = 2 * (24 + 200)
    assert definition.roundings(cells["fp32"], False, False) == {
        "combined": 6 + own + 4,
        "d_x": 8 + own + 2 * (24 + 400) + 4,
        "d_logits": 7 + own + 48,
        "d_w13": 7 + own + 2 * (24 + 40),
        "d_w2": 6 + own + 80,
    }
    cell, inputs, expected = case(dtype="bf16")
    limits = {
        one.name: BENCH.check(one.name, cell, inputs, rounded(inputs, expected), expected).tolerance
        for one in BENCH.implementations
    }
    assert limits["ops"] == limits["sonicmoe"] == tolerance("bf16", 8)
    assert (limits["liger"], limits["torch_loop"]) == (tolerance("bf16", 9), tolerance("bf16", 10))


def test_inputs_and_outputs() -> None:
    """The gradient of the result is drawn apart from the tokens, and where tensors are; outputs have the formats of what they are of."""
    cell = cell_of(
        "training", **SHAPE | {"dtype": "bf16", "capacity_factor": 1.25, "sampler": "plackett_luce", "skew": 1.0}
    )
    with torch.device("meta"):
        found = [definition.build(cell, seed, "cpu") for seed in (7, 7, 8)]
        weights = definition.shared(cell, 7, "cpu")
        outputs = definition.empty_outputs(cell, found[0] | weights)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not any(torch.equal(found[0][name], found[2][name]) for name in found[0])
    gradient = found[0]["d_combined"].float()
    assert abs(float((gradient * found[0]["x"].float()).mean())) < 0.2 < 0.8 < float(gradient.std()) < 1.2
    kinds = {name: (one.dtype, tuple(one.shape), one.device.type) for name, one in outputs.items()}
    half = torch.bfloat16
    assert list(kinds) == list(BENCH.writes) and kinds == {
        "combined": (half, (40, 24), "cpu"),
        "d_x": (half, (40, 24), "cpu"),
        "d_logits": (torch.float32, (40, 5), "cpu"),
        "d_w13": (half, (5, 32, 24), "cpu"),
        "d_w2": (half, (5, 24, 16), "cpu"),
    }
    assert definition.problem(cell) == Layer(
        RowLayout(40, 2, 5, 20), 24, 16, "bf16", "bf16", "bf16", "softmax_topk_renorm"
    )


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("torch_loop", {"tokens": 37, "hidden": 13, "intermediate": 7}),
        ("torch_loop", {"dtype": "bf16", "capacity_factor": 0.5, "skew": 1.0, "activation": "geglu"}),
        ("torch_loop", {"dtype": "fp16", "activation": "relu2", "router": "llama4"}),
        ("torch_grouped_mm", {"dtype": "bf16", "tokens": 1}),
        ("torch_grouped_mm", {"dtype": "bf16", "experts": 40, "top_k": 1, "skew": 5.0}),
        ("torch_grouped_mm", {"dtype": "bf16", "capacity_factor": 0.5, "skew": 1.0, "activation": "relu2"}),
        ("torch_grouped_mm", {"dtype": "bf16", "router": "deepseek_v3", "experts": 16, "activation": "geglu"}),
        ("ops", {"tokens": 37, "hidden": 13, "intermediate": 7, "router": "softmax_topk"}),
        ("ops", {"dtype": "bf16", "capacity_factor": 0.5, "skew": 1.0, "activation": "geglu"}),
        ("ops", {"dtype": "fp16", "activation": "relu2", "router": "sigmoid_renorm"}),
        ("transformers_eager", {"dtype": "bf16", "skew": 1.0}),
        ("transformers_grouped_mm", {"dtype": "bf16", "skew": 1.0, "activation": "geglu"}),
    ],
)
def test_every_way_is_right(name: str, axes: dict) -> None:
    """Also on other values in the same memory, in a second call; inputs are as they were, and so are torch's counts of writes."""
    if peer := BENCH[name].peer:
        pytest.importorskip(peer.module)
    cell, inputs, expected = case(**axes)
    assert BENCH.supports(name, cell) is None
    tensors = {key: one.clone() for key, one in inputs.items()}
    outputs = {key: one.fill_(torch.nan) for key, one in definition.empty_outputs(cell, inputs).items()}
    call = BENCH.bind(name, cell, tensors | outputs)
    fresh = definition.build(cell, 9, "cpu") | {key: inputs[key] for key in BENCH.shared}
    for values, want in ((inputs, expected), (fresh, definition.reference(cell, fresh))):
        for key, one in tensors.items():
            one.copy_(values[key])
        counts = [one._version for one in tensors.values()]
        found = outputs | call()
        check = BENCH.check(name, cell, values, found, want)
        assert check.error is None and 0 < check.rel_l2_error < check.tolerance
        assert [one._version for one in tensors.values()] == counts
        assert all(torch.equal(tensors[key], values[key]) for key in tensors)
        assert {key: (one.dtype, one.shape) for key, one in found.items()} == {
            key: (one.dtype, one.shape) for key, one in outputs.items()
        }
        assert not any(one.requires_grad for one in found.values())


LIMITED = "gradients of swiglu_limit10 jump where it clamps, so that roundings look like faults"
OAI = "gradients of swiglu_oai jump where it clamps, so that roundings look like faults; its biases have none here"


@pytest.mark.parametrize(
    ("name", "axes", "why"),
    [
        *((one.name, {"activation": "swiglu_oai"}, OAI) for one in BENCH.implementations),
        *((one.name, {"activation": "swiglu_limit10"}, LIMITED) for one in BENCH.implementations),
        ("torch_loop", {"dtype": "fp32", "intermediate": 7, "capacity_factor": 1.0}, None),
        ("torch_grouped_mm", {"dtype": "fp32"}, "torch.nn.functional.grouped_mm takes bf16 rows, not fp32"),
        ("ops", {"dtype": "fp32", "intermediate": 7, "capacity_factor": 1.0}, None),
        ("sonicmoe", {}, None),
        ("sonicmoe", {"capacity_factor": 1.0}, "SonicMoE has no capacity limit"),
        ("sonicmoe", {"activation": "relu2"}, "SonicMoE has no relu2"),
        ("sonicmoe", {"hidden": 20}, "SonicMoE needs hidden and intermediate that are multiples of 8 (16 bytes)"),
        ("liger", {"activation": "geglu"}, "Liger has no geglu"),
        (
            "liger",
            {"dtype": "fp32"},
            "Liger takes tokens, rows and weights of one format (bf16, fp16), not fp32, fp32 and fp32",
        ),
        ("moe_ops", {"activation": "relu2", "experts": 8}, None),
        ("moe_ops", {"intermediate": 20}, "moe-ops needs hidden and intermediate that are multiples of 8 (16 bytes)"),
        ("moe_ops", {"experts": 6}, "moe-ops counts rows by experts whose number is a power of two, not 6"),
        ("transformers_eager", {"dtype": "fp32", "intermediate": 20}, None),
        (
            "transformers_grouped_mm",
            {"intermediate": 20},
            "torch.nn.functional.grouped_mm needs hidden and intermediate that are multiples of 8 (16 bytes)",
        ),
        ("transformers_grouped_mm", {"activation": "relu2"}, "transformers' Qwen3-MoE module has no relu2"),
    ],
)
def test_what_cannot_run_says_so(name: str, axes: dict, why: str | None) -> None:
    assert BENCH.supports(name, cell_of("training", **SHAPE | {"dtype": "bf16"} | axes)) == why


def test_a_library_is_behind_our_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given ids and weights, whose gradient, in its own format, goes on through the gate."""
    module, seen = ModuleType("liger_kernel.ops.fused_moe"), []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w13, w2, ids, weights):
            seen.append((ids.dtype, weights.dtype))
            ctx.save_for_backward(w13, w2)
            return x + weights[:, :1].to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            w13, w2 = ctx.saved_tensors
            weights = torch.cat([grad.sum(1, keepdim=True), torch.zeros_like(grad[:, :1])], 1)
            return grad, torch.zeros_like(w13), torch.ones_like(w2), None, weights

    vars(module)["LigerFusedMoEFunction"] = Function
    for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.fused_moe"):
        monkeypatch.setitem(sys.modules, name, module)
    cell, inputs, expected = case(dtype="bf16")
    found = BENCH.bind("liger", cell, inputs | definition.empty_outputs(cell, inputs))()
    assert seen == [(torch.int32, torch.float32)]
    assert torch.equal(found["d_x"], inputs["d_combined"]) and found["d_w2"].all() and not found["d_w13"].any()
    weights = torch.zeros_like(inputs["logits"], dtype=torch.float64)
    weights.scatter_(1, expected["topk_ids"].long(), expected["topk_weights"].double())
    first = weights.gather(1, expected["topk_ids"][:, :1].long())
    slope = weights * (torch.zeros_like(weights).scatter_(1, expected["topk_ids"][:, :1].long(), 1.0) - first)
    want = slope * inputs["d_combined"].sum(1, keepdim=True).double()
    torch.testing.assert_close(found["d_logits"].double(), want, rtol=1e-5, atol=1e-6)


def test_what_a_tuner_chose_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keep what the attribute of the bound call says once it has run."""
    cell, inputs, _ = case()
    made = torch_layers.layer_loop(definition.problem(cell))
    bound = {"way": "torch_loop", **inputs, **definition.empty_outputs(cell, inputs)}
    assert not hasattr(step.bind(definition.problem(cell), **bound), "configuration")

    chosen: list[str] = []

    def tuned(*given: Tensor) -> Tensor:
        chosen[:] = ["tiles of 128"]
        return made(*given)

    tuned.configuration = lambda: "; ".join(chosen)
    monkeypatch.setattr(torch_layers, "layer_loop", lambda problem: tuned)
    call = step.bind(definition.problem(cell), **bound)
    assert call.configuration() == ""
    call()
    assert call.configuration() == "tiles of 128"


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("ops", ["gate", "permute", "pack", "training", "combine"]), ("moe_ops", ["gate"]), ("torch_loop", [])],
)
def test_the_kernels_of_the_operators_are_compiled(
    name: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    seen = []
    for operation in ("gate", "permute", "pack", "experts", "training", "combine"):
        folder = "experts" if operation == "training" else operation
        module = importlib.import_module(f"moe_routing_kernels.{folder}.cute_{operation}")
        monkeypatch.setattr(
            module, "precompile", lambda part, arch, *_, operation=operation, **__: seen.append((operation, arch))
        )
    BENCH.precompile(
        name, cell_of("training", **SHAPE | {"dtype": "bf16", "tokens": 64, "experts": 8}), Target.of("sm_90a")
    )
    assert seen == [(operation, "sm_90a") for operation in compiled]


def test_nothing_is_left_of_a_step() -> None:
    """No autograd graph hangs on the result, and no gradient on the tensors that were bound."""
    cell, inputs, _ = case()
    call = step.bind(definition.problem(cell), way="torch_loop", **inputs, **definition.empty_outputs(cell, inputs))
    found = call()
    assert all(one.grad_fn is None for one in found.values())
    assert all(one.grad is None and not one.requires_grad for one in inputs.values())
