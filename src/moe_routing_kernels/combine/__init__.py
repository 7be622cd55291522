"""combine: every token's weighted sum of the expert output rows of its k assignments."""

from dataclasses import dataclass

from moe_routing_kernels.implementations import Candidate


@dataclass(frozen=True)
class Combine:
    """Tensors: y (R, H) of `dtype`, inverse (T, k) int32, topk_weights (T, k) of `weights`, residual (T, H) or None;
    combined (T, H)."""

    tokens: int
    hidden: int
    top_k: int
    dtype: str
    dropping: bool  # whether assignments may be dropped (inverse < 0); they add nothing
    weights: str = "fp32"  # or a 16-bit format, as in models of the transformers library; accumulation is in float32


IMPLEMENTATIONS = (
    Candidate("torch", "torch_combine"),
    Candidate("torch_compile", "torch_combine", requires=("compiler",), options={"compiled": True}),
    Candidate("triton", "triton_combine", requires=("gpu", "triton"), rank=2),
    Candidate("cute", "cute_combine", requires=("nvidia", "cutlass"), rank=1),
)
