"""The MoE layer that is trained: route, place under a capacity, run the experts, combine.

Every shape is known without looking at data, and on a GPU nothing waits for the host, so that a step can be captured.
Suffixes: T tokens, K choices per token, R rows, E experts, D model width, H expert width, B sequences, S positions, N
slots.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.quality.stage_clock import NO_CLOCK, Clock
from moe_routing_bench.quality.token_dispatch import capacity, place
from moe_routing_kernels import ops
from moe_routing_kernels.routers.learned import in_float32


@dataclass(frozen=True)
class Seen:
    """What the last forward pass of a layer decided, detached, for statistics."""

    ids_TK: Tensor | None  # None for soft MoE
    kept_TK: Tensor | None
    scores_TE: Tensor
    seated_by: str = "position"  # how a capacity seats them, see `token_dispatch.place`: "position" or "choice"


class Experts(nn.Module):
    """E SwiGLU networks: y = (silu(x W1) · (x W3)) W2."""

    def __init__(self, experts: int, dim: int, hidden: int, depth: int) -> None:
        """Draw the weights from N(0, 0.02²).

        Those that write into the residual stream are divided by sqrt(2 · depth), as in GPT-2.
        """
        super().__init__()
        self.w13_EDH = nn.Parameter(torch.empty(experts, dim, 2 * hidden).normal_(std=0.02))
        self.w2_EHD = nn.Parameter(torch.empty(experts, hidden, dim).normal_(std=0.02 / math.sqrt(2 * depth)))

    def padded(self, x_ERD: Tensor) -> Tensor:
        """Apply the experts to the same number of rows each: (E, R, D) to (E, R, D)."""
        return torch.bmm(_swiglu(torch.bmm(x_ERD, self.w13_EDH.to(x_ERD.dtype))), self.w2_EHD.to(x_ERD.dtype))

    def grouped(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Apply the experts to rows (R, D) that follow one another.

        Rows after the last end stay unwritten, forwards and backwards.
        """
        hidden = _swiglu(F.grouped_mm(x_RD, self.w13_EDH.to(x_RD.dtype), offs=ends_E))
        return F.grouped_mm(hidden, self.w2_EHD.to(x_RD.dtype), offs=ends_E)

    def rowwise(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The weights as operators of `ops` take them: w13 (E, 2 H, D) and w2 (E, D, H), contiguous, of `dtype`."""
        return tuple(  # type: ignore[return-value]
            weight.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
            for weight in (self.w13_EDH, self.w2_EHD)
        )

    @property
    def aligned(self) -> bool:
        """Whether rows of both widths are whole 16 bytes in bfloat16, as kernels want them."""
        return not (self.w2_EHD.shape[1] % 8 or self.w2_EHD.shape[2] % 8)

    def can_group(self, x: Tensor) -> bool:
        """Whether torch's grouped GEMM takes these rows."""
        return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and self.aligned


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class MoE(nn.Module):
    """Experts behind a router of `routers.learned`; a layer with several routers is applied once with each.

    After a forward pass, `seen` holds what each router decided, and `losses` what each adds to the training loss.
    """

    clock: Clock = NO_CLOCK
    operators = False  # whether experts are computed by `ops`, or by operations of torch alone

    def __init__(
        self,
        routers: Sequence[nn.Module],
        experts: Experts,
        top_k: int,
        capacity_factor: float | None,
        drop_policy: str,
        shared: Experts | None = None,
        gate: nn.Module | None = None,
    ) -> None:
        """`top_k` is the number of choices per token that the capacity counts on; `shared` is one expert that all tokens have.

        Its weight is that of a router with the kind "shared", else the sigmoid of what `gate` makes of x (D to 1), else 1.
        Zero-computation experts live here, not in a router.
        """
        super().__init__()
        self.routers, self.experts, self.shared, self.gate = nn.ModuleList(routers), experts, shared, gate
        self.top_k, self.capacity_factor, self.drop_policy = top_k, capacity_factor, drop_policy
        self.count, dim = experts.w13_EDH.shape[:2]
        self.extra: tuple[str, ...] = tuple(routers[0].extra)  # type: ignore[arg-type]
        # Zeros draw no random numbers, so the layers that follow start the same whether or not there are constant
        # experts.
        constants = self.extra.count("const")
        alike = itertools.groupby(enumerate(self.extra), key=lambda one: one if one[1] == "const" else one[1])
        spans = [[index for index, _ in group] for _, group in alike]
        self.spans = [(span[0], span[-1]) for span in spans if self.extra[span[0]] not in ("zero", "shared")]
        self.constants = nn.Parameter(torch.zeros(constants, dim)) if constants else None
        self.mixers = nn.Parameter(torch.zeros(constants, dim, 2)) if constants else None
        self.adapters: nn.Module | None = None  # of a frozen layer: see `adapters`
        self.seen: list[Seen] = []
        self.losses: list[dict[str, Tensor]] = []

    def forward(self, x_BSD: Tensor, token_ids_BS: Tensor, positions_S: Tensor) -> Tensor:
        """y (B, S, D): the weighted sum over each token's experts; several passes have a residual between them."""
        self.seen, self.losses = [], []
        for router in self.routers:
            x_BSD = self.clock.mark(x_BSD, "router", "rest")
            with torch.autocast(x_BSD.device.type, enabled=False):
                routing = router(x_BSD.float(), token_ids_BS, positions_S)
            self.losses.append(routing.losses)
            soft = hasattr(routing, "dispatch")
            mixed = self._soft(x_BSD, routing) if soft else self._sparse(x_BSD, routing, str(router.seated_by))
            y_BSD = self.clock.mark(mixed, "rest", "combine")
            if self.shared is not None:
                y_BSD = y_BSD + self._shared(self.shared, x_BSD, routing).to(y_BSD.dtype)
            if self.adapters is not None:
                y_BSD = y_BSD + self.adapters(x_BSD, token_ids_BS, positions_S, routing).to(y_BSD.dtype)
                self.losses.append(self.adapters.losses)  # type: ignore[arg-type]
            x_BSD = y_BSD if len(self.routers) == 1 else x_BSD + y_BSD  # Chain-of-Experts, 2506.18945
        return x_BSD

    def _sparse(self, x_BSD: Tensor, routing, seated_by: str) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        rows_TD = x_TD.to(compute_dtype(x_TD))
        limit = capacity(len(x_TD), self.top_k, self.count, self.capacity_factor)
        policy = seated_by if self.drop_policy == "position" else self.drop_policy
        by_operators = self.operators and self.experts.aligned
        compute = self._by_operators if by_operators else self._by_torch
        chosen = routing.ids.shape[1] - self.extra.count("shared")  # a shared expert comes last, and is not chosen
        ids_TK, weights_TK = routing.ids[:, :chosen], routing.weights[:, :chosen]
        y_TD, kept_TK = compute(rows_TD, ids_TK, weights_TK, limit, policy)
        self.seen.append(Seen(ids_TK, kept_TK, routing.scores.detach(), seated_by))
        for first, last in self.spans:
            these_TK = (ids_TK >= self.count + first) & (ids_TK <= self.count + last)
            share_T1 = (weights_TK * these_TK).sum(1, keepdim=True)
            y_TD = y_TD + share_T1 * self._without_computation(first, self.extra[first], x_TD)
        return y_TD.to(x_BSD.dtype).view_as(x_BSD)

    def _shared(self, shared: Experts, x_BSD: Tensor, routing) -> Tensor:
        """What the shared expert adds (B, S, D), with its weight."""
        y_TD = shared.padded(x_BSD.to(compute_dtype(x_BSD)).flatten(0, 1)[None])[0]
        if "shared" in self.extra:
            y_TD = y_TD * routing.weights[:, -1:]
        elif self.gate is not None:
            y_TD = y_TD * in_float32(self.gate, x_BSD).sigmoid()
        return y_TD.view_as(x_BSD)

    def _by_torch(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, limit: int | None, policy: str
    ) -> tuple[Tensor, Tensor]:
        """The experts' weighted sums (T, D) float32, and which choices were kept (T, K), by operations of torch alone."""
        weights_TK = self.clock.mark(weights_TK, "dispatch", "router")
        grouped = self.experts.can_group(rows_TD)
        if limit is None and not grouped:
            limit = _longest(ids_TK, self.count)
        placed = place(ids_TK, weights_TK, self.count, limit, policy, padded=not grouped)
        # index_select and index_add are each other's backward pass; indexing with brackets would sort on a GPU. Rows
        # that an expert leaves unwritten reach nothing but token T, forwards and backwards.
        token_R = placed.choice_R // weights_TK.shape[1]
        packed_RD = F.pad(rows_TD, (0, 0, 0, 1)).index_select(0, token_R)
        packed_RD = self.clock.mark(packed_RD, "experts", "dispatch")
        if grouped:
            out_RD = self.experts.grouped(packed_RD, placed.ends_E)
        else:
            out_RD = self.experts.padded(packed_RD.view(self.count, -1, rows_TD.shape[1])).flatten(0, 1)
        out_RD = self.clock.mark(out_RD, "combine", "experts")
        weight_R = F.pad(weights_TK.flatten(), (0, 1)).index_select(0, placed.choice_R)
        sums_TD = weight_R.new_zeros(len(rows_TD) + 1, rows_TD.shape[1])
        return sums_TD.index_add(0, token_R, out_RD * weight_R[:, None])[:-1], placed.kept_TK

    def _by_operators(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, limit: int | None, policy: str
    ) -> tuple[Tensor, Tensor]:
        """The same by the operators of `moe_routing_kernels.ops`, with sums that are rounded to the dtype of the rows.

        Rows in the order of tokens are placed, computed and combined in one operator: all of it is time of the experts.
        """
        weights_TK = self.clock.mark(weights_TK, "dispatch", "router")
        w13, w2 = self.experts.rowwise(rows_TD.dtype)
        if policy == "position":
            kept_TK = (ids_TK >= 0) & (ids_TK < self.count)
            if limit is not None:
                kept_TK = ops.permute(ids_TK, self.count, limit)[3] >= 0
            rows_TD = self.clock.mark(rows_TD, "experts", "dispatch")
            y_TD = ops.fused_experts(rows_TD, ids_TK, weights_TK, w13, w2, limit)
            return self.clock.mark(y_TD, "combine", "experts"), kept_TK
        placed = place(ids_TK, weights_TK, self.count, limit, policy, padded=False)
        choices = ids_TK.numel()
        order_R = torch.where(placed.choice_R < choices, placed.choice_R, -1).int()
        row_R = torch.arange(len(order_R), device=order_R.device, dtype=torch.int32)
        inverse = torch.full((choices + 1,), -1, dtype=torch.int32, device=order_R.device)
        inverse_TK = inverse.scatter_(0, placed.choice_R, row_R)[:-1].view_as(ids_TK)
        packed_RD = self.clock.mark(ops.pack(rows_TD, order_R, inverse_TK), "experts", "dispatch")
        out_RD = ops.experts(packed_RD, F.pad(placed.ends_E, (1, 0)), w13, w2)
        out_RD = self.clock.mark(out_RD, "combine", "experts")
        return ops.combine(out_RD, inverse_TK, weights_TK), placed.kept_TK

    def _without_computation(self, index: int, kind: str, x_TD: Tensor) -> Tensor:
        """The token, or its mixture with a vector by a softmax over two scores (MoE++ 2410.07348, section 3.1)."""
        if kind == "copy":
            return x_TD
        number = self.extra[:index].count("const")
        assert kind == "const" and self.constants is not None and self.mixers is not None
        mix_T2 = (x_TD.float() @ self.mixers[number]).softmax(-1)
        return mix_T2[:, :1] * x_TD + mix_T2[:, 1:] * self.constants[number]

    def _soft(self, x_BSD: Tensor, routing) -> Tensor:
        """Each slot is a mixture of all tokens, and each token one of all slots (Soft MoE 2308.00951, section 2.1)."""
        dtype = compute_dtype(x_BSD)
        self.seen.append(Seen(None, None, routing.scores.detach()))
        combine_BSN = self.clock.mark(routing.combine, "dispatch", "router").to(dtype)
        batch, _, dim = x_BSD.shape
        slots_BND = routing.dispatch.to(dtype).transpose(1, 2) @ x_BSD.to(dtype)
        rows_ERD = slots_BND.view(batch, self.count, -1, dim).transpose(0, 1).reshape(self.count, -1, dim)
        out_ERD = self.experts.padded(self.clock.mark(rows_ERD, "experts", "dispatch"))
        out_ERD = self.clock.mark(out_ERD, "combine", "experts")
        out_BND = out_ERD.view(self.count, batch, -1, dim).transpose(0, 1).reshape(batch, -1, dim)
        return (combine_BSN @ out_BND).to(x_BSD.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that experts compute in: that of autocast where it is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _longest(ids_TK: Tensor, experts: int) -> int:
    """How many rows the fullest expert needs: counted on a CPU.

    On a GPU, where counting would wait, the most there can be.
    """
    if ids_TK.is_cuda:
        return len(ids_TK)
    valid = ids_TK[(ids_TK >= 0) & (ids_TK < experts)]
    return max(1, int(torch.bincount(valid, minlength=experts).max()))
