"""The numbers of the scale model, computed here in another way: loops over ranks, and a small table of layers whose sizes all differ."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.scale import exchange, experts, flows, layer, validation
from moe_routing_bench.scale.exchange import LOW_LATENCY, NORMAL, Links, Times
from moe_routing_bench.traces import writing
from moe_routing_kernels.routing.placement import Placement

SIZES = experts.Sizes(hidden=64, intermediate=48, experts=12, top_k=3, weights="bf16")
LINKS = Links(5.0, 11.0, 7.0, nvlink=300.0, rdma=40.0, memory=4000.0, host=2, capacity=1e9)


@pytest.mark.parametrize(
    ("payload", "mode", "expected"),
    [("bf16", NORMAL, 512), ("bf16", LOW_LATENCY, 528), ("fp8", NORMAL, 264), ("fp8", LOW_LATENCY, 280)],
)
def test_bytes_of_a_row(payload, mode, expected):
    assert exchange.row_bytes(256, payload, mode) == expected


def test_links_of_a_card_are_its_shares_of_the_h200():
    known = exchange.parameters()
    ours, theirs = known["cards"]["h200"], known["cards"]["h800"]
    h200, h800 = exchange.load(4e6), exchange.load(4e6, "h800")
    assert (h200.launch_us, h200.rdma_us, h200.rdma, h200.memory) == (30, 8.35, 50e3, 4e6)
    assert (h200.capacity, h800.capacity) == (141e9, 80e9)
    assert h800.memory == pytest.approx(4e6 * theirs["memory_gb_per_s"] / ours["memory_gb_per_s"])
    assert h800.nvlink == pytest.approx(h200.nvlink * theirs["nvlink_gb_per_s"] / ours["nvlink_gb_per_s"])
    sizes, spent = exchange.points(known, "push")
    assert spent[0] == pytest.approx(8 * 2**20 / 266e3) and sizes[-1] == 2**28
    alpha, beta = exchange.fit([10.0, 20.0, 50.0], [3 + 10 / 4, 3 + 20 / 4, 3 + 50 / 4])
    assert (alpha, beta) == (pytest.approx(3), pytest.approx(4))


def random_flow(ranks, hosts, seed):
    """A flow in which no two numbers of rows are alike."""
    drawn = np.random.default_rng(seed).permutation(3 * ranks * ranks)[: ranks * (2 * ranks + hosts)].astype(float)
    parts = np.split(drawn, [ranks * ranks, 2 * ranks * ranks])
    return flows.Flow(9, parts[0].reshape(ranks, ranks), parts[1].reshape(ranks, ranks), parts[2].reshape(ranks, hosts))


def moved(flow, host, relayed):
    """Rows over NVLink and RDMA in the busier direction, and rows of experts and of tokens, of each rank: rank by rank."""
    ranks = range(len(flow.rows))
    found = []
    for r in ranks:
        near, far = [0.0, 0.0], [0.0, 0.0]  # out, in
        rows = flow.once if relayed else flow.rows
        for s in ranks:
            if s != r and s // host == r // host and not relayed:
                near[0] += rows[r, s]
                near[1] += rows[s, r]
            if s // host != r // host and not relayed:
                far[0] += rows[r, s]
                far[1] += rows[s, r]
        if relayed:
            for s in ranks:  # a sender's rows land on the GPU of a host with its place, which hands them on
                if s % host == r % host:
                    near[0] += sum(rows[s, t] for t in ranks if t != r and t // host == r // host)
                    far[1] += flow.hosts[s, r // host] * (s // host != r // host)
                if s // host == r // host and s != r:
                    near[1] += sum(rows[t, r] for t in ranks if t % host == s % host)
            far[0] = sum(flow.hosts[r, h] for h in range(flow.hosts.shape[1]) if h != r // host)
        found.append((max(near), max(far), rows[:, r].sum(), rows[r].sum()))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("mode", "once"), [(NORMAL, True), (NORMAL, False), (LOW_LATENCY, True)])
def test_times_are_those_of_the_busiest_rank(mode, once, seed):
    flow = random_flow(6, 3, seed)
    latency = {NORMAL: 11.0, LOW_LATENCY: 5.0}[mode] + 7.0
    out, back = exchange.row_bytes(128, "fp8", mode), 256
    dispatch, combine = [], []
    for near, far, here, there in moved(flow, 2, relayed=once and mode == NORMAL):
        wire = max(near / 300, far / 40)
        dispatch.append(wire * out + (3 * here * out + 9 * back) / 4000)
        combine.append(wire * back + (here + 2 * there + 9) * back / 4000)
    found = exchange.times(flow, 128, mode, "fp8", LINKS, once)
    assert found == Times(pytest.approx(latency + max(dispatch)), pytest.approx(latency + max(combine)))
    assert found.both == found.dispatch + found.combine


def test_ranks_of_one_host_need_no_network():
    flow = random_flow(2, 1, 1)
    for mode, latency in ((NORMAL, 11.0), (LOW_LATENCY, 5.0)):
        one = exchange.times(replace(flow, tokens=0, rows=flow.rows * 0, once=flow.once * 0), 128, mode, "fp8", LINKS)
        assert one == Times(latency, latency)


@pytest.mark.parametrize(("experts_", "local", "top_k"), [(7, 3, 2), (6, 2, 4), (6, 3, 4), (5, 1, 1), (5, 5, 2)])
def test_the_chance_to_hit_a_rank_is_that_of_all_choices(experts_, local, top_k):
    choices = list(itertools.combinations(range(experts_), top_k))
    assert flows.hit(experts_, local, top_k) == pytest.approx(np.mean([min(one) < local for one in choices]))


def test_a_flow_counts_rows_of_experts_over_their_mean():
    rows = np.array([[1.0, 9.0, 2.0], [0.0, 3.0, 3.0], [1.0, 2.0, 0.0]])
    assert flows.Flow(4, rows, rows, rows[:, :1]).busiest == 14 / 7
    assert [flows.Group(ranks, 4, 24, 2, host=4).hosts for ranks in (1, 4, 5, 8)] == [1, 1, 2, 2]


GROUP = flows.Group(ranks=4, tokens=3, experts=8, top_k=2, host=2)


@pytest.mark.parametrize("skew", [0.0, 0.6])
def test_a_drawn_flow_counts_each_assignment_token_and_host_once(skew):
    ids, share = flows._drawn_ids(GROUP, 4, skew, None)
    rows, once, hosts = np.zeros((4, 4)), np.zeros((4, 4)), np.zeros((4, 2))
    for token, chosen in enumerate(ids.tolist()):
        for expert in chosen:
            rows[token // 3, expert // 2] += 1
        for rank in {expert // 2 for expert in chosen}:
            once[token // 3, rank] += 1
        for host in {expert // 4 for expert in chosen}:
            hosts[token // 3, host] += 1
    flow = flows.drawn(GROUP, 4, skew)
    assert flow.tokens == 3 and (flow.rows == rows).all() and (flow.once == once).all() and (flow.hosts == hosts).all()
    assert share.sum() == pytest.approx(2) and (flows.chances(GROUP, 4, skew) == share).all()


def test_the_share_of_an_expert_is_how_often_it_is_drawn(tmp_path):
    group = replace(GROUP, tokens=2048)
    ids, share = flows._drawn_ids(group, 4, 1.0, None)
    np.testing.assert_allclose(np.bincount(ids.ravel()) / len(ids), share, atol=0.03)
    assert share.max() > 3 * share.min()
    path = tmp_path / "routing.parquet"
    recorded = ids[: 4 * 3].astype(np.int32)
    writing.write(path, recorded)
    assert (flows.chances(GROUP, 4, 0.0, path) == np.bincount(recorded.ravel(), minlength=8) / 12).all()


def test_replicas_of_an_expert_all_get_rows():
    """Expert 3 lies on all ranks: rows to it go to each of them, and other experts are where their slot is."""
    slots = np.array([[0, 3], [3, 1], [2, 3], [3, 4]])
    ids = np.array([[3, 0], [3, 1], [2, 3], [4, 3]] * 200)
    found = flows._slots_of(ids, slots, np.random.default_rng(2))
    assert (slots.ravel()[found] == ids).all()
    counts = np.bincount(found[ids == 3] // 2, minlength=4)
    assert counts.sum() == 800 and counts.min() > 140


def test_a_plan_spreads_the_hottest_experts():
    found = flows.chances(GROUP, 4, 1.2)
    placed = flows.planned(GROUP, 4, 1.2, spare=1)
    assert [len(rank) for rank in placed.slots] == [3] * 4 and {e for rank in placed.slots for e in rank} == {*range(8)}
    assert placed.replicas[int(found.argmax())] == max(placed.replicas) > 1 == placed.replicas[int(found.argmin())]
    assert placed.imbalance(found.tolist()) < Placement(((0, 1), (2, 3), (4, 5), (6, 7))).imbalance(found.tolist())


def test_loads_of_many_tokens_are_drawn_for_all_of_them(monkeypatch):
    """Each expert has a share of all tokens, not of those that are drawn one by one."""
    monkeypatch.setattr(flows, "DRAWN", 512)
    group = flows.Group(ranks=4, tokens=20_000, experts=8, top_k=2, host=2)
    flow = flows.drawn(group, 3, 0.6)
    share = flows.chances(group, 3, 0.6)
    expected = 80_000 * share.reshape(4, 2).sum(1)
    np.testing.assert_allclose(flow.rows.sum(0), expected, rtol=0.02)
    assert (flow.rows == flow.rows[0]).all() and (flow.once.sum(0) < flow.rows.sum(0)).all()
    ids, _ = flows._drawn_ids(group, 3, 0.6, None)
    together = [np.mean([(one // 2 == rank).sum() > 0 for one in ids]) for rank in range(4)]
    apart = [np.mean([(one // 2 == rank).sum() for one in ids]) for rank in range(4)]
    np.testing.assert_allclose(flow.once[0] / flow.rows[0], np.divide(together, apart), rtol=1e-9)
    np.testing.assert_allclose(flow.hosts[2] / 20_000, [np.mean((ids // 4 == h).any(1)) for h in (0, 1)], rtol=1e-9)


def test_experts_on_some_hosts_alone():
    """Half of 4 hosts: of 32 experts 16 may be chosen, by tokens that come to a host with a chance of one half."""
    even = flows.even(flows.Group(ranks=8, tokens=10, experts=32, top_k=3, host=2, host_groups=2))
    assert even.rows == pytest.approx(np.full((8, 8), 10 * 3 / 8))
    assert even.once == pytest.approx(np.full((8, 8), 10 * 0.5 * flows.hit(16, 4, 3)))
    assert even.hosts == pytest.approx(np.full((8, 4), 10 * 0.5 * flows.hit(16, 8, 3)))


def layers():
    """Layers whose median, roofline, ceilings and sizes all differ, and some that must not count."""
    known = [(1, 1, 40.0), (4, 1, 52.0), (16, 1, 75.0), (64, 1, 160.0), (64, 1, 150.0), (64, 4, 44.0), (16, 2, 61.0)]
    rows = [
        {"tokens": tokens, "ranks": ranks, "median_us": us, "roofline_us": 0.2 * us + place, "run": f"run{place}"}
        for place, (tokens, ranks, us) in enumerate(known)
    ]
    table = pd.DataFrame(rows).assign(
        hidden=64, intermediate=48, experts=12, top_k=3, weights="bf16", dtype="bf16", implementation="cute"
    )
    table["suspect"] = table["median_us"] == 52.0
    table["copy_gb_per_s"] = [1.0, 2.0, 2.5, 9.0, 4.0, 50.0, 60.0]
    table["peak_tflops"] = [0.1, 0.3, 0.25, 0.9, 0.4, 5.0, 6.0]
    others = [
        {"top_k": 4, "median_us": 1.0},
        {"weights": "int4_g128", "median_us": 2.0},
        {"dtype": "fp16", "median_us": 3.0},
        {"intermediate": 24, "tokens": 1, "median_us": 11.0, "roofline_us": 2.0},
        {"experts": 24, "tokens": 1, "median_us": 31.0, "roofline_us": 3.0},
        {"experts": 24, "tokens": 1, "median_us": 99.0, "roofline_us": 1.0},
        {"hidden": 128, "tokens": 1, "median_us": 60.0, "roofline_us": 30.0},
    ]
    return pd.concat([table, *(table.iloc[3:4].assign(**other) for other in others)], ignore_index=True)


def test_a_rank_of_stored_layers():
    known = experts.Experts(layers(), SIZES)
    assert known.tokens == [1, 4, 16, 64]
    # of the fastest of each number of tokens: 1, 2, 2.5 and 4 GB/s
    assert (known.memory, known.rate) == (pytest.approx(2.25e3), pytest.approx(0.275e6))
    # a layer of one token of each size: the fastest, less its roofline: 40 - 8, 11 - 2, 31 - 3 and 60 - 30, of all one more 3 us
    assert known.fixed == pytest.approx(np.median([32.0, 9.0, 28.0, 30.0]))
    assert SIZES.expert_bytes == 3 * 64 * 48 * 2
    assert replace(SIZES, weights="int4_g128").expert_bytes < SIZES.expert_bytes / 3
    active = 12 * (1 - (1 - 3 / 12) ** 5)
    bytes_ = (active * SIZES.expert_bytes + 4 * 5 * 64) / 2.25e3
    products = 2 * 3 * 5 * 3 * 64 * 48 / 0.275e6
    assert known.least(5) == pytest.approx(products)
    assert known.roofline(5) == pytest.approx(max(bytes_, products)) and bytes_ > products
    slow = experts.Experts(layers().assign(peak_tflops=1e-4), SIZES)
    assert slow.roofline(5) == pytest.approx(2 * 3 * 5 * 3 * 64 * 48 / 1e2)
    assert known.over == pytest.approx([us / known.roofline(t) for t, us in ((1, 40), (4, 52), (16, 75), (64, 150))])


def test_between_stored_layers_and_among_ranks():
    known = experts.Experts(layers(), SIZES)
    assert known.layer(4) == experts.Answer(52.0, True, "measured at T=4 (cute, run1, suspect)")
    assert known.layer(64) == experts.Answer(150.0, True, "measured at T=64 (cute, run4)")
    assert known.layer(1) == experts.Answer(40.0, True, "measured at T=1 (cute, run0)")
    with pytest.raises(experts.UserError, match=r"rows of at most 0\.5 tokens"):
        known.layer(0.5)
    share = math.log(8 / 4) / math.log(16 / 4)
    over = (1 - share) * known.over[1] + share * known.over[2]
    assert known.layer(8) == experts.Answer(pytest.approx(over * known.roofline(8)), False, "between T=4 and T=16")
    assert known.layer(4, 2.0).us == pytest.approx(known.layer(8).us) and not known.layer(4, 2.0).measured
    assert known.rank(16, 4) == experts.Answer(44.0, True, "measured at T=64, EP=4 (cute, run5)")
    assert known.rank(4, 4).us == pytest.approx(known.fixed + (75.0 - known.fixed) / 4)
    uneven = known.rank(16, 4, 1.5)
    assert not uneven.measured and uneven.us == pytest.approx(known.fixed + (known.layer(64, 1.5).us - known.fixed) / 4)
    assert known.rank(4, 1) == known.layer(4) and known.rank(1, 4).us == pytest.approx(
        known.fixed + (52.0 - known.fixed) / 4
    )


def test_stored_layers_are_whole_even_and_of_all_runs_of_a_platform():
    rows = experts.stored("nvidia-h200")
    assert (rows["status"] == "ok").all() and rows["run"].nunique() > 2
    assert rows[["trace", "capacity_factor", "shared_intermediate"]].isna().all().all()
    assert {run.partition(".")[0] for run in rows["run"]} == {"nvidia-h200"} and rows["weights"].notna().all()


def model(**changes):
    """A model of the table above with four times the tokens, whose links are simple numbers."""
    rows = layers()
    rows = pd.concat([rows, rows.assign(tokens=4 * rows["tokens"], median_us=3 * rows["median_us"])])
    rows = pd.concat([rows, rows.assign(intermediate=2 * rows["intermediate"], median_us=rows["median_us"] + 9)])
    asked = layer.Question("small", SIZES, layers=10, gpus=4, tokens=4, payload="bf16", trials=3, seed=2)
    made = layer.Model(replace(asked, **changes), rows.reset_index(drop=True))
    made.__dict__["links"] = LINKS
    return made


def test_the_ways_of_some_gpus():
    """EP divides GPUs and experts, and fills hosts of two; TP divides GPUs and the width."""
    assert list(model(gpus=12).ways()) == [(1, 1), (2, 1), (4, 1), (6, 1), (12, 1), (1, 2), (1, 4)]
    assert list(model(gpus=24).ways()) == [(1, 1), (2, 1), (4, 1), (6, 1), (12, 1), (1, 2), (1, 4), (1, 8)]
    odd = model(gpus=24)
    odd.question = replace(odd.question, sizes=replace(SIZES, intermediate=36))
    assert [tp for ep, tp in odd.ways() if ep == 1] == [1, 2, 4]
    assert model().refused(3) and model().refused(2) is None and model(gpus=12).refused(3)


def test_an_estimate_takes_the_faster_mode_and_draws_of_its_own_seeds():
    asked = model(skew=0.6)
    found = asked.estimate(4)
    group = flows.Group(4, 4, 12, 3, 2)
    even = flows.even(group)
    modes = {mode: exchange.times(even, 64, mode, "bf16", LINKS) for mode in (LOW_LATENCY, NORMAL)}
    best = min(modes, key=lambda mode: modes[mode].both)
    answer = asked.experts.rank(4, 4)
    assert (found.mode, found.dispatch_us, found.combine_us) == (best, modes[best].dispatch, modes[best].combine)
    assert (found.ep, found.tp, found.dp, found.experts_us) == (4, 1, 1, answer.us)
    assert found.layer_us == pytest.approx(answer.us + modes[best].both)
    assert found.communication == pytest.approx(modes[best].both / found.layer_us)
    draws = [flows.drawn(group, seed, 0.6) for seed in (2, 3, 4)]
    times = [
        asked.experts.rank(4, 4, flow.busiest).us + exchange.times(flow, 64, best, "bf16", LINKS).both for flow in draws
    ]
    assert (found.low_us, found.drawn_us, found.high_us) == pytest.approx(tuple(np.percentile(times, [5, 50, 95])))
    assert found.busiest == sorted(flow.busiest for flow in draws)[1]
    placed = [flows.planned(group, seed, 0.6, None, 1) for seed in (2, 3, 4)]
    again = [flows.drawn(group, seed, 0.6, None, one) for seed, one in zip((2, 3, 4), placed, strict=True)]
    times = [
        asked.experts.rank(4, 4, flow.busiest).us + exchange.times(flow, 64, best, "bf16", LINKS).both for flow in again
    ]
    assert found.planned_us == pytest.approx(np.median(times)) != pytest.approx(np.mean(times))
    assert found.memory_share == pytest.approx(12 * SIZES.expert_bytes * 10 / 1e9 / 4)
    assert model(layers=None).estimate(4).fits is None and found.fits is True
    assert replace(found, memory_share=0.8).fits is True and replace(found, memory_share=0.81).fits is False


def test_a_trace_is_planned_and_communication_that_experts_hide_does_not_count(tmp_path):
    path = tmp_path / "routing.parquet"
    writing.write(path, np.stack([np.random.default_rng(1).permutation(12)[:3] for _ in range(64)]), 12)
    found = model(trace=path, overlap=0.5).estimate(4)
    assert found.planned_us is not None and model().estimate(4).planned_us is None
    both = found.dispatch_us + found.combine_us
    assert found.layer_us == pytest.approx(found.experts_us + both - min(found.experts_us, 0.5 * both))
    assert found.communication == pytest.approx((found.layer_us - found.experts_us) / found.layer_us)


@pytest.mark.parametrize("once", [True, False])
def test_a_question_says_the_mode_the_payload_and_whether_rows_are_sent_once(once):
    for mode in (LOW_LATENCY, NORMAL):
        found = model(mode=mode, payload="fp8", once=once).estimate(4)
        times = exchange.times(flows.even(flows.Group(4, 4, 12, 3, 2)), 64, mode, "fp8", LINKS, once)
        assert (found.mode, found.dispatch_us, found.combine_us) == (mode, times.dispatch, times.combine)


def test_tensor_parallel_ranks_hold_a_share_of_the_width():
    found = model(sizes=replace(SIZES, intermediate=96), gpus=8).estimate(1, 2)
    way = 5.0 + 2 * 64 * 4 / 300 + 2 * 2 * 64 * 4 / 4000
    assert (found.mode, found.dp, found.dispatch_us, found.combine_us) == (
        "all-gather",
        4,
        pytest.approx(way),
        pytest.approx(way),
    )
    assert found.experts_us == model().experts.layer(8).us and found.busiest == 1.0 and found.planned_us is None
    assert found.low_us == found.high_us == pytest.approx(found.experts_us + 2 * way)


def test_published_lines_are_those_of_their_tables():
    """The first layer on two GPUs, and all ranks of experts, straight from the files."""
    lines = validation.lines()
    assert (lines["error"] == lines["predicted_us"] / lines["published_us"] - 1).all()
    root = PACKAGE.parents[1] / "config/published"
    table = pd.read_csv(root / "scale/ligercute-h200.csv")
    one = lines[lines["mode"] == "layer"].iloc[0]
    work = 6 * 8192 * 8 * 2048 * 768 / 1e6
    rates = table[(table["model"] == "qwen3-30b-a3b") & (table["implementation"] == one["way"])].set_index("ranks")
    assert one["published_us"] == pytest.approx(work / rates["tflops"][2])
    both = exchange.times(flows.even(flows.Group(2, 8192, 128, 8)), 2048, NORMAL, "bf16", validation.links("h200")).both
    assert one["predicted_us"] == pytest.approx(work / rates["tflops"][1] + both)
    rows = pd.read_csv(root / "aisimulate-h200.csv")
    rows = rows[(rows["loads"] == "balanced") & (rows["tensor_parallel"] == 1)]
    key = ["tokens", "hidden", "intermediate", "experts", "top_k", "weights", "package", "version", "kernel"]
    pairs = rows[rows["expert_parallel"] > 1].merge(rows[rows["expert_parallel"] == 1], on=key, suffixes=("", "_whole"))
    ours = lines[lines["mode"] == "experts"]
    assert len(ours) == len(pairs) and ours["published_us"].tolist() == pairs["median_us"].tolist()
    ranks = pairs["expert_parallel"]
    expected = validation.FIXED + (pairs["median_us_whole"] - validation.FIXED).clip(lower=0) / ranks
    np.testing.assert_allclose(ours["predicted_us"], expected)
    bands, near = validation.bands(), lines[(lines["mode"] == NORMAL) & (lines["ranks"] <= 8)]["error"].abs()
    assert bands[NORMAL, False] == (near.median(), near.quantile(0.9)) and (NORMAL, True) in bands


def test_a_published_rank_is_compared_with_the_layer_of_its_own_kernel(monkeypatch):
    """Balanced loads without tensor parallelism alone; a rank without its layer has no line."""
    key = {"tokens": 8, "hidden": 4, "intermediate": 2, "experts": 16, "top_k": 2, "weights": "bf16", "package": "p"}
    key |= {"version": "1", "kernel": "k", "loads": "balanced", "tensor_parallel": 1}

    def row(us, ep, **changes):
        return key | {"median_us": us, "expert_parallel": ep} | changes

    rows = [
        row(94.2, 1),
        row(30.0, 4),
        row(20.0, 8, kernel="other"),
        row(9.0, 4, tensor_parallel=2),
        row(8.0, 4, loads="skewed"),
    ]
    rows += [row(10.0, 1, tokens=1), row(12.0, 2, tokens=1)]
    monkeypatch.setattr(validation.pd, "read_csv", lambda file: pd.DataFrame(rows))
    found = list(validation.ranks_of_experts())
    assert [(one["ranks"], one["tokens"], one["published_us"], one["way"]) for one in found] == [
        (4, 8, 30.0, "p"),
        (2, 1, 12.0, "p"),
    ]
    assert [one["predicted_us"] for one in found] == pytest.approx([14.2 + 80 / 4, 14.2])


def test_a_published_exchange_keeps_tokens_to_the_hosts_of_its_source():
    """Four of eight at most, straight from the file of DeepEP."""
    lines = validation.lines()
    table = pd.read_csv(PACKAGE.parents[1] / "config/published/scale/deepep-v1-h800.csv")
    far = table[(table["host_groups"] > 0) & (table["ranks"] > 8 * table["host_groups"])].iloc[0]
    group = flows.Group(
        *(int(far[name]) for name in ("ranks", "tokens", "experts", "top_k")), 8, int(far["host_groups"])
    )
    flow = flows.even(group)
    times = exchange.times(flow, int(far["hidden"]), far["mode"], "fp8", validation.links("h800"))
    found = lines[
        (lines["table"] == "deepep-v1-h800") & (lines["ranks"] == far["ranks"]) & (lines["mode"] == far["mode"])
    ]
    assert (
        far["ranks"] == 64
        and times.dispatch
        < exchange.times(
            flows.even(replace(group, host_groups=None)),
            int(far["hidden"]),
            far["mode"],
            "fp8",
            validation.links("h800"),
        ).dispatch
    )
    assert found.set_index("way")["predicted_us"].to_dict() == {"dispatch": times.dispatch, "combine": times.combine}
    if far["counts"] == "rdma":
        published = flow.hosts[0].sum() * 2 * far["hidden"] / (far["combine"] * 1e3)
        assert found.set_index("way")["published_us"]["combine"] == pytest.approx(published)
