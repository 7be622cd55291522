"""What the predecessor of this benchmark claimed, with its numbers: what `verdicts` holds our rows against.

The predecessor is yuninxia/moe-routing-bench at commit bb9bb0b (2025-11-30), docs/report.md: 4 L40S, one seed, validation
perplexity of a character model, unless said otherwise.
"""

from dataclasses import dataclass

SOURCE = "yuninxia/moe-routing-bench, commit bb9bb0b, docs/report.md"


@dataclass(frozen=True)
class Claim:
    """A claim, what they measured, how it is read here, and the test of `verdicts` that it is put to.

    `names` are our contestants, best first where the claim is an order; `bound` is the number that the test needs; `source`
    is the table that holds our rows.
    """

    text: str
    theirs: str
    reading: str
    test: str
    names: tuple[str, ...] = ()
    bound: float = 0.0
    source: str = "quality"


_ORDER = "expert choice > softk > hash > top-k hard > top-1"
_ORDER_NUMBERS = "perplexity, in this order: 5.498, 5.547, 6.492, 6.153, 6.690 (E=8, capacity factor 1.25); 3.859, 4.069, 4.437, 4.669, 5.222 (E=32)"
CLAIMS = (
    Claim(
        _ORDER, _ORDER_NUMBERS,
        "the rules as they built them: pseudo_expert_choice, softk, hash_position, topk_hard; their top-1 was topk_hard with k=1, which is not trained here",
        "order", ("pseudo_expert_choice", "softk", "hash_position", "topk_hard"),
    ),
    Claim(
        _ORDER, _ORDER_NUMBERS,
        "the rules as published: expert_choice, softk, hash_balanced (by token id), switch_top1 at equal active FLOPs",
        "order", ("expert_choice", "softk", "hash_balanced", "switch_top1"),
    ),
    Claim(
        "a capacity factor of 1.05 to 1.10 removes dropping",
        "0.3 % to 10 % of the choices of random logits (no trained router) in their sweep of capacity factors from 0.9; their trained models at 1.25 dropped 3.6 % (expert choice), 4.2 % (softk), 15.7 % (top-k hard), 25.1 % (top-1)",
        "at 1.10, the generous end, every trained causal rule leaves less than 1 % of its choices over the capacity",
        "drops", bound=0.01,
    ),
    Claim(
        "the router network matters little",
        "perplexity of linear, mlp, mlp_hadamard: 8.533, 8.488, 8.634 (softk); 8.521, 8.538, 8.553 (expert choice)",
        "networks of one rule differ by less than 0.0246 bits per byte: log2(8.634 / 8.488), the largest difference that they called little",
        "networks", bound=0.0246,
    ),
    Claim(
        "PERFT-R > PERFT-E > shared",
        "evaluation loss at rank 32 (OLMoE-1B-7B, 120 samples): R 1.0898 (1 of 8), E 1.0719, shared 1.1243; R is first only on their axis of efficiency",
        "validation loss of adapters of one rank on a frozen trained model",
        "order", ("perft_r", "perft_e", "perft_s"), source="perft",
    ),
    Claim(
        "hash is balanced but worst among learned",
        "hash: load CV 0, perplexity 6.492; softk: 0.288, 5.547; top-k hard: 0.489, 6.153; top-1: 0.603, 6.690",
        "hash_position, their rule, has a lower load CV and a higher loss than every causal rule that learns",
        "hash", ("hash_position",),
    ),
    Claim(
        "hash is balanced but worst among learned",
        "the same; theirs never saw a token",
        "hash_balanced, a table of token ids, has a lower load CV and a higher loss than every causal rule that learns",
        "hash", ("hash_balanced",),
    ),
)  # fmt: skip
