"""`cute_packed`, traced with numpy in place of the DSL: selected token is right, or known to be uncertain."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")
from moe_routing_kernels.cute import power_of_2
from moe_routing_kernels.gate import cute_packed, cute_primitives, rule_of

SHAPES = [
    (4, 2, 1),
    (8, 2, 1),
    (8, 8, 1),
    (8, 8, 2),
    (12, 8, 1),
    (16, 1, 1),
    (16, 4, 2),
    (32, 8, 4),
    (40, 3, 2),
    (60, 4, 1),
    (64, 2, 2),
    (64, 8, 1),
    (64, 8, 4),
    (128, 8, 1),
    (128, 8, 2),
    (128, 8, 8),
    (160, 6, 4),
    (256, 8, 4),
    (256, 7, 8),
    (384, 6, 8),
    (1024, 8, 8),
    (64, 10, 2),
    (128, 16, 8),
    (512, 10, 4),
    (512, 10, 8),
    (512, 12, 16),
    (896, 16, 16),
]


class Row:
    """Scores (T, E) of T tokens; a value of the kernel is an array (T, threads per token)."""

    def __init__(self, scores):
        self.scores = scores

    def __getitem__(self, ids):
        return np.take_along_axis(self.scores, np.broadcast_to(ids, (len(self.scores), ids.shape[1])), 1)

    def load_group(self, group):
        return [self[4 * np.atleast_2d(group) + v] for v in range(4)]


def warp_sum(values, threads_in_group):
    return np.broadcast_to(values.sum(1, keepdims=True, dtype=np.float32), values.shape)


@pytest.fixture(autouse=True)
def numbers(monkeypatch):
    """Numpy arrays as the kernel's values; the threads of a token are columns."""
    kinds = {"Float32": np.float32, "Uint32": np.uint32, "Int32": np.int32, "Boolean": np.bool_}
    scalars = {name: lambda value, kind=kind: np.asarray(value).astype(kind)[()] for name, kind in kinds.items()}
    of = {scalars[name]: kind for name, kind in kinds.items()}
    arch = SimpleNamespace(
        shuffle_sync_bfly=lambda value, step: value[:, np.arange(value.shape[1]) ^ step],
        rcp_approx=lambda value: 1 / value,
        warp_reduction_sum=warp_sum,
    )
    size = lambda it: it.scores.shape[1] if isinstance(it, Row) else len(it)  # noqa: E731
    math = SimpleNamespace(exp2=lambda x, fastmath: np.exp2(x), exp=np.exp)
    replaced = scalars | {
        "cute": SimpleNamespace(arch=arch, size=size, math=math),
        "cutlass": SimpleNamespace(min=np.minimum),
        "fmax": lambda a, b, nan=False: (np.maximum if nan else np.fmax)(a, b),
        "fmin": np.fmin,
        "bitcast": lambda value, kind: np.ascontiguousarray(value).view(of[kind]),
        "select": np.where,
        "load_group": Row.load_group,
    }
    for module in (cute_packed, cute_primitives):
        for name, value in replaced.items():
            monkeypatch.setattr(module, name, value, raising=False)


def choose(scores, top_k, threads, router="softmax_topk_renorm"):
    """What the kernel finds for scores (T, E): ids (T, k), weights (T, k), uncertain tokens (T,)."""
    row, member = Row(scores), np.arange(threads, dtype=np.int32)[None]
    choices = power_of_2(top_k) // threads
    with np.errstate(all="ignore"):
        keys, bounds, non_finite = cute_packed.choose_experts(row, member, top_k, threads, np.uint32(0xFFFFFFFF))
        chosen, values, shares = [None] * choices, [None] * choices, [None] * choices
        in_order, above_bound = cute_packed.complete(
            row, keys, bounds, member, rule_of(router), top_k, threads, chosen, values, shares
        )
    flat = lambda lists: np.stack(np.broadcast_arrays(*lists), 2).reshape(len(scores), -1)[:, :top_k]  # noqa: E731
    ids, values, weights = flat(chosen), flat(values), flat(shares)
    unsorted = np.flatnonzero(~in_order.all(1))
    selected, exact = list(ids[unsorted].T), list(values[unsorted].T)
    places = [cute_packed.rank(value, expert, exact, selected) for value, expert in zip(exact, selected, strict=True)]
    for array in (ids, weights):
        for place, kept in zip(places, array[unsorted].T.copy(), strict=True):
            array[unsorted, place] = kept
    return ids, weights, (np.broadcast_to(~above_bound, in_order.shape) | (non_finite != non_finite)).any(1)


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
    "near_pairs": lambda rng, t, e: (
        np.repeat(rng.standard_normal((t, e), np.float32), 2, 1)[:, :e]
        * (1 + 2.0**-23 * rng.integers(-9, 9, (t, e))).astype(np.float32)
    ),
    "zeros": lambda rng, t, e: rng.choice(np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-40]), (t, e)),
    "far": lambda rng, t, e: rng.choice(
        np.float32([3e38, -3e38, np.inf, -np.inf, 1, np.nan]), (t, e), p=[0.3, 0.2, 0.02, 0.02, 0.44, 0.02]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "top_k", "threads"), SHAPES)
def test_choices_are_exact_or_uncertain(experts, top_k, threads, kind):
    rng = np.random.default_rng(7)
    tokens = 3000 if experts <= 128 else 500  # of many experts more of a token's lie near each other
    scores = KINDS[kind](rng, tokens, experts)
    ids, weights, uncertain = choose(scores, top_k, threads)
    assert uncertain[np.isnan(scores).any(1)].all()
    expected = np.argsort(-scores[~uncertain].astype(np.float64), 1, kind="stable")[:, :top_k]
    assert (ids[~uncertain] == expected).all()
    best = np.take_along_axis(scores[~uncertain].astype(np.float64), expected, 1)
    shares = np.exp(best - best[:, :1])
    np.testing.assert_allclose(weights[~uncertain], shares / shares.sum(1, keepdims=True), rtol=1e-5, atol=1e-37)
    if kind == "normal":
        assert uncertain.mean() < 0.01


@pytest.mark.parametrize("router", ["softmax_topk", "llama4"])
def test_other_weights(router):
    scores = np.random.default_rng(7).standard_normal((500, 128), np.float32)
    ids, weights, uncertain = choose(scores, 8, 2, router)
    best = np.take_along_axis(scores.astype(np.float64), ids, 1)
    whole = np.exp(scores.astype(np.float64)).sum(1, keepdims=True)
    expected = np.exp(best) / whole if router == "softmax_topk" else 1 / (1 + np.exp(-best))
    np.testing.assert_allclose(weights[~uncertain], expected[~uncertain], rtol=1e-5)
