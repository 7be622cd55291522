"""gate: logits (T, E) to the k chosen expert ids (T, k) int32 and their weights (T, k) float32."""

from dataclasses import dataclass

from moe_routing_kernels.implementations import Candidate


@dataclass(frozen=True)
class Gate:
    """Tensors: logits (T, E) of `dtype`, bias (E,) float32 or None; topk_ids (T, k) int32, topk_weights (T, k) float32."""

    tokens: int
    experts: int
    top_k: int
    dtype: str  # format of the logits
    router: str  # routing rule, a name of `routers.ROUTERS`


IMPLEMENTATIONS = (
    Candidate("torch", "torch_gate"),
    Candidate("torch_compile", "torch_gate", requires=("compiler",), options={"compiled": True}),
    Candidate("triton", "triton_gate", requires=("gpu", "triton"), rank=2),
    Candidate("cute", "cute_gate", requires=("nvidia", "cutlass"), rank=1),
)
