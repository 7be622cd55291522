"""The word list of lint: what it refuses, what it reads, and that the counts of code may only fall."""

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("words")


@pytest.mark.parametrize(
    "text",
    [
        "Whoever waits is told.",
        "A draw that nobody knew.",
        "The kernel who reads.",
        "It is measured beside ours.",
        "Of pack: two rows.",
        "One sentence. Of the rows, two are new.",
        "Here is what was tried.",
        "So that none is of a cold card.",
        "Rows held against each other.",
        "It occured.",
    ],
)
def test_dialect_is_refused(text: str, words: ModuleType) -> None:
    assert [*words.matches(text)]


@pytest.mark.parametrize(
    "text",
    [
        "The harness poisons all outputs.",
        "Users who build models.",
        "A cell whose time is doubtful.",
        "Besides torch, Triton.",
        "Of course it compiles.",
        "`nobody` is a user.",
        "See [it](beside.md).",
        "```sh\nwhoever\n```",
    ],
)
def test_plain_english_and_code_pass(text: str, words: ModuleType) -> None:
    assert not [*words.matches(text)]


def test_comments_and_docstrings_are_read_and_code_is_not(tmp_path: Path, words: ModuleType) -> None:
    source = tmp_path / "a.py"
    source.write_text('"""First.\n\nIt is beside."""\nbeside = "beside"  # whoever\n')
    assert sorted((line, [hit[1] for hit in words.matches(text)]) for line, text in words.comments(source)) == [
        (1, ["beside"]),
        (4, ["whoever"]),
    ]
    other = tmp_path / "a.yaml"
    other.write_text("beside: 1  # nobody\n")
    assert [*words.comments(other)] == [(1, "nobody")]


def test_hits_in_code_fail_above_the_total_in_the_folders_that_have_more(words: ModuleType) -> None:
    hits = {
        "src/a": [words.Hit("src/a/x.py:1", "beside", "with")] * 2,
        "src/b": [words.Hit("src/b/x.py:1", "who", "that")],
    }
    assert [hit.text for hit in words.too_many(hits, {"src/a": 2})] == ["who"]
    assert not words.too_many(hits, {"src/a": 3}), "a file moved from src/a to src/b"


def test_counts_may_move_between_folders_but_not_rise_in_all(
    tmp_path: Path, words: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "words.toml"
    rules.write_text('[[rule]]\npattern = "x"\ninstead = "y"\n\n[left]\n"src/a" = 3\n')
    monkeypatch.setattr(words, "RULES", rules)
    words.write(Counter({"src/b": 2}))
    assert words.left() == {"src/b": 2} and len(words.rules()) == 1
    with pytest.raises(SystemExit, match="3 hits; allowed: at most 2"):
        words.write(Counter({"src/b": 3}))
