"""Top-k of the softmax of the logits: as it is, of one or two experts, of noisy logits, and in two passes.

The table names the sources; the choice itself is that of the gate rule in `routers/formulas.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_kernels import routers
from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers import formulas, learned, losses
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing


class SoftmaxTopk(Learned):
    """Top-k of a softmax in its variants: softk (Mixtral), qwen3, topk_prenorm (OLMoE) and deepseek_v2_small.

    Softmax top-k, with a renormalisation and a limit to groups as its options say.
    """

    known_losses = (*COMMON_LOSSES, "device")

    def __init__(self, *args, renormalize: bool, groups: int, keep_groups: int, scale: float) -> None:
        """Raises `UserError` where the groups do not fit."""
        super().__init__(*args)
        options = {"renormalize": renormalize, "groups": groups, "keep_groups": keep_groups, "scale": scale}
        gate = routers.GateRule(self.rule.name, "formulas:softmax_topk", self.rule.summary, options)
        gate.check(self.experts, self.top_k)
        self.route, self.groups = gate.load(), groups

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by the logits alone."""
        logits = self.logits(x)
        ids, weights = self.route(logits, self.top_k)
        scores = logits.softmax(1)
        terms = self.terms(logits, scores, ids, len(x), device=lambda: losses.device(scores, ids, self.groups))
        return Routing(ids, weights, terms, scores)


class OffsetTopk(SoftmaxTopk):
    """Softmax top-k of logits with a learnt offset per expert, as gpt-oss has it (2508.10925): unlike a selection bias it is in the weights, too."""

    def __init__(self, *args, **options: Any) -> None:
        """The offset starts at zero; options as in `SoftmaxTopk`."""
        super().__init__(*args, **options)
        self.offset = nn.Parameter(torch.zeros(self.experts))

    def logits(self, x: Tensor) -> Tensor:
        """Logits (T, E) float32 of x (B, S, D), the offset included."""
        return super().logits(x) + self.offset


class GemmaTopk(SoftmaxTopk):
    """Gemma 4's router: its input is normalised and scaled by learnt factors, and so are the weights, per expert.

    Source: `Gemma4TextRouter` of transformers. The logits are those of x / rms(x) · s / sqrt(D), with s (D,); a weight is the softmax over
    the k, times the expert's own factor, of which nothing keeps the sign.
    """

    def __init__(self, *args, **options: Any) -> None:
        """Both factors start at one; options as in `SoftmaxTopk`."""
        super().__init__(*args, **options)
        dim = args[1]
        self.input_scale = nn.Parameter(torch.ones(dim))
        self.expert_scale = nn.Parameter(torch.ones(self.experts))

    def logits(self, x: Tensor) -> Tensor:
        """Logits (T, E) float32 of the normalised and scaled x (B, S, D)."""
        dim = x.shape[-1]
        with learned.without_autocast(x):
            scaled = nn.functional.rms_norm(x.float(), (dim,), eps=1e-6) * self.input_scale * dim**-0.5
        return super().logits(scaled)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by the logits, and scale each weight by its expert's factor."""
        routing = super().forward(x, token_ids, positions)
        return replace(routing, weights=routing.weights * self.expert_scale[routing.ids.long()])


class SwitchTop1(Learned):
    """Switch routing: one expert, weighted by its probability, with input jitter (2101.03961 sections 2.1 and 2.4).

    The weight is p rather than 1, because the router's gradient comes from it.
    """

    def __init__(self, *args, jitter: float) -> None:
        """In training each element of the router's input is scaled by U(1 − jitter, 1 + jitter)."""
        super().__init__(*args)
        self.jitter = jitter

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route to the best expert."""
        if self.training and self.jitter:
            x = x.float() * torch.empty_like(x, dtype=torch.float32).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = self.logits(x)
        ids, weights = formulas.route_softmax_topk(logits, 1, renormalize=False)
        scores = logits.softmax(1)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)


class GShardTop2(Learned):
    """GShard top-2 gating: chance decides by its weight whether the second expert is kept (2006.16668 algorithm 1).

    Evaluation keeps both experts; training keeps the second with probability min(1, 2·g2).
    """

    known_losses = (*COMMON_LOSSES, "first_choice")

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; leaving out the second expert does not change the weight of the first."""
        logits = self.logits(x)
        scores = logits.softmax(1)
        ids, weights = formulas.route_softmax_topk(logits, 2, renormalize=True)
        first = ids[:, :1]
        if self.training:
            dropped = torch.rand_like(weights) >= 2 * weights  # never the first: its weight is at least 1/2
            ids, weights = ids.masked_fill(dropped, -1), weights.masked_fill(dropped, 0.0)
        terms = self.terms(logits, scores, ids, len(x), first_choice=lambda: losses.switch(scores, first))
        return Routing(ids, weights, terms, scores)


LEAST_SPREAD = 0.01  # keeps the load loss finite; the usual value in public code


class NoisyTopk(Learned):
    """Noisy top-k gating (Shazeer 2017, 1701.06538 eq. 3-5; load loss: appendix A).

    Training adds noise with a learned spread to the logits; evaluation adds none.
    """

    known_losses = (*COMMON_LOSSES, "importance", "load")

    def __init__(self, *args) -> None:
        """Both networks start at zero, so that noise alone decides and balances the first steps (appendix A)."""
        super().__init__(*args)
        if self.top_k == self.experts:
            raise bad(f"top_k for router {self.rule.name}", self.top_k, f"2 to {self.experts - 1}")
        assert self.network is not None
        self.noise = learned.last_layer(args[1], self.experts)
        for last in (self.noise, learned.last_of(self.network)):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by noisy logits; the importance loss is about the weights, the load loss about the choice."""
        clean = noisy = self.logits(x)
        spread = nn.functional.softplus(learned.in_float32(self.noise, x)) + LEAST_SPREAD
        if self.training:
            noisy = clean + torch.randn_like(clean) * spread
        ids, weights = formulas.route_softmax_topk(noisy, self.top_k, renormalize=True)
        scores = noisy.softmax(1)
        terms = self.terms(
            clean,
            scores,
            ids,
            len(x),
            importance=lambda: losses.importance(torch.zeros_like(scores).scatter(1, ids.long(), weights)),
            load=lambda: losses.load(clean, noisy, spread, self.top_k),
        )
        return Routing(ids, weights, terms, scores)


class ChainOfExperts(Learned):
    """Chain-of-Experts: the layer is applied twice, each time with another router and half of the experts.

    Source: 2506.18945. The inner residual x ← x + Σ p_e·E_e(x) is the layer's.

    One pass: top-k/2 of the softmax, not renormalised, so that a single expert per pass still gets a gradient.
    """

    passes = 2

    def __init__(self, *args) -> None:
        """Raises `UserError` for a top_k that two passes cannot share evenly."""
        super().__init__(*args)
        if self.top_k % self.passes:
            raise bad(f"top_k for router {self.rule.name}", self.top_k, f"a multiple of its {self.passes} passes")

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route one pass; ids (T, top_k / 2)."""
        logits = self.logits(x)
        ids, weights = formulas.route_softmax_topk(logits, self.top_k // self.passes, renormalize=False)
        scores = logits.softmax(1)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)
