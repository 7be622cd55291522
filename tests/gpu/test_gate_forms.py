"""Every configuration of the gate in CuTe DSL on scores that are hard to tell apart, infinite or NaN, on a GPU.

Which configuration a shape gets is a matter of speed; each has to be right wherever it can run.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_kernels.cute.cache import current_arch
from moe_routing_kernels.gate import cute_gate, rule_of

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = 14


def hard(logits: Tensor, top_k: int) -> None:
    """Change all tokens but every KINDS-th of logits (T, E): many ways in which a choice is hard. None has a NaN."""
    tokens, experts = logits.shape
    rng = torch.Generator("cuda").manual_seed(5)
    near = torch.randint(0, 2 * experts, logits.shape, device="cuda", generator=rng)
    some = near % 2 > 0
    kind = torch.arange(tokens, device="cuda") % KINDS

    def put(number: int, values: Tensor) -> None:
        logits[kind == number] = values.to(logits.dtype).expand(tokens, experts)[kind == number]

    best = logits.float().sort(1, descending=True)
    place = torch.arange(experts, device="cuda")
    put(1, torch.full((1,), 1.5, device="cuda"))
    put(2, torch.where(some, 0.0, -0.0))
    put(3, (near % 9).float())
    put(4, (near.int() + 0x3FC00000).view(torch.float32))
    put(5, -(near.int() + 0x3FC00000).view(torch.float32))
    put(6, logits.bfloat16())
    put(7, best.values[:, top_k - 1 : top_k].expand_as(logits).where(best.indices.argsort(1) % 3 > 0, logits))
    put(8, best.values[:, top_k - 1 : top_k].minimum(logits))  # k and more at the threshold
    put(9, logits.float().where(some | (place < top_k), -torch.inf))
    put(10, torch.where(place % (experts // top_k) == 0, best.values, -torch.inf))  # k finite scores, or some more
    put(11, torch.where(place < 40, 5 + place / 64, logits.float()))  # many in few lanes
    put(12, torch.full((1,), -torch.inf, device="cuda"))
    put(13, logits.float().where(near % 200 > 0, torch.inf))


@pytest.mark.parametrize("router", ["softmax_topk_renorm", "softmax_topk", "llama4"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("experts", "top_k"),
    [
        (128, 8),
        (132, 10),
        (160, 6),
        (256, 1),
        (256, 2),
        (384, 8),
        (512, 3),
        (512, 10),
        (512, 16),
        (896, 12),
        (1024, 16),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2, 1003])
def test_every_configuration(tokens, experts, top_k, dtype, router):
    cell = cell_of("gate", tokens=tokens, experts=experts, top_k=top_k, dtype=dtype, router=router)
    rule, definition = rule_of(router), BENCHES["gate"].definition()
    logits = definition.build(cell, 3, "cuda")["logits"]
    if tokens > 2:
        hard(logits, top_k)
    wanted = definition.reference(cell, {"logits": logits})
    order = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    broken = torch.arange(tokens, device="cuda") % 5 == 4
    logits[broken, torch.arange(tokens, device="cuda")[broken] % experts] = torch.nan
    configs = cute_gate.packed_configs(dtype, experts, top_k, rule) + cute_gate.threshold_configs(experts, top_k, rule)
    for config in [cute_gate.Config(32), *configs]:
        outputs = definition.empty_outputs(cell, {"logits": logits})
        ids, weights = outputs["topk_ids"].fill_(-7), outputs["topk_weights"].fill_(-7.0)
        kernel = cute_gate.compile_for(current_arch(), dtype, experts, top_k, rule, config)
        kernel(logits, logits.new_empty(experts, dtype=torch.float32), ids, weights)
        assert (ids[broken] == -1).all() and weights[broken].isnan().all(), config
        assert torch.equal(ids[~broken].long().sort(1).values, order[~broken].sort(1).values), config
        chosen = logits[~broken].gather(1, ids[~broken].long())
        assert torch.equal(chosen, logits[~broken].gather(1, order[~broken])), f"{config}: choices do not fall"
        expected = wanted["topk_weights"].float()
        torch.testing.assert_close(weights[~broken], expected[~broken], rtol=1e-5, atol=1e-30, msg=str(config))
