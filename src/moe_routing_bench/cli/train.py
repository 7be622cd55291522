"""The commands that prepare text, train a run, time its steps and adapt it. Without torch until one of them needs it."""

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from moe_routing_bench.cli import options
from moe_routing_bench.config.load import parse_yaml, read_mapping
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.grid.run_spec import DENSE, PACKAGES, VARIANTS, Adaptation, Run
from moe_routing_bench.measure import gpus
from moe_routing_bench.quality import adaptation_rows, rates, run_rows
from moe_routing_bench.store import paths, platforms, project_files
from moe_routing_kernels.errors import UserError, bad, pick

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Another field of a run, such as dim=128 or corpora={kjv: 1000000}"
    ),
]
Spec = Annotated[str | None, typer.Option(help="All of it as one JSON text, in place of the other options")]
Pilots = Annotated[
    list[Path] | None,
    typer.Option("--pilot", metavar="<path>", help="Parquet file of a run to choose the learning rate by; repeat"),
]


def _verified(platform: str | None) -> str | None:
    """The platform that is required, once this machine is known to be it."""
    if platform:
        platforms.verify(platform)
    return platform


Required = Annotated[
    str | None, typer.Option("--platform", help="Refuse to run on another [default: any]", callback=_verified)
]
Threads = Annotated[int, typer.Option(metavar="<int>", help="CPU threads of torch", min=1)]


def train(
    router: Annotated[str, typer.Option(help=f"A rule of the zoo, or {DENSE}")] = "softk",
    network: Annotated[str, typer.Option(help="Network of the router")] = "linear",
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn")] = 17,
    steps: Annotated[int, typer.Option(help="Training steps")] = 100,
    option: Sets = None,
    spec: Spec = None,
    pilots: Pilots = None,
    threads: Threads = Settings.cpu_threads,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/runs/NAME.parquet]")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Parts with commas between: graph, operators, compiled; or eager [default: all on a GPU]"),
    ] = None,
    force: options.Force = False,
    platform: Required = None,
) -> None:
    """Train a tiny language model with a router; a killed run goes on from its checkpoint."""
    run = from_spec(Run, spec) if spec is not None else by_hand(router, network, seed, steps, option or [])
    out = options.chosen(out, paths.run_file(platforms.current(), run.name), force)
    known = run.spec
    run, chosen = with_lr(run, pilots)
    with gpus.reserved(alone=False):
        _torch(threads)
        parts = _module("engine").Engine.of(_device(), engine)
        _module("train").train(run, out, _device(), chosen, known, parts)
    print(f"wrote {out}")


def time_training(
    run_file: Annotated[Path, typer.Argument(help="Parquet of a run that kept its weights")],
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/timing/NAME.parquet]")
    ] = None,
    force: options.Force = False,
    threads: Threads = Settings.cpu_threads,
    platform: Required = None,
) -> None:
    """Time the training step of a run, whole and by stage, with the GPU to itself."""
    table = run_rows.read(run_file)
    run = dataclasses.replace(Run.from_spec(run_rows.spec_of(table)), lr=table["lr"][-1].as_py())
    run_rows.weights_of(run_file)  # before a GPU is waited for
    out = options.chosen(out, paths.timing_file(platforms.current(), run.name), force)
    with gpus.reserved(alone=True):
        _torch(threads)
        row = _module("timing").measure(run, run_file, out, _device())
    stages = ", ".join(f"{name} {row[name]:.2f}" for name in run_rows.STAGES)
    print(f"{row['step_ms']:.2f} ms per step ({stages}), {row['train_tokens_per_s']:.0f} bytes/s\nwrote {out}")


def adapt(
    base: Annotated[Path, typer.Argument(help="Parquet of a run that kept its weights")],
    spec: Spec = None,
    variant: Annotated[str, typer.Option(help=f"Variant of PERFT: {', '.join(VARIANTS)}")] = Adaptation.variant,
    rank: Annotated[int, typer.Option(help="Rank of each adapter")] = Adaptation.rank,
    adapters: Annotated[int, typer.Option(help="Adapters per layer, for R and D")] = Adaptation.adapters,
    top_k: Annotated[int, typer.Option(help="Adapters per token, for R")] = Adaptation.top_k,
    steps: Annotated[int, typer.Option(help="Training steps")] = 100,
    option: Sets = None,
    pilots: Pilots = None,
    threads: Threads = Settings.cpu_threads,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [default: results/PLATFORM/perft/NAME.parquet]")
    ] = None,
    force: options.Force = False,
    platform: Required = None,
) -> None:
    """Adapt a trained run to another text with adapters next to its frozen experts (PERFT)."""
    if spec is None:
        frozen = Run.from_spec(run_rows.spec_of(run_rows.read(base)))
        change = {"label": "adapt", "trace_tokens": 0, "keep_weights": False, **schedule(steps)}
        run = dataclasses.replace(frozen, **change | fields_of(option or []))
        adaptation = Adaptation(run, frozen.name, variant, rank, adapters, top_k)
    else:
        adaptation = from_spec(Adaptation, spec)
    out = options.chosen(out, paths.perft_file(platforms.current(), adaptation.name), force)
    known = adaptation.spec
    run, chosen = with_lr(adaptation.run, pilots, adaptation_rows.SCHEMA)
    adaptation = dataclasses.replace(adaptation, run=run)
    with gpus.reserved(alone=False):
        _torch(threads)
        _module("adapt").adapt(adaptation, base, out, _device(), chosen, known)
    print(f"wrote {out}")


def prepare_texts(
    packages: Annotated[
        Path | None, typer.Option("--list", metavar="<path>", help="List of packages [default: config/texts.yaml]")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(metavar="<int>", help="Tokens of byte pairs; 256 are the bytes", min=256, max=2**16)
    ] = 8192,
    share: Annotated[float, typer.Option(help="Share of each domain for validation")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed by which documents are drawn for validation")] = 17,
) -> None:
    """Fetch, clean and encode the text of packages, for the corpus `packages` of training runs.

    Archives and text are kept in the user's cache, or below $MOE_ROUTING_BENCH_CORPORA.
    """
    if not 0 < share < 1:
        raise bad("--share", share, "a number above 0 and below 1")
    path = packages or project_files.own_or_shipped(Path("config/texts.yaml"))
    texts = _module("texts")
    listed = _module("corpus_packages").listed(read_mapping(path))
    folder = texts.folder() / PACKAGES
    for line in _module("corpus_preparation").prepare(
        listed, texts.folder() / "archives", folder, share, seed, vocabulary
    ):
        print(line)
    print(f"wrote {folder}")


def _device() -> str:
    return "cpu" if platforms.current() == platforms.CPU else "cuda"


def _torch(threads: int) -> None:
    """Import torch and make it use this many threads, in a process of the workflow or any other."""
    importlib.import_module("torch").set_num_threads(threads)


def _module(name: str) -> Any:
    return importlib.import_module(f"moe_routing_bench.quality.{name}")


def with_lr(run: Run, pilots: list[Path] | None, schema: Any = run_rows.SCHEMA) -> tuple[Run, dict[str, Any]]:
    """The run with a learning rate, that of its best pilot where it has none, and the row fields that say so."""
    if run.lr is not None:
        return run, {}
    lr, chosen = rates.best(pilots or [], schema)
    chosen = {name: values for name, values in chosen.items() if name in schema.names}
    print(f"learning rate {lr:g} of {chosen['pilot_lrs']}: validation losses {chosen['pilot_losses']}", flush=True)
    return dataclasses.replace(run, lr=lr), chosen


def from_spec(kind: type[Run] | type[Adaptation], spec: str) -> Any:
    """What a text of `--spec` says. Raises `UserError`."""
    try:
        return kind.from_spec(spec)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
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
    known = [field.name for field in dataclasses.fields(Run)]
    for text in options:
        name, separator, value = text.partition("=")
        if not separator:
            raise bad("--set", text, "FIELD=VALUE", "such as --set dim=128")
        try:
            given[pick("--set", name, known)] = parse_yaml(value)
        except yaml.YAMLError as error:
            raise bad(f"--set {name}", value, "a YAML value", str(error)) from error
    if given.get("capacity_factor") == "none":
        given["capacity_factor"] = None
    return given
