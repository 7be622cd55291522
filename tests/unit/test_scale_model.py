"""The scale model: what moves, limits, monotony, hold-out of the validating tables, and their errors."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from moe_routing_bench.benches.ranks import row_traffic
from moe_routing_bench.cli import main
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.scale import exchange, experts, flows, layer, validation
from moe_routing_bench.scale.exchange import LOW_LATENCY, MODES, NORMAL
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routing.placement import consecutive

LINKS = exchange.load(validation.MEMORY)
SIZES = experts.Sizes(2048, 768, 128, 8, "bf16")


@pytest.fixture(scope="module")
def rows():
    return experts.stored("nvidia-h200")


def question(**changes):
    return replace(layer.Question("qwen3-30b-a3b", SIZES, 48, gpus=16, tokens=64, trials=2), **changes)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_a_drawn_flow_moves_the_bytes_that_the_rank_benches_count(skew):
    group = flows.Group(ranks=2, tokens=64, experts=16, top_k=4)
    ids, _ = flows._drawn_ids(group, 3, skew, None)
    counted = row_traffic(torch.from_numpy(ids).split(group.tokens), 8, row_bytes=1)
    flow = flows.drawn(group, 3, skew)
    away = ~np.eye(2, dtype=bool)
    assert flow.rows.sum(0).tolist() == counted["rank_rows"]
    assert flow.rows.sum(1).tolist() == counted["rank_all_bytes"]
    assert (flow.rows * away).sum(1).tolist() == counted["rank_wire_bytes"]
    assert (flow.once * away).sum(1).tolist() == counted["rank_deduplicated_bytes"]


def test_many_tokens_have_the_flow_of_all_of_them_drawn(monkeypatch):
    group = flows.Group(ranks=16, tokens=512, experts=32, top_k=4)
    whole = flows.drawn(group, 5, 0.8)
    monkeypatch.setattr(flows, "DRAWN", 2048)
    some = flows.drawn(group, 5, 0.8)
    for name in ("rows", "once", "hosts"):
        np.testing.assert_allclose(getattr(some, name).sum(0), getattr(whole, name).sum(0), rtol=0.2)
        assert getattr(some, name).sum() == pytest.approx(getattr(whole, name).sum(), rel=0.02)


def test_the_even_flow_is_the_mean_of_uniform_draws():
    group = flows.Group(ranks=16, tokens=32, experts=64, top_k=6)
    even, drawn = flows.even(group), [flows.drawn(group, seed) for seed in range(40)]
    for name in ("rows", "once", "hosts"):
        mean = np.mean([getattr(flow, name).mean() for flow in drawn])
        assert getattr(even, name).mean() == pytest.approx(mean, rel=0.01)


def test_one_rank_does_not_communicate_and_no_token_costs_latency_alone():
    one = exchange.times(flows.even(flows.Group(1, 64, 16, 4)), 2048, NORMAL, "fp8", LINKS)
    assert one.both == 0
    for ranks, far in ((8, 0.0), (16, LINKS.rdma_us)):
        flow = flows.even(flows.Group(ranks, 0, 16, 4))
        for mode, latency in ((LOW_LATENCY, LINKS.push_us), (NORMAL, LINKS.launch_us)):
            times = exchange.times(flow, 2048, mode, "bf16", LINKS)
            assert times.dispatch == times.combine == pytest.approx(latency + far)
    assert 2 * LINKS.rdma_us == exchange.parameters()["rdma_round_trip_us"], "dispatch and combine are a way each"


def test_both_ways_take_as_long_as_the_busiest_rank():
    """By hand: 30 rows go to rank 1, and 10 to rank 0."""
    rows, hidden = np.array([[0.0, 30.0], [10.0, 0.0]]), 1024
    times = exchange.times(flows.Flow(32, rows, rows, rows), hidden, LOW_LATENCY, "bf16", LINKS)
    out, back = 2 * hidden + 16, 2 * hidden
    dispatch = 30 * out / LINKS.nvlink + (3 * 30 * out + 32 * back) / LINKS.memory
    combine = 30 * back / LINKS.nvlink + (10 + 2 * 30 + 32) * back / LINKS.memory
    assert times.dispatch == pytest.approx(LINKS.push_us + dispatch)
    assert times.combine == pytest.approx(LINKS.push_us + combine)


def test_the_slower_link_counts_and_what_leaves_or_lands_most():
    """By hand, of hosts with two GPUs: rank 0 sends to its neighbour, and rank 2 to rank 1 on the other host; rows travel once, not one after the
    other. In normal mode rank 2 sends 50 rows to rank 0, which sends 10 back and waits for what lands."""
    links, hidden = replace(LINKS, host=2), 1024
    out, back = 2 * hidden + 16, 2 * hidden
    rows = np.zeros((4, 4))
    rows[0, 1], rows[2, 1] = 40, 8
    found = exchange.times(flows.Flow(32, rows, rows, rows[:, ::2]), hidden, LOW_LATENCY, "bf16", links)
    near, far, latency = 40 / links.nvlink, 8 / links.rdma, links.push_us + links.rdma_us
    assert near < far < near + far
    dispatch = max(near, far) * out + (3 * 48 * out + 32 * back) / links.memory
    of_ranks = (  # wire, rows of its experts, rows of its tokens
        (near, 0, 40),
        (max(near, far), 48, 0),
        (far, 0, 8),
    )
    combine = [wire * back + (here + 2 * there + 32) * back / links.memory for wire, here, there in of_ranks]
    assert (found.dispatch, found.combine) == (pytest.approx(latency + dispatch), pytest.approx(latency + max(combine)))
    once, hosts = np.zeros((4, 4)), np.zeros((4, 2))
    once[2, 0], once[0, 2], hosts[2, 0], hosts[0, 1] = 50, 10, 50, 10
    found = exchange.times(flows.Flow(32, once, once, hosts), hidden, NORMAL, "bf16", links)
    dispatch = 50 / links.rdma * back + (3 * 50 * back + 32 * back) / links.memory
    assert found.dispatch == pytest.approx(links.launch_us + links.rdma_us + dispatch)


def test_a_token_that_keeps_to_some_hosts_goes_to_no_others():
    """To one of two: half of the experts are left to it, so it has rows on that host for certain."""
    group = flows.Group(ranks=16, tokens=4, experts=64, top_k=8, host_groups=1)
    even, free = flows.even(group), flows.even(replace(group, host_groups=None))
    assert even.hosts.sum(1) == pytest.approx(4) and (free.hosts.sum(1) > 1.9 * 4).all()
    assert even.once.sum(1) == pytest.approx(4 * 8 * flows.hit(32, 4, 8)) and (even.rows == free.rows).all()


def test_estimates_of_draws_are_their_median_and_percentiles(rows):
    """Those of draws one by one; of five, no end is the least or the most."""
    asked = question(gpus=8, skew=1.0, trials=5)
    found = layer.Model(asked, rows).estimate(8)
    each = [layer.Model(replace(asked, seed=asked.seed + i, trials=1), rows).estimate(8) for i in range(5)]
    low, middle, high = np.percentile([one.drawn_us for one in each], [5, 50, 95])
    assert (found.low_us, found.drawn_us, found.high_us) == (
        pytest.approx(low),
        pytest.approx(middle),
        pytest.approx(high),
    )
    assert found.busiest == np.median([one.busiest for one in each]) < max(one.busiest for one in each)


def test_no_more_replicas_are_planned_than_a_rank_has_other_experts(rows, monkeypatch):
    asked, planned = [], flows.planned
    monkeypatch.setattr(flows, "planned", lambda *known: asked.append(known[-1]) or planned(*known))
    for spare in (3, 1000):
        layer.Model(question(gpus=8, skew=1.0, trials=1, spare=spare), rows).estimate(8)
    assert asked == [3, 128 - 128 // 8]


def test_replicas_share_the_rows_of_many_tokens_too(monkeypatch):
    """All loads drawn one by one, and those of more tokens than are drawn."""
    group = flows.Group(ranks=8, tokens=512, experts=32, top_k=4)
    placed = flows.planned(group, 5, 1.0)
    whole = flows.drawn(group, 5, 1.0, None, placed)
    monkeypatch.setattr(flows, "DRAWN", 2048)
    some = flows.drawn(group, 5, 1.0, None, placed)
    assert some.rows.sum() == pytest.approx(whole.rows.sum(), rel=0.02)
    assert some.busiest == pytest.approx(whole.busiest, rel=0.1)


def test_layers_with_uneven_loads_are_no_basis(rows):
    assert (rows["skew"].fillna(0) == 0).all() and len(rows) > 100


def test_a_layer_that_weights_limit_says_nothing_of_more_tokens(rows):
    """Of the 64 tokens that are left, products do not limit the time; of a hundred thousand they would."""
    few = experts.Experts(rows[rows["tokens"] <= 64], SIZES)
    assert few.least(64) < few.roofline(64) and few.least(100_000) == few.roofline(100_000)
    with pytest.raises(UserError, match="that products limit, not weights"):
        few.layer(100_000)


def test_tensor_parallel_ranks_share_the_weights_and_send_to_others_alone(rows):
    """By hand: a rank of two gets the tokens of the other, and holds half of each expert."""
    both = pd.concat([rows, rows[rows["intermediate"] == 768].assign(intermediate=1536)], ignore_index=True)
    sizes = replace(SIZES, intermediate=1536)
    model = layer.Model(question(sizes=sizes, gpus=8, tokens=32), both)
    found, links, moved = model.estimate(1, 2), model.links, 2 * 2048 * 32
    way = links.push_us + moved / links.nvlink + 2 * moved / links.memory
    assert (found.dispatch_us, found.combine_us) == (pytest.approx(way), pytest.approx(way)) and found.dp == 4
    assert found.memory_share == pytest.approx(128 * 3 * 2048 * 1536 * 2 * 48 / links.capacity / 2)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 1.0])
def test_experts_hide_no_more_communication_than_they_last(rows, overlap):
    """A token of each rank has less to compute than to send, thousands more: at an overlap of 1 the longer of the two remains."""
    for tokens in (1, 4096):
        one = layer.Model(question(gpus=8, tokens=tokens, mode=NORMAL, overlap=overlap), rows).estimate(8)
        both = one.dispatch_us + one.combine_us
        assert one.layer_us == pytest.approx(max(both, one.experts_us + (1 - overlap) * both))


def test_each_trial_is_a_draw_of_its_own(rows, monkeypatch):
    """With planned placement the same draws once more."""
    seeds, drawn = [], flows.drawn
    monkeypatch.setattr(flows, "drawn", lambda group, seed, *more: seeds.append(seed) or drawn(group, seed, *more))
    found = layer.Model(question(gpus=8, skew=1.0, trials=3, seed=5), rows).estimate(8)
    assert seeds == [5, 6, 7] * 2 and found.low_us < found.drawn_us < found.high_us


def test_the_best_way_fits_into_the_memory_where_one_does(rows):
    """Where none does, and where it is not known, the fastest of all."""
    one = layer.Model(question(), rows).estimate(8)
    fast, fits = replace(one, drawn_us=1.0, memory_share=0.9), replace(one, drawn_us=2.0, memory_share=0.8)
    unknown, slow = replace(one, drawn_us=3.0, memory_share=None), replace(one, drawn_us=4.0, memory_share=0.1)
    assert layer.best([slow, fast, fits, unknown]) is fits and layer.best([slow, unknown, fast]) is unknown
    assert layer.best([replace(fast, drawn_us=9.0), fast]) is fast


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
@pytest.mark.parametrize("mode", MODES)
def test_more_tokens_wider_rows_and_more_bytes_cost_more(ranks, mode):
    def both(tokens, hidden, payload, once=True):
        flow = flows.even(flows.Group(ranks, tokens, 256, 8))
        return exchange.times(flow, hidden, mode, payload, LINKS, once).both

    times = [both(tokens, 4096, "fp8") for tokens in (1, 8, 64, 512, 4096)]
    assert times == sorted(times)
    assert both(64, 4096, "fp8") < both(64, 7168, "fp8") < both(64, 7168, "bf16")
    assert both(512, 4096, "fp8") <= both(512, 4096, "fp8", once=False)


def test_estimates_rise_with_tokens_and_with_skew_and_planning_helps(rows):
    by_tokens = [layer.Model(question(tokens=tokens), rows).estimate(8).layer_us for tokens in (1, 8, 64, 512, 2048)]
    assert by_tokens == sorted(by_tokens)
    found = [layer.Model(question(skew=skew, tokens=512, trials=4), rows).estimate(16) for skew in (0.0, 0.5, 1.0, 2.0)]
    times = [one.drawn_us for one in found]
    assert times == sorted(times)
    assert found[0].planned_us is None
    assert all(one.layer_us <= (one.planned_us or 0) < one.drawn_us for one in found[1:])


def test_a_stored_layer_is_given_as_it_is_and_others_say_what_they_are(rows):
    known = experts.Experts(rows, SIZES)
    stored = rows[
        (rows["hidden"] == 2048)
        & (rows["experts"] == 128)
        & (rows["tokens"] == 64)
        & (rows["weights"] == "bf16")
        & (rows["intermediate"] == 768)
    ]
    answer = known.rank(64, 1)
    assert answer.measured
    assert answer.us == stored["median_us"].min()
    alike = ["hidden", "experts", "weights", "intermediate"]
    above = rows[(rows["tokens"] > 64) & (rows[alike] == stored.iloc[0][alike]).all(axis=1)]
    for tokens, ep, says in (
        (100, 1, f"between T=64 and T={above['tokens'].min()}"),
        (8, 8, "1/8 of a layer, measured at T=64"),
        (16384, 4, "beyond"),
    ):
        answer = known.rank(tokens, ep)
        assert not answer.measured
        assert says in answer.source
    assert known.rank(8, 8).us == pytest.approx(known.fixed + (known.rank(64, 1).us - known.fixed) / 8)


def test_a_row_of_the_first_rank_takes_precedence(rows):
    row = rows[
        (rows["hidden"] == 2048)
        & (rows["experts"] == 128)
        & (rows["tokens"] == 64)
        & (rows["intermediate"] == 768)
        & (rows["weights"] == "bf16")
    ].iloc[:1]
    more = pd.concat([rows, row.assign(ranks=8, median_us=77.0)], ignore_index=True)
    answer = experts.Experts(more, SIZES).rank(8, 8)
    assert (answer.us, answer.measured) == (77.0, True)


def test_the_fit_reads_two_gpus_and_no_table_that_validates(monkeypatch):
    opened = []
    read = exchange.read_mapping
    monkeypatch.setattr(exchange, "read_mapping", lambda path: opened.append(path) or read(path))
    exchange.parameters.cache_clear()
    exchange.load(1e6)
    assert [path.name for path in opened] == ["links.yaml"]
    for name in ("exchange", "flows", "experts", "layer"):  # what the estimates are made of
        text = (PACKAGE / "scale" / f"{name}.py").read_text(encoding="utf-8")
        assert "validation" not in re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
        assert "config/published" not in text


def test_two_gpus_are_met_within_a_tenth():
    known = exchange.parameters()
    sizes, times = exchange.points(known, "push")
    for left in range(len(sizes)):  # each predicted from the others
        kept = [i for i in range(len(sizes)) if i != left]
        alpha, beta = exchange.fit([sizes[i] for i in kept], [times[i] for i in kept])
        assert (alpha + sizes[left] / beta) / times[left] == pytest.approx(1, abs=0.1)
    table = validation.lines()
    pairs = table[(table["mode"] == "layer") & (table["ranks"] == 2)]
    assert pairs["error"].abs().median() <= 0.1


def test_layers_of_ours_on_two_gpus_are_met_within_a_tenth(rows):
    """Stored rows with a GPU per rank, which no parameter is fitted on; the document prints their times and errors."""
    stored = pd.read_parquet(PACKAGE.parents[1] / "results/nvidia-h200.ep2/measurements.parquet")
    even = stored[(stored["bench"] == "ep_layer") & (stored["skew"] == 0) & (stored["status"] == "ok")]
    errors, times = [], []
    for tokens, cell in even.groupby("tokens"):
        one = cell.iloc[0]
        sizes = experts.Sizes(one["hidden"], one["intermediate"], one["experts"], one["top_k"], "bf16")
        question = layer.Question("qwen3-30b-a3b", sizes, 48, 2, tokens // 2, "bf16")
        times.append(cell["median_us"].min())
        errors.append(layer.Model(question, rows).estimate(2).layer_us / times[-1] - 1)
    assert len(errors) == 2 and np.median(np.abs(errors)) <= 0.1
    text = (PACKAGE.parents[1] / "docs/published.md").read_text(encoding="utf-8")
    assert f"take {times[0]:.0f} and {times[1]:.0f} µs" in text
    assert f"estimated: {100 * errors[0]:+.1f} and {100 * errors[1]:+.1f} %" in text


def test_the_numbers_of_validation_are_those_of_the_stored_rows(rows):
    assert rows["copy_gb_per_s"].median() * 1e3 == pytest.approx(validation.MEMORY, rel=0.01)
    assert experts.Experts(rows, SIZES).fixed == pytest.approx(validation.FIXED, rel=0.02)


def test_a_published_bandwidth_becomes_the_time_of_the_bytes_that_it_counts():
    row = {"counts": "nvlink", "hidden": 7168, "dispatch": 153.0, "combine": 158.0}
    flow = flows.even(flows.Group(8, 4096, 256, 8))
    received = 4096 * 8 * flows.hit(256, 32, 8)
    assert validation._time(row, "combine", flow) == pytest.approx(received * 2 * 7168 / 158e3)
    assert validation._time(row, "dispatch", flow) == pytest.approx(received * (7168 + 4 * 56) / 153e3)


def test_a_model_of_one_card_has_shares_of_another():
    h800 = exchange.load(validation.MEMORY, "h800")
    assert h800.nvlink / LINKS.nvlink == pytest.approx(200 / 450)
    assert h800.rdma == LINKS.rdma


@pytest.mark.parametrize(
    ("changes", "ways", "says"),
    [
        ({"gpus": 12}, (8, 1), "a multiple of EP=8"),
        ({"gpus": 12}, (12, 1), "a divisor of the 128 experts"),
        ({"sizes": replace(SIZES, experts=60, hidden=2049)}, (1, 1), "measure layer"),
        (
            {"tokens": 1, "sizes": experts.Sizes(2880, 2880, 128, 4, "bf16"), "model": "gpt-oss-120b"},
            (8, 1),
            "measure layer --model gpt-oss-120b",
        ),
        ({}, (1, 4), "--tp 4"),
    ],
)
def test_what_cannot_be_estimated_says_why_in_one_line(rows, changes, ways, says):
    with pytest.raises(UserError, match=re.escape(says)) as error:
        layer.Model(question(**changes), rows).estimate(*ways)
    assert "\n" not in str(error.value)


def test_placement_changes_who_computes_but_not_how_much():
    group = flows.Group(ranks=8, tokens=256, experts=32, top_k=4)
    usual, planned = (
        flows.drawn(group, 1, 1.0, None, one) for one in (consecutive(32, 8), flows.planned(group, 1, 1.0))
    )
    assert usual.rows.sum() == planned.rows.sum() == 8 * 256 * 4
    assert planned.busiest < usual.busiest


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `scale`; return (exit status, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "scale", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


def test_the_command_prints_rows_and_writes_them(command, tmp_path):
    out, figure = tmp_path / "rows.parquet", tmp_path / "figure.svg"
    sizes = ("qwen3-30b-a3b", "--gpus", 8, "--tokens", 8, "--trials", 2, "--skew", 1)
    status, text, _ = command(*sizes, "--json", "--out", out, "--figure", figure)
    found = json.loads(text)
    assert status == 0
    assert [row["ep"] for row in found["rows"]] == [1, 2, 4, 8]
    assert found["best"]["drawn_us"] == min(row["drawn_us"] for row in found["rows"])
    assert all(row["error_p90"] >= row["error_median"] >= 0 for row in found["rows"])
    bands = validation.bands()
    for row in found["rows"]:  # the error of each part, by how much of the time it is
        sent, computed = row["dispatch_us"] + row["combine_us"], row["experts_us"]
        of_experts = 0 if row["measured"] else bands["experts", False][0] * computed
        of_exchange = sent and bands[row["mode"], False][0] * sent
        assert row["error_median"] == pytest.approx((of_experts + of_exchange) / (sent + computed))
    stored = pq.read_table(out)
    assert stored["layer_us"].to_pylist() == [row["layer_us"] for row in found["rows"]]
    about = json.loads(stored.schema.metadata[b"moe_routing_bench.scale"])
    assert len(about["links.yaml"]) == 64
    assert figure.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    _, table, _ = command(*sizes)
    assert "* best: EP" in table


def test_errors_are_those_of_the_published_lines(command):
    status, text, _ = command("--errors", "--json")
    assert status == 0
    found = pd.DataFrame(json.loads(text))
    lines = validation.lines()
    assert found["lines"].sum() == len(lines)
    few = lines[(lines["table"] == "deepep-v1-h800") & (lines["mode"] == LOW_LATENCY) & (lines["way"] == "combine")]
    line = found[
        (found["table"] == "deepep-v1-h800")
        & (found["mode"] == LOW_LATENCY)
        & (found["way"] == "combine")
        & (found["ranks"] == 8)
    ]
    assert line["median"].item() == pytest.approx(abs(few.iloc[0]["predicted_us"] / 114 - 1))


def test_errors_are_medians_and_a_percentile_of_their_sizes():
    """By hand: one far line of five moves neither the median nor the bias."""
    table = pd.DataFrame({"mode": "a", "error": [-0.1, 0.2, 0.2, -0.3, 4.0]})
    (found,) = validation.errors(table, ["mode"]).to_dict("records")
    assert found == {"mode": "a", "lines": 5, "median": 0.2, "p90": pytest.approx(2.52), "bias": 0.2}


def test_ranks_on_several_hosts_have_the_errors_of_several_hosts(command):
    bands = validation.bands()
    for ep in (8, 16):
        _, text, _ = command("qwen3-30b-a3b", "--gpus", ep, "--ep", ep, "--tokens", 64, "--trials", 1, "--json")
        (row,) = json.loads(text)["rows"]
        sent, computed = row["dispatch_us"] + row["combine_us"], row["experts_us"]
        errors = bands[row["mode"], ep > 8][1] * sent + bands["experts", False][1] * computed
        assert row["error_p90"] == pytest.approx(errors / (sent + computed)), ep


def test_the_documents_print_the_errors_that_the_tables_give():
    text = (PACKAGE.parents[1] / "docs/published.md").read_text(encoding="utf-8")
    printed = re.findall(
        r"^\| `([a-z0-9.-]+)` \| ([a-z-]+) \| ([0-9 to]+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE
    )
    assert (
        len(printed) == text.count("\n| `aisimulate-") + text.count("\n| `deepep-") + text.count("\n| `ligercute-") > 5
    )
    lines = validation.lines().assign(size=lambda table: 100 * table["error"].abs())
    for name, mode, ranks, count, median, most in printed:
        low, _, high = ranks.partition(" to ")
        mine = lines[
            (lines["table"] == name) & (lines["mode"] == mode) & lines["ranks"].between(int(low), int(high or low))
        ]
        assert (len(mine), f"{mine['size'].median():.0f}", f"{mine['size'].quantile(0.9):.0f}") == (
            int(count),
            median,
            most,
        )
    far = lines[
        (lines["mode"] == NORMAL) & (lines["ranks"] == 64) & (lines["table"] == "aisimulate-sglang-0.5.6.post2")
    ]
    one = lines[(lines["mode"] == "experts") & (lines["way"] == "tensorrt-llm")]
    for rows in (far, one):
        assert f"{rows['size'].median():.0f} %" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["deepseek-v33"], "deepseek-v3"),
        (["qwen3-30b-a3b", "--gpus", "0"], "1 to 100000"),
        (["qwen3-30b-a3b", "--gpus", "12", "--ep", "8"], "a multiple of EP=8"),
        (["qwen3-30b-a3b", "--gpus", "24", "--ep", "3"], "a divisor of the 128 experts"),
        (["qwen3-30b-a3b", "--overlap", "1.5"], "0 to 1"),
        (["qwen3-30b-a3b", "--mode", "fast"], "low-latency, normal, auto"),
        (["qwen3-30b-a3b", "--skew", "99"], "skew: got 99"),
        (["qwen3-30b-a3b", "--platform", "nvidia-none"], "measure layer --model qwen3-30b-a3b"),
    ],
)
def test_a_mistake_is_one_line(command, arguments, says):
    status, text, error = command(*arguments)
    assert (status, text) == (2, "")
    assert error.count("\n") == 1
    assert says in error
