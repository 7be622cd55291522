"""layer: a whole Mixture-of-Experts layer after the router's projection; kernels that fuse several of its stages take its problem."""

from dataclasses import dataclass

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.permute.layout import RowLayout


@dataclass(frozen=True)
class Layer:
    """Tensors: logits (T, E) float32, x (T, H) of `dtype`, the experts' weights and biases as `Experts` has them; combined (T, H)."""

    layout: RowLayout  # tokens, top_k, experts, capacity and where rows lie
    hidden: int
    intermediate: int
    dtype: str  # format of tokens and results
    packed: str  # format of the packed rows, where there are any
    weights: str  # format of the experts' weights
    router: str  # routing rule, a name of `routers.ROUTERS`
    activation: str = "swiglu"  # of `activations.ACTIVATIONS`

    @property
    def experts(self) -> Experts:
        """The problem of its experts."""
        layout, formats = self.layout, (self.dtype, self.packed, self.weights)
        sizes, way = (layout.rows, self.hidden, self.intermediate, layout.experts), (layout.padded, self.activation)
        return Experts(*sizes, *formats, *way, layout.align)

    @property
    def repacked(self) -> str | None:
        """Why kernels that gather tokens instead of packing them cannot run it, or None."""
        return f"rows that are never packed cannot be {self.packed}" if self.packed != self.dtype else None
