"""Top-p routing: as many experts as it takes to reach a probability (Huang 2024, 2403.07652)."""

from torch import Tensor

from moe_routing_kernels.routers.learned import Learned, Routing


class Router(Learned):
    """It does not use `top_k`; the entropy loss keeps the number of experts down."""

    def __init__(self, *args, threshold: float) -> None:
        """`threshold` is the probability that the chosen experts must reach together."""
        super().__init__(*args)
        self.threshold = threshold

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E), best first, then -1."""
        logits = self.logits(x)
        scores = logits.softmax(1)
        ranked, order = scores.sort(dim=1, descending=True)
        enough = ranked.cumsum(1) - ranked >= self.threshold  # the experts before this one reach it
        ids, weights = order.int().masked_fill(enough, -1), ranked.masked_fill(enough, 0.0)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)
