"""The MoE layer that is trained: route, place under a capacity, run the experts, combine.

Every shape is known without looking at data and nothing waits for the host (on a GPU), so that a step can be captured.
Suffixes: T tokens, K choices a token, R rows, E experts, D model width, H expert width, B sequences, S positions, N slots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.quality.clock import NO_CLOCK, Clock

ALIGN = 8  # rows: grouped GEMM in bf16 reads 16 bytes at a time, in its backward pass along the rows


@dataclass(frozen=True)
class Placement:
    """Which choice every row computes: t * K + j, or T * K for padding, which stands for a token T of zeros."""

    choice_R: Tensor  # int64
    ends_E: Tensor  # int32, the row after the last of each expert
    kept_TK: Tensor  # bool


@dataclass(frozen=True)
class Seen:
    """What the last forward pass of a layer decided, for statistics: detached."""

    ids_TK: Tensor | None  # None for soft MoE
    kept_TK: Tensor | None
    scores_TE: Tensor


def capacity(tokens: int, top_k: int, experts: int, factor: float | None) -> int | None:
    """Most tokens an expert takes: ceil(factor · T · k / E), at most T; None without a limit."""
    return None if factor is None else min(tokens, math.ceil(round(factor * tokens * top_k / experts, 6)))


def place(ids_TK: Tensor, weights_TK: Tensor, experts: int, limit: int | None, policy: str, padded: bool) -> Placement:
    """Group choices by expert, drop those over `limit` of an expert, and give the others rows.

    `policy` says who stays: "position" (the first tokens), "random", or "score" (the largest weights). Padded experts
    have `limit` rows each; otherwise they follow one another at multiples of `ALIGN`.
    """
    tokens, choices = ids_TK.shape
    group, device = _groups(ids_TK, experts), ids_TK.device
    if policy == "position":
        order = group.argsort(stable=True)
    else:
        score = weights_TK.detach().reshape(-1)
        first = torch.randperm(len(group), device=device) if policy == "random" else score.argsort(descending=True, stable=True)  # fmt: skip
        order = first[group[first].argsort(stable=True)]
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


def ranks(ids_TK: Tensor, experts: int) -> Tensor:
    """How many choices of the same expert come before each choice (T, K), by position; ids outside 0..E-1 share a group."""
    group = _groups(ids_TK, experts)
    order = group.argsort(stable=True)
    _, rank = _ranked(group[order], experts)
    return torch.empty_like(rank).scatter_(0, order, rank).view_as(ids_TK)


def _groups(ids_TK: Tensor, experts: int) -> Tensor:
    """The expert of each choice (T K,) int64; E, the last group, where there is nothing to compute."""
    flat = ids_TK.reshape(-1).long()
    return torch.where((flat >= 0) & (flat < experts), flat, experts)


def _ranked(sorted_group: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Of choices in the order of their groups: the load of each group (E + 1,), and the rank of each choice in its own."""
    load = sorted_group.new_zeros(experts + 1).scatter_add_(0, sorted_group, torch.ones_like(sorted_group))
    rank = torch.arange(len(sorted_group), device=sorted_group.device) - (load.cumsum(0) - load)[sorted_group]
    return load, rank


class Experts(nn.Module):
    """E SwiGLU networks: y = (silu(x W1) · (x W3)) W2."""

    def __init__(self, experts: int, dim: int, hidden: int, depth: int) -> None:
        """Weights N(0, 0.02²), those that write into the residual stream divided by sqrt(2 · depth) as in GPT-2."""
        super().__init__()
        self.w13_EDH = nn.Parameter(torch.empty(experts, dim, 2 * hidden).normal_(std=0.02))
        self.w2_EHD = nn.Parameter(torch.empty(experts, hidden, dim).normal_(std=0.02 / math.sqrt(2 * depth)))

    def padded(self, x_ERD: Tensor) -> Tensor:
        """The same number of rows for every expert."""
        return torch.bmm(_swiglu(torch.bmm(x_ERD, self.w13_EDH.to(x_ERD.dtype))), self.w2_EHD.to(x_ERD.dtype))

    def grouped(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Experts one after the other. Rows after the last end are left unwritten, forwards and backwards."""
        hidden = _swiglu(F.grouped_mm(x_RD, self.w13_EDH.to(x_RD.dtype), offs=ends_E))
        return F.grouped_mm(hidden, self.w2_EHD.to(x_RD.dtype), offs=ends_E)

    def can_group(self, x: Tensor) -> bool:
        """Whether torch's grouped GEMM takes these rows."""
        whole = not (self.w2_EHD.shape[1] % 8 or self.w2_EHD.shape[2] % 8)
        return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and whole


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class MoE(nn.Module):
    """Experts behind a router of `routers.learned`; with several routers the layer is applied once with each.

    After a forward pass `seen` holds what each router decided and `losses` what it adds to the training loss.
    """

    clock: Clock = NO_CLOCK

    def __init__(
        self, routers: Sequence[nn.Module], experts: Experts, top_k: int, capacity_factor: float | None, drop_policy: str
    ) -> None:  # fmt: skip
        """`top_k` is the number of choices that the capacity counts on. The routers' zero-computation experts live here."""
        super().__init__()
        self.routers, self.experts = nn.ModuleList(routers), experts
        self.top_k, self.capacity_factor, self.drop_policy = top_k, capacity_factor, drop_policy
        self.count, dim = experts.w13_EDH.shape[:2]
        self.extra: tuple[str, ...] = tuple(routers[0].extra)  # type: ignore[arg-type]
        # zeros draw nothing: a router without constant experts leaves the layers after it the same start
        constants = self.extra.count("const")
        self.constants = nn.Parameter(torch.zeros(constants, dim)) if constants else None
        self.mixers = nn.Parameter(torch.zeros(constants, dim, 2)) if constants else None
        self.adapters: nn.Module | None = None  # of a frozen layer: see `adapters`
        self.seen: list[Seen] = []
        self.losses: list[dict[str, Tensor]] = []

    def forward(self, x_BSD: Tensor, token_ids_BS: Tensor, positions_S: Tensor) -> Tensor:
        """y (B, S, D): the weighted sum over the experts of each token; over several passes, with the inner residual."""
        self.seen, self.losses = [], []
        for router in self.routers:
            x_BSD = self.clock.mark(x_BSD, "router", "rest")
            with torch.autocast(x_BSD.device.type, enabled=False):
                routing = router(x_BSD.float(), token_ids_BS, positions_S)
            self.losses.append(routing.losses)
            mix = self._soft if hasattr(routing, "dispatch") else self._sparse
            y_BSD = self.clock.mark(mix(x_BSD, routing), "rest", "combine")
            if self.adapters is not None:
                y_BSD = y_BSD + self.adapters(x_BSD, token_ids_BS, positions_S, routing).to(y_BSD.dtype)
                self.losses.append(self.adapters.losses)  # type: ignore[arg-type]
            x_BSD = y_BSD if len(self.routers) == 1 else x_BSD + y_BSD  # Chain-of-Experts, 2506.18945
        return x_BSD

    def _sparse(self, x_BSD: Tensor, routing) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        rows_TD = x_TD.to(_compute_dtype(x_TD))
        weights_TK = self.clock.mark(routing.weights, "dispatch", "router")
        limit = capacity(len(x_TD), self.top_k, self.count, self.capacity_factor)
        grouped = self.experts.can_group(rows_TD)
        if limit is None and not grouped:
            limit = _longest(routing.ids, self.count)
        placed = place(routing.ids, weights_TK, self.count, limit, self.drop_policy, padded=not grouped)
        self.seen.append(Seen(routing.ids, placed.kept_TK, routing.scores.detach()))
        # index_select and index_add are each other's backward pass; indexing with brackets would sort on a GPU. What an
        # expert left unwritten reaches nothing but token T, forwards and backwards.
        token_R = placed.choice_R // weights_TK.shape[1]
        packed_RD = F.pad(rows_TD, (0, 0, 0, 1)).index_select(0, token_R)
        packed_RD = self.clock.mark(packed_RD, "experts", "dispatch")
        if grouped:
            out_RD = self.experts.grouped(packed_RD, placed.ends_E)
        else:
            out_RD = self.experts.padded(packed_RD.view(self.count, -1, x_TD.shape[1])).flatten(0, 1)
        out_RD = self.clock.mark(out_RD, "combine", "experts")
        weight_R = F.pad(weights_TK.flatten(), (0, 1)).index_select(0, placed.choice_R)
        y_TD = weight_R.new_zeros(len(x_TD) + 1, x_TD.shape[1]).index_add(0, token_R, out_RD * weight_R[:, None])[:-1]
        for index, kind in enumerate(self.extra):
            share_T1 = (weights_TK * (routing.ids == self.count + index)).sum(1, keepdim=True)
            if kind != "zero":
                y_TD = y_TD + share_T1 * self._without_computation(index, kind, x_TD)
        return y_TD.to(x_BSD.dtype).view_as(x_BSD)

    def _without_computation(self, index: int, kind: str, x_TD: Tensor) -> Tensor:
        """MoE++ (2410.07348, section 3.1): the token itself, or its mixture with a vector, by a softmax over two scores."""
        if kind == "copy":
            return x_TD
        number = self.extra[:index].count("const")
        assert kind == "const" and self.constants is not None and self.mixers is not None
        mix_T2 = (x_TD.float() @ self.mixers[number]).softmax(-1)
        return mix_T2[:, :1] * x_TD + mix_T2[:, 1:] * self.constants[number]

    def _soft(self, x_BSD: Tensor, routing) -> Tensor:
        """Soft MoE (2308.00951, section 2.1): every slot is a mixture of all tokens, every token one of all slots."""
        dtype = _compute_dtype(x_BSD)
        self.seen.append(Seen(None, None, routing.scores.detach()))
        combine_BSN = self.clock.mark(routing.combine, "dispatch", "router").to(dtype)
        batch, _, dim = x_BSD.shape
        slots_BND = routing.dispatch.to(dtype).transpose(1, 2) @ x_BSD.to(dtype)
        rows_ERD = slots_BND.view(batch, self.count, -1, dim).transpose(0, 1).reshape(self.count, -1, dim)
        out_ERD = self.experts.padded(self.clock.mark(rows_ERD, "experts", "dispatch"))
        out_ERD = self.clock.mark(out_ERD, "combine", "experts")
        out_BND = out_ERD.view(self.count, batch, -1, dim).transpose(0, 1).reshape(batch, -1, dim)
        return (combine_BSN @ out_BND).to(x_BSD.dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _longest(ids_TK: Tensor, experts: int) -> int:
    """Rows that the fullest expert needs: counted where that costs nothing, and the most there can be on a GPU."""
    if ids_TK.is_cuda:
        return len(ids_TK)
    valid = ids_TK[(ids_TK >= 0) & (ids_TK < experts)]
    return max(1, int(torch.bincount(valid, minlength=experts).max()))
