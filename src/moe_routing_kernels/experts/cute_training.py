"""Experts forward and backward in CuTe DSL for Hopper: six grouped products, the activation and its slope in the stores of two of them.

==========================  =====================================  ===============================================
product                     reads                                  writes
==========================  =====================================  ===============================================
rows W13^T                  rows (R, H), w13 (E, 2 I, H)           sums (R, 2 I), their activation (R, I)
activated W2^T              (R, I), w2 (E, H, I)                   y (R, H)
grad W2                     grad (R, H), w2, sums                  gradient of the sums (R, 2 I), activated (R, I)
grad^T activated            both                                   gradient of w2
(gradient of sums) W13      (R, 2 I), w13                          gradient of the rows (R, H)
(gradient of sums)^T rows   both                                   gradient of w13
==========================  =====================================  ===============================================

Kept from the forward to the backward pass are the rows and the sums; what is activated is computed again, where it costs one store.

FLOPs: 18 R H I for R rows. Floor: those at the rate of a large product, or weights read twice and their gradients written once, and
2 R (12 H + 13 I) bytes of 16-bit rows, at the bandwidth of a stream, whichever takes longer.

Invariant: rows of no expert are read, but never written, and add nothing to any gradient.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.cute.cache import per_problem
from moe_routing_kernels.cute.compilation import current_arch
from moe_routing_kernels.experts import Experts, cute_experts, cute_swapped
from moe_routing_kernels.experts import cute_training_products as products
from moe_routing_kernels.experts import cute_weight_gradients as weight_gradients
from moe_routing_kernels.experts.cute_experts import choose_tile
from moe_routing_kernels.experts.cute_tiles import Product, Tile
from moe_routing_kernels.experts.cute_training_products import TrainingProduct
from moe_routing_kernels.experts.cute_weight_tiles import Reduction, reduction

MOST_TOKENS = 128  # of a tile that goes to its buffer as a whole


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if not problem.gated:
        return f"has slopes of gated activations, not of {problem.activation}"
    if problem.biased:
        return f"has no gradients of biases, which {problem.activation} has"
    return cute_experts.unsupported(problem)


def limited(tile: Tile) -> Tile:
    """The tile with no more than `MOST_TOKENS` tokens."""
    if tile.tokens <= MOST_TOKENS:
        return tile
    return replace(tile, tokens=MOST_TOKENS, narrowest=MOST_TOKENS // 2 if tile.narrowest else 0)


@per_problem
def parts(problem: Experts, weighted: bool = False) -> dict[str, Any]:
    """The products of a problem, in tiles that its sizes choose; `weighted` where rows have weights."""
    hidden, inner, experts, rows = problem.hidden, problem.intermediate, problem.experts, problem.rows
    activation, sums = problem.activation, 2 * problem.intermediate
    grad_tile, row_tile = limited(choose_tile(rows, experts, inner)), choose_tile(rows, experts, hidden)
    return {
        "up": TrainingProduct(inner, hidden, experts, activation, choose_tile(rows, experts, sums)),
        "down": cute_experts.products(problem, overlap=False)[1],  # as without a backward pass
        "d_sums": TrainingProduct(
            inner, hidden, experts, "", grad_tile, backward=True, derivative=activation, weighted=weighted
        ),
        "d_rows": TrainingProduct(hidden, sums, experts, "", row_tile, backward=True),
        "d_w13": reduction(sums, hidden, experts),
        "d_w2": reduction(hidden, inner, experts),
    }


def precompile(problem: Experts, arch: str) -> None:
    """Put the kernels of a problem into the cache, as a whole layer uses them; needs no GPU."""
    _compiled(problem, arch, weighted=True)


@per_problem
def _compiled(problem: Experts, arch: str, weighted: bool) -> dict[str, tuple[Any, Any]]:
    def compiled(part: Product | Reduction) -> Any:
        if isinstance(part, Reduction):
            return weight_gradients.compile_for(arch, problem.dtype, part)
        module = products if isinstance(part, TrainingProduct) else cute_swapped
        return module.compile_for(arch, problem.dtype, part)

    return {name: (part, compiled(part)) for name, part in parts(problem, weighted).items()}


def launches(problem: Experts, device: torch.device, weighted: bool = False) -> dict[str, Callable[..., object]]:
    """How to launch each product, with its tensors in the order of its `compile_for`."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def blocks(part: Product | Reduction) -> int:
        if isinstance(part, Reduction):
            return max(1, min(multiprocessors, part.tiles))
        return cute_experts.blocks_of(part, problem.rows, multiprocessors)

    def launch(kernel: Any, count: int, *tensors: Tensor | None) -> None:
        kernel(*tensors, count)

    kernels = _compiled(problem, current_arch(), weighted)
    return {name: functools.partial(launch, kernel, blocks(part)) for name, (part, kernel) in kernels.items()}


def forward(problem: Experts, rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """rows (R, H), offsets (E + 1,) int32, w13 (E, 2 I, H), w2 (E, H, I) -> y (R, H) and the sums (R, 2 I) of the first product."""
    run = launches(problem, rows.device, weighted=True)  # which its backward pass may be: these two are the same
    sums, y = rows.new_empty(len(rows), w13.shape[1]), torch.empty_like(rows)
    activated = rows.new_empty(len(rows), problem.intermediate)
    run["up"](rows, offsets, w13, sums, None, activated, None, None)
    run["down"](activated, None, offsets, w2, None, y)
    return y, sums


def backward(
    problem: Experts,
    grad: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    sums: Tensor,
    scales: Tensor | None = None,
    wanted: Sequence[bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """grad (R, H) of y, sums (R, 2 I) of the forward pass, and what that read -> the gradients of rows, w13, w2 and scales.

    With scales (R,) float32, `grad` is that of each row of y times its scale. Gradients that are not `wanted` are None, and so is that
    of scales where there are none: no product that only they need is launched, and nothing is allocated for them. Rows are read for
    the gradient of w13 alone.
    """
    of_rows, of_w13, of_w2, of_scales = wanted
    d_rows = d_w13 = d_w2 = dots = None
    if not any(wanted):
        return d_rows, d_w13, d_w2, dots
    run = launches(problem, grad.device, weighted=scales is not None)
    d_sums, activated = torch.empty_like(sums), grad.new_empty(len(grad), problem.intermediate)
    if scales is not None:  # which the first product writes, whether they are wanted or not
        dots = scales.new_empty(len(grad), parts(problem, weighted=True)["d_sums"].dots)
    run["d_sums"](grad, offsets, w2, sums, scales, d_sums, activated, dots)
    if of_w2:
        d_w2 = w2.new_empty(w2.shape)
        run["d_w2"](grad, activated, offsets, d_w2)
    if of_rows:
        d_rows = grad.new_empty(grad.shape)
        run["d_rows"](d_sums, offsets, w13, None, None, d_rows, None, None)
    if of_w13:
        assert rows is not None, "w13 has a gradient by rows"
        d_w13 = w13.new_empty(w13.shape)
        run["d_w13"](d_sums, rows, offsets, d_w13)
    return d_rows, d_w13, d_w2, dots.sum(1) if dots is not None and of_scales else None
