"""Experts forward and backward in CuTe DSL for Hopper: six grouped GEMMs, the activation and its derivative in the epilogues of two of them.

==========================  =====================================  ===============================================
GEMM                        reads                                  writes
==========================  =====================================  ===============================================
rows W13^T                  rows (R, H), w13 (E, 2 I, H)           pre-activations (R, 2 I), activated (R, I)
activated W2^T              (R, I), w2 (E, H, I)                   y (R, H)
grad W2 (dgrad)             grad (R, H), w2, pre-activations       their gradient (R, 2 I), activated (R, I)
grad^T activated (wgrad)    both                                   gradient of w2
d_preact W13 (dgrad)        (R, 2 I), w13                          gradient of the rows (R, H)
d_preact^T rows (wgrad)     both                                   gradient of w13
==========================  =====================================  ===============================================

The rows and the pre-activations are kept from the forward to the backward pass; the activated rows are recomputed, for one more store.

FLOPs: 18 R H I for R rows. Floor: those at the rate of a large GEMM, or weights read twice and their gradients written once, and
2 R (12 H + 13 I) bytes of 16-bit rows, at the bandwidth of a stream, whichever takes longer.

Invariant: rows of no expert are read, but never written, and add nothing to any gradient.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.cute.cache import current_arch, per_problem
from moe_routing_kernels.experts import Experts, cute_experts
from moe_routing_kernels.experts.cute_experts import choose_tile
from moe_routing_kernels.gemm.sm90 import grouped_gemm, training, wgrad
from moe_routing_kernels.gemm.sm90.tile import GroupedGemm, Tile
from moe_routing_kernels.gemm.sm90.training import TrainingGemm
from moe_routing_kernels.gemm.sm90.wgrad_tile import WgradGemm, wgrad_gemm
from moe_routing_kernels.target import MEASURED, Target

MOST_TOKENS = 128  # most tokens of a tile whose accumulators fit the buffer at once


def unsupported(problem: Experts, target: Target | None = None) -> str | None:
    """Why this problem cannot run on a target (None: on any), or None."""
    if not problem.gated:
        return f"has derivatives of gated activations, not of {problem.activation}"
    if problem.biased:
        return f"has no gradients of biases, which {problem.activation} has"
    return cute_experts.unsupported(problem, target)


def limited(tile: Tile) -> Tile:
    """The tile with no more than `MOST_TOKENS` tokens."""
    if tile.tokens <= MOST_TOKENS:
        return tile
    return replace(tile, tokens=MOST_TOKENS, narrowest=MOST_TOKENS // 2 if tile.narrowest else 0)


@per_problem
def gemms(problem: Experts, weighted: bool = False, target: Target = MEASURED) -> dict[str, Any]:
    """The GEMMs of a problem for a target, in tiles that its sizes choose; `weighted` where rows have weights."""
    hidden, inner, experts, rows = problem.hidden, problem.intermediate, problem.experts, problem.rows
    activation, wide = problem.activation, 2 * problem.intermediate
    tile_for = functools.partial(choose_tile, rows, experts, multiprocessors=target.multiprocessors)
    return {
        "up": TrainingGemm(inner, hidden, experts, activation, tile_for(wide)),
        "down": cute_experts.gemms(problem, overlap=False, target=target)[1],  # as without a backward pass
        "d_preact": TrainingGemm(
            inner, hidden, experts, "", limited(tile_for(inner)), dgrad=True, derivative=activation, weighted=weighted
        ),
        "d_rows": TrainingGemm(hidden, wide, experts, "", tile_for(hidden), dgrad=True),
        "d_w13": wgrad_gemm(wide, hidden, experts),
        "d_w2": wgrad_gemm(hidden, inner, experts),
    }


def precompile(problem: Experts, arch: str) -> None:
    """Put the kernels of a problem into the cache, as a whole layer uses them; needs no GPU."""
    _compiled(problem, arch, weighted=True)


@per_problem
def _compiled(problem: Experts, arch: str, weighted: bool) -> dict[str, tuple[Any, Any]]:
    def compiled(gemm: GroupedGemm | WgradGemm) -> Any:
        if isinstance(gemm, WgradGemm):
            return wgrad.compile_for(arch, problem.dtype, gemm)
        module = training if isinstance(gemm, TrainingGemm) else grouped_gemm
        return module.compile_for(arch, problem.dtype, gemm)

    return {name: (gemm, compiled(gemm)) for name, gemm in gemms(problem, weighted, Target.named(arch)).items()}


def launches(problem: Experts, device: torch.device, weighted: bool = False) -> dict[str, Callable[..., object]]:
    """How to launch each GEMM, with its tensors in the order of its `compile_for`."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def blocks(gemm: GroupedGemm | WgradGemm) -> int:
        if isinstance(gemm, WgradGemm):
            return max(1, min(multiprocessors, gemm.tiles))
        return cute_experts.blocks_of(gemm, problem.rows, multiprocessors)

    def launch(kernel: Any, count: int, *tensors: Tensor | None) -> None:
        kernel(*tensors, count)

    kernels = _compiled(problem, current_arch(), weighted)
    return {name: functools.partial(launch, kernel, blocks(gemm)) for name, (gemm, kernel) in kernels.items()}


def forward(problem: Experts, rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """rows (R, H), offsets (E + 1,) int32, w13 (E, 2 I, H), w2 (E, H, I) -> y (R, H) and the pre-activations (R, 2 I)."""
    run = launches(problem, rows.device, weighted=True)  # as its backward pass may be: these two GEMMs are the same
    preact, y = rows.new_empty(len(rows), w13.shape[1]), torch.empty_like(rows)
    activated = rows.new_empty(len(rows), problem.intermediate)
    run["up"](rows, offsets, w13, preact, None, activated, None, None)
    run["down"](activated, None, offsets, w2, None, y)
    return y, preact


def backward(
    problem: Experts,
    grad: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    preact: Tensor,
    scales: Tensor | None = None,
    wanted: Sequence[bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """grad (R, H) of y, preact (R, 2 I) of the forward pass, and the tensors that it read -> the gradients of rows, w13, w2 and scales.

    With scales (R,) float32, `grad` is that of each row of y times its scale. Gradients that are not `wanted` are None, and so
    is the gradient of scales without scales: GEMMs for those alone are not launched, and nothing is allocated for them. Rows are read for
    the gradient of w13 alone.
    """
    of_rows, of_w13, of_w2, of_scales = wanted
    d_rows = d_w13 = d_w2 = dots = None
    if not any(wanted):
        return d_rows, d_w13, d_w2, dots
    run = launches(problem, grad.device, weighted=scales is not None)
    d_preact, activated = torch.empty_like(preact), grad.new_empty(len(grad), problem.intermediate)
    if scales is not None:  # the first GEMM always writes them
        gemm = gemms(problem, weighted=True, target=Target.here(grad.device))["d_preact"]
        dots = scales.new_empty(len(grad), gemm.dots)
    run["d_preact"](grad, offsets, w2, preact, scales, d_preact, activated, dots)
    if of_w2:
        d_w2 = w2.new_empty(w2.shape)
        run["d_w2"](grad, activated, offsets, d_w2)
    if of_rows:
        d_rows = grad.new_empty(grad.shape)
        run["d_rows"](d_preact, offsets, w13, None, None, d_rows, None, None)
    if of_w13:
        assert rows is not None, "w13 has a gradient by rows"
        d_w13 = w13.new_empty(w13.shape)
        run["d_w13"](d_preact, rows, offsets, d_w13)
    return d_rows, d_w13, d_w2, dots.sum(1) if dots is not None and of_scales else None
