"""permute, pack, experts and combine by two layers of FlashInfer (flashinfer-python 0.7.2.post1).

`cute` (`cute_dsl_fused_moe_bf16`), its CuTe DSL kernels for Hopper: a sort into tiles of 64 or 128 rows of one expert; a grouped product that gathers tokens and applies the activation, while the
result is zeroed on another stream; a second product that adds its weighted rows to the result by bulk reductions, in the format of the result.
FlashInfer's tuner tries all its tiles for these sizes when it is bound. Gate and up columns are brought into turns of 32 when bound.

The sort is CUDA, compiled by nvcc from FlashInfer's sources and from headers of NVIDIA's. FlashInfer downloads these into the folder that
FLASHINFER_CUBIN_DIR names, or has them from the package flashinfer-cubin.

`cutlass` (`cutlass_fused_moe`), TensorRT-LLM's CUTLASS kernels as FlashInfer ships them: a sort of assignments and an expansion of tokens into rows of one expert; a grouped GEMM of CUTLASS; a kernel that adds biases and
applies the activation; a second grouped GEMM, whose epilogue adds the weighted rows to the result by atomics in the format of the result.
FlashInfer's tuner tries all tiles of both GEMMs for these sizes when it is bound. Gate and up rows change places when bound.

The kernels are C++. FlashInfer compiles them by nvcc when they first run, which takes a core several hours, or has them in its `data/aot` folder.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers import common as peers
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.experts.dequant import once
from moe_routing_kernels.layer import Layer

_KINDS = {"sigmoid": "Swiglu", "gelu": "GegluTanh", "relu2": "Relu2"}  # `ActivationType`, by `Activation.value`
_TURN = 32  # columns
_HEADERS = "FLASHINFER_CUBIN_DIR"


def unsupported_cute(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    if problem.experts.biased:
        return "FlashInfer's kernels have no biases"
    if reason := peers.layer_unsupported(problem, "FlashInfer", (problem.activation,)) or unaligned(
        problem, "FlashInfer"
    ):
        return reason
    if activation_of(problem.activation).gated and problem.intermediate % _TURN:
        return f"FlashInfer takes gate and up in turns of {_TURN}, not an intermediate of {problem.intermediate}"
    if not shutil.which("nvcc"):
        return "FlashInfer compiles its sort with nvcc, which is not on the path"
    if importlib.util.find_spec("flashinfer_cubin") is None and not os.environ.get(_HEADERS):
        return f"FlashInfer's sort is compiled from headers that it downloads; name a folder for them in {_HEADERS}"
    return None


def bind_cute(
    problem: Layer,
    *,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    combined: Tensor,
    residual: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, N, H), w2 (E, H, I) -> combined (T, H).

    A `residual` (T, H) is added by torch.
    """
    from flashinfer.fused_moe import cute_dsl_fused_moe_bf16  # pyright: ignore[reportMissingImports]
    from flashinfer.tllm_enums import ActivationType  # pyright: ignore[reportMissingImports]

    known = activation_of(problem.activation)
    up = once({"elements": w13}, "FlashInfer", lambda: _in_turns(w13)) if known.gated else w13
    options: dict[str, Any] = {"activation_type": ActivationType[_KINDS[known.value]].value}
    if known.value == "sigmoid":
        options |= {"swiglu_alpha": known.alpha, "swiglu_beta": known.shift}
        options |= {} if known.limit is None else {"swiglu_limit": known.limit}
    sizes = {"num_experts": len(w2), "top_k": topk_ids.shape[1], "moe_output": combined}

    return tuned(
        lambda: cute_dsl_fused_moe_bf16(x, topk_ids, topk_weights, up, w2, **sizes, **options),
        combined,
        residual,
        "run_moe_sm90",
    )


def _in_turns(w13: Tensor) -> Tensor:
    """(E, 2 I, H), gate above up -> 32 rows of up and 32 of gate in turns, the order of their epilogue."""
    gate, up = w13.unflatten(1, (2, -1, _TURN)).unbind(1)
    return torch.stack([up, gate], 2).flatten(1, 3)


def tuned(layer: Callable[[], object], combined: Tensor, residual: Tensor | None, operation: str) -> Callable[[], None]:
    """Bind a layer of FlashInfer's that writes `combined` (T, H), to which torch adds a `residual` (T, H), after its tuner has tried all tiles.

    The configuration is what the tuner chose for the operations whose names have the part `operation`.
    """
    from flashinfer.autotuner import AutoTuner, autotune  # pyright: ignore[reportMissingImports]

    def run() -> None:
        layer()
        if residual is not None:
            combined.add_(residual)

    with autotune(True):  # what was chosen for these sizes is kept
        run()
    run.configuration = lambda: "; ".join(
        f"{key[0]}: {best}" for key, (best, *_) in AutoTuner.get().profiling_cache.items() if operation in str(key[0])
    )
    return run


_CUTLASS_KINDS = {"sigmoid": "Swiglu", "relu2": "Relu2"}  # `ActivationType`, by `Activation.value`
_LEAST_TUNED = 8192  # tokens up to which the tuner goes by default


def unsupported_cutlass(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    if reason := peers.layer_unsupported(problem, "TensorRT-LLM", (problem.activation,)) or unaligned(
        problem, "TensorRT-LLM"
    ):
        return reason
    if activation_of(problem.activation).value not in _CUTLASS_KINDS:
        return f"TensorRT-LLM's CUTLASS kernels have no {problem.activation} made of tanh"
    if not shutil.which("nvcc") and not _compiled():
        return "FlashInfer compiles its CUTLASS kernels with nvcc, which is not on the path"
    return None


def _compiled() -> bool:
    """Whether FlashInfer has its kernels for Hopper already."""
    from flashinfer.jit import env  # pyright: ignore[reportMissingImports]

    return env.get_aot_path("fused_moe_90").is_file()


def bind_cutlass(
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
) -> Callable[[], None]:
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H) of
    activations that have them -> combined (T, H).

    A `residual` (T, H) is added by torch.
    """
    from flashinfer.fused_moe import (  # pyright: ignore[reportMissingImports]
        cutlass_fused_moe,
        cutlass_fused_moe_workspace_size,
    )
    from flashinfer.tllm_enums import ActivationType  # pyright: ignore[reportMissingImports]

    known = activation_of(problem.activation)
    activation = ActivationType[_CUTLASS_KINDS[known.value]]
    up, bias = w13, b13
    if known.gated:
        up = once({"elements": w13}, "TensorRT-LLM", lambda: _up_first(w13))
        bias = None if b13 is None else _up_first(b13)
    options: dict[str, Any] = {"activation_type": activation, "tune_max_num_tokens": max(_LEAST_TUNED, len(x))}
    if bias is not None and b2 is not None:
        options |= {"fc1_expert_biases": bias.to(x.dtype), "fc2_expert_biases": b2.to(x.dtype)}
    if known.shift or known.limit is not None or known.alpha != 1:
        numbers = {"alpha": known.alpha, "beta": known.shift, "limit": known.limit}
        options |= {
            f"swiglu_{name}": x.new_full((len(w2),), number, dtype=torch.float32)
            for name, number in numbers.items()
            if number is not None
        }
    size = cutlass_fused_moe_workspace_size(
        len(x), x.shape[1], w2.shape[2], len(w2), topk_ids.shape[1],
        x_dtype=x.dtype, weight_dtype=w2.dtype, output_dtype=x.dtype, activation_type=activation, device=x.device,
    )  # fmt: skip
    options |= {"output": combined, "workspace_buffer": x.new_empty(size, dtype=torch.uint8)}

    return tuned(
        lambda: cutlass_fused_moe(x, topk_ids, topk_weights, up, w2, x.dtype, [], **options),
        combined,
        residual,
        "fused_moe::gemm",
    )


def _up_first(rows: Tensor) -> Tensor:
    """(E, 2 I, ...), gate above up -> up above gate."""
    gate, up = rows.chunk(2, 1)
    return torch.cat([up, gate], 1)
