"""The training run or adaptation that the options of a command ask for. Without torch."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from moe_routing_bench.grid.adaptation_spec import Adaptation
from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality.spec import run_rows
from moe_routing_kernels.errors import UserError, bad, pick


def with_lr(run: Run, pilots: list[Path] | None, schema: Any = run_rows.SCHEMA) -> tuple[Run, dict[str, Any]]:
    """The run with a learning rate, that of its best pilot where it has none, and the row fields that say so."""
    if run.lr is not None:
        return run, {}
    lr, chosen = run_rows.best_lr(pilots or [], schema)
    print(f"learning rate {lr:g} of {chosen['pilot_lrs']}: validation losses {chosen['pilot_losses']}", flush=True)
    return dataclasses.replace(run, lr=lr), chosen


def from_spec(kind: type[Run] | type[Adaptation], spec: str) -> Any:
    """What a text of `--spec` says. Raises `UserError`."""
    try:
        return kind.from_spec(spec)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = {Run: "a training run", Adaptation: "an adaptation"}[kind]
        raise bad("--spec", spec, f"{what} as one JSON text", repr(error)) from error


def by_hand(router: str, network: str, seed: int, steps: int, options: list[str]) -> Run:
    """A run from the command line."""
    given: dict[str, Any] = {"router": router, "network": network, "seed": seed, **schedule(steps)}
    return Run(**given | fields_of(options))


def schedule(steps: int) -> dict[str, int]:
    """The schedule of a run from the command line: one evaluation, at the end, and a tenth of the steps as warm-up."""
    return {"steps": steps, "eval_every": steps, "warmup": steps // 10}


def fields_of(options: list[str]) -> dict[str, Any]:
    """The fields of a run that `--set` gives.

    Raises `UserError` for an unknown field and for a value that is no YAML.
    """
    given: dict[str, Any] = {}
    known = [one.name for one in dataclasses.fields(Run)]
    for text in options:
        name, found, value = text.partition("=")
        if not found:
            raise bad("--set", text, "FIELD=VALUE", "such as --set dim=128")
        try:
            given[pick("--set", name, known)] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise bad(f"--set {name}", value, "a YAML value", str(error)) from error
    if given.get("capacity_factor") == "none":
        given["capacity_factor"] = None
    return given
