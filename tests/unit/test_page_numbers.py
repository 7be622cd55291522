"""Each number in reports and platform pages is that of the rows, computed anew from Parquet; a false one is found, and so is one that nothing computes."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import page_quality
import report_parts
from moe_routing_bench.cli import compare as compare_command
from moe_routing_bench.cli import report as command
from moe_routing_bench.comparison import timeline
from moe_routing_bench.config import claims
from moe_routing_bench.quality import compare
from moe_routing_bench.report import render, trained_rules
from moe_routing_bench.report.document import Report
from moe_routing_bench.store import paths
from page_numbers import ROOT, N, stored

pytestmark = pytest.mark.slow

rows_of = command.rows_of
RUNS = sorted(
    path.parent.name
    for path in ROOT.glob("results/*/manifest.yaml")
    if path.with_name("measurements.parquet").is_file()
)
NUMBER = re.compile(rf"(?<![\w.=-]){N}(?![\w-]*[a-z_]{{2}})")


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(render, "page_data", lambda *_: {})  # the rows themselves, which take most of the time


@cache
def report(run: str) -> tuple[Report, report_parts.Run]:
    """The report of a published run without its rows and figures, and what it is held against."""
    tables = {name: rows_of(name, run) for name in paths.reported(run)}
    rows, trained, adapted = (tables.get(name) for name in ("measurements", "quality", "perft"))
    matrix, profiles, files = command.accuracy_of(run), command.profiles(run), command._stored(run)
    held, versions = command.held_claims(run, rows), command._versions(run, tables)
    out, name = Path(f"reports/{run}/index.html"), run.partition(".")[2]
    made = render.build(rows, (), out, trained, adapted, versions, held, {}, name, profiles, matrix, stored=files)
    known = claims.load(ROOT / paths.CLAIMS)
    return made, report_parts.Run(run, stored(run), trained, adapted, matrix, known, profiles, files)


# What holds no number of rows, and why.
OTHER = {
    "title": "names",
    "folder": "a name",
    "cpu": "no number",
    "published_page": "an address",
    "siblings": "addresses",
    "comparisons": "addresses",
    "meanings": "definitions",
    "figures": "marks are rows: test_charts.py, test_report_charts.py",
    "questions": "the axes of the form",
    "rows": "the rows themselves",
    "version": "of the shape",
}
QUOTED = {
    "Answer.question": "a question",
    "Dot.high": "test_finding_pictures.py",
    "Dot.low": "test_finding_pictures.py",
    "Dot.value": "test_finding_pictures.py",
    "Picture.reference": "1, where nothing is faster",
    "BarLine.what": "the name of a bar, which has to be known",
    "BarLine.where": "a card and versions of the code, of which there has to be one group of rows",
    "Failed.cells": "keys and names of rows",
    "Claim.why": "a reason of config/claims.yaml, or the names of cards",
    "Evidence.results": "how many columns hold results",
    "Group.columns": "headings",
    "Altered.names": "what was altered",
    "Seed.number": "a name",
    "Seed.about": "config/seeds/published/sources.yaml",
    "Seed.remarks": "config/seeds/published/sources.yaml",
    "Table.note": "how to read a table, and how many rows of a seed document were measured; counts of published rows are computed",
    "Quality.margin": "given",
    "Quality.cautions": "the zoo",
    "Quality.adaptations[name]": "a name",
    "Contest.rows[values][4]": "tests/quality/test_specialisation.py",
    "Contest.rows[values][5]": "tests/quality/test_specialisation.py",
    "Contest.rows[values][6]": "tests/quality/test_specialisation.py",
    "Contest.rows[values][7]": "tests/quality/test_specialisation.py",
}


Rebuilt = Callable[[Any], Any]


def leaves(value: Any, path: str, rebuilt: Rebuilt = lambda one: one) -> Iterator[tuple[str, Any, Rebuilt]]:
    """Each text and number of a part of a report: where it stands, its value, and what makes the part with another one in its place."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            with_ = partial(_with_field, value, field.name, rebuilt)
            yield from leaves(getattr(value, field.name), f"{type(value).__name__}.{field.name}", with_)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}[{key}]", lambda new, key=key: rebuilt(value | {key: new}))
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            where = f"{path}[{i}]" if path.endswith("[values]") else path
            with_ = lambda new, i=i: rebuilt(type(value)([*value[:i], new, *value[i + 1 :]]))  # noqa: E731
            yield from leaves(one, where, with_)
    elif isinstance(value, str | int | float) and not isinstance(value, bool) and report_parts.numbers(str(value)):
        yield path, value, rebuilt


def _with_field(value: Any, name: str, rebuilt: Rebuilt, new: Any) -> Any:
    return rebuilt(dataclasses.replace(value, **{name: new}))


def false(value: Any) -> Any:
    """A text or number with another last digit in the middle one of its numbers."""
    text = str(value)
    found = list(report_parts.NUMBER.finditer(text))
    m = found[len(found) // 2]
    last = m.end() - 1 if "e" not in m[0] else m.start() + m[0].index("e") - 1
    return type(value)(f"{text[:last]}{(int(text[last]) + 1) % 10}{text[last + 1 :]}")


def pieces(name: str, value: Any) -> list[Any]:
    """A part of a report in smaller ones, each of which can be checked alone."""
    if isinstance(value, list) and name != "failed":
        return [[one] for one in value]
    if name == "seed" and value:
        return [dataclasses.replace(value, tables=[one]) for one in value.tables]
    if name == "quantised" and value:
        return [dataclasses.replace(value, lines=[one], bars=[]) for one in value.lines] + [
            dataclasses.replace(value, lines=[], bars=[one]) for one in value.bars
        ]
    if name == "quality" and value:
        free = dataclasses.replace(value, contests=[], adaptations=[], altered=[])
        return [
            dataclasses.replace(free, **{part: [one]})
            for part in ("contests", "adaptations", "altered")
            for one in getattr(value, part)
        ]
    return [value] if value else []


@pytest.mark.parametrize("run", RUNS)
def test_all_parts_of_a_report_are_true_of_its_rows(run: str) -> None:
    made, known = report(run)
    parts = {name: getattr(made, name) for name in report_parts.PARTS}
    found = {name: list(report_parts.PARTS[name](value, known)) for name, value in parts.items() if value}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_each_part_of_a_report_has_its_checker() -> None:
    """A field that is new is of a kind that nothing computes, until it is in one of these tables."""
    assert {field.name for field in dataclasses.fields(Report)} == report_parts.PARTS.keys() | OTHER.keys()
    assert not report_parts.PARTS.keys() & OTHER.keys()


@pytest.mark.parametrize("most", [1, pytest.param(5, marks=pytest.mark.campaign)])
def test_a_false_number_is_found_wherever_it_stands(most: int) -> None:
    """In each kind of text that has numbers, in up to so many runs: a kind that is neither computed nor named above fails here."""
    places: dict[tuple[str, str], list[tuple[str, Any]]] = defaultdict(list)
    for run in RUNS:
        made, _ = report(run)
        for name in report_parts.PARTS:
            for piece in pieces(name, getattr(made, name)):
                for where in dict.fromkeys(where for where, *_ in leaves(piece, name)):
                    places[name, where].append((run, piece))
    unseen, count = [], 0
    for (name, where), kept in places.items():
        if where in QUOTED:
            continue
        for run, piece in kept[:: max(1, len(kept) // most)][:most]:
            every = [one for one in leaves(piece, name) if one[0] == where]
            _, value, rebuilt = every[len(every) // 2]
            count += 1
            if not list(report_parts.PARTS[name](rebuilt(false(value)), report(run)[1])):
                unseen.append((run, name, where, value))
    assert unseen == [] and count > 60, "\n".join(map(str, unseen))
    named = {where for _, where in places}
    assert set(QUOTED) <= named, "what no page has any more"


def test_histories_are_true_of_the_stored_runs() -> None:
    """Counts, times, ratios with their intervals, others, cards and commits; and a false digit in each is found."""
    known = [run for run in RUNS if run.partition(".")[0] == "nvidia-h200"]
    lines = timeline.lines([(run, compare_command._read(run, timeline.COLUMNS)) for run in known])
    found = timeline.steps(lines)
    about, cards = timeline.told(lines, found, True)
    steps = [timeline.step(one) for one in found[: timeline.MOST_STEPS]]
    assert len(steps) > 5 and list(report_parts.history(about, cards, steps, "nvidia-h200")) == []
    for _, value, rebuilt in leaves([about], ""):
        assert list(report_parts.history(rebuilt(false(value))[0], cards, steps, "nvidia-h200")), value
    for place, _ in enumerate(steps[0]):
        for _, value, rebuilt in leaves([step[place] for step in steps[:1]], ""):
            planted = [[*steps[0][:place], rebuilt(false(value))[0], *steps[0][place + 1 :]], *steps[1:]]
            assert list(report_parts.history(about, cards, planted, "nvidia-h200")), value


TRAINED = ("nvidia-h200", "nvidia-h200.quality-formats")
Check = Callable[[str], list[str]]


def of_training(run: str) -> Iterator[tuple[str, Check]]:
    """The sentences on the training runs of a published run, each with what checks it."""
    table = rows_of("quality", run)
    finals = compare.finals(table)
    made = (trained_rules.quality(finals), page_quality.best), (trained_rules.left_over(finals), page_quality.left_over)
    for said, check in made:
        if said is not None:
            yield said.text, partial(check, table=table)
    for contest in trained_rules.contests(table):
        yield contest.power, partial(page_quality.power, runs=runs_of(contest, run))


def runs_of(contest: trained_rules.Contest, run: str) -> page_quality.pd.DataFrame:
    return page_quality.runs_of(rows_of("quality", run), contest.title.partition(":")[0], contest.causal)


@pytest.mark.parametrize("run", TRAINED)
def test_sentences_on_training_are_true_of_its_rows(run: str) -> None:
    """By reference levels, without the report's fit: means, intervals, Tukey's and TOST's verdicts, ranks and letters, seeds, far runs."""
    found = {text: wrong for text, check in of_training(run) if (wrong := check(text))}
    found |= {
        contest.title: wrong
        for contest in trained_rules.contests(rows_of("quality", run))
        if (wrong := page_quality.ranked(contest.rows, runs_of(contest, run)))
    }
    assert not found


def test_a_false_number_on_training_is_found() -> None:
    """Each number of a sentence, with another last digit, but the margins, which are given; and each of a line of the table."""
    planted = 0
    for text, check in of_training("nvidia-h200"):
        for m in list(NUMBER.finditer(text))[::5]:
            if (
                re.search(r"margin |within |factor of |power of $", text[: m.start()][-12:])
                or "80%" in text[m.start() : m.end() + 1]
            ):
                continue
            other = f"{text[: m.end() - 1]}{(int(m[0][-1]) + 1) % 10}{text[m.end() :]}"
            planted += 1
            assert check(other), other
    contest = trained_rules.contests(rows_of("quality", "nvidia-h200"))[0]
    runs, line = runs_of(contest, "nvidia-h200"), contest.rows[0]
    false_ones = {"mean": "1.0", "half_width": "± 1.0", "seeds": line["seeds"] + 1, "rank": line["rank"] + 1}
    for name, other in (false_ones | {"letters": "z", "undecided": ["nobody"], "equivalent": ["nobody"]}).items():
        assert page_quality.ranked([line | {name: other}, *contest.rows[1:]], runs), name
    assert planted > 8
