"""model: a forward pass of a whole language model, in which only the way of the experts differs.

The boundary is what one step of generation computes: from token ids to the logits of the next token. A prefill is one sequence of `tokens`; a
decoding step is one token of each of `tokens` sequences, behind a context of `architectures.CONTEXT` tokens whose keys and values are given.
Attention, norms, routers, shared experts and the cache are those of the transformers library for all implementations. No sampling.

``generate`` itself prefills with grouped_mm and decodes with batched_mm, whatever it is told; here every form is pinned.
"""

from moe_routing_bench.benches.bench import Bench, Implementation, Peer

_PEER = Peer("transformers", "transformers", "pip install -e '.[peers]'")

BENCH = Bench(
    name="model",
    summary="a forward pass of a whole model with random weights: prefill, or one token per sequence",
    axes=("tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "model"),
    baseline="transformers_grouped_mm",
    implementations=(
        *(
            Implementation(f"transformers_{form}", ".step", options={"form": form}, peer=_PEER, declares=(rounded,))
            for form, rounded in (
                ("eager", "rounded_sums"),
                ("batched_mm", "rounded_terms"),
                ("grouped_mm", "rounded_terms"),
            )
        ),
        Implementation("ops", ".step", options={"form": "moe_routing_bench"}, peer=_PEER),
    ),
    reads=("ids", "keys", "values", "weights"),
    writes=("hidden", "logits"),
    shared=("weights",),
)
