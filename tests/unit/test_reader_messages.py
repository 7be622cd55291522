"""Messages that misled readers: names that are not known, rows that were not measured again, and the median of an even number."""

import re

import pandas as pd
import pyarrow.parquet as pq
import pytest
from test_comparison import table
from test_headlines import pair, said

from moe_routing_bench import api
from moe_routing_bench.answers.ask import ask
from moe_routing_bench.answers.said import lines
from moe_routing_bench.cli.claims import claims
from moe_routing_bench.comparison import runs
from moe_routing_bench.figures import training_rows
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.report import headlines
from moe_routing_kernels.errors import MOST_LETTERS, UserError

RESULTS = PACKAGE.parents[1] / "results"


def test_a_model_without_a_preset_is_told_how_to_add_one():
    with pytest.raises(UserError, match="`--models FILE` adds presets of your own"):
        api.jobs("gate", model="my-moe")


def test_a_model_with_a_long_name_is_refused_in_a_line_that_is_not():
    with pytest.raises(UserError, match=r"^model: got '999.* say the sizes without one$") as found:
        ask("9" * 400, experts=64)
    assert len(str(found.value)) <= MOST_LETTERS


def test_a_platform_without_rows_is_told_which_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nvidia-h200", "nvidia-h200.layers"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "measurements.parquet").touch()
    with pytest.raises(
        UserError, match=r"none of h200.*allowed: a folder of results: nvidia-h200, nvidia-h200\.layers;"
    ):
        claims(platform="h200")


def test_a_row_that_was_not_measured_again_is_the_same_however_wide_its_interval():
    """Runs that share rows had many undecided ones, of a comparison of a measurement with itself."""
    blocks = pd.Series([[10.0, 30.0, 20.0, 5.0]] * len(table()), table().index)
    wide = table().assign(block_medians_us=blocks)
    found = runs.compare(wide, wide)
    assert found.counts() == {"same": len(wide)} and found.repeated() == len(wide)
    again = wide.assign(block_medians_us=pd.Series([[10.0, 30.0, 20.0, 5.1]] * len(wide), wide.index))
    found = runs.compare(wide, again)
    assert found.counts() == {"undecided": len(wide)} and found.repeated() == 0


def test_an_even_number_has_no_median_one():
    """The row that is shown is the lower of the two in the middle, and the sentence says so; of three it is the median."""
    two, three = [*pair("a", 1.2), *pair("b", 1.4)], [*pair("a", 1.2), *pair("b", 1.4), *pair("c", 1.9)]
    assert "in the lower of the two middle ones of these it is 1.20x" in said(headlines.fastest, *two)
    assert "in the median one of these it is 1.40x" in said(headlines.fastest, *three)


def test_trained_rules_name_the_bytes_that_they_saw():
    """The loss of a rule was 1.759 in one report and 1.453 in another, after 13 and 50 MB, and no caption said so."""
    rows = pq.read_table(RESULTS / "nvidia-h200/quality.parquet").to_pandas()
    titles = [title for title, _ in training_rows.contests(training_rows.finals(rows, "bits_per_byte"))]
    assert titles and all("3,050 steps, 50 MB" in title for title in titles)
    half = rows.assign(steps=1525, tokens_seen=rows["tokens_seen"] / 2)
    titles = [title for title, _ in training_rows.contests(training_rows.finals(half, "bits_per_byte"))]
    assert titles and all("1,525 steps, 25 MB" in title for title in titles)


def test_a_slower_one_is_so_many_times_as_fast(monkeypatch):
    """ "slower: 0.734x over" left open which of both is the faster."""
    monkeypatch.chdir(RESULTS.parent)
    answer = ask("qwen3-30b-a3b", tokens=16384, bench="layer")
    slower = [line for line in lines(answer) if "(slower" in line]
    assert slower and all(re.search(r"\d\.\d+x .*as fast as \w+ \(slower", line) for line in slower)
    assert "x over" not in "\n".join(lines(answer))


def test_older_code_is_told_in_a_few_words(monkeypatch):
    """80 to 130 words on it stood under most answers."""
    monkeypatch.chdir(RESULTS.parent)
    for tokens in (64, 4096):
        said = ask("qwen3-30b-a3b", tokens=tokens)["provenance"]["older_code"]
        assert said is None or len(said.split()) <= 10
    assert ask(bench="gate", tokens=64, experts=64, top_k=8)["provenance"]["older_code"].startswith(
        "older code: `gate`"
    )
