"""The bench `model`: that its models are the library's, what its check finds, and its implementations, on tiny models of four families."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_models
from moe_routing_bench.benches.checks import Cost, tolerance
from moe_routing_bench.benches.model import definition, step, weight_views
from moe_routing_bench.benches.model.published_models import ARCHITECTURES, CONTEXT
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import supervisor
from moe_routing_bench.store import paths, records
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.target import Target

BENCH = BENCHES["model"]
FORMS = [one.name for one in BENCH.implementations if "experts" not in one.options]  # of plain weights
ROOT = Path(__file__).parents[2]
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def tiny():
    """The library, and tiny models."""
    pytest.importorskip("transformers")
    with tiny_models.installed():
        yield


def case(name: str = "qwen3-30b-a3b", **axes):
    """A cell, its inputs and the reference."""
    cell = tiny_models.cell(name, **axes)
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    return cell, inputs, definition.reference(cell, inputs)


def run(form: str, cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of an implementation."""
    outputs = definition.empty_outputs(cell, inputs)
    return outputs | BENCH.bind(form, cell, inputs | outputs)()


def published():
    return presets.load(ROOT / paths.MODELS)


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_an_architecture_is_that_of_the_preset(name: str) -> None:
    """What the table of presets records of it as well, in other words."""
    known, one = published()[name], ARCHITECTURES[name]
    renormalised = one.options.get("norm_topk_prob", False)
    assert one.layers == known.layers and known.activation == "swiglu"
    assert known.router == ("softmax_topk_renorm" if renormalised else "softmax_topk")
    shared = one.options.get(
        "shared_expert_intermediate_size", one.options.get("n_shared_experts", 0) * known.intermediate
    )
    assert shared == (known.shared_intermediate or 0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("deepseek-v2-lite", 15_706_484_224),
        ("olmoe-1b-7b", 6_919_161_856),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_model_of_full_size_has_as_many_parameters_as_its_checkpoint(name: str, parameters: int) -> None:
    """As the checkpoints' model cards count them."""
    sizes = {axis: value for axis, value in presets.values(published()[name]).items() if axis in BENCH.axes}
    found = weight_views.slots(
        weight_views.skeleton(definition.problem(cell_of("model", tokens=1, **sizes).but(model=name)), "eager")
    )
    assert sum(one.size for one in found.values()) == parameters


def test_parameters_lie_one_after_another_and_are_not_copied() -> None:
    """Each begins at a multiple of 16 bytes; a model takes no memory of its own."""
    cell, inputs, _ = case()
    weights, model = inputs["weights"], weight_views.over(definition.problem(cell), inputs["weights"], "eager")
    end = weights.data_ptr()
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() % 16 == 0 and 0 <= parameter.data_ptr() - end < 256, name
        end = parameter.data_ptr() + parameter.numel() * parameter.element_size()
    assert end == weights.data_ptr() + weights.nbytes
    assert not any(one.is_meta for one in model.buffers())


def test_weights_are_drawn_by_the_seed_and_keep_the_variance() -> None:
    """Logits of every model are N(0, 1), so that a fault in one layer shows behind the last."""
    for name in tiny_models.NAMES:
        cell = tiny_models.cell(name, hidden=128, intermediate=64)
        first, again, other = (definition.shared(cell, seed, "cpu")["weights"] for seed in (3, 3, 4))
        assert torch.equal(first, again) and not torch.equal(first, other)
        logits = definition.in_float32(cell, definition.build(cell, 3, "cpu") | {"weights": first}, _plain(cell, first))
        assert 0.8 < float(logits["logits"].std()) < 1.2


def _plain(cell, weights: Tensor):
    """The experts' answers as the reference computes them."""
    found = weight_views.over(definition.problem(cell), weights, "eager")
    own = [{"w13": one.gate_up_proj, "w2": one.down_proj} for _, one in weight_views.experts(found)]
    return lambda layer, *given: definition.mixture(cell, own[layer], *given)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_the_model_in_float32_is_the_librarys(name: str, phase: str) -> None:
    """Around bf16 weights: hidden, logits and choices of the library's own loop over weights that were made float32."""
    cell, inputs, expected = case(name, phase=phase)
    found = definition.in_float32(cell, inputs, _plain(cell, inputs["weights"]))
    wide = {key: one.float() if one.is_floating_point() else one for key, one in inputs.items()}
    want = run("transformers_eager", cell.but(dtype="fp32"), wide)
    for key in BENCH.writes:
        torch.testing.assert_close(found[key], want[key], rtol=1e-4, atol=1e-5)
    for layer, ids in enumerate(expected["topk_ids"]):
        assert torch.equal(ids, want[f"topk_ids.{layer}"])
        torch.testing.assert_close(expected["topk_weights"][layer], want[f"topk_weights.{layer}"])
    assert len(expected["topk_ids"]) == len(
        list(weight_views.experts(weight_views.skeleton(definition.problem(cell), "eager")))
    )


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_decoding_step_goes_on_where_a_prefill_ended(name: str) -> None:
    """The last of CONTEXT + 1 tokens, behind keys and values of the others, has the logits that it has in a prefill of all; the
    context is not written."""
    from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

    cell = tiny_models.cell(name, tokens=2, phase="decode", dtype="fp32")
    problem = definition.problem(cell)
    weights = definition.shared(cell, 3, "cpu")["weights"]
    model = weight_views.over(problem, weights, "eager")
    ids, cache = torch.randint(96, (2, CONTEXT + 1)), DynamicCache()
    whole = weight_views.forward(model, ids, None, None)
    with torch.no_grad():
        model.get_decoder()(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
    keys, values = (torch.stack([getattr(layer, kind) for layer in cache.layers]) for kind in ("keys", "values"))
    drawn = definition.build(cell, 3, "cpu")
    assert (keys.shape, values.shape) == (drawn["keys"].shape, drawn["values"].shape)
    counts = keys._version, values._version
    found = weight_views.forward(model, ids[:, -1:], keys, values)
    torch.testing.assert_close(found["logits"], whole["logits"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["hidden"], whole["hidden"].view(2, CONTEXT + 1, -1)[:, -1], rtol=1e-4, atol=1e-5)
    assert (keys._version, values._version) == counts and keys.shape[3] == CONTEXT


DECODING = ({"phase": "decode", "tokens": 1}, {"phase": "decode", "tokens": 5, "dtype": "fp32"})
# Every model with every form in a prefill or in one kind of decoding: neighbouring forms and models have the others.
MODELS = [
    (name, form, ({}, *DECODING)[(i + j) % 3])
    for i, name in enumerate(tiny_models.NAMES)
    for j, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("name", "form", "axes"), MODELS, ids=str)
def test_every_form_is_right(name: str, form: str, axes: dict) -> None:
    """Also on other values in the same memory, in a second call; inputs are as they were, and so are torch's counts of writes."""
    cell, inputs, expected = case(name, **axes)
    assert BENCH.supports(form, cell) is None
    tensors = {key: one.clone() for key, one in inputs.items()}
    outputs = {key: one.fill_(torch.nan) for key, one in definition.empty_outputs(cell, inputs).items()}
    call = BENCH.bind(form, cell, tensors | outputs)
    fresh = definition.build(cell, 9, "cpu") | {"weights": inputs["weights"]}
    for given, want in ((inputs, expected), (fresh, definition.reference(cell, fresh))):
        for key, one in tensors.items():
            one.copy_(given[key])
        counts = [one._version for one in tensors.values()]
        found = outputs | call()
        check = BENCH.check(form, cell, given, found, want)
        assert check.error is None and 0 < check.rel_l2_error < check.tolerance
        assert [one._version for one in tensors.values()] == counts
        assert all(torch.equal(tensors[key], given[key]) for key in tensors)
        assert all((found[key].dtype, found[key].shape) == (one.dtype, one.shape) for key, one in outputs.items())
        assert not any(one.requires_grad for one in found.values())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_pinned(form: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer runs it in both phases, and none another: ``generate`` would decode with batched_mm."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]

    cell, inputs, _ = case(phase=phase)
    call, seen = BENCH.bind(form, cell, inputs | definition.empty_outputs(cell, inputs)), []
    for known in ("batched_mm", "grouped_mm", step.ours.NAME):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, known, lambda module, x, *_, known=known: seen.append(known) or x)
    call()
    asked = BENCH[form].options["form"]
    assert seen == [asked] * (0 if asked == "eager" else 3)


def faults(cell, inputs: dict[str, Tensor], found: dict[str, Tensor]):
    """Wrong outputs by what the check should say of them: experts of one layer swapped, a route dropped, weights forgotten, ..."""
    own = weight_views.over(definition.problem(cell), inputs["weights"], "eager")
    one = next(module for at, (_, module) in enumerate(weight_views.experts(own)) if at == 1)
    weights = {"w13": one.gate_up_proj, "w2": one.down_proj}
    x, ids, scales = (found[f"{key}.1"] for key in step.HANDED[:3])
    turned = torch.arange(cell.experts)
    turned[int(ids[0, 0])], turned[int(ids[0, 1])] = ids[0, 1], ids[0, 0]
    dropped = scales.clone()
    dropped[-1, -1] = 0
    halves = {"w13": weights["w13"].roll(cell.intermediate, 1), "w2": weights["w2"]}
    answers = (
        definition.mixture(cell, weights, x, turned[ids], scales),
        definition.mixture(cell, weights, x, ids, dropped),
        definition.mixture(cell, weights, x, ids, torch.ones_like(scales)),
        definition.mixture(cell, halves, x, ids, scales),
    )
    for answer in answers:
        yield "experts of layer 1: ", {"y.1": answer.to(x.dtype)}
    yield "hidden: ", {"hidden": found["hidden"].roll(1, 1)}
    yield "logits: ", {"logits": found["logits"].roll(1, 1)}
    yield "logits: ", {"logits": found["logits"].log_softmax(1)}
    unwritten = found["logits"].clone()
    unwritten[-1, -1] = torch.nan
    yield "logits: 1 of ", {"logits": unwritten}


@pytest.mark.parametrize("axes", [{}, {"phase": "decode", "tokens": 1}], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_planted_faults(name: str, axes: dict) -> None:
    """Each in one layer or output, beside the answers of a right implementation."""
    cell, inputs, expected = case(name, **axes)
    found = run("ops", cell, inputs)
    assert definition.check(cell, inputs, found, expected).error is None
    for begins, wrong in faults(cell, inputs, found):
        error = definition.check(cell, inputs, found | wrong, expected).error
        assert error and error.startswith(begins), (begins, error)


@pytest.mark.parametrize("axes", [{}, {"phase": "decode", "tokens": 1}], ids=["prefill", "decode"])
def test_an_answer_that_the_model_does_not_use_is_found(axes: dict) -> None:
    """Experts that are right by themselves, in a model that goes on without one layer's; and a layer that never ran."""
    cell, inputs, expected = case(hidden=128, intermediate=64, **axes)
    found = run("ops", cell, inputs)
    without = definition.in_float32(cell, inputs, lambda layer, *_: found[f"y.{layer}"].float() * (layer != 1))
    for key in BENCH.writes:
        error = definition.check(cell, inputs, found | {key: without[key].to(found[key].dtype)}, expected).error
        assert error and error.startswith(f"{key}: ")
    del found["y.2"]
    error = definition.check(cell, inputs, found, expected).error
    assert error == "y.2 was not returned: experts were not run"


def test_another_choice_of_experts_is_no_fault() -> None:
    """Roundings make other choices; the answer is held against float32 on its own routes: here all of a layer's are others."""
    cell, inputs, expected = case()
    found, plain = run("ops", cell, inputs), _plain(cell, inputs["weights"])
    ids = (found["topk_ids.1"] + 1) % cell.experts
    y = plain(1, found["x.1"], ids, found["topk_weights.1"]).bfloat16()
    answers = {layer: found[f"y.{layer}"] for layer in range(3)} | {1: y}
    after = definition.in_float32(cell, inputs, lambda layer, *_: answers[layer])
    other = found | {"topk_ids.1": ids, "y.1": y} | {key: one.to(found[key].dtype) for key, one in after.items()}
    assert definition.check(cell, inputs, other, expected).error is None
    assert definition.check(cell, inputs, other | {"topk_ids.1": found["topk_ids.1"]}, expected).error


def test_roundings_and_what_an_implementation_declares() -> None:
    cells = {dtype: tiny_models.cell("qwen3-30b-a3b", dtype=dtype) for dtype in ("bf16", "fp32")}
    assert definition.roundings(cells["bf16"], False, False) == (6, 24)
    assert definition.roundings(cells["bf16"], True, False) == (7, 24)
    assert definition.roundings(cells["bf16"], False, True) == (8, 24)
    own = 2 * (32 + 24)
    assert definition.roundings(cells["fp32"], False, False) == (6 + own + 4, 3 * (8 + 128))
    assert [BENCH[name].declares for name in FORMS] == [("rounded_sums",), ("rounded_terms",), ("rounded_terms",), ()]
    cell, inputs, expected = case()
    limit = BENCH.check("ops", cell, inputs, run("ops", cell, inputs), expected).tolerance
    assert limit == tolerance("bf16", 24)


def test_cost_of_a_decoding_step_by_hand() -> None:
    """All of Qwen3-MoE that three sequences read: attention, norms and routers, chosen experts, the cache and the logits' product."""
    cell, inputs, expected = case(phase="decode", tokens=3)
    inputs["ids"][:] = torch.tensor([[5], [7], [5]])
    outputs = definition.empty_outputs(cell, inputs)
    active = sum(len(ids.unique()) for ids in expected["topk_ids"])
    attention, router, norms, one = 2 * 32 * 64 + 2 * 32 * 32, 6 * 32, 2 * 32 + 2 * 16, 3 * 32 * 24
    parameters = 3 * (attention + router + norms) + 32 + 96 * 32 + 2 * 32 + active * one
    cache = 2 * 3 * 3 * 2 * CONTEXT * 16
    flops = 2 * (3 * (3 * (attention + router) + 3 * 2 * one) + 3 * 96 * 32)
    assert definition.cost(cell, inputs, outputs, expected) == Cost(
        8 * 3 + 2 * (cache + parameters), 3 * (2 * 32 + 4 * 96), (), flops
    )


def test_inputs_and_outputs() -> None:
    """Drawn by the seed, where tensors are; outputs have the model's format, the logits float32; statistics are of the middle layer."""
    cell = tiny_models.cell("deepseek-v2-lite", phase="decode", tokens=4)
    first, again, other = (definition.build(cell, seed, "cpu") for seed in (7, 7, 8))
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)
    assert {name: tuple(one.shape) for name, one in first.items()} == {
        "ids": (4, 1),
        "keys": (3, 4, 1, CONTEXT, 16),
        "values": (3, 4, 1, CONTEXT, 8),
    }
    prefill, inputs, expected = case("deepseek-v2-lite")
    assert {name: tuple(one.shape) for name, one in inputs.items() if name != "weights"} == {"ids": (1, 24)}
    with torch.device("meta"):
        outputs = definition.empty_outputs(prefill, inputs)
    assert {name: (one.dtype, tuple(one.shape), one.device.type) for name, one in outputs.items()} == {
        "hidden": (torch.bfloat16, (24, 32), "cpu"),
        "logits": (torch.float32, (1, 96), "cpu"),
    }
    found = definition.assignment(prefill, inputs, expected)
    assert torch.equal(found.ids, expected["topk_ids"][1]) and len(expected["topk_ids"]) == 2, (
        "the first layer is dense"
    )
    assert found.weights is not None and found.weights.shape == (24, 2) and found.inverse is None


def test_what_cannot_run_says_so() -> None:
    uneven = tiny_models.cell("olmoe-1b-7b", intermediate=20)
    reasons = {form: BENCH.supports(form, uneven) for form in FORMS}
    why = "torch.nn.functional.grouped_mm needs hidden and intermediate that are multiples of 8 (16 bytes)"
    assert reasons == dict.fromkeys(FORMS) | {"transformers_grouped_mm": why}
    with pytest.raises(UserError, match=r"model of bench model: got 'mixtral-8x7b'; allowed: qwen1.5-moe-a2.7b, "):
        definition.problem(uneven.but(model="mixtral-8x7b"))


@pytest.mark.parametrize(
    ("form", "compiled"), [("ops", ["gate", "permute", "experts", "combine"]), ("transformers_grouped_mm", [])]
)
def test_the_kernels_of_the_operators_are_compiled(
    form: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run: of experts that gather rows by themselves, which is the way of these sizes, no pack."""
    pytest.importorskip("cutlass")
    seen = []
    for operation in ("gate", "permute", "pack", "experts", "combine"):
        module = importlib.import_module(f"moe_routing_kernels.{operation}.cute_{operation}")
        monkeypatch.setattr(
            module, "precompile", lambda part, arch, *_, operation=operation, **__: seen.append((operation, arch))
        )
    BENCH.precompile(form, tiny_models.cell("qwen3-30b-a3b"), Target.of("sm_90a"))
    assert seen == [(operation, "sm_90a") for operation in compiled]


MEASURED = {"prefill": {"tokens": 16}, "decode": {"tokens": 2, "phase": "decode"}}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of both phases."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("cells")
    settings = Settings(
        check_seeds=2, warmup_ms=1, min_blocks=3, max_blocks=5, interval_us=10, max_seconds=0.2, wall_calls=1
    )
    for phase, axes in MEASURED.items():
        cell = cell_of("model", hidden=64, intermediate=32, experts=8, top_k=2, **axes)
        supervisor.measure(Job(cell, tuple(FORMS), settings), folder / f"{phase}.parquet")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("phase", MEASURED)
def test_a_cell_is_measured(phase: str, cells: Path) -> None:
    """By a worker, without a preset: two layers of the cell's own sizes."""
    rows = records.read(cells / f"{phase}.parquet").to_pandas()
    assert dict(zip(rows["implementation"], rows["status"], strict=True)) == dict.fromkeys(FORMS, "ok"), rows[
        "reason"
    ].tolist()
    assert (rows["baseline"] == "transformers_grouped_mm").all() and rows["best_speedup"].notna().all()
    assert (rows["median_us"] > 0).all() and (rows["drop_rate"] == 0).all()
    assert sum(rows["expert_load"].iloc[0]) == 2 * MEASURED[phase]["tokens"]
    assert all(math.isfinite(one) for one in rows["rel_l2_error"])
