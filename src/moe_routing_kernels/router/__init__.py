"""router: tokens (T, H) times the router's weight (E, H), and then gate."""

from dataclasses import dataclass

from moe_routing_kernels.gate import Gate
from moe_routing_kernels.implementations import Candidate


@dataclass(frozen=True)
class Router:
    """Tensors: x (T, H) and router_weight (E, H) of `dtype`, bias (E,) float32 or None; topk_ids, topk_weights (T, k)."""

    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str  # format of tokens and weight
    router: str  # routing rule, a name of `routers.ROUTERS`

    @property
    def gate(self) -> Gate:
        """The gate after the projection. Its scores are float32."""
        return Gate(self.tokens, self.experts, self.top_k, "fp32", self.router)


IMPLEMENTATIONS = (
    Candidate("torch", "torch_router"),
    Candidate("torch_compile", "torch_router", requires=("compiler",), options={"compiled": True}),
    Candidate("matmul_torch", "torch_router:matmul", requires=("gpu",), options={"gate": "torch"}),
    Candidate("matmul_cute", "torch_router:matmul", requires=("nvidia", "cutlass"), options={"gate": "cute"}),
    Candidate("triton", "triton_router", requires=("gpu", "triton")),
    Candidate("cute", "cute_router", requires=("nvidia", "cutlass")),
)
