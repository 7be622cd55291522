"""Experts by QuACK's grouped matrix products: the activation in the epilogue of the first, rows optionally gathered by it.

Strategy (quack-kernels 0.6.5): persistent warp-specialised kernels in CuTe DSL for Hopper, rows of an expert from `offsets`;
the weights' gate and up halves are read side by side although w13 holds one above the other (`concat_layout`). Its SiLU is made
of `tanh.approx`. Its form of gpt-oss's activation does not clamp.

As a peer it is tuned by its own tuner (`quack_tuner`), which compiles and times up to 33 configurations of every product when it first
runs with these sizes. `tiles_of` picks one from the sizes instead, after measurements on an H200 (docs/kernels.md).

FLOPs: 6 R H I; floor: as in `triton_experts`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers.quack_tuner import tuner_choices
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import mixed_formats, other_rows, unaligned

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


def unsupported(problem: Experts, tuned: bool = False) -> str | None:
    """Why this problem cannot run, or None."""
    if reason := other_rows(problem):
        return reason
    if problem.activation not in _ACTIVATIONS:
        return f"QuACK has no {problem.activation} with a clamp"
    return unaligned(problem, "QuACK") or mixed_formats(problem)


def bind(
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
