"""Numbers and names that operators are given: whole ones, positive ones, of Python or numpy; any other is one line, and none is rounded."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.permute import MOST_ROWS
from moe_routing_kernels.routers import scaled

torch.set_num_threads(1)
LOGITS = torch.randn(3, 4, generator=torch.Generator().manual_seed(17))
IDS = torch.tensor([[0, 1], [1, 2], [1, 3]], dtype=torch.int32)
X, W13, W2 = torch.ones(3, 2), torch.ones(4, 2, 2), torch.ones(4, 2, 1)
WHOLE: dict[str, Callable] = {
    "top_k": lambda value: ops.gate(LOGITS, value),
    "experts": lambda value: ops.permute(IDS, value),
    "capacity": lambda value: ops.permute(IDS, 4, value),
}
POSITIVE: dict[str, Callable] = {
    "scale": lambda value: ops.gate(LOGITS, 2, scale=value),
    "capacity factor": lambda value: ops.capacity_of(value, 3, 2, 4),
}
NAMES: dict[str, Callable] = {
    "rule": lambda value: ops.gate(LOGITS, 2, value),
    "layout": lambda value: ops.permute(IDS, 4, 1, value),
    "activation": lambda value: ops.fused_experts(X, IDS, torch.ones(3, 2), W13, W2, None, value),
    "phase": lambda value: ops.fused_experts(X, IDS, torch.ones(3, 2), W13, W2, phase=value),
}
NO_WHOLE = (True, 2.0, np.float32(2.5), "2", [2], torch.tensor(2), 2j)
NO_POSITIVE = (
    True,
    0,
    -0.0,
    -1,
    10**400,
    float("inf"),
    float("nan"),
    np.float32("nan"),
    "2",
    [2],
    torch.tensor(2.0),
    2j,
)
NO_NAME = (["softmax_topk"], {"a": 1}, 3, b"compact", Tensor())
WRONG = [
    (name, call, value)
    for calls, values in ((WHOLE, NO_WHOLE), (POSITIVE, NO_POSITIVE), (NAMES, NO_NAME))
    for name, call in calls.items()
    for value in values
]


@pytest.mark.parametrize(("name", "call", "value"), WRONG, ids=lambda entry: "" if callable(entry) else str(entry)[:12])
def test_what_is_no_number_or_name_is_one_line(name: str, call: Callable, value: object) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(name)}: got ") as caught:
        call(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", NO_POSITIVE, ids=lambda value: str(value)[:12])
def test_a_name_has_only_scales_that_operators_take(value: object) -> None:
    with pytest.raises(UserError, match=r"^scale: got "):
        scaled("sigmoid_renorm", value)  # pyright: ignore[reportArgumentType]


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number in the place of all."""
    return torch.zeros(1, dtype=dtype).expand(shape)


INT = torch.int32
TOO_MANY: dict[str, Callable] = {
    "gate": lambda n: ops.gate(of(n, 1), 1),
    "permute": lambda n: ops.permute(of(n, 1, dtype=INT), 1),
    "permute with a capacity": lambda n: ops.permute(of(n // 4 + 1, 4, dtype=INT), 1, 1),
    "pack": lambda n: ops.pack(of(n, 1), of(1, dtype=INT), of(n, 1, dtype=INT)),
    "pack rows": lambda n: ops.pack(of(1, 1), of(n, dtype=INT), of(1, 1, dtype=INT)),
    "experts": lambda n: ops.experts(of(n, 1), of(2, dtype=INT), of(1, 2, 1), of(1, 1, 1)),
    "combine": lambda n: ops.combine(of(n, 1), of(1, 1, dtype=INT), of(1, 1)),
    "combine assignments": lambda n: ops.combine(of(1, 1), of(n // 4 + 1, 4, dtype=INT), of(n // 4 + 1, 4)),
    "fused_experts": lambda n: ops.fused_experts(of(n, 1), of(n, 1, dtype=INT), of(n, 1), of(1, 2, 1), of(1, 1, 1)),
    "layer": lambda n: ops.layer(of(n, 1), of(n, 1), of(1, 2, 1), of(1, 1, 1), 1),
}


@pytest.mark.parametrize("call", TOO_MANY.values(), ids=TOO_MANY)
@pytest.mark.parametrize("count", [MOST_ROWS + 1, 2**31 - 1, 2**31, 2**33])
def test_more_than_kernels_count_is_one_line(count: int, call: Callable) -> None:
    """Where a position and a step of a loop exceed int32, kernels never ended and wrote elsewhere."""
    with pytest.raises(UserError, match=rf"got \d+; allowed: at most {MOST_ROWS}"):
        call(count)


@pytest.mark.parametrize("call", WHOLE.values(), ids=WHOLE)
def test_whole_numbers_of_numpy_are_those_of_python(call: Callable) -> None:
    for got, want in zip(call(np.int64(4)), call(4), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("scale", [0.1 + 0.2, 1e-05, 1e20, 10**20, np.float32(2.5), 3, 1e16])
def test_a_scale_and_the_name_that_has_it_are_the_same(scale: float) -> None:
    for got, want in zip(
        ops.gate(LOGITS, 2, scaled("llama4", scale)), ops.gate(LOGITS, 2, "llama4", scale=scale), strict=True
    ):
        assert torch.equal(got, want)
    base = ops.gate(LOGITS, 2, "llama4")[1]
    torch.testing.assert_close(ops.gate(LOGITS, 2, "llama4", scale=scale)[1], base * float(scale), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compiled_code_takes_any_scale(dtype: torch.dtype) -> None:
    """As an argument, which a compiler makes a symbol once it has changed."""
    torch.compiler.reset()
    function = torch.compile(lambda logits, scale: ops.gate(logits, 2, scale=scale)[1], backend="eager", fullgraph=True)
    logits = LOGITS.to(dtype)
    for scale in (2.5, 3, 0.1 + 0.2, 1e-05, 7):
        torch.testing.assert_close(function(logits, scale), ops.gate(logits, 2, scale=scale)[1], rtol=0, atol=0)
