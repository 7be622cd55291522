"""permute, pack, experts and combine by vLLM's Triton kernels (vllm 0.33.0, `fused_experts`), with the tiles of its tuned tables.

Strategy: assignments are sorted into blocks of rows of one expert; a Triton kernel gathers tokens and multiplies, a kernel of vLLM's library
applies the activation, the Triton kernel again multiplies and weighs rows that it stores by assignment, and a sum over each token's
rows ends it. With few tokens for many experts nothing is sorted: each assignment is a block. vLLM looks its tiles up by device, experts, inner size
and format, those of the nearest number of tokens; where it has no table a rule picks them, and the row's configuration says so.

Weights: plain ones; integers of 8 and 4 bits with 16-bit activations; with `fp8` floats of 8 bits by rows or blocks of 128, with
activations quantised likewise before each product. gpt-oss's gate and up columns are brought side by side when bound, as its checkpoints
have them.

The module that runs is that of a complete vLLM, or its files with stand-ins for the rest (`loading.Partial`). What the files ask of CUDA they get from vLLM's own libraries: the list of blocks, activations, the quantising of rows, and the sum.
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from moe_routing_bench.peers.common import Fused, formats_unsupported, fused_weights, returned
from moe_routing_bench.peers.loading import VLLM, VLLM_ROWS, Partial, Quiet, complete, file_of
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
    return missing()


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
    fused = fused_moe()
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


_FUSED = "vllm.model_executor.layers.fused_moe"
MODULE = f"{_FUSED}.fused_moe"
_FILES = (
    MODULE,
    f"{_FUSED}.activation",
    f"{_FUSED}.moe_align_block_size",
    f"{_FUSED}.utils",
    "vllm.model_executor.layers.quantization.utils.fp8_utils",
    "vllm.triton_utils.allocation",
    "vllm.utils.math_utils",
)
_LARGEST = 448.0  # of float8_e4m3fn


def missing() -> str | None:
    """Why the module cannot be loaded, or None."""
    lacks = [name for name in _FILES if file_of(name) is None]
    return VLLM.missing() or VLLM_ROWS.missing() or (f"vllm is installed without {lacks[0]}" if lacks else None)


@cache
def fused_moe() -> ModuleType:
    """The module, with vLLM's operators registered. Imports triton."""
    if complete("vllm"):
        return importlib.import_module(MODULE)
    VLLM_ROWS.operators()
    return Partial("vllm", _FILES, _given(VLLM.operators())).module(MODULE)


def _given(moe: Any) -> dict[str, dict[str, Any]]:
    """What the files import of others and use when they run, by module: the answers of vLLM on a Hopper GPU without settings of its own."""
    import torch
    import triton
    import triton.language as tl

    def quantise(x: torch.Tensor, scale: None = None, *, use_per_token_if_dynamic: bool) -> tuple:
        """`scaled_fp8_quant` as far as its callers go: a scale for each row."""
        assert scale is None and use_per_token_if_dynamic, "scales are of rows"
        rows, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((len(x), 1), dtype=torch.float32)
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(rows, x, scales, None)
        return rows, scales

    def device_name(device: int = 0) -> str:
        return torch.cuda.get_device_name(device).replace(" ", "_")

    def capability(wanted: int) -> bool:
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor == wanted

    def columns(wide: int, activation: Any) -> int:
        return wide // 2 if activation.is_gated else wide

    def dtype_of_table(dtype: torch.dtype, **used: bool) -> str | None:
        """`_get_config_dtype_str`: the format that the name of a table has."""
        return next((name.removeprefix("use_") for name, so in used.items() if so), None)

    operators = {
        "moe_align_block_size": moe.moe_align_block_size,
        "moe_sum": lambda rows, out: moe.moe_sum(rows, out, None, None),
        "moe_wna16_gemm": moe.moe_wna16_gemm,
        "scaled_fp8_quant": quantise,
    }
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_device_capability=capability,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        simple_compile_backend="inductor",
    )
    return {
        "vllm._custom_ops": operators,
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None, "VLLM_TRITON_USE_TD": None},
        "vllm.logger": {"init_logger": lambda name: Quiet()},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": device_name},
        "vllm.utils.deep_gemm": {"is_deep_gemm_e8m0_used": lambda: False},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {"get_fp8_min_max": lambda: (-_LARGEST, _LARGEST)},
        _FUSED: {"get_config": lambda: None},
        f"{_FUSED}.config": {"_get_config_dtype_str": dtype_of_table, "FUSED_MOE_UNQUANTIZED_CONFIG": None},
        f"{_FUSED}.modular_kernel": {
            "FusedMoEExpertsModular": SimpleNamespace(adjust_N_for_activation=columns),
        },
    }
