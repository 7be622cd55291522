"""What one MoE layer would cost on many GPUs, by a model of communication and by stored rows: a table, JSON, Parquet rows and a figure."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.cli import options
from moe_routing_bench.cli.printing import show
from moe_routing_bench.config import presets
from moe_routing_bench.measure.provenance import git_state
from moe_routing_bench.quantities import us
from moe_routing_bench.store import paths
from moe_routing_bench.store.project_files import own_or_shipped
from moe_routing_kernels.errors import bad, pick, writing
from moe_routing_kernels.formats.weights import WEIGHTS

_MOST_GPUS, _MOST_TOKENS, _MOST_TRIALS = 100_000, 2**20, 1000


def scale(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Model preset, such as deepseek-v3")] = None,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs in all")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of each GPU")] = 128,
    ep: Annotated[
        int | None, typer.Option("--ep", help="Ranks that experts are spread over [default: all that can be]")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks, in place of --ep")] = None,
    weights: Annotated[str, typer.Option("--weights", help="Format of the experts")] = "bf16",
    payload: Annotated[str, typer.Option("--payload", help="Rows of dispatch: fp8 | bf16")] = "fp8",
    mode: Annotated[
        str, typer.Option("--mode", help="Kernels of dispatch and combine: low-latency | normal | auto, the faster")
    ] = "auto",
    per_assignment: Annotated[
        bool, typer.Option("--per-assignment", help="Normal mode sends a row per assignment, not per token and rank")
    ] = False,
    overlap: Annotated[
        float, typer.Option("--overlap", help="Declared share of communication that experts hide")
    ] = 0.0,
    skew: Annotated[float, typer.Option("--skew", help="CV of the expected loads of experts; 0: uniform choice")] = 0.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Recorded routing in place of a skew, as `trace` writes it")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="Draws of routing")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first draw")] = 17,
    spare: Annotated[int, typer.Option("--spare", help="Slots of a rank for replicas, with planned placement")] = 1,
    platform: Annotated[str, typer.Option("--platform", help="Card whose stored layers are used")] = "nvidia-h200",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the rows there, as Parquet")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw layer time over EP there, as SVG")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Print the errors on published tables, and stop")] = False,
    force: options.Force = False,
) -> None:
    """Estimate the time of one MoE layer on N GPUs with expert parallelism, from a model that published tables validate. Nothing is measured."""
    if errors:
        _print_errors(as_json)
        return
    for name, path in (("--out", out), ("--figure", figure)):
        if path:
            options.check_file(name, path, force)
    part = {
        name: importlib.import_module(f"moe_routing_bench.scale.{name}")
        for name in ("layer", "experts", "exchange", "validation")
    }
    layer, experts = part["layer"], part["experts"]
    for name, value, most in (
        ("--gpus", gpus, _MOST_GPUS),
        ("--tokens", tokens, _MOST_TOKENS),
        ("--trials", trials, _MOST_TRIALS),
    ):
        if not 1 <= value <= most:
            raise bad(name, value, f"1 to {most}")
    if not 0 <= overlap <= 1:
        raise bad("--overlap", overlap, "0 to 1")
    if ep and tp:
        raise bad("--tp", tp, "--ep or --tp, not both")
    preset = _preset(model)
    if weights != "bf16":
        pick("--weights", weights, WEIGHTS)
    axes = presets.values(preset)
    sizes = experts.Sizes(axes["hidden"], axes["intermediate"], axes["experts"], axes["top_k"], weights)
    question = layer.Question(
        model,
        sizes,
        preset.layers,
        gpus,
        tokens,
        payload=pick("--payload", payload, part["exchange"].PAYLOADS),
        mode=pick("--mode", mode, (*part["exchange"].MODES, layer.AUTO)),
        once=not per_assignment,
        overlap=overlap,
        skew=skew,
        trace=trace,
        spare=spare,
        trials=trials,
        seed=seed,
    )
    made = layer.Model(question, experts.stored(platform))
    if ep or tp:
        found, reasons = [made.estimate(ep or 1, tp or 1)], {}
    else:
        found, reasons = layer.all_ways(made)
    bands = part["validation"].bands()
    rows = [_row(question, one, bands, platform) for one in found]
    best = layer.best(found)
    if as_json:
        json.dump(
            {
                "best": _row(question, best, bands, platform),
                "rows": rows,
                "without": {f"EP{a} TP{b}": why for (a, b), why in reasons.items()},
            },
            sys.stdout,
            indent=1,
        )
        print()
    else:
        _print(question, found, rows, best, reasons)
    if out:
        _write(rows, out)
    if figure:
        with writing(figure):
            importlib.import_module("moe_routing_bench.figures.paper").scaling(rows, figure)


def _print_errors(as_json: bool) -> None:
    """The errors by table, mode, ranks, hidden size, way and tokens: at most 128, or more."""
    validation = importlib.import_module("moe_routing_bench.scale.validation")
    table = validation.lines()
    by = ["table", "mode", "ranks", "hidden", "way", "tokens"]
    rows = validation.errors(table.assign(tokens=table["tokens"].gt(128).map({True: "> 128", False: "<= 128"})), by)
    if as_json:
        json.dump(rows.to_dict("records"), sys.stdout, indent=1)
        print()
        return
    shown = Table(*by, "lines", "median", "90th percentile", "median with its sign", box=None)
    for row in rows.to_dict("records"):
        sizes = (f"{row[name]:.1%}" for name in ("median", "p90"))
        shown.add_row(*(str(row[name]) for name in (*by, "lines")), *sizes, f"{row['bias']:+.1%}")
    show(shown)


def _preset(model: str | None) -> Any:
    known = presets.load(own_or_shipped(paths.MODELS))
    preset = known[pick("model", model, known)]
    if preset.unsupported:
        raise bad("model", model, "a preset with all sizes", preset.unsupported)
    return preset


def _row(question: Any, one: Any, bands: Any, platform: str) -> dict[str, Any]:
    """An estimate with its question, the errors that validation found for its parts, and where it comes from."""
    asked = {
        "model": question.model, "weights": question.sizes.weights, "gpus": question.gpus, "tokens": question.tokens,
        "payload": question.payload, "overlap": question.overlap, "skew": question.skew,
        "trace": str(question.trace or ""), "trials": question.trials, "seed": question.seed, "platform": platform,
    }  # fmt: skip
    parts = []
    if one.mode != "none":
        band = bands.get((one.mode, one.ep > 8))
        parts.append((one.dispatch_us + one.combine_us, band))
    parts.append((one.experts_us, (0.0, 0.0) if one.measured else bands["experts", False]))
    known = all(band is not None for _, band in parts)
    error = {
        name: sum(time * band[i] for time, band in parts) / sum(time for time, _ in parts) if known else None
        for i, name in enumerate(("error_median", "error_p90"))
    }
    return asked | one.asdict() | error


def _print(question: Any, found: Sequence[Any], rows: Sequence[Any], best: Any, reasons: Any) -> None:
    columns = ("EP", "TP", "DP", "kernels", "experts", "dispatch", "combine", "layer, even loads", "drawn (5 to 95 %)")
    columns += ("planned", "busiest", "communication", "error, median (p90)", "memory", "experts from")
    table = Table(
        *columns,
        title=f"{question.model}, {question.sizes.weights}, {question.gpus} GPUs, {question.tokens} tokens of each, skew {question.skew:g}",
        title_justify="left",
        box=None,
    )
    for one, row in zip(found, rows, strict=True):
        error = (
            "not validated" if row["error_median"] is None else f"{row['error_median']:.0%} ({row['error_p90']:.0%})"
        )
        table.add_row(
            f"{one.ep}{' *' if one is best else ''}",
            str(one.tp),
            str(one.dp),
            one.mode,
            *(us(value) for value in (one.experts_us, one.dispatch_us, one.combine_us, one.layer_us)),
            f"{us(one.drawn_us)} ({us(one.low_us)} to {us(one.high_us)})",
            "–" if one.planned_us is None else us(one.planned_us),
            f"{one.busiest:.2f}x",
            f"{one.communication:.0%}",
            error,
            "–" if one.memory_share is None else f"{one.memory_share:.0%}{'' if one.fits else ', too much'}",
            one.source,
        )
    show(table)
    print(
        f"* best: EP {best.ep} x TP {best.tp} x DP {best.dp}, {us(best.drawn_us)}; a model's estimate, not a measurement"
    )
    for (ep, tp), why in reasons.items():
        print(f"without EP {ep}, TP {tp}: {why}")


def _write(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """The rows, with what they were made from: the commit and the hash of each file that has a parameter or a validating table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from moe_routing_bench.grid.cell import file_sha256
    from moe_routing_bench.packages import PACKAGE
    from moe_routing_bench.scale.exchange import PARAMETERS
    from moe_routing_bench.scale.validation import EXPERTS, TABLES
    from moe_routing_bench.store.project_files import shipped

    files = [EXPERTS, *sorted(TABLES / path.name for path in shipped(TABLES).iterdir())]
    about = git_state(lambda: sorted((PACKAGE / "scale").glob("*.py"))) | {
        str(name): file_sha256(shipped(name)) for name in files
    }
    about[PARAMETERS.name] = file_sha256(PARAMETERS)
    table = pa.Table.from_pylist(list(rows)).replace_schema_metadata({"moe_routing_bench.scale": json.dumps(about)})
    with writing(out):
        pq.write_table(table, out)
    print(f"wrote {out}: {len(rows)} rows", file=sys.stderr)
