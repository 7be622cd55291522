"""Which rank sends how many rows where: expected for even loads, or drawn with a skew or from a trace.

Tokens and experts lie on ranks as in the benches `dispatch` and `ep_combine` (`benches.ranks`): rank r has tokens r T .. (r + 1) T - 1 and experts
r E / R .. (r + 1) E / R - 1. Suffixes: R ranks, N hosts.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moe_routing_bench.benches.ranks import goes
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload import trace as traces
from moe_routing_bench.workload.draw import draw_ids, generator
from moe_routing_bench.workload.skew import check, inclusion_probabilities
from moe_routing_kernels.routing.placement import Placement, consecutive, plan

Array = NDArray[np.float64]
DRAWN = (
    8_192  # tokens that are drawn one by one; of more, loads are drawn and what tokens have in common is that of these
)
_SAMPLER = "plackett_luce"


@dataclass(frozen=True)
class Flow:
    """Rows from each rank (first axis) to each rank or host (second axis), those to itself included."""

    tokens: int  # of each rank
    rows: Array  # (R, R) a row per assignment
    once: Array  # (R, R) a row per token and rank
    hosts: Array  # (R, N) a row per token and host

    @property
    def busiest(self) -> float:
        """Rows of the busiest rank's experts over the mean."""
        loads = self.rows.sum(0)
        return float(loads.max() / loads.mean())


@dataclass(frozen=True)
class Group:
    """Ranks that share the experts of a layer: T tokens of each rank, k of E experts per token, `host` GPUs a host."""

    ranks: int
    tokens: int
    experts: int
    top_k: int
    host: int = 8
    host_groups: int | None = None  # a token's experts are on so many hosts at most

    @property
    def hosts(self) -> int:
        """Hosts of the group, the last of which it may share."""
        return -(-self.ranks // self.host)


def even(group: Group) -> Flow:
    """The expected flow of tokens that choose k of E experts uniformly."""
    ranks, hosts, tokens, top_k = group.ranks, group.hosts, group.tokens, group.top_k
    chosen, share = group.experts, 1.0
    if group.host_groups and group.host_groups < hosts:  # the hosts of a token are drawn first
        chosen, share = group.experts * group.host_groups // hosts, group.host_groups / hosts
    once, host = (share * hit(chosen, group.experts // parts, top_k) for parts in (ranks, hosts))
    return Flow(
        tokens,
        np.full((ranks, ranks), tokens * top_k / ranks),
        np.full((ranks, ranks), tokens * once),
        np.full((ranks, hosts), tokens * host),
    )


def hit(experts: int, local: int, top_k: int) -> float:
    """Probability that k distinct of E experts, drawn uniformly, hold one of `local` experts."""
    if experts - local < top_k:
        return 1.0
    return -math.expm1(sum(math.log1p(-local / (experts - i)) for i in range(top_k)))


def drawn(
    group: Group, seed: int, skew: float = 0.0, trace: Path | None = None, placement: Placement | None = None
) -> Flow:
    """The flow of one draw; assignments to an expert with replicas go to any of them.

    Raises `UserError` for a skew that these sizes cannot have, and for a trace of other sizes.
    """
    total, ranks = group.tokens * group.ranks, group.ranks
    ids, share = _drawn_ids(group, seed, skew, trace)
    slots = np.array((placement or consecutive(group.experts, ranks)).slots)  # (R, slots of a rank)
    rng = np.random.default_rng(seed)
    sent = goes(torch.from_numpy(_slots_of(ids, slots, rng)), ranks, slots.shape[1]).numpy().astype(float)
    per_host = np.add.reduceat(sent, np.arange(0, ranks, group.host), axis=1)
    if len(ids) == total:
        return Flow(group.tokens, *(_by_source(part, group) for part in (sent, sent > 0, per_host > 0)))
    share = share[slots] / np.bincount(slots.ravel(), minlength=group.experts)[slots]
    loads = rng.binomial(total, np.minimum(share, 1.0)).sum(1)
    mean = sent.mean(0)
    noise = loads / np.maximum(total * mean, 1e-12)  # loads of all tokens over those of the drawn ones
    parts = mean * noise, (sent > 0).mean(0) * noise, (per_host > 0).mean(0)
    return Flow(group.tokens, *(np.tile(group.tokens * part, (ranks, 1)) for part in parts))


def chances(group: Group, seed: int, skew: float = 0.0, trace: Path | None = None) -> Array:
    """The expected share of tokens (E,) that choose each expert in the draw of this seed: what a planner may know before."""
    return _drawn_ids(group, seed, skew, trace)[1]


def planned(group: Group, seed: int, skew: float = 0.0, trace: Path | None = None, spare: int = 1) -> Placement:
    """Experts and replicas placed by their expected loads in the draw of this seed, `spare` slots more than E / R on each rank."""
    found = chances(group, seed, skew, trace)
    order = np.argsort(-found, kind="stable")
    slots = _plan(tuple(found[order].tolist()), group.ranks, spare)
    return Placement(tuple(tuple(order[list(rank)].tolist()) for rank in slots))


@lru_cache(maxsize=64)  # draws of one skew differ in which experts are hot: one plan serves all
def _plan(loads: tuple[float, ...], ranks: int, spare: int) -> tuple[tuple[int, ...], ...]:
    return plan(loads, ranks, spare).slots


def check_loads(experts: int, top_k: int, skew: float, trace: Path | None) -> None:
    """Raise `UserError` for a skew that no batch of these sizes has, and for a trace of other sizes."""
    if trace is not None:
        traces.read(trace, 1, experts, top_k)
    else:
        check(skew, _SAMPLER, 2**40, experts, top_k)


def _drawn_ids(group: Group, seed: int, skew: float, trace: Path | None) -> tuple[NDArray[np.int64], Array]:
    total = group.tokens * group.ranks
    if skew and trace is None:
        check(skew, _SAMPLER, total, group.experts, group.top_k)
    return _sample(group.experts, group.top_k, min(total, DRAWN), seed, skew, trace)


def _slots_of(ids: NDArray[np.int64], slots: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """The slot of each assignment: any of those that hold its expert."""
    order = np.argsort(slots.ravel(), kind="stable")
    replicas = np.bincount(slots.ravel())
    first = np.cumsum(replicas) - replicas
    return order[first[ids] + rng.integers(replicas[ids])]


@lru_cache(maxsize=64)  # all numbers of ranks share the draws of large batches
def _sample(
    experts: int, top_k: int, count: int, seed: int, skew: float, trace: Path | None
) -> tuple[NDArray[np.int64], Array]:
    """Ids (count, k), and the probability of each expert (E,)."""
    if trace is not None:
        ids = traces.read(trace, count, experts, top_k)
        return ids.astype(np.int64), np.bincount(ids.ravel(), minlength=experts) / count
    sizes = {"tokens": count, "experts": experts, "top_k": top_k, "skew": skew, "sampler": _SAMPLER}
    ids = draw_ids(Cell("scale", "", tuple(sizes.items())), generator(seed, "cpu")).numpy().astype(np.int64)
    order = torch.randperm(experts, generator=generator(seed, "cpu")).numpy()  # the first that `draw_ids` draws
    found = np.empty(experts)
    found[order] = inclusion_probabilities(skew, _SAMPLER, experts, top_k)
    return ids, found


def _by_source(values: NDArray, group: Group) -> Array:
    """Sums over the tokens of each rank: (R T, X) -> (R, X)."""
    return values.reshape(group.ranks, group.tokens, -1).sum(1).astype(float)
