"""Every page by day and by night, whatever is opened: text has 4.5:1 to what is behind it, and marks 3:1; what tables conclude is in sight."""

import functools
import itertools
import math
from pathlib import Path

import pandas as pd
import pytest
from rows import rows, some

from browser import CONTRAST, GOOD, asked, loaded
from campaign import sampled
from moe_routing_bench.comparison.claim_verdicts import Held
from moe_routing_bench.comparison.runs import Comparison, History, Then
from moe_routing_bench.config import claims, presets
from moe_routing_bench.report import run_pages, site
from moe_routing_bench.report.document import Dot, Sentence, pictured
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PICTURE = pictured([Dot("a", 2.0, 1.0, 3.0, chosen=True), Dot("b", 4.0, 3.0, 5.0, hollow=True)], "times", "x", 1.0)
ROW = {
    "bench": "gate",
    "cell": "T64",
    "implementation": "cute",
    "before_us": 20.0,
    "after_us": 10.0,
    "ratio": 2.0,
    "ratio_ci_low": 1.9,
    "ratio_ci_high": 2.1,
    "verdict": "faster",
    "reason": "why",
}


def held() -> list[Held]:
    """A claim that is held against rows of each verdict, and one about which they say nothing."""
    found = claims.load(ROOT / "config/claims.yaml")
    words = "the claim is of H100, the rows are of H200"
    return [
        Held(found[0], "reproduced", 2.0, 3, words),
        Held(found[1], "not reproduced", 3.0, 1),
        Held(found[2], "no rows", why="no such row"),
    ]


def report(out: Path, gpu: bool) -> None:
    table = some(rows(gpu))
    blocks = [[us * i for i in (1, 1.01, 0.99, 1)] for us in table["median_us"]]
    table = table.assign(
        platform="nvidia-h200" if gpu else "cpu", cell_hash=table["cell"], block_medians_us=blocks, set_aside=0
    )
    render(table, {}, out, claims=held(), run="seed-000")


def first(out: Path) -> None:
    listed = site.Listed(
        "a",
        "NVIDIA H200",
        "2026-11-21",
        "abc",
        "gate",
        "1 row ok",
        [Sentence("cute is fast.", "rows", PICTURE)],
        "",
        ["compare-a.html"],
        ["measurements.parquet"],
    )
    site.write(
        [(listed, out.parent / "a", [])],
        out.parent,
        held={"nvidia-h200": held()},
        models=presets.load(ROOT / "config/models.yaml"),
    )


def changed(out: Path) -> None:
    run_pages.write_changes(
        Comparison(
            pd.DataFrame([ROW, ROW | {"ratio": math.nan, "ratio_ci_low": math.nan, "verdict": "same"}]),
            ["driver"],
            False,
        ),
        ("old", "new"),
        out,
    )


def past(out: Path) -> None:
    then = tuple(Then(name, 12.0, 1.2, 1.1, 1.3, verdict) for name, verdict in (("b", "faster"), ("c", "undecided")))
    run_pages.write_history([History("gate", "T64", "cute", 10.0, then)], ["b", "c"], "now", out)


def both(out: Path) -> None:
    first, second = (
        some(rows())
        .query("status == 'ok' and bench == 'pack'")
        .assign(
            platform=name,
            gpu_name=name,
            roofline_us=1.0,
            share_of_roofline=0.5,
            block_medians_us=[[1.0, 1.1, 1.2]] * len(some(rows()).query("status == 'ok' and bench == 'pack'")),
        )
        for name in ("x", "y")
    )
    run_pages.write(("x", "y"), (first, second), out)


PAGES = {
    "report of a GPU": lambda out: report(out, True),
    "report of a CPU": lambda out: report(out, False),
    "site": first,
    "changes": changed,
    "histories": past,
    "versus": both,
}
OPENED = """every("details").forEach(one => one.open = true); if (typeof page !== "undefined") { open(0, true); every(".choose").slice(0, 2).forEach(one => one.click()); }"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page of a name, which all tests of this file share."""

    @functools.cache
    def made(name: str) -> Path:
        PAGES[name](out := tmp_path_factory.mktemp("page") / "index.html")
        return out

    return made


@pytest.mark.parametrize("name", sampled(PAGES, [name for name in PAGES if name != "report of a CPU"]))
def test_every_page_has_contrast_and_is_no_wider_than_a_phone_whatever_is_opened(written, name):
    """But what has a scroller of its own; nor is a line narrower than a word. Opened on a phone, and then looked at in a wide window, too."""
    narrow = """const wide = document.documentElement.clientWidth; return [document.documentElement.scrollWidth - wide, every("body *").filter(e => e.checkVisibility() && e.getBoundingClientRect().width && e.getBoundingClientRect().right > wide + 1 && !e.closest(".scroll, svg")).map(said),
        every("#words dd").filter(e => e.checkVisibility()).filter(e => e.offsetWidth < 200).map(said)];"""
    with loaded(written(name), width=390) as page:
        over, out_of_it, thin = page.value(f"(() => {{ {CONTRAST} {OPENED} {narrow} }})()")
        page.resize(1440)
        found, shown = page.value(f"(() => {{ {CONTRAST} return [poor(), shown('body *').length]; }})()")
        assert not page.console()
    assert not over and not out_of_it and not thin
    assert found == GOOD and shown > 15


@pytest.mark.parametrize("name", PAGES)
def test_a_heading_stands_over_its_numbers(written, name):
    """At the right, where they are."""
    left = asked(
        written(name),
        """const all = (selector, from = document) => [...from.querySelectorAll(selector)];
        return all("table").filter(table => table.tHead?.rows.length === 1 && table.tBodies[0].rows.length).flatMap(table => all("th", table.tHead).filter((head, i) => {
            const cells = [...table.tBodies[0].rows].filter(row => row.cells.length === table.tHead.rows[0].cells.length).map(row => row.cells[i]);
            return cells.length && cells.every(cell => cell.classList.contains("n")) !== head.classList.contains("n"); }).map(head => `${table.id}: ${head.textContent}`));""",
    )
    assert not left


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("changes", [("changes", "verdict"), ("changes", "before / after")]),
        ("site", [("claims", "here")]),
        ("versus", [("cells", "ratio"), ("both", "ratio")]),
        ("report of a GPU", [("published", "verdict"), ("bars", "verdict")]),
    ],
)
def test_what_a_table_concludes_is_seen_without_scrolling(written, name, columns):
    """And no word of it is broken into letters; on a screen and on a tablet."""
    with loaded(written(name)) as page:
        for width in (1440, 768):
            page.resize(width)
            for table, column in columns:
                at, inside, wide = (
                    page.value(f"""(() => {{ const table = document.querySelector("#{table}"), heads = [...table.tHead.rows[0].cells], at = heads.findIndex(one => one.textContent === "{column}");
                    const cell = table.tBodies[0].rows[0].cells[at], within = table.closest(".scroll").getBoundingClientRect().right;
                    return [at, cell.getBoundingClientRect().right <= within, cell.getBoundingClientRect().width]; }})()""")
                )
                assert at > 0 and inside and wide > 70, (table, column, width)
        assert not page.console()


def test_what_two_gpus_differ_by_stands_before_their_times(written):
    """Whose columns are as wide as the names of both: beside a cell of many sizes the ratio was out of sight on a tablet."""
    heads, first = asked(
        written("versus"),
        """const said = part => ["cells", "both"].map(id => [...part(document.getElementById(id)).rows[0].cells].map(one => one.textContent)); return [said(table => table.tHead), said(table => table.tBodies[0])];""",
    )
    assert heads[0][:3] == ["bench", "cell", "ratio"] and heads[1][:4] == ["bench", "cell", "implementation", "ratio"]
    assert "x [" in first[0][2] and "x [" in first[1][3] and list(map(len, first)) == list(map(len, heads))


def test_a_caption_is_read_without_scrolling(written):
    """Also over a table that is wider than a phone."""
    found = asked(
        written("report of a GPU"),
        """return [...document.querySelectorAll("caption")].map(one => [one.closest("table").offsetWidth > innerWidth, one.getBoundingClientRect().right <= one.closest(".scroll").getBoundingClientRect().right]);""",
        width=390,
    )
    assert any(wide for wide, _ in found) and all(inside for _, inside in found)


def test_a_table_with_more_beside_it_looks_like_one(written):
    """A shade at its right edge, until it is scrolled to its end; then at its left one. By day and by night."""
    with loaded(written("report of a GPU"), width=390) as page:
        for table, mode in itertools.product(("rows", "published"), ("light", "dark")):
            left, top, width, height = (
                page.value(f"""(() => {{ document.documentElement.style.colorScheme = "{mode}"; globalThis.box = document.querySelector("#{table}").closest(".scroll"); box.scrollLeft = 0; box.scrollIntoView();
                const within = box.getBoundingClientRect(), head = box.querySelector("thead").getBoundingClientRect(); return [within.left + box.clientLeft, head.bottom + 2, box.clientWidth, box.clientHeight - head.height - 20]; }})()""")
            )
            edge = (left + width - 2, top, 2, min(height, 400))
            first = off_ground(page.pixels(*edge), mode)
            page.value("box.scrollLeft = 1e6")
            last = off_ground(page.pixels(*edge), mode)
            assert first > 0.05 and last < 0.01, (table, mode, first, last)


def off_ground(found, mode: str) -> float:
    """By how much the ground at a place differs from the page's; of a column of dots most are ground."""
    dots = found.reshape(-1, found.shape[-1])[:, :3]
    ground = 1.0 if mode == "light" else 22 / 255
    return float(abs(pd.DataFrame(dots).median() - ground).max())


NAMED = {
    "short": ["a", "b", "c"],
    "cells": [
        "qwen3-next-80b-a3b T=16384 H=2048 I=512 E=512 k=10",
        "qwen3-next-80b-a3b T=4096 H=2048 I=512 E=512 k=10",
        "gpt-oss-120b T=4",
    ],
    "rules": ["quantile_balancing", "loss_free_bias", "deepseek_v3_small", "pseudo_expert_choice"],
    "wide": ["WWWWWWWWWWWWWWWWWWWWWWWWW", "mmmmmmmmmm"],
    "endless": [f"{'a-model-of-somebody-else ' * 4}{i}" for i in range(6)],
    "nameless": [f"n{i}" for i in range(7)],
}


@pytest.mark.parametrize("width", [1440, 390])
def test_names_in_a_small_picture_leave_room_for_its_scale(tmp_path, width):
    """However long they are, no text lies over another, a mark, the dashed line or the edge, and the scale has a third of the picture."""
    listed = []
    for names in NAMED:
        dots = [Dot(name, 2.0 + i, 1.0 + i, 3.0 + i, chosen=not i) for i, name in enumerate(NAMED[names])]
        known = Sentence(f"{names} is fast.", "rows", pictured(dots, "times as fast as the best other", "x", 1.0))
        listed.append(
            (
                site.Listed(names, "NVIDIA H200", "2026-11-21", "abc", "gate", "1 row ok", [known], "", [], []),
                tmp_path / names,
                [],
            )
        )
    site.write(listed, tmp_path, held={}, models={})
    script = """return [...document.querySelectorAll(".picture-small")].map(svg => { const box = svg.getBoundingClientRect(), every = kind => [...svg.querySelectorAll(kind)].map(one => one.getBoundingClientRect());
        const texts = every("text"), marks = every("circle"), over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3, scale = [...every("circle"), ...every("g line")];
        return {box: [box.width, box.right <= innerWidth], out: texts.filter(one => one.left < box.left || one.right > box.right + 0.5 || one.bottom > box.bottom + 1).length,
            texts: texts.flatMap((a, i) => texts.slice(i + 1).filter(b => over(a, b))).length, marks: texts.flatMap(a => marks.filter(b => over(a, b))).length, lines: texts.flatMap(a => every(".reference").filter(b => over(a, b))).length, dashed: every(".reference").length > 0,
            scale: (Math.max(...scale.map(one => one.right)) - Math.min(...scale.map(one => one.left))) / box.width, said: svg.textContent.includes("\\u2026")}; });"""
    every = dict(zip(NAMED, asked(tmp_path / "index.html", script, width=width), strict=True))
    for names, found in every.items():
        assert found.pop("box")[1] and found.pop("scale") > 1 / 3, names
        assert found == {
            "out": 0,
            "texts": 0,
            "marks": 0,
            "lines": 0,
            "dashed": True,
            "said": names in ("cells", "endless"),
        }, names
