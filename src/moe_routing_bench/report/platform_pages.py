"""The pages of a platform: a form that asks all of its published runs, quality, seed documents, and a page per model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from moe_routing_bench.answers import nearest, said, stored
from moe_routing_bench.answers.ask import MEASURED, ask
from moe_routing_bench.answers.stored import Cell
from moe_routing_bench.comparison import origins, timeline
from moe_routing_bench.comparison.timeline import Line
from moe_routing_bench.figures import FIGURES, footer, palette, paper
from moe_routing_bench.quantities import count
from moe_routing_bench.report import page, platform, platform_charts, platform_sections, render, words
from moe_routing_bench.report.platform_sections import Section
from moe_routing_bench.report.seeds.section import section


@dataclass(frozen=True)
class Tables:
    """The tables of a published run that its platform's pages show: rows, training runs, adaptations, and profiles of replayed seed documents."""

    rows: pd.DataFrame
    trained: pd.DataFrame | None = None
    adapted: pd.DataFrame | None = None
    profiles: Sequence[Mapping[str, Any]] = ()


def write(
    name: str,
    tables: Mapping[str, Tables],
    out: Path,
    models: Mapping[str, Any],
    former: bool = False,
    lines: Sequence[Line] = (),
    whole: bool = False,
    url: str = "",
) -> None:
    """Write the pages of a platform's published runs to the folder `out`.

    `tables` are those of its runs, `models` the presets by name, `lines` what was measured more than once in them and in their earlier versions, which are `whole` where all were there to read,
    `url` the address at which the folder will be served. `former`: the report of a run without a name was copied to this folder; it
    moves to `platform.FORMER`, and the page leads addresses of its rows there.
    """
    cells = platform.read(name)
    known = _models(cells, models)
    qualities, seeds = _qualities(tables), _seeds(tables)
    tabs = (
        {"Speed": "index.html"}
        | ({"Quality": "quality.html"} if qualities else {})
        | ({"Seeds": "seeds.html"} if seeds else {})
        | {"History": "history.html"}
    )
    first = next(iter(tables.values())).rows
    card = footer.distinct(first[origins.column(first)])
    shared = _shared(name, cells, card, len(tables)) | {"tabs": list(tabs.items())}
    if former:
        (out / "index.html").replace(out / platform.FORMER)
    parts, data = _speed(name, cells, models)
    data["rules"]["former"] = platform.FORMER if former else None
    runs = [_run(run, len(one.rows), cells) for run, one in tables.items()]
    page.write_platform(out / "index.html", "Speed", data, **shared, **_listed(known, parts), runs=runs)
    if qualities:
        drawn = {figure.name: figure.chart for _, _, figures in qualities for figure in figures}
        page.write_platform(out / "quality.html", "Quality", {"charts": drawn}, **shared, qualities=qualities)
    if seeds:
        page.write_platform(out / "seeds.html", "Seeds", {}, **shared, seeds=seeds)
    _write_history(lines, whole, out / "history.html", shared)
    for model, mine in known.items():
        there = f"{url.rstrip('/')}/{model}/" if url else ""
        _write_model(model, mine, out / model / "index.html", shared, answers(model, name), there)


def write_alone(name: str, out: Path, models: Mapping[str, Any]) -> None:
    """Write the page that asks all published runs of a platform to the file `out`, next to the report of a machine; it leads to no other page, as none is there."""
    cells = platform.read(name)
    parts, data = _speed(name, cells, models)
    for run in data["rules"]["runs"].values():
        run["address"] = None
    for chart in data["charts"].values():
        del chart["marks"]["row"]
    rows = Counter({cell.run: 0 for cell in cells})
    for cell in cells:
        rows[cell.run] += len(cell.rows)
    card = footer.distinct(pd.Series([row["gpu_name"] for cell in cells for row in cell.timed[:1]]))
    page.write_platform(
        out,
        "Speed",
        data,
        **_shared(name, cells, card, len(rows)) | {"tabs": [("Speed", out.name)], "root": ""},
        **_listed(_models(cells, models), parts),
        runs=[_run(run, number, cells) | {"address": ""} for run, number in rows.items()],
        alone=True,
    )


def _shared(name: str, cells: Sequence[Cell], card: str, runs: int) -> dict[str, Any]:
    """What all pages of a platform have."""
    return {
        "heading": f"Mixture-of-Experts kernels on {card}",
        "title": f"moe-routing-bench: {name}",
        "about": f"{count(sum(len(cell.timed) for cell in cells), 'time')} of {count(len([one for one in cells if one.timed]), 'cell')} from {count(runs, 'published run')} on {card}.",
        "root": "../",
        "method": words.ANY_METHOD,
    }


def _speed(name: str, cells: Sequence[Cell], models: Mapping[str, Any]) -> tuple[list[Section], dict[str, Any]]:
    """The sections of the first page, and what its scripts read."""
    parts = platform_sections.sections(cells)
    tints = [(tint, palette.dark(tint)) for tint in platform_charts.tints(ASKED).values()]
    series = [
        {"name": name, "light": light, "dark": dark, "symbol": symbol}
        for name, (light, dark), symbol in zip(ASKED, tints, palette.SYMBOLS, strict=False)
    ]
    data = platform.page_data(name, cells, models)
    data["rules"] |= {"former": None, "series": series}
    charts = {one.name: one.chart for one in parts if one.chart}
    return parts, data | {"charts": charts, "sections": {one.name: one.cells for one in parts}}


def _listed(known: Mapping[str, Sequence[Cell]], parts: Sequence[Section]) -> dict[str, Any]:
    """The models whose sizes were measured and the others, and the sections."""
    models, others = ([name for name, mine in known.items() if bool(mine) is there] for there in (True, False))
    return {"far": f"{nearest.FAR:g}", "models": models, "others": others, "sections": parts}


def _write_history(lines: Sequence[Line], whole: bool, out: Path, shared: Mapping[str, Any]) -> None:
    found, drawn = timeline.steps(lines), platform_sections.over_time(lines)
    about, cards = timeline.told(lines, found, whole)
    most = timeline.MOST_STEPS
    listed = f"The {most} latest of {len(found)}." if len(found) > most else f"All {len(found)}, the latest first."
    page.write_platform(
        out,
        "History",
        {"charts": {"history": drawn}} if drawn else {},
        **shared | {"about": about},
        chart=drawn and {"name": "history", "caption": "Speed relative to the first measurement, over days."},
        cards=cards,
        shown=listed,
        steps=[timeline.step(one) for one in found[:most]],
        columns=timeline.STEPS,
        numbers=timeline.NUMBERS,
    )


def _models(cells: Sequence[Cell], models: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """The cells of each preset's sizes."""
    sizes = {
        name: {axis: getattr(one, axis) for axis in platform_sections.SIZES}
        for name, one in models.items()
        if not one.unsupported
    }
    return {name: platform_sections.of_model(cells, sizes[name]) if name in sizes else [] for name in sorted(models)}


ASKED = (platform_charts.OURS, platform_charts.OTHER)  # series of the figure of an answer
TOKENS = (1, 64, 4096)  # that a model's page is asked about


def answers(model: str, name: str) -> list[tuple[int, list[str]]]:
    """What `ask` says of a model on a platform, by tokens of the batch: the fastest and its cell, and ours against others, or what is missing."""
    found = []
    for tokens in TOKENS:
        answer = ask(model, tokens=tokens, platform=name)
        shown = len(answer["instead_of"]) + 2 + bool(answer["ours"]) if answer["kind"] == MEASURED else 1
        found.append((tokens, [text.strip() for text in said.lines(answer)[:shown]]))
    return found


def _write_model(
    model: str,
    cells: Sequence[Cell],
    out: Path,
    shared: Mapping[str, Any],
    found: Sequence[tuple[int, list[str]]],
    url: str,
) -> None:
    """`url` is the address of the page's folder: a preview image has to have a whole one, so that without it the page names none."""
    parts = platform_sections.model_sections(cells)
    here = shared | {
        "heading": f"{model}: {shared['heading']}",
        "title": f"{model} on {shared['title'].partition(': ')[2]}, moe-routing-bench",
        "about": f"Layers, experts, training steps and whole models of the sizes of {model}: {platform_sections.tally(cells)}"
        if cells
        else f"No layer, experts, training step or model of the sizes of {model} was measured here: the nearest cell answers, if it is near enough.",
        "tabs": [(name, f"../{address}") for name, address in shared["tabs"]] + [(model, "index.html")],
        "root": "../../",
    }
    charts = {one.name: one.chart for one in parts if one.chart}
    lines = list(map(platform_sections.line, cells))
    data = {"charts": charts} if charts else {}
    columns = platform_sections.COLUMNS
    image = ""
    if shown := platform_sections.preview(cells):
        out.parent.mkdir(parents=True, exist_ok=True)
        paper.preview(shown, here["heading"], out.with_name("preview.png"))
        image = f"{url}preview.png" if url else ""
    page.write_platform(
        out, model, data, **here, image=image, answers=found, sections=parts, columns=columns, lines=lines
    )


def _run(run: str, rows: int, cells: Sequence[Cell]) -> dict[str, str]:
    mine = [cell for cell in cells if cell.run == run]
    return {
        "name": run,
        "by": stored.submitter(run) or "",
        "address": platform.address(run),
        "day": max(cell.day for cell in mine) if mine else "–",
        "benches": ", ".join(dict.fromkeys(cell.bench for cell in mine)),
        "rows": str(rows),
    }


def _qualities(tables: Mapping[str, Tables]) -> list[tuple[tuple[str, str], dict[str, Any], list[Any]]]:
    """The name and address of each run with training runs, what the section on quality shows, and the figures, under names of their own."""
    found = []
    for run, one in tables.items():
        if one.trained is not None:
            sources = {"quality": one.trained, "perft": one.adapted}
            drawn = [
                render.figure(name, sources[entry.source]) for name, entry in FIGURES.items() if entry.source in sources
            ]
            named = [
                replace(figure, name=f"{figure.name}-{len(found)}" if found else figure.name)
                for figure in drawn
                if figure.chart
            ]
            found.append(
                ((run, platform.address(run)), {"quality": render.quality_of(one.trained, one.adapted)}, named)
            )
    return found


def _seeds(tables: Mapping[str, Tables]) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """The name and address of each run that replays a seed document, and the tables of both."""
    found = [(run, section(one.rows, run.partition(".")[2], one.profiles)) for run, one in tables.items()]
    return [((run, platform.address(run)), {"seed": seed}) for run, seed in found if seed]
