"""The command line. Each command prints what it did; a user's mistake is one line on stderr and exit status 2."""

import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moe_routing_bench import config as bench_config
from moe_routing_bench import grid, paths, platforms, records
from moe_routing_bench.benches import BENCHES
from moe_routing_bench.errors import UserError, bad, pick, writing
from moe_routing_bench.grid import Cell, Job
from moe_routing_bench.options import ConfigJson, Configs, Platform
from moe_routing_bench.quality import adaptations
from moe_routing_bench.quality import commands as quality_commands
from moe_routing_bench.quality import runs as quality_runs
from moe_routing_bench.routers import ROUTERS
from moe_routing_bench.settings import Settings

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Benchmark Mixture-of-Experts routing: gate, permute, pack, experts, combine.",
)  # fmt: skip

quality_commands.add_to(app)


def main() -> None:
    """Entry point: run a command; report a `UserError` on stderr without a traceback."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `moe-routing-bench list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@app.command("list")
def list_(platform: Platform = None) -> None:
    """List benches with their implementations, routers and model presets, and say what is not available and why."""
    platform = platform or platforms.current()
    _print(_implementations(platform), _routers(), _presets(_models()))


@app.command()
def measure(
    bench: Annotated[str, typer.Argument(help=" | ".join(BENCHES))],
    implementations: Annotated[
        str | None, typer.Option(help="Comma-separated names [default: all of the bench]")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A preset, for hidden, intermediate, experts, top-k and router")
    ] = None,
    tokens: Annotated[int, typer.Option()] = 1024,
    hidden: Annotated[int | None, typer.Option(help="[default: 1024]", show_default=False)] = None,
    intermediate: Annotated[int | None, typer.Option(help="[default: 1024]", show_default=False)] = None,
    experts: Annotated[int | None, typer.Option(help="[default: 8]", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="[default: 2]", show_default=False)] = None,
    capacity_factor: Annotated[str, typer.Option(help="A number, or none for no limit")] = "none",
    skew: Annotated[float, typer.Option(help="Coefficient of variation of the expert loads")] = 0.0,
    sampler: Annotated[str | None, typer.Option(help="exact | plackett_luce | trace", show_default=False)] = None,
    trace: Annotated[str | None, typer.Option(help="Parquet file of recorded routing")] = None,
    router: Annotated[str | None, typer.Option(help=" | ".join(ROUTERS), show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help=" | ".join(grid.DTYPES))] = "bf16",
    layout: Annotated[str, typer.Option(help=" | ".join(grid.LAYOUTS))] = "compact",
    seed: Annotated[int, typer.Option()] = 17,
    max_seconds: Annotated[float, typer.Option(help="Sampling time")] = Settings.max_seconds,
    min_blocks: Annotated[int, typer.Option(help="Least blocks of samples")] = Settings.min_blocks,
    mode: Annotated[str, typer.Option(help="warm (a server that has imported torch) | cold")] = "cold",
    out: Annotated[Path | None, typer.Option(help="Also write the rows to this Parquet file")] = None,
) -> None:
    """Measure one cell by hand and print its rows."""
    pick("bench", bench, BENCHES)
    pick("mode", mode, ("warm", "cold"))
    shape = _shape(model, {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k})
    entry: dict[str, Any] = {
        "benches": [bench], "tokens": [tokens], "capacity_factor": [_factor(capacity_factor)], "skew": [skew],
        "sampler": [sampler or ("trace" if trace else "exact")], "dtype": [dtype], "layout": [layout], **shape,
    }  # fmt: skip
    entry |= {"trace": trace} if trace else {}
    entry |= {"router": [router]} if router else {}
    if implementations is not None:
        entry["implementations"] = [
            pick(f"implementation of {bench}", n.strip(), [i.name for i in BENCHES[bench].implementations])
            for n in implementations.split(",")
        ]
    settings = {
        "max_seconds": max_seconds,
        "min_blocks": min_blocks,
        "max_blocks": max(min_blocks, Settings.max_blocks),
    }
    if out:
        records.check_writable(out)
    effective = bench_config.load({"seed": seed, "measure": settings, "grid": [entry]})
    (job,) = grid.expand(effective, _models() if model else {})
    rows = _supervisor().measure(job, out, mode)
    _print(_results(job.cell, rows))
    if out:
        print(f"wrote {out}")


@app.command()
def collect(
    config: Configs = None, config_json: ConfigJson = None, platform: Platform = None,
    out: Annotated[Path | None, typer.Option(help="[default: results/PLATFORM/measurements.parquet]")] = None,
) -> None:  # fmt: skip
    """Join the rows of all cells of a config into one file, after checking that each was measured for this config."""
    jobs = _jobs(config, config_json)
    platform = _platform(platform)
    out = out or paths.measurements(platform)
    records.check_writable(out)
    table = records.collect(paths.cell_files(platform, jobs))
    records.write_table(out, table)
    print(f"wrote {out}: {len(table)} rows of {len(jobs)} cells, {_counts(table['status'].to_pylist())}")


@app.command()
def figure(
    platform: Platform = None, name: Annotated[str | None, typer.Option(help="One figure [default: all]")] = None
) -> None:
    """Draw figures from the rows of a platform as SVG and PNG: measurements, and training runs where there are any."""
    platform = _platform(platform)
    figures = figure_table()
    names = [pick("figure", name, figures)] if name else list(_reported(platform))
    tables = {source: _rows(source, platform) for source in dict.fromkeys(figures[one].source for one in names)}
    for one in names:
        _draw(figures[one], tables[figures[one].source], platform)
        print(f"wrote {paths.figure(platform, one)} and .png")


@app.command()
def report(platform: Platform = None) -> None:
    """Write the HTML report from the rows of a platform (measurements, and training runs where there are any) and figures."""
    platform = _platform(platform)
    tables = {name: _rows(name, platform) for name in paths.reported(platform)}
    drawn = {name: paths.figure(platform, name) for name in _reported(platform)}
    absent = [str(path) for path in drawn.values() if not path.is_file()]
    if absent:
        raise bad(
            "figures", f"{len(absent)} missing", "all drawn", f"run `moe-routing-bench figure --platform {platform}`"
        )
    out = paths.report(platform)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        importlib.import_module("moe_routing_bench.report.render").render(
            tables["measurements"], drawn, out, tables.get("quality"), tables.get("perft")
        )
    print(f"wrote {out}")


@app.command()
def status(config: Configs = None, config_json: ConfigJson = None, platform: Platform = None) -> None:
    """Say how many cells of a config are measured, what failed, and about how long the rest takes."""
    jobs = _jobs(config, config_json)
    platform = _platform(platform)
    files = paths.cell_files(platform, jobs)
    rows, remaining, seconds = [], [], []
    for path, job in files.items():
        found = _rows_for(path, job)
        if found is None:
            remaining.append(path)
            continue
        rows += found
        seconds += [max(row["measure_seconds"] or 0.0 for row in found)]  # of the whole cell, in each of its rows
    print(f"{platform}: {len(files) - len(remaining)} of {len(files)} cells measured, {len(remaining)} remain")
    if remaining and any(seconds):
        mean = sum(seconds) / len(seconds)
        print(f"about {_duration(mean * len(remaining))} at {mean:.1f} s a cell")
    print(f"rows: {_counts([row['status'] for row in rows])}")
    for row in rows:
        if row["status"] not in ("ok", "unsupported"):
            print(f"  {row['bench']} {row['cell']} {row['implementation']}: {row['status']}: {row['reason'] or ''}")
    orphans = records.orphans(paths.results(platform), files)
    if orphans:
        print(f"{len(orphans)} files of cells that this config does not ask for: `moe-routing-bench prune` lists them")


@app.command()
def prune(
    config: Configs = None, config_json: ConfigJson = None, platform: Platform = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove them; without it they are only listed")] = False,
) -> None:  # fmt: skip
    """List, or remove, the files of cells that a config does not ask for."""
    jobs = _jobs(config, config_json)
    platform = _platform(platform)
    orphans = records.orphans(paths.results(platform), paths.cell_files(platform, jobs))
    for path in orphans:
        print(path)
        if remove:
            path.unlink()
    print(
        f"{'removed' if remove else 'found'} {len(orphans)} files"
        + ("" if remove or not orphans else "; --remove removes them")
    )


@app.command("compile")
def compile_(
    arch: Annotated[str, typer.Option(help="Such as sm_80, sm_90a, sm_100a [default: this machine's GPU]")] = "",
    config: Configs = None, config_json: ConfigJson = None,
) -> None:  # fmt: skip
    """Compile the CuTe DSL kernels of a config's cells into the kernel cache; needs no GPU when --arch is given."""
    jobs = _jobs(config, config_json)
    if arch and not re.fullmatch(r"sm_\d{2,3}a?", arch):
        raise bad("arch", arch, "sm_ and digits, such as sm_90a", "see the compute capability of the GPU")
    if not arch and platforms.current() == platforms.CPU:
        raise bad("arch", "none", "an architecture", "there is no GPU here to take it from: pass --arch sm_90a")
    if reason := platforms.missing(("cutlass",), platforms.current()):
        raise bad("compile", reason, "nvidia-cutlass-dsl installed")
    cute_support, cute_cache, precompile = (
        importlib.import_module(f"moe_routing_bench.{name}")
        for name in ("cute_support", "cute_cache", "benches.precompile")
    )
    arch, known = arch or cute_support.current_arch(), len(cute_cache.objects())
    for job in track(jobs, f"compiling for {arch}", console=Console(stderr=True)):
        precompile.precompile(job, arch)
    print(
        f"{len(cute_cache.objects())} kernels in {cute_cache.folder()}, {len(cute_cache.objects()) - known} of them new"
    )


@app.command()
def doctor() -> None:
    """Check what this machine has: versions, GPU, packages and the default config. Exit status 1 if a check fails."""
    checks = _checks()
    table = Table("check", "", "found", box=None)
    for what, fine, found in checks:
        table.add_row(what, {True: "ok", False: "FAIL", None: "-"}[fine], found)
    _print(table)
    raise typer.Exit(int(any(fine is False for _, fine, _ in checks)))


def figure_table() -> dict[str, Any]:
    """The figures by name, in the order of the report."""
    table = importlib.import_module("moe_routing_bench.figures").FIGURES
    return dict(table) if isinstance(table, Mapping) else {one.name: one for one in table}


def _reported(platform: str) -> dict[str, Any]:
    """The figures of a platform's report: those of training runs only where it has any."""
    there = paths.reported(platform)
    return {name: one for name, one in figure_table().items() if one.source in there}


def _rows(source: str, platform: str) -> Any:
    """The table that figures with this source are drawn from, as a DataFrame."""
    path = paths.TABLES[source](platform)
    if source == "measurements":
        return records.read(path).to_pandas()
    schema = adaptations.SCHEMA if source == "perft" else quality_runs.SCHEMA
    return quality_runs.read(path, schema).to_pandas()


def _platform(name: str | None) -> str:
    """A platform slug that is safe as a folder name."""
    name = name or platforms.current()
    if platforms.slug(name) != name:
        raise bad("platform", name, "lower-case letters, digits and dashes", f"did you mean {platforms.slug(name)!r}?")
    return name


def _models() -> dict[str, dict[str, Any]]:
    return bench_config.load_models(paths.MODELS)


def _jobs(configs: list[Path] | None, config_json: str | None) -> list[Job]:
    """The jobs of the effective config; `device: cpu` in it hides the GPU from this process too."""
    if config_json is not None and configs:
        raise bad("--config-json", "together with --config", "one of them")
    if config_json is not None:
        try:
            source = json.loads(config_json)
        except json.JSONDecodeError as error:
            raise bad("--config-json", config_json[:60], "one JSON text", str(error)) from error
        if not isinstance(source, dict):
            raise bad("--config-json", config_json[:60], "a JSON object")
    else:
        source = configs or [paths.CONFIG]
    effective = bench_config.load(source)
    paths.hide_gpu(effective["device"])
    return grid.expand(effective, _models())


def _supervisor() -> Any:
    return importlib.import_module("moe_routing_bench.measure.supervisor")


def _shape(model: str | None, sizes: Mapping[str, int | None]) -> dict[str, Any]:
    """Grid axes from a preset or from sizes: not from both, which would leave open what was meant."""
    if model is None:
        defaults = {"hidden": 1024, "intermediate": 1024, "experts": 8, "top_k": 2}
        return {name: [defaults[name] if value is None else value] for name, value in sizes.items()}
    given = [name for name, value in sizes.items() if value is not None]
    if given:
        raise bad(f"--{given[0].replace('_', '-')}", sizes[given[0]], f"nothing beside --model {model}, which sets it")
    return {"model": [model]}


def _factor(text: str) -> float | str:
    try:
        return text if text == "none" else float(text)
    except ValueError:
        raise bad("--capacity-factor", text, "a number above 0, or none") from None


def _rows_for(path: Path, job: Job) -> list[dict[str, Any]] | None:
    """The rows of a cell's file, or None when it is missing, unreadable or measured for something else."""
    try:
        table = records.read(path)
    except UserError:
        return None
    if records.spec_of(table) != job.spec:
        return None
    return table.select(["bench", "cell", "implementation", "status", "reason", "measure_seconds"]).to_pylist()


def _draw(one: Any, table: Any, platform: str) -> None:
    module = importlib.import_module(f"moe_routing_bench.figures.{one.module.lstrip('.')}")
    svg = paths.figure(platform, one.name)
    drawn = module.draw(table)
    with writing(svg):
        svg.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(svg, metadata={"Date": None})  # equal numbers, equal file
        drawn.savefig(paths.figure(platform, one.name, "png"), dpi=150)


def _implementations(platform: str) -> Table:
    table = Table("bench", "implementation", f"on {platform}", title="Benches", title_justify="left", box=None)
    for bench in BENCHES.values():
        table.add_row(bench.name, "", bench.summary)
        for one in bench.implementations:
            baseline = " (baseline)" if one.name == bench.baseline else ""
            table.add_row("", one.name + baseline, platforms.missing(one.requires, platform) or "available")
    return table


def _routers() -> Table:
    table = Table("router", "", title="\nRouters", title_justify="left", box=None)
    for router in ROUTERS.values():
        table.add_row(router.name, router.summary)
    return table


def _presets(models: Mapping[str, Mapping[str, Any]]) -> Table:
    axes = ("hidden", "intermediate", "experts", "top_k")
    table = Table("model", *axes, "router", title="\nModel presets", title_justify="left", box=None)
    for name, preset in models.items():
        last = f"unsupported: {preset['unsupported']}" if "unsupported" in preset else str(preset["router"])
        table.add_row(name, *(str(preset[axis]) for axis in axes), last)
    return table


def _results(cell: Cell, rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "implementation", "status", "median us", "95 % CI us", "GB/s", "speed-up", "reason",
        title=f"{cell.bench} {cell.key}", title_justify="left", box=None,
    )  # fmt: skip
    for row in rows:
        interval = "" if row.get("ci_low_us") is None else f"{row['ci_low_us']:.2f} to {row['ci_high_us']:.2f}"
        numbers = [_number(row.get(name)) for name in ("median_us", "gb_per_s", "speedup")]
        table.add_row(row["implementation"], row["status"], numbers[0], interval, *numbers[1:], row.get("reason") or "")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _counts(names: list[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common()) or "none"


def _duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.0f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )


def _print(*tables: Table) -> None:
    """Print tables, unwrapped where the output is no terminal so that a line stays a line."""
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False)
    for table in tables:
        console.print(table)


def _checks() -> list[tuple[str, bool | None, str]]:
    """(what, fine, found) of every check; fine is None for something optional that is not there."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    gpu = platforms.gpu_name()
    checks: list[tuple[str, bool | None, str]] = [
        ("python", (3, 11) <= sys.version_info[:2] < (3, 14), python),
        _check_torch(gpu),
        ("gpu", True if gpu else None, gpu or "none: measuring on the CPU"),
        ("platform", True, platforms.current()),
    ]
    for need in ("triton", "cutlass", "quack", "compiler"):
        reason = platforms.missing((need,), platforms.current())
        checks.append((need, None if reason else True, reason or "available"))
    return [
        *checks,
        _check_config(),
        ("writable", os.access(Path.cwd(), os.W_OK), "results and reports go below the working directory"),
    ]


def _check_torch(gpu: str | None) -> tuple[str, bool, str]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return "torch", False, f"{error}; run `make install`"
    cuda = torch.version.cuda
    if gpu and not cuda:
        return "torch", False, f"{torch.__version__} is a CPU build, but there is a {gpu}"
    return "torch", True, f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU build'}"


def _check_config() -> tuple[str, bool, str]:
    try:
        jobs = grid.expand(bench_config.load(paths.CONFIG), _models())
    except UserError as error:
        return "config", False, str(error)
    return "config", True, f"{paths.CONFIG}: {len(jobs)} cells"


if __name__ == "__main__":
    main()
