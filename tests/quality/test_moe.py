"""The layer against loops over tokens: who gets a row, what comes out, and the gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.quality import moe_layer, token_dispatch
from moe_routing_bench.quality.stage_clock import STAGES, StageClock
from moe_routing_kernels.routers import learned

EXPERTS, DIM, HIDDEN = 4, 8, 16


def choices(tokens: int = 37, extra: int = 0) -> tuple[Tensor, Tensor]:
    """Ids (T, 3) without repetition in a row, some -1, and weights with a gradient."""
    torch.manual_seed(1)
    ids = torch.rand(tokens, EXPERTS + extra).argsort(1)[:, :3]
    ids[torch.rand(ids.shape) < 0.2] = -1
    ids[: tokens // 2, 0] = torch.where((ids[: tokens // 2] == 2).any(1), ids[: tokens // 2, 0], 2)  # a hot expert
    return ids.int(), torch.rand(ids.shape).masked_fill(ids < 0, 0).requires_grad_()


class Fixed(nn.Module):
    """A router that decided beforehand."""

    passes = 1
    seated_by = "position"

    def __init__(self, routing: SimpleNamespace, extra: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.routing, self.extra = routing, extra

    def forward(self, *_: Tensor) -> SimpleNamespace:
        return self.routing


def routing(ids: Tensor, weights: Tensor) -> SimpleNamespace:
    return SimpleNamespace(ids=ids, weights=weights, losses={}, scores=torch.full((len(ids), EXPERTS), 1 / EXPERTS))


def layer(*routers: nn.Module, factor: float | None = None, policy: str = "position") -> moe_layer.MoE:
    torch.manual_seed(0)
    experts = moe_layer.Experts(EXPERTS, DIM, HIDDEN, 1)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.3)
    return moe_layer.MoE(routers, experts, 3, factor, policy)


def expert(experts: moe_layer.Experts, number: int, x: Tensor) -> Tensor:
    """One expert on one row, written out."""
    w1, w3 = experts.w13_EDH[number].chunk(2, dim=1)
    return (F.silu(x @ w1) * (x @ w3)) @ experts.w2_EHD[number]


def naive(one: moe_layer.MoE, x: Tensor, ids: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
    rows = []
    for t in range(len(ids)):
        parts = [weights[t, j] * expert(one.experts, int(ids[t, j]), x[t]) for j in range(ids.shape[1]) if kept[t, j]]
        rows.append(sum(parts, torch.zeros(DIM)))
    return torch.stack(rows)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("limit", [None, 1, 5, 37])
@pytest.mark.parametrize("policy", ["position", "choice", "random", "score"])
def test_place_keeps_whom_the_policy_says(policy: str, limit: int | None, padded: bool) -> None:
    """As many as fit; each in a row of its expert that no one else has; padding names the token of zeros."""
    ids, weights = choices(extra=2)
    placed = token_dispatch.place(ids, weights, EXPERTS, limit, policy, padded)
    room = limit or len(ids)
    start, rows = 0, placed.choice_R.tolist()
    for e in range(EXPERTS):
        mine = [(t, j) for t, j in (ids == e).nonzero().tolist()]
        kept = [(t, j) for t, j in mine if placed.kept_TK[t, j]]
        assert len(kept) == min(len(mine), room)
        if policy == "position":
            assert kept == mine[:room]
        if policy == "choice":
            assert sorted(kept) == sorted(sorted(mine, key=lambda at: (at[1], at[0]))[:room])
        if policy == "score":
            best = sorted(mine, key=lambda at: -float(weights.detach()[at[0], at[1]]))[:room]
            assert sorted(kept) == sorted(best)
        assert sorted(rows[start : start + len(kept)]) == [3 * t + j for t, j in kept]
        end = int(placed.ends_E[e])
        assert set(rows[start + len(kept) : end]) <= {ids.numel()}
        assert padded or end % token_dispatch.ALIGN == 0
        start = end
    assert start <= len(rows) and set(rows[start:]) <= {ids.numel()}
    assert not placed.kept_TK[(ids < 0) | (ids >= EXPERTS)].any()


def test_second_choices_wait_for_all_first_ones() -> None:
    """GShard 2006.16668 algorithm 1: the second choice of token 0 does not take the room of the first choice of token 1."""
    ids, weights = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), torch.full((2, 2), 0.5)
    kept = {
        policy: token_dispatch.place(ids, weights, 2, 1, policy, True).kept_TK.tolist()
        for policy in ("position", "choice")
    }
    assert kept == {"position": [[True, True], [False, False]], "choice": [[True, False], [True, False]]}
    assert token_dispatch.ranks(ids, 2, "choice").tolist() == [[0, 1], [0, 1]]
    assert token_dispatch.ranks(ids, 2, "position").tolist() == [[0, 0], [1, 1]]
    by_rule = {
        name: learned.build(name, dim=4, experts=4, top_k=2, network="linear").seated_by
        for name in ("softk", "gshard_top2")
    }
    assert by_rule == {"softk": "position", "gshard_top2": "choice"}


def test_random_drops_are_spread_over_the_batch() -> None:
    """Position order would drop the later half of tokens that all want one expert."""
    ids, weights = torch.zeros(1000, 1, dtype=torch.int32), torch.ones(1000, 1)
    torch.manual_seed(0)
    kept = token_dispatch.place(ids, weights, 2, 500, "random", True).kept_TK[:, 0]
    assert 200 < int(kept[500:].sum()) < 300
    assert not token_dispatch.place(ids, weights, 2, 500, "position", True).kept_TK[500:].any()


@pytest.mark.parametrize("factor", [None, 0.5, 0.9])
def test_output_and_gradients_are_those_of_a_loop(factor: float | None) -> None:
    """Of the input, the weights of the choices and the experts; a dropped choice gets no gradient."""
    ids, weights = choices()
    one, x = layer(Fixed(routing(ids, weights)), factor=factor), torch.randn(1, len(ids), DIM, requires_grad=True)
    y = one(x, torch.zeros(1, len(ids)), torch.arange(len(ids)))
    kept = one.seen[0].kept_TK
    assert kept is not None and bool(kept.all(1).any()) and (factor is None) == bool((kept == (ids >= 0)).all())
    expected = naive(one, x[0], ids, weights, kept)
    torch.testing.assert_close(y[0], expected)
    leaves = [x, weights, *one.experts.parameters()]
    for got, want in zip(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_grouped_experts_are_the_padded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, forwards and backwards, with rows that torch leaves unwritten."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no torch.nn.functional.grouped_mm")
    ids, weights = choices()
    found = []
    for grouped in (False, True):
        monkeypatch.setattr(moe_layer.Experts, "can_group", lambda self, x, grouped=grouped: grouped)
        one = layer(Fixed(routing(ids, weights)), factor=1.0)
        torch.manual_seed(2)
        x = torch.randn(1, len(ids), DIM, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = one(x, torch.zeros(1, len(ids)), torch.arange(len(ids)))
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, weights, *one.experts.parameters()])])
    for padded, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, padded, rtol=0.05, atol=0.05)


def test_zero_computation_experts() -> None:
    """Nothing, the token, and its mixture with a constant: none of them takes a row or counts against a capacity."""
    extra = ("zero", "copy", "const")
    ids = torch.tensor([[4, -1, -1], [5, -1, -1], [6, -1, -1], [6, 5, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.9, 0, 0], [0.5, 0, 0], [0.25, 0, 0], [0.2, 0.3, 0.5]])
    one = layer(Fixed(routing(ids, weights), extra), factor=None)
    assert one.constants is not None and one.mixers is not None
    with torch.no_grad():
        nn.init.normal_(one.constants)
        nn.init.normal_(one.mixers)
        x = torch.randn(1, 4, DIM)
        y = one(x, torch.zeros(1, 4), torch.arange(4))[0]
        mix = (x[0] @ one.mixers[0]).softmax(-1)
        constant = mix[:, :1] * x[0] + mix[:, 1:] * one.constants[0]
        last = 0.2 * constant[3] + 0.3 * x[0, 3] + 0.5 * expert(one.experts, 0, x[0, 3])
        torch.testing.assert_close(y, torch.stack([torch.zeros(DIM), 0.5 * x[0, 1], 0.25 * constant[2], last]))


def test_passes_have_an_inner_residual() -> None:
    """Chain-of-Experts: each pass routes and adds to what the one before gave."""
    ids, weights = choices(11)
    second = routing(ids.roll(1, 0), weights.detach().roll(1, 0))
    one, x = layer(Fixed(routing(ids, weights.detach())), Fixed(second)), torch.randn(1, 11, DIM)
    y = one(x, torch.zeros(1, 11), torch.arange(11))[0]
    middle = x[0] + naive(one, x[0], ids, weights, ids >= 0)
    torch.testing.assert_close(y, middle + naive(one, middle, second.ids, second.weights, second.ids >= 0))
    assert len(one.seen) == 2


def test_soft_slots_are_mixtures_of_their_sequence() -> None:
    """Slot s belongs to expert s // (slots / E)."""
    batch, positions, slots = 2, 5, 2 * EXPERTS
    dispatch, combine = torch.randn(batch, positions, slots).softmax(1), torch.randn(batch, positions, slots).softmax(2)
    soft = SimpleNamespace(dispatch=dispatch, combine=combine, losses={}, scores=torch.zeros(10, EXPERTS))
    one, x = layer(Fixed(soft)), torch.randn(batch, positions, DIM)
    y = one(x, torch.zeros(batch, positions), torch.arange(positions))
    for b in range(batch):
        out = torch.stack([expert(one.experts, s // 2, dispatch[b, :, s] @ x[b]) for s in range(slots)])
        torch.testing.assert_close(y[b], combine[b] @ out)


@pytest.mark.parametrize(("factor", "rows"), [(1.0, 10), (1.1, 11), (1.25, 13), (100.0, 20), (None, None)])
def test_capacity_rounds_up(factor: float | None, rows: int | None) -> None:
    """ceil(factor T k / E); 1.1 is eleven tenths; no more than all tokens."""
    assert token_dispatch.capacity(20, 2, 4, factor) == rows


def test_every_stage_is_timed_forwards_and_backwards() -> None:
    """And the marks change no result."""
    ids, weights = choices()
    one, x = layer(Fixed(routing(ids, weights)), factor=1.0), torch.randn(1, len(ids), DIM, requires_grad=True)
    plain = one(x, torch.zeros(1, len(ids)), torch.arange(len(ids)))
    (before,) = torch.autograd.grad(plain.sum(), x)
    clock = StageClock("cpu")
    one.clock = clock
    clock.begin("rest")
    marked = one(x, torch.zeros(1, len(ids)), torch.arange(len(ids)))
    after, _ = torch.autograd.grad(marked.sum(), [x, weights])
    forwards = ["rest", "router", "dispatch", "experts", "combine", "rest"]
    assert [stage for stage, _ in clock._log] == [*forwards, "combine", "experts", "dispatch", "router", "rest"]
    assert torch.equal(plain, marked) and torch.equal(before, after)
    assert set(clock.stop()) == set(STAGES)
