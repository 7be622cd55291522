"""A row per token and rank, with the token's ids, by `torch.distributed.all_to_all_single`; the rank that receives it copies it to the rows of
its experts. With k experts on N ranks up to k / N times fewer bytes than a row per assignment. The host waits for the counts.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.benches.dispatch.definition import Dispatch


def bind(problem: Dispatch, *, x: Tensor, topk_ids: Tensor, received: Tensor, counts: Tensor) -> Callable[[], object]:
    """Bind x (T_r, H) and topk_ids (T_r, k) int32; the call writes counts (E / N,) int32 and the first rows of received (R, H). All ranks of
    the default process group call together."""
    first, top_k = dist.get_rank() * problem.local, problem.top_k

    def dispatch() -> None:
        goes = torch.zeros(problem.ranks, len(x), dtype=torch.bool, device=x.device)
        goes.t().scatter_(1, topk_ids.long() // problem.local, True)
        sent, tokens = goes.sum(1), goes.nonzero()[:, 1]
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        splits = come.tolist(), sent.tolist()
        rows = x.new_empty(sum(splits[0]), problem.hidden)
        ids = topk_ids.new_empty(len(rows), top_k)
        dist.all_to_all_single(ids, topk_ids[tokens], *splits)
        dist.all_to_all_single(rows, x[tokens], *splits)
        expert = ids.flatten() - first
        here = ((expert >= 0) & (expert < problem.local)).nonzero()[:, 0]
        expert, order = expert[here].sort(stable=True)
        torch.index_select(rows, 0, here[order] // top_k, out=received[: len(order)])
        counts.copy_(torch.bincount(expert, minlength=problem.local))

    return dispatch
