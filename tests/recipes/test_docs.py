"""The documents say what is there: links, paths, and every name that a table of theirs is about."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from moe_routing_bench import config, grid, paths, records
from moe_routing_bench.benches import BENCHES
from moe_routing_bench.routers import ROUTERS
from moe_routing_bench.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "config/README.md"]
MADE = ("results/cpu/", "reports/cpu/")  # by a run, on each machine
CONTRACT = ("build", "empty_outputs", "reference", "check", "assignment", "cost")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def rows_of(name: str, heading: str) -> dict[str, list[str]]:
    """The table below a heading: cells by the first name in backticks of each row."""
    section = re.split(r"^#+ ", text_of(name).partition(f"# {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {name: cells for cells in lines for name in re.findall("`(.+?)`", cells[0])}


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as a Git host makes them."""
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall("^#+ (.*)", document.read_text(), re.M)}  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_and_paths_exist(document: Path) -> None:
    """Relative links with their anchors, and what looks like a path; below the package the prefix may be left out."""
    text = document.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = (document.parent / target).resolve() if target else document
        assert linked.exists() and (not anchor or anchor in anchors(linked)), f"({target}#{anchor})"
    new = {path for path in re.findall(r"File: `(.+?)`", text) if not (ROOT / path).exists()}  # a recipe writes them
    for path in set(re.findall(r"`(\.?[\w.-]+(?:/[\w.-]+)*(?:/|/[\w-]+\.\w+|\.(?:py|md|ya?ml|toml|txt|lock)))`", text)):
        if path not in new and not path.startswith(MADE):
            places = (ROOT, document.parent, paths.PACKAGE, ROOT / "workflow/rules")
            bare = "/" not in path and any(paths.PACKAGE.rglob(path))
            assert bare or any((place / path).exists() for place in places), path


def test_every_source_file_has_its_reason() -> None:
    """The tree of docs/architecture.md names every module, by its own name or by its kind."""
    named = rows_of("docs/architecture.md", "The tree")
    kinds = [re.sub(r"<\w+>", r"[a-z0-9_]+", name) for name in named]
    for path in paths.PACKAGE.rglob("*.py"):
        name = str(path.relative_to(paths.PACKAGE))
        if path.read_text().count("\n") > 1:  # more than a docstring
            assert any(re.fullmatch(kind, name) for kind in kinds), name


def test_every_status_is_explained() -> None:
    assert tuple(rows_of("docs/method.md", "Statuses")) == records.STATUSES


def test_every_bench_has_its_bytes_and_its_contract() -> None:
    assert tuple(rows_of("docs/method.md", "Compulsory bytes and FLOPs")) == tuple(BENCHES)
    contract = [re.split(r"\W", name)[0] for name in rows_of("docs/architecture.md", "A bench and its definition")]
    assert tuple(contract) == (*CONTRACT, "shared")
    for bench in BENCHES.values():
        assert all(callable(getattr(bench.definition(), name)) for name in CONTRACT), bench.name


def value(formula: str, **known: int) -> int:
    """A formula as the documents write it: a blank multiplies; what is in brackets with a plus is left out."""
    text = re.sub(r" \(\+.*?\)", "", formula).replace("T'", "sent").replace("R*", "limit")
    return eval(re.sub(r"(?<=[\w)]) (?=[\w(])", "*", text), known)


@pytest.mark.parametrize("bench", BENCHES)
def test_stated_bytes_are_what_the_definition_counts(bench: str) -> None:
    """With and without drops and padding."""
    _, *formulas = rows_of("docs/method.md", "Compulsory bytes and FLOPs")[bench]
    axes = {"tokens": [50], "hidden": [24], "intermediate": [16], "experts": [8], "top_k": [3], "skew": [1], "layout": ["compact", "block64"]}  # fmt: skip
    entry = {"benches": [bench], "capacity_factor": [0.5, "none"], "dtype": ["fp32", "bf16"], **axes}
    for job in grid.expand(config.load({"grid": [entry]}), {}):
        cell, definition = job.cell, BENCHES[bench].definition()
        shared = definition.shared(cell, 17, "cpu") if bench == "layer" else {}
        inputs = definition.build(cell, 17, "cpu") | shared
        outputs, expected = definition.empty_outputs(cell, inputs), definition.reference(cell, inputs)
        known = {
            "T": 50, "H": cell.hidden, "I": cell.intermediate, "E": 8, "k": 3, "b": cell.dtype_bytes, "R": len(inputs.get("order", ())),
            "limit": cell.row_limit if bench == "permute" else None,
        }  # fmt: skip
        inverse = inputs.get("inverse", expected.get("inverse"))
        if inverse is not None:
            ids = expected.get("topk_ids", inputs.get("topk_ids"))
            known |= {"K": int((inverse >= 0).sum()), "sent": int((inverse >= 0).any(1).sum()), "A": len(ids[inverse >= 0].unique())}  # fmt: skip
        cost = definition.cost(cell, inputs, outputs, expected)
        assert (cost.read_bytes, cost.write_bytes, cost.flops) == tuple(value(one, **known) for one in formulas), (
            cell.key
        )


def test_every_setting_has_its_default() -> None:
    stated = {name: float(cells[1]) for name, cells in rows_of("config/README.md", "Settings").items()}
    assert stated == {field.name: field.default for field in fields(Settings)}


def test_every_key_and_axis_is_explained() -> None:
    """With the benches that depend on it."""
    schema = yaml.safe_load(text_of(str(config.SCHEMA)))["properties"]
    assert set(rows_of("config/README.md", "Keys")) == set(schema)
    axes = rows_of("config/README.md", "Axes of a grid entry")
    assert set(axes) == set(schema["grid"]["items"]["properties"])
    for axis in {axis for bench in BENCHES.values() for axis in bench.axes} - {"trace"}:
        stated = list(BENCHES) if axes[axis][3] == "all" else axes[axis][3].split(", ")
        assert stated == [bench.name for bench in BENCHES.values() if axis in bench.axes], axis
    assert axes["router"][2] in ROUTERS
