"""shared_experts: the experts of a layer that every token uses, in addition to the routed ones (DeepSeekMoE, arXiv 2401.06066).

Several shared experts are computed as one: their inner widths are concatenated, and the down GEMM sums over all. Where the score
`sigmoid` gates them, each token's result is multiplied by the sigmoid of its dot product with one more vector (Qwen1.5-MoE, Qwen3-Next).
"""

from dataclasses import dataclass

from moe_routing_kernels.implementations import Candidate

GATES = ("sigmoid",)


@dataclass(frozen=True)
class SharedExperts:
    """Tensors: x (T, H) of `dtype`; shared_w13 (N, H) and shared_w2 (H, I) of `weights`, N as in `Experts`, and where they are gated
    shared_gate (H,), likewise; residual (T, H) of `dtype`, from which the sums of `combine` start. No biases, for any activation."""

    tokens: int
    hidden: int
    intermediate: int  # of all shared experts together
    dtype: str
    weights: str
    activation: str = "swiglu"  # of `activations.ACTIVATIONS`
    gate: str | None = None  # of GATES


IMPLEMENTATIONS = (Candidate("torch", "torch_shared"),)
