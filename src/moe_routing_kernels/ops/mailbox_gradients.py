"""Gradients of a mailbox: the way back of rows is the way out of the gradients of their sums, and the other way round.

What came is copied, because a backward pass reads it after later layers have written the mailbox, and `Mailbox.read` then says so to the others.
So neither direction waits for the other, and layers, backward passes and recomputed forward passes may come in any order that all ranks share.
"""

from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from moe_routing_kernels.exchange.mailbox import Mailbox
from moe_routing_kernels.ops.backends import ready

__all__ = ["back", "out"]


def out(mailbox: Mailbox, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Mailbox.out` with gradients of x (T, H) and weights (T, k). Weights of ids -1 are 0, and rows without an id of this rank hold anything."""
    return _Out.apply(mailbox, x, ids, weights)  # type: ignore[return-value]


def back(mailbox: Mailbox, sums: Tensor, came: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """`Mailbox.back` with gradients of sums (N most_tokens, H) and residual (T, H), for ids and weights (T, k) as of `out` and the ids that `came`."""
    return _Back.apply(mailbox, sums, came, ids, weights, residual)  # type: ignore[return-value]


def _come(mailbox: Mailbox, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What came, in memory of its own."""
    rows, row_ids, row_weights = (each.clone() for each in mailbox.out(x, ids, weights))
    mailbox.read()
    return rows, row_ids, row_weights.masked_fill_(row_ids < 0, 0)


class _Out(Function):
    @staticmethod
    def forward(ctx: Any, mailbox: Mailbox, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows, row_ids, row_weights = _come(mailbox, x, ids, weights)
        ctx.mailbox = mailbox
        ctx.save_for_backward(ids, row_ids)
        ctx.mark_non_differentiable(row_ids)
        return rows, row_ids, row_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_rows, _, d_weights), (ids, came) = grads, ctx.saved_tensors
        # All ranks send both, whatever each of them needs.
        d_x = ctx.mailbox.back(ready(d_rows), ids, came=came)
        return None, d_x, None, ctx.mailbox.back_choices(d_weights.masked_fill(came < 0, 0), ids, came)


class _Back(Function):
    @staticmethod
    def forward(
        ctx: Any,
        mailbox: Mailbox,
        sums: Tensor,
        came: Tensor,
        ids: Tensor,
        weights: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        ctx.mailbox = mailbox
        ctx.save_for_backward(ids, weights)
        return mailbox.back(ready(sums), ids, residual, came=came)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_sums = _come(ctx.mailbox, ready(grad), *ctx.saved_tensors)[0] if ctx.needs_input_grad[1] else None
        return None, d_sums, None, None, None, grad if ctx.needs_input_grad[5] else None
