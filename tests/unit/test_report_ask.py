"""Questions to a report in a real browser: which cell answers, what its rows and stored verdicts say, the address, the form."""

import json

import pytest
from rows import frame, one

from browser import asked
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.report.render import render
from moe_routing_bench.report.row_data import row_id
from moe_routing_bench.report.script_data import questions

pytestmark = pytest.mark.slow

QWEN = {
    "hidden": 2048,
    "intermediate": 768,
    "experts": 128,
    "top_k": 8,
    "router": "softmax_topk_renorm",
    "activation": "swiglu",
}
DEEPSEEK = {
    "hidden": 7168,
    "intermediate": 2048,
    "experts": 256,
    "top_k": 8,
    "router": "deepseek_v3",
    "activation": "swiglu",
}
MODELS = {"qwen3-30b-a3b": QWEN, "deepseek-v3": DEEPSEEK}
GATE = {
    "experts": 128,
    "top_k": 8,
    "router": "softmax_topk_renorm",
    "dtype": "bf16",
    "phase": "prefill",
    "seed": 17,
    "timer": "cuda_graph",
    "graph_node_us": 1.0,
    "roofline_us": 0.5,
}
LAYER = {name: QWEN[name] for name in ("hidden", "intermediate", "experts", "top_k", "router", "activation")} | {
    "dtype": "bf16",
    "packed": "bf16",
    "weights": "bf16",
    "layout": "compact",
    "sampler": "exact",
    "phase": "prefill",
    "seed": 17,
    "skew": 0.0,
    "timer": "cuda_graph",
    "graph_node_us": 1.0,
    "roofline_us": 90.0,
}


def ran(bench, cell, implementation, us, verdict=None, other=None, ratio=None, **values):
    """A row with an interval of 1 % to both sides, and what is stored of it against the best other."""
    against = (
        {}
        if ratio is None
        else {
            "best_other": other,
            "best_speedup": ratio,
            "best_speedup_ci_low": ratio * 0.99,
            "best_speedup_ci_high": ratio * 1.01,
        }
    )
    found = {"median_us": us, "ci_low_us": us * 0.99, "ci_high_us": us * 1.01, "best_verdict": verdict} | against
    return one(bench, implementation, **found | {"cell": cell} | values)


TABLE = frame(
    ran("gate", "g64", "triton", 2.0, "faster", "cute", 1.25, tokens=64, **GATE),
    ran("gate", "g64", "cute", 2.5, "slower", "triton", 0.8, tokens=64, **GATE),
    ran("gate", "g512", "cute", 2.4, "faster", "triton", 1.15, tokens=512, **GATE),
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
        suspect=True,
        suspect_reason="ceilings drifted 3 %",
    ),
    ran("gate", "g512", "torch", 26.0, "slower", "cute", 0.1, tokens=512, **GATE, converged=False, cold=False),
    one(
        "gate",
        "quack",
        cell="g512",
        tokens=512,
        **GATE,
        status="unsupported",
        reason="k is <img src=x> no multiple of 4",
    ),
    ran("layer", "l0", "cute_gather", 120.0, None, "cute", 1.01, tokens=4096, **LAYER),
    ran("layer", "l0", "cute", 121.2, None, "cute_gather", 0.99, tokens=4096, **LAYER),
    ran("layer", "l1", "cute_gather", 180.0, "faster", "cute", 1.5, tokens=4096, **LAYER | {"skew": 1.5}),
    ran("layer", "l1", "cute", 270.0, "slower", "cute_gather", 0.67, tokens=4096, **LAYER | {"skew": 1.5}),
    ran(
        "layer", "l2", "cute_gather", 1.0, "faster", "cute", 1.5, tokens=4096, **LAYER | {"skew": 2.0}, gpu_uuid="GPU-2"
    ),
)
IDS = [row_id(record) for record in TABLE.to_dict("records")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "index.html"
    render(TABLE, {}, out, models=MODELS, run="mine")
    return out


@pytest.fixture
def ask(page, tmp_path):
    return lambda script, **options: asked(page, script, **options)


@pytest.fixture(scope="module")
def pure(page, tmp_path_factory):
    """What the page's functions make of hand-made rows, by name: one browser for all of them."""
    parts = ", ".join(f"{name}: (() => {{ {script} }})()" for name, script in SCRIPTS.items())
    return asked(page, f"return {{{parts}}}")


AXES = [
    {"name": "tokens", "scale": "log", "default": None, "follows": ""},
    {"name": "skew", "scale": "linear", "default": 0, "follows": ""},
    {"name": "capacity_factor", "scale": "log", "default": None, "follows": ""},
    {"name": "dtype", "scale": "name", "default": "bf16", "follows": ""},
    {"name": "packed", "scale": "name", "default": None, "follows": "dtype"},
    {"name": "model", "scale": "name", "default": None, "follows": ""},
]
PLAIN = {"tokens": 1024, "skew": 0, "capacity_factor": None, "dtype": "bf16", "packed": "bf16"}
RULE = {"far": 2, "octaves": 1, "of": {"layer": ["router"]}}
# question, axes of the only cell, [(axis, octaves)]; none where the axis must match
GAPS = (
    (PLAIN, PLAIN, []),
    ({"tokens": 512}, PLAIN, [["tokens", 1]]),
    ({"tokens": 8192, "skew": 1.5}, PLAIN, [["tokens", 3], ["skew", 1.5]]),
    ({"capacity_factor": 2}, PLAIN, [["capacity_factor", None]]),
    ({"capacity_factor": 2}, PLAIN | {"capacity_factor": 1}, [["capacity_factor", 1]]),
    ({"capacity_factor": None}, PLAIN | {"capacity_factor": 1}, [["capacity_factor", None]]),
    ({"dtype": "fp32"}, PLAIN, [["dtype", None]]),
    ({"packed": None}, PLAIN, []),
    ({"packed": None}, PLAIN | {"packed": "fp8_row"}, [["packed", None]]),
    ({"skew": 3}, {"tokens": 1024}, []),
    ({"model": "a"}, {"tokens": 1024, "model": "b"}, [["model", None]]),
    ({}, PLAIN | {"dtype": "fp32"}, []),
)


def row(implementation, us, **values):
    """A row as the page's functions take it."""
    missing = (
        "baseline",
        "verdict",
        "speedup",
        "best_other",
        "best_verdict",
        "best_speedup",
        "speedup_ci_low",
        "speedup_ci_high",
        "best_speedup_ci_low",
        "best_speedup_ci_high",
    )
    base = {"status": "ok", "card": "GPU-1", "ci_low_us": us and us - 1, "ci_high_us": us and us + 1}
    return dict.fromkeys(missing) | base | {"implementation": implementation, "median_us": us} | values


def cell(tokens, *rows, **values):
    return {"bench": "gate", "axes": {"tokens": tokens, "dtype": "bf16"} | values, "rows": list(rows)}


TWO = [row("a", 1), row("b", 2)]
NEAR = [
    cell(64, row("a", None, status="crashed")),
    cell(256, row("a", 1)),
    cell(256, *TWO),
    cell(256, *TWO, dtype="fp32"),
    cell(4096, *TWO),
]


def told(verdict, ratio=1.5):
    return {
        "best_other": "b",
        "best_verdict": verdict,
        "best_speedup": ratio,
        "best_speedup_ci_low": 1.25,
        "best_speedup_ci_high": 2,
    }


def wins(tokens, winner, loser):
    return cell(tokens, row(winner, 1, **told("faster") | {"best_other": loser}), row(loser, 2))


BASE = {"baseline": "c", "verdict": "faster", "speedup": 4, "speedup_ci_low": 2, "speedup_ci_high": 8}
PAIRS = [
    (row("a", 1, **told("faster")), row("b", 2)),
    (row("b", 2), row("a", 1, **told("faster"))),
    (row("d", 3, **BASE), row("c", 9)),
    (row("c", 9), row("d", 3, **BASE)),
    (row("b", 2, best_other="a", best_speedup=0.5), row("d", 3, best_other="a", best_speedup=0.3)),
    (row("a", 1, **told(None)), row("b", 2)),
]
FIRST = [
    *(cell(1, row("a", 1, **told(name)), row("b", 2)) for name in ("faster", "same", "undecided", "slower", None)),
    cell(1, row("a", 1)),
]
TIE = cell(256, row("a", 1, **told("same")), row("b", 2))
RUNS = [
    [wins(64, "a", "b"), wins(512, "a", "b"), TIE],
    [wins(64, "a", "b"), TIE, wins(512, "b", "a"), wins(4096, "a", "b")],
    [wins(64, "a", "b"), wins(512, "c", "a")],
    [wins(64, "a", "b")],
    [TIE, cell(512, row("a", 1), row("b", 2))],
    [wins(64, "a", "b"), cell(512, *wins(512, "b", "a")["rows"], dtype="fp32")],
    [wins(64, "a", "b"), wins(512, "a", "b"), wins(512, "a", "b")],
    [wins(64, "a", "b"), wins(512, "b", "a"), wins(512, "a", "b")],
]
NODE = {"timer": "cuda_graph", "graph_node_us": 2, "roofline_us": 1}
LIMITS = [
    row("a", 4, **NODE | {"card": "host x"}),
    row("a", 4, **NODE),
    row("a", 4, **NODE | {"roofline_us": 3}),
    row("a", 4, **NODE | {"timer": "events"}),
    row("a", 4, **NODE | {"graph_node_us": None, "roofline_us": None}),
]
SKEWED = [
    cell(1, row("a", 10), skew=0),
    cell(1, row("a", 30), skew=2),
    cell(1, row("a", 20), skew=1),
    cell(1, row("a", 20, card="GPU-2"), skew=3),
    cell(2, row("a", 20), skew=1),
    cell(1, row("b", 1), skew=4),
]
QUIET = {"suspect": False, "roofline_us": None, "card": "host x"}
NOTED = [
    cell(1, row("a", 1, **QUIET)) | {"bench": "layer"},
    cell(
        1,
        row("a", 2, suspect=True, suspect_reason="drift", roofline_us=1),
        row("b", None, **QUIET | {"status": "crashed", "reason": "a fault"}),
    ),
    cell(1, row("a", 1, **QUIET | told(None)), row("b", 2, **QUIET), row("c", 3, **QUIET | {"converged": False}))
    | {"bench": "layer"},
    cell(1, row("a", 1, **QUIET | told("faster")), row("b", 2, **QUIET | {"converged": True})) | {"bench": "layer"},
]
FULL = [
    cell(64, *TWO, row("c", 3), dtype="fp32"),
    cell(64, *TWO),
    cell(512, row("a", 1)),
    cell(4096, row("a", None)),
    cell(64, *TWO, phase="decode"),
]
SCRIPTS = {
    "fullest": f"const cells = {json.dumps(FULL)}; return [cells, cells.slice(2), cells.slice(3, 4)].map(some => cells.indexOf(fullest(some)))",
    "sentence": f"return {json.dumps(FIRST)}.map(cell => {{ parts([{{cell, gaps: []}}]); return byId('said').querySelector('strong').textContent; }})",
    "gaps": f"return {json.dumps(GAPS)}.map(([question, axes]) => gapsOf({{bench: 'gate', axes}}, question, {json.dumps(AXES)}, {json.dumps(RULE)}).map(gap => [gap.name, gap.octaves]))",
    "sizes": 'return [spell("tokens", 16384), spell("capacity_factor", 1.25), spell("capacity_factor", null)];',
    "order": f"""const cells = {json.dumps(NEAR)}, order = question => nearest(cells, question, {json.dumps(AXES)}, {json.dumps(RULE)}).map(one => cells.indexOf(one.cell));
        return [order({{bench: "gate", tokens: 64}}), order({{bench: "gate", tokens: 64, dtype: "fp32"}}), order({{bench: "layer", tokens: 64}})];""",
    "notes": f"return {json.dumps(NOTED)}.map(cell => notes(cell))",
    "silent": f"const [cell] = {json.dumps(SKEWED)}; return [overWorkload({{...cell, axes: {{tokens: 1, skew: 9}}}}, cell.rows[0]).length, overWorkload(cell, cell.rows[0]).length, nextNearest([]).textContent, nextNearest([{{cell, gaps: []}}]).textContent]",
    "followed": f"""return [{{packed: null}}, {{packed: "fp8_row"}}].map(question => gapsOf({{axes: {json.dumps(PLAIN | {"packed": None})}}}, question, {json.dumps(AXES)}, {json.dumps(RULE)}).map(gap => [gap.name, gap.asked, gap.held]))""",
    "times": "return [[1.0815, 1.0808, 1.0822], [1.5, 1.4, 1.6], [1.003, 1.001, 1.005], [0.98271, 0.96539, 1.0003], [2, 2, 2], [2, null, null], [140.2, 17.21, 1092.6], [999.6, 999.55, 1e5]].map(([ratio, low, high]) => timesText({ratio, low, high}))",
    "stored": f"return {json.dumps(PAIRS)}.map(pair => stored(...pair)).map(found => found && [found.verdict, found.ratio, found.low, found.high])",
    "winners": f"return {json.dumps(FIRST)}.map(cell => [winner(cell).names.join(), winner(cell).told, winner(cell).said])",
    "changes": f'return {json.dumps(RUNS)}.map(cells => along(cells, cells[0]).changes.join(" "))',
    "limits": f"return {json.dumps(LIMITS)}.map(limitOf).map(one => one && [one.share, one.binds])",
    "costs": f"const cells = {json.dumps(SKEWED)}; return costs(cells, cells[0], 'skew', 'a').map(one => [one.held, one.ratio, one.low, one.high])",
}


def test_how_far_a_cell_is(pure):
    """Octaves between sizes, units of skew; names and limits must match; what a bench does not read says nothing."""
    assert pure["gaps"] == [wanted for *_, wanted in GAPS]


def test_the_nearest_cell(pure):
    """Of equals that with defaults, then that of most implementations; a cell without a time and another bench are no answer."""
    assert pure["order"] == [[2, 1, 3, 4], [3, 2, 1, 4], []]


def test_what_is_stored_of_a_pair(pure):
    """The row's own, that of the other turned round, that against the baseline; nothing is made up."""
    own, base = ["faster", 1.5, 1.25, 2], ["faster", 4, 2, 8]
    assert pure["stored"] == [
        own,
        ["slower", 1 / 1.5, 0.5, 0.8],
        base,
        ["slower", 0.25, 0.125, 0.5],
        None,
        [None, *own[1:]],
    ]


def test_who_is_the_fastest(pure):
    """One name only by a stored verdict."""
    assert pure["winners"] == [
        ["a", True, "a is the fastest, and faster than the best other, b"],
        ["a,b", False, "a and b are the same within the noise"],
        ["a,b", False, "the measurement does not tell a from b"],
        ["a,b", False, "a has the lowest median, and b is the faster of the two in pairs"],
        ["a,b", False, "a has the lowest median; whether it is faster than b has no stored verdict"],
        ["a", False, "a is the only implementation with a time"],
    ]


def test_the_cell_to_begin_with(pure):
    """Of the sizes with most numbers of tokens the cell of most implementations; none where nothing has a time."""
    assert pure["fullest"] == [1, 4, -1]


def test_a_sentence_begins_with_a_capital_but_a_name_stays(pure):
    fastest, _, untold, *_ = pure["sentence"]
    assert fastest.startswith("a is the fastest") and untold == "The measurement does not tell a from b."


def test_where_the_fastest_changes(pure):
    """Between cells that both ran in, equal but for the tokens, each with a verdict."""
    alone = "Only one number of tokens was measured here: where another overtakes cannot be said."
    assert pure["changes"] == [
        "a is the fastest by verdict at T=64, 512: no change was measured. No verdict names one winner at T=256.",
        "b overtakes a between T=64 and T=512. a overtakes b between T=512 and T=4096. No verdict names one winner at T=256.",
        "The fastest is a at T=64 and c at T=512, but c was not measured at T=64: no change is shown.",
        alone,
        "No verdict names one winner at any T.",
        alone,
        "a is the fastest by verdict at T=64, 512: no change was measured.",
        "a is the fastest by verdict at T=64: no change was measured. No verdict names one winner at T=512.",
    ]


def test_the_floor_that_binds(pure):
    """The roofline or a node of a graph; on a CPU none."""
    assert pure["limits"] == [None, [0.5, "node"], [0.75, "roofline"], [0.25, "roofline"], None]


def test_notes_below_an_answer(pure):
    """The limit where a row has one, what the marks and the missing verdicts mean, and what has no time; each only where there is such a thing."""
    first = "A ratio above 1: the row is the faster one."
    assert pure["notes"] == [
        [first, "", "", "", "", "", ""],
        [
            f"{first} The limit is the larger of the roofline and of what an empty node of a CUDA graph takes.",
            " Suspect: drift.",
            "",
            "",
            "",
            "",
            " Without a time: b crashed: a fault.",
        ],
        [
            first,
            "",
            " Not converged: a limit was reached before the interval was as narrow as asked.",
            "",
            " No verdict: too few implementations of the run were entered twice to know its noise.",
            " Not stored: rows hold their ratio to the best other and to the baseline; ⇄ in two rows of the table compares these.",
            "",
        ],
        [first, "", "", "", "", "", ""],
    ]


def test_what_has_no_other_cell_says_nothing_of_it(pure):
    """Of skew and capacity, where no cell differs in them alone; and of the next nearest."""
    assert pure["silent"] == [
        0,
        0,
        "No other cell of this stage was measured.",
        "Next nearest: T=1, dtype bf16 (as asked)",
    ]


def test_a_size_among_others_has_no_comma_of_its_own(pure):
    """T=16,384, H=2048 was a list of three."""
    assert pure["sizes"] == ["16384", "1.25", "none"]


def test_what_skew_costs(pure):
    """On one card, in cells equal but for it; the interval holds those of both cells."""
    assert pure["costs"] == [
        [1, 2, pytest.approx(19 / 11), pytest.approx(21 / 9)],
        [2, 3, pytest.approx(29 / 11), pytest.approx(31 / 9)],
    ]


SEEN = """const seen = () => ({said: document.querySelector("#said").innerText, shown: document.querySelector("#shown").innerText, hash: location.hash,
    bottom: document.querySelector("#findings").getBoundingClientRect().bottom, links: [...document.querySelectorAll("#shown td:first-child a")].map(a => a.hash)});
    const set = (name, value) => { const made = document.querySelector(`#question [name=${name}]`); made.value = value;
        made.dispatchEvent(new Event("input", {bubbles: true})); made.dispatchEvent(new Event("change", {bubbles: true})); };"""


def test_an_address_is_a_question(ask):
    """A model and a size by link; the rows with their times, limits, verdicts, marks and reasons, and where the winner changes."""
    found = ask(SEEN + "return seen()", part="ask?bench=gate&model=qwen3-30b-a3b&tokens=512")
    assert (
        found["said"]
        == "cute is the fastest, and faster than the best other, triton. Measured as asked: T=512, E=128, k=8, dtype bf16."
    )
    for text in (
        "cute\t2.400 [2.376, 2.424]\t–\t41.7 % (node)\t1.15x [1.14, 1.16] as fast as triton (faster)\t1.15x [1.14, 1.16] as fast as triton (faster)",
        "triton\t2.760 [2.732, 2.788]\tsuspect\t36.2 % (node)\t0.870x [0.861, 0.879] as fast as cute (slower)\tnot stored",
        "\tnot converged, L2 may be warm\t",
        "Suspect: ceilings drifted 3 %.",
        "L2 may be warm: what calls read",
        "Without a time: quack unsupported: k is <img src=x> no multiple of 4.",
        "cute overtakes triton between T=64 and T=512.",
    ):
        assert text in found["shown"], text
    assert found["bottom"] <= 900, "the findings are on the first screen, too"
    assert (
        found["links"][0] == f"#row-{IDS[2]}"
        and "#ask?bench=gate&tokens=64&experts=128&top_k=8&phase=prefill&dtype=bf16" in found["links"]
    )


def test_caches_that_may_be_warm_are_marked_on_a_gpu_alone(tmp_path):
    """A CPU's caches are never emptied, which the page says once; rows of a GPU that had a cold cache have no mark."""
    rows = [
        ran("gate", f"g{n}", "cute", 2.0, tokens=n, **GATE | {"timer": timer}, cold=cold)
        for n, timer, cold in (
            (64, "cuda_graph", False),
            (512, "events", False),
            (4096, "wall", False),
            (8192, "cuda_graph", True),
        )
    ]
    render(frame(*rows), {}, tmp_path / "index.html", models=MODELS, run="mine")
    for tokens, marked in ((64, True), (512, True), (4096, False), (8192, False)):
        shown = asked(
            tmp_path / "index.html",
            """return document.querySelector("#shown tbody td:nth-child(3)").innerText""",
            part=f"ask?bench=gate&tokens={tokens}",
        )
        assert shown == ("L2 may be warm" if marked else "–"), tokens


@pytest.mark.parametrize("width", [1440, 1400, 1200])
def test_no_column_of_an_answer_is_cut(ask, width):
    """Beside the findings, and above them in a window that is too narrow for both."""
    script = """return [...document.querySelectorAll("#shown .scroll")].map(box => [box.querySelectorAll("th").length, box.scrollWidth <= box.clientWidth]);"""
    assert ask(script, part="ask?bench=gate&model=qwen3-30b-a3b&tokens=512", width=width) == [[6, True], [6, True]]


LONGEST = [
    max((one.name for one in BENCHES["layer"].implementations), key=len),
    "an_implementation_of_somebody_else_whose_name_never_ends",
    "cute",
]


@pytest.mark.parametrize("width", [1440, 1024])
def test_no_column_of_an_answer_is_cut_where_all_is_long(tmp_path, width):
    """Names, times in tens of thousands, both marks, verdicts with an interval; names of usual length keep to a line."""
    doubts = {"suspect": True, "suspect_reason": "ceilings drifted 3 %", "converged": False, "model": "qwen3-30b-a3b"}
    rows = [
        ran("layer", f"l{t}", name, 47731.0 + i, "undecided", other, 0.9871, tokens=t, **LAYER | doubts)
        for t in (4096, 16384)
        for i, (name, other) in enumerate(zip(LONGEST, LONGEST[1:] + LONGEST[:1], strict=True))
    ]
    won = [
        ran("gate", "g64", "triton", 2.0, "faster", "cute", 1.25, tokens=64, **GATE),
        ran("gate", "g64", "cute", 2.5, "slower", "triton", 0.8, tokens=64, **GATE),
    ]
    render(frame(*rows, *won), {}, out := tmp_path / "index.html", models=MODELS)
    script = """if (!document.querySelector("#findings li")) throw "the answer has the whole window"; const boxes = [...document.querySelectorAll("#shown .scroll")], first = boxes[0].querySelector("tbody a").getClientRects().length;
        return [boxes.map(box => [box.querySelectorAll("th").length, box.scrollWidth <= box.clientWidth]), first, boxes[0].innerText];"""
    columns, lines, said = asked(out, script, width=width, part="ask?bench=layer&model=qwen3-30b-a3b&tokens=4096")
    assert columns == [[6, True], [6, True]] and lines == 1 and all(name in said for name in LONGEST)


def test_rows_of_before_an_axis_that_follows_another(pure):
    """Nothing was asked of it, so it is as what it follows, which is no difference; another value is one."""
    assert pure["followed"] == [[], [["packed", "fp8_row", "bf16"]]]


def test_digits_tell_an_interval_s_ends_from_each_other_and_from_one(pure):
    assert pure["times"] == [
        "1.081x [1.081, 1.082]",
        "1.50x [1.40, 1.60]",
        "1.003x [1.001, 1.005]",
        "0.983x [0.965, 1.00]",
        "2.00x [2.00, 2.00]",
        "2.00x",
        "140x [17.2, 1093]",
        "1000x [1000, 100000]",
    ]


def test_a_form_is_a_question(ask):
    """By keyboard alone: every control has a label, hidden ones are those that the stage does not read. What was not measured is said."""
    script = (
        SEEN
        + """const first = seen(), found = {first};
        set("model", "qwen3-30b-a3b"); set("tokens", "512"); found.far = seen();
        set("skew", "1.5"); set("tokens", "4096"); found.skewed = seen();
        set("experts", "64"); found.own = [document.querySelector("[name=model]").value, seen().said];
        set("bench", "gate");
        found.names = [...document.querySelectorAll("#question input, #question select")].filter(made => !made.closest("label").hidden && !made.closest("details")).map(made => made.name);
        found.unlabelled = [...document.querySelectorAll("#question input, #question select")].filter(made => !made.labels[0]?.firstChild.textContent.trim() || made.tabIndex).length;
        set("bench", "combine"); found.none = seen();
        location.hash = "#ask?bench=layer&model=deepseek-v3&tokens=4096&skew=0"; followQuestion(); found.deepseek = seen();
        return found;"""
    )
    found = ask(script)
    assert found["first"]["hash"] == "" and "Measured as asked: T=4096, H=2048, I=768" in found["first"]["said"]
    assert (
        "no stored verdict" in found["first"]["said"]
        and "1.01x [1.00, 1.02] as fast as cute (no verdict)" in found["first"]["shown"]
    )
    assert (
        "at another skew, over its time here (skew 0), on the same card: skew 1.5: 1.50x [1.47, 1.53]"
        in found["first"]["shown"]
    )
    assert found["far"]["said"].startswith(
        "Not measured: the nearest cell of this run has T 4096, not 512, 3 octaves away."
    )
    assert "µs" not in found["far"]["shown"] and found["far"]["links"] == [], "beyond two octaves no cell answers"
    assert "model=qwen3-30b-a3b" in found["far"]["hash"] and "tokens=512" in found["far"]["hash"]
    assert found["skewed"]["said"].startswith("cute_gather is the fastest") and "skew 1.5" in found["skewed"]["said"]
    assert found["own"][0] == "" and "E 128, not 64, 1 octave away" in found["own"][1]
    assert (
        found["names"] == ["bench", "model", "tokens", "experts", "top_k", "phase", "dtype"] and not found["unlabelled"]
    )
    assert (
        found["none"]["said"] == "Not measured: this run has no row of combine with a time."
        and not found["none"]["shown"]
    )
    assert all(
        text in found["deepseek"]["said"]
        for text in (
            "Not measured: the nearest cell of this run has",
            "H 2048, not 7168, 1.8 octaves",
            "router softmax_topk_renorm, not deepseek_v3",
        )
    )


def test_what_an_address_asks_in_vain_is_said(ask):
    """A model or a name that the report does not know, or no number; until the form is used. Of a size that cannot be, nothing is answered."""
    part = "ask?bench=gate&model=newer-model&tokens=abc&experts=128&top_k=8&dtype=bf16&nonsense=1"
    said, after = ask(
        SEEN + """const first = seen().said; set("tokens", "64"); return [first, seen().said];""", part=part
    )
    end = " Left out of the question, because this report does not know it: model newer-model, tokens abc, nonsense 1."
    assert said.endswith(end) and "Left out" not in after
    for tokens in ("0", "-5"):
        said, shown = ask(SEEN + f"""set("tokens", "{tokens}"); return [seen().said, seen().shown];""")
        assert said == f"T cannot be {tokens}." and not shown
    assert "Left out" not in ask(
        SEEN + "return seen().said", part="ask?bench=layer&model=qwen3-30b-a3b&skew=0&capacity_factor=&weights=bf16"
    )


def test_a_model_is_a_label_of_sizes_but_where_it_is_run_whole():
    reads = questions(TABLE, MODELS)["reads"]
    assert "model" in reads["model"] and not any("model" in read for name, read in reads.items() if name != "model")


def test_title_and_heading_name_the_run(page):
    text = page.read_text()
    assert "<title>moe-routing-bench: –, run mine</title>" in text and "on –, run mine</h1>" in text
