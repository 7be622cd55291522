"""Answers from cells that are made up: which row, cell and order an answer takes, and the numbers in it, where all of them differ."""

import math
import shlex

import pytest

from moe_routing_bench.answers import around, command, nearest, pairs, said, stored
from moe_routing_bench.answers import ask as asking
from moe_routing_bench.answers.question import Question, asked
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.quantities import FLOOR_SAID
from moe_routing_kernels.errors import UserError

LAYER = {
    "phase": "prefill",
    "tokens": 64,
    "hidden": 512,
    "intermediate": 256,
    "experts": 16,
    "top_k": 4,
    "skew": 0.5,
    "dtype": "bf16",
    "weights": "bf16",
    "packed": "bf16",
}


def row(name, us, spread=0.01, **values):
    """A row of a GPU without verdicts whose interval is so wide."""
    known = dict.fromkeys(stored.NEEDED) | {"bench": "layer", "status": "ok", "gpu_uuid": "GPU-1", "timer": "event"}
    ends = {"ci_low_us": us * (1 - spread), "ci_high_us": us * (1 + spread)} if us and spread is not None else {}
    return known | {"implementation": name, "median_us": us, "suspect": False, "cold": True} | ends | values


def cell(*rows, run="nvidia-h200", card="GPU-1", bench="layer", key="c", **axes):
    return stored.Cell(run, bench, key, card, LAYER | axes, list(rows))


def test_rows_of_a_cell_are_in_the_order_of_times_and_its_day_is_the_last():
    made = cell(
        row("b", 3.0, ended_at="2026-11-22T10:00"),
        row("a", 2.0, ended_at="2026-11-24T09:00"),
        row("c", 1.0, status="incorrect", ended_at="2026-11-23T11:00"),
        row("d", None),
    )
    assert [one["implementation"] for one in made.timed] == ["a", "b"] and made.day == "2026-11-24"


def test_rows_without_a_card_are_of_each_card_of_their_cell_alone():
    cells = {
        ("layer", name, card): cell(row(f"{name}{card}", 1.0), key=name, card=card)
        for name, card in (("a", "host h"), ("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1"))
    }
    stored._joined(cells)
    found = {place[1:]: [one["implementation"] for one in made.rows] for place, made in cells.items()}
    assert found["a", "GPU-1"] == ["aGPU-1", "ahost h"] and found["a", "GPU-2"] == ["aGPU-2", "ahost h"]
    assert found["b", "GPU-1"] == ["bGPU-1"]


def test_the_fastest_over_tokens_is_of_this_cell_or_else_of_the_fullest():
    """Rows that are left out leave open whether the rest is told apart."""
    here = cell(row("cute", 2.0), row("triton", 3.0))
    cells = [
        cell(row("torch", 1.0), run="other"),
        cell(row("cute", 9.0), run="few", tokens=128),
        cell(row("cute", 8.0), row("torch", 20.0), run="full", tokens=128, phase="decode"),
        cell(row("triton", 5.0, spread=0.001), row("cute", 4.0, spread=0.001), tokens=16),
        cell(row("cute", 7.0), tokens=32, hidden=1024),
        cell(row("cute", 6.0), tokens=8, bench="training"),
        here,
    ]
    found = list(around.over_tokens(here, cells, lambda one: True))
    assert [(one["tokens"], one["fastest"], one["median_us"], one["run"]) for one in found] == [
        (16, "cute", 4.0, "nvidia-h200"),
        (64, "cute", 2.0, "nvidia-h200"),
        (128, "cute", 8.0, "full"),
    ]
    assert [one["told_apart"] for one in found] == [True, True, True] and found[2]["phase"] == "decode"
    kept = list(around.over_tokens(here, cells, lambda one: one["implementation"] == "triton"))
    assert [(one["tokens"], one["median_us"], one["told_apart"]) for one in kept] == [(16, 5.0, None), (64, 3.0, None)]
    alone = list(around.over_tokens(cells[1], cells[1:2], lambda one: True))
    assert [one["told_apart"] for one in alone] == [False], "a single row is told from nothing"


def test_over_an_axis_one_implementation_is_compared_with_itself_on_the_same_card():
    here = cell(row("cute", 2.0), row("triton", 3.0, spread=0.1), row("torch", 9.0))
    cells = [
        here,
        cell(row("triton", 6.0, spread=0.2), row("torch", 5.0), top_k=8),
        cell(row("triton", 1.5), top_k=2, run="few"),
        cell(row("triton", 7.0), top_k=1, card="GPU-2"),
        cell(row("triton", 8.0), top_k=6, tokens=32),
    ]
    found = list(around.over_axis(here, cells, "top_k"))
    assert [(one["top_k"], one["implementation"], one["ratio"], one["run"]) for one in found] == [
        (2, "triton", 0.5, "few"),
        (8, "triton", 2.0, "nvidia-h200"),
    ]
    assert (found[1]["low"], found[1]["high"]) == (pytest.approx(4.8 / 3.3), pytest.approx(7.2 / 2.7))
    assert list(around.over_axis(here, cells, "capacity_factor")) == []


def test_over_formats_each_has_its_fastest_cell(monkeypatch):
    accuracy = [
        {"weights": "int4_g128", "drawn": "normal", "activations": "bf16", "weight_snr_db": 20.0, "output_snr_db": 9.0},
        {"weights": "int4_g128", "drawn": "normal", "activations": "fp16", "weight_snr_db": 20.0, "output_snr_db": 5.0},
        {
            "weights": "int4_g128",
            "drawn": "normal",
            "activations": "bf16",
            "weight_snr_db": 21.0,
            "output_snr_db": 11.0,
        },
        {"weights": "int4_g128", "drawn": "heavy", "activations": "bf16", "weight_snr_db": 2.0, "output_snr_db": 1.0},
        {"weights": "int8_row", "drawn": "normal", "activations": "fp16", "weight_snr_db": 9.0, "output_snr_db": 40.0},
    ]
    monkeypatch.setattr(stored, "accuracy", lambda runs: accuracy if runs == ("x", "y") else [])
    here = cell(row("cute", 9.0))
    cells = [
        here,
        cell(row("a", 4.0), run="slow", weights="int4_g128", packed="fp8_row"),
        cell(row("b", 3.0), run="fast", weights="int4_g128", packed="fp8_row", phase="decode"),
        cell(row("c", 5.0), weights="int8_row"),
        cell(row("d", 1.0), weights="int2_g64", tokens=32),
    ]
    found = list(around.over_formats(here, cells, ["x", "y"]))
    assert [(one["weights"], one["packed"], one["fastest"], one["run"]) for one in found] == [
        ("int4_g128", "fp8_row", "b", "fast"),
        ("int8_row", "bf16", "c", "nvidia-h200"),
        ("bf16", "bf16", "cute", "nvidia-h200"),
    ]
    assert found[0]["loss"] == {"weights": "int4_g128", "weight_snr_db": 20.0, "output_snr_db": 9.0, "usable": False}
    assert found[1]["loss"]["usable"] is True and found[2]["loss"] is None
    assert around.loss("int4_row", "bf16", ["x", "y"])["output_snr_db"] is None
    assert list(around.over_formats(stored.Cell("", "gate", "", "", {"tokens": 1}), cells, [])) == []


def test_elsewhere_is_the_fastest_of_each_other_device(monkeypatch):
    known = {
        "a": [cell(row("slow", 9.0), run="a"), cell(row("fast", 8.0), run="a.x"), cell(row("b", 1.0), key="d")],
        "b": [cell(row("gone", None), run="b")],
        "c": [cell(row("here", 0.1), run="c")],
    }
    monkeypatch.setattr(stored, "cells", lambda runs, benches: known[runs[0]] if benches == ("layer",) else [])
    found = list(around.elsewhere(cell(row("cute", 2.0)), {name: [name] for name in known}, "c"))
    assert [(one["platform"], one["fastest"], one["median_us"], one["run"]) for one in found] == [
        ("a", "fast", 8.0, "a.x")
    ]


NUMBERS = ("", "_ci_low", "_ci_high")


def test_a_pair_has_the_stored_ratio_of_either_row():
    """That with the best other first; turned where the other row holds it."""
    best = dict(zip((f"best_speedup{end}" for end in NUMBERS), (2.0, 1.6, 2.5), strict=True))
    base = dict(zip((f"speedup{end}" for end in NUMBERS), (4.0, 3.2, 5.0), strict=True))
    one = row("a", 1.0, best_other="b", best_verdict="faster", baseline="b", verdict="slower", **best, **base)
    found = pairs.pair(one, row("b", 3.0))
    assert (found.ratio, found.low, found.high, found.verdict, found.paired) == (2.0, 1.6, 2.5, "faster", True)
    turned = pairs.pair(row("b", 3.0), one)
    assert (turned.name, turned.other, turned.ratio, turned.low, turned.high) == ("b", "a", 0.5, 0.4, 0.625)
    assert (turned.verdict, turned.paired) == ("slower", True)
    against = pairs.pair(one | {"best_other": "c"}, row("b", 3.0))
    assert (against.ratio, against.verdict) == (4.0, "slower")
    assert pairs.pair(row("b", 3.0), one | {"best_verdict": "same"}).verdict == "same"


@pytest.mark.parametrize(
    ("us", "spread", "values", "verdict", "assumed"),
    [
        (1.3, 0.01, {"noise_floor": 0.2}, "faster", False),
        (1.3, 0.01, {"noise_floor": 0.28}, "undecided", False),  # ln 1.3 is 0.262
        (1.3, 0.2, {"noise_floor": 0.2}, "undecided", False),
        (0.7, 0.01, {"noise_floor": 0.2}, "slower", False),
        (1.3, 0.01, {}, "faster", True),
        (0.7, 0.01, {}, "slower", True),
        (1.3, 0.01, {"gpu_uuid": None}, None, False),
        (1.1, 0.001, {}, None, False),
        (1.3, None, {"noise_floor": 0.2}, None, False),
    ],
)
def test_two_medians_are_judged_by_intervals_and_floor(us, spread, values, verdict, assumed):
    found = pairs.pair(row("a", 10.0, spread, **values), row("b", 10 * us, spread))
    assert (found.ratio, found.verdict, found.assumed, found.paired) == (us, verdict, assumed, False)
    if spread is not None:
        edges = us * (1 - spread) / (1 + spread), us * (1 + spread) / (1 - spread)
        assert (found.low, found.high) == (pytest.approx(edges[0]), pytest.approx(edges[1]))
    assert ("from both medians" in found.text) and (FLOOR_SAID in found.text) == assumed


def test_ours_is_what_auto_runs_and_the_rival_is_another_package():
    """`cute_quack` is our routing around GEMMs of others."""
    every = cell(row("cute", 2.0), row("auto", 3.0), row("cute_quack", 1.0), row("torch_loop", 4.0))
    assert pairs.own(every)["implementation"] == "auto" and pairs.rival(every)["implementation"] == "cute_quack"
    assert pairs.own(cell(row("triton", 2.5), row("cute", 2.0)))["implementation"] == "cute"
    assert pairs.own(cell(row("torch_loop", 1.0))) is None and pairs.rival(cell(row("cute", 1.0))) is None


def test_the_winner_is_told_from_its_best_other():
    def winner(verdict, best="c"):
        values = {"best_other": best, "best_verdict": verdict, "best_speedup": 1.2, "best_speedup_ci_low": 1.1}
        return pairs.winner(cell(row("a", 1.0, **values, best_speedup_ci_high=1.3), row("b", 2.0), row("c", 3.0)))

    assert winner("faster") == ("a", "a is the fastest")
    for verdict in ("same", "undecided", "slower"):
        name, sentence = winner(verdict)
        assert name is None and "c" in sentence.split()[-6:] + sentence.split(), sentence
        assert " b " not in f" {sentence} "
    assert pairs.winner(cell(row("a", 1.0), row("b", 2.0)))[0] == "a", "beyond any floor"
    assert pairs.winner(cell(row("a", 1.0)))[0] is None


def test_marks_limits_and_numbers_of_a_row():
    assert pairs.marks(row("a", 1.0)) == [] == pairs.marks(row("a", 1.0, cold=False, timer="wall", converged=True))
    doubted = row("a", 1.0, suspect=True, suspect_reason="drift", converged=False, cold=False)
    assert pairs.marks(doubted) == ["suspect: drift", "not converged", "L2 may be warm"]
    graph = row("a", 10.0, timer="cuda_graph", graph_node_us=2.0, roofline_us=1.0)
    assert pairs.limit(graph) == (0.2, "empty graph node")
    assert pairs.limit(graph | {"timer": "event"}) == (0.1, "roofline")
    assert pairs.limit(graph | {"roofline_us": 5.0}) == (0.5, "roofline")
    assert pairs.limit(graph | {"gpu_uuid": None}) is None and pairs.limit(row("a", 10.0)) is None
    many = graph | {"peak_memory_bytes": 7, "workspace_bytes": 5, "energy_mj_per_token": 3.0, "over_dense": 1.5}
    found = pairs.numbers(many)
    assert [found[name] for name in ("memory_bytes", "workspace_bytes", "energy_mj_per_token", "over_dense")] == [
        7,
        5,
        3.0,
        1.5,
    ]
    assert (found["share_of_limit"], found["limit"], found["median_us"]) == (0.2, "empty graph node", 10.0)
    gone = cell(row("a", 1.0), row("b", None, status="crashed", reason="boom"), row("c", None, status="timeout"))
    assert pairs.without_time(gone) == {"b": "crashed: boom", "c": "timeout: no reason recorded"}


@pytest.mark.parametrize(
    ("name", "one", "other", "bench", "octaves"),
    [
        ("tokens", 64, 64, "layer", 0.0),
        ("tokens", 64, 16, "layer", 2.0),
        ("tokens", 64, 192, "layer", math.log2(3)),
        ("skew", 0.25, 1.0, "layer", 0.75),
        ("router", "hash", "softmax_topk", "layer", 1.0),
        ("router", "hash", "softmax_topk", "gate", math.inf),
        ("activation", "geglu", "swiglu", "layer", 1.0),
        ("dtype", "bf16", "fp16", "layer", math.inf),
        ("weights", "int4", "int4_g128", "layer", 0.0),
        ("weights", "int4", "int8_row", "layer", math.inf),
        ("ep", 8, 4, "layer", math.inf),
        ("ranks", 8, 4, "dispatch", math.inf),
        ("capacity_factor", None, 1.25, "layer", math.inf),
    ],
)
def test_how_far_values_are_apart(name, one, other, bench, octaves):
    assert nearest.distance(name, one, other, bench) == pytest.approx(octaves)


def test_experts_without_a_format_of_weights_have_that_of_their_activations():
    """A gate has no weights of experts, and nothing to differ in."""
    experts = stored.Cell("", "experts", "", "", {"tokens": 8, "dtype": "fp16", "intermediate": 64}, [])
    gate = stored.Cell("", "gate", "", "", {"tokens": 8, "dtype": "fp16"}, [])
    assert nearest.gaps(experts, {"weights": "int8_row"}) == [nearest.Gap("weights", "int8_row", "fp16", math.inf)]
    assert nearest.gaps(experts, {"weights": "fp16"}) == [] == nearest.gaps(gate, {"weights": "int8_row"})
    assert (
        nearest.gaps(gate, {"ep": 4}) == [nearest.Gap("ep", 4, None, math.inf)]
        and nearest.gaps(gate, {"ep": None}) == []
    )
    assert nearest.gaps(gate, {"tokens": 9})[0].octaves == pytest.approx(math.log2(9 / 8))


def test_the_nearest_cell_first_then_usual_values_the_model_more_rows_and_the_later_day():
    def made(name, rows=1, **axes):
        values = {"model": axes.pop("model", "m"), "ended_at": axes.pop("day", "2026-11-20")}
        return cell(*(row(f"{name}{i}", 1.0, **values) for i in range(rows)), run=name, **{"layout": "compact"} | axes)

    question = {"tokens": 64, "weights": "int4", "top_k": 4}
    cells = [
        made("format", weights="bf16"),
        made("far", tokens=256, weights="int4_g128"),
        made("both", tokens=96, top_k=6, weights="int4_g128"),
        made("odd", weights="int4_g128", layout="padded"),
        made("row", weights="int4_row"),
        made("stranger", weights="int4_g128", model="n", rows=3),
        made("few", weights="int4_g128", day="2026-11-30"),
        made("early", weights="int4_g128", rows=2, day="2026-10-31"),
        made("late", weights="int4_g128", rows=2, day="2026-11-02"),
        cell(row("gone", None), run="gone"),
    ]
    found = nearest.ranked(cells, question, "m")
    assert [one.cell.run for one in found] == [
        "late",
        "early",
        "few",
        "stranger",
        "row",
        "odd",
        "both",
        "far",
        "format",
    ]
    assert [round(one.octaves, 3) for one in found[6:8]] == [round(2 * math.log2(1.5), 3), 2.0]
    assert nearest.away(1.0) == "1 octave away" and nearest.away(0.5) == "0.5 octaves away"
    assert [one.cell.run for one in nearest.ranked(cells, question, "m", lambda one: one.run == "far")] == ["far"]


def test_a_family_of_formats_is_of_its_own_names_the_plainest_first():
    for family in nearest.FAMILIES:
        found = nearest.formats_of(family)
        starts = ("e4m3_", "e5m2_") if family == "fp8" else (f"{family}_", f"{family}z_")
        assert {*found} == {name for name in nearest.weights.NAMES if name.startswith(starts)}
        plain = ["g128" in name or "block128" in name for name in found]
        assert plain == sorted(plain, reverse=True) and found[0].startswith(starts[0])
    assert nearest.formats_of("mxfp4") == ("mxfp4",) and nearest.formats_of("int") == ()


def words(found):
    return shlex.split(found)[2:]


def test_the_command_of_a_row_names_what_it_was_compared_with_and_what_is_not_usual():
    values = {name: axis.default for name, axis in AXES.items()} | {
        "tokens": 64,
        "packed": "fp8_row",
        "weights": "bf16",
    }
    one = row("a", 1.0, **values | {"dtype": "bf16", "skew": float("nan")}, platform="cpu", cpu_threads=4.0)
    one |= {"baseline": "b", "speedup": 2.0, "best_other": "c", "best_speedup": None}
    plugins = {"a": "mine.kernels:A", "b": "mine.kernels:B", "z": "theirs:Z"}
    found = words(command.again(one, plugins, {"m": "models.yaml"}))
    assert found[:5] == ["layer", "--implementations", "a,b", "--plugin", "mine.kernels"] and "theirs" not in found
    assert found[found.index("--tokens") + 1] == "64" and found[found.index("--packed") + 1] == "fp8_row"
    assert found[-2:] == ["--cpu-threads", "4"]
    assert not {"--weights", "--dtype", "--skew", "--models", "--seed"} & {*found}
    assert "--cpu-threads" not in command.again(one | {"platform": "nvidia-h200"})
    assert "--cpu-threads" not in command.again(one | {"cpu_threads": 1})
    assert words(command.again(one | {"best_other": "b", "best_speedup": 1.5}))[2] == "a,b"
    assert "a,b,c" in command.again(one | {"best_speedup": 1.5}) and "a,c" in command.again(
        one | {"baseline": None, "best_speedup": 1.5}
    )
    sizes = {"hidden": 512, "experts": 16, "top_k": 4}
    found = words(command.again(one | sizes | {"model": "m"}, {}, {"m": "models.yaml", "n": "others.yaml"}))
    assert found[3:5] == ["--models", "models.yaml"] and found[found.index("--model") + 1] == "m"
    assert not {"--hidden", "--experts", "--top-k"} & {*found}
    assert {"--hidden", "--experts", "--top-k"} <= {*words(command.asked("layer", sizes))}


def question(**given):
    model = given.pop("model", "qwen3-30b-a3b")
    return asked(model, given.pop("bench", None), (), None, given)


def test_values_of_a_question_are_the_users_then_the_models():
    found = question(tokens=64, top_k=2)
    assert (found.values["top_k"], found.values["experts"], found.values["tokens"]) == (2, 128, 64)
    assert (found.values["weights"], found.values["packed"], found.values["skew"]) == ("bf16", "bf16", 0.0)
    assert all(found.values[name] is None for name, axis in AXES.items() if axis.sparse and not axis.shared)
    assert question(dtype="fp16").values["weights"] == "fp16"
    packed = question(packed="fp8_row").values
    assert packed["packed"] == "fp8_row" and packed["weights"] == "bf16"
    assert "packed" not in question(weights="int4").values and question(ep=8).values["ep"] == 8
    assert question(weights="int4", ep=4).of("layer")["ep"] == 4 and question(tp=2).of("layer")["intermediate"] == 384


def test_benches_that_may_answer():
    assert question().benches == ("layer", "experts") and question(tp=2).benches == ("layer",)
    assert question(phase="training").benches == ("training",) and "phase" not in question(phase="training").given
    assert set(question(ranks=2).benches) >= {"dispatch", "ep_layer"} and question(bench="gate").benches == ("gate",)
    assert question(bench="gate", weights="int4").ignored == ["weights"] and question(weights="int4").ignored == []
    assert question(bench="experts", weights="int4").ignored == []
    assert question(bench="gate", weights="int4", ep=2).unread("gate") == ["weights", "ep"]


@pytest.mark.parametrize(
    ("given", "measured", "words_"),
    [
        ({"tp": 4, "tokens": 10, "weights": "int4"}, "one of 4 ranks (tp 4)", "--gpus 4 --tp 4 --tokens 3 --weights"),
        ({"ep": 8, "tp": 1}, "one of 8 ranks (ep 8)", "--gpus 8 --ep 8"),
        ({"tp": 2, "ep": 4}, "one of 2 x 4 ranks", None),
    ],
)
def test_a_rank_is_measured_and_a_layer_of_ranks_modelled(given, measured, words_):
    found = question(**given).shard()
    assert found["measured"].startswith(measured) and (words_ or "") in (found["command"] or "")
    assert (found["command"] is None) == (found["modelled"] is None) == (words_ is None)
    assert question(tp=1).shard() is question().shard() is None
    assert question(ep=2, model=None, bench="layer").shard()["command"] is None


def test_what_would_be_measured_is_a_model_or_sizes():
    assert question(tokens=64, weights="int4").to_measure("layer") == {
        "tokens": 64,
        "weights": nearest.formats_of("int4")[0],
        "model": "qwen3-30b-a3b",
    }
    found = question(top_k=2, tokens=64).to_measure("layer")
    assert "model" not in found and (found["top_k"], found["experts"], found["hidden"]) == (2, 128, 2048)
    assert "weights" not in question(weights="int4").to_measure("gate")


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("tokens", 0, 1), ("tokens", True, 2), ("tokens", 1.5, 2), ("skew", -0.1, 0.0), ("capacity_factor", 0.0, 0.1)],
)
def test_a_value_of_a_question_is_within_the_bounds_of_its_axis(name, wrong, right):
    assert question(**{name: right}).given[name] == right
    with pytest.raises(UserError, match=name):
        question(**{name: wrong})


def test_a_name_has_a_part_that_was_asked_for_in_any_letters():
    one = Question("m", ("layer",), {}, {}, ("CuTe", "quack"))
    made = cell(row("cute_dependent", 1.0), row("triton", 2.0))
    assert [asking._named(each, one) for each in made.timed] == [True, False] and asking._lacking(made, one) == [
        "quack"
    ]


def test_a_gap_is_said_with_the_measured_value_first():
    assert asking.gap_text(nearest.Gap("tokens", 64, 16, 2.0)) == "T=16, not 64 (2 octaves away)"
    assert asking.gap_text(nearest.Gap("skew", 0.0, 0.75, 0.75)) == "skew 0.75, not 0 (0.75 octaves away)"
    assert asking.gap_text(nearest.Gap("ep", 8, None, math.inf)) == "ep 1, not 8"


def test_the_place_of_a_cell_is_fit_for_json():
    """What must match and does not is no number of octaves."""
    gaps = [nearest.Gap("tokens", 32, 64, 1.0), nearest.Gap("dtype", "fp16", "bf16", math.inf)]
    found = asking._place(nearest.Found(cell(row("a", 1.0), capacity_factor=None), gaps))
    assert found["octaves"] is None and [gap["octaves"] for gap in found["gaps"]] == [1.0, None]
    assert "capacity_factor" not in found["axes"] and found["axes"]["skew"] == 0.5
    near = asking._place(nearest.Found(cell(row("a", 1.0), skew=0.0), gaps[:1]))
    assert near["octaves"] == 1.0 and near["axes"]["skew"] == 0.0
    assert [gap["asked"] for gap in found["gaps"]] == [32, "fp16"] and found["gaps"][0]["text"].startswith(
        "T=64, not 32"
    )


def test_implementations_that_are_asked_for_are_compared_with_the_fastest_of_them(monkeypatch):
    """Each other one once, over that one; what the cell lacks is said."""
    monkeypatch.setattr(stored, "submitter", lambda run: None)
    monkeypatch.setattr(stored, "version", lambda run, commit: f"of {commit}")
    monkeypatch.setattr(stored, "accuracy", lambda runs: [])
    values = {"cpu_threads": 1, "ended_at": "2026-11-22", "git_sha": "abc", "gpu_name": "G", "code_fingerprint": "old"}
    rows = [
        row(name, us, **values)
        for name, us in (("torch", 2.0), ("triton", 4.0), ("cute_gather", 8.0), ("cute", 3.0), ("cute_quack", 1.0))
    ]
    made = cell(*rows)
    one = Question("m", ("layer",), {}, {}, ("cute", "triton", "sonic"))
    found = asking._measured(one, nearest.Found(made, []), [made], {"nvidia-h200": ["nvidia-h200"]}, "nvidia-h200")
    assert [(pair["implementation"], pair["other"], pair["ratio"]) for pair in found["compared"]] == [
        ("cute", "cute_quack", pytest.approx(1 / 3)),
        ("triton", "cute_quack", 0.25),
        ("cute_gather", "cute_quack", 0.125),
    ]
    assert (
        found["lacking"] == ["sonic"]
        and found["fastest"]["implementation"] == "cute_quack"
        and found["told_apart"] is True
    )
    assert (found["ours"]["implementation"], found["other"]["implementation"]) == ("cute", "cute_quack")
    assert (found["against"]["implementation"], found["against"]["ratio"]) == ("cute", pytest.approx(1 / 3))
    origin = found["provenance"]
    assert (origin["version"], origin["card"], origin["day"], bool(origin["older_code"])) == (
        "of abc",
        "G",
        "2026-11-22",
        True,
    )


def test_a_cell_too_far_away_does_not_answer_for_an_implementation(monkeypatch):
    """The near one does, which lacks it; where none was asked for, and where one that is near has it, that one."""
    values = {"cpu_threads": 1, "ended_at": "2026-11-22"}
    near, far = cell(row("cute", 1.0, **values)), cell(row("triton", 1.0, **values), key="far", tokens=64 * 5)
    also = cell(row("triton", 1.0, **values), key="also", tokens=64 * 4)
    monkeypatch.setattr(stored, "runs", lambda: {"nvidia-h200": ["nvidia-h200"]})
    monkeypatch.setattr(stored, "submitter", lambda run: None)
    monkeypatch.setattr(stored, "accuracy", lambda runs: [])
    asked_ = {name: LAYER[name] for name in ("tokens", "hidden", "intermediate", "experts", "top_k", "skew", "phase")}
    for known, names, key in (
        ([near, far], ("triton",), "c"),
        ([near, far, also], ("triton",), "also"),
        ([near, far, also], (), "c"),
        ([far], (), None),
    ):
        monkeypatch.setattr(stored, "cells", lambda *_, known=known: known)
        found = asking.ask(bench="layer", implementations=names, **asked_)
        assert (found["kind"] == "refused") == (key is None) and (key is None or found["nearest"]["cell"] == key)


def test_a_refusal_names_implementations_with_accuracy_of_the_weights_that_are_asked_for(monkeypatch):
    """Of any format of a family; those of other formats, and of unquantised weights, are not able."""
    known = {"cute": "int4_g128", "torch": "int4z_g128", "triton": "e4m3_row", "torch_loop": "bf16"}
    monkeypatch.setattr(
        stored, "accuracy", lambda runs: [{"implementation": name, "weights": form} for name, form in known.items()]
    )
    able = [
        asking._nothing_near({"platform": "gpu"}, Question("m", ("layer",), LAYER, given), [("layer", [])], [])["able"]
        for given in ({"weights": "int4"}, {})
    ]
    assert able == [["cute", "torch"], []]


def test_published_runs_are_those_with_a_manifest_and_rows(tmp_path, monkeypatch):
    """By platform, each in the order of names."""
    monkeypatch.chdir(tmp_path)
    for name, files in {"a.y": "pm", "a": "pm", "a.x": "p", "b": "m", "c.z": "pm"}.items():
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        for letter, file in (("p", "measurements.parquet"), ("m", "manifest.yaml")):
            if letter in files:
                (folder / file).touch()
    assert stored.runs() == {"a": ["a", "a.y"], "c": ["c.z"]}
    assert stored.folder().resolve() == tmp_path / "results"


def test_numbers_of_a_line_are_in_their_units():
    made = {"implementation": "a", "share_of_limit": 0.256, "limit": "roofline", "over_dense": 1.5}
    made |= {"memory_bytes": 3 * 2**20, "energy_mj_per_token": 0.25, "stage_us": [("gate", 2.0), ("pack", None)]}
    assert said._numbers(made) == (
        "a: 25.6 % of the limit (roofline); 1.50x dense GEMMs; peak memory 3 MiB; 0.25 mJ per token; stages gate 2 µs."
    )
    step = {"tokens": 64, "fastest": "a", "median_us": 2.5}
    assert [said._step(step | {"told_apart": told}).endswith("(not told apart)") for told in (True, False, None)] == [
        False,
        True,
        False,
    ]
    kind = {"weights": "int4_g128", "packed": "int4_g128", "fastest": "a", "median_us": 2.5, "loss": None}
    assert said._kind(kind) == "int4_g128 a 2.5 µs"
    lost = {"output_snr_db": 9.04, "usable": False}
    assert said._kind(kind | {"packed": "fp8_row", "loss": lost}) == (
        "int4_g128 with rows in fp8_row a 2.5 µs, 9.0 dB, of no use"
    )
    loss = {"weights": "int4_g128", "weight_snr_db": 20.04, "output_snr_db": 11.06, "usable": True}
    assert said._format(loss) == "int4_g128: signal-to-noise 20.0 dB of weights, 11.1 dB of outputs."
    rows = [{"implementation": f"i{n}", "memory_bytes": None, "marks": [], "median_us": 1.0} for n in range(15)]
    listed = list(said._table([one | {"ci_low_us": None, "ci_high_us": None} for one in rows]))
    assert len(listed) == 13 and listed[-1].strip() == "and 3 more"
    listed = list(said._table([one | {"ci_low_us": 0.5, "ci_high_us": 2.0} for one in rows[:12]]))
    assert len(listed) == 12 and listed[0].split(maxsplit=1) == ["i0", "1.000 µs [0.5000, 2.000]"]


def test_the_line_of_a_cell_says_its_sizes_its_formats_and_its_distance():
    place = {"axes": LAYER | {"weights": "int4_g128"}, "gaps": [], "octaves": 0.0, "bench": "layer"}
    answer = {"nearest": place, "question": {"tokens": 64}}
    assert said.distance(answer) == (
        "layer, T=64 H=512 I=256 E=16 k=4, prefill, bf16, int4_g128: asked T=64, measured T=64 (measured as asked)."
    )
    gaps = [{"text": "T=64, not 16", "axis": "tokens"}, {"text": "skew 0.5, not 0", "axis": "skew"}]
    far = answer | {"nearest": place | {"axes": LAYER, "gaps": gaps, "octaves": 2.5}, "question": {}}
    assert said.distance(far).endswith("prefill, bf16: measured T=64 (2.5 octaves away; skew 0.5, not 0).")
    own = {"implementation": "cute", "median_us": 3.0, "ci_low_us": None, "ci_high_us": None}
    told = {"fastest": {"implementation": "b"}, "against": {"text": "0.5x"}}
    assert said._own(told, own) == "Ours, cute (3 µs): 0.5x."
    assert said._own(told | {"fastest": own, "against": None}, own) == "Ours, cute: no other package has a time here."
