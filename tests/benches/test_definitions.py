"""What every bench computes, on what, and what it counts: worked out by hand on a few tokens of two elements."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.benches.bench import find
from moe_routing_bench.benches.checks import Assignment, Check, Cost, tolerance
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload.draw import again, draw_ids, draw_routing, generator, randn
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute import Permute, RowLayout
from moe_routing_kernels.router import Router

AXES = {
    "tokens": 6,
    "hidden": 4,
    "intermediate": 3,
    "experts": 5,
    "top_k": 2,
    "dtype": "bf16",
    "router": "sigmoid_renorm",
    "skew": 0.5,
    "capacity_factor": 0.75,
    "layout": "block64",
    "packed": "fp8_row",
    "weights": "bf16",
}
LIMIT = 2  # ceil(0.75 * 6 * 2 / 5) rows of an expert


def cell_for(bench: str, **change):
    """A cell of `AXES`, as far as the bench reads them; of ids that are drawn where tensors are, so that nothing else is."""
    known = {name: value for name, value in (AXES | change).items() if name in BENCHES[bench].axes}
    return cell_of(bench, **known | {"sampler": "plackett_luce"} if "sampler" in BENCHES[bench].axes else known)


def definition(bench: str):
    return BENCHES[bench].definition()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Names in order, formats, shapes, devices and bits."""
    kinds = [
        [(name, t.dtype, t.shape, t.device.type, t.is_contiguous()) for name, t in some.items()]
        for some in (one, other)
    ]
    return kinds[0] == kinds[1] and all(
        torch.equal(t.view(-1).view(torch.uint8), other[n].view(-1).view(torch.uint8)) for n, t in one.items()
    )


@pytest.mark.parametrize(
    ("bench", "problem"),
    [
        ("combine", Combine(6, 4, 2, "bf16", True)),
        ("experts", Experts(5 * 64, 4, 3, 5, "bf16", "fp8_row", "bf16", align=64)),
        ("gate", Gate(6, 5, 2, "bf16", "sigmoid_renorm")),
        ("layer", Layer(RowLayout(6, 2, 5, LIMIT), 4, 3, "bf16", "fp8_row", "bf16", "sigmoid_renorm")),
        ("pack", Pack(6, 4, 2, 5 * 64, "bf16", "fp8_row", True)),
        ("permute", Permute(6, 5, 2, 5 * 64, LIMIT, False, 64)),
        ("router", Router(6, 4, 5, 2, "bf16", "sigmoid_renorm")),
    ],
)
def test_the_problem_of_a_cell(bench: str, problem: object) -> None:
    assert definition(bench).problem(cell_for(bench)) == problem


def test_problems_without_a_capacity() -> None:
    """No assignment is dropped and no row is padding; rows are of the activations' format unless another is asked for."""
    assert definition("combine").problem(cell_for("combine", capacity_factor=None)).dropping is False
    plain = definition("pack").problem(cell_for("pack", capacity_factor=None, layout="compact", packed="bf16"))
    assert plain == Pack(6, 4, 2, 12, "bf16", "bf16", False)
    padded = definition("experts").problem(cell_for("experts", layout="padded", weights="fp16"))
    assert padded == Experts(10, 4, 3, 5, "bf16", "fp8_row", "fp16", True)


def test_the_experts_of_a_layer() -> None:
    """Those that kernels which fuse stages with them are asked about; the activation says what is gated and has biases."""
    layer = definition("layer").problem(cell_for("layer", activation="swiglu_oai"))
    assert layer.experts == Experts(10, 4, 3, 5, "bf16", "fp8_row", "bf16", False, "swiglu_oai")
    alone = definition("experts").problem(cell_for("experts", activation="relu2"))
    assert (alone.activation, alone.gated, alone.biased) == ("relu2", False, False)
    assert (layer.experts.gated, layer.experts.biased) == (True, True)


def drawn(bench: str, cell, seed: int) -> dict[str, Tensor]:
    """The inputs of a seed, drawn one after the other from one generator: another order would be other values."""
    rng = generator(seed, "cpu")
    if bench == "gate":
        logits = randn((6, 5), "bf16", rng)
        return {"logits": logits, "bias": 0.1 * torch.randn(5, generator=rng)}
    if bench in ("routing", "layer"):
        return {
            "logits": draw_routing(cell, seed, "cpu").logits,
            "x": randn((6, 4), "bf16", rng),
            "bias": torch.zeros(5),
        }
    ids = draw_ids(cell, rng).contiguous()
    if bench == "permute":
        return {"topk_ids": ids}
    rows = 5 * 64 if bench == "experts" else None
    known = {name: torch.from_numpy(one) for name, one in vars(row_map(row_layout(cell), ids.numpy(), rows)).items()}
    if bench == "pack":
        return {"x": randn((6, 4), "bf16", rng)} | {n: known[n] for n in ("order", "inverse")} | {"topk_ids": ids}
    if bench == "combine":
        y = randn((len(known["order"]), 4), "bf16", rng)
        return {
            "y": y,
            "inverse": known["inverse"],
            "topk_weights": torch.randn(6, 2, generator=rng).softmax(1),
            "topk_ids": ids,
        }
    packed = randn((rows, 4), "bf16", rng).masked_fill_((known["order"] < 0)[:, None], 0)
    return (
        {"packed": packed} | {n: known[n] for n in ("offsets", "inverse")} | {"topk_ids": ids, "order": known["order"]}
    )


@pytest.mark.parametrize("bench", ["gate", "permute", "pack", "combine", "experts", "routing", "layer"])
def test_inputs_of_a_seed(bench: str) -> None:
    """Nothing is drawn where nobody said that it should be: here on a device without memory."""
    cell = cell_for(bench, packed="bf16") if bench == "experts" else cell_for(bench)
    with torch.device("meta"):
        found = [definition(bench).build(cell, seed, "cpu") for seed in (7, 7, 8)]
    assert same(found[0], found[1]) and not same(found[0], found[2])
    assert same(found[0], drawn(bench, cell, 7))
    if "bias" in found[0]:
        without = definition(bench).build(cell_for(bench, router="softmax_topk_renorm"), 7, "cpu")
        assert without.keys() == found[0].keys() - {"bias"}


@pytest.mark.parametrize("bench", ["layer", "training"])
def test_tokens_are_no_rows_of_weights(bench: str) -> None:
    """A row of x that is one of w13 has a sum as large as sqrt(H) with it, and its gradients stand out of all others."""
    cell = cell_of(bench, tokens=16, hidden=32, intermediate=24, experts=4, top_k=2, dtype="fp32")
    definition = BENCHES[bench].definition()
    for seed in (cell.seed, again(cell.seed, 5)):
        x, w13 = definition.build(cell, seed, "cpu")["x"], definition.shared(cell, cell.seed, "cpu")["w13"]
        sums = x @ w13.flatten(0, 1).T
        assert sums.abs().max() < 5, "rows of weights have a length of 1, so that sums are N(0, 1)"


def test_rows_are_quantised_as_they_are_drawn() -> None:
    """The same rows as those of the plain format, and scales."""
    plain, inputs = (
        definition("experts").build(cell_for("experts", packed=packed), 7, "cpu") for packed in ("bf16", "fp8_row")
    )
    rows = inputs["packed"].float() * inputs["scales"].view(-1, 1)
    assert inputs["packed"].dtype == torch.float8_e4m3fn and inputs.keys() == plain.keys() | {"scales"}
    assert torch.allclose(rows, plain["packed"].float(), rtol=2**-4, atol=0.02) and inputs["order"].equal(
        plain["order"]
    )


def test_weights_of_the_experts() -> None:
    """One over the square root of the fan-in, in their own format."""
    cell = cell_of("experts", tokens=6, hidden=64, intermediate=16, experts=8, top_k=2, weights="fp16", dtype="bf16")
    with torch.device("meta"):
        found = definition("experts").shared(cell, 7, "cpu")
    rng = generator(7 + 2**31, "cpu")  # a seed that no tokens have
    w13 = randn((8, 32, 64), "fp16", rng) / 8
    assert same(found, {"w13": w13, "w2": randn((8, 64, 16), "fp16", rng) / 4})


@pytest.mark.parametrize("router", ["sigmoid_renorm", "softmax_topk_renorm"])
def test_tokens_of_the_router_have_the_drawn_logits(router: str) -> None:
    """The nearest to the tokens that were drawn, by the seed after that of the logits; rounded to the cell's format."""
    cell = cell_for("router", router=router, hidden=16)
    with torch.device("meta"):
        found = definition("router").build(cell, 7, "cpu")
    rng = generator(8, "cpu")
    weight = (randn((5, 16), "fp32", rng) / 4).bfloat16()
    x, wide = randn((6, 16), "fp32", rng), weight.double()
    x = x + (draw_routing(cell, 7, "cpu").logits - x.double() @ wide.T) @ torch.linalg.pinv(wide).T
    assert found["router_weight"].equal(weight) and found["x"].dtype == torch.bfloat16
    assert torch.allclose(found["x"].double(), x, rtol=2**-8, atol=1e-4)
    assert ("bias" in found) == (router == "sigmoid_renorm")
    if "bias" in found:
        assert same({"bias": found["bias"]}, {"bias": torch.zeros(5)})


def test_tokens_of_a_router_with_more_experts_than_elements() -> None:
    """Directions of the weight whose logits would need huge tokens are left alone."""
    cell = cell_for("router", experts=64, hidden=32, tokens=50, skew=0)
    assert float(definition("router").build(cell, 7, "cpu")["x"].float().std()) < 3


@pytest.mark.parametrize(
    ("bench", "shapes"),
    [
        ("gate", {"topk_ids": ((6, 2), torch.int32), "topk_weights": ((6, 2), torch.float32)}),
        (
            "permute",
            {
                "counts": ((5,), torch.int32),
                "offsets": ((6,), torch.int32),
                "order": ((320,), torch.int32),
                "inverse": ((6, 2), torch.int32),
            },
        ),
        ("combine", {"combined": ((6, 4), torch.bfloat16)}),
        ("routing", {"combined": ((6, 4), torch.bfloat16)}),
        ("experts", {"y": ((320, 4), torch.bfloat16)}),
        ("router", {"topk_ids": ((6, 2), torch.int32), "topk_weights": ((6, 2), torch.float32)}),
        ("pack", {"packed": ((128, 4), torch.bfloat16)}),
    ],
)
def test_outputs_are_where_the_inputs_are(bench: str, shapes: dict) -> None:
    cell = cell_for(bench, packed="bf16") if bench == "pack" else cell_for(bench)
    inputs = definition(bench).build(cell, 7, "cpu")
    if bench == "pack":
        shapes = {"packed": ((len(inputs["order"]), 4), torch.bfloat16)}
    with torch.device("meta"):
        found = definition(bench).empty_outputs(cell, inputs)
    assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == shapes
    assert {t.device.type for t in found.values()} == {"cpu"}


X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
SMALL = {"tokens": 4, "hidden": 2, "top_k": 2, "experts": 4, "capacity_factor": 0.75, "router": "softmax_topk_renorm"}


@pytest.mark.parametrize(("dtype", "wide"), [("fp32", torch.float64), ("bf16", torch.float32)])
def test_combine(dtype: str, wide: torch.dtype) -> None:
    """Of four rows and four tokens, one without any row: kept rows times weights; every row and token once."""
    cell, bench = cell_of("combine", **SMALL, dtype=dtype), definition("combine")
    inputs = {
        "y": X.to(FORMATS[dtype].torch_dtype),
        "inverse": torch.tensor([[0, 2], [1, -1], [-1, -1], [3, 0]], dtype=torch.int32),
        "topk_weights": torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 1.0], [0.5, 2.0]]),
        "topk_ids": torch.tensor([[0, 1], [0, 1], [1, 0], [0, 2]]),
    }
    with torch.device("meta"):
        expected = bench.reference(cell, inputs)
    assert expected["combined"].dtype == wide
    assert expected["combined"].tolist() == [[3, 4], [0.75, 1], [0, 0], [5.5, 8]]
    good = {"combined": expected["combined"].to(inputs["y"].dtype)}
    roundings = 1 + 2 * 2 if dtype == "fp32" else 1
    assert bench.check(cell, inputs, good, expected) == Check(tolerance=tolerance(dtype, roundings))
    assert bench.check(cell, inputs, {"combined": good["combined"] + 1}, expected).error.startswith("combined: ")
    size = FORMATS[dtype].bits // 8
    assert bench.cost(cell, inputs, good, expected) == Cost(5 * 2 * size + 32 + 32, 8 * size)
    found = bench.assignment(cell, inputs, expected)
    assert (found.ids, found.weights, found.inverse) == tuple(
        inputs[n] for n in ("topk_ids", "topk_weights", "inverse")
    )


LOGITS = torch.tensor(
    [[math.log(3), 0, -9, -9], [math.log(3), 0, -9, -9], [0, math.log(3), -9, -9], [math.log(3), -9, 0, -9]]
)
ROUTED = {
    "topk_ids": [[0, 1], [0, 1], [1, 0], [0, 2]],
    "topk_weights": [[0.75, 0.25]] * 4,
    "inverse": [[0, 2], [1, 3], [-1, -1], [-1, 4]],
}  # (two rows of an expert; the later tokens are dropped)


@pytest.mark.parametrize(("dtype", "wide"), [("fp32", torch.float64), ("bf16", torch.float32)])
def test_routing(dtype: str, wide: torch.dtype) -> None:
    """Kept weights of 1, 1, 0 and a quarter; bytes of all stages."""
    cell, bench = cell_of("routing", **SMALL, dtype=dtype), definition("routing")
    inputs = {"logits": LOGITS, "x": X.to(FORMATS[dtype].torch_dtype)}
    expected = bench.reference(cell, inputs)
    assert {name: expected[name].tolist() for name in ("topk_ids", "inverse")} == {
        n: ROUTED[n] for n in ("topk_ids", "inverse")
    }
    assert torch.allclose(expected["topk_weights"], torch.tensor(ROUTED["topk_weights"]))
    assert expected["combined"].dtype == wide
    assert torch.allclose(expected["combined"], X.to(wide) * torch.tensor([[1], [1], [0], [0.25]]), rtol=1e-6)
    good = {"combined": expected["combined"].to(inputs["x"].dtype), "packed": X} | {
        n: expected[n] for n in ("topk_ids", "topk_weights")
    }
    found = bench.check(cell, inputs, good, expected)
    # the weights have 16 roundings, the sum of float32 has 12
    assert found.error is None and found.tolerance == max(
        tolerance("fp32", 16), tolerance(dtype) if dtype != "fp32" else 0
    )
    assert bench.check(cell, inputs, good | {"combined": good["combined"] * 1.1}, expected).error.startswith(
        "combined: "
    )
    assert bench.check(
        cell, inputs, good | {"topk_weights": good["topk_weights"].roll(1, 1)}, expected
    ).error.startswith("topk_weights: ")
    for name in ("topk_ids", "packed"):
        hidden = bench.check(cell, inputs, {n: t for n, t in good.items() if n != name}, expected)
        assert hidden.error.startswith(f"{name}: not shown")
    size = FORMATS[dtype].bits // 8
    row = 2 * size
    read = 64 + 32 + (3 * row + 32) + (5 * row + 64)
    assert bench.cost(cell, inputs, good, expected) == Cost(read, 64 + 64 + 5 * row + 8 * size)
    alone = expected | {"inverse": torch.full_like(expected["inverse"], -1).index_fill(0, torch.tensor([2]), 0)}
    twice = Cost(64 + 32 + (row + 32) + (2 * row + 64), 64 + 64 + 2 * row + 8 * size)
    assert bench.cost(cell, inputs, good, alone) == twice, "row 0 is a row"
    found = bench.assignment(cell, inputs, expected)
    assert (found.ids, found.weights, found.inverse) == tuple(
        expected[n] for n in ("topk_ids", "topk_weights", "inverse")
    )


@pytest.mark.parametrize("bench", ["routing", "layer"])
def test_more_experts_of_a_token_are_more_roundings(bench: str) -> None:
    """In float32 two for each; a layer adds those of its experts, and a tenth of those of quantised rows."""
    for dtype, packed, top_k in (("fp32", "fp32", 6), ("bf16", "bf16", 6), ("bf16", "fp8_row", 2)):
        axes = {"tokens": 4, "hidden": 2, "experts": 8, "top_k": top_k, "dtype": dtype, "router": "softmax_topk_renorm"}
        axes |= {"intermediate": 3, "packed": packed} if bench == "layer" else {}
        cell, one = cell_of(bench, **axes), definition(bench)
        inputs = one.build(cell, 3, "cpu") | (one.shared(cell, 3, "cpu") if bench == "layer" else {})
        expected = one.reference(cell, inputs)
        good = expected | {"packed": inputs["x"]}
        if bench == "routing":
            limit = tolerance(dtype, 8 + 2 * 6 if dtype == "fp32" else 1)
        else:
            inner = 5 + (2 * (2 + 3) if dtype == "fp32" else 0)
            limit = tolerance(dtype, inner + 1 + (2 * 6 if dtype == "fp32" else 0)) + (0.1 * 2**-4) * (packed != dtype)
        assert one.check(cell, inputs, good, expected) == Check(tolerance=limit)
        wrong = good | {"combined": expected["combined"] * 2}
        assert one.check(cell, inputs, wrong, expected).error.startswith("combined: ")


@pytest.mark.parametrize("bench", ["gate", "router", "routing"])
def test_a_selection_bias_decides(bench: str) -> None:
    """Of the references' ids, not of their weights."""
    cell = cell_for(bench, capacity_factor=None)
    inputs = definition(bench).build(cell, 7, "cpu")
    inputs["bias"] = torch.tensor([0.0, 0.0, 0.0, 9.0, 8.0])
    assert definition(bench).reference(cell, inputs)["topk_ids"].tolist() == [[3, 4]] * 6


@pytest.mark.parametrize(("dtype", "wide"), [("fp32", torch.float64), ("bf16", torch.float32)])
def test_layer(dtype: str, wide: torch.dtype) -> None:
    """Kept assignments times their expert's network; three of four tokens and the weights of three of four experts are read."""
    cell, bench = cell_of("layer", **SMALL, intermediate=3, dtype=dtype), definition("layer")
    inputs = {"logits": LOGITS, "x": X.to(FORMATS[dtype].torch_dtype)} | bench.shared(cell, 3, "cpu")
    with torch.device("meta"):
        expected = bench.reference(cell, inputs)
    total = torch.zeros(4, 2, dtype=torch.float64)
    for token, expert, weight in ((0, 0, 0.75), (0, 1, 0.25), (1, 0, 0.75), (1, 1, 0.25), (3, 2, 0.25)):
        up = inputs["w13"][expert].double() @ X[token].double()
        total[token] += weight * (inputs["w2"][expert].double() @ (F.silu(up[:3]) * up[3:]))
    assert expected["combined"].dtype == wide
    # weights of a rule are float32, so that a third of an ulp of them is off
    assert torch.allclose(expected["combined"].double(), total, rtol=1e-6, atol=1e-6)
    size = FORMATS[dtype].bits // 8
    found = bench.cost(cell, inputs, {"combined": inputs["x"]}, expected)
    assert found == Cost(64 + 6 * size + 3 * 18 * size, 8 * size, ((5, 2, 6), (5, 3, 2))) and isinstance(
        found.read_bytes, int
    )


def test_experts_of_float32_are_summed_in_float64() -> None:
    """And of others in float32; roundings of the activations, and those of the sums in float32."""
    for dtype, wide, roundings in (("fp32", torch.float64, 5 + 2 * 7), ("bf16", torch.float32, 5)):
        cell, bench = (
            cell_for("experts", dtype=dtype, packed=dtype, weights=dtype, layout="compact"),
            definition("experts"),
        )
        inputs = bench.build(cell, 7, "cpu") | bench.shared(cell, 7, "cpu")
        with torch.device("meta"):
            expected = bench.reference(cell, inputs)
        assert expected["y"].dtype == wide and bench.roundings(cell) == roundings
        assert bench.check(cell, inputs, expected, expected) == Check(tolerance=tolerance(dtype, roundings))
        assert bench.check(cell, inputs, {"y": expected["y"] + 1}, expected).error.startswith("y: ")
        found = bench.assignment(cell, inputs, expected)
        assert found == Assignment(inputs["topk_ids"], None, inputs["inverse"])
        cost = bench.cost(cell, inputs, expected, expected)
        active = inputs["topk_ids"][inputs["inverse"] >= 0].unique().numel()
        rows, size = int((inputs["inverse"] >= 0).sum()), FORMATS[dtype].bits // 8
        products = (rows, 4, 6), (rows, 3, 4)
        assert cost == Cost(rows * 4 * size + active * 36 * size + 24, rows * 4 * size, products)
        assert isinstance(cost.read_bytes, int)


@pytest.mark.parametrize("bench", ["experts", "layer"])
@pytest.mark.parametrize(
    ("packed", "weights", "rate"),
    [
        ("fp8_row", "e4m3_row", 2),
        ("fp8_block128", "e5m2_block128", 2),
        ("fp8_row", "bf16", 1),
        ("bf16", "e4m3_row", 1),
        ("fp8_row", "int8_row", 1),
    ],
)
def test_products_of_eight_bits_have_twice_the_rate(bench, packed, weights, rate):
    """Else a product that is as fast as it should be would be below the roofline."""
    cell, chosen = cell_for(bench, packed=packed, weights=weights, layout="compact"), definition(bench)
    shared = chosen.shared(cell, 7, "cpu")
    inputs = shared | chosen.build(cell, 7, "cpu")
    assert chosen.cost(cell, inputs, chosen.empty_outputs(cell, inputs), chosen.reference(cell, inputs)).rate == rate


def test_formats_of_experts_are_those_of_the_activations_unless_others_are_asked_for() -> None:
    bench, routing = definition("experts"), cell_for("routing")
    assert (bench.packed_format(routing).name, bench.weight_format(routing).name) == ("bf16", "bf16")
    cell = cell_for("experts", weights="fp16")
    assert (bench.packed_format(cell).name, bench.weight_format(cell).name) == ("fp8_row", "fp16")


def test_permute() -> None:
    """Two rows of an expert in position order; every element is compared."""
    cell, bench = (
        cell_of("permute", **{n: SMALL[n] for n in ("tokens", "top_k", "experts", "capacity_factor")}),
        definition("permute"),
    )
    inputs = {"topk_ids": torch.tensor(ROUTED["topk_ids"], dtype=torch.int32)}
    expected = bench.reference(cell, inputs)
    assert {n: t.tolist() for n, t in expected.items()} == {
        "counts": [2, 2, 1, 0],
        "offsets": [0, 2, 4, 5, 5],
        "order": [0, 2, 1, 3, 7, -1, -1, -1],
        "inverse": ROUTED["inverse"],
    }
    assert all(t.dtype == torch.int32 for t in expected.values())
    assert bench.check(cell, inputs, expected, expected) == Check()
    for name, tensor in expected.items():
        wrong = tensor.clone()
        wrong.view(-1)[-1] += 1
        assert bench.check(cell, inputs, expected | {name: wrong}, expected).error.startswith(f"{name}: 1 of ")
    assert bench.cost(cell, inputs, expected, expected) == Cost(32, 4 * (4 + 5 + 8 + 8))
    assert bench.assignment(cell, inputs, expected) == Assignment(inputs["topk_ids"], None, expected["inverse"])


def test_pack() -> None:
    """Three tokens are sent somewhere; rows beyond the last are zeros."""
    axes = {n: SMALL[n] for n in ("tokens", "hidden", "top_k", "experts", "capacity_factor")}
    cell, bench = cell_of("pack", **axes, dtype="fp32"), definition("pack")
    inputs = {
        "x": X,
        "order": torch.tensor([0, 2, 1, 3, 7, -1], dtype=torch.int32),
        "inverse": torch.tensor(ROUTED["inverse"]),
        "topk_ids": torch.tensor(ROUTED["topk_ids"]),
    }
    expected = bench.reference(cell, inputs)
    assert expected["packed"].tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [7, 8], [0, 0]]
    assert bench.check(cell, inputs, expected, expected) == Check()
    assert bench.check(cell, inputs, {"packed": expected["packed"] + 1}, expected).error.startswith("packed: 12 of 12")
    assert bench.cost(cell, inputs, expected, expected) == Cost(3 * 8 + 24, 48)
    alone = inputs | {"inverse": torch.tensor([[-1, 0], [-1, -1], [-1, 1], [-1, -1]])}
    assert bench.cost(cell, alone, expected, expected).read_bytes == 2 * 8 + 24, "row 0 is a row"
    assert bench.assignment(cell, inputs, expected) == Assignment(inputs["topk_ids"], None, inputs["inverse"])


def test_pack_of_one_expert_per_token() -> None:
    """Row r is then the token order[r], of which 0 is one."""
    cell = cell_of("pack", tokens=4, hidden=2, top_k=1, experts=4, dtype="fp32")
    inputs = {"x": X, "order": torch.tensor([1, 0, -1, 3], dtype=torch.int32)}
    assert definition("pack").reference(cell, inputs)["packed"].tolist() == [[3, 4], [1, 2], [0, 0], [7, 8]]


def gate_case(logits: list[list[float]], top_k: int = 2, dtype: str = "fp32", router: str = "softmax_topk_renorm"):
    """A cell of the gate with these logits, and the reference."""
    cell = cell_of("gate", tokens=len(logits), experts=len(logits[0]), top_k=top_k, dtype=dtype, router=router)
    inputs = {"logits": torch.tensor(logits, dtype=FORMATS[dtype].torch_dtype)}
    return cell, inputs, definition("gate").reference(cell, inputs)


def chosen(ids: list[list[int]], weights: list[list[float]]) -> dict[str, Tensor]:
    return {"topk_ids": torch.tensor(ids, dtype=torch.int32), "topk_weights": torch.tensor(weights)}


@pytest.mark.parametrize(
    ("ids", "mismatches", "error"),
    [
        ([[0, 1], [1, 0]], 0, None),
        ([[0, 3], [1, 3]], 2, "out of range"),
        ([[0, -1], [1, 0]], 1, "out of range"),
        ([[0, 1], [1, 1]], 0, "a row holds an expert twice"),
    ],
)
def test_what_is_no_choice(ids, mismatches, error) -> None:
    found = definition("gate").no_choice(torch.tensor(ids).sort(1).values, 3)
    assert (found is None) == (error is None) and (
        error is None or (error in found.error and found.mismatches == mismatches)
    )


def test_rows_of_a_gate() -> None:
    """One is right, one chooses an expert of equal logit, with the weights that it has by rank; then one chooses another expert."""
    three = math.log(3)
    cell, inputs, expected = gate_case([[three, 0, -5, -9], [0, three, 0, -9], [0, three, -5, -9], [0, three, -5, -9]])
    bench = definition("gate")
    weights = [[0.75, 0.25]] * 4
    other = 2 - int(expected["topk_ids"][1, 1])  # experts 0 and 2 have the same logit
    right = chosen([[1, 0], [1, other], [0, 1], [1, 0]], [[0.25, 0.75], [0.75, 0.25], [0.25, 0.75], [0.75, 0.25]])
    found = bench.check(cell, inputs, right, expected)
    assert (found.error, found.ties, found.mismatches) == (None, 1, 0)
    assert found.tolerance == tolerance("fp32", 16) and found.rel_l2_error < 1e-6
    swapped = bench.check(
        cell, inputs, right | {"topk_weights": torch.tensor([*weights[:1], [0.25, 0.75], *weights[2:]])}, expected
    )
    assert swapped.error.startswith("topk_weights: ")
    wrong = bench.check(cell, inputs, chosen([[0, 1], [1, other], [1, 2], [1, 3]], weights), expected)
    assert (wrong.mismatches, wrong.ties) == (2, 1) and wrong.error == "topk_ids: 2 of 4 rows hold other experts"
    assert bench.cost(cell, inputs, right, expected) == Cost(4 * 4 * 4, 2 * 4 * 2 * 4)
    assert bench.assignment(cell, inputs, expected) == Assignment(expected["topk_ids"], expected["topk_weights"])


@pytest.mark.parametrize(("name", "axes"), [("gate", {}), ("router", {"hidden": 32})])
def test_a_selection_bias_is_read_as_well(name: str, axes: dict[str, int]) -> None:
    """By hand: a float32 for each of 16 experts."""
    read, bench = [], definition(name)
    for router in ("softmax_topk", "sigmoid_renorm"):
        cell = cell_of(name, tokens=8, experts=16, top_k=2, dtype="bf16", router=router, **axes)
        inputs = bench.build(cell, 3, "cpu")
        inputs |= bench.shared(cell, 3, "cpu") if hasattr(bench, "shared") else {}
        expected = bench.reference(cell, inputs)
        read.append(bench.cost(cell, inputs, expected, expected).read_bytes)
    assert read[1] - read[0] == 16 * 4


def test_a_row_without_a_tie_is_compared_as_it_is() -> None:
    """Also where another row has one: weights of experts that were given each other's are wrong."""
    three = math.log(3)
    cell, inputs, expected = gate_case([[0, three, 0, -9], [three, 0, -5, -9]])
    other = 2 - int(expected["topk_ids"][0, 1])
    found = definition("gate").check(cell, inputs, chosen([[1, other], [0, 1]], [[0.75, 0.25], [0.25, 0.75]]), expected)
    assert found.error.startswith("topk_weights: ") and found.ties == 1


@pytest.mark.parametrize(
    ("experts", "dtype", "resolution"),
    [
        (1, "fp32", 2**-22),
        (2, "fp32", 2**-22),
        (5, "fp32", 2**-20),
        (8, "fp32", 2**-20),
        (256, "fp32", 2**-15),
        (256, "bf16", 0),
    ],
)
def test_bits_that_an_index_takes(experts, dtype, resolution) -> None:
    cell = cell_of("gate", tokens=1, experts=experts, top_k=1, dtype=dtype)
    assert definition("gate")._resolution(cell) == resolution


@pytest.mark.parametrize(("off", "ties"), [(0.5, 1), (0.9, 1), (1.5, 0)])
def test_an_index_in_the_score_makes_ties(off: float, ties: int) -> None:
    """Of logits of size 4 within 4 / 2**20 of each other, for 8 experts; without it they are apart."""
    logits = [
        [4.0, 4.0 - off * 4 * 2**-20 - 1e-6 * (off > 1), -9, -9, -9, -9, -9, -9],
        [4.0, 1, -9, -9, -9, -9, -9, -9],
    ]
    cell, inputs, expected = gate_case(logits, top_k=1)
    got, bench = chosen([[1], [0]], [[1.0], [1.0]]), definition("gate")
    found = bench.check(cell, inputs, got, expected, index_in_score=True)
    assert (found.ties, found.error is None) == (ties, bool(ties))
    assert not ties or found.tolerance == tolerance("fp32", 16) + 2**-20
    assert bench.check(cell, inputs, got, expected).error == "topk_ids: 1 of 2 rows hold other experts"


def test_rounded_weights_are_declared() -> None:
    cell, inputs, expected = gate_case([[0, 1, 2]], dtype="bf16")
    found = definition("gate").check(cell, inputs, expected, expected, rounded_weights=True)
    assert found.tolerance == tolerance("fp32", 16) + tolerance("bf16")


def test_weights_of_a_choice_that_is_forced() -> None:
    """Whatever the scores: those of the tied experts, also on another device than the default one."""
    cell = cell_of("gate", tokens=2, experts=4, top_k=2, dtype="fp32", router="sigmoid_renorm")
    score = torch.tensor([[0.8, 0.6, 0.4, 0.2], [0.2, 0.4, 0.6, 0.8]])
    ids = torch.tensor([[1, 3], [0, 1]])
    with torch.device("meta"):
        found = definition("gate")._weights_of(
            cell, torch.logit(score), torch.tensor([0, 0, 9.0, 0], device="cpu"), ids
        )
    assert torch.allclose(found.sort(1).values, torch.tensor([[0.25, 0.75], [1 / 3, 2 / 3]], device="cpu"))


def router_case(router: str = "softmax_topk_renorm"):
    """Three tokens whose logits are those of the first test of a gate, and the reference: W is the identity."""
    cell = cell_of("router", tokens=3, hidden=4, experts=4, top_k=2, dtype="fp32", router=router)
    inputs = {"x": torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [3, 1, 1, 0]]), "router_weight": torch.eye(4)}
    return cell, inputs, definition("router").reference(cell, inputs)


def test_router() -> None:
    """A bound of 6 limits of 2 H roundings, of the largest |logit| twice: W picks single terms."""
    cell, inputs, expected = router_case()
    bench = definition("router")
    assert expected["logits"].equal(inputs["x"].double()) and expected["topk_ids"].tolist()[:2] == [[0, 1], [3, 2]]
    bound = torch.tensor([[2.0], [3.0], [3.0]], dtype=torch.float64) * 2 * 6 * tolerance("fp32", 8) + 1e-6
    assert torch.allclose(expected["bound"], bound, rtol=1e-12)
    large = 1 / (1 + math.exp(-1))
    weights = [[large, 1 - large], [large, 1 - large], [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))]]
    right = chosen([[0, 1], [3, 2], [0, 2]], weights)
    found = bench.check(cell, inputs, right, expected)
    assert (found.error, found.mismatches, found.ties) == (None, 0, int(expected["topk_ids"][2, 1] != 2))
    assert found.tolerance == pytest.approx(tolerance("fp32") + 4 * float(bound.max()), rel=1e-12)
    wrong = bench.check(
        cell, inputs, chosen([[2, 3], [0, 2], [0, 1 + 2 - int(expected["topk_ids"][2, 1])]], weights), expected
    )
    assert (wrong.mismatches, wrong.ties, wrong.error) == (2, 1, "topk_ids: 2 of 3 rows hold other experts")
    turned = bench.check(cell, inputs, right | {"topk_weights": right["topk_weights"].roll(1, 1)}, expected)
    assert turned.error.startswith("topk_weights: ")
    assert bench.cost(cell, inputs, right, expected) == Cost(3 * 16 + 64, 48, ((3, 4, 4),))


def test_a_choice_within_the_bound_keeps_its_bias() -> None:
    """The rule chooses again among the moved logits, with the bias that made two experts tie."""
    cell, inputs, _ = router_case("sigmoid_renorm")
    inputs["x"] = torch.zeros(3, 4)
    inputs["bias"] = torch.tensor([5.0, 1.0, 1.0, 0.0])
    expected = definition("router").reference(cell, inputs)
    ids = [[0, 3 - int(expected["topk_ids"][0, 1])]] * 3
    found = definition("router").check(cell, inputs, chosen(ids, [[0.5, 0.5]] * 3), expected)
    assert (found.error, found.ties) == (None, 3)
    assert definition("router").check(cell, inputs, chosen([[1, 2]] * 3, [[0.5, 0.5]] * 3), expected).mismatches == 3


def test_an_order_without_its_last_assignment_is_wrong() -> None:
    """Where only the order is written: what is no assignment counts as padding, and the last one is none."""
    cell = cell_of("permute", tokens=6, experts=3, top_k=2)
    definition = find("permute").definition()
    inputs = definition.build(cell, 1, "cpu")
    expected = definition.reference(cell, inputs)
    order = expected["order"]
    assert definition.check(cell, inputs, {"order": order}, expected, order_only=True).error is None
    for other in (-1, 12, 0):
        wrong = torch.where(order == 11, other, order)
        assert definition.check(cell, inputs, {"order": wrong}, expected, order_only=True).mismatches > 0, other
