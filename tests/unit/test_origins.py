"""Which implementations count as ours: by what they are made of, not by how they are called."""

import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins
from moe_routing_bench.report import layer_bars

AROUND = (
    "cute_quack",
    "cute_quack_gather",
    "cute_deepgemm",
    "cute_mslk",
    "cute_mslk_int4",
    "cute_triton_kernels",
    "cute_grouped_mm",
    "cute_grouped_mm_bf16",
    "cute_humming",
    "cute_marlin",
)


@pytest.mark.parametrize(
    "name", [*AROUND, "sonicmoe", "vllm_triton", "sglang_triton", "flag_gems", "torch_grouped_mm", "torch_compile"]
)
def test_a_layer_with_kernels_of_another_package_is_not_ours(name: str) -> None:
    assert name not in origins.ours("layer")


def test_layers_of_our_kernels_alone_are_ours() -> None:
    plain = {"auto", "cute", "cute_gather", "cute_dependent", "triton", "triton_gather"}
    assert origins.ours("layer") == plain | {"cute_quantised", "cute_fp8", "cute_dequant"}
    assert plain - {"auto"} == set(layer_bars.OURS) and not set(layer_bars.AROUND_QUACK) & origins.ours("layer")


@pytest.mark.parametrize("bench", BENCHES)
def test_nothing_of_ours_needs_a_package_of_somebody_else(bench: str) -> None:
    """Nor does any part of a composite; of whole models the library around them is none of the kernels."""
    known = {one.name: one for one in BENCHES[bench].implementations}
    for name in origins.ours(bench) - {"ops", "auto"}:
        assert known[name].peer is None and "torch" not in known[name].parts.values(), name
    assert {"triton", "cute"} & known.keys() <= origins.ours(bench)
    assert BENCHES[bench].baseline not in origins.ours(bench)


@pytest.mark.parametrize(
    ("bench", "names", "found"),
    [
        ("layer", ("cute", "torch_grouped_mm", "cute_grouped_mm"), set()),
        ("layer", ("auto", "cute_quack", "sonicmoe", "torch_loop"), {"cute_quack", "sonicmoe"}),
        ("router", ("matmul_cute", "cute"), set()),
        ("gate", ("cute", "torch", "vllm"), {"vllm"}),
    ],
)
def test_rivals_besides_torch(bench: str, names: tuple[str, ...], found: set[str]) -> None:
    assert origins.besides_torch(bench, names) == found


def test_a_product_of_torch_with_our_gate_is_not_ours() -> None:
    assert "matmul_cute" not in origins.ours("router")
