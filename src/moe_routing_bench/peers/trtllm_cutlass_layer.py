"""permute, pack, experts and combine by TensorRT-LLM's CUTLASS kernels as FlashInfer ships them (flashinfer-python 0.7.2.post1, `cutlass_fused_moe`).

Strategy: a sort of assignments and an expansion of tokens into rows of one expert; a grouped GEMM of CUTLASS; a kernel that adds biases and
applies the activation; a second grouped GEMM, whose epilogue adds the weighted rows to the result by atomics in the format of the result.
FlashInfer's tuner tries all tiles of both GEMMs for these sizes when it is bound. Gate and up rows change places when bound.

The kernels are C++. FlashInfer compiles them by nvcc when they first run, which takes a core several hours, or has them in its `data/aot` folder.
"""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers import whole_layers as peers
from moe_routing_bench.peers.flashinfer_layer import tuned
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.experts.dequant import once
from moe_routing_kernels.layer import Layer

_KINDS = {"sigmoid": "Swiglu", "relu2": "Relu2"}  # `ActivationType`, by `Activation.value`
_LEAST_TUNED = 8192  # tokens up to which the tuner goes by default


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    if reason := peers.unsupported(problem, "TensorRT-LLM", (problem.activation,)) or unaligned(
        problem, "TensorRT-LLM"
    ):
        return reason
    if activation_of(problem.activation).value not in _KINDS:
        return f"TensorRT-LLM's CUTLASS kernels have no {problem.activation} made of tanh"
    if not shutil.which("nvcc") and not _compiled():
        return "FlashInfer compiles its CUTLASS kernels with nvcc, which is not on the path"
    return None


def _compiled() -> bool:
    """Whether FlashInfer has its kernels for Hopper already."""
    from flashinfer.jit import env  # pyright: ignore[reportMissingImports]

    return env.get_aot_path("fused_moe_90").is_file()


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
    activation = ActivationType[_KINDS[known.value]]
    up, bias = w13, b13
    if known.gated:
        up = once({"elements": w13}, "TensorRT-LLM", lambda: _up_first(w13))
        bias = None if b13 is None else _up_first(b13)
    options: dict[str, Any] = {"activation_type": activation, "tune_max_num_tokens": max(_LEAST_TUNED, len(x))}
    if b2 is not None:
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
