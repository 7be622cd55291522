"""QuACK's fused top-k + softmax as an optional peer of the gate, for the router `softmax_topk_renorm` only.

Strategy: QuACK (0.6.5) sorts a row's logits with a bitonic network in registers and takes the softmax over the k
winners. Weights come back in the logits' dtype; with bf16 or fp16 logits they are rounded to it and a copy widens
them to float32, which is part of this peer's cost. For fp32 logits QuACK writes straight into the given outputs.
Compulsory bytes: T * E * itemsize + 8 * T * k; floor: reading the logits.

Invariant: no problem that is `unsupported` is launched. QuACK keeps the expert index in the low log2(E) mantissa bits of
the logit, so fp32 logits that agree in the bits above are ordered by index, and fp32 weights are off by up to about E
* 2**-23.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.gate import Gate

ROUTER = "softmax_topk_renorm"


def unsupported(problem: Gate) -> str | None:
    """Why QuACK's top-k cannot run a problem, or None. Read from quack/topk.py 0.6.5."""
    experts, top_k, dtype = problem.experts, problem.top_k, problem.dtype
    vector = 128 // FORMATS[dtype].bits
    if problem.router != ROUTER:
        return f"QuACK's top-k computes {ROUTER}, not {problem.router}"
    if experts & (experts - 1) or not vector <= experts <= 4096:
        return f"QuACK's top-k needs a power of two from {vector} to 4096 experts with {dtype} logits, not {experts}"
    if top_k & (top_k - 1) or top_k > min(128, experts):
        return f"QuACK's top-k needs k to be a power of two up to 128, not {top_k}"
    if top_k % math.gcd(vector, experts):
        return f"QuACK's top-k with {dtype} logits needs k to be a multiple of {vector} (output stride), not {top_k}"
    return None


def bind(problem: Gate, *, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Callable[[], None]:
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
