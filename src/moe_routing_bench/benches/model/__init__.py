"""model: a forward pass of a whole language model, in which only the way of the experts differs.

The boundary is what one step of generation computes: from token ids to the logits of the next token. A prefill is one sequence of `tokens`; a
decoding step is one token of each of `tokens` sequences, behind a context of `published_models.CONTEXT` tokens whose keys and values are given.
Attention, norms, routers, shared experts and the cache are those of the transformers library for all implementations. No sampling.

``generate`` itself prefills with grouped_mm and decodes with batched_mm, whatever it is told; here every form is pinned. Quantised experts,
which it has no form for, are implementations of the bench `experts` by their names there.
"""

from collections.abc import Iterator

from moe_routing_bench.benches.bench import Bench, Implementation, Peer
from moe_routing_bench.benches.experts import BENCH as EXPERTS
from moe_routing_bench.benches.experts import WEIGHTS
from moe_routing_bench.benches.model.published_models import MOST_LAYERS
from moe_routing_kernels.implementations import chosen_by_name, listed

_PEER = Peer("transformers", "transformers", "pip install -e '.[peers]'")
_QUANTISED = [one.name for one in listed("experts") if one.quantised == "weights" and one.rank is not None]
_PARTS = tuple(f"{name}.{layer}" for layer in range(MOST_LAYERS) for name in WEIGHTS)  # of quantised experts


class Models(Bench):
    """A bench whose implementations may run one of `experts` in every layer, which their option of that name says."""

    def modules(self) -> Iterator[str]:
        """The modules that a measurement imports by name."""
        yield from super().modules()
        for one in self.implementations:
            if name := one.options.get("experts"):
                yield from EXPERTS[name].modules(EXPERTS.name)
        yield from chosen_by_name()


BENCH = Models(
    name="model",
    summary="a forward pass of a whole model with random weights: prefill, or one token per sequence",
    axes=("tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "weights", "model"),
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
        Implementation("ops", ".step", options={"form": "moe_routing_kernels"}, peer=_PEER),
        *(
            Implementation(
                name,
                ".step",
                requires=EXPERTS[name].requires,
                options={"form": "moe_routing_bench_quantised", "experts": name},
                peer=_PEER,
            )
            for name in _QUANTISED
        ),
    ),
    reads=("ids", "keys", "values", "weights", *_PARTS),
    writes=("hidden", "logits"),
    shared=("weights", *_PARTS),
)
