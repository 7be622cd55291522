"""Compiles the kernels in CuTe DSL that the operators choose for a layer, ahead of time and without a GPU.

They choose by name, so this is also where what they may choose is imported: an edit of it makes rows of what uses them stale.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

from moe_routing_kernels.combine import Combine, cute_combine, triton_combine
from moe_routing_kernels.experts import cute_experts, cute_training, triton_experts
from moe_routing_kernels.gate import Gate, cute_gate, triton_gate
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.pack import Pack, cute_pack, triton_pack
from moe_routing_kernels.permute import cute_permute, triton_permute


def gate(problem: Layer, arch: str) -> None:
    """Put the kernel of a layer's gate, of float32 scores, into the cache."""
    layout = problem.layout
    _first(Gate(layout.tokens, layout.experts, layout.top_k, "fp32", problem.router), arch, cute_gate, triton_gate)


def layer(problem: Layer, arch: str, training: bool = False, ids: str = "int32", weights: str = "fp32") -> None:
    """Put the kernels of all operations of a layer into the cache: of a forward pass alone, or of `training`.

    `ids` and `weights` are the formats of what a router of its own gives them.
    """
    layout, hidden, dtype = problem.layout, problem.hidden, problem.dtype
    tokens, top_k = layout.tokens, layout.top_k
    gate(problem, arch)
    _first(replace(layout.problem, ids=ids), arch, cute_permute, triton_permute)
    _first(Pack(tokens, hidden, top_k, layout.rows, dtype, dtype, padding=True), arch, cute_pack, triton_pack)
    _first(problem.experts, arch, *([cute_training] if training else []), cute_experts, triton_experts)
    _first(Combine(tokens, hidden, top_k, dtype, dropping=True, weights=weights), arch, cute_combine, triton_combine)


def _first(part: Any, arch: str, *modules: ModuleType) -> None:
    """Compile what the first of the modules that has no objection needs; Triton compiles when it runs."""
    for one in modules:
        if not hasattr(one, "unsupported") or one.unsupported(part) is None:
            if hasattr(one, "precompile"):
                one.precompile(part, arch)
            return
