"""How large a model is, and how many FLOPs a training step takes."""

from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality.model.language_model import TinyLM


def parameters(model: TinyLM) -> tuple[int, int]:
    """All parameters, and those that a token meets when each layer gives it k experts (each of two passes, k/2)."""
    total = sum(p.numel() for p in model.parameters())
    idle = 0.0
    for layer in model.layers:
        weights = sum(p.numel() for p in layer.experts.parameters())
        idle += weights * (1 - layer.top_k * len(layer.routers) / layer.count)
    return total, total - round(idle)


def flops_per_token(model: TinyLM, run: Run, active: int) -> int:
    """FLOPs of a training step per byte.

    Each active weight takes 6 (the embedding is looked up, not multiplied). Causal attention takes 6 S D per layer:
    scores and values, once forwards and twice backwards, half of them masked.
    """
    return 6 * (active - model.embedding.weight.numel()) + 6 * run.layers * run.sequence * run.dim
