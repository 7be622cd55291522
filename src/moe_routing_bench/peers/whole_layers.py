"""What libraries that do a layer as one piece have in common: what they cannot do."""

from collections.abc import Collection

from moe_routing_kernels.layer import Layer


def unsupported(
    problem: Layer, library: str, activations: Collection[str], formats: Collection[str] = ("bf16", "fp16")
) -> str | None:
    """Why a library without capacities, with these activations and one of these formats throughout, cannot run a layer, or None."""
    if problem.layout.capacity is not None:
        return f"{library} has no capacity limit"
    if problem.activation not in activations:
        return f"{library} has no {problem.activation}"
    if not problem.dtype == problem.packed == problem.weights or problem.dtype not in formats:
        given = f"{problem.dtype}, {problem.packed} and {problem.weights}"
        return f"{library} takes tokens, rows and weights of one format ({', '.join(formats)}), not {given}"
    return None
