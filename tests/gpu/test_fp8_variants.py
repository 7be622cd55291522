"""Forms of 8-bit experts that are not the default, on a GPU: the same bits, whoever quantises."""

import pytest
import torch

pytest.importorskip("cutlass")
from moe_routing_kernels.experts import Experts, cute_fp8
from moe_routing_kernels.formats import FORMATS, quantise
from moe_routing_kernels.formats import quantisation as of_weights
from moe_routing_kernels.formats.weights import WEIGHTS

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
VARIANTS = [
    cute_fp8.Variant(fused=False),
    cute_fp8.Variant(lead=1),
    cute_fp8.Variant(across=(4, 4)),
    cute_fp8.Variant(across=(4, 4), lead=1),
    cute_fp8.Variant(across=(4, 3), lead=3),
    cute_fp8.Variant(fused=False, across=(4, 3)),
]


def drawn(problem: Experts) -> dict[str, torch.Tensor]:
    """Rows and weights of a problem, whose experts have from none to many rows; rows of no expert are NaN."""
    torch.manual_seed(7)
    counts = torch.rand(problem.experts).pow(3)
    counts = (counts / counts.sum() * (problem.rows - 100)).int()
    counts[0] = 0
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().cuda()
    packed, scales = quantise(torch.randn(problem.rows, problem.hidden, device="cuda"), FORMATS[problem.packed])
    scales[offsets[-1] :] = float("nan")
    found = {"packed": packed, "scales": scales, "offsets": offsets}
    inner = problem.intermediate
    for name, shape in (
        ("w13", (inner * (2 if problem.gated else 1), problem.hidden)),
        ("w2", (problem.hidden, inner)),
    ):
        plain = torch.randn(problem.experts, *shape, device="cuda") * 0.05
        parts = of_weights.quantise(plain, WEIGHTS[problem.weights], problem.dtype)
        found |= {name: parts["elements"], f"{name}_scales": parts["scales"]}
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(700, 352, 320), (4200, 352, 768), (4200, 1056, 448)])
def test_the_same_bits_in_every_variant(rows, hidden, inner, activation, variant):
    problem = Experts(rows, hidden, inner, 7, "bf16", "fp8_block128", "e4m3_block128", activation=activation)
    given = drawn(problem)
    both = [torch.zeros(rows, problem.hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for y, option in zip(both, (cute_fp8.FASTEST, variant), strict=True):
        cute_fp8.bind(problem, **given, y=y, variant=option)()
    used = int(given["offsets"][-1])
    assert torch.equal(both[0][:used], both[1][:used]) and bool(both[0][:used].isfinite().all())
    assert bool(both[0][:used].any(1).all())
