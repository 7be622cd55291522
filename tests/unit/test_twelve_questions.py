"""The twelve questions that readers of this field ask, each answered on the page within three actions, in a real browser.

An action is an address, a control that is set, or a click. One browser answers all of them on one page.
"""

import pytest
from rows import frame, one
from test_answers import runs, table
from test_report_ask import DEEPSEEK, GATE, LAYER, MODELS, QWEN, ran

from browser import asked
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import row_id

pytestmark = pytest.mark.slow

FLOORS = {"compulsory_bytes": 4_000_000, "copy_gb_per_s": 4000.0}
BIG = LAYER | {name: DEEPSEEK[name] for name in ("hidden", "intermediate", "experts", "router")}
TABLE = frame(
    ran("gate", "g64", "triton", 2.0, "faster", "cute", 1.25, tokens=64, **GATE, **FLOORS),
    ran("gate", "g64", "cute", 2.5, "slower", "triton", 0.8, tokens=64, **GATE, **FLOORS, samples_us=[2.4, 2.5]),
    ran("gate", "g512", "cute", 2.4, "faster", "triton", 1.15, tokens=512, **GATE, **FLOORS),
    ran(
        "gate",
        "g512",
        "triton",
        2.76,
        "slower",
        "cute",
        0.87,
        tokens=512,
        **GATE,
        **FLOORS,
        suspect=True,
        suspect_reason="ceilings drifted 3 %",
    ),
    ran("layer", "l0", "cute", 120.0, "faster", "triton", 1.01, tokens=512, **LAYER, **FLOORS),
    ran("layer", "l1", "cute", 180.0, "faster", "triton", 1.5, tokens=512, **LAYER | {"skew": 1.5}, **FLOORS),
    ran("layer", "d0", "cute", 900.0, "faster", "triton", 1.4, tokens=8192, **BIG, **FLOORS),
    one(
        "training",
        "cute",
        cell="t",
        median_us=300.0,
        ci_low_us=299.0,
        ci_high_us=301.0,
        tokens=512,
        **{name: LAYER[name] for name in (*QWEN, "dtype", "sampler", "skew", "phase")},
    ),
)
TRAINED = table(runs("softk", (1.0, 1.1)), runs("switch_top1", (2.0, 2.1), bits=0.2, speed=4000.0))
SUSPECT = row_id(TABLE.to_dict("records")[3])
HELP = """const visit = part => { location.hash = part; dispatchEvent(new HashChangeEvent("hashchange")); }, words = selector => document.querySelector(selector).innerText;
    const set = (name, value) => { const made = document.querySelector(`#question [name=${name}]`); made.value = value; made.dispatchEvent(new Event("input", {bubbles: true})); };
    const click = selector => document.querySelector(selector).click(), further = question => [...document.querySelectorAll(".asked dt")].find(one => one.textContent.includes(question)).nextElementSibling;
    const chart = name => { drawChart(name); return document.querySelector(`#figure-${name}`); };"""
# what is asked: the actions, where the answer stands, and what it holds
QUESTIONS = {
    "fastest gate for Qwen3 at T=512": (
        ['set("bench", "gate")', f'set("model", "{next(iter(MODELS))}")', 'set("tokens", "512")'],
        'words("#said")',
        ["cute is the fastest", "Measured as asked: T=512"],
    ),
    "Qwen3 layer at T=512": (
        ['set("bench", "layer")', f'set("model", "{next(iter(MODELS))}")', 'set("tokens", "512")'],
        'words("#answer")',
        ["Measured as asked: T=512", "120.0 [118.8, 121.2]"],
    ),
    "DeepSeek-V3 layer": (
        ['set("bench", "layer")', 'set("model", "deepseek-v3")', 'set("tokens", "4096")'],
        'words("#answer")',
        ["The nearest cell is T=8192, H=7168", "1 octave away", "900 [891, 909]"],
    ),
    "cost of skew for my shape": (
        ['set("bench", "layer")', f'set("model", "{next(iter(MODELS))}")', 'set("tokens", "512")'],
        'words("#over-skew")',
        ["skew 1.5: 1.50x [1.47, 1.53]"],
    ),
    "loss per training second": (
        [],
        'further("per second of training").innerText',
        ["switch_top1 2.0500 ± 0.6353 in 0.500 s; softk 1.0500 ± 0.6353 in 2.00 s"],
    ),
    "what changed since another run": (
        [],
        'further("changed since").querySelector("a").getAttribute("href")',
        ["compare-before.html"],
    ),
    "the T where one overtakes another": (
        ['set("bench", "gate")', f'set("model", "{next(iter(MODELS))}")'],
        'words("#changes")',
        ["cute overtakes triton between T=64 and T=512."],
    ),
    "how to reproduce a row": (
        ['visit("#rows?filter=bench%3Dgate+tokens%3D64+implementation%3Dcute")', 'click("#rows .open")'],
        'words("tr.detail")',
        ["moe-routing-bench measure gate --implementations cute", "2 samples"],
    ),
    "bits lost at capacity factor 1.0": (
        [],
        'further("capacity factor of 1").innerText',
        [
            "least: softk with and without the limit are",
            "most: switch_top1 with and without the limit are",
            "n = 2 seeds",
        ],
    ),
    "gap to hardware per stage": (
        ['visit("#figure-limits")'],
        'chart("limits").innerText',
        ["floor that binds", "triton", "cute"],
    ),
    "backward cost": (
        [],
        'further("backward pass").innerText',
        [
            "cute takes 300.0 µs [299.0, 301.0] forward and backward, of which the backward pass takes 180 µs, 1.5x the 120 µs of the layer alone."
        ],
    ),
    "why a row is suspect": (
        [f'visit("#row-{SUSPECT}")'],
        f'document.querySelector("#row-{SUSPECT}").nextElementSibling.innerText',
        ["ceilings drifted 3 %"],
    ),
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """What the page says to each question, from the page as it opens."""
    out = tmp_path_factory.mktemp("page") / "index.html"
    (out.parent / "compare-before.html").touch()
    render(TABLE, {name: out.with_name(f"{name}.svg") for name in FIGURES}, out, TRAINED, models=MODELS)
    parts = [f"opening(); {'; '.join(actions)}; found.push({place});" for actions, place, _ in QUESTIONS.values()]
    found = asked(out, f"{HELP} const found = []; {' '.join(parts)} return found;")
    return dict(zip(QUESTIONS, found, strict=True))


@pytest.mark.parametrize("question", QUESTIONS)
def test_is_answered_within_three_actions(question, answered):
    actions, _, wanted = QUESTIONS[question]
    assert len(QUESTIONS) == 12 and len(actions) <= 3
    for text in wanted:
        assert text in answered[question]
