"""Chain-of-Experts: the layer is applied twice, each time with another router and half of the experts.

Source: 2506.18945. The inner residual x ← x + Σ p_e·E_e(x) is the layer's.
"""

from torch import Tensor

from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers import softmax_topk
from moe_routing_kernels.routers.learned import Learned, Routing


class Router(Learned):
    """One pass: top-k/2 of the softmax, not renormalised, so that a single expert per pass still gets a gradient."""

    passes = 2

    def __init__(self, *args) -> None:
        """Raises `UserError` for a top_k that two passes cannot share evenly."""
        super().__init__(*args)
        if self.top_k % self.passes:
            raise bad(f"top_k for router {self.rule.name}", self.top_k, f"a multiple of its {self.passes} passes")

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route one pass; ids (T, top_k / 2)."""
        logits = self.logits(x)
        ids, weights = softmax_topk.route(logits, self.top_k // self.passes, renormalize=False)
        scores = logits.softmax(1)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)
