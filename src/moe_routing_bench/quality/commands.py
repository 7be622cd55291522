"""The commands of the quality part: train, time and compare. Without torch until a command needs it."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from moe_routing_bench import config as bench_config
from moe_routing_bench import paths, platforms, records
from moe_routing_bench.errors import bad, pick
from moe_routing_bench.measure import gpus
from moe_routing_bench.options import ConfigJson, Configs, Platform
from moe_routing_bench.quality import adaptations, plan, runs
from moe_routing_bench.quality.adaptation import VARIANTS, Adaptation
from moe_routing_bench.quality.run import DENSE, Run


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(train)
    app.command("time-training")(time_training)
    app.command("collect-quality")(collect)
    app.command()(compare)
    app.command()(adapt)
    app.command("collect-perft")(collect_perft)
    app.command()(specialisation)


def train(
    router: Annotated[str, typer.Option(help=f"A rule of the zoo, or {DENSE}")] = "softk",
    network: Annotated[str, typer.Option(help="Network of the router")] = "linear",
    seed: Annotated[int, typer.Option()] = 17,
    steps: Annotated[int, typer.Option()] = 100,
    option: Annotated[list[str] | None, typer.Option("--set", help="FIELD=VALUE for another field of a run, such as dim=128 or corpora={kjv: 1000000}")] = None,
    spec: Annotated[str | None, typer.Option(help="The whole run as one JSON text, in place of the options above")] = None,
    pilots: Annotated[list[Path] | None, typer.Option("--pilot", help="Parquet of a run to choose the learning rate by")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads [default: torch's]", show_default=False)] = 0,
    out: Annotated[Path | None, typer.Option(help="[default: results/PLATFORM/runs/NAME.parquet]")] = None,
) -> None:  # fmt: skip
    """Train a tiny language model with a router; a run that was killed goes on from its checkpoint."""
    run = Run.from_spec(spec) if spec is not None else by_hand(router, network, seed, steps, option or [])
    out = out or paths.run_file(platforms.current(), run.name)
    records.check_writable(out)
    known = run.spec
    run, chosen = with_lr(run, pilots)
    with gpus.reserved(alone=False):
        _torch(threads)
        _module("train").train(run, out, _device(), chosen, known)
    print(f"wrote {out}")


def time_training(
    run_file: Annotated[Path, typer.Argument(help="Parquet of a run that kept its weights")],
    out: Annotated[Path | None, typer.Option(help="[default: results/PLATFORM/timing/NAME.parquet]")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads [default: torch's]", show_default=False)] = 0,
) -> None:
    """Time the training step of a run, whole and by stage, with the GPU to itself."""
    table = runs.read(run_file)
    run = dataclasses.replace(Run.from_spec(runs.spec_of(table)), lr=table["lr"][-1].as_py())
    if not run_file.with_suffix(".pt").is_file():
        raise bad("weights", f"no {run_file.with_suffix('.pt')}", "a run with keep_weights", "train it again")
    out = out or paths.timing_file(platforms.current(), run.name)
    records.check_writable(out)
    with gpus.reserved(alone=True):
        _torch(threads)
        row = _module("timing").measure(run, run_file, out, _device())
    stages = ", ".join(f"{name} {row[name]:.2f}" for name in runs.STAGES)
    print(f"{row['step_ms']:.2f} ms a step ({stages}), {row['train_tokens_per_s']:.0f} bytes/s\nwrote {out}")


def collect(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    out: Annotated[Path | None, typer.Option(help="[default: results/PLATFORM/quality.parquet]")] = None,
) -> None:
    """Join the rows of all training runs of a config into one file, with the times of those timed alone, and rank them."""
    planned, platform = planned_by(config, config_json, platform)
    if not planned.finals:
        raise bad("config.quality", "no runs", "at least one entry")
    out = out or paths.quality(platform)
    records.check_writable(out)
    table = runs.collect(planned.files(platform), planned.timing_files(platform))
    records.write_table(out, table)
    print(f"wrote {out}: {len(table)} evaluations of {len(planned.finals)} runs")
    print(_module("compare").text(table.to_pandas()))


def adapt(
    base: Annotated[Path, typer.Argument(help="Parquet of a run that kept its weights")],
    spec: Annotated[str | None, typer.Option(help="The whole adaptation as one JSON text, in place of the options below")] = None,
    variant: Annotated[str, typer.Option(help=f"Of PERFT: {', '.join(VARIANTS)}")] = Adaptation.variant,
    rank: Annotated[int, typer.Option(help="Of each adapter")] = Adaptation.rank,
    adapters: Annotated[int, typer.Option(help="Adapters a layer, of R and D")] = Adaptation.adapters,
    top_k: Annotated[int, typer.Option(help="Adapters a token, of R")] = Adaptation.top_k,
    steps: Annotated[int, typer.Option()] = 100,
    option: Annotated[list[str] | None, typer.Option("--set", help="FIELD=VALUE for another field of a run, such as corpora={stdlib: 1000000}")] = None,
    pilots: Annotated[list[Path] | None, typer.Option("--pilot", help="Parquet of an adaptation to choose the learning rate by")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads [default: torch's]", show_default=False)] = 0,
    out: Annotated[Path | None, typer.Option(help="[default: results/PLATFORM/perft/NAME.parquet]")] = None,
) -> None:  # fmt: skip
    """Adapt a trained run to another text with adapters beside its frozen experts (PERFT)."""
    if spec is None:
        frozen = Run.from_spec(runs.spec_of(runs.read(base)))
        own = {
            "label": "adapt",
            "steps": steps,
            "eval_every": steps,
            "warmup": steps // 10,
            "trace_tokens": 0,
            "keep_weights": False,
        }
        run = dataclasses.replace(frozen, **own | fields_of(option or []))
        adaptation = Adaptation(run, frozen.name, variant, rank, adapters, top_k)
    else:
        adaptation = Adaptation.from_spec(spec)
    out = out or paths.perft_file(platforms.current(), adaptation.name)
    records.check_writable(out)
    known = adaptation.spec
    run, chosen = with_lr(adaptation.run, pilots, adaptations.SCHEMA)
    adaptation = dataclasses.replace(adaptation, run=run)
    with gpus.reserved(alone=False):
        _torch(threads)
        _module("adapt").adapt(adaptation, base, out, _device(), chosen, known)
    print(f"wrote {out}")


def collect_perft(
    config: Configs = None,
    config_json: ConfigJson = None,
    platform: Platform = None,
    out: Annotated[Path | None, typer.Option(help="[default: results/PLATFORM/perft.parquet]")] = None,
) -> None:
    """Join the rows of all adaptations of a config into one file, and print losses and parameters by variant and rank."""
    planned, platform = planned_by(config, config_json, platform)
    if not planned.adaptations:
        raise bad("config.perft", "no adaptations", "at least one entry")
    out = out or paths.perft(platform)
    records.check_writable(out)
    table = runs.collect(planned.adaptation_files(platform), {}, adaptations.SCHEMA)
    records.write_table(out, table)
    print(f"wrote {out}: {len(table)} evaluations of {len(planned.adaptations)} adaptations")
    print(_module("perft_summary").text(table.to_pandas()))


def compare(
    platform: Platform = None,
    metric: Annotated[str, typer.Option(help="A numeric column")] = "bits_per_byte",
) -> None:
    """Rank the routers of quality.parquet by their mean over seeds, with intervals, paired tests and ties."""
    table = runs.read(paths.quality(platform or platforms.current()))
    pick("metric", metric, [name for name, kind in runs.COLUMNS.items() if kind in ("double", "int64")])
    print(_module("compare").text(table.to_pandas(), metric))


def specialisation(
    platform: Platform = None,
) -> None:
    """How far the experts of quality.parquet specialise by domain, in bits, beside the loss, with intervals over seeds."""
    table = runs.read(paths.quality(platform or platforms.current()))
    print(_module("specialisation").text(table.to_pandas()))


def planned_by(config: list[Path] | None, config_json: str | None, platform: str | None) -> tuple[plan.Plan, str]:
    """The runs and adaptations of a config, and the platform that they are of: without one, this machine's."""
    effective = bench_config.load(json.loads(config_json) if config_json else config or [paths.CONFIG])
    paths.hide_gpu(effective["device"])
    return plan.expand(effective.get("quality", []), effective.get("perft", [])), platform or platforms.current()


def with_lr(run: Run, pilots: list[Path] | None, schema: Any = runs.SCHEMA) -> tuple[Run, dict[str, Any]]:
    """The run with a learning rate, that of its best pilot where it has none, and the row fields which say so."""
    if run.lr is not None:
        return run, {}
    lr, chosen = runs.best_lr(pilots or [], schema)
    print(f"learning rate {lr:g} of {chosen['pilot_lrs']}: validation losses {chosen['pilot_losses']}", flush=True)
    return dataclasses.replace(run, lr=lr), chosen


def by_hand(router: str, network: str, seed: int, steps: int, options: list[str]) -> Run:
    """A run from the command line."""
    given: dict[str, Any] = {
        "router": router,
        "network": network,
        "seed": seed,
        "steps": steps,
        "eval_every": steps,
        "warmup": steps // 10,
    }
    return Run(**given | fields_of(options))


def fields_of(options: list[str]) -> dict[str, Any]:
    """The fields of a run that `--set` gives. Raises `UserError` for what is no field or no YAML."""
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


def _device() -> str:
    return "cpu" if platforms.current() == platforms.CPU else "cuda"


def _torch(threads: int) -> None:
    """Import torch, with so many threads."""
    torch = importlib.import_module("torch")
    if threads:
        torch.set_num_threads(threads)


def _module(name: str) -> Any:
    return importlib.import_module(f"moe_routing_bench.quality.{name}")
