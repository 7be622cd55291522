"""Our own kernels against their definitions, on a GPU: edge cases, random shapes, poisoned outputs, bad scores.

Every implementation called `triton` or `cute` of every stage is covered without being named here.
"""

import functools
import gc
import math
from dataclasses import replace
from types import MappingProxyType

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activations import EVERY
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import expand
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.measure.timers import capture
from moe_routing_bench.store.platforms import missing
from moe_routing_kernels import formats
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.formats import QUANTISED
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.target import Target

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():  # as a whole: hundreds of tests need not be collected
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
STAGES = ("gate", "router", "permute", "pack", "experts", "combine")
OURS = ("triton", "cute", "matmul_cute")
KERNELS = [(bench, way.name) for bench in STAGES for way in BENCHES[bench].implementations if way.name in OURS]
KERNELS += [("experts", "quack_heuristic")]
WHOLE_VECTORS = (("experts", "cute"), ("experts", "quack_heuristic"))  # take rows of whole 16 bytes only
CHUNKS, EXAMPLES = 8, 25  # random shapes a kernel: 200, in parts that can run side by side (pytest -n 8)
LAYOUTS = ("compact", "padded", "block64", "block128")
# tokens, hidden, experts, top_k, capacity factor, skew, layout, dtype
EDGES = {
    "one_token": (1, 64, 8, 2, None, 0.0, "compact", "bf16"),
    "one_expert": (33, 40, 1, 1, None, 0.0, "compact", "fp32"),
    "every_expert": (65, 128, 8, 8, None, 0.0, "block64", "bf16"),
    "everything_on_one_expert": (1000, 48, 64, 1, None, 7.9, "compact", "fp16"),
    "everything_on_one_of_1024": (5000, 16, 1024, 1, None, 31.9, "block128", "bf16"),
    "nearly_all_dropped": (4000, 32, 64, 4, 0.01, 0.5, "compact", "bf16"),
    "dropped_and_padded": (3001, 72, 60, 4, 0.7, 1.0, "padded", "fp16"),
    "odd": (513, 13, 7, 3, 1.1, 0.3, "block64", "fp32"),
    "many_choices": (300, 96, 896, 32, None, 0.7, "compact", "bf16"),
    "one_block": (512, 8, 128, 8, None, 0.7, "block128", "bf16"),
    "just_over_one_block": (1025, 8, 128, 8, None, 0.7, "padded", "bf16"),
    "many_tiles": (300000, 8, 256, 8, 1.0, 0.7, "padded", "bf16"),
    "gpt_oss": (5000, 2880, 32, 4, None, 0.7, "compact", "bf16"),
    "gpt_oss_dropped": (5000, 2880, 32, 4, 0.7, 0.7, "block64", "bf16"),
    "gpt_oss_one_token": (1, 2880, 32, 4, None, 0.0, "padded", "bf16"),
    "two_of_odd_rows": (9000, 2880, 16, 2, 1.0, 1.0, "padded", "bf16"),
    "one_of_odd_rows": (9000, 2688, 16, 1, None, 1.0, "block128", "bf16"),
    "nemotron": (3000, 2688, 128, 6, None, 0.5, "compact", "bf16"),
    "gemma": (3000, 2816, 128, 8, 1.0, 0.5, "block64", "bf16"),
    "three_per_thread": (36044, 8, 512, 10, None, 0.7, "compact", "bf16"),
    "many_choices_of_512": (16385, 8, 512, 22, None, 0.0, "block128", "bf16"),
}


def cell_of(
    bench: str,
    tokens,
    hidden,
    experts,
    top_k,
    factor,
    skew,
    layout,
    dtype,
    router="softmax_topk_renorm",
    seed=17,
    activation="swiglu",
    vectors=False,
):
    """A cell with what the bench reads, though no config would allow it; padded rows without a capacity get one.

    `vectors`: the inner width of experts is a multiple of 8, which library products need; else it is odd.
    """
    packed, dtype = dtype, "bf16" if dtype in QUANTISED else dtype
    every = {
        "tokens": tokens,
        "hidden": hidden,
        "experts": experts,
        "top_k": top_k,
        "skew": skew,
        "layout": layout,
        "dtype": dtype,
        "capacity_factor": 1.25 if layout == "padded" and factor is None else factor,
        "packed": packed,
        "router": router,
        "seed": seed,
        "intermediate": hidden and (hidden // 16 * 8 + 8 if vectors else hidden // 2 + 5),
        "weights": dtype,
        "activation": activation,
    }
    base = expand.cell_of(bench, tokens=8, hidden=8, intermediate=8, experts=8, top_k=2)
    return base.but(**{axis: value for axis, value in every.items() if axis in dict(base.values)})


def refusal(cell: Cell, name: str) -> str | None:
    """Why an implementation does not run a cell, or None. Skips the test where it runs none here."""
    bench = BENCHES[cell.bench]
    absent = missing(bench[name].requires, "cuda", bench[name].peer)
    if absent:
        pytest.skip(f"{name} needs {absent}")
    return bench.supports(name, cell, Target.here())


def run(cell: Cell, name: str, twice: bool = True, change=lambda inputs: None) -> None:
    """AssertionError where an implementation differs from the definition, or from itself in a second call.

    `change` may write to the inputs that were drawn. Skips the test of a cell that the implementation refuses.
    """
    if reason := refusal(cell, name):
        pytest.skip(reason)
    bench = BENCHES[cell.bench]
    definition = bench.definition()
    inputs = definition.build(cell, cell.seed, "cuda")
    if hasattr(definition, "shared"):
        inputs |= definition.shared(cell, cell.seed, "cuda")
    change(inputs)
    expected = definition.reference(cell, inputs)
    kept = {key: value.clone() for key, value in inputs.items()}
    outputs = definition.empty_outputs(cell, inputs)
    call = BENCHES[cell.bench].bind(name, cell, inputs | outputs)
    answers = []
    for _ in range(1 + twice):
        for output in outputs.values():
            output.fill_(torch.nan if output.is_floating_point() else 0x7F7F7F7F)
        returned = call()  # libraries that allocate their results return them; a launch of Triton's returns its kernel
        written = outputs | (returned if isinstance(returned, dict) else {})
        torch.cuda.synchronize()
        check = bench.check(name, cell, inputs, written, expected)
        assert not check.error and not check.mismatches, f"{name} {cell}: {check}"
        answers.append({key: written[key].clone() for key in outputs})
    for first, second in zip(answers[0].values(), answers[-1].values(), strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), (
            f"{name} {cell}: another answer in the second call"
        )
    for key, value in inputs.items():
        assert torch.equal(value, kept[key]), f"{name} {cell}: changed its input {key}"


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("bench", "name"), KERNELS)
def test_edge_cases(bench, name, edge):
    run(cell_of(bench, *EDGES[edge], vectors=(bench, name) in WHOLE_VECTORS), name)


@pytest.mark.parametrize("activation", EVERY)
@pytest.mark.parametrize("tokens", [5, 300, 7000])  # 0.3, 20 and 467 rows per expert: all forms of our kernel
@pytest.mark.parametrize(
    ("bench", "name"),
    [
        *(("experts", name) for name in ("triton", "cute", "quack", "quack_heuristic", "torch_grouped_mm")),
        ("layer", "cute_gather"),
        ("layer", "cute_dependent"),
    ],
)
def test_activations(bench, name, tokens, activation):
    """Whole vectors, so that every library takes them; some experts have no row."""
    layout = "compact" if bench == "experts" else None
    run(cell_of(bench, tokens, 22 * 16, 60, 4, None, 1.0, layout, "bf16", activation=activation, vectors=True), name)


@pytest.mark.parametrize(
    "name",
    [
        "triton",
        "triton_gather",
        "cute",
        "cute_gather",
        "cute_dependent",
        "cute_grouped_mm",
        "cute_quack",
        "cute_quack_gather",
        "sonicmoe",
        "liger",
        "moe_ops",
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 8, 2, None, 0.0, None, "bf16"),
        (300, 72, 60, 4, 0.7, 1.0, None, "fp16"),
        (777, 2048, 128, 8, None, 0.0, None, "bf16"),
        (4096, 1024, 8, 2, 1.25, 1.7, None, "bf16"),
    ],
)
def test_layers(shape, name):
    """Stages that are ours, or fused."""
    run(cell_of("layer", *shape, vectors=True), name)


@pytest.mark.parametrize("shared", [None, 704])
@pytest.mark.parametrize("tokens", [1, 8, 64, 500])
def test_kernels_that_start_early_read_what_is_complete(tokens, shared):
    """Calls with other routings follow each other in a graph, which is replayed: each has the bits of kernels that start in turn."""
    cell = cell_of("layer", tokens, 1024, 64, 8, None, 0.5, None, "bf16", vectors=True)
    cell = cell.but(shared_intermediate=shared, shared_gate=None) if shared else cell
    bench, definition = BENCHES["layer"], BENCHES["layer"].definition()
    for name in ("cute_gather", "cute_dependent"):
        if reason := refusal(cell, name):
            pytest.skip(reason)
    weights = definition.shared(cell, 1, "cuda")
    answers: dict[str, list[torch.Tensor]] = {}
    for name in ("cute_gather", "cute_dependent"):
        sets = [definition.build(cell, seed, "cuda") | weights for seed in range(40)]
        answers[name] = [definition.empty_outputs(cell, one)["combined"] for one in sets]
        calls = [bench.bind(name, cell, one | {"combined": to}) for one, to in zip(sets, answers[name], strict=True)]
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        for _ in range(25):
            for one in answers[name]:
                one.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, answers["cute_gather"], answers[name])), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("weights", [name for name in WEIGHTS if name != "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 300, 1000, 1200, 2500, 7000])  # all forms of the kernel
def test_quantised_weights(tokens, weights, dtype):
    """Every format that our kernel takes, at sizes that fill no block of it."""
    cell = cell_of("experts", tokens, 22 * 16, 60, 4, None, 1.0, "compact", dtype, vectors=True)
    run(cell.but(weights=weights), "cute_quantised")


@pytest.mark.parametrize("activation", EVERY)
@pytest.mark.parametrize("weights", ["int4_g128", "e4m3_block128", "mxfp4"])
@pytest.mark.parametrize("tokens", [5, 777])
def test_layers_with_quantised_weights(tokens, weights, activation):
    cell = cell_of("layer", tokens, 1024, 60, 4, None, 0.5, None, "bf16", activation=activation, vectors=True)
    run(cell.but(weights=weights), "cute_quantised")


@pytest.mark.parametrize("name", ["cute", "cute_gather", "cute_dependent", "triton", "triton_gather", "cute_quantised"])
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("tokens", [1, 5, 777])  # one token may have no expert here
def test_layers_of_an_expert_parallel_rank(tokens, factor, name):
    if tokens > 5 and name == "cute_dependent":
        pytest.skip("is for few rows")
    cell = cell_of("layer", tokens, 512, 60, 4, factor, 0.5, None, "bf16", vectors=True)
    run(cell.but(ep=4, weights="int4_g32" if name == "cute_quantised" else "bf16"), name)


@pytest.mark.parametrize("activation", EVERY)
@pytest.mark.parametrize("intermediate", [208, 320])  # gates that have scales of their own per warpgroup, or not
@pytest.mark.parametrize("tokens", [1, 300, 7000, 8000])  # all forms of the kernel
@pytest.mark.parametrize("bench", ["experts", "layer"])
def test_8_bit_rows_and_weights(bench, tokens, intermediate, activation):
    """Last blocks of scales are shorter; rows of no expert are read."""
    layout = "compact" if bench == "experts" else None
    cell = cell_of(bench, tokens, 352, 60, 4, None, 1.0, layout, "bf16", activation=activation, vectors=True)
    run(cell.but(weights="e4m3_block128", packed="fp8_block128", intermediate=intermediate), "cute_fp8")


@pytest.mark.parametrize("gate", [None, "sigmoid"])
@pytest.mark.parametrize("tokens", [1, 777])
@pytest.mark.parametrize("name", [one.name for one in BENCHES["layer"].implementations])
def test_layers_with_shared_experts(name, tokens, gate):
    """Every implementation, those with a capacity as well, where they need one; a power of two of experts, which moe-ops needs."""
    factor = 1.25 if BENCHES["layer"][name].layout == "padded" else None
    cell = cell_of("layer", tokens, 1024, 64, 4, factor, 0.0, None, "bf16", vectors=True)
    run(cell.but(shared_intermediate=704, shared_gate=gate), name)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 8, 2, None, 0.0, None, "bf16"),
        (300, 72, 60, 4, 0.7, 1.0, None, "fp16"),
        (513, 128, 64, 1, None, 3.0, None, "bf16", "sigmoid_renorm"),
        (777, 1024, 128, 8, None, 0.0, None, "bf16", "softmax_topk"),
        (4096, 512, 8, 2, 1.25, 1.7, None, "bf16", "llama4"),
    ],
)
@pytest.mark.parametrize("name", [one.name for one in BENCHES["training"].implementations])
def test_training_steps(name, shape):
    """Every implementation; ours gives the same bits twice, where those with atomic additions need not."""
    run(cell_of("training", *shape, vectors=True), name, twice=name == "ops")


@pytest.mark.parametrize("activation", [one for one in EVERY if one != "swiglu_oai"])
@pytest.mark.parametrize("name", [one.name for one in BENCHES["training"].implementations])
def test_training_steps_with_other_activations(name, activation):
    run(
        cell_of("training", 300, 128, 60, 4, None, 1.0, None, "bf16", activation=activation, vectors=True),
        name,
        twice=name == "ops",
    )


@pytest.mark.parametrize("name", [one.name for one in BENCHES["training"].implementations])
def test_a_training_step_in_a_cuda_graph(name):
    """Forward and backward are captured together, and a replay differentiates what its inputs hold then; or it reads on the host."""
    cell = cell_of("training", 513, 256, 64, 4, None, 0.5, None, "bf16", vectors=True)
    if reason := refusal(cell, name):
        pytest.skip(reason)
    bench, definition = BENCHES["training"], BENCHES["training"].definition()
    weights = definition.shared(cell, 1, "cuda")
    inputs, fresh = (definition.build(cell, seed, "cuda") | weights for seed in (1, 2))
    call = bench.bind(name, cell, inputs | definition.empty_outputs(cell, inputs))
    for _ in range(3):
        call()
    gc.collect()  # a failed configuration of a tuner holds the autograd graph of its call, which would tie the capture to another stream
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    waits = None
    try:
        with capture(graph):
            returned = call()
    except RuntimeError as error:
        waits = error.__context__ or error
    if waits:
        assert name in ("torch_loop", "liger", "transformers_eager"), f"must not wait for the host: {waits}"
        return
    for key, one in fresh.items():
        if key not in bench.shared:
            inputs[key].copy_(one)
    for one in returned.values():
        one.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    check = bench.check(name, cell, fresh, returned, definition.reference(cell, fresh))
    assert not check.error, check


@pytest.mark.parametrize(
    "shape",
    [
        (1, 4096, 8, 3, None, 0.0, "compact", "bf16"),
        (1, 64, 8, 8, None, 0.0, "block128", "bf16"),
        (65, 128, 8, 8, None, 0.0, "block64", "bf16"),
        (513, 8, 7, 3, 1.1, 0.3, "block64", "fp32"),
        (3001, 72, 60, 4, 0.7, 1.0, "padded", "fp16"),
        (4000, 32, 64, 4, 0.01, 0.5, "compact", "bf16"),
        (300, 96, 896, 32, None, 0.7, "compact", "bf16"),
        (2000, 2880, 64, 4, 1.25, 0.7, "padded", "bf16"),
        (20000, 2880, 32, 4, None, 0.7, "compact", "bf16"),
        (3001, 2880, 64, 2, None, 0.7, "compact", "bf16"),  # halves of rows
        (3000, 7168, 64, 8, None, 0.0, "compact", "bf16"),
        (16384, 4096, 64, 8, 1.0, 1.7, "block128", "bf16"),
        (65600, 4096, 64, 8, None, 0.0, "compact", "bf16"),  # rows * hidden > 2**31
    ],
)
def test_pack_by_bulk_copies(shape, monkeypatch):
    """Also rows that are too few to be worth it."""
    pytest.importorskip("cutlass")
    from moe_routing_kernels.cute.cache import current_arch
    from moe_routing_kernels.pack import cute_pack

    arch = current_arch()
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip(f"bulk copies need sm_90 or sm_100, here {arch}")
    for least in ("MANY_BYTES", "MANY_BYTES_OF_ODD_ROWS"):
        monkeypatch.setattr(cute_pack, least, 0)
    cell = cell_of("pack", *shape)
    config = cute_pack.choose(arch, cell.tokens, cell.hidden, cell.dtype, cell.top_k)
    assert isinstance(config, cute_pack.BulkConfig)
    run(cell, "cute")


@pytest.mark.parametrize("dtype", list(QUANTISED))
@pytest.mark.parametrize(
    ("tokens", "hidden", "top_k", "factor", "layout"),
    [
        (1, 1, 1, None, "compact"),
        (65, 8, 2, None, "block64"),
        (513, 13, 3, 1.1, "padded"),
        (300, 128, 8, None, "block128"),
        (300, 130, 8, 0.5, "padded"),
        (300, 300, 8, None, "compact"),
        (200, 1000, 2, None, "compact"),
        (2000, 2880, 4, 1.25, "padded"),
        (64, 4096, 8, None, "compact"),
        (4096, 4096, 8, 0.7, "block128"),
        (3000, 7168, 8, None, "compact"),
        (100, 8191, 2, None, "block64"),
        (100, 32768, 2, None, "compact"),
    ],
)
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "pack"])
def test_pack_to_fp8(name, tokens, hidden, top_k, factor, layout, dtype):
    """Also with tokens that are zero, of very different sizes, or smaller than a scale can be."""

    def change(inputs):
        x = inputs["x"]
        x *= torch.logspace(-10, 10, tokens, 10, dtype=torch.bfloat16, device="cuda")[:, None]
        x[::5] = 0
        x[1::50] = 2.0**-125
        x[2::7, : hidden // 2] = 0

    run(cell_of("pack", tokens, hidden, 8, top_k, factor, 0.5, layout, dtype), name, change=change)


@pytest.mark.parametrize("group", [8, 32, 48, 64, 256, 768, 1024])
@pytest.mark.parametrize("hidden", [64, 1000, 2880, 4096])
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "pack"])
def test_pack_in_groups_of_other_sizes(name, hidden, group, monkeypatch):
    """A line of the table of formats is all that a group size takes; a kernel that cannot run it says so."""
    form = replace(formats.FORMATS["fp8_block128"], name=f"fp8_other{group}", group=group)
    monkeypatch.setattr(formats, "FORMATS", MappingProxyType({**formats.FORMATS, form.name: form}))
    cell = cell_of("pack", 300, hidden, 8, 2, 0.7, 0.5, "padded", "bf16").but(packed=form.name)
    reason = refusal(cell, name)
    assert reason is None or (name == "cute" and group == 48)
    run(cell, name)


@pytest.mark.parametrize("router", list(ROUTERS))
@pytest.mark.parametrize(
    ("experts", "top_k"), [(8, 2), (64, 6), (160, 6), (256, 8), (384, 8), (512, 10), (512, 22), (1024, 32)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "gate"])
def test_every_rule(name, dtype, experts, top_k, router):
    try:
        ROUTERS[router].check(experts, top_k)
    except UserError as error:
        pytest.skip(str(error))
    run(cell_of("gate", 777, None, experts, top_k, None, None, None, dtype, router), name)


@pytest.mark.parametrize("router", list(ROUTERS))
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "top_k"),
    [
        (1, 2048, 128, 8),
        (1, 777, 24, 24),
        (16, 2048, 128, 8),
        (61, 4095, 128, 8),
        (64, 7168, 256, 8),
        (100, 2880, 72, 6),
        (513, 1000, 160, 6),
        (4096, 2048, 128, 8),
        (16384, 2048, 64, 6),
    ],
)
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "router"])
def test_every_rule_from_tokens(name, tokens, hidden, experts, top_k, router):
    try:
        ROUTERS[router].check(experts, top_k)
    except UserError as error:
        pytest.skip(str(error))

    def change(inputs):
        if "bias" in inputs:
            inputs["bias"] += 0.1 * torch.randn(experts, device="cuda")

    run(cell_of("router", tokens, hidden, experts, top_k, None, 0.0, None, "bf16", router), name, change=change)


@pytest.mark.parametrize("tokens", [1, 40, 3000])
@pytest.mark.parametrize("router", ["softmax_topk_renorm", "softmax_topk", "deepseek_v3"])
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "router"])
def test_a_token_that_is_nan_is_reported_and_no_other(name, router, tokens):
    cell = cell_of("router", tokens, 512, 128, 4, None, 0.0, None, "bf16", router)
    definition = BENCHES["router"].definition()
    inputs = definition.build(cell, 1, "cuda")
    expected = definition.reference(cell, inputs)
    broken = torch.arange(0, tokens, 7, device="cuda")
    inputs["x"][broken, (broken * 5) % 512] = torch.nan
    outputs = definition.empty_outputs(cell, inputs)
    BENCHES[cell.bench].bind(name, cell, inputs | outputs)()
    assert (outputs["topk_ids"][broken] == -1).all() and outputs["topk_weights"][broken].isnan().all()
    for key, value in outputs.items():
        value[broken] = expected[key][broken]
    found = definition.check(cell, inputs, outputs, expected)
    assert not found.error, found


@pytest.mark.parametrize("tokens", [16, 64, 2000])
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "router"])
def test_a_replayed_graph_of_the_router_gives_the_same_bits(name, tokens):
    """What one replay leaves in the workspace and in its counters is where the next one starts."""
    cell = cell_of("router", tokens, 2048, 128, 8, None, 0.0, None, "bf16")
    definition = BENCHES["router"].definition()
    inputs = definition.build(cell, 1, "cuda")
    outputs = definition.empty_outputs(cell, inputs)
    call = BENCHES[cell.bench].bind(name, cell, inputs | outputs)
    call()
    first = {key: value.clone() for key, value in outputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    for _ in range(50):
        for output in outputs.values():
            output.fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(value, first[key]) for key, value in outputs.items())


@functools.cache
def shapes():
    """Any cell that fits in little memory; routers that cannot take it fall back to plain top-k."""

    @st.composite
    def draw(pick):
        experts = pick(st.one_of(st.integers(1, 64), st.integers(1, 1024)))
        top_k = pick(st.integers(1, min(32, experts)))
        tokens = pick(st.one_of(st.integers(1, 64), st.integers(1, 20000)))
        hidden = pick(st.integers(1, max(1, min(8192, 2**25 // (tokens * top_k)))))
        skew = pick(st.floats(0, 0.9)) * (experts / top_k - 1) ** 0.5
        factor = pick(st.sampled_from([None, 0.1, 0.5, 1.0, 1.25, 2.0]))
        router = pick(st.sampled_from(sorted(ROUTERS)))
        try:
            ROUTERS[router].check(experts, top_k)
        except UserError:
            router = "softmax_topk_renorm"
        return (
            tokens,
            hidden,
            experts,
            top_k,
            factor,
            skew,
            pick(st.sampled_from(LAYOUTS)),
            pick(st.sampled_from(["bf16", "fp16", "fp32", *QUANTISED])),
            router,
            pick(st.integers(0, 2**31)),
        )

    return draw()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize(("bench", "name"), KERNELS)
def test_random_shapes(bench, name, chunk):
    @hypothesis.seed(chunk)
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(shape=shapes())
    def search(shape):
        tokens, hidden, experts, *others = shape
        if bench == "experts":  # whose weights are its largest inputs
            hidden = min(hidden, math.isqrt(2**27 // experts))
        if (bench, name) in WHOLE_VECTORS:
            hidden = max(8, hidden // 8 * 8)
        cell = cell_of(bench, tokens, hidden, experts, *others, vectors=(bench, name) in WHOLE_VECTORS)
        hypothesis.assume(refusal(cell, name) is None)
        run(cell, name, twice=False)

    search()


@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "gate"])
def test_ties_take_the_lowest_id(name):
    cell = cell_of("gate", 64, None, 100, 7, None, None, None, "bf16")
    definition = BENCHES["gate"].definition()
    for value in (0.0, -1.0, -torch.inf):
        inputs = {"logits": torch.full((64, 100), value, dtype=torch.bfloat16, device="cuda")}
        inputs["logits"][:, 1::2] *= -1 if value == 0 else 1  # -0.0 and 0.0 are one score
        outputs = definition.empty_outputs(cell, inputs)
        BENCHES[cell.bench].bind(name, cell, inputs | outputs)()
        assert (outputs["topk_ids"].sort(1).values == torch.arange(7, device="cuda")).all()


@pytest.mark.parametrize("router", ["softmax_topk_renorm", "softmax_topk", "llama4"])
@pytest.mark.parametrize(
    ("experts", "top_k"),
    [
        (8, 2),
        (8, 8),
        (12, 5),
        (16, 4),
        (32, 8),
        (60, 4),
        (64, 8),
        (72, 3),
        (128, 7),
        (256, 8),
        (1024, 8),
        (64, 10),
        (128, 16),
        (512, 10),
        (896, 16),
    ],
)
@pytest.mark.parametrize("tokens", [1, 1000, 20000])
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "gate"])
def test_scores_that_are_nearly_or_quite_equal(name, tokens, experts, top_k, router):
    """Float32 scores next to each other, equal, negative, infinite: the lowest ids win, and choices fall."""
    cell = cell_of("gate", tokens, None, experts, top_k, None, None, None, "fp32", router)
    definition = BENCHES["gate"].definition()
    inputs = definition.build(cell, 3, "cuda")
    logits = inputs["logits"]
    near = torch.randint(0, 2 * experts, logits.shape, device="cuda", dtype=torch.int32)
    logits[1::6] = (near[1::6] + 0x3FC00000).view(torch.float32)
    logits[2::6] = -(near[2::6] + 0x3FC00000).view(torch.float32)
    logits[3::6] = logits[3::6].bfloat16().float()
    logits[4::6] = torch.where(near[4::6] % 3 > 0, 0.0, -0.0)
    logits[5::12] = logits[5::12].where(near[5::12] % 2 > 0, -torch.inf)
    logits[5::12, :top_k] = logits[5::12, :top_k].nan_to_num(neginf=-7.0)
    outputs = definition.empty_outputs(cell, inputs)
    BENCHES[cell.bench].bind(name, cell, inputs | outputs)()
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    if name == "cute":  # falling, of equal scores the lowest id first
        ids = outputs["topk_ids"].long()
        assert torch.equal(logits.gather(1, ids), logits.gather(1, expected))
        assert torch.equal(ids.sort(1).values, expected.sort(1).values)
    check = definition.check(cell, inputs, outputs, definition.reference(cell, inputs))
    assert not check.error and not check.mismatches, check


@pytest.mark.parametrize(
    "router", ["softmax_topk_renorm", "softmax_topk", "deepseek_v2", "deepseek_v3", "sigmoid_renorm"]
)
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "gate"])
def test_a_token_with_a_nan_is_reported_and_no_other(name, router):
    cell = cell_of("gate", 200, None, 128, 4, None, None, None, "fp32", router)
    definition = BENCHES["gate"].definition()
    inputs = definition.build(cell, 1, "cuda")
    expected = definition.reference(cell, inputs)
    broken = torch.arange(0, 200, 7, device="cuda")
    inputs["logits"][broken, (broken * 5) % 128] = torch.nan
    outputs = definition.empty_outputs(cell, inputs)
    BENCHES[cell.bench].bind(name, cell, inputs | outputs)()
    assert (outputs["topk_ids"][broken] == -1).all() and outputs["topk_weights"][broken].isnan().all()
    whole = torch.ones(200, dtype=torch.bool, device="cuda").index_fill(0, broken, False)
    ids = [values["topk_ids"][whole].sort(1).values for values in (outputs, expected)]
    assert torch.equal(ids[0], ids[1]) and not outputs["topk_weights"][whole].isnan().any()


@pytest.mark.parametrize("tokens", [100, 40000])
@pytest.mark.parametrize("name", [name for bench, name in KERNELS if bench == "permute"])
def test_ids_out_of_range_take_no_row(name, tokens):
    cell = cell_of("permute", tokens, None, 16, 2, None, 0.0, "compact", None)
    definition = BENCHES["permute"].definition()
    inputs = definition.build(cell, 1, "cuda")
    inputs["topk_ids"][::3, 0], inputs["topk_ids"][1::3, 1] = -1, 16
    outputs = definition.empty_outputs(cell, inputs)
    BENCHES[cell.bench].bind(name, cell, inputs | outputs)()
    flat, inverse = inputs["topk_ids"].flatten(), outputs["inverse"].flatten()
    inside = (flat >= 0) & (flat < 16)
    assert torch.equal(inverse >= 0, inside)
    kept = int(inside.sum())
    assert outputs["offsets"][-1] == kept and (outputs["order"][kept:] == -1).all()
    assert torch.equal(outputs["order"][:kept].long(), flat.where(inside, 99).argsort(stable=True)[:kept])
