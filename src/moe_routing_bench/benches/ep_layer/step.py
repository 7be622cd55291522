"""Layers over ranks as differentiable functions of a rank's x, logits, w13 and w2, and their forward passes.

torch_all_to_all
    A row per (token, expert) by `all_to_all_single` (`ep.exchange`, which adds its gradient), not deduplicated; experts by torch's grouped GEMMs; rows are weighted and added up
    where their token is. The host waits for the counts.
ops_ep
    `moe_routing_kernels.ops.ep.layer`. The host waits for the counts.
ops_ep_static
    The same with `most_tokens`: every rank sends all its tokens to every rank, and the host waits for nothing.
ops_ep_graph
    `ops_ep_static` as a CUDA graph, which is captured when the call is bound.
ops_ep_push
    `ops_ep` with a mailbox: kernels store rows and sums into the memory of other GPUs, and the host waits for nothing.
ops_ep_push_graph
    The same as a CUDA graph.
ops_ep_placed
    `ops_ep` with experts placed by their loads in the bound inputs (`routing.placement`), and a spare slot per rank. Weights move while the
    call is bound, which is not timed; ids of experts become those of slots in the call.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.benches.ep_layer.definition import Sharded
from moe_routing_bench.benches.mailboxes import captured, mailbox
from moe_routing_bench.benches.ranks import by_expert
from moe_routing_kernels import ops
from moe_routing_kernels.experts import torch_experts
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.ops import ep, preparation
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.routing.placement import plan
from moe_routing_kernels.target import Target

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_STATIC = ("ops_ep_static", "ops_ep_graph")
_PUSHES = ("ops_ep_push", "ops_ep_push_graph")


def unsupported(problem: Sharded, *, way: str) -> str | None:
    """Why this problem cannot run, or None."""
    if way == "torch_all_to_all":
        return torch_experts.unsupported_grouped_mm(problem.layer.experts)
    if way == "ops_ep_placed" and problem.exchange.local == problem.exchange.experts:
        return "one rank has all experts, and no placement differs"
    return None


def bind(
    problem: Sharded,
    *,
    way: str,
    logits: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    combined: Tensor,
    bias: Tensor | None = None,
) -> Callable[[], object]:
    """Bind logits (T_r, E) float32, x (T_r, H), w13 (E / N, N', H) and w2 (E / N, H, I); the call writes combined (T_r, H). All ranks of the
    default process group call together."""
    if way == "ops_ep_placed":
        forward, w13, w2 = _placed(problem, bias, logits, w13, w2)
    else:
        forward = layer(problem, way, bias)

    def run() -> None:
        with torch.no_grad():
            combined.copy_(forward(x, logits, w13, w2))

    return captured(run) if way.endswith("_graph") else run


def precompile(problem: Sharded, arch: str, *, way: str, training: bool = False) -> None:
    """Put the kernels in CuTe DSL of a rank into the cache; needs no GPU."""
    if way != "torch_all_to_all":
        spare = int(way == "ops_ep_placed")
        target = Target.named(arch)
        ranks = problem.exchange.ranks
        preparation.compile_ep_layer(
            problem.layer, ranks, target, spare=spare, training=training, pushes=way in _PUSHES
        )


def layer(problem: Sharded, way: str, bias: Tensor | None) -> Function:
    """A layer of one rank: x (T_r, H), logits (T_r, E), w13 and w2 of its experts -> combined (T_r, H)."""
    if way == "torch_all_to_all":
        return _every_row(problem, bias)
    known, most = problem.layer, max(problem.exchange.shares) if way in _STATIC else None
    options = {"rule": known.router, "bias": bias, "activation": known.activation, "most_tokens": most}
    options["mailbox"] = mailbox(problem.exchange) if way in _PUSHES else None
    return lambda x, logits, w13, w2: ep.layer(x, logits, w13, w2, known.layout.top_k, **options)


def _every_row(problem: Sharded, bias: Tensor | None) -> Function:
    """`torch_all_to_all`."""
    known, top_k, route = problem.exchange, problem.exchange.top_k, ROUTERS[problem.layer.router].load()
    group = dist.distributed_c10d._get_default_group().group_name

    def run(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        ids, weights = route(logits, top_k, bias)
        order, loads = by_expert(ids, known.experts)
        sent = loads.view(known.ranks, known.local)
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        to_ranks, from_ranks = torch.stack([sent.sum(1), come.sum(1)]).tolist()
        rows = ep.exchange(x.index_select(0, order // top_k), to_ranks, from_ranks, group)
        expert = torch.arange(known.local, device=x.device).repeat(known.ranks).repeat_interleave(come.flatten())
        places = expert.argsort(stable=True)
        y = _products(problem, rows.index_select(0, places), come.sum(0), w13, w2)
        y = torch.empty_like(y).index_copy(0, places, y)
        back = ep.exchange(y, from_ranks, to_ranks, group)
        terms = back.float() * weights.flatten()[order].unsqueeze(1)
        return torch.zeros(x.shape, device=x.device).index_add(0, order // top_k, terms).to(x.dtype)

    return run


def _products(problem: Sharded, rows: Tensor, counts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The experts on rows (m, H), counts (E / N,) of each, by torch's grouped GEMMs; they take no empty rows, so that one of no expert is added."""
    some = rows if len(rows) else F.pad(rows, (0, 0, 0, 1))
    ends = counts.cumsum(0).int()
    inner = activate(problem.layer.activation, F.grouped_mm(some, w13.transpose(1, 2), offs=ends))
    return F.grouped_mm(inner, w2.transpose(1, 2), offs=ends)[: len(rows)]


def _placed(
    problem: Sharded, bias: Tensor | None, logits: Tensor, w13: Tensor, w2: Tensor
) -> tuple[Function, Tensor, Tensor]:
    """`ops_ep_placed`, and the weights of this rank's slots."""
    known, top_k, rule = problem.exchange, problem.exchange.top_k, problem.layer.router
    ids, _ = ops.gate(logits, top_k, rule, bias)
    loads = torch.bincount(ids.flatten().long(), minlength=known.experts)
    dist.all_reduce(loads)
    placement = plan(loads.tolist(), known.ranks, spare=1)
    slots = torch.tensor(placement.slots[dist.get_rank()], device=w13.device)
    of_slots = []
    for weights in (w13, w2):
        every = [torch.empty_like(weights) for _ in range(known.ranks)]
        dist.all_gather(every, weights.contiguous())
        of_slots.append(torch.cat(every)[slots])

    def run(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        ids, weights = ops.gate(logits, top_k, rule, bias)
        physical = ep.physical_ids(ids, placement)
        return ep.fused_experts(x, physical, weights, w13, w2, activation=problem.layer.activation)

    return run, *of_slots
