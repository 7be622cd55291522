"""Every measured figure in README and the documents is generated, computed from stored rows, or listed with a reason."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def numbers() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("prose_numbers")
    finally:
        sys.path.pop(0)


def test_no_figure_is_neither_computed_nor_listed(numbers: ModuleType) -> None:
    assert not numbers.missing(numbers.stated(), numbers.listed()), (
        "compute it, or `python docs/prose_numbers.py --write` and sort it"
    )


def test_no_listed_figure_is_gone(numbers: ModuleType) -> None:
    assert not numbers.gone(numbers.stated(), numbers.listed()), "run `python docs/prose_numbers.py --write`"


def test_only_the_notebook_is_listed_as_a_whole(numbers: ModuleType) -> None:
    whole = {
        page
        for page, reasons in numbers.listed().items()
        if any(numbers.EVERYTHING in texts for texts in reasons.values())
    }
    assert whole == {"docs/notebook.md"}


def test_the_readme_lists_no_measured_figure(numbers: ModuleType) -> None:
    assert set(numbers.listed()["README.md"]) <= {"definition", "estimate"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 1.12, 1.15 and\n1.09 times as long.", ["1.12, 1.15 and 1.09 times"]),
        ("3 to 10 % faster, 24.8 µs, 650 TFLOP/s and 1.19x", ["3 to 10 %", "24.8 µs", "650 TFLOP/s", "1.19x"]),
        ("53 of 75 rows, an error of 7.8e-8", ["53 of 75", "7.8e-8"]),
        ("| a | 12.5 | 8 % |", ["12.5", "8 %"]),
        ("In lists:\n- 5 ms\n- 6\n  ms", ["5 ms", "6 ms"]),
        ("torch 2.11, vLLM 0.33.0, T=4096, 128 experts, k=8 and 8 x 8 tiles", []),
        ("`5 %`, [5 %](a5.md) https://a.org/5.5\n```sh\nsleep 5 s\n```\n# 5 % of headings", ["5 %"]),
        ("<!-- generated: a -->\n5 %\n<!-- end -->\n1.5<!--=lead--> times, 6 %", ["6 %"]),
    ],
)
def test_what_counts_as_a_figure(text: str, found: list[str], numbers: ModuleType) -> None:
    assert list(numbers.figures(text)) == found


def test_what_is_new_is_missing_and_what_is_no_longer_said_is_gone(numbers: ModuleType) -> None:
    """A reason that nobody knows sorts nothing; a page that is listed as a whole may say anything."""
    known = {
        "a.md": {"experiment": ["5 %"], "unsorted": ["6 %"]},
        "b.md": {"experiment": ["*"]},
        "c.md": {"others": ["*"]},
    }
    said = {"a.md": ["6 %", "7 %"], "b.md": ["8 %"], "d.md": ["9 %"]}
    assert numbers.missing(said, known) == [("a.md", "6 %"), ("a.md", "7 %"), ("d.md", "9 %")]
    assert numbers.gone(said, known) == [("a.md", "5 %"), ("c.md", "*")]


def test_the_list_is_brought_up_to_date(numbers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    monkeypatch.setattr(numbers, "LIST", tmp_path / "list.yaml")
    monkeypatch.setattr(numbers, "pages", lambda: [page])
    page.write_text("5 % and 6 %")
    assert numbers.main(write=False) == 1 and numbers.main(write=True) == 1
    numbers.LIST.write_text(numbers.LIST.read_text().replace("unsorted", "others"))
    assert numbers.main(write=False) == 0
    page.write_text("6 % and 7 %")
    assert numbers.main(write=True) == 1
    assert numbers.listed() == {"page.md": {"others": ["6 %"], "unsorted": ["7 %"]}}


@pytest.mark.slow
def test_a_computed_figure_follows_its_rows(
    numbers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a document says falls with its rows; an unknown name is refused."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate, computed = (importlib.import_module(name) for name in ("generate", "computed"))
    page = tmp_path / "page.md"
    monkeypatch.setattr(generate, "PAGES", (page,))
    page.write_text("in 12<!--=layers-cells--> cells\n")
    assert [text for _, text in generate.written()] == ["in 13<!--=layers-cells--> cells\n"]
    rows = computed.layer_rows()
    monkeypatch.setattr(computed, "stored", lambda name: rows[rows["cell"] != rows["cell"].iloc[0]])
    assert [text for _, text in generate.written()] == ["in 12<!--=layers-cells--> cells\n"]
    page.write_text("in 12<!--=layer-cells--> cells\n")
    with pytest.raises(SystemExit, match="layers-cells"):
        list(generate.written())


def test_every_computation_is_used() -> None:
    text = "".join(page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
    source = (ROOT / "docs/computed.py").read_text()
    names = re.findall(r'^    "([a-z0-9-]+)": ', source, re.M)
    assert len(names) > 20 and all(f"<!--={name}-->" in text for name in names)
