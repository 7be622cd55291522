"""The packed form of `cute_gate`, traced with numpy in place of the DSL: every token is right, or known to be in doubt."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")
from moe_routing_bench import cute_support
from moe_routing_bench.benches.gate import cute_gate
from moe_routing_bench.benches.gate.rules import rule_of
from moe_routing_bench.grid import Cell

SHAPES = [
    (4, 2, 1), (8, 2, 1), (8, 8, 1), (8, 8, 2), (12, 8, 1), (16, 1, 1), (16, 4, 2), (32, 8, 4), (40, 3, 2), (60, 4, 1),
    (64, 2, 2), (64, 8, 1), (64, 8, 4), (128, 8, 1), (128, 8, 2), (128, 8, 8), (160, 6, 4), (256, 8, 4), (256, 7, 8),
    (384, 6, 8), (1024, 8, 8),
]  # fmt: skip


class Row:
    """Scores (T, E) of T tokens; a value of the kernel is an array (T, team)."""

    def __init__(self, scores):
        self.scores = scores

    def __getitem__(self, ids):
        return np.take_along_axis(self.scores, np.broadcast_to(ids, (len(self.scores), ids.shape[1])), 1)

    def vector(self, group):
        return [self[4 * np.atleast_2d(group) + v] for v in range(4)]


def sums(values, threads_in_group):
    return np.broadcast_to(values.sum(1, keepdims=True, dtype=np.float32), values.shape)


@pytest.fixture(autouse=True)
def numbers(monkeypatch):
    """Numpy arrays as the kernel's values; lanes of a team are columns."""
    kinds = {"Float32": np.float32, "Uint32": np.uint32, "Int32": np.int32, "Boolean": np.bool_}
    for name, kind in kinds.items():
        monkeypatch.setattr(cute_gate, name, lambda value, kind=kind: np.asarray(value).astype(kind)[()])
    of = {getattr(cute_gate, name): kind for name, kind in kinds.items()}
    arch = SimpleNamespace(
        shuffle_sync_bfly=lambda value, step: value[:, np.arange(value.shape[1]) ^ step],
        rcp_approx=lambda value: 1 / value,
        warp_reduction_sum=sums,
    )
    size = lambda it: it.scores.shape[1] if isinstance(it, Row) else len(it)  # noqa: E731
    math = SimpleNamespace(exp2=lambda x, fastmath: np.exp2(x), exp=np.exp)
    monkeypatch.setattr(cute_gate, "cute", SimpleNamespace(arch=arch, size=size, math=math))
    monkeypatch.setattr(cute_gate, "cutlass", SimpleNamespace(min=np.minimum))
    monkeypatch.setattr(cute_gate, "fmax", lambda a, b, nan=False: (np.maximum if nan else np.fmax)(a, b))
    monkeypatch.setattr(cute_gate, "fmin", np.fmin)
    monkeypatch.setattr(cute_gate, "bitcast", lambda value, kind: np.ascontiguousarray(value).view(of[kind]))
    monkeypatch.setattr(cute_gate, "select", np.where)
    monkeypatch.setattr(cute_gate, "vector", Row.vector)


def choose(scores, top_k, team, router="softmax_topk_renorm"):
    """What the kernel finds for scores (T, E): ids (T, k), weights (T, k), tokens in doubt (T,)."""
    row, member = Row(scores), np.arange(team, dtype=np.int32)[None]
    each = cute_support.power_of_2(top_k) // team
    with np.errstate(all="ignore"):
        keys, bounds, strange = cute_gate.packed_choice(row, member, top_k, team, np.uint32(0xFFFFFFFF))
        chosen, values, shares = [None] * each, [None] * each, [None] * each
        falls, sure = cute_gate.complete(
            row, keys, bounds, member, rule_of(Cell("gate", 0, router=router)), top_k, team, chosen, values, shares
        )
    flat = lambda lists: np.stack(np.broadcast_arrays(*lists), 2).reshape(len(scores), -1)[:, :top_k]  # noqa: E731
    ids, values, weights = flat(chosen), flat(values), flat(shares)
    tangled = np.flatnonzero(~falls.all(1))
    every, exact = list(ids[tangled].T), list(values[tangled].T)
    places = [cute_gate.rank(value, expert, exact, every) for value, expert in zip(exact, every, strict=True)]
    for array in (ids, weights):
        for place, kept in zip(places, array[tangled].T.copy(), strict=True):
            array[tangled, place] = kept
    return ids, weights, (np.broadcast_to(~sure, falls.shape) | (strange != strange)).any(1)


def near(rng, tokens, experts):
    """Scores that differ only in their lowest bits, or not at all."""
    return (np.float32(1.5).view(np.uint32) + rng.integers(0, 3 * experts, (tokens, experts), np.uint32)).view(
        np.float32
    )


KINDS = {
    "normal": lambda rng, t, e: rng.standard_normal((t, e), np.float32),
    "negative": lambda rng, t, e: -np.abs(rng.standard_normal((t, e), np.float32)),
    "tied": lambda rng, t, e: rng.integers(-2, 9, (t, e)).astype(np.float32),
    "near": near,
    "near_and_negative": lambda rng, t, e: -near(rng, t, e),
    "near_pairs": lambda rng, t, e: np.repeat(rng.standard_normal((t, e), np.float32), 2, 1)[:, :e]
    * (1 + 2.0**-23 * rng.integers(-9, 9, (t, e))).astype(np.float32),
    "zeros": lambda rng, t, e: rng.choice(np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-40]), (t, e)),
    "far": lambda rng, t, e: rng.choice(np.float32([3e38, -3e38, np.inf, -np.inf, 1, np.nan]), (t, e), p=[.3, .2, .02, .02, .44, .02]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "top_k", "team"), SHAPES)
def test_choices_are_exact_or_in_doubt(experts, top_k, team, kind):
    rng = np.random.default_rng(7)
    scores = KINDS[kind](rng, 3000, experts)
    ids, weights, doubt = choose(scores, top_k, team)
    assert doubt[np.isnan(scores).any(1)].all()
    sure = ~doubt
    expected = np.argsort(-scores[sure].astype(np.float64), 1, kind="stable")[:, :top_k]
    assert (ids[sure] == expected).all()
    best = np.take_along_axis(scores[sure].astype(np.float64), expected, 1)
    shares = np.exp(best - best[:, :1])
    np.testing.assert_allclose(weights[sure], shares / shares.sum(1, keepdims=True), rtol=1e-5, atol=1e-37)
    if kind == "normal":
        assert doubt.mean() < 0.01


@pytest.mark.parametrize("router", ["softmax_topk", "llama4"])
def test_other_weights(router):
    scores = np.random.default_rng(7).standard_normal((500, 128), np.float32)
    ids, weights, doubt = choose(scores, 8, 2, router)
    best = np.take_along_axis(scores.astype(np.float64), ids, 1)
    whole = np.exp(scores.astype(np.float64)).sum(1, keepdims=True)
    expected = np.exp(best) / whole if router == "softmax_topk" else 1 / (1 + np.exp(-best))
    np.testing.assert_allclose(weights[~doubt], expected[~doubt], rtol=1e-5)
