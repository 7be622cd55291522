"""What training runs take before they start: by stored speeds of their shape, else by estimates that say so."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moe_routing_bench import packages
from moe_routing_bench.cli.status import ENGINE, plan
from moe_routing_bench.grid.run_spec import DENSE, PACKAGES, Run
from moe_routing_bench.quality import code, family, run_rows, study_costs
from moe_routing_bench.store import paths

RUN = Run(
    dim=512,
    layers=8,
    heads=8,
    experts=64,
    top_k=8,
    expert_hidden=128,
    capacity_factor=None,
    corpora={PACKAGES: None},
    vocabulary=8192,
    sequence=512,
    batch=64,
)
GRID = [{"benches": ["gate"], "tokens": [4], "experts": [4], "top_k": [2]}]


@pytest.mark.parametrize(
    ("dim", "layers", "hidden", "wanted"), [(512, 8, 128, 0.76e6), (768, 10, 128, 0.44e6), (1024, 12, 160, 0.27e6)]
)
def test_an_estimate_is_near_the_forecast_of_each_size(dim: int, layers: int, hidden: int, wanted: float) -> None:
    """Tokens a second at 20, 50 and 100 million active parameters."""
    run = replace(RUN, dim=dim, layers=layers, expert_hidden=hidden)
    assert 1 / study_costs.estimate(run) == pytest.approx(wanted, rel=0.3)
    assert study_costs.estimate(replace(RUN, router=DENSE)) < study_costs.estimate(RUN)


def row(router: str, speed: float, alone: bool = False, **change: object) -> dict:
    shape = {name: getattr(RUN, name) for name in study_costs.SHAPE}
    return {"engine": ENGINE, "router": router, "train_tokens_per_s": speed, "timed_alone": alone} | shape | change


def test_stored_speeds_come_before_estimates() -> None:
    """Those of the rule, timed alone if they can be, then those of other rules; not those of another engine or shape."""
    rows = [row("softk", 1e6, True), row("softk", 2e6), row("remoe", 3e6), row("softk", 9e9, dim=64)]
    known = study_costs.speeds([*rows, row("softk", 9e9, True, engine="graph")], ENGINE)
    softk, other, dense = (
        study_costs.cost([replace(RUN, router=name)] * 3, known) for name in ("softk", "base", DENSE)
    )
    assert (softk.basis, other.basis, dense.basis) == (
        study_costs.STORED,
        study_costs.OTHER_RULES,
        study_costs.ESTIMATED,
    )
    tokens = RUN.steps * RUN.tokens_per_step
    assert (
        softk.runs == 3
        and softk.seconds > tokens / 1e6
        and other.seconds - softk.seconds < tokens / 2e6 - tokens / 1e6 + 1
    )


def test_every_evaluation_takes_its_time() -> None:
    """The last one as well, which ends a run between two others."""
    known = study_costs.speeds([row("softk", 1e6, True)], ENGINE)
    run = replace(RUN, validation_tokens=2_000_000, altered=False, eval_every=100)
    seconds = {steps: study_costs.cost([replace(run, steps=steps)], known).seconds for steps in (99, 100, 101, 200)}
    step = run.tokens_per_step / 1e6
    evaluation = seconds[101] - seconds[100] - step
    assert evaluation == pytest.approx(max(2 / 3, 0.015 * 2e6 / run.tokens_per_step))
    assert seconds[100] - seconds[99] == pytest.approx(step)
    assert seconds[200] - seconds[101] == pytest.approx(99 * step)
    limited = study_costs.cost([replace(run, steps=100, capacity_factor=1.25)], known).seconds
    assert limited - seconds[100] == pytest.approx(evaluation), "a pass with the capacity and one without"


def test_the_command_adds_up_the_runs_of_a_config(tmp_path, monkeypatch, capsys) -> None:
    """Pilots apart from final runs; without stored rows it says that all is estimated, with them it does not."""
    monkeypatch.chdir(tmp_path)
    common = {"corpora": {"stdlib": 1000}, "dim": 64, "steps": 1000}
    entries = [
        {"label": "a", "router": ["softk", "base"], "seed": [1, 2], "lr": 0.1} | common,
        {"label": "b", "router": ["softk"], "seed": [1], "pilot": {"lr": [0.1, 0.2], "steps": 500}} | common,
    ]
    config = json.dumps({"seed": 17, "device": "cpu", "grid": GRID, "quality": entries})
    plan(config_json=config, platform="nvidia-h200")
    *lines, total, power, basis = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["entry", "runs"], ["b", "(pilots)"], ["a", "4"], ["b", "1"]]
    assert power.startswith("a, 2 seeds: equal rules are shown equivalent within 0.01 by 15 seeds for one pair, 15 for")
    assert total.startswith("7 runs, ") and basis.startswith("estimated: for one NVIDIA H200")
    stored = Run(dim=64, corpora={"stdlib": 1000})
    fields = {name: getattr(stored, name) for name in study_costs.SHAPE} | {"router": "softk", "engine": ENGINE}
    fields |= {"schema_version": run_rows.SCHEMA_VERSION, "train_tokens_per_s": 1e6, "timed_alone": True}
    paths.quality("nvidia-h200").parent.mkdir(parents=True)
    run_rows.write(paths.quality("nvidia-h200"), [fields], stored.spec)
    plan(config_json=config, platform="nvidia-h200")
    told = capsys.readouterr().out
    assert "stored, of other rules" in told and "estimated" not in told


@pytest.mark.parametrize(
    ("change", "stored"),
    [({}, True), ({"code_fingerprint": "older"}, False), ({"steps": 9}, False), ({"causal": False}, False)],
)
def test_the_noise_of_a_plan_is_that_of_stored_rows_of_its_code_and_size(
    tmp_path, monkeypatch, capsys, change, stored
) -> None:
    """Three rules and four seeds; else the plan says what it assumes."""
    monkeypatch.chdir(tmp_path)
    common = {"corpora": {"stdlib": 1000}, "dim": 64, "steps": 1000}
    entry = {"label": "a", "router": ["softk", "base"], "seed": [1, 2], "lr": 0.1} | common
    config = json.dumps({"seed": 17, "device": "cpu", "grid": GRID, "quality": [entry]})
    run = Run(dim=64, steps=1000, corpora={"stdlib": 1000})
    draw = np.random.default_rng(0)
    losses = 1.5 + draw.normal(0, 0.1, (4, 1)) + draw.normal(0, 0.02, (4, 3))
    fields = {
        name: getattr(run, name) for name in (*study_costs.SHAPE, "batch", "steps", "network", "label", "purpose")
    }
    fields |= {
        "schema_version": run_rows.SCHEMA_VERSION,
        "causal": True,
        "code_fingerprint": packages.fingerprint(code.training_files()),
    }
    rows = [
        fields
        | {"run": f"{rule}{seed}", "router": rule, "seed": seed, "step": 1000, "bits_per_byte": losses[seed, i]}
        | change
        for seed in range(4)
        for i, rule in enumerate(("softk", "base", "remoe"))
    ]
    paths.quality("nvidia-h200").parent.mkdir(parents=True)
    run_rows.write(paths.quality("nvidia-h200"), rows, run.spec)
    plan(config_json=config, platform="nvidia-h200")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("a, 2 seeds"))
    noise = family.family(pd.DataFrame(losses)).noise
    assert noise != pytest.approx(study_costs.NOISE, rel=0.1)
    said = f"at a noise of {noise:.2g} bits (that of 3 stored contestants of this code and size, 4 seeds)"
    assert line.endswith(said if stored else f"at a noise of {study_costs.NOISE:.2g} bits ({study_costs.ASSUMED})")
    needed = study_costs.seeds_needed(noise if stored else study_costs.NOISE, 2)
    assert f"by {needed} seeds for one pair" in line
