"""Routing assignments and token inputs, drawn by (seed, shape, skew) and never by implementation, or read from a trace.

Competitors of a cell get identical tensors. Rows never hold an expert twice.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload import trace
from moe_routing_bench.workload.skew import inclusion_probabilities, zipf_exponent
from moe_routing_kernels.formats import FORMATS

_NONCE_BITS = 32


@dataclass(frozen=True)
class Routing:
    """`ids` (T, k) int32, `weights` (T, k) float32 that sum to 1 a row, `logits` (T, E) float32 whose top-k is `ids`."""

    ids: Tensor
    weights: Tensor
    logits: Tensor


def generator(seed: int, device: torch.device | str) -> torch.Generator:
    """A generator on `device`, so that large inputs are drawn where they are used."""
    return torch.Generator(device).manual_seed(seed)


def again(seed: int, nonce: int) -> int:
    """A seed for other values than those of `seed`, but the same number of assignments per expert, as a multiset.

    `nonce` is below 2**32, because a CPU's generator takes no more; the upper bits say what is drawn again.
    """
    return (seed + 1) << _NONCE_BITS | nonce


def draw_ids(cell: Cell, rng: torch.Generator) -> Tensor:
    """Expert ids (T, k) int32 on the generator's device, by the cell's sampler and skew.

    By a seed of `again`, those of the first seed with tokens and experts in another order: as many rows in every layout. The experts of the
    first of several expert-parallel ranks remain its.
    """
    first = rng.initial_seed() >> _NONCE_BITS
    if not first:
        return _sampled(cell, rng)
    ids = _sampled(cell, generator(first - 1, rng.device))
    own = cell.experts // (cell.get("ep") or 1)
    tokens, local, others = (
        torch.randperm(n, generator=rng, device=rng.device) for n in (len(ids), own, cell.experts - own)
    )
    return torch.cat([local, own + others])[ids[tokens].long()].int()


def _sampled(cell: Cell, rng: torch.Generator) -> Tensor:
    if cell.sampler == "trace":
        ids = trace.read(Path(cell.trace), cell.tokens, cell.experts, cell.top_k)
        return torch.from_numpy(ids).to(rng.device)
    hot_first = torch.randperm(cell.experts, generator=rng, device=rng.device)  # hot experts are not neighbours
    draw = _exact if cell.sampler == "exact" else _plackett_luce
    return hot_first[draw(cell, rng)].int()


def _exact(cell: Cell, rng: torch.Generator) -> Tensor:
    """Integer loads n_e (largest remainder, sum T k, n_e <= T), written out expert by expert and dealt to k columns.

    A run of at most T equal ids, read column by column, meets a row at most once; rows and columns are then shuffled.
    """
    tokens, top_k = cell.tokens, cell.top_k
    share = torch.tensor(inclusion_probabilities(cell.skew, "exact", cell.experts, top_k), dtype=torch.float64)
    ideal = share * tokens
    loads = ideal.floor().long()
    missing = tokens * top_k - int(loads.sum())
    remainder = torch.where(loads < tokens, ideal - loads, -1.0)
    loads[remainder.argsort(descending=True, stable=True)[:missing]] += 1
    ids = torch.arange(len(loads)).repeat_interleave(loads).view(top_k, tokens).T.to(rng.device)
    ids = ids[torch.randperm(tokens, generator=rng, device=rng.device)]
    columns = torch.rand(ids.shape, generator=rng, device=rng.device).argsort(dim=1)
    return ids.gather(1, columns)


def _plackett_luce(cell: Cell, rng: torch.Generator) -> Tensor:
    """Successive sampling without replacement: the k largest of log-weight plus Gumbel noise."""
    exponent = zipf_exponent(cell.skew, "plackett_luce", cell.experts, cell.top_k)
    rank = torch.arange(1, cell.experts + 1, device=rng.device, dtype=torch.float32)
    noise = torch.empty(cell.tokens, cell.experts, device=rng.device).exponential_(generator=rng)
    return (-exponent * rank.log() - noise.log()).topk(cell.top_k, dim=1).indices


def draw_routing(cell: Cell, seed: int, device: torch.device | str) -> Routing:
    """A routing whose logits are N(0, 1) value for value: each row's largest k values are moved to its chosen experts."""
    rng = generator(seed, device)
    ids = draw_ids(cell, rng)
    tokens, experts = ids.shape[0], cell.experts
    values = torch.randn(tokens, experts, generator=rng, device=rng.device).sort(dim=1, descending=True).values
    values[:, : ids.shape[1]] += 1e-4  # no tie between the last expert chosen and the first one left out
    order = torch.rand(tokens, experts, generator=rng, device=rng.device)
    ahead = torch.arange(ids.shape[1], 0, -1, device=rng.device, dtype=torch.float32).expand(tokens, -1)
    order.scatter_(1, ids.long(), ahead + 1)  # chosen experts first, in the order of their ids' columns
    logits = torch.empty_like(values).scatter_(1, order.argsort(dim=1, descending=True), values)
    return Routing(ids, logits.gather(1, ids.long()).softmax(1), logits)


def selection_bias(experts: int, seed: int, device: torch.device | str) -> Tensor:
    """The bias (E,) float32 of a rule that has one: zeros, which keep the drawn skew. By a seed of `again` it is that of `gate`, so that
    a kernel that leaves it out chooses other experts."""
    return draw_bias(experts, generator(seed, device)) if seed >> _NONCE_BITS else torch.zeros(experts, device=device)


def draw_bias(experts: int, rng: torch.Generator) -> Tensor:
    """A selection bias (E,) float32 that changes choices."""
    return 0.1 * torch.randn(experts, generator=rng, device=rng.device)


def randn(shape: tuple[int, ...], dtype: str, rng: torch.Generator) -> Tensor:
    """N(0, 1) tokens, never zeros: zeros hide unwritten outputs and run faster than real data."""
    return torch.randn(shape, generator=rng, device=rng.device, dtype=FORMATS[dtype].torch_dtype)
