"""Answers from published rows in the terminal."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.answers.ask import MEASURED, ask
from moe_routing_bench.answers.question import PLATFORM
from moe_routing_bench.answers.said import lines


def ask_(
    model: Annotated[str | None, typer.Argument(help="Model preset [default: the sizes that options give]")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the batch")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Format of the experts' weights, or int8, int4, int2, fp8")
    ] = None,
    bench: Annotated[
        str | None, typer.Option(help="Operation [default: layer, or experts where no layer is near]")
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="Kind of the batch: prefill | decode | training [default: any]")
    ] = None,
    skew: Annotated[float | None, typer.Option(help="Coefficient of variation of the expected expert loads")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts chosen per token")] = None,
    experts: Annotated[int | None, typer.Option(help="Number of experts")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of a token row")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Inner width of an expert")] = None,
    router: Annotated[str | None, typer.Option(help="Routing rule")] = None,
    capacity_factor: Annotated[float | None, typer.Option(help="Most rows of an expert over the mean")] = None,
    dtype: Annotated[str | None, typer.Option(help="Format of the activations [default: bf16]")] = None,
    packed: Annotated[str | None, typer.Option(help="Format of the rows after pack")] = None,
    ranks: Annotated[int | None, typer.Option(help="Expert-parallel processes that make a call together")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks")] = None,
    implementations: Annotated[
        str | None, typer.Option(help="Comma-separated parts of names that the cell must have times of")
    ] = None,
    platform: Annotated[str, typer.Option(help="Device whose published rows answer")] = PLATFORM,
    models: Annotated[
        Path | None, typer.Option(help="File of model presets, in addition to those of the project")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON")] = False,
) -> None:
    """Answer a question about a model from the nearest published measurement, or say what is missing.

    Exit status 1: no measured cell is within two octaves of the question.
    """
    values: dict[str, Any] = {
        "tokens": tokens,
        "weights": weights,
        "phase": phase,
        "skew": skew,
        "top_k": top_k,
        "experts": experts,
        "hidden": hidden,
        "intermediate": intermediate,
        "router": router,
        "capacity_factor": capacity_factor,
        "dtype": dtype,
        "packed": packed,
        "ranks": ranks,
        "tp": tp,
        "ep": ep,
    }
    names = [name.strip() for name in implementations.split(",")] if implementations else []
    answer = ask(model, bench=bench, platform=platform, implementations=names, models=models, **values)
    print(json.dumps(answer, indent=1) if as_json else "\n".join(lines(answer)))
    if answer["kind"] != MEASURED:
        raise typer.Exit(1)
