"""permute, pack, experts and combine by FlashInfer's CuTe DSL kernels for Hopper (flashinfer-python 0.7.2.post1, `cute_dsl_fused_moe_bf16`).

Strategy: a sort into tiles of 64 or 128 rows of one expert; a grouped product that gathers tokens and applies the activation, while the
result is zeroed on another stream; a second product that adds its weighted rows to the result by bulk reductions, in the format of the result.
FlashInfer's tuner tries all its tiles for these sizes when it is bound. Gate and up columns are brought into turns of 32 when bound.

The sort is CUDA, compiled by nvcc from FlashInfer's sources and from headers of NVIDIA's. FlashInfer downloads these into the folder that
FLASHINFER_CUBIN_DIR names, or has them from the package flashinfer-cubin.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers import whole_layers as peers
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.experts.dequant import once
from moe_routing_kernels.layer import Layer

_KINDS = {"sigmoid": "Swiglu", "gelu": "GegluTanh", "relu2": "Relu2"}  # `ActivationType`, by `Activation.value`
_TURN = 32  # columns
_HEADERS = "FLASHINFER_CUBIN_DIR"


def unsupported(problem: Layer) -> str | None:
    """Why it cannot run, or None."""
    if problem.experts.biased:
        return "FlashInfer's kernels have no biases"
    if reason := peers.unsupported(problem, "FlashInfer", (problem.activation,)) or unaligned(problem, "FlashInfer"):
        return reason
    if activation_of(problem.activation).gated and problem.intermediate % _TURN:
        return f"FlashInfer takes gate and up in turns of {_TURN}, not an intermediate of {problem.intermediate}"
    if not shutil.which("nvcc"):
        return "FlashInfer compiles its sort with nvcc, which is not on the path"
    if importlib.util.find_spec("flashinfer_cubin") is None and not os.environ.get(_HEADERS):
        return f"FlashInfer's sort is compiled from headers that it downloads; name a folder for them in {_HEADERS}"
    return None


def bind(
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
