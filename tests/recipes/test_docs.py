"""The documents say what is there: links, paths, generated blocks, and every name that a table of theirs is about."""

import importlib
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType

import pandas as pd
import pyarrow as pa
import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import expand, sections
from moe_routing_bench.config import load as config
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.packages import PACKAGES
from moe_routing_bench.store import rows
from moe_routing_bench.workload.row_map import row_layout
from moe_routing_kernels.formats import FORMATS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "config/README.md"]
MADE = ("results/cpu/", "reports/", "site/")  # on each machine
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
    return {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall("^#+ (.*)", document.read_text(), re.M)
    }


def broken(document: Path) -> list[str]:
    """Relative links whose file or anchor is not there."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text())
    found = {(target, anchor): (document.parent / target).resolve() if target else document for target, anchor in links}
    return [
        f"({target}#{anchor})"
        for (target, anchor), path in found.items()
        if not path.exists() or (anchor and anchor not in anchors(path))
    ]


@pytest.mark.parametrize("page", [*ROOT.glob("*/*/README.md")], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_examples_and_packages_hold(page: Path) -> None:
    assert not broken(page)


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_and_paths_exist(document: Path) -> None:
    """Relative links with their anchors, and what looks like a path; below the package the prefix may be left out.

    The changelog names files as they were called at the time.
    """
    text = document.read_text()
    assert not broken(document)
    new = {path for path in re.findall(r"File: `(.+?)`", text) if not (ROOT / path).exists()}  # a recipe writes them
    for path in set(re.findall(r"`(\.?[\w.-]+(?:/[\w.-]+)*(?:/|/[\w-]+\.\w+|\.(?:py|md|ya?ml|toml|txt|lock)))`", text)):
        if path not in new and not path.startswith(MADE) and document.name != "CHANGELOG.md":
            places = (ROOT, ROOT / "src", document.parent, *PACKAGES, ROOT / "workflow/rules")
            bare = "/" not in path and any(one for package in PACKAGES for one in package.rglob(path))
            assert bare or any((place / path).exists() for place in places), path


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that writes the generated blocks."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("generate")


def test_generated_blocks_are_up_to_date(generate: ModuleType) -> None:
    """Every block, and every computed figure in prose: a number that the rows do not show ends here."""
    pages = dict(generate.written())
    assert {"README.md", "architecture.md", "experts.md", "kernels.md"} <= {page.name for page in pages}
    stale = [str(page.relative_to(ROOT)) for page, text in pages.items() if page.read_text() != text]
    assert not stale, "run: python docs/generate.py"


def test_every_block_is_on_some_page(generate: ModuleType) -> None:
    shown = {name for page in generate.PAGES for _, name, _ in generate.BLOCK.findall(page.read_text())}
    assert shown == set(generate.BLOCKS)


def test_a_block_is_filled_and_the_rest_kept(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: ceilings -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(generate, "PAGES", (page,))
    ((_, text),) = generate.written()
    assert text == f"before\n<!-- generated: ceilings -->\n{generate.BLOCKS['ceilings']()}<!-- end -->\nafter\n"


def test_a_ratio_is_of_one_point_and_of_one_card(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full precision is held against each of the formats of the same sizes, and of several implementations the fastest counts."""
    times = [(1, "bf16", "ops", 9.0), (1, "bf16", "slow", 30.0), (1, "int4", "codes", 3.0), (1, "int8", "codes", 6.0)]
    times += [(2, "bf16", "ops", 8.0), (2, "int4", "codes", 16.0), (4, "bf16", "ops", 5.0)]
    shown = pd.DataFrame(times, columns=["tokens", "weights", "implementation", "median_us"])
    wrong = shown[:1].assign(status="incorrect", median_us=1.0)
    shown = pd.concat([shown.assign(status="ok"), wrong], ignore_index=True)
    shown = shown.assign(bench="model", dtype="bf16", gpu_uuid="one", skew=None)
    monkeypatch.setattr(generate.seed_tables, "stored", lambda name: shown)
    found = partial(generate.seed_tables.ratios, "seed", faster=("codes",))
    assert found("tokens < 9", ("ops", "slow")) == [3.0, 1.5, 0.5] and found("tokens == 2", ("ops",)) == [0.5]
    shown.loc[5, "gpu_uuid"] = "another"
    assert found("tokens == 1", ("ops",)) == [3.0, 1.5]
    with pytest.raises(AssertionError, match="across cards"):
        found("tokens < 9", ("ops",))


@pytest.mark.parametrize(
    ("measured", "cells", "shown"),
    [
        (
            "2.0x [1.9, 2.1] in the geometric mean of cells that differ in T; worst: a: 1.0x (x, y); best: b: 3.0x (x, y); 1 of 2 misses",
            "2 of 2",
            "mean 2.0x [1.9, 2.1]; worst: a: 1.0x (x, y); 1 of 2 misses",
        ),
        ("2.0x [1.9, 2.1] in the geometric mean; worst: a: 2.0x [1.9, 2.1] (x, y)", "1 of 1", "2.0x [1.9, 2.1]"),
        (
            "T=1: 63.0 % [62.9, 63.1] (x); T=8: 99.1 % [99.0, 99.1] (x)",
            "2 of 2",
            "T=1: 63.0 % [62.9, 63.1] (x); T=8: 99.1 % [99.0, 99.1] (x)",
        ),
    ],
    ids=["mean", "one-cell", "each"],
)
def test_a_line_of_a_bar_has_the_mean_and_the_worst_cell(
    measured: str, cells: str, shown: str, generate: ModuleType
) -> None:
    line = generate.stored_tables.BarLine("what", "≥ 1x in the geometric mean", "–", measured, cells, "–", "missed")
    assert generate.stored_tables.bars([line]).splitlines()[-1] == f"| what | mean ≥ 1x | {shown} | {cells} | missed |"


def test_the_second_times_of_a_repeat_are_those_of_the_published_rows(generate: ModuleType) -> None:
    """So that what is said of repeatability is of these rows, and falls with them when they are measured anew."""
    keys = ["bench", "cell", "implementation"]
    held = generate.stored_tables.stored("repeat_published.csv").set_index(keys)["second_us"]
    rows = pd.concat(
        [
            generate.stored_tables.stored(name)
            for name in ("measurements.parquet", generate.stored_tables.LAYERS + "measurements.parquet")
        ]
    )
    published = rows[rows["status"] == "ok"].set_index(keys)["median_us"]
    assert len(held) > 900 and (held - published.reindex(held.index)).abs().max() <= 0.0001


def test_repeatability_is_counted(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four medians one is within half a per cent and two within 2 %; layers, which take turns of another kind, have a line of their own."""
    times = [("gate", 100, 100.5), ("gate", 100, 98.1), ("pack", 100, 102.1), ("pack", 100, 50), ("layer", 100, 100)]
    rows = pd.DataFrame(times, columns=["bench", "first_us", "second_us"]).assign(
        cell="a", first_started_at="2026-11-23T11"
    )
    monkeypatch.setattr(generate.stored_tables, "stored", lambda name: rows)
    said = generate.BLOCKS["repeatability"]()
    assert "25 % of 4 medians are within 0.5 % and 50 % within 2 %" in said and "2026-11-23" in said
    lines = generate.BLOCKS["repeat-published"]().splitlines()
    assert lines[-1].startswith("| all | 5 | 1 | 40.00 % | 60.00 % |") and any(
        "`layer` | 1 | 1 | 100.00 %" in line for line in lines
    )


def test_what_seeds_tell_apart_is_counted_from_the_rows(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three causal rules with five seeds: the third is apart from the other two, which scatter around each other."""
    bits = {
        "a": (1.0, 1.1, 1.2, 1.3, 1.4),
        "b": (1.1, 1.0, 1.3, 1.2, 1.4),
        "c": (2.0, 2.1, 2.2, 2.3, 2.4),
        "later": (9, 9, 9, 9, 9),
    }
    known = {
        "purpose": "final",
        "network": "linear",
        "step": 1,
        "capacity_factor": 1.0,
        "drop_policy": "position",
        "train_mode": "joint",
        "lr": 0.1,
    }
    rows = [
        known
        | {
            "run": f"{name}{seed}",
            "label": "a0",
            "router": name,
            "seed": seed,
            "match": None,
            "bits_per_byte": value,
            "causal": name != "later",
        }
        for name, values in bits.items()
        for seed, value in enumerate(values)
    ]
    monkeypatch.setattr(generate.stored_tables.run_rows, "read", lambda path: pa.Table.from_pylist(rows))
    monkeypatch.setattr(generate.stored_tables, "study", generate.stored_tables.study.__wrapped__)
    said = generate.BLOCKS["quality-told"]()
    assert "n = 5 seeds." in said and "2 different, 0 equivalent, 1 undecided; b and a are undecided" in said
    assert generate.BLOCKS["quality"]().splitlines()[2:] == [
        "| `a` | 1.200 | a | `c` | 2.200 | b |",
        "| `b` | 1.200 | a |  |  |  |",
    ]


@pytest.mark.parametrize("text", ["<!-- generated: ceilings -->\nold\n", "<!-- generated: nothing -->\n<!-- end -->\n"])
def test_a_broken_block_is_refused(
    text: str, generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr(generate, "PAGES", (page,))
    with pytest.raises(SystemExit, match="a block without an end"):
        list(generate.written())


@pytest.mark.parametrize(
    ("page", "most"), [("architecture.md", 13_000), ("kernels.md", 11_500), ("experts.md", 18_500)]
)
def test_a_page_that_is_read_as_a_whole_is_short(page: str, most: int) -> None:
    """New experiments go to the notebook, further tables to measurements.md."""
    assert len((ROOT / "docs" / page).read_text()) <= most


def test_documents_stay_short() -> None:
    """All of them together; raise it only for a document that replaces none."""
    pages = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *ROOT.glob("docs/**/*.md")]
    assert sum(page.stat().st_size for page in pages) <= 245_000


def test_every_status_is_explained() -> None:
    assert tuple(rows_of("docs/method.md", "Statuses")) == rows.STATUSES


def test_every_bench_has_its_bytes_and_its_contract() -> None:
    assert tuple(rows_of("docs/method.md", "Compulsory bytes and FLOPs")) == tuple(BENCHES)
    contract = [re.split(r"\W", name)[0] for name in rows_of("docs/architecture.md", "A bench and its definition")]
    assert tuple(contract) == ("problem", *CONTRACT, "shared")
    for bench in BENCHES.values():
        names = CONTRACT if bench.stages else ("problem", *CONTRACT)
        assert all(callable(getattr(bench.definition(), name)) for name in names), bench.name


def value(formula: str, **known: int) -> int:
    """A formula as the documents write it: a blank multiplies; what is in brackets with a plus is left out."""
    text = re.sub(r" \(\+.*?\)", "", formula).replace("T'", "sent").replace("R*", "limit")
    return eval(re.sub(r"(?<=[\w)]) (?=[\w(])", "*", text), known)


@pytest.mark.parametrize("bench", BENCHES)
def test_stated_bytes_are_what_the_definition_counts(bench: str) -> None:
    """With and without drops and padding. Of a model of two layers, parameters are counted by hand."""
    if bench == "model":
        pytest.importorskip("transformers")
    _, *formulas = rows_of("docs/method.md", "Compulsory bytes and FLOPs")[bench]
    axes = {
        "tokens": [50],
        "hidden": [24],
        "intermediate": [16],
        "experts": [8],
        "top_k": [3],
        "skew": [1],
        "layout": ["compact", "block64"],
    }
    entry = {"benches": [bench], "capacity_factor": [0.5, "none"], "dtype": ["fp32", "bf16"], **axes}
    for job in expand.expand(config.load({"grid": [entry]}), {}):
        cell, definition = job.cell, BENCHES[bench].definition()
        shared = definition.shared(cell, 17, "cpu") if BENCHES[bench].shared else {}
        inputs = definition.build(cell, 17, "cpu") | shared
        outputs, expected = definition.empty_outputs(cell, inputs), definition.reference(cell, inputs)
        known = {
            "T": 50,
            "H": 24,
            "I": 16,
            "E": 8,
            "k": 3,
            "b": FORMATS[cell.get("dtype", "bf16")].bits // 8,
            "R": len(inputs.get("order", ())),
            "limit": row_layout(cell).rows,
        }
        inverse = inputs.get("inverse", expected.get("inverse"))
        if inverse is not None:
            ids = expected.get("topk_ids", inputs.get("topk_ids"))
            known |= {
                "K": int((inverse >= 0).sum()),
                "sent": int((inverse >= 0).any(1).sum()),
                "A": len(ids[inverse >= 0].unique()),
            }
        if bench == "ep_exchange":  # of two ranks: tokens with an expert of each half
            known["P"] = sum(
                int((ids // 4 == rank).any(1).sum())
                for name, ids in inputs.items()
                if name.startswith("topk_ids")
                for rank in range(2)
            )
        if bench == "model":
            products = 2 * (2 * 24 * 64 + 2 * 24 * 32 + 8 * 24)
            embeddings = (len(inputs["ids"].unique()) + 512) * 24
            active = sum(len(ids.unique()) for ids in expected["topk_ids"])
            parameters = products + 2 * (2 * 24 + 2 * 16) + 24 + embeddings + active * 3 * 24 * 16
            known |= {"M": parameters, "D": products, "V": 512, "L": 2}
        cost = definition.cost(cell, inputs, outputs, expected)
        assert (cost.read_bytes, cost.write_bytes, cost.flops) == tuple(value(one, **known) for one in formulas), (
            cell.key
        )


def test_every_setting_has_its_default() -> None:
    stated = {name: float(cells[1]) for name, cells in rows_of("config/README.md", "Settings").items()}
    assert stated == {field.name: field.default for field in fields(Settings)}


def test_every_key_and_axis_is_explained() -> None:
    """What an entry may hold besides axes is in the words below their table."""
    assert set(rows_of("config/README.md", "Keys")) == set(sections.Config.model_fields)
    explained = set(rows_of("config/README.md", "Axes of a grid entry"))
    assert explained == {axis.name for axis in AXES.values() if axis.scope != "config"}
    assert explained | {"benches", "implementations", "twins", "shared_experts"} == set(sections.GridEntry.model_fields)
