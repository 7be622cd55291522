"""layer: a whole Mixture-of-Experts layer after the router's projection; kernels that fuse several of its stages take its problem."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_routing_kernels.experts import IMPLEMENTATIONS as EXPERTS
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.implementations import Candidate
from moe_routing_kernels.permute import RowLayout


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
        return Experts(*sizes, *formats, *way, layout.align, layout.ranks)

    @property
    def repacked(self) -> str | None:
        """Why kernels that gather tokens instead of packing them cannot run it, or None."""
        return f"rows that are never packed cannot be {self.packed}" if self.packed != self.dtype else None


ROUTING = ("router", "permute", "pack", "combine")  # the stages around experts
WHOLE = "permute+pack+experts+combine"  # the part of what does all but the gate at once


def _around(backend: str, quantised: bool = False) -> Iterator[Candidate]:
    """For all experts of a backend: a layer that has them between the routing of the same backend."""
    for one in EXPERTS:
        if one.backend != backend or bool(one.quantised) != quantised or one.trains:
            continue
        stages = [name for name in ROUTING if not (one.gathers and name == "pack")]
        parts = {} if backend == "torch" else dict.fromkeys(stages, backend)
        parts |= {"pack+experts": f"experts.{one.module}"} if one.gathers else {"experts": one.name}
        yield replace(
            one, **{"module": "", "options": {}, "layout": "compact", "parts": parts, "layer": {}, **one.layer}
        )


_GROUPED = {"experts": "torch_grouped_mm"}
IMPLEMENTATIONS = (
    *_around("torch"),
    *_around("torch", quantised=True),
    # It compiles anew for other sizes, and so has no rank.
    Candidate(
        "torch_compile",
        requires=("compiler",),
        layout="compact",
        parts=_GROUPED | dict.fromkeys(ROUTING, "torch_compile"),
    ),
    *_around("triton"),
    *_around("cute"),
    Candidate(
        "cute_dependent",
        requires=("nvidia", "cutlass"),
        layout="compact",
        parts={"router": "cute", WHOLE: "layer.cute_dependent"},
        rank=9,
    ),
    *sorted(_around("cute", quantised=True), key=lambda one: one.rank or 0),
    Candidate(
        "cute_grouped_mm",
        requires=("nvidia", "cutlass"),
        layout="compact",
        parts=_GROUPED | dict.fromkeys(ROUTING, "cute"),
        rank=12,
    ),
)
