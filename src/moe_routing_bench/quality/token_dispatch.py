"""Who computes what: the rows that the choices of tokens get at their experts, under a capacity.

Every shape is known without looking at data, and on a GPU nothing waits for the host.
Suffixes: T tokens, K choices per token, R rows, E experts.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGN = 8  # rows: a grouped GEMM in bf16 reads 16 bytes at a time, in its backward pass along the rows


@dataclass(frozen=True)
class Placement:
    """The choice that each row computes: t * K + j, or T * K for padding, which stands for a token T of zeros."""

    choice_R: Tensor  # int64
    ends_E: Tensor  # int32, the row after the last one of each expert
    kept_TK: Tensor  # bool


def capacity(tokens: int, top_k: int, experts: int, factor: float | None) -> int | None:
    """The most tokens that an expert takes: ceil(factor · T · k / E), at most T; None without a limit."""
    return None if factor is None else min(tokens, math.ceil(round(factor * tokens * top_k / experts, 6)))


def place(ids_TK: Tensor, weights_TK: Tensor, experts: int, limit: int | None, policy: str, padded: bool) -> Placement:
    """Group the choices by expert, drop those of an expert beyond `limit`, and give a row to each of the others.

    `policy` says which choices stay: "position" keeps those of the first tokens, "choice" all first choices before any second
    one, and of each those of the first tokens, "random" any, "score" those with the largest weights. Padded experts have `limit` rows each; otherwise experts follow one another at multiples of
    `ALIGN`.
    """
    tokens, choices = ids_TK.shape
    group, device = _groups(ids_TK, experts), ids_TK.device
    order = _order(group, weights_TK, policy)
    sorted_group = group[order]
    load, rank = _ranked(sorted_group, experts)
    limit = tokens if limit is None else limit
    kept = (rank < limit) & (sorted_group < experts)
    if padded:
        size, rows = torch.full_like(load, limit), experts * limit
    else:
        size = (load.clamp(max=limit) + ALIGN - 1) // ALIGN * ALIGN
        rows = -(-min(len(group), experts * limit) // ALIGN) * ALIGN + ALIGN * experts
    size = F.pad(size[:experts], (0, 1))  # nothing is computed for the last group
    ends = size.cumsum(0)
    row = torch.where(kept, (ends - size)[sorted_group] + rank, rows)
    choice = torch.full((rows + 1,), len(group), device=device).scatter_(0, row, order)
    kept_TK = torch.zeros_like(kept).scatter_(0, order, kept).view(tokens, choices)
    return Placement(choice[:rows], ends[:experts].int(), kept_TK)


def ranks(ids_TK: Tensor, experts: int, policy: str) -> Tensor:
    """How many choices of the same expert come before each choice (T, K), by the policy "position" or "choice".

    Ids outside 0..E-1 share a group of their own.
    """
    group = _groups(ids_TK, experts)
    order = _order(group, ids_TK, policy)
    _, rank = _ranked(group[order], experts)
    return torch.empty_like(rank).scatter_(0, order, rank).view_as(ids_TK)


def _groups(ids_TK: Tensor, experts: int) -> Tensor:
    """The expert of each choice (T K,) int64; the last group, E, where there is nothing to compute."""
    flat = ids_TK.reshape(-1).long()
    return torch.where((flat >= 0) & (flat < experts), flat, experts)


def _order(group: Tensor, weights_TK: Tensor, policy: str) -> Tensor:
    """The choices (T K,) by group, and within each group those first which the policy keeps first."""
    if policy == "position":
        return group.argsort(stable=True)
    if policy == "choice":
        first = torch.arange(len(group), device=group.device).view(weights_TK.shape).T.reshape(-1)
    elif policy == "random":
        first = torch.randperm(len(group), device=group.device)
    else:
        first = weights_TK.detach().reshape(-1).argsort(descending=True, stable=True)
    return first[group[first].argsort(stable=True)]


def _ranked(sorted_group: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """For choices sorted by group: the load of each group (E + 1,), and the rank of each choice within its group."""
    load = sorted_group.new_zeros(experts + 1).scatter_add_(0, sorted_group, torch.ones_like(sorted_group))
    rank = torch.arange(len(sorted_group), device=sorted_group.device) - (load.cumsum(0) - load)[sorted_group]
    return load, rank
