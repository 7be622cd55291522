"""The implementation `auto` of a layer is another one, bit for bit, and says which."""

from dataclasses import replace

import pytest
import torch

from moe_routing_bench.benches.layer import auto
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_kernels import choices
from moe_routing_kernels.choices import Entry, Shape, chooser
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.target import CPU, Target

BENCH = BENCHES["layer"]
SIZES = {"tokens": 33, "experts": 6, "top_k": 2, "hidden": 40, "intermediate": 24}
CELL = cell_of("layer", **SIZES, dtype="bf16", skew=0.5)
FORMS = ("torch_loop", "torch_grouped_mm", "torch_gather_loop")
SHAPE = Shape(
    **SIZES, activation="swiglu", dtype="bf16", packed="bf16", weights="bf16", capacity_factor=None, architecture="cpu"
)
HOPPER = Target.of("sm_90a")
WIDE = SIZES | {"hidden": 128, "intermediate": 128}
QUANTISED = cell_of("layer", **WIDE, weights="int4_g32")
FP8 = cell_of("layer", **WIDE, packed="fp8_block128", weights="e4m3_block128")


@pytest.fixture
def best(monkeypatch):
    """Plant a table in which an implementation is the best of all."""

    def plant(name: str, architecture: str = "cpu") -> None:
        times = dict.fromkeys((*FORMS, "cute", "triton_gather"), 2.0) | {name: 1.0}
        entry = Entry("c", "prefill", replace(SHAPE, architecture=architecture), times)
        monkeypatch.setattr(choices, "load", lambda: (entry,))

    return plant


def outputs(name: str) -> tuple[dict[str, torch.Tensor], str, list[str]]:
    """What a call leaves in all named tensors, its configuration and parts."""
    definition = BENCH.definition()
    inputs = definition.build(CELL, 3, "cpu") | definition.shared(CELL, 3, "cpu")
    call = BENCH.bind(name, CELL, inputs | definition.empty_outputs(CELL, inputs))
    found = call()
    assert BENCH.check_stages(name, CELL, found).error is None
    assert set(call.buffers) <= set(found)
    return found, call.configuration(), [stage for stage, _ in call.stages]


@pytest.mark.parametrize("name", FORMS)
def test_auto_is_what_it_chooses(name, best) -> None:
    """The same bits in every tensor, intermediate ones too, and the same parts."""
    best(name)
    assert BENCH.supports("auto", CELL) is None
    (found, said, stages), (want, _, parts) = outputs("auto"), outputs(name)
    assert said == name and stages == parts and found.keys() == want.keys()
    rows = int(want["offsets"][-1])
    for tensor in want:
        assert torch.equal(
            found[tensor][: rows if tensor == "y" else None], want[tensor][: rows if tensor == "y" else None]
        ), tensor


def test_what_cannot_run_is_not_chosen(best) -> None:
    """However fast it was measured to be."""
    best("torch_grouped_mm")
    wide = CELL.but(dtype="fp32", packed="fp32", weights="fp32")
    assert BENCH.chosen(CELL) == "torch_grouped_mm" and BENCH.chosen(wide) == "torch_gather_loop"
    assert BENCH.chosen(CELL.but(packed="fp8_row")) == "torch_loop"
    best("cute")
    assert BENCH.chosen(CELL, CPU) in FORMS


def test_a_machine_with_a_gpu_chooses_kernels(best, monkeypatch) -> None:
    """What their packages are there for; the architecture is that of the tensors, or of the compilation."""
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    best("cute", "sm_90")
    assert BENCH.chosen(CELL, HOPPER) == "cute"
    assert BENCH.chosen(CELL.but(activation="swiglu_oai"), HOPPER) == "cute"
    monkeypatch.setattr(chooser, "installed", lambda package: package == "triton")
    assert BENCH.chosen(CELL, HOPPER) == "triton_gather"
    monkeypatch.setattr(chooser, "installed", lambda package: False)
    assert BENCH.chosen(CELL, HOPPER) == "torch_grouped_mm"


def test_quantised_weights_have_candidates_of_their_own(monkeypatch) -> None:
    """On a CPU in torch, which dequantises; with a GPU the kernels that multiply with codes, and e4m3 with e4m3."""
    assert (BENCH.chosen(QUANTISED, CPU), BENCH.chosen(FP8, CPU)) == ("dequant_loop", "dequant_loop")
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    assert (BENCH.chosen(QUANTISED, HOPPER), BENCH.chosen(FP8, HOPPER)) == ("cute_quantised", "cute_fp8")
    assert BENCH.chosen(QUANTISED.but(weights="mxfp4"), HOPPER) == "cute_quantised"
    assert BENCH.chosen(QUANTISED.but(weights="nvfp4"), HOPPER) == "dequant"
    monkeypatch.setattr(chooser, "installed", lambda package: False)
    assert BENCH.chosen(QUANTISED, HOPPER) == "dequant"


def test_auto_rounds_what_it_chooses_rounds(monkeypatch) -> None:
    """Between products of 8-bit floats: by no more than the chosen one declares, and by that much."""
    definition = BENCH.definition()
    inputs = definition.build(FP8, 3, "cpu") | definition.shared(FP8, 3, "cpu")
    expected = definition.reference(FP8, inputs)
    compared = inputs, {"combined": (expected["combined"] * 1.05).bfloat16()}, expected
    assert BENCH.check("auto", FP8, *compared).error
    monkeypatch.setattr(auto.Choosing, "chosen", lambda *_: "cute_fp8")
    found = BENCH.check("auto", FP8, *compared)
    assert found == BENCH.check("cute_fp8", FP8, *compared) and found.error is None


def test_nothing_to_choose_from_is_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(auto, "ranked", lambda operation: [BENCH["cute"], BENCH["triton"]])
    why = BENCH.supports("auto", CELL)
    assert why and why.endswith("cute: needs an NVIDIA GPU, not cpu; triton: needs a GPU, not cpu")


def test_a_table_of_other_code_is_refused(best) -> None:
    best("cute_of_old")
    with pytest.raises(UserError, match="those of the bench layer"):
        BENCH.chosen(CELL)


def test_precompiling_auto_is_precompiling_what_it_chooses(best, monkeypatch) -> None:
    """For the architecture that is asked for, on a machine without it."""
    pytest.importorskip("cutlass")
    best("cute", "sm_90")
    asked = []
    monkeypatch.setattr(
        "moe_routing_bench.benches.composite.precompile",
        lambda bench, one, cell, target: asked.append((one.name, target)),
    )
    BENCH.precompile("auto", CELL, HOPPER)
    assert asked == [("cute", HOPPER)]
