"""The router zoo: one table line per rule that a model can be trained with. Nothing here imports torch.

The benches of kernels measure gate rules, from logits to ids and weights; their table is `ROUTERS` of this package. A
trainable rule also owns parameters, losses and what it learns from the loads. `learned.build` makes its router, and
docs/routers.md shows the table.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moe_routing_kernels.errors import bad, pick

# from x (D) to logits (E), under the names that the predecessor's sweep has for them
NETWORKS = ("linear", "mlp", "mlp_hadamard")


@dataclass(frozen=True)
class TrainableRule:
    """A rule that a model can be trained with.

    `router` is the module in `routers.rules`, and its class. `formula` uses the notation of docs/routers.md. `causal` says that in training the decision for a token depends on
    no later token and on no other sequence; `causal_eval` says so for evaluation, where that differs. Both are meant without a capacity: `causal_with_capacity` is the flag with
    one. `seated_by` is the order in which a capacity seats choices: by "position", or by "choice", all first choices before any second one. `changed` is the day on which the rule,
    or how a layer seats its choices, last changed what it computes: rows that ended before are of another rule. `learns` says that the router gets a gradient from the layer's
    output. `top_k` is the only one possible where it is not None; it is at least `least_top_k`. `losses` maps the losses added in training to their coefficients. `sums` are the
    least and the largest sum of a token's weights. `options` maps all options to their defaults. `caution` says what speaks against comparing its loss with that of others.
    """

    name: str
    router: str
    summary: str
    formula: str
    source: str
    causal: bool = True
    causal_eval: bool | None = None
    learns: bool = True
    top_k: int | None = None
    least_top_k: int = 1
    losses: Mapping[str, float] = field(default_factory=dict)
    sums: tuple[float, float] = (1.0, 1.0)
    options: Mapping[str, Any] = field(default_factory=dict)
    caution: str = ""
    seated_by: str = "position"
    changed: str = ""

    def causal_with_capacity(self, policy: str = "position", training: bool = True) -> bool:
        """Whether no later token of a sequence can change a decision when experts have a capacity.

        `policy` is the run's drop policy; "position" is the rule's own seating. Seated in any other order than by position, a later
        token can take the place of an earlier one. Tokens of the other sequences of the batch can do so under every capacity.
        """
        seats = self.seated_by if policy == "position" else policy
        return seats == "position" and (self.causal if training else self.causal_in_evaluation)

    @property
    def causal_in_evaluation(self) -> bool:
        """Whether evaluation is causal."""
        return self.causal if self.causal_eval is None else self.causal_eval

    def load(self) -> type:
        """The rule's `Learned` subclass. Imports torch."""
        return getattr(importlib.import_module(self.module), self.router.partition(".")[2])

    @property
    def module(self) -> str:
        """The absolute name of the module that has its router."""
        return f"{__name__.rpartition('.')[0]}.rules.{self.router.partition('.')[0]}"


# So that models of 8 experts have groups. The published rules, which are those of `ROUTERS`, have 8, of which V2 keeps
# 3 and V3 4.
_SMALL = {"groups": 4, "keep_groups": 2}
_PLAIN = {"groups": 1, "keep_groups": 1, "scale": 1.0}
_INF = float("inf")

_TABLE = (
    TrainableRule(
        "noisy_topk", "topk.NoisyTopk", "Top-k of noisy logits, softmax over the k",
        "top-k of h + N(0,1)·softplus(xW_n); softmax over the k", "Shazeer 1701.06538 sections 2.1 and 4, appendix A",
        losses={"importance": 0.1, "load": 0.1}, least_top_k=2,
    ),
    TrainableRule(
        "gshard_top2", "topk.GShardTop2", "Best expert, and the second with a probability that grows with its weight",
        "top-2 of p, renormalised to g1 + g2 = 1; the second kept with probability min(1, 2·g2) in training",
        "GShard 2006.16668 algorithm 1", top_k=2, losses={"first_choice": 0.01}, sums=(0.5, 1.0),
        seated_by="choice",  # algorithm 1 counts the loads of first choices before it dispatches second ones
        changed="2026-11-22",  # until then a capacity seated by position
    ),
    TrainableRule(
        "switch_top1", "topk.SwitchTop1", "Best expert, weighted by its probability",
        "argmax p; weight p; training scales x by U(1 ± 0.01)", "Switch 2101.03961 section 2",
        top_k=1, losses={"switch": 0.01}, sums=(0.0, 1.0), options={"jitter": 0.01},
    ),
    TrainableRule(
        "softk", "topk.SoftmaxTopk", "Softmax over the k best logits", "top-k of h; softmax over the k",
        "Mixtral 2401.04088 eq. 2", losses={"switch": 0.01}, least_top_k=2, options={"renormalize": True, **_PLAIN},
    ),
    TrainableRule(
        "qwen3", "topk.SoftmaxTopk", "softk, balanced over the global batch", "top-k of h; softmax over the k",
        "Qwen3 2505.09388; global batch: 2501.11873", losses={"global_batch": 0.001}, least_top_k=2, options={"renormalize": True, **_PLAIN},
    ),
    TrainableRule(
        "gpt_oss", "topk.OffsetTopk", "softk with a learnt offset on the logits", "top-k of h + o, o learnt by gradient; softmax of h + o over the k",
        "gpt-oss 2508.10925", losses={"switch": 0.01}, least_top_k=2, options={"renormalize": True, **_PLAIN},
    ),
    TrainableRule(
        "topk_prenorm", "topk.SoftmaxTopk", "Top-k without renormalisation", "top-k of p; weights p",
        "OLMoE 2409.02060", losses={"switch": 0.01, "z": 0.001}, sums=(0.0, 1.0), options={"renormalize": False, **_PLAIN},
    ),
    TrainableRule(
        "deepseek_v2_small", "topk.SoftmaxTopk", "DeepSeek-V2 with 4 groups: top-k of the 2 best, without renormalisation",
        "top-k of p in the groups with the largest best p; weights p × scale (V2-Lite 1, V2 16)",
        "DeepSeek-V2 2405.04434 section 2.1.2, eq. 23-31", losses={"switch": 0.003, "device": 0.05}, sums=(0.0, 1.0),
        options={"renormalize": False, **_SMALL, "scale": 1.0},
    ),
    TrainableRule(
        "deepseek_v3_small", "selection_bias.BiasedTopk", "DeepSeek-V3 with 4 groups: sigmoid, selection bias, top-k of the 2 best, renormalised, sequence-wise loss",
        "s = σ(h); top-k of s + b in the groups with the largest sum of two; weights s/Σs × 2.5; b += γ·sign(mean n − n)",
        "DeepSeek-V3 2412.19437 eq. 13-20", losses={"sequence": 0.0001}, sums=(2.5, 2.5), least_top_k=2,
        options={"score": "sigmoid", "renormalize": True, **_SMALL, "scale": 2.5, "rate": 0.001, "counted": "routed", "shared": False},
    ),
    TrainableRule(
        "sigmoid_renorm", "selection_bias.BiasedTopk", "Sigmoid with a selection bias, renormalised",
        "s = σ(h); top-k of s + b; weights s/Σs; b += γ·sign(mean n − n)", "Kimi-K2, GLM-4.5, MiniMax-M2",
        least_top_k=2, options={"score": "sigmoid", "renormalize": True, **_PLAIN, "rate": 0.001, "shared": False},
    ),
    TrainableRule(
        "sqrtsoftplus_renorm", "selection_bias.BiasedTopk", "Square root of softplus with a selection bias, renormalised",
        "s = √softplus(h); top-k of s + b; weights s/Σs × 1.5; b += γ·sign(mean n − n)", "DeepSeek-V4", sums=(1.5, 1.5), least_top_k=2,
        options={"score": "sqrtsoftplus", "renormalize": True, "groups": 1, "keep_groups": 1, "scale": 1.5, "rate": 0.001, "shared": False},
    ),
    TrainableRule(
        "loss_free_bias", "selection_bias.BiasedTopk", "Sigmoid with a selection bias in place of a loss, not renormalised",
        "s = σ(h); top-k of s + b; weights s; b += γ·sign(mean n − n)", "2408.15664 eq. 1-3, algorithm 1", sums=(0.0, _INF),
        options={"score": "sigmoid", "renormalize": False, **_PLAIN, "rate": 0.001},
    ),
    TrainableRule(
        "softmax_bias_renorm", "selection_bias.BiasedTopk", "Softmax with a selection bias, renormalised",
        "top-k of p + b; weights p/Σp; b += γ·sign(mean n − n)", "ERNIE 4.5", least_top_k=2,
        options={"score": "softmax", "renormalize": True, **_PLAIN, "rate": 0.001},
    ),
    TrainableRule(
        "softmax_bias", "selection_bias.BiasedTopk", "Softmax with a selection bias, not renormalised",
        "top-k of p + b; weights p × scale (LongCat 6); b += γ·sign(mean n − n)", "LongCat-Flash 2509.01322",
        sums=(0.0, 1.0), options={"score": "softmax", "renormalize": False, **_PLAIN, "rate": 0.001},
    ),
    TrainableRule(
        "softmax_groups", "selection_bias.BiasedTopk", "Top-k of a softmax in the 2 best of 4 groups by their two best, renormalised",
        "top-k of p in the groups with the largest sum of two; weights p/Σp; with a rate, + b", "Mistral 4", least_top_k=2,
        losses={"switch": 0.01}, options={"score": "softmax", "renormalize": True, **_SMALL, "scale": 1.0, "rate": 0.0},
    ),
    TrainableRule(
        "quantile_balancing", "selection_bias.QuantileBalancing", "Sigmoid with the selection bias that would have balanced the last step",
        "s = σ(h); top-k of s − β; weights s/Σs; β_e ← (1 − k/E)-quantile over t of s_te − α_t, α_t the (k+1)-th of s − β",
        "Su 2026, kexue.fm 11619 and 11626", least_top_k=2, options={"momentum": 0.0, "score": "sigmoid", "centred": False},
    ),
    TrainableRule(
        "quantile_logits", "selection_bias.QuantileBalancing", "Quantile balancing of the logits, smoothed and centred",
        "top-k of h − β; softmax of h over the k; β ← 0.9·β + 0.1·quantile as above, of h, less its mean",
        "Megatron-LM, pull request 5349", least_top_k=2, options={"momentum": 0.9, "score": "logits", "centred": True},
    ),
    TrainableRule(
        "hash_random", "fixed.HashToken", "A random table from token id to experts", "k distinct experts drawn for each token id; weights 1/k",
        "Hash Layers 2106.04426 section 3", learns=False, options={"vocabulary": 256, "seed": 0},
    ),
    TrainableRule(
        "hash_balanced", "fixed.HashToken", "A table from token id to experts that balances the training text",
        "token ids by falling frequency, each to the k least loaded experts; weights 1/k",
        "Hash Layers 2106.04426 section 3", learns=False, options={"frequencies": None},
    ),
    TrainableRule(
        "hash_position", "fixed.HashPosition", "Position modulo experts: a control that sees no token",
        "(i + j) mod E for position i and j < k; weights 1/k", "predecessor's `hash`", learns=False,
    ),
    TrainableRule(
        "base", "whole_batch.Base", "Balanced assignment by auction in training, best expert in evaluation",
        "training: the assignment with T/E tokens per expert that maximises Σh; evaluation: argmax h; weight σ(h)",
        "BASE Layers 2103.16716", causal=False, causal_eval=True, top_k=1, sums=(0.0, 1.0), options={"rounds": 32},
    ),
    TrainableRule(
        "sinkhorn", "whole_batch.Sinkhorn", "Top-k of Sinkhorn-balanced logits in training, of the logits in evaluation",
        "training: top-k of Sinkhorn(exp h); evaluation: top-k of h; weights p (σ(h) at k = 1)",
        "Clark 2202.01169 section 3.1; Megatron-LM", causal=False, causal_eval=True, sums=(0.0, 1.0), options={"rounds": 20},
    ),
    TrainableRule(
        "expert_choice", "whole_batch.ExpertChoice", "Each expert takes its best tokens", "expert e takes the T·k/E tokens with the largest p_te; weights p",
        "Expert Choice 2202.09368", causal=False, sums=(0.0, 1.0),
    ),
    TrainableRule(
        "soft_moe", "whole_batch.SoftMoE", "Each slot is a mixture of all tokens of a sequence, each token one of all slots",
        "L = x̂·(scale·Φ̂); dispatch softmax of L over tokens, combine softmax of L over slots; S·k/E slots per expert",
        "Soft MoE 2308.00951 section 2.1 and 2.3", causal=False, options={"sequence": 256},
        caution="its scale starts at 1 and barely moves in runs as short as these, so slots stay near the mean of all tokens: its place says little.",
    ),
    TrainableRule(
        "top_p", "expert_counts.TopP", "As many experts as it takes to reach a probability", "the smallest set with Σp ≥ 0.4; weights p",
        "Huang 2403.07652", losses={"switch": 0.01, "entropy": 0.0001}, sums=(0.4, 1.0), options={"threshold": 0.4},
    ),
    TrainableRule(
        "remoe", "expert_counts.ReMoE", "ReLU gate: experts with a positive logit",
        "weights relu(h), L1 loss λ·mean Σ_e f_e·relu(h_e); λ × 1.2 while fewer than 1 − k/E gates are zero, else ÷ 1.2",
        "ReMoE 2412.14711 sections 3.2 to 3.4", losses={"l1": 1.0}, sums=(0.0, _INF), options={"start": 1e-8, "growth": 1.2, "scope": "layer"},
    ),
    TrainableRule(
        "null_experts", "expert_counts.NullExperts", "Top-k' over true and null experts; null ones do nothing",
        "top-2k of softmax over E true and E null experts; weights p/Σp over the true ones chosen, null 0",
        "AdaMoE 2406.13233", losses={"null_switch": 0.01}, sums=(0.0, 1.0), options={"nulls": None},
    ),
    TrainableRule(
        "moepp", "expert_counts.MoEPlusPlus", "Top-k over true experts and a zero, a copy and two constant ones",
        "top-k of softmax over E + 4; weights p/Σp over those chosen but zero; no gating residual",
        "MoE++ 2410.07348", losses={"heterogeneous": 0.01}, least_top_k=2, options={"share": 0.75},
    ),
    TrainableRule(
        "chain_of_experts", "topk.ChainOfExperts", "Two passes with a router each, k/2 experts per pass",
        "twice: x ← x + Σ p_e·E_e(x) over the top-k/2 of p", "Chain-of-Experts 2506.18945", least_top_k=2, losses={"switch": 0.01}, sums=(0.0, 1.0),
    ),
    TrainableRule(
        "token_rounding", "whole_batch.TokenRounding", "Top-k with each expert's load rounded to a multiple of the tile",
        "training: top-k of p, then each expert drops its worst or adds its best tokens up to a multiple of 128; weights p/Σ_top-k p",
        "SonicMoE 2512.14080", causal=False, causal_eval=True, least_top_k=2, losses={"switch": 0.01}, sums=(0.0, _INF), options={"tile": 128},
    ),
    TrainableRule(
        "topk_hard", "fixed.TopkHard", "Top-k of a router that never trains, unweighted: a control", "top-k of h; weights 1/k, h without gradient",
        "predecessor's `topk_hard`", learns=False,
    ),
    TrainableRule(
        "pseudo_expert_choice", "whole_batch.PseudoExpertChoice", "Top-k for tokens that no expert picked: a control",
        "each expert picks 64 tokens at most; a picked token goes to those experts, another to its top-k; softmax over these",
        "predecessor's `expert_choice`", causal=False, least_top_k=2, options={"picks": 64},
    ),
    TrainableRule(
        "deepseek_v4_hash", "fixed.HashScored", "A random table from token id to experts, weighed by a learnt gate",
        "k distinct experts drawn for each token id; s = √softplus(h); weights s/Σs × 1.5", "DeepSeek-V4",
        sums=(1.5, 1.5), least_top_k=2, options={"scale": 1.5, "vocabulary": 256, "seed": 0},
    ),
    TrainableRule(
        "longcat_zero", "selection_bias.ZeroExperts", "Top-k' over true and identity experts, balanced by a proportional bias",
        "k' = 1.5k; top-k' of p + b over E true and E/2 identity experts; weights p × scale; true: b += μ·(k/(k'E) − n/(k'T))",
        "LongCat-Flash 2509.01322", sums=(0.0, 1.0), options={"zeros": None, "scale": 1.0, "rate": 0.05},
    ),
    TrainableRule(
        "expert_threshold", "expert_counts.ExpertThreshold", "Each expert takes tokens above a moving threshold of its own",
        "experts with h_e ≥ c_e; weights σ(h); c ← 0.99·c + 0.01·(T·k/E-th largest h_e of the step), corrected for its start",
        "Expert Threshold 2603.11535", sums=(0.0, _INF), options={"momentum": 0.99},
    ),
    TrainableRule(
        "gemma4", "topk.GemmaTopk", "softk of a normalised input, with a learnt factor per expert on the weights",
        "top-k of h of x/rms(x)·s/√D; softmax over the k × a learnt factor per expert", "Gemma 4", sums=(-_INF, _INF),
        losses={"switch": 0.01}, least_top_k=2, options={"renormalize": True, **_PLAIN},
    ),
)  # fmt: skip
ZOO: Mapping[str, TrainableRule] = MappingProxyType({rule.name: rule for rule in _TABLE})


def by_layer(name: str, layers: int | None = None) -> tuple[TrainableRule, ...]:
    """The rules of a model's layers, first to last: those that ``+`` joins in a name, of which the last has all further layers.

    Without a number of layers, each that is named once. Raises `UserError` for an unknown rule, and for more of them than layers.
    """
    names = name.split("+")
    rules = tuple(ZOO[pick("router", part, ZOO)] for part in (names if layers else dict.fromkeys(names)))
    if layers is None:
        return rules
    if len(rules) > layers:
        raise bad("router", f"{len(rules)} rules in {name}", f"at most one for each of {layers} layers")
    return rules + rules[-1:] * (layers - len(rules))


def _causality(rule: TrainableRule) -> str:
    """Whether the rule is causal, as the table says it."""
    if rule.causal:
        return "yes" if rule.causal_with_capacity() else "without a capacity"
    return "in evaluation" if rule.causal_in_evaluation else "**no**"


def table() -> str:
    """The rules as the Markdown table of docs/routers.md."""
    lines = [
        "| rule | what it decides | causal | losses | sum of weights | source |",
        "|---|---|---|---|---|---|",
    ]
    for rule in ZOO.values():
        least, most = ("" if abs(bound) == _INF else f"{bound:g}" for bound in rule.sums)
        cells = (
            f"`{rule.name}`",
            rule.formula,
            _causality(rule),
            ", ".join(f"{name} {coefficient:g}" for name, coefficient in rule.losses.items()) or "none",
            (least or "any") if least == most else f"{least} to {most}" if most else f"{least} or more",
            rule.source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
