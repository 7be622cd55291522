"""permute, pack, experts and combine by SGLang's Triton kernels (sglang 0.5.23, `fused_experts`), with the tiles of its tuned tables.

Strategy: that of `vllm_triton`, of which it is a descendant. Kernels start before the one ahead of them is over (programmatic dependent
launch); small batches are sorted by one Triton kernel; a table may have tiles of its own for the second product, with TMA.
Tables are by version of triton; where this version's has none the newest other one is taken, and where no version has one a rule picks
tiles: the row's configuration says which. gpt-oss's activation is torch's, compiled, as in SGLang.

The modules that run are those of a complete SGLang, or its files with stand-ins (`loading.Partial`). What the files ask of CUDA they get from the library of sglang-kernel 0.4.3, the last that torch 2.11 loads: the list of blocks, activations, the
quantising of rows, and the sum. Where a table asks for rows in blocks, activations of padding rows are computed, too.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from moe_routing_bench.peers.common import Fused, formats_unsupported, fused_weights, returned
from moe_routing_bench.peers.loading import SGLANG, Partial, Quiet, complete, file_of
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.layer import Layer

_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu_tanh",
    "relu2": "relu2",
    "swiglu_oai": "silu",  # with alpha and limit
    "swiglu_oai_unbiased": "silu",
}


def unsupported(problem: Layer, fp8: bool = False) -> str | None:
    """Why it cannot run, or None."""
    return formats_unsupported(problem, "SGLang's Triton kernel", _ACTIVATIONS, fp8) or missing()


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

    SGLang allocates its result, so a bound `combined` is not written. A `residual` (T, H) is added by torch.
    """
    fused, tables = fused_moe()
    given, known = fused_weights(problem, w13, w2, b13, b2, scales), activation_of(problem.activation)
    options = given.options() | {
        "b1": given.up.bias,
        "b2": given.down.bias,
        "activation": _ACTIVATIONS[problem.activation],
        "is_gated": known.gated,
        "gemm1_alpha": known.alpha if known.shift else None,
        "gemm1_limit": known.limit,
        "filter_expert": False,  # all experts are here
    }
    weights = (given.up.weights, given.down.weights)

    def run() -> dict[str, Tensor]:
        total = fused.fused_experts_impl(x, *weights, topk_weights, topk_ids, **options)
        return returned(total, residual)

    run.configuration = lambda: _tiles(tables, given, topk_ids)
    return run


def _tiles(tables: Any, given: Fused, topk_ids: Tensor) -> str:
    """The tiles of both products, and the tables that they are from."""
    weights, (tokens, top_k) = given.down.weights, topk_ids.shape
    per_channel = given.options()["per_channel_quant"]
    up, (down, _) = tables.try_get_optimal_moe_config(
        given.up.weights.shape,
        weights.shape,
        top_k,
        given.form,
        tokens,
        block_shape=given.block,
        per_channel_quant=per_channel,
        return_down_config=True,
    )
    named = partial(tables.get_config_file_name, len(weights), weights.shape[2], given.form, given.block, per_channel)
    first, second = (_table(tables, named(down_moe=second)) for second in (False, True))
    tiles = f"{up}; {first or f'default tiles: no table {named()}'}"
    return f"{tiles}; second product {down}; {second}" if second else tiles


def _table(tables: Any, name: str) -> str | None:
    """Where SGLang finds a table: in the folder of this version of triton, else in the newest that has it; None where it has none."""
    import triton

    folder = Path(tables.__file__).parent / "configs"
    this = "triton_" + triton.__version__.replace(".", "_")
    versions = [path.parent.name for path in folder.glob("triton_*/*.json") if path.name == name]
    versions.sort(key=lambda version: (version == this, [int(part) for part in version.split("_")[1:]]))
    return f"table {versions[-1]}/{name}" if versions else None


_UTILS = "sglang.srt.layers.moe.moe_runner.triton_utils"
MODULE, _TABLES = f"{_UTILS}.fused_moe", f"{_UTILS}.fused_moe_triton_config"
_FILES = (
    MODULE,
    _TABLES,
    f"{_UTILS}.moe_align_block_size",
    "sglang.kernels.ops.moe.fused_moe_triton_kernels",
    "sglang.kernels.ops.moe.moe_align_small_numel",
)
_LEAST, _LARGEST = 1e-10, 448.0  # largest element of a group, and of float8_e4m3fn


def missing() -> str | None:
    """Why the modules cannot be loaded, or None."""
    lacks = [name for name in _FILES if file_of(name) is None]
    return (f"sglang is installed without {lacks[0]}" if lacks else None) or SGLANG.missing()


@cache
def fused_moe() -> tuple[ModuleType, ModuleType]:
    """The module of the layer, and that of the tables, with SGLang's operators registered. Imports triton."""
    if complete("sglang"):
        return importlib.import_module(MODULE), importlib.import_module(_TABLES)
    files = Partial("sglang", _FILES, _given(SGLANG.operators()))
    return files.module(MODULE), files.module(_TABLES)


def _given(operators: Any) -> dict[str, dict[str, Any]]:
    """What the files import of others and use when they run, by module: the answers of SGLang on one GPU without settings of its own."""
    import torch

    def quantise_groups(x: torch.Tensor, group: int) -> tuple:
        rows = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = x.new_empty((len(x), x.shape[1] // group), dtype=torch.float32)
        operators.sgl_per_token_group_quant_8bit(x, rows, scales, group, _LEAST, -_LARGEST, _LARGEST, False)
        return rows, scales

    def quantise_rows(x: torch.Tensor, scale: None = None, *, use_per_token_if_dynamic: bool) -> tuple:
        assert scale is None and use_per_token_if_dynamic, "scales are of rows"
        rows, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((len(x), 1), dtype=torch.float32)
        operators.sgl_per_token_quant_fp8(x, rows, scales)
        return rows, scales

    def activation(name: str) -> Any:
        operator = getattr(operators, name)
        return lambda x, out, **rows: operator(out, x)

    def capability(major: int) -> bool:
        return torch.cuda.get_device_capability()[0] == major

    def settings() -> SimpleNamespace:
        off = SimpleNamespace(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
        return SimpleNamespace(deterministic=off, moe=off)

    unset = SimpleNamespace(get=lambda: False)
    is_cuda, no = {"is_cuda": lambda: True}, lambda *given: False
    return {
        "sgl_kernel": {"moe_sum_reduce": operators.moe_sum_reduce},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: torch.cuda.get_device_capability() >= (9, 0)},
        "sglang.kernels.ops.activation.activation": {
            name: activation(name) for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
        },
        "sglang.kernels.ops.moe": {"moe_align_block_size": lambda *given: operators.moe_align_block_size(*given[:8])},
        "sglang.kernels.ops.quantization.fp8_kernel": {
            "sglang_per_token_group_quant_fp8": quantise_groups,
            "scaled_fp8_quant": quantise_rows,
        },
        "sglang.kernels.ops.quantization.per_token_group_quant": {"per_token_group_quant": None},
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": no},
        "sglang.srt.distributed.device_communicators.pynccl_allocator": {
            "use_symmetric_memory": lambda group, disabled: nullcontext()
        },
        "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_EXPERIMENTAL_LORA_OPTI=unset, SGLANG_USE_AITER=unset)},
        "sglang.srt.layers.dp_attention": {"is_allocation_symmetric": no},
        "sglang.srt.layers.moe.utils": {"get_moe_padding_size": lambda aiter: 0},
        "sglang.srt.runtime_context": {
            "get_exec": settings,
            "get_parallel": lambda: SimpleNamespace(tp_group=None),
        },
        "sglang.srt.utils": is_cuda
        | dict.fromkeys(("is_cpu", "is_hip", "is_musa", "is_xpu", "cpu_has_amx_support", "get_bool_env_var"), no)
        | {"is_sm90_supported": lambda: capability(9), "get_device_name": lambda: torch.cuda.get_device_name()},
        MODULE: {"logger": Quiet()},
        _TABLES: {"logger": Quiet()},
        _UTILS: {"get_config": lambda: None},
    }
