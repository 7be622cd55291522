"""`ask` on the published rows: the nearest measured cell of all runs answers, or what is missing is said. Nothing is interpolated."""

import json
import math
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

import moe_routing_bench
from moe_routing_bench.answers import around, nearest, pairs, stored
from moe_routing_bench.answers.ask import ask
from moe_routing_bench.answers.question import asked
from moe_routing_bench.answers.said import lines
from moe_routing_bench.packages import PACKAGE
from moe_routing_kernels.errors import UserError

RESULTS = PACKAGE.parents[1] / "results"


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch):
    monkeypatch.chdir(PACKAGE.parents[1])


def stored_rows(run, **values):
    """The rows with a time of a run that have these values, the fastest first, straight from its file."""
    rows = pq.read_table(RESULTS / run / "measurements.parquet").to_pylist()
    rows = [row for row in rows if row["status"] == "ok" and all(row[name] == value for name, value in values.items())]
    return sorted(rows, key=lambda row: row["median_us"])


def test_the_cell_of_another_run_answers_where_it_is_the_nearest():
    """A layer at T=64 was answered from T=8192, and a quantised one at T=1 from T=16384, because each report knew its own rows alone."""
    for model, tokens in (("deepseek-v3", 64), ("qwen3-30b-a3b", 1)):
        answer = ask(model, tokens=tokens)
        row = stored_rows("nvidia-h200.decode", bench="layer", model=model, tokens=tokens)[0]
        assert answer["kind"] == "measured" and answer["nearest"]["run"] == "nvidia-h200.decode"
        assert answer["nearest"]["octaves"] == 0
        assert answer["fastest"]["median_us"] == row["median_us"]
        assert answer["fastest"]["implementation"] == row["implementation"]
    answer = ask("qwen3-30b-a3b", tokens=1, weights="int4")
    assert answer["nearest"]["bench"] == "experts" and answer["nearest"]["axes"]["tokens"] == 1
    assert "layer" in answer["instead_of"][0], "another bench answers, and that is said"


def test_ours_is_compared_with_the_fastest_of_other_packages():
    """A sibling of ours is no news; where ours is slower, the ratio says how fast it is, not 'slower by'."""
    answer = ask("qwen3-30b-a3b", tokens=64)
    rows = stored_rows("nvidia-h200.decode", bench="layer", model="qwen3-30b-a3b", tokens=64)
    ours = pairs.ours(stored.Cell("", "layer", "", "", {}, rows))
    rival = next(row for row in rows if row["implementation"] not in ours)
    assert answer["against"]["other"] == rival["implementation"]
    assert answer["against"]["ratio"] == pytest.approx(rival["median_us"] / answer["ours"]["median_us"], rel=0.02)
    slower = ask("qwen3-30b-a3b", tokens=4096, bench="layer")
    assert slower["against"]["ratio"] < 1
    assert f"{slower['against']['ratio']:.3g}x" in slower["against"]["text"]
    assert f"as fast as {slower['against']['other']}" in slower["against"]["text"]


@pytest.mark.parametrize(
    ("axes", "missing"),
    [
        ({"model": "deepseek-v3", "tokens": 512}, "octaves away"),
        ({"model": "gpt-oss-120b", "weights": "nvfp4"}, "not nvfp4"),
        ({"model": "deepseek-v3", "ranks": 8}, "ranks 2, not 8"),
        ({"model": "deepseek-v3", "ep": 8}, "ep 1, not 8"),
        ({"model": "qwen3-30b-a3b", "platform": "nvidia-b200"}, "no published rows of nvidia-b200"),
        ({"bench": "training", "model": "qwen3-30b-a3b", "dtype": "fp16"}, "dtype bf16, not fp16"),
    ],
)
def test_refused_with_what_is_missing_and_how_to_measure_it(axes, missing):
    answer = ask(**axes)
    assert answer["kind"] == "refused" and "fastest" not in answer
    assert missing in " ".join(answer["missing"])
    assert answer["command"].startswith("moe-routing-bench measure ")
    text = "\n".join(lines(answer))
    assert answer["command"] in text and answer["needs"] in text and " µs" not in text


@pytest.mark.parametrize(
    ("axes", "needs"),
    [
        ({"model": "nemotron-3-super-120b"}, "a bench of such layers"),
        ({"model": "qwen3-30b-a3b", "phase": "training", "weights": "fp8"}, "`training` that takes weights"),
    ],
)
def test_what_no_command_measures_has_none(axes, needs):
    answer = ask(**axes)
    assert answer["kind"] == "refused" and answer["command"] is None and needs in answer["needs"]
    assert "moe-routing-bench" not in "\n".join(lines(answer))


def test_the_fastest_of_some_implementations_is_not_told_apart_by_a_verdict_on_all():
    """Stored verdicts are between all rows of a cell; where one is left out, whether the rest can be told apart is not known."""
    every = ask("qwen3-30b-a3b", tokens=64)["over_tokens"]
    some = ask("qwen3-30b-a3b", tokens=64, implementations=("triton",))["over_tokens"]
    assert {step["told_apart"] for step in every} <= {True, False} and {step["told_apart"] for step in some} == {None}


@pytest.mark.parametrize("ranks", ["tp", "ep"])
def test_experts_alone_do_not_answer_for_the_layer_of_a_rank(ranks):
    assert asked("qwen3-30b-a3b", None, (), None, {"tokens": 64}).benches == ("layer", "experts")
    assert asked("qwen3-30b-a3b", None, (), None, {"tokens": 64, ranks: 2}).benches == ("layer",)


def test_several_gpus_are_asked_for_whole_layers_first():
    """And for a training step where that is asked; what a layer consists of answers where no layer is near."""
    order = asked("qwen3-30b-a3b", None, (), None, {"tokens": 64, "ranks": 2}).benches
    assert order[0] == "ep_layer" and {"dispatch", "ep_exchange"} < set(order) and "ep_training" not in order
    step = asked("qwen3-30b-a3b", None, (), None, {"tokens": 64, "ranks": 2, "phase": "training"})
    assert step.benches == ("ep_training",)
    near, far = (ask(name, tokens=8192, ranks=2) for name in ("qwen3-30b-a3b", "deepseek-v3"))
    assert near["nearest"]["bench"] == "ep_layer" and near["instead_of"] == []
    assert far["nearest"]["bench"] == "ep_exchange" and far["ours"]["implementation"].startswith("cute_push")


def test_one_difference_says_its_distance_once_and_one_reason_is_said_once():
    text = "\n".join(lines(ask("qwen3-30b-a3b", tokens=64, skew=1.5)))
    assert text.count("1.5 octaves away") == 1 and "T=64 (skew 0, not 1.5 (1.5 octaves away))" in text
    assert "cute_quack, cute_quack_gather, sonicmoe have no time: crashed: " in text and text.count("IKET") == 1


def test_a_changed_model_is_measured_by_its_sizes():
    """`measure` takes a model or sizes, not both."""
    command = ask("qwen3-30b-a3b", bench="layer", top_k=1, tokens=64)["command"]
    assert "--model" not in command and "--top-k 1" in command and "--experts 128" in command


def test_beyond_two_octaves_no_cell_answers():
    """The limit is on the sum of all differences; a format or a phase is no distance."""
    cells = stored.cells(["nvidia-h200.decode"], ("layer",))
    whole = dict(cells[0].axes)
    for factor, octaves in ((1, 0), (2, 1), (4, 2), (8, 3)):
        asked = whole | {"tokens": whole["tokens"] * factor}
        assert sum(gap.octaves for gap in nearest.gaps(cells[0], asked)) == octaves
    both = whole | {"tokens": whole["tokens"] * 2, "experts": whole["experts"] * 2, "skew": 0.5}
    assert sum(gap.octaves for gap in nearest.gaps(cells[0], both)) == 2.5
    for name, other in (("dtype", "fp32"), ("weights", "mxfp4"), ("phase", "prefill"), ("capacity_factor", 1.0)):
        (gap,) = nearest.gaps(cells[0], whole | {name: other})
        assert gap.octaves == math.inf


def test_a_cell_at_two_octaves_answers_and_none_beyond(monkeypatch):
    cells = stored.cells(["nvidia-h200.decode"], ("layer",))
    (cell,) = (one for one in cells if one.timed and one.key.startswith("qwen3-30b-a3b-decode-T8-"))
    monkeypatch.setattr(stored, "cells", lambda *_: [cell])
    tokens = cell.axes["tokens"]
    answers = {times: ask("qwen3-30b-a3b", bench="layer", tokens=times * tokens, phase="decode") for times in (4, 5)}
    assert answers[4]["kind"] == "measured" and answers[4]["nearest"]["octaves"] == 2
    assert answers[5]["kind"] == "refused"


def test_two_medians_are_told_apart_beyond_the_noise_floor_alone():
    """Of rows without a stored ratio: by intervals that do not meet, and a gap above the floor of the run."""

    def row(name, us, floor):
        names = ("gpu_uuid", "best_other", "best_speedup", "best_verdict", "baseline", "speedup", "verdict")
        ends = {"ci_low_us": us * 0.999, "ci_high_us": us * 1.001}
        return dict.fromkeys(names) | {"implementation": name, "median_us": us, "noise_floor": floor} | ends

    for floor, verdicts in ((0.01, ("faster", "slower")), (0.03, ("undecided",) * 2), (None, (None, None))):
        fast, slow = row("a", 10.0, floor), row("b", 10.2, floor)
        assert (pairs.pair(fast, slow).verdict, pairs.pair(slow, fast).verdict) == verdicts
    assert pairs.pair(fast, slow).ratio == pytest.approx(1.02)


def test_a_format_is_of_use_where_its_worst_result_is(monkeypatch):
    """Of results of normal weights with these activations; those with outliers say nothing of them."""
    common = {"weights": "int4_g128", "activations": "bf16", "drawn": "normal", "weight_snr_db": 20.0}
    rows = [common | {"output_snr_db": snr} for snr in (25.0, 9.0, 30.0)]
    rows += [
        rows[0] | {"output_snr_db": 1.0, "drawn": "outliers"},
        rows[0] | {"output_snr_db": 2.0, "activations": "x"},
    ]
    monkeypatch.setattr(stored, "accuracy", lambda _: rows)
    loss = around.loss("int4_g128", "bf16", ["run"])
    assert (loss["output_snr_db"], loss["usable"]) == (9.0, False)


def test_the_day_of_a_cell_is_that_of_its_last_row():
    days = ["2026-11-27T23:59:00", "2026-11-28T00:01:00", None]
    assert stored.Cell("run", "pack", "c", "GPU-1", {}, [{"ended_at": day} for day in days]).day == "2026-11-28"


def test_every_number_of_an_answer_is_a_stored_one():
    answer = ask("qwen3-30b-a3b", tokens=100, phase="decode")
    assert answer["kind"] == "measured" and 0 < answer["nearest"]["octaves"] < 2
    medians = {row["median_us"] for row in stored_rows(answer["nearest"]["run"], cell=answer["nearest"]["cell"])}
    assert {row["median_us"] for row in answer["implementations"]} == medians
    assert "asked T=100, measured T=64" in "\n".join(lines(answer))


def test_a_format_that_loses_everything_is_not_praised():
    answer = ask("qwen3-30b-a3b", tokens=64, weights="int2", bench="experts")
    assert answer["format"]["output_snr_db"] < 0 and answer["format"]["usable"] is False
    assert ask("qwen3-30b-a3b", tokens=64, weights="int4", bench="experts")["format"]["usable"] is True
    text = "\n".join(lines(answer))
    assert f"{answer['format']['output_snr_db']:.1f} dB" in text and "of no use" in text
    kinds = {one["weights"]: one for one in answer["over_formats"]}
    assert kinds["int2_g128"]["loss"]["usable"] is False and kinds["bf16"]["loss"] is None


def test_provenance_and_doubts_are_in_the_answer():
    answer = ask("qwen3-30b-a3b", tokens=4096)
    origin, row = answer["provenance"], stored_rows(answer["nearest"]["run"], cell=answer["nearest"]["cell"])[0]
    assert (origin["driver"], origin["torch"]) == (row["driver"], row["torch_version"])
    assert (origin["commit"], origin["card"]) == (row["git_sha"], row["gpu_name"])
    assert origin["version"] and origin["day"] == row["ended_at"][:10]
    assert origin["older_code"] is None or len(origin["older_code"].split()) <= 15
    marked = [one for one in answer["implementations"] if "not converged" in one["marks"]]
    stored_marked = [
        one for one in stored_rows(answer["nearest"]["run"], cell=row["cell"]) if one["converged"] is False
    ]
    assert {one["implementation"] for one in marked} == {one["implementation"] for one in stored_marked}
    absent = ask("qwen3-30b-a3b", tokens=64)["without_time"]
    assert "sonicmoe" in absent and absent["sonicmoe"].startswith("crashed: ")


def test_suspect_rows_are_marked_with_the_reason():
    found = [
        cell
        for cell in stored.cells(stored.runs()["nvidia-h200"], ("gate", "layer", "experts", "combine", "pack"))
        if cell.timed and cell.timed[0]["suspect"]
    ]
    assert found
    row = found[0].timed[0]
    assert f"suspect: {row['suspect_reason']}" in pairs.marks(row)


def test_the_command_measures_the_same_cell():
    words = ask("qwen3-30b-a3b", tokens=1, weights="int4")["command"].split()
    assert words[:3] == ["moe-routing-bench", "measure", "experts"]
    assert words[words.index("--weights") + 1] == "int4_g128" and words[words.index("--tokens") + 1] == "1"


def test_python_and_terminal_give_the_same_answer():
    answer = moe_routing_bench.ask("qwen3-30b-a3b", tokens=64, weights="int4", bench="experts")
    done = terminal("qwen3-30b-a3b", "--tokens", "64", "--weights", "int4", "--bench", "experts", "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == json.loads(json.dumps(answer))
    printed = terminal("qwen3-30b-a3b", "--tokens", "64", "--weights", "int4", "--bench", "experts").stdout
    assert printed.splitlines() == lines(answer)
    refused = terminal("deepseek-v3", "--tokens", "512")
    assert refused.returncode == 1 and refused.stdout.startswith("Not measured: ")


def terminal(*words):
    return subprocess.run(
        [sys.executable, "-m", "moe_routing_bench.cli", "ask", *words], capture_output=True, text=True, check=False
    )


def test_an_answer_needs_neither_torch_nor_pandas():
    """Both take longer to import than the answer takes."""
    words = ["-X", "importtime", "-m", "moe_routing_bench.cli", "ask", "qwen3-30b-a3b", "--tokens", "64"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "moe_routing_bench.answers.ask" in imported
    assert not imported & {"torch", "pandas", "scipy", "matplotlib", "triton"}


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"model": "my-moe"}, "--models"),
        ({"model": "qwen3-30b-a3b", "weights": "int5"}, "int4"),
        ({"model": "qwen3-30b-a3b", "phase": "decoding"}, "decode"),
        ({"model": "qwen3-30b-a3b", "tokens": 0}, "tokens"),
        ({"model": "qwen3-30b-a3b", "bench": "layers"}, "layer"),
        ({"model": "qwen3-30b-a3b", "token": 3}, "tokens"),
    ],
)
def test_a_mistake_is_one_line_with_a_hint(axes, says):
    with pytest.raises(UserError, match=says) as error:
        ask(**axes)
    assert "\n" not in str(error.value)


def test_a_large_gap_is_told_apart_without_twins():
    """Runs without twins have no noise floor: a gap beyond any that was measured has a verdict, which says what it rests on; a smaller one has none."""
    far = ask("qwen1.5-moe-a2.7b", tokens=128, weights="int4", bench="layer")
    rows = stored_rows(far["nearest"]["run"], cell=far["nearest"]["cell"])
    assert all(row["noise_floor"] is None for row in rows) and far["told_apart"]
    assert far["against"]["assumed"] and far["against"]["verdict"] == "faster"
    text = "\n".join(lines(far))
    assert "is the fastest by more than 11 % (no noise floor: too few twins in the run)" in text
    near = ask("olmoe-1b-7b", phase="training")
    assert not near["told_apart"] and "no verdict: too few twins" in near["sentence"]
    judged = ask("qwen3-30b-a3b", tokens=64)["against"]
    assert judged["verdict"] and not judged["assumed"]


def test_what_would_change_with_k_skew_and_experts_is_measured():
    """Cells that differ in one axis alone, on the same card; the ratio is that of two stored medians; another implementation is not compared."""
    answer = ask(bench="permute", tokens=16384, experts=128)
    place = answer["nearest"]["axes"]
    assert [len(answer[f"over_{name}"]) > 0 for name in around.VARIED].count(True) >= 2
    text = "\n".join(lines(answer))
    for name, label in around.VARIED.items():
        for step in answer[f"over_{name}"]:
            assert step[name] != place[name] and f"at other {label}, over that here" in text
            same = {axis: place.get(axis) for axis in ("tokens", "dtype", "layout", "sampler", *around.VARIED)}
            (there,) = {
                row["median_us"]
                for row in stored_rows(step["run"], bench="permute", implementation=step["implementation"])
                if all(row[axis] == value for axis, value in (same | {name: step[name]}).items() if axis != "sampler")
                and row["capacity_factor"] is place.get("capacity_factor")
            }
            (here,) = {
                row["median_us"]
                for row in stored_rows(answer["nearest"]["run"], cell=answer["nearest"]["cell"])
                if row["implementation"] == step["implementation"]
            }
            assert step["ratio"] == there / here
            assert step["low"] is None or step["low"] <= step["ratio"] <= step["high"]


def test_the_rank_of_a_layer_has_its_share_of_the_width():
    """Rows hold the width of one rank, a question that of the model: published shards answer, and only they."""
    answer = ask("deepseek-v3", tokens=8, tp=8)
    axes = answer["nearest"]["axes"]
    assert (answer["kind"], answer["nearest"]["gaps"], axes["tp"], axes["intermediate"]) == (
        "measured",
        [],
        8,
        2048 // 8,
    )
    assert answer["command"].endswith("--tokens 8 --tp 8") and "--intermediate" not in answer["command"]
    by_sizes = ask(hidden=7168, intermediate=2048, experts=256, top_k=8, tokens=8, tp=8)
    assert by_sizes["nearest"]["axes"]["tp"] == 8 and by_sizes["shard"]["command"] is None
    whole, one = ask("qwen3-30b-a3b", tokens=64), ask("qwen3-30b-a3b", tokens=64, tp=1, ep=1)
    assert (whole["nearest"], whole["shard"], one["shard"]) == (one["nearest"], None, None)
    with pytest.raises(UserError, match="tp: got 3; allowed: a divisor of intermediate=2048"):
        ask("deepseek-v3", tokens=8, tp=3)


@pytest.mark.parametrize(
    ("axes", "kind", "command"),
    [
        ({"tokens": 8, "tp": 8}, "measured", "--gpus 8 --tp 8 --tokens 1"),
        ({"tokens": 100, "ep": 8, "weights": "int4"}, "refused", "--gpus 8 --ep 8 --tokens 13 --weights int4_g128"),
        ({"tokens": 64, "ep": 2, "tp": 8}, "refused", None),
    ],
)
def test_what_is_measured_of_a_rank_and_what_is_modelled_are_told_apart(axes, kind, command):
    answer = ask("deepseek-v3", **axes)
    text = "\n".join(lines(answer))
    assert answer["kind"] == kind and ("Measured: one of 8 ranks (tp 8) on one GPU" in text) == (kind == "measured")
    ranked = "Layers over 8 GPUs with their exchange: --ranks 8 instead of --ep 8."
    assert (ranked in text) == (axes.get("ep") == 8), "cells of `layer` are of one rank, and others of several"
    if command is None:
        assert answer["shard"]["command"] is answer["shard"]["modelled"] is None and "Modelled" not in text
    else:
        assert answer["shard"]["command"] == f"moe-routing-bench scale deepseek-v3 {command}"
        assert text.index("Modelled, not measured: ") < text.index(answer["shard"]["command"])
    assert not any(word in "\n".join(lines(ask("deepseek-v3", tokens=64))) for word in ("Modelled", "one of"))


def made(run="run", us=5.0, card="GPU-1", **axes):
    """A cell of `experts` with one row."""
    row = dict.fromkeys(stored.NEEDED) | {"implementation": "cute", "status": "ok", "median_us": us, "suspect": False}
    row |= {"ci_low_us": 0.9 * us, "ci_high_us": 1.1 * us, "ended_at": "2026-11-21", "gpu_uuid": card}
    known = {"tokens": 64, "hidden": 1024, "dtype": "bf16", "weights": "bf16", "packed": "bf16", "phase": "decode"}
    return stored.Cell(run, "experts", str(axes), card, known | axes, [row])


def test_what_another_skew_takes_is_of_the_same_card():
    here, there = made(skew=0.0), [made(skew=1.0, us=7.0), made(skew=2.0, us=9.0, card="GPU-2")]
    found = list(around.over_axis(here, [here, *there], "skew"))
    assert [(one["skew"], one["ratio"]) for one in found] == [(1.0, 1.4)]


def test_the_fastest_cell_with_a_format_counts_in_whatever_run():
    here = made(us=5.0)
    cells = [here, *(made(run, us, weights="int8_g128") for run, us in (("a", 4.0), ("b", 3.0), ("c", 6.0)))]
    found = [one for one in around.over_formats(here, cells, []) if one["weights"] == "int8_g128"]
    assert [(one["run"], one["median_us"]) for one in found] == [("b", 3.0)]


def test_the_nearest_cell_is_that_of_the_least_distance_in_all_axes():
    """Two axes off by an octave each are farther than one by an octave and a half."""
    both, one = made("both", tokens=128, hidden=2048), made("one", tokens=64 * 3)
    for cells in ([both, one], [one, both]):
        assert [found.cell.run for found in nearest.ranked(cells, {"tokens": 64, "hidden": 1024})] == ["one", "both"]
