"""routing: gate, permute, pack and combine in a row; kernels that fuse several of these stages take its problem."""

from dataclasses import dataclass

from moe_routing_kernels.implementations import Candidate
from moe_routing_kernels.permute import RowLayout


@dataclass(frozen=True)
class Routing:
    """Tensors: logits (T, E) float32, x (T, H) of `dtype`; combined (T, H)."""

    layout: RowLayout  # tokens, top_k, experts, capacity and where rows lie
    hidden: int
    dtype: str  # format of tokens, packed rows and results
    router: str  # routing rule, a name of `routers.ROUTERS`


STAGES = ("router", "permute", "pack", "combine")
IMPLEMENTATIONS = (
    Candidate("torch", layout="compact"),
    Candidate("torch_compile", requires=("compiler",), layout="compact", parts=dict.fromkeys(STAGES, "torch_compile")),
    Candidate("triton", requires=("gpu", "triton"), layout="compact", parts=dict.fromkeys(STAGES, "triton")),
    Candidate("cute", requires=("nvidia", "cutlass"), layout="compact", parts=dict.fromkeys(STAGES, "cute")),
)
