"""What the tests of undefined rows share: numbers that stand where a kernel writes nothing, and layers that must not read them."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.ops import reference

POISONS = {"nan": float("nan"), "number": 3.0}  # a comparison hides NaN: clamp has no gradient there

# Ids as models with expert parallelism have them: of experts elsewhere all from E on, or -1.
IDS = {
    "all_here": [[0, 1], [2, 1], [3, 0], [1, 3], [2, 0], [1, 2]],
    "some_elsewhere": [[0, 1], [4, 4], [-1, 2], [3, 4], [2, -1], [-1, -1]],
    "first_elsewhere": [[4, 9], [2, 1], [3, 0], [1, 3], [2, 0], [1, 2]],
    "none_here": [[4, 5], [-1, 4], [4, 4], [-1, -1], [2**31 - 1, 4], [7, 4]],
}


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Every buffer that torch does not initialise holds NaN, or the largest integer."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all(), "this torch does not fill buffers"
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def spoil(tensor: Tensor, offsets: Tensor, poison: float) -> Tensor:
    """The rows of (R, ...) that are of no expert, set to a number, in place."""
    tensor[int(offsets[-1]) :] = poison
    return tensor


class GroupedProduct(torch.autograd.Function):
    """torch's grouped product, whose result and gradient hold a number in rows of no expert."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, ends: Tensor, poison: float) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        ctx.poison = poison
        return spoil(PRODUCT(rows, weights, offs=ends), ends, poison)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        rows, weights, ends = ctx.saved_tensors
        d_rows = spoil(PRODUCT(grads[0].contiguous(), weights.transpose(1, 2), offs=ends), ends, ctx.poison)
        d_weights = PRODUCT(rows.T.contiguous(), grads[0].contiguous(), offs=ends)
        return d_rows, d_weights, None, None


PRODUCT = F.grouped_mm


def undefined_products(monkeypatch: pytest.MonkeyPatch, poison: float) -> None:
    """`torch.nn.functional.grouped_mm` and the operators of experts leave a number in rows of no expert, as kernels may."""
    monkeypatch.setattr(F, "grouped_mm", lambda rows, weights, offs: GroupedProduct.apply(rows, weights, offs, poison))
    whole = SimpleNamespace(forward=reference.experts_training, backward=reference.experts_backward)

    def experts_training(rows: Tensor, offsets: Tensor, *rest, **options) -> tuple[Tensor, Tensor | None]:
        y, sums = whole.forward(rows, offsets, *rest, **options)
        return spoil(y, offsets, poison), None if sums is None else spoil(sums, offsets, poison)

    def experts_backward(grad: Tensor, rows: Tensor, offsets: Tensor, *rest) -> list[Tensor | None]:
        d_rows, *others = whole.backward(grad, rows, offsets, *rest)
        return [None if d_rows is None else spoil(d_rows, offsets, poison), *others]

    monkeypatch.setattr(reference, "experts_training", experts_training)
    monkeypatch.setattr(reference, "experts_backward", experts_backward)
