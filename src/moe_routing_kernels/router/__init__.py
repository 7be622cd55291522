"""router: tokens (T, H) times the router's weight (E, H), and then gate; and what the fused kernels run."""

from dataclasses import dataclass

from moe_routing_kernels import gate
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


def unsupported(problem: Router) -> str | None:
    """Why a fused kernel cannot run a problem, or None."""
    if problem.dtype == "fp32":
        return "the fused router takes bf16 and fp16: tensor cores round float32"
    if problem.tokens * problem.experts >= 2**31:
        return "the fused router addresses its scores with 32 bits: fewer than 2^31 of them"
    return gate.unsupported(problem.gate)


def splits_of(tokens: int, hidden: int, tile: int, multiprocessors: int) -> int:
    """Splits of H (split-K) for tiles of `tile` tokens: 1 where the tiles alone fill half of the GPU.

    A split reads its share of the weight and the last one reads all partial accumulators. With n tokens in a tile and a weight of
    2 bytes per element, both take equally long for sqrt(2 H / (4 n)) splits.
    """
    tiles = -(-tokens // tile)
    most = 2 * multiprocessors // tiles if 2 * tiles <= multiprocessors else 1
    return max(1, min(round((hidden / 2 / min(tile, tokens)) ** 0.5), most))
