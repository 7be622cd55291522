"""A layer whose experts are divided among processes, against the layer of one process that has all: results, gradients, and what is refused."""

import functools
import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rank_processes
from campaign import sampled
from mailbox_messages import Messages
from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.ops import ep
from moe_routing_kernels.routing.placement import Placement, plan

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 16, 8, 12, 3
Case = dict[str, Any]
CASES: dict[str, Case] = {  # tokens of each rank and more
    "even": {"tokens": (6, 6, 6)},
    "uneven": {"tokens": (5, 1, 9), "residual": True},
    "no token on a rank": {"tokens": (0, 7, 2)},
    "no token at all": {"tokens": (0, 0, 0)},
    "all to one rank": {"tokens": (4, 3, 2), "only": range(3)},
    "skewed": {"tokens": (9, 30, 4), "only": (0, 5, 6, 11)},
    "dropped": {"tokens": (9, 11, 4), "only": (0, 2, 5, 11), "capacity": 4},
    "a token of no expert": {"tokens": (3, 4, 2), "broken": 2},
    "biases": {"tokens": (3, 4, 2), "activation": "swiglu_oai"},
    "one expert per token": {"tokens": (3, 4, 2), "top_k": 1, "rule": "softmax_topk"},
    "double precision": {"tokens": (3, 4, 2), "dtype": torch.float64},
    "bfloat16": {"tokens": (8, 5, 3), "dtype": torch.bfloat16, "residual": True},
}
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}


def drawn(case: Case, ranks: int) -> tuple[list[Tensor | None], Tensor]:
    """Leaves of all ranks: x, logits, residual, and of all experts w13, w2, b13, b2; the gradient of the result."""
    torch.manual_seed(3)
    tokens, dtype = sum(case["tokens"][:ranks]), case.get("dtype", torch.float32)
    biased = case.get("activation") == "swiglu_oai"
    shapes = [
        (tokens, HIDDEN),
        (tokens, EXPERTS),
        (tokens, HIDDEN) if case.get("residual") else None,
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
        (EXPERTS, 2 * INTERMEDIATE) if biased else None,
        (EXPERTS, HIDDEN) if biased else None,
    ]
    found = [None if shape is None else torch.randn(shape, dtype=torch.float64) for shape in shapes]
    logits = found[1]
    assert logits is not None
    if "only" in case:
        logits[:, list(case["only"])] += 20
    if "broken" in case:
        logits[case["broken"], 1] = torch.nan
    leaves = [None if one is None else one.to(dtype).requires_grad_() for one in found]
    return leaves, torch.randn(tokens, HIDDEN).to(dtype)


def called(function: Any, case: Case, leaves: list[Tensor | None], grad: Tensor, **more: Any) -> list[Tensor]:
    """The result of a layer, and the gradients of its leaves."""
    x, logits, residual, w13, w2, b13, b2 = leaves
    options = {name: case[name] for name in ("rule", "capacity", "activation") if name in case}
    options |= {"residual": residual, "b13": b13, "b2": b2} | more
    out = function(x, logits, w13, w2, case.get("top_k", TOP_K), **options)
    return [out.detach(), *torch.autograd.grad(out, [one for one in leaves if one is not None], grad)]


def of_rank(
    case: Case, rank: int, ranks: int, leaves: list[Tensor | None], grad: Tensor
) -> tuple[list[Tensor | None], Tensor]:
    """The part of all leaves that a rank has."""
    ends = list(itertools.accumulate(case["tokens"][:ranks], initial=0))
    mine, local = slice(ends[rank], ends[rank + 1]), EXPERTS // ranks
    shard = slice(rank * local, (rank + 1) * local)
    parts = [None if one is None else one.detach()[mine if i < 3 else shard] for i, one in enumerate(leaves)]
    return [None if one is None else one.clone().requires_grad_() for one in parts], grad[mine]


def outcomes(rank: int, ranks: int, way: str) -> list[list[Tensor]]:
    """What a rank gets of every case, called twice, of which the second is to be the same bits."""
    found = []
    for case in CASES.values():
        most, dtype = max(1, *case["tokens"]) + 1, case.get("dtype", torch.float32)
        more: dict[str, Any] = {"static": {"most_tokens": most}}.get(way, {})
        if way == "mailbox" and dtype is not torch.float64:  # whose weights it does not take
            more["mailbox"] = Messages(most, HIDDEN, case.get("top_k", TOP_K), EXPERTS // ranks, dtype)
        parts = of_rank(case, rank, ranks, *drawn(case, ranks))
        first, second = (called(ep.layer, case, *parts, **more) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if not a.isnan().any())
        found.append(first)
    return found


@pytest.mark.parametrize("way", ["counts", "static", "mailbox"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_and_gradients_are_those_of_one_process(ranks: int, way: str, tmp_path: Path) -> None:
    found = rank_processes.called(ranks, tmp_path, functools.partial(outcomes, ranks=ranks, way=way))
    assert all(isinstance(each, list) for each in found), found
    for i, (name, case) in enumerate(CASES.items()):
        leaves, grad = drawn(case, ranks)
        expected = called(ops.layer, case, leaves, grad)
        got = [torch.cat([each[i][j] for each in found]) for j in range(len(expected))]
        limit = TOLERANCES[grad.dtype]
        for j, (want, have) in enumerate(zip(expected, got, strict=True)):
            scale = want.nan_to_num().abs().max() if want.numel() else 0
            assert torch.allclose(have, want, rtol=limit, atol=float(limit * scale), equal_nan=True), (name, j)


def calls_by_mailbox(rank: int) -> dict[str, Any]:
    """What two layers that share a mailbox ask of it, and the gradients of the experts alone, which a copy of what came must give. One rank has no
    token."""
    torch.manual_seed(5)
    tokens = 4 - 4 * rank
    x, logits = torch.randn(4, HIDDEN)[:tokens], torch.randn(4, 8)[:tokens]
    w13, w2 = torch.randn(8, 2 * INTERMEDIATE, HIDDEN), torch.randn(8, HIDDEN, INTERMEDIATE)
    here, found = slice(4 * rank, 4 * rank + 4), dict[str, Any]()
    for name, box in (("counts", None), ("mailbox", Messages(4, HIDDEN, 3, 4, torch.float32))):
        own = [weights[here].clone().requires_grad_() for weights in (w13, w2)]
        inner = ep.layer(x, logits, own[0], own[1], 3, mailbox=cast(Any, box)).tanh()
        outer = ep.layer(inner, logits, own[0], own[1], 3, mailbox=cast(Any, box))
        found[name] = torch.autograd.grad(outer.sum(), own)
        found["calls"] = box.calls if box else None
        with torch.no_grad():
            found[f"{name}, no gradients"] = ep.layer(x, logits, own[0], own[1], 3, mailbox=cast(Any, box))
    return found


def test_layers_that_share_a_mailbox_are_trained(tmp_path: Path) -> None:
    """The first layer's input needs no gradients: its backward pass only goes out, which the copy and `read` after each way out allow."""
    found = rank_processes.called(2, tmp_path, calls_by_mailbox)
    assert all(isinstance(each, dict) for each in found), found
    forward, backward = ["out", "read", "back"], ["out", "read", "back", "back_choices"]
    for each in found:
        torch.testing.assert_close(each["mailbox"], each["counts"], rtol=2e-5, atol=2e-4)
        torch.testing.assert_close(each["mailbox, no gradients"], each["counts, no gradients"], rtol=2e-5, atol=2e-5)
        assert each["calls"] == [*forward, *forward, *backward, "out", "read", "out", "back"]


def messages(rank: int) -> dict[str, Any]:
    """Ids of no expert and int64, placed replicas, experts of one's own, and bytes, on one rank of two."""
    torch.manual_seed(5)
    ids = torch.tensor([[[0, 7, -1], [99, 1, 2]], [[4, 5, 6], [-1, 40, -7]]])[rank]
    x, weights = torch.randn(2, 2, HIDDEN)[rank], torch.rand(2, 2, 3)[rank]
    w13, w2 = torch.randn(8, 2 * INTERMEDIATE, HIDDEN), torch.randn(8, HIDDEN, INTERMEDIATE)
    here = slice(4 * rank, 4 * rank + 4)
    found: dict[str, Any] = {"want": ops.fused_experts(x, ids, weights, w13, w2)}
    found["ids"] = ep.fused_experts(x, ids, weights, w13[here], w2[here])
    placement = plan([9.0, 1, 1, 1, 5, 1, 1, 1], 2, spare=1)
    assert max(placement.replicas) == 2
    slots = list(placement.slots[rank])
    found["placed"] = ep.fused_experts(x, ep.physical_ids(ids, placement), weights, w13[slots], w2[slots])
    seen = []

    def experts(rows: Tensor, row_ids: Tensor, row_weights: Tensor) -> Tensor:
        seen.append((row_ids, len(rows)))
        return rows * torch.where((row_ids >= 0) & (row_ids < 4), row_weights, 0).sum(1, keepdim=True)

    found["own"] = ep.apply(experts, x, ids, weights, 4)
    found["rows"], found["seen"] = seen[0][1], seen[0][0]
    found["own want"] = x * torch.where((ids >= 0) & (ids < 8), weights, 0).sum(1, keepdim=True)
    return found


def test_ids_replicas_and_other_experts(tmp_path: Path) -> None:
    """A row per (token, rank): of four tokens one goes to both ranks, one to the first, one to the second, and one nowhere."""
    found = rank_processes.called(2, tmp_path, messages)
    assert all(isinstance(each, dict) for each in found), found
    for each in found:
        for name, want in (("ids", "want"), ("placed", "want"), ("own", "own want")):
            torch.testing.assert_close(each[name], each[want], rtol=2e-5, atol=2e-5)
    assert [each["rows"] for each in found] == [2, 2]
    assert [each["seen"].tolist() for each in found] == [
        [[0, 7, -1], [-1, 1, 2]],
        [[-4, 3, -5], [0, 1, 2]],
    ]


def refused(rank: int) -> list[str]:
    """The messages of calls that cannot be right, one of which one rank alone sees."""
    x, logits = torch.randn(4, HIDDEN), torch.randn(4, 8)
    w13, w2 = torch.randn(4, 2 * INTERMEDIATE, HIDDEN), torch.randn(4, HIDDEN, INTERMEDIATE)
    wider, outside = HIDDEN + 2 * rank, cast(Any, dist.GroupMember.NON_GROUP_MEMBER)
    calls = [
        lambda: ep.layer(x, torch.randn(4, 9), w13, w2, 2),
        lambda: ep.layer(x, logits, w13[:3], w2[:3], 2),
        lambda: ep.layer(x, logits, w13, w2, 2, most_tokens=3),
        lambda: ep.layer(x, logits, w13, w2, 2 + rank),
        lambda: ep.layer(torch.randn(4, wider), logits, torch.randn(4, 16, wider), torch.randn(4, wider, 8), 2),
        lambda: ep.layer(x.clone().requires_grad_(rank == 1), logits, w13, w2, 2),
        lambda: ep.fused_experts(x, torch.zeros(3, 2).int(), torch.rand(3, 2), w13, w2),
        lambda: ep.layer(x, logits, w13, w2, 2, group=outside),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("none")
        except UserError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_right_is_refused_in_one_line_on_all_ranks(tmp_path: Path) -> None:
    found = rank_processes.called(2, tmp_path, refused)
    assert all(isinstance(each, list) for each in found), found
    starts = ["logits: got (4, 9)", "logits: got (4, 8)", "most_tokens: got 3", "top_k of rank 1: got 3"]
    starts += ["hidden size of rank 1: got 18", "gradient of x of rank 1: got True", "", "group: got"]
    for i, (text, start) in enumerate(zip(found[0], starts, strict=True)):
        assert text.startswith(start) and "allowed: " in text and "\n" not in text, (i, text)
    assert found[1][3].startswith("top_k of rank 0: got 2; allowed: 3")


def inferred(rank: int) -> bool:
    """Whether a layer without gradients, of tokens that could have them on one rank alone, has one."""
    x, w13, w2 = torch.randn(4, HIDDEN), torch.randn(4, 2 * INTERMEDIATE, HIDDEN), torch.randn(4, HIDDEN, INTERMEDIATE)
    with torch.no_grad():
        return ep.layer(x.requires_grad_(rank == 1), torch.randn(4, 8), w13, w2, 2).requires_grad


def test_ranks_need_not_agree_on_gradients_where_there_are_none(tmp_path: Path) -> None:
    assert rank_processes.called(2, tmp_path, inferred) == [False, False]


def test_without_a_group_it_says_what_to_call() -> None:
    w13, w2 = torch.randn(4, 2 * INTERMEDIATE, HIDDEN), torch.randn(4, HIDDEN, INTERMEDIATE)
    with pytest.raises(UserError, match=r"group: got None.*init_process_group"):
        ep.layer(torch.randn(4, HIDDEN), torch.randn(4, 4), w13, w2, 2)


def compiled(rank: int, backend: str, static: bool) -> list[Tensor]:
    """The differences of compiled calls from eager ones; a whole graph where `most_tokens` is given, for other numbers of tokens as well."""
    found, more = [], {"most_tokens": 9} if static else {}
    function = torch.compile(ep.layer, fullgraph=static, backend=backend)
    for tokens in [(6, 5), (4, 7)][: 1 if backend == "inductor" else 2]:
        case = {"tokens": tokens}
        parts = of_rank(case, rank, 2, *drawn(case, 2))
        pairs = zip(called(function, case, *parts, **more), called(ep.layer, case, *parts, **more), strict=True)
        found += [(have - want).abs().max() for have, want in pairs]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "static"),
    sampled([("aot_eager", True), ("aot_eager", False), ("inductor", True)], [("aot_eager", True)], unpack=True),
)
def test_it_compiles(backend: str, static: bool, tmp_path: Path) -> None:
    function = functools.partial(compiled, backend=backend, static=static)
    found = rank_processes.called(2, tmp_path, function, seconds=300)
    assert all(isinstance(each, list) for each in found), found
    assert all(float(difference) < 1e-5 for each in found for difference in each)


def test_tokens_take_replicas_in_turn() -> None:
    placement = plan([8.0, 1, 1, 1], 2, spare=1)
    ids = ep.physical_ids(torch.tensor([[0, 1], [0, 2], [0, 9], [0, -1]]), placement)
    held = [expert for rank in placement.slots for expert in rank]
    assert placement.replicas[0] == 2 and len(set(ids[:, 0].tolist())) == 2
    assert [held[slot] for slot in ids[:, 0]] == [0] * 4
    assert [held[slot] for slot in ids[:2, 1]] == [1, 2] and ids[2:, 1].tolist() == [-1, -1]


def test_an_expert_with_fewer_replicas_has_its_first_again() -> None:
    placement = Placement(((0, 1), (0, 2), (3, 2)))
    slots, replicas = ep._slots(placement, torch.device("cpu"))
    assert slots.tolist() == [[0, 2], [1, 1], [3, 5], [4, 4]] and replicas.tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"most_tokens": 2}, "most_tokens: got 2; allowed: a whole number, at least the 3 tokens"),
        ({"local": 2**23}, "experts: got 16777216"),
        ({"x": torch.ones(4, 8)}, "topk_ids|weights|inverse"),
    ],
)
def test_what_a_rank_sees_is_refused_before_others_wait(changes: dict, said: str) -> None:
    given = {"x": torch.ones(3, 8), "ids": torch.zeros(3, 2, dtype=torch.int32), "weights": torch.ones(3, 2)}
    given |= {"local": 4, "residual": None, "most_tokens": 3, "ranks": 2}
    ep._check(**given)
    with pytest.raises(UserError, match=said):
        ep._check(**given | changes)


def test_a_rank_gets_a_token_once_however_many_of_its_experts_it_chose() -> None:
    ids = torch.tensor([[0, 1, 5], [3, -1, 2], [-1, -1, -1]], dtype=torch.int32)
    assert ep._destinations(ids, 3, 2).tolist() == [[0, -1, 2], [-1, 1, -1], [-1, -1, -1]]
