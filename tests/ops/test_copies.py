"""A layout that costs a copy on every call says so once; on tensors without data, which stand for those of a GPU."""

import warnings

import pytest
import torch
from torch import Tensor

from moe_routing_kernels import ops
from moe_routing_kernels.ops import backends, weight_layouts

torch.set_num_threads(1)
TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 6, 4, 16, 8


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_WARNED", set())


def tensors(device: str = "meta") -> dict[str, Tensor]:
    shapes = {"x": (TOKENS, HIDDEN), "logits": (TOKENS, EXPERTS), "weights": (TOKENS, 2), "y": (2 * TOKENS, HIDDEN)}
    shapes |= {"w13": (EXPERTS, 2 * INTERMEDIATE, HIDDEN), "w2": (EXPERTS, HIDDEN, INTERMEDIATE)}
    given = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    sizes = {"ids": (TOKENS, 2), "order": (2 * TOKENS,), "inverse": (TOKENS, 2), "offsets": (EXPERTS + 1,)}
    return given | {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}


CALLS = {
    ("gate", "logits"): lambda t: ops.gate(t["logits"], 2),
    ("pack", "x"): lambda t: ops.pack(t["x"], t["order"], t["inverse"]),
    ("experts", "w2"): lambda t: ops.experts(t["y"], t["offsets"], t["w13"], t["w2"]),
    ("experts", "rows"): lambda t: ops.experts(t["y"], t["offsets"], t["w13"], t["w2"]),
    ("combine", "y"): lambda t: ops.combine(t["y"], t["inverse"], t["weights"]),
    ("combine", "residual"): lambda t: ops.combine(t["y"], t["inverse"], t["weights"], t["x"]),
    ("fused_experts", "w13"): lambda t: ops.fused_experts(t["x"], t["ids"], t["weights"], t["w13"], t["w2"]),
}
FORMS = {
    "transposed": lambda entry: entry.mT.contiguous().mT,
    "unaligned": lambda entry: entry.new_zeros(entry.numel() + 1)[1:].view(entry.shape),
}
OF = {"rows": "y", "residual": "x"}


def spoken(call, given: dict[str, Tensor]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(given)
    return [str(entry.message) for entry in caught]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("operator", "name"), CALLS, ids="-".join)
def test_a_copy_is_told_once(operator: str, name: str, form: str) -> None:
    call, given, tensor = CALLS[operator, name], tensors(), OF.get(name, name)
    assert spoken(call, given) == []
    given[tensor] = FORMS[form](given[tensor])
    (message,) = spoken(call, given)
    assert message.startswith(f"ops.{operator} copies {name} {tuple(given[tensor].shape)}") and "\n" not in message
    assert spoken(call, given) == []
    other = next(entry for entry in FORMS if entry != form)
    given[tensor] = FORMS[other](tensors()[tensor])
    assert len(spoken(call, given)) == 1, "another layout is another copy"


def test_it_names_the_line_that_calls() -> None:
    given = tensors()
    with pytest.warns(UserWarning, match="copies w13") as caught:
        ops.experts(given["y"], given["offsets"], FORMS["transposed"](given["w13"]), given["w2"])
    assert caught[0].filename == __file__


def test_the_cpu_copies_nothing() -> None:
    given = tensors("cpu") | {name: FORMS["transposed"](tensors("cpu")[name]) for name in ("x", "w13", "w2")}
    for call in CALLS.values():
        assert spoken(call, given) == []


def test_compiled_code_is_silent() -> None:
    given = tensors() | {"w2": FORMS["transposed"](tensors()["w2"])}
    torch.compiler.reset()
    call = CALLS["experts", "w2"]
    assert spoken(torch.compile(call, backend="eager", fullgraph=True), given) == []
    assert len(spoken(call, given)) == 1


def test_copies_are_counted_in_mebibytes() -> None:
    weights = [torch.empty(3, 2**19, dtype=torch.bfloat16, device="meta"), torch.empty(2**18, device="meta")]
    assert weight_layouts._mebibytes(weights) == 4.0
