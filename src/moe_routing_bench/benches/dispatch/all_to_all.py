"""A row per assignment by `torch.distributed.all_to_all_single`: counts, then rows, then their order by expert.

Rows arrive by source rank and, of each, by expert; a second pass puts those of an expert together. The host waits for the counts.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.dispatch.definition import Dispatch


def bind(problem: Dispatch, *, x: Tensor, topk_ids: Tensor, received: Tensor, counts: Tensor) -> Callable[[], object]:
    """Bind x (T_r, H) and topk_ids (T_r, k) int32; the call writes counts (E / N,) int32 and the first rows of received (R, H). All ranks of
    the default process group call together."""
    arriving = torch.arange(problem.local, device=x.device).repeat(problem.ranks)  # the expert of each piece, by source

    def dispatch() -> None:
        ids, order = topk_ids.flatten().sort(stable=True)
        sent = torch.bincount(ids, minlength=problem.experts).view(problem.ranks, problem.local)
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        to_ranks, from_ranks = sent.sum(1).tolist(), come.sum(1).tolist()
        rows = x.new_empty(sum(from_ranks), problem.hidden)
        dist.all_to_all_single(rows, x[order // problem.top_k], from_ranks, to_ranks)
        by_expert = arriving.repeat_interleave(come.flatten()).argsort(stable=True)
        torch.index_select(rows, 0, by_expert, out=received[: len(rows)])
        counts.copy_(come.sum(0))

    return dispatch
