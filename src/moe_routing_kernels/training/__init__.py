"""training: a layer for precomputed expert ids and weights, as a function that autograd differentiates.

An entry has `layer(problem, **options)`, which returns a function of x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13
(E, N, H) and w2 (E, H, I) -> combined (T, H), and `unsupported(problem, **options)`. The problem is that of `moe_routing_kernels.layer`, with one
format throughout. `benches.training.step` runs it forward and backward.
"""

from moe_routing_kernels.implementations import Candidate

IMPLEMENTATIONS = (
    Candidate("torch_loop", "torch_layers:loop", declares=("rounded_sums",)),
    Candidate("torch_grouped_mm", "torch_layers:grouped_mm", declares=("rounded_sums",)),
)
