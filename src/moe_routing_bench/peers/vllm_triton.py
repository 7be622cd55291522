"""permute, pack, experts and combine by vLLM's Triton kernels (vllm 0.33.0, `fused_experts`), with the tiles of its tuned tables.

Strategy: assignments are sorted into blocks of rows of one expert; a Triton kernel gathers tokens and multiplies, a kernel of vLLM's library
applies the activation, the Triton kernel again multiplies and weighs rows that it stores by assignment, and a sum over each token's
rows ends it. With few tokens for many experts nothing is sorted: each assignment is a block. vLLM looks its tiles up by device, experts, inner size
and format, those of the nearest number of tokens; where it has no table a rule picks them, and the row's configuration says so.

Weights: plain ones; integers of 8 and 4 bits with 16-bit activations; with `fp8` floats of 8 bits by rows or blocks of 128, with
activations quantised likewise before each product. gpt-oss's gate and up columns are brought side by side when bound, as its checkpoints
have them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_routing_bench.peers import vllm_files
from moe_routing_bench.peers.fused_weights import Fused, formats_unsupported, fused_weights
from moe_routing_bench.peers.whole_layers import returned
from moe_routing_kernels.layer import Layer

_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu_tanh",
    "relu2": "relu2_no_mul",
    "swiglu_oai": "swigluoai",
    "swiglu_oai_unbiased": "swigluoai",
}
_MOST_EXPERTS = 1023  # of the list of blocks


def unsupported(problem: Layer, fp8: bool = False) -> str | None:
    """Why it cannot run, or None."""
    if reason := formats_unsupported(problem, "vLLM's Triton kernel", _ACTIVATIONS, fp8):
        return reason
    if problem.layout.experts > _MOST_EXPERTS:
        return f"vLLM's list of blocks takes at most {_MOST_EXPERTS} experts"
    return vllm_files.missing()


def bind(
    problem: Layer,
    *,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    combined: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    residual: Tensor | None = None,
    fp8: bool = False,
    **scales: Tensor,
) -> Callable[[], dict[str, Tensor]]:
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H) of
    activations that have them, and the parts `scales` of quantised weights by name; returns combined (T, H).

    vLLM allocates its result, so a bound `combined` is not written. A `residual` (T, H) is added by torch.
    """
    fused = vllm_files.fused_moe()
    given = fused_weights(problem, w13, w2, b13, b2, scales)
    options = given.options() | {
        "activation": _ACTIVATIONS[problem.activation],
        "w1_bias": given.up.bias,
        "w2_bias": given.down.bias,
    }
    weights = (given.up.weights, given.down.weights)

    def run() -> dict[str, Tensor]:
        total = fused.fused_experts_impl(x, *weights, topk_weights, topk_ids, **options)
        return returned(total, residual)

    run.configuration = lambda: _tiles(fused, given, topk_ids)
    return run


def _tiles(fused: Any, given: Fused, topk_ids: Tensor) -> str:
    """The tiles, and the table that they are from."""
    up, down, form, (tokens, top_k) = given.up.weights, given.down.weights, given.form, topk_ids.shape
    inner = down.shape[2] * (2 if form == "int4_w4a16" else 1)
    tiles = fused.try_get_optimal_moe_config(up.shape, down.shape, top_k, form, tokens, block_shape=given.block)
    table = fused.get_config_file_name(len(down), inner, form, given.block)
    known = fused.get_moe_configs(len(down), inner, form, *(given.block or (0, 0)))
    return f"{tiles}; {'table' if known else 'default tiles: no table'} {table}"
