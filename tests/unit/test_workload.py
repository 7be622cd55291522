"""Drawn and replayed routing: no expert twice, loads as asked for, the same for a seed and only for it."""

import math
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload import draw as workload
from moe_routing_bench.workload import skew, trace
from moe_routing_kernels.errors import UserError

SHAPES = st.integers(1, 20).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))


def cell(tokens, experts, top_k, target=0.0, sampler="exact", **change):
    return cell_of("permute", tokens=tokens, experts=experts, top_k=top_k).but(skew=target, sampler=sampler, **change)


def draw(one, seed=0):
    ids = workload.draw_ids(one, workload.generator(seed, "cpu"))
    assert ids.shape == (one.tokens, one.top_k) and ids.dtype == torch.int32
    assert ids.min() >= 0 and ids.max() < one.experts
    ordered = ids.sort(dim=1).values
    assert not (ordered[:, 1:] == ordered[:, :-1]).any(), "a row holds an expert twice"
    return ids


def loads(ids, experts):
    return torch.bincount(ids.flatten(), minlength=experts).double()


def variation(counts):
    return float(counts.std(unbiased=False) / counts.mean())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), SHAPES, st.floats(0, 1), st.integers(0, 9))
def test_exact_loads_are_the_expected_ones_to_within_a_token(tokens, shape, share, seed):
    target = share * skew.largest("exact", *shape)
    counts = loads(draw(cell(tokens, *shape, target), seed), shape[0]).sort(descending=True).values
    expected = tokens * torch.tensor(skew.inclusion_probabilities(target, "exact", *shape), dtype=torch.float64)
    assert (counts - expected).abs().max() < 1 + 1e-6
    assert (counts - expected).max() - (counts - expected).min() < 1 + 1e-6, "the largest remainders are rounded up"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), SHAPES, st.integers(0, 9))
def test_plackett_luce_never_repeats_an_expert(tokens, shape, seed):
    draw(cell(tokens, *shape, 0.0, "plackett_luce"), seed)


@pytest.mark.parametrize(
    ("experts", "top_k", "target", "above"),
    [(8, 1, 1.0, 0), (64, 1, 4.0, 0), (7, 2, 0.5, 0), (64, 2, 2.0, 0), (8, 3, 0.4, 0.06), (60, 6, 1.4, 0.02)],
)
def test_plackett_luce_realises_the_expected_variation(experts, top_k, target, above):
    tokens = 50_000
    counts = loads(draw(cell(tokens, experts, top_k, target, "plackett_luce")), experts)
    noise = 3 * skew.sampling_floor(tokens, experts, top_k)
    assert -noise < variation(counts) - target < noise + above * target  # from k=3, Rosen's approximation


def test_uniform_plackett_luce_varies_by_the_sampling_floor():
    shape = (200, 16, 4)
    squares = [variation(loads(draw(cell(*shape, 0.0, "plackett_luce"), seed), 16)) ** 2 for seed in range(200)]
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(skew.sampling_floor(*shape), rel=0.1)


def test_hot_experts_are_not_always_the_first():
    hottest = {int(loads(draw(cell(64, 16, 1, 2.0), seed), 16).argmax()) for seed in range(10)}
    assert len(hottest) > 3


@pytest.mark.parametrize("sampler", ["exact", "plackett_luce"])
def test_a_seed_gives_the_same_routing_and_another_seed_another(sampler):
    one = cell(64, 9, 3, 0.8, sampler)
    first, again, other = (workload.draw_routing(one, seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(first.ids, again.ids) and torch.equal(first.logits, again.logits)
    assert not torch.equal(first.ids, other.ids) and not torch.equal(first.logits, other.logits)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), SHAPES, st.floats(0, 1))
def test_logits_choose_the_drawn_experts(tokens, shape, share):
    routing = workload.draw_routing(cell(tokens, *shape, share * skew.largest("exact", *shape)), 3, "cpu")
    chosen = routing.logits.topk(shape[1], dim=1).indices
    assert torch.equal(chosen.sort(1).values.int(), routing.ids.sort(1).values)
    expected = routing.logits.gather(1, routing.ids.long()).softmax(1)
    assert (routing.weights.diff(dim=1) <= 0).all(), "a row's first expert has the largest logit"
    assert torch.equal(routing.weights, expected) and routing.weights.dtype == torch.float32
    assert torch.allclose(routing.weights.sum(1), torch.ones(tokens))


@pytest.mark.parametrize("router", ["deepseek_v3", "sqrtsoftplus_renorm"])
@pytest.mark.parametrize("bench", ["routing", "router"])
def test_a_draw_again_has_a_bias_that_changes_choices_and_what_is_timed_has_none(bench, router):
    """A kernel that leaves the bias out is right in what is timed, and wrong in what is drawn to check it."""
    one = cell_of(bench, tokens=64, hidden=64, experts=16, top_k=2, router=router)
    definition = BENCHES[bench].definition()
    for seed, differ in ((5, False), (workload.again(5, 1), True)):
        inputs = definition.build(one, seed, "cpu")
        with_bias, without = (
            definition.reference(one, inputs | {"bias": bias})["topk_ids"].sort(1).values
            for bias in (inputs["bias"], torch.zeros(16))
        )
        assert bool(inputs["bias"].any()) == bool((with_bias != without).any()) == differ


@pytest.mark.parametrize("top_k", [1, 4])
def test_no_drawn_choice_is_a_tie(top_k):
    """The last expert chosen is ahead of the first one left out by what float32 scores tell apart; of so many tokens some would not be."""
    cell = cell_of("routing", tokens=20_000, hidden=1, experts=64, top_k=top_k)
    ordered = workload.draw_routing(cell, 3, "cpu").logits.sort(dim=1, descending=True).values
    assert float((ordered[:, top_k - 1] - ordered[:, top_k]).min()) > 9.9e-5
    assert float((ordered[:, top_k] - ordered[:, top_k + 1]).min()) < 9.9e-5, "nobody moves these"


@pytest.mark.parametrize("ep", [None, 4])
def test_a_draw_again_has_the_loads_of_the_first_with_tokens_and_experts_in_another_order(ep):
    """Those of its own seed, and of the first rank the same experts."""
    one = cell(40, 16, 3, 0.8, "plackett_luce").but(ep=ep)
    first, other = (loads(draw(one, seed), 16) for seed in (5, 6))
    assert workload.again(5, 9) == 6 * 2**32 + 9
    drawn = [draw(one, workload.again(5, nonce)) for nonce in (1, 2, 2**32 - 1)]
    assert len({tuple(loads(ids, 16).tolist()) for ids in drawn}) == 3
    local = 16 // (ep or 1)
    for ids in drawn:
        counts = loads(ids, 16)
        assert counts.sort().values.tolist() == first.sort().values.tolist() != other.sort().values.tolist()
        assert counts[:local].sort().values.tolist() == first[:local].sort().values.tolist()
        assert not torch.equal(ids, draw(one, 5))


def test_a_bias_is_a_tenth_of_the_scores_spread():
    drawn = workload.draw_bias(20_000, workload.generator(1, "cpu"))
    assert drawn.std() == pytest.approx(0.1, rel=0.03) and abs(drawn.mean()) < 0.003 and drawn.dtype == torch.float32
    again = workload.selection_bias(8, workload.again(5, 1), "cpu")
    assert torch.equal(again, workload.draw_bias(8, workload.generator(workload.again(5, 1), "cpu")))
    assert not workload.selection_bias(8, 5, "cpu").any()


def test_logits_and_tokens_are_standard_normal():
    values = workload.draw_routing(cell(4000, 16, 2, 1.0), 0, "cpu").logits
    tokens = workload.randn((4000, 16), "bf16", workload.generator(0, "cpu"))
    assert tokens.dtype == torch.bfloat16
    for drawn in (values, tokens.float()):
        assert abs(drawn.mean()) < 0.02 and drawn.std() == pytest.approx(1, abs=0.02)


def test_a_trace_that_was_replaced_is_read_again(tmp_path):
    """By another file of the same time and size, and by one of another size."""
    path = tmp_path / "trace.parquet"

    def write(rows, name="trace.parquet"):
        pq.write_table(pa.table({"expert_ids": rows}), tmp_path / name)
        os.utime(tmp_path / name, ns=(10**18, 10**18))

    write([[3, 0], [1, 2]])
    trace.check(path, 2, 4, 2)
    write([[3, 3], [1, 2]], "other.parquet")
    (tmp_path / "other.parquet").replace(path)
    with pytest.raises(UserError, match="twice"):
        trace.check(path, 2, 4, 2)
    write([[3, 0], [1, 2]])
    trace.check(path, 2, 4, 2)
    before = path.stat().st_ino
    path.write_bytes(path.read_bytes()[:-1])
    os.utime(path, ns=(10**18, 10**18))
    assert path.stat().st_ino == before
    with pytest.raises(UserError):
        trace.check(path, 2, 4, 2)


@pytest.mark.parametrize(("tokens", "experts"), [(3, 4), (2, 5), (2, 4)])
def test_a_trace_has_the_tokens_and_experts_that_are_asked_for(tokens, experts, tmp_path):
    """Exactly as many will do."""
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table({"expert_ids": [[4, 0], [1, 2], [0, 3]], "constant": [7, 7, 7]}), path)
    if experts == 5:
        assert trace.read(path, tokens, experts, 2).tolist() == [[4, 0], [1, 2]]
        assert len(trace.read(path, 3, 5, 2)) == 3
    else:
        with pytest.raises(UserError, match="ids 0 to 4"):
            trace.read(path, tokens, experts, 2)
    with pytest.raises(UserError, match="3 rows"):
        trace.read(path, 4, 5, 2)


def test_a_trace_of_several_layers_is_not_replayed_as_one(tmp_path):
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table({"layer": [0, 0, 1, 1], "expert_ids": [[3, 0], [1, 2], [0, 3], [2, 1]]}), path)
    assert draw(cell(2, 4, 2, None, "trace", trace=str(path))).tolist() == [[3, 0], [1, 2]]
    with pytest.raises(UserError, match="'layer'"):
        draw(cell(3, 4, 2, None, "trace", trace=str(path)))


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint8()])
def test_a_trace_is_replayed_from_its_start(tmp_path, kind):
    rows = [[3, 0], [1, 2], [0, 3], [2, 1]]
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table({"expert_ids": pa.array(rows, pa.list_(kind)), "layer": [0] * 4}), path, row_group_size=2)
    ids = draw(cell(3, 4, 2, None, "trace", trace=str(path)))
    assert ids.tolist() == rows[:3]
