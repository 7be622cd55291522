"""Choices that no training changes: by the token's id, by its position, or by a map that stays as it was drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers import formulas
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing


class HashToken(Learned):
    """Hash layers: a fixed table from token id to experts, random or balanced (2106.04426 section 3).

    Its state is `table` (vocabulary, top_k) int32, which never changes. It has no parameters.
    """

    takes_network = False
    known_losses = ()
    table: Tensor

    def __init__(
        self, *args, vocabulary: int | None = None, seed: int = 0, frequencies: Sequence[float] | None = None
    ) -> None:
        """Draw a table for `vocabulary` token ids from `seed`, or balance one for the `frequencies` of token ids."""
        super().__init__(*args)
        if vocabulary is not None:
            table = random_table(vocabulary, self.experts, self.top_k, seed)
        elif frequencies is not None:
            table = balanced_table(frequencies, self.experts, self.top_k)
        else:
            allowed = "one number for each token id, from the training text"
            raise bad(f"frequencies for router {self.rule.name}", None, allowed)
        self.register_buffer("table", table)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Look each token up in the table."""
        ids = self.table[token_ids.flatten()]
        return self.fixed(ids)


def random_table(vocabulary: int, experts: int, top_k: int, seed: int) -> Tensor:
    """`top_k` distinct experts for each token id, (vocabulary, top_k) int32."""
    import numpy as np  # for its generator, which trained tables were drawn with; nothing else here needs the package

    drawn = np.random.default_rng(seed).random((vocabulary, experts))
    return torch.from_numpy(drawn.argsort(1)[:, :top_k].astype(np.int32))


def balanced_table(frequencies: Sequence[float], experts: int, top_k: int) -> Tensor:
    """Greedy: each token id, by falling frequency, goes to the `top_k` experts with the least load so far."""
    table, load = torch.zeros(len(frequencies), top_k, dtype=torch.int32), [0.0] * experts
    for token in sorted(range(len(frequencies)), key=lambda one: -frequencies[one]):
        least = sorted(range(experts), key=load.__getitem__)[:top_k]
        table[token] = torch.tensor(least)
        for expert in least:
            load[expert] += float(frequencies[token])
    return table


class HashScored(HashToken):
    """DeepSeek-V4's hash layers: a table chooses the experts of a token id, and a learnt gate weighs them.

    Source: `DeepseekV4HashRouter` of transformers. Weights are the square roots of softplus of the logits, over their sum, times `scale`.
    """

    takes_network = True
    known_losses = COMMON_LOSSES

    def __init__(self, *args, scale: float, vocabulary: int, seed: int) -> None:
        """Draw a table for `vocabulary` token ids from `seed`."""
        super().__init__(*args, vocabulary=vocabulary, seed=seed)
        self.scale = scale

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Look each token up in the table, and weigh its experts by their scores."""
        logits = self.logits(x)
        values = formulas.score_sqrtsoftplus_topk(logits)
        ids = self.table[token_ids.flatten()]
        weights = formulas.renormalised(values.gather(1, ids.long())) * self.scale
        scores = formulas.distribution(values)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)


class HashPosition(Learned):
    """Position modulo experts, and the next expert as the second: the predecessor's `hash`. It sees no token.

    It has no parameters and no state.
    """

    takes_network = False
    known_losses = ()

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Expert (i + j) mod E for position i and choice j."""
        choice = torch.arange(self.top_k, device=x.device)
        ids = ((positions[:, None] + choice) % self.experts).int().repeat(len(x), 1)
        return self.fixed(ids)


class TopkHard(Learned):
    """The predecessor's `topk_hard`: top-k of a linear map that never trains, unweighted. A control for learned routing.

    The predecessor's `top1` is this at k = 1. It added the experts up; here they are averaged, so that k does not change
    the scale.

    The parameters of its network take no gradient.
    """

    known_losses = ()

    def __init__(self, *args) -> None:
        """Freeze the network as it was drawn."""
        super().__init__(*args)
        self.requires_grad_(False)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by detached logits, with weights 1/k."""
        logits = self.logits(x.detach())
        ids = logits.topk(self.top_k, dim=1).indices.int()
        return Routing(ids, torch.full_like(ids, 1 / self.top_k, dtype=torch.float32), {}, logits.softmax(1))
