"""The six products of experts forward and backward, each against float32 on what it read: ragged, empty, and beside rows of nobody."""

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from moe_routing_kernels.cute.cache import current_arch
from moe_routing_kernels.experts import Experts, cute_training
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.ops.reference import activation_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
# hidden, intermediate, rows of each expert, rows of no expert, format, activation
CASES = {
    "ragged": (136, 72, [0, 1, 63, 64, 300], 70, "bf16", "swiglu"),
    "many_rows": (520, 264, [700, 0, 129, 401], 9, "bf16", "swiglu"),
    "some_rows": (256, 192, [100, 130, 65, 0, 16, 200, 128, 79], 33, "bf16", "geglu"),
    "one_hot": (384, 384, [0, 0, 1513, 0], 64, "fp16", "swiglu"),
    "few_rows": (72, 24, [3, 1, 0, 7, 15, 17], 5, "bf16", "swiglu"),
    "narrow_hidden": (64, 128, [30, 201, 100], 40, "bf16", "geglu"),
    "narrow_inner": (128, 64, [30, 201, 100], 0, "fp16", "swiglu"),
}


def wanted(
    problem: Experts, spans: list[slice], given: dict[str, Tensor], found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What each product makes of what it read, in float32."""
    parts: dict[str, list[Tensor]] = {name: [] for name in found}
    for expert, rows in enumerate(spans):
        x, grad, up, down = (
            one.float() for one in (given["rows"][rows], given["grad"][rows], given["w13"][expert], given["w2"][expert])
        )
        sums, d_sums, again = (found[name][rows].float() for name in ("sums", "d_preact", "again"))
        results = {
            "sums": x @ up.T,
            "activated": activate(problem.activation, x @ up.T),
            "y": found["activated"][rows].float() @ down.T,
            "d_preact": activation_gradient(problem.activation, sums, grad @ down),
            "again": activate(problem.activation, sums),
            "d_rows": d_sums @ up,
            "d_w13": (d_sums.T @ x)[None],
            "d_w2": (grad.T @ again)[None],
        }
        for name, result in results.items():
            parts[name].append(result)
    return {name: torch.cat(part) for name, part in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_products(case: str) -> None:
    """Results are poisoned before; rows of no expert hold NaN, add nothing and stay as they are; a second run gives the same bits."""
    if current_arch() != "sm_90a":
        pytest.skip("is written for sm_90a")
    hidden, inner, counts, spare, dtype, activation = CASES[case]
    used, experts = sum(counts), len(counts)
    rows = used + spare
    problem = Experts(rows, hidden, inner, experts, dtype, dtype, dtype, activation=activation)
    torch.manual_seed(17)
    kind = {"device": "cuda", "dtype": FORMATS[dtype].torch_dtype}
    shapes = {
        "rows": (rows, hidden),
        "grad": (rows, hidden),
        "w13": (experts, 2 * inner, hidden),
        "w2": (experts, hidden, inner),
    }
    given = {
        name: torch.randn(shape, **kind) / (shape[-1] ** 0.5 if len(shape) > 2 else 1) for name, shape in shapes.items()
    }
    for name in ("rows", "grad"):
        given[name][used:] = torch.nan
    bounds = list(itertools.accumulate(counts, initial=0))
    offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    of_rows = {
        "sums": 2 * inner,
        "activated": inner,
        "y": hidden,
        "d_preact": 2 * inner,
        "again": inner,
        "d_rows": hidden,
    }
    found = {name: torch.full((rows, width), torch.nan, **kind) for name, width in of_rows.items()}
    found |= {f"d_{name}": torch.full(shapes[name], torch.nan, **kind) for name in ("w13", "w2")}
    run = cute_training.launches(problem, offsets.device)

    def call() -> dict[str, Tensor]:
        run["up"](given["rows"], offsets, given["w13"], found["sums"], None, found["activated"], None, None)
        run["down"](found["activated"], None, offsets, given["w2"], None, found["y"])
        run["d_preact"](
            given["grad"], offsets, given["w2"], found["sums"], None, found["d_preact"], found["again"], None
        )
        run["d_w2"](given["grad"], found["again"], offsets, found["d_w2"])
        run["d_rows"](found["d_preact"], offsets, given["w13"], None, None, found["d_rows"], None, None)
        run["d_w13"](found["d_preact"], given["rows"], offsets, found["d_w13"])
        return {name: one.clone() for name, one in found.items()}

    first, second = call(), call()
    scales = torch.rand(rows, device="cuda")
    part = cute_training.gemms(problem, weighted=True)["d_preact"]
    dots = torch.full((rows, part.dots), torch.nan, device="cuda")
    weighted = {name: torch.full_like(found[name], torch.nan) for name in ("d_preact", "again")}
    tensors = (found["sums"], scales, weighted["d_preact"], weighted["again"], dots)
    cute_training.launches(problem, offsets.device, weighted=True)["d_preact"](
        given["grad"], offsets, given["w2"], *tensors
    )
    spans = [slice(*ends) for ends in itertools.pairwise(bounds)]
    grads = [given["grad"][rows].float() @ given["w2"][expert].float() for expert, rows in enumerate(spans)]
    eps = torch.finfo(kind["dtype"]).eps
    want = (torch.cat(grads) * first["again"][:used].float()).sum(1)
    assert (dots[:used].sum(1) - want).abs().max() < 5 * eps * want.abs().max()
    for name, got in weighted.items():
        want = first[name][:used].float() * scales[:used, None]
        assert (got[:used].float() - want).abs().max() < 5 * eps * want.abs().max(), name
        assert got[used:].isnan().all(), f"{name}: rows of no expert are written"
    for name, want in wanted(problem, spans, given, first).items():
        got = first[name][:used] if name in of_rows else first[name]
        error = (got.float() - want).abs().max() / want.abs().max()
        assert error < 5 * eps, f"{name}: {error:.1e}"
        assert torch.equal(got, second[name][:used] if name in of_rows else second[name]), name
        assert name not in of_rows or first[name][used:].isnan().all(), f"{name}: rows of no expert are written"
