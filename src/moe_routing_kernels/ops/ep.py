"""An MoE layer whose experts are divided among ranks: ``from moe_routing_kernels.ops import ep``, then `ep.layer` or `ep.fused_experts`.

Every rank of a `torch.distributed` process group has tokens of its own and E / N consecutive experts. A call
1. exchanges how many rows go from each rank to each other, and the sizes that must be equal: the one time that the host waits;
2. sends a token's row once to each rank that has some of its experts, with the ids and weights of its choices;
3. runs `ops.fused_experts` on the rows that came, which adds up a rank's experts of a token, weighted, in float32;
4. sends one sum per (token, rank) back, and adds those of a token up in float32.

Bytes that leave a rank for others in a forward pass: out, b H + 8 k for each (token, other rank) pair of its own tokens, where x has b bytes
per element; back, b H for each such pair of others' tokens; and 56 of counts per rank. A backward pass sends as much again. A row per
(token, expert) would be up to k / N times as many. On the way a row is rounded to the dtype of x, once more than in `ops.layer`.

`most_tokens`, the same on all ranks and no less than any rank's tokens, replaces the counts: every rank sends so many rows to every rank,
whether it has the experts or not. No call then waits for the host, `torch.compile` makes one graph of a layer, and a CUDA graph may
capture it. With N far below k that is hardly more bytes, because most tokens go to most ranks; else it suits few tokens. Without
`most_tokens`, compiled code breaks its graph where counts are read.

`mailbox` (`exchange.mailbox.Mailbox`), for GPUs of one host, replaces messages: kernels store rows and sums into the memory of other GPUs, a row per
(token, rank), in one launch each way, and neither counts nor the host are waited for. With gradients enabled what came is copied, for the
backward pass; so infer under `torch.no_grad`. Ranks must agree on which of x, weights and experts have gradients.

All ranks call alike and in the same order, forward and backward, also with no token; a rank that does not leaves the others waiting until
the group's timeout. Results are the same bits in each run. Design: one row per (token, rank) and sums on the expert's rank, as in DeepEP and
FlashInfer's one-sided exchange; messages are `all_to_all_single`, of NCCL or gloo.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from moe_routing_kernels import ops
from moe_routing_kernels.choices import check_phase
from moe_routing_kernels.errors import bad, whole
from moe_routing_kernels.exchange.mailbox import Mailbox, known_group
from moe_routing_kernels.implementations import KERNELS
from moe_routing_kernels.ops import arguments, mailbox_gradients
from moe_routing_kernels.ops.backends import ready
from moe_routing_kernels.ops.reference import wide
from moe_routing_kernels.routing.placement import Placement

__all__ = ["apply", "fused_experts", "layer", "physical_ids"]

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
_MOST_EXPERTS = 1 << 24  # ids travel as float32, next to weights
_ALIKE = ("hidden size", "top_k", "experts per rank", "dtype", "gradient of x", "gradient of weights")


def layer(
    x: Tensor,
    logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    rule: str = "softmax_topk_renorm",
    bias: Tensor | None = None,
    capacity: int | None = None,
    activation: str = "swiglu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    residual: Tensor | None = None,
    phase: str | None = None,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    most_tokens: int | None = None,
    mailbox: Mailbox | None = None,
) -> Tensor:
    """`ops.layer` of a rank's tokens: x (T, H), logits (T, E) of all experts, and the weights of its own experts -> combined (T, H).

    w13 is (E / N, 2 I, H), w2 (E / N, H, I), b13 (E / N, 2 I) and b2 (E / N, H): experts ``rank * E / N`` and on. T may differ by rank, and be 0. `capacity`
    counts the tokens of all ranks, in the order of ranks. `group` is the default process group if None. Other arguments, dtypes and
    gradients are as of `ops.layer`; the gradients of w13 and w2 are those of the tokens of all ranks.

    Raises `UserError` for arguments that `ops.layer` does not take, for logits of another number of experts than all ranks have, for a rank
    outside the group, and where ranks differ in what must be equal.
    """
    topk_ids, topk_weights = ops.gate(logits, top_k, rule, bias, scale)
    ranks, local = known_group(group).size(), w2.shape[0]
    if logits.shape[1] != ranks * local:
        raise bad("logits", tuple(logits.shape), f"(T, {ranks * local}): {ranks} ranks of {local} experts each")
    options = (capacity, activation, b13, b2, residual, phase, group, most_tokens, mailbox)
    return fused_experts(x, topk_ids, topk_weights, w13, w2, *options)


def fused_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    capacity: int | None = None,
    activation: str = "swiglu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    residual: Tensor | None = None,
    phase: str | None = None,
    group: dist.ProcessGroup | None = None,
    most_tokens: int | None = None,
    mailbox: Mailbox | None = None,
) -> Tensor:
    """`layer` behind a router of its own: x (T, H), topk_ids (T, k) among all E experts, topk_weights (T, k) -> combined (T, H).

    Ids of no expert, below 0 or from E on, go nowhere, as in `ops.fused_experts`. Raises `UserError`.
    """
    check_phase(phase)
    offsets = torch.empty(w2.shape[0] + 1, dtype=torch.int32, device=x.device)
    arguments.check_experts(x, offsets, w13, w2, activation, b13, b2)
    ranks = known_group(group).size()

    def experts(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.fused_experts(rows, ids, weights, w13, w2, capacity, activation, b13, b2, None, phase, ranks)

    return apply(experts, x, topk_ids, topk_weights, w2.shape[0], residual, group, most_tokens, mailbox)


def apply(
    experts: Function,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    local: int,
    residual: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    most_tokens: int | None = None,
    mailbox: Mailbox | None = None,
) -> Tensor:
    """The exchanges around any experts: x (T, H), topk_ids (T, k), topk_weights (T, k) -> combined (T, H), plus residual (T, H).

    Every rank has `local` experts. `experts` is called with the rows (n, H) that came to this rank, their ids (n, k) int32, counted from its
    first expert, and their weights (n, k), float32 (float64 for float64 x). It returns the weighted sum (n, H) of each row's experts, and
    leaves out ids outside 0 .. `local` - 1, which belong to other ranks or to none. Where rows or weights have gradients, the result must
    depend on both, also with no rows, or other ranks wait for a message that never comes. Raises `UserError`.
    """
    known = known_group(group)
    ranks, tokens, dtype = known.size(), x.shape[0], wide(x.dtype)
    _check(x, topk_ids, topk_weights, local, residual, most_tokens, ranks)
    if mailbox is not None:
        mailbox.check(x, topk_ids, local, most_tokens, known)
        sent = (ready(x), ready(topk_ids.int()), ready(topk_weights.float()))
        residual = None if residual is None else ready(residual)
        if torch.is_grad_enabled():
            came = mailbox_gradients.out(mailbox, *sent)
            return mailbox_gradients.back(mailbox, experts(*came), came[1], *sent[1:], residual)
        return mailbox.back(ready(experts(*mailbox.out(*sent))), sent[1], residual)
    here = (topk_ids >= 0) & (topk_ids < ranks * local)
    ids = torch.where(here, topk_ids, -1).int()
    weights = topk_weights.to(dtype)
    if most_tokens is None:
        goes = _destinations(ids, ranks, local)
        counts, _, order, inverse = ops.permute(goes, ranks)
        learns = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, topk_weights)]
        alike = (x.shape[1], ids.shape[1], local, arguments.DTYPES.index(x.dtype), *learns)
        to_ranks, from_ranks = _sizes(counts, alike, known)
        order = order[: sum(to_ranks)]
    else:
        more = (0, 0, 0, most_tokens - tokens)
        x, weights = (torch.nn.functional.pad(tensor, more) for tensor in (x, weights))
        ids = torch.nn.functional.pad(ids, more, value=-1)
        to_ranks = from_ranks = [most_tokens] * ranks
        inverse = torch.arange(ranks * most_tokens, dtype=torch.int32, device=x.device).view(ranks, most_tokens).T
        order = torch.arange(most_tokens * ranks, dtype=torch.int32, device=x.device).view(most_tokens, ranks).T
        order, inverse = order.flatten(), inverse.contiguous()
    rows = exchange(ops.pack(x, order, inverse), to_ranks, from_ranks, known.group_name)
    choices = torch.cat([weights, ids.to(dtype)], 1).index_select(0, order.long() // ranks)
    choices = exchange(choices, to_ranks, from_ranks, known.group_name)
    row_weights, row_ids = choices.chunk(2, 1)
    row_ids = row_ids.detach().int() - known.rank() * local
    sums = exchange(experts(rows, row_ids, row_weights.contiguous()), from_ranks, to_ranks, known.group_name)
    ones = torch.ones(tokens, ranks, dtype=dtype, device=x.device)
    return ops.combine(sums, inverse[:tokens], ones, residual)


def physical_ids(topk_ids: Tensor, placement: Placement) -> Tensor:
    """Ids (T, k) of experts -> ids (T, k) int32 of the slots that hold them, counted rank by rank; -1 for an id of no expert.

    Tokens take the replicas of an expert in turn. `fused_experts` with these ids takes weights of the slots: w13[slots of this rank]. The
    gradients of replicas are not added up, so train without replicas.
    """
    slots, replicas = _slots(placement, topk_ids.device)
    ids = torch.where((topk_ids >= 0) & (topk_ids < len(replicas)), topk_ids, -1).long()
    expert = ids.clamp_min(0)
    turn = torch.arange(len(ids), device=ids.device).unsqueeze(1) % replicas[expert]
    return torch.where(ids < 0, -1, slots[expert, turn])


@functools.lru_cache(maxsize=64)
def _slots(placement: Placement, device: torch.device) -> tuple[Tensor, Tensor]:
    """The slots (E, most) int32 that hold each expert, the first repeated where it has fewer, and how many these are (E,)."""
    slots_of: list[list[int]] = [[] for _ in placement.replicas]
    for slot, expert in enumerate(expert for rank in placement.slots for expert in rank):
        slots_of[expert].append(slot)
    most = max(map(len, slots_of))
    table = [slots + slots[:1] * (most - len(slots)) for slots in slots_of]
    counts = torch.tensor([len(slots) for slots in slots_of], device=device)
    return torch.tensor(table, dtype=torch.int32, device=device), counts


def _check(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    local: int,
    residual: Tensor | None,
    most_tokens: int | None,
    ranks: int,
) -> None:
    """All that one rank can see, before others wait for it."""
    arguments.check_permute(ids, ranks * local, None, "compact")
    arguments.check_combine(x, ids.int(), weights, residual)
    if ids.shape[0] != x.shape[0]:
        raise bad("topk_ids", tuple(ids.shape), f"{x.shape[0]} rows, as x has")
    if ranks * local >= _MOST_EXPERTS:
        raise bad("experts", ranks * local, f"below {_MOST_EXPERTS}")
    if most_tokens is not None and not (whole(most_tokens) and most_tokens >= max(1, x.shape[0])):
        raise bad("most_tokens", most_tokens, f"a whole number, at least the {x.shape[0]} tokens of this rank")


def _destinations(ids: Tensor, ranks: int, local: int) -> Tensor:
    """Ids (T, k) of experts, -1 of none -> (T, N) int32: r in column r where the token has an expert on rank r, else -1."""
    to = torch.where(ids < 0, ranks, ids // local)
    goes = torch.full((ids.shape[0], ranks + 1), -1, dtype=torch.int32, device=ids.device)
    return goes.scatter(1, to.long(), to)[:, :ranks].contiguous()


@torch.compiler.disable(reason="the host reads how many rows ranks send; with most_tokens it need not")
def _sizes(counts: Tensor, alike: Sequence[int], group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Rows that this rank sends to each, counts (N,), and those that it gets. Raises `UserError` if what must be equal is not."""
    sent = torch.tensor([[0, *alike]], device=counts.device).repeat(len(counts), 1)
    sent[:, 0] = counts
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    by_rank = torch.cat([sent[:, :1], received], 1).tolist()
    for rank, (_, _, *theirs) in enumerate(by_rank):
        for name, ours, other in zip(_ALIKE, alike, theirs, strict=True):
            if ours != other:
                raise bad(
                    f"{name} of rank {rank}",
                    _said(name, other),
                    f"{_said(name, int(ours))}, as rank {group.rank()} has",
                )
    return [row[0] for row in by_rank], [row[1] for row in by_rank]


def _said(name: str, value: int) -> object:
    """A size that ranks exchange, as a message shows it."""
    return str(arguments.DTYPES[value]) if name == "dtype" else bool(value) if name.startswith("gradient") else value


@custom_op(f"{KERNELS}::exchange", mutates_args=())
def exchange(rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: str) -> Tensor:
    """Send rows (n, ...), in the order of ranks, to those of the named group -> those that came (m, ...), in the order of ranks."""
    come = rows.new_empty(sum(from_ranks), *rows.shape[1:])
    known = dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]
    dist.all_to_all_single(come, rows.contiguous(), list(from_ranks), list(to_ranks), group=known)
    return come


@exchange.register_fake
def _(rows, to_ranks, from_ranks, group):
    return rows.new_empty(sum(from_ranks), *rows.shape[1:])


def _save_for_exchange(ctx, inputs, output) -> None:
    ctx.sizes, ctx.group = inputs[1:3], inputs[3]


def _exchange_gradient(ctx, grad):
    to_ranks, from_ranks = ctx.sizes
    return exchange(grad, from_ranks, to_ranks, ctx.group), None, None, None


exchange.register_autograd(_exchange_gradient, setup_context=_save_for_exchange)
