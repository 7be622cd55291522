"""Samples of a row as a strip, and two rows side by side, in a real browser."""

import pytest
from rows import frame, one

from browser import asked
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import MOST, row_id, samples

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=document.title=1>"
TIMED = {
    "tokens": 64,
    "median_us": 10.0,
    "ci_low_us": 9.9,
    "ci_high_us": 10.1,
    "samples_us": [9.0, 10.0, 11.5],
    "set_aside_samples_us": [20.0],
}
BESIDE = {
    "best_other": "cute",
    "best_verdict": "slower",
    "best_speedup": 0.5,
    "best_speedup_ci_low": 0.49,
    "best_speedup_ci_high": 0.51,
}
TABLE = frame(
    one("gate", "cute", cell="a", **TIMED),
    one("gate", "triton", cell="a", **TIMED | BESIDE | {"median_us": 20.0, "ci_low_us": 19.8, "ci_high_us": 20.2}),
    one("gate", "torch", cell="a", **TIMED),
    one("gate", "cute", cell="b", **TIMED | {"median_us": 5.0, "ci_low_us": 4.9, "ci_high_us": 5.1}, trace=EVIL),
    one("gate", "cute", cell="a", **TIMED | {"gpu_uuid": "GPU-2"}),
    one("gate", "torch", cell="b", status="crashed", reason="why"),
    one("gate", "triton", cell="b", **TIMED | {"samples_us": None, "set_aside_samples_us": None}),
)
IDS = [row_id(record) for record in TABLE.to_dict("records")]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "index.html"
    render(TABLE, {}, out)
    return lambda script, **options: asked(out, script, **options)


def test_samples_are_offsets_from_the_median():
    """In hundredths of a percent, in order; long lists thinned evenly, which is said; null where none is stored."""
    found = samples(TABLE.to_dict("records"))["rows"]
    assert found[0] == {"every": 1, "at": [-1000, 0, 1500], "aside": [10000]} and found[5] is None and found[6] is None
    (long,) = samples([{"median_us": 1.0, "samples_us": [1.0] * (2 * MOST + 1), "set_aside_samples_us": None}])["rows"]
    assert long == {"every": 3, "at": [0] * (2 * MOST // 3 + 1)}


def test_a_row_opens_to_its_samples(ask):
    """Every sample is a mark that says its time; what was set aside is told apart; a row without any says so."""
    script = f"""const strips = {IDS!r}.filter((_, i) => [0, 5].includes(i)).map(id => {{ open(page.ids.indexOf(id), true); return document.querySelector("#row-" + id).nextElementSibling; }});
        const [made, none] = strips;
        const number = (mark, name) => Number(made.querySelector(mark).getAttribute(name)), dots = [...made.querySelectorAll(".strip circle")].map(dot => Number(dot.getAttribute("cx")));
        return [[...made.querySelectorAll(".strip circle")].map(dot => [dot.textContent, dot.getAttribute("class")]), made.querySelector("svg").getAttribute("aria-label"), none.innerText.includes("No sample"),
            [number("rect", "x"), number("rect", "x") + number("rect", "width"), dots[0], dots[1]]];"""
    marks, label, none, (low, high, nine, ten) = ask(script)
    assert (ten - low, high - ten) == pytest.approx(((ten - nine) * 0.1,) * 2), (
        "the band is the interval of the median, 9.9 to 10.1"
    )
    assert marks == [["9 µs", ""], ["10 µs", ""], ["11.5 µs", ""], ["20 µs", "aside"]]
    assert label == "cute: 3 samples, 9 to 11.5 µs, median 10" and none


def test_two_rows_side_by_side(ask):
    """By two clicks, or by the address: the stored verdict of the pair, else a ratio and why there is no verdict; a third takes the first's place."""
    script = f"""const ids = {IDS!r}, press = i => document.querySelectorAll("#row-" + ids[i] + " .choose")[0].click(), found = [];
        const seen = () => [document.querySelector("#ratio")?.textContent ?? document.querySelector("#compared").innerText, location.hash, document.querySelectorAll("[aria-pressed=true]").length];
        press(0); found.push(seen()); press(1); found.push(seen()); press(2); found.push(seen()); press(3); found.push(seen()); press(3); press(5); found.push(seen());
        document.querySelector("#compared button").click(); return [...found, document.querySelector("#compared").hidden];"""
    first, pair, third, other, without, hidden = ask(script)
    assert first[0].startswith("Chosen: gate: cute, a.") and first[2] == 1
    assert pair == [
        "cute is faster (stored verdict): 2.00x [1.96, 2.04] as fast as triton, paired block by block.",
        f"#compare-{IDS[0]}-{IDS[1]}",
        2,
    ]
    assert (
        third[0]
        == "The time of torch over that of triton: 0.500x [0.490, 0.510], as wide as both intervals make it. No verdict: none was stored of this pair."
        and third[2] == 2
    )
    assert "No verdict: they are of different cells." in other[0] and "nothing can be compared" in without[0] and hidden


def test_a_comparison_has_an_address(ask):
    script = """const box = document.querySelector("#compared"), wide = document.documentElement.clientWidth;
        return [box.hidden, box.innerText, box.querySelectorAll("svg").length, box.querySelectorAll("img").length, [...box.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > wide + 1 && !e.closest(".scroll")).length];"""
    script = (
        script.removesuffix("];")
        + ', [...box.querySelectorAll(".ends")].map(ends => [...ends.children].map(one => one.textContent).join()), [...box.querySelectorAll("rect")].map(band => Number(band.getAttribute("x")))];'
    )
    hidden, words, strips, images, wide, scales, bands = ask(script, part=f"compare-{IDS[0]}-{IDS[3]}", width=390)
    assert len(set(scales)) == 1 and min(bands) >= 12, "both strips have one scale, of both"
    assert (
        (hidden, strips, images, wide) == (False, 2, 0, 0)
        and EVIL in words
        and "No verdict: they are of different cells." in words
    )


def test_on_a_phone_both_rows_are_in_sight(ask):
    """The values of either beside the name of their field, broken into lines and not into letters; no letter is smaller than elsewhere."""
    script = """const box = document.querySelector("#compared .scroll"), lines = [...box.querySelectorAll("tbody tr")], within = box.getBoundingClientRect().right;
        const tall = [...document.querySelectorAll("svg text")].filter(one => one.textContent).map(one => parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getBoundingClientRect().width / one.ownerSVGElement.viewBox.baseVal.width);
        return [lines.length, lines.filter(line => line.cells[2].getBoundingClientRect().right > within + 1).length, Math.min(...lines.flatMap(line => [...line.cells].slice(1).map(cell => cell.offsetWidth))), Math.min(10, ...tall),
            document.querySelector(".ends").checkVisibility() && parseFloat(getComputedStyle(document.querySelector(".ends")).fontSize)];"""
    lines, hidden, narrowest, smallest, ends = ask(script, part=f"compare-{IDS[0]}-{IDS[1]}", width=390)
    assert lines > 5 and not hidden and narrowest > 70 and smallest >= 9 and ends >= 9


def test_rows_of_two_cards_get_no_verdict(ask):
    found = ask("return ratioOf(1, 4)")
    assert found.endswith("No verdict: they are of different cards.")


def test_where_no_other_run_is_beside_it_the_command_is_there(tmp_path):
    out = tmp_path / "nvidia-h200.mine" / "index.html"
    render(TABLE, {}, out)
    assert "moe-routing-bench compare COMMIT:nvidia-h200.mine nvidia-h200.mine --html" in out.read_text()
