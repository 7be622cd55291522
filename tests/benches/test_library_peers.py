"""Peers whose kernels are loaded from a library: what they are given and return, with operators in plain torch in their place."""

import pytest
import torch
from library_operators import OPERATORS

from moe_routing_bench.benches.checks import Check
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.peers.loading import SGLANG, VLLM, Library
from moe_routing_kernels.routers import ROUTERS

SIZES = {"tokens": 37, "hidden": 32, "intermediate": 16, "experts": 16, "top_k": 3}
ELSEWHERE = (
    "marlin",
    "mslk_int4",
    "mslk_fp8",
    "vllm_triton",
    "vllm_triton_fp8",
)  # in test_quantised_peers, test_fused_peers
WAYS = [
    (bench.name, way.name)
    for bench in BENCHES.values()
    for way in bench.implementations
    if way.peer and way.peer.module in OPERATORS and way.name not in ELSEWHERE
]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library is there, and has operators of plain torch."""
    monkeypatch.setattr(Library, "missing", lambda library: None)
    monkeypatch.setattr(Library, "operators", lambda library: OPERATORS[library.package])


def checked(bench: str, way: str, **axes):
    """The check of an implementation's outputs, which were poisoned before, or why it cannot run."""
    known = BENCHES[bench]
    base = cell_of(bench, **(SIZES | {axis: axes[axis] for axis in SIZES if axis in axes}))
    cell = base.but(**{axis: value for axis, value in axes.items() if axis in dict(base.values)})
    if reason := known.supports(way, cell):
        return reason
    definition = known.definition()
    shared = definition.shared(cell, 3, "cpu") if hasattr(definition, "shared") else {}
    inputs = definition.build(cell, 3, "cpu") | shared
    outputs = definition.empty_outputs(cell, inputs)
    for one in outputs.values():
        one.view(torch.uint8).fill_(0xFF)
    returned = known.bind(way, cell, inputs | outputs)()
    outputs |= returned if isinstance(returned, dict) else {}
    return known.check(way, cell, inputs, outputs, definition.reference(cell, inputs))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("bench", "way"), [one for one in WAYS if one[0] != "gate" and not one[1].startswith("cute_")])
def test_the_answer_is_right(bench: str, way: str) -> None:
    layout = "block64" if way.endswith("_align") else "compact"
    assert checked(bench, way, layout=layout, dtype="bf16", packed="bf16", weights="bf16").error is None


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("way", ["vllm", "sglang"])
@pytest.mark.parametrize("router", ROUTERS)
def test_rules(way: str, router: str) -> None:
    """Each rule of a package is right; any other is unsupported."""
    both = {"softmax_topk", "softmax_topk_renorm", "sigmoid_renorm", "deepseek_v3", "llama4"}
    known = {"vllm": {*both, "sqrtsoftplus_renorm"}, "sglang": both}
    found = checked("gate", way, router=router, dtype="fp32")
    assert found.error is None if router in known[way] else isinstance(found, str), found


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("bench", "way", "axes", "reason"),
    [
        ("permute", "vllm", {"capacity_factor": 1.0}, "capacity"),
        ("permute", "vllm", {"layout": "block64"}, "vllm_align"),
        ("permute", "sglang_align", {}, "blocks of rows"),
        ("pack", "sglang", {"layout": "block64"}, "padding"),
        ("pack", "vllm", {"hidden": 12}, "16 bytes"),
        ("pack", "vllm", {"packed": "fp8_row"}, "as they are"),
        ("combine", "vllm", {"capacity_factor": 1.0}, "dropped"),
        ("combine", "sglang", {"dtype": "fp32"}, "bf16 and fp16"),
        ("routing", "vllm", {"capacity_factor": 1.0}, "capacity"),
        ("gate", "sglang", {"router": "deepseek_v3", "dtype": "bf16"}, "rounds scores"),
        ("gate", "sglang", {"router": "deepseek_v3", "experts": 48, "dtype": "fp32"}, "power of two"),
        ("gate", "vllm", {"router": "sqrtsoftplus_renorm", "experts": 48}, "48 experts"),
        ("experts", "mslk", {"activation": "swiglu_oai"}, "biases"),
        ("experts", "deepgemm", {"layout": "block64"}, "block128"),
    ],
)
def test_what_cannot_run_says_why(bench: str, way: str, axes: dict, reason: str) -> None:
    assert reason in checked(bench, way, **axes)


def test_a_package_without_the_library(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Library("no_such_package", "a.so", "a").missing() == "no_such_package is not installed"
    (tmp_path / "other_vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    other = Library("other_vllm", VLLM.path, VLLM.namespace)
    assert "another version" in str(other.missing())
    with pytest.raises(FileNotFoundError, match=r"abi3\.so"):
        other.operators()
    (tmp_path / "other_vllm" / SGLANG.path).parent.mkdir()
    (tmp_path / "other_vllm" / SGLANG.path).touch()
    assert Library("other_vllm", SGLANG.path, "sgl_kernel").missing() is None


def permuted(change) -> Check:
    """What the check says of SGLang's permute after a change of its outputs."""
    bench, cell = BENCHES["permute"], cell_of("permute", **SIZES)
    inputs = bench.definition().build(cell, 3, "cpu")
    outputs = bench.definition().empty_outputs(cell, inputs)
    bench.bind("sglang", cell, inputs | outputs)()
    change(outputs)
    return bench.check("sglang", cell, inputs, outputs, bench.definition().reference(cell, inputs))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda out: None, None),
        (lambda out: out["inverse"].view(-1)[:2].fill_(5), "inverse"),
        (lambda out: out["inverse"].view(-1)[0].fill_(-1), "out of range"),
        (lambda out: out["inverse"].copy_(out["inverse"].flip(0)), "inverse"),
        (lambda out: out["order"][0].add_(1), "order"),
        (lambda out: out["counts"][0].add_(1), "counts"),
        (lambda out: out["offsets"][1].add_(1), "offsets"),
    ],
)
def test_rows_in_another_order_are_each_taken_once(change, error: str | None) -> None:
    found = permuted(change)
    assert error in (found.error or "") if error else found.error is None
    assert (found.mismatches > 0) == (error is not None)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("at", "value"), [(0, 1), (0, -1), (64, 0)])
def test_blocks_hold_every_assignment_once(at: int, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in place of another, one that is missing, and one in the rows of another expert."""

    def harmed(ids, experts, block, order, *rest) -> None:
        right(ids, experts, block, order, *rest)
        order[at] = value

    right = OPERATORS["vllm"].moe_align_block_size
    monkeypatch.setattr(OPERATORS["vllm"], "moe_align_block_size", harmed)
    assert "order" in str(checked("permute", "vllm_align", layout="block64").error)
