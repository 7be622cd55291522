"""QuACK (quack-kernels 0.6.5): its grouped matrix products, and its top-k.

`experts`: the activation is in the epilogue of the first product. Persistent warp-specialised kernels in CuTe DSL for Hopper, rows of an expert from `offsets`;
the weights' gate and up halves are read side by side although w13 holds one above the other (`concat_layout`). Its SiLU is made
of `tanh.approx`. Its form of gpt-oss's activation does not clamp.

As a peer it is tuned by its own tuner (`quack_tuner`), which compiles and times up to 33 configurations of every product when it first
runs with these sizes. `tiles_of` picks one from the sizes instead, after measurements on an H200 (docs/kernels.md).

FLOPs: 6 R H I; floor: as in `triton_experts`.

`gather`: pack and experts fused. The first product gathers token rows as it loads them; no packed copy is written or read. QuACK takes token numbers where ours are numbers of assignments, so each call divides them (R int32, read and written).

`gate`: fused top-k + softmax, for the router `softmax_topk_renorm` only. QuACK sorts a row's logits with a bitonic network in registers and takes the softmax over the k
winners. Weights come back in the logits' dtype; with bf16 or fp16 logits they are rounded to it and a copy widens
them to float32, which is part of this peer's cost. For fp32 logits QuACK writes straight into the given outputs.

Compulsory bytes: T * E * itemsize + 8 * T * k; floor: reading the logits.

No problem that is `unsupported_gate` is launched: QuACK keeps the expert index in the low log2(E) mantissa bits of
the logit, so fp32 logits that agree in the bits above are ordered by index, and fp32 weights are off by up to about E
* 2**-23.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers.quack_tuner import tuner_choices
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import mixed_formats, other_rows, unaligned
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.layer import Layer

_ACTIVATIONS = {"swiglu": "swiglu", "geglu": "geglu", "relu2": "relu_sq"}  # QuACK's names
_WIDE = 4096  # hidden size from which clusters that share rows are faster
_FEW_ROWS = 512  # per expert
_LONG_SUMS = 8192  # terms of the second product


@dataclass(frozen=True)
class Tiles:
    """A configuration of a product: a tile's rows and columns, whether two warpgroups take tiles in turn or share each of them,
    and the tiles of a cluster, by rows and columns."""

    rows: int
    columns: int
    pingpong: bool
    cluster: tuple[int, int]


def tiles_of(problem: Experts, gathered: bool) -> tuple[Tiles, Tiles]:
    """The configurations of both products, from the sizes alone."""
    columns = problem.intermediate * (2 if problem.gated else 1)
    if gathered:
        up = Tiles(128, 256, False, (1, 1))
    elif columns % 384 == 0:
        up = Tiles(128, 192, True, (1, 1) if problem.hidden < _WIDE else (1, 2))
    elif problem.rows < _FEW_ROWS * problem.experts:
        up = Tiles(128, 256, False, (1, 2))
    else:
        up = Tiles(128, 128, True, (1, 2))
    if problem.intermediate >= _LONG_SUMS:
        return up, Tiles(256, 192, False, (1, 2))
    return up, Tiles(128, 192, True, (1, 1)) if problem.hidden < _WIDE else Tiles(128, 208, True, (1, 2))


def unsupported_experts(problem: Experts, tuned: bool = False) -> str | None:
    """Why this problem cannot run, or None."""
    if reason := other_rows(problem):
        return reason
    if problem.activation not in _ACTIVATIONS:
        return f"QuACK has no {problem.activation} with a clamp"
    return unaligned(problem, "QuACK") or mixed_formats(problem)


def bind_experts(
    problem: Experts, *, packed: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor, tuned: bool = False
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), all contiguous -> y (R, H).

    `tuned` leaves the configurations to QuACK's tuner, which runs in the first call.
    """
    return products(problem, packed, None, offsets, w13, w2, y, tuned)


def products(
    problem: Experts,
    x: Tensor,
    tokens: Tensor | None,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    tuned: bool = False,
) -> Callable[[], None]:
    """Both products -> y (R, H). Row r is x[r], or x[tokens[r]] with `tokens` (R,) int32."""
    from quack.gemm_interface import gemm, gemm_act, gemm_tuned  # imports initialise CUDA, which a server may not do

    chosen = tuner_choices()
    activated = torch.empty((len(y), problem.intermediate), dtype=y.dtype, device=y.device)
    up, down = (None, None) if tuned else map(_configuration, tiles_of(problem, tokens is not None))
    multiply = partial(gemm, tuned=True) if tuned else partial(gemm_tuned.fn, config=down)

    def run() -> None:
        gemm_act(
            x,
            w13.mT,
            activation=_ACTIVATIONS[problem.activation],
            postact_out=activated,
            store_preact=False,
            cu_seqlens_m=offsets,
            A_idx=tokens,
            tuned=tuned,
            config=up,
            concat_layout=("B",) if problem.gated else None,
        )
        multiply(activated, w2.mT, out=y, cu_seqlens_m=offsets)

    run.configuration = chosen if tuned else lambda: f"{up}; {down}"
    return run


def _configuration(tiles: Tiles) -> Any:
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=tiles.rows,
        tile_n=tiles.columns,
        pingpong=tiles.pingpong,
        cluster_m=tiles.cluster[0],
        cluster_n=tiles.cluster[1],
        is_dynamic_persistent=False,
        device_capacity=9,
    )


def unsupported_gather(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    return problem.repacked or unsupported_experts(problem.experts)


def bind_gather(
    problem: Layer, *, x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor
) -> Callable[[], None]:
    """Bind x (T, H), order (R,) int32, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I) -> y (R, H).

    Rows lie in the compact layout, in which every row of an expert is an assignment.
    """
    tokens = torch.empty_like(order)
    multiply = products(problem.experts, x, tokens, offsets, w13, w2, y)

    def run() -> None:
        torch.div(order, problem.layout.top_k, rounding_mode="floor", out=tokens)
        multiply()

    run.configuration = multiply.configuration
    return run


_ROUTER = "softmax_topk_renorm"


def unsupported_gate(problem: Gate) -> str | None:
    """Why QuACK's top-k cannot run a problem, or None. Read from quack/topk.py 0.6.5."""
    experts, top_k, dtype = problem.experts, problem.top_k, problem.dtype
    vector = 128 // FORMATS[dtype].bits
    if problem.router != _ROUTER:
        return f"QuACK's top-k computes {_ROUTER}, not {problem.router}"
    if experts & (experts - 1) or not vector <= experts <= 4096:
        return f"QuACK's top-k needs a power of two from {vector} to 4096 experts with {dtype} logits, not {experts}"
    if top_k & (top_k - 1) or top_k > min(128, experts):
        return f"QuACK's top-k needs k to be a power of two up to 128, not {top_k}"
    if top_k % math.gcd(vector, experts):
        return f"QuACK's top-k with {dtype} logits needs k to be a multiple of {vector} (output stride), not {top_k}"
    return None


def bind_gate(problem: Gate, *, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Callable[[], None]:
    """Bind logits (T, E) -> topk_ids (T, k) int32, topk_weights (T, k) float32. The rule has no selection bias."""
    # Importing quack initialises CUDA, so it must not happen before a worker owns the device.
    from quack.cute_dsl_utils import torch2cute_dtype_map
    from quack.topk import TopK

    kernel = TopK.compile(torch2cute_dtype_map[logits.dtype], problem.experts, problem.top_k, True)
    if logits.dtype == topk_weights.dtype:
        return functools.partial(kernel, logits, topk_weights, topk_ids)
    narrow = torch.empty_like(topk_weights, dtype=logits.dtype)

    def run() -> None:
        kernel(logits, narrow, topk_ids)
        topk_weights.copy_(narrow)

    return run
