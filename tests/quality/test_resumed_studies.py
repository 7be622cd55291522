"""Every kind of run that study A0 plans trains at a tiny size, and one that was killed ends as an unbroken one, bit for bit."""

import dataclasses
from pathlib import Path

import pytest
import torch

from campaign import CAMPAIGN
from moe_routing_bench.config import load as config
from moe_routing_bench.grid.run_spec import DENSE, Run
from moe_routing_bench.quality import loop, plan, run_rows, train
from moe_routing_bench.store import paths

A0 = Path(__file__).parents[2] / "config/studies/a0.yaml"
TIMES = {*run_rows.TIMING, "run_step_ms", "eval_seconds", "ended_at"}
STEPS, KILLED = 4, 2


def kinds() -> list[Run]:
    """One run of each router, gate and match, of the first seed."""
    finals = plan.expand(config.load(config.read_mapping(A0))["quality"]).finals.values()
    return [run for run in finals if run.seed == 17]


def tiny(run: Run, text: str) -> Run:
    """What the study names, in two layers and few steps; with all experts of the study."""
    size = {
        "dim": 16,
        "heads": 2,
        "layers": 2,
        "expert_hidden": 8,
        "sequence": 32,
        "batch": 4,
        "shared_hidden": min(8, run.shared_hidden),
    }
    return dataclasses.replace(
        run,
        corpora={text: None},
        steps=STEPS,
        warmup=1,
        eval_every=STEPS,
        validation_tokens=0,
        trace_tokens=0,
        keep_weights=True,
        **size,
    )


QUICK = ("noisy_topk", "quantile_logits", "longcat_zero", "expert_threshold", "deepseek_v4_hash+sqrtsoftplus_renorm")
CASES = [
    pytest.param(
        run,
        id=f"{run.router}-{run.shared_gate}-{run.match}",
        marks=() if run.router in QUICK or run.shared_gate == "joint" else CAMPAIGN,
    )
    for run in kinds()
]


def test_the_study_has_every_rule_and_gate() -> None:
    assert {run.shared_gate for run in kinds()} == {"plain", "gated", "joint"} and len(CASES) > 40
    assert sum(run.router == DENSE for run in kinds()) == 2


@pytest.mark.parametrize("run", CASES)
def test_a_killed_run_of_the_study_ends_as_an_unbroken_one(
    run: Run, shared_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows but for times, and weights with the state of the routers; the token rounding of a tile has enough tokens."""
    run, step, done = tiny(run, shared_text), loop.Training.step, []

    def dies(self: loop.Training, number: int):
        done.append(number)
        if done == [*range(KILLED + 1)]:
            raise KeyboardInterrupt
        return step(self, number)

    whole = train.train(run, tmp_path / "whole.parquet", "cpu")
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop.Training, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        train.train(run, tmp_path / "broken.parquet", "cpu")
    torch.manual_seed(99)
    broken = train.train(run, tmp_path / "broken.parquet", "cpu")
    assert done == [*range(KILLED + 1), *range(KILLED, STEPS)]
    kept = [
        [{name: value for name, value in row.items() if name not in TIMES} for row in rows] for rows in (whole, broken)
    ]
    assert repr(kept[0]) == repr(kept[1]), "a nan is equal to itself"
    first, second = (
        torch.load(paths.weights_file(tmp_path / name), weights_only=True)["model"]
        for name in ("whole.parquet", "broken.parquet")
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
