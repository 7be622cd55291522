"""Each number in the sentences of reports and platform pages is that of the rows, computed anew from Parquet; a false one is found."""

import re
from functools import cache

import pytest

from moe_routing_bench.cli.report import rows_of
from moe_routing_bench.report import words
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
ELSEWHERE = (
    *("What a capacity factor drops", "Cost of skew", "Time with a capacity factor", "Noise:"),
    *("no implementation is", "no implementation has"),
)
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
