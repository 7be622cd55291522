"""Each number in the sentences of reports and platform pages is that of the rows, computed anew from Parquet; a false one is found."""

import re
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest

import page_quality
from moe_routing_bench.cli.report import rows_of
from moe_routing_bench.quality import compare
from moe_routing_bench.report import trained_rules, words
from moe_routing_bench.report.findings import findings
from moe_routing_bench.report.headlines import headlines
from page_numbers import ROOT, N, faults, stored

pytestmark = pytest.mark.slow

RUNS = sorted(
    path.parent.name
    for path in ROOT.glob("results/*/manifest.yaml")
    if path.with_name("measurements.parquet").is_file()
)
# Tests of their own compute these to the letter on rows whose numbers are known (test_findings.py, tests/quality).
ELSEWHERE = ("no implementation is", "no implementation has")
NUMBER = re.compile(rf"(?<![\w.=-]){N}(?![\w-]*[a-z_]{{2}})")


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@cache
def sentences(run: str) -> list[str]:
    """The sentences of a run's report whose numbers are of its measured rows."""
    table = rows_of("measurements", run)
    said = [*headlines(table), *findings(table)]
    texts = [words.scope(table), words.suspects(table), *(one.text for one in said)]
    return [text for text in texts if text and not any(part in text for part in ELSEWHERE)]


@pytest.mark.parametrize("run", RUNS)
def test_sentences_of_a_report_are_true_of_its_rows(run: str) -> None:
    found = {text: wrong for text in sentences(run) if (wrong := faults(text, stored(run)))}
    assert not found


@pytest.mark.parametrize("run", ["nvidia-h200", "nvidia-h200.quantised", "nvidia-h200.layers"])
def test_a_false_number_is_found(run: str) -> None:
    """Every third number of the sentences, with another last digit."""
    planted = [
        f"{text[: m.end() - 1]}{(int(m[0][-1]) + 1) % 10}{text[m.end() :]}"
        for text in sentences(run)
        for m in NUMBER.finditer(text)
    ]
    unseen = [text for text in planted[::3] if not faults(text, stored(run))]
    assert len(planted) > 30 and not unseen


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
        for m in list(NUMBER.finditer(text))[::2]:
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
    for name, other in (
        ("mean", "1.9536"),
        ("half_width", "± 0.0081"),
        ("seeds", line["seeds"] + 1),
        ("rank", line["rank"] + 1),
        ("letters", "z"),
        ("undecided", []),
    ):
        assert page_quality.ranked([line | {name: other}, *contest.rows[1:]], runs), name
    assert planted > 20
