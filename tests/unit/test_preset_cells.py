"""Every preset of config/models.yaml in every bench: it becomes a cell with an estimate, or the reason why not is given."""

from pathlib import Path

import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import estimates
from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import config_of, expand
from moe_routing_bench.config.load import load
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers import ROUTERS

MODELS = presets.load(Path(__file__).parents[2] / "config/models.yaml")
MEASURED = [name for name, each in MODELS.items() if not each.unsupported]


def jobs_of(bench, model, **entry):
    config = config_of(bench, {"model": model, "tokens": 4})
    config["grid"][0] |= entry
    return expand(load(config), MODELS)


@pytest.mark.parametrize("model", MEASURED)
def test_a_preset_is_a_cell_of_every_bench_with_an_estimate(model):
    preset = MODELS[model]
    divisor = next(number for number in range(2, preset.experts + 1) if preset.experts % number == 0)
    for bench in BENCHES:
        (job,) = jobs_of(bench, model, **{"ranks": [divisor]} if "ranks" in BENCHES[bench].axes else {})
        assert (job.cell.experts, job.cell.top_k) == (preset.experts, preset.top_k), bench
        assert estimates.estimate(job, "cpu").seconds > 0, bench


@pytest.mark.parametrize("model", MEASURED)
def test_the_rule_of_a_cell_has_the_factor_of_its_preset(model):
    (job,) = jobs_of("gate", model)
    rule = ROUTERS[job.cell.router]
    assert MODELS[model].routed_scale in (None, rule.scale) and job.cell.router.startswith(MODELS[model].router)


@pytest.mark.parametrize("model", MEASURED)
def test_shared_experts_of_a_preset_are_in_its_layer_or_refused(model):
    preset = MODELS[model]
    if preset.shared_experts:
        (job,) = jobs_of("layer", model, shared_experts=True)
        assert (
            job.cell.shared_intermediate == preset.shared_intermediate
            and job.cell.get("shared_gate") == preset.shared_gate
        )
    else:
        with pytest.raises(UserError, match="the model has none"):
            jobs_of("layer", model, shared_experts=True)


@pytest.mark.parametrize("model", [name for name in MODELS if name not in MEASURED])
@pytest.mark.parametrize("bench", ["gate", "routing", "layer"])
def test_a_preset_that_cannot_be_measured_is_refused_with_its_reason(bench, model):
    with pytest.raises(UserError, match="a preset that can be measured") as caught:
        jobs_of(bench, model)
    assert MODELS[model].unsupported[:40] in str(caught.value)
