"""Tiny models of four families on a GPU, in every form, in the timer that measures them."""

import pytest
import torch

import tiny_models
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.measure import timers

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("transformers")
BENCH = BENCHES["model"]


@pytest.mark.parametrize("axes", [{"tokens": 200}, {"phase": "decode", "tokens": 1}], ids=["prefill", "decode"])
@pytest.mark.parametrize("form", [one.name for one in BENCH.implementations])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_replayed_pass_is_right(name: str, form: str, axes: dict) -> None:
    """On values that nobody knew when it was captured. Only loops over experts, which wait for the host, are launched one by one."""
    with tiny_models.installed():
        definition = BENCH.definition()
        weights = "int4_g128" if "experts" in BENCH[form].options else "bf16"
        cell = tiny_models.cell(name, hidden=128, intermediate=64, experts=16, top_k=4, weights=weights, **axes)
        shared = definition.shared(cell, 3, "cuda")
        first, other = (definition.build(cell, seed, "cuda") | shared for seed in (3, 4))
        tensors = {key: one.clone() for key, one in first.items()} | shared
        outputs = definition.empty_outputs(cell, tensors)
        call = BENCH.bind(form, cell, tensors | outputs)
        call()
        timer = timers.device_timer([call], 1000, "cuda")
        assert timer.name == ("events" if form in ("transformers_eager", "dequant_loop") else "cuda_graph")
        for key in first.keys() - shared.keys():
            tensors[key].copy_(other[key])
        timer.rotate()
        torch.cuda.synchronize()
        found = timer.returned[0]
        assert isinstance(found, dict)
        check = BENCH.check(form, cell, other, outputs | found, definition.reference(cell, other))
        assert check.error is None and 0 < check.rel_l2_error < check.tolerance
