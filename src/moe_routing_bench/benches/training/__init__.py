"""training: a whole layer forward and backward, as an optimiser step sees it.

The boundary is that of `layer`, behind the router's projection, once forward and once backward: from tokens x, router logits,
the experts' weights and the gradient of the result to the result and the gradients of all of them. The gate and its gradient are
inside. Gradients are written afresh, not added to what an earlier step left; those of experts without a token are zeros and are
written too. No auxiliary loss, no optimiser, no communication. What is saved between the two passes is the implementation's affair.
"""

from collections.abc import Iterator
from dataclasses import replace

from moe_routing_bench.benches.bench import Bench, Implementation, ours
from moe_routing_bench.benches.layer import BENCH as LAYER
from moe_routing_kernels.implementations import chosen_by_name, listed, module_of

_LIBRARIES = [  # the packages, and what they need, are those of `layer`
    Implementation(
        name,
        ".step",
        requires=("nvidia", "triton", *(("cutlass",) if name == "sonicmoe" else ())),
        options={"way": name},
        peer=LAYER[name].peer,
        declares=("rounded_scores",) if name == "liger" else (),
    )
    for name in ("sonicmoe", "liger", "moe_ops")
]
_TRANSFORMERS = [
    Implementation(
        name := f"transformers_{form}",
        ".step",
        options={"way": "transformers", "form": form},
        peer=LAYER[name].peer,
        declares=("rounded_sums",),
    )
    for form in ("eager", "grouped_mm")
]


class Training(Bench):
    """A bench that runs our layers, by their names, and our operators, which choose by name."""

    def modules(self) -> Iterator[str]:
        """The modules that a measurement imports by name."""
        yield from super().modules()
        yield from (module_of(one.place("training")) for one in listed("training"))
        yield from chosen_by_name()


BENCH = Training(
    name="training",
    summary="a layer forward and backward: result and the gradients of tokens, logits and weights",
    axes=(
        *("tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace"),
        *("router", "activation", "dtype", "model"),
    ),
    baseline="torch_grouped_mm",
    implementations=(
        *(replace(one, module=".step", options={"way": one.name}) for one in ours("training")),
        Implementation("ops", ".step", options={"way": "ops"}),
        *_LIBRARIES,
        *_TRANSFORMERS,
    ),
    reads=("logits", "bias", "x", "w13", "w2", "d_combined"),
    writes=("combined", "d_x", "d_logits", "d_w13", "d_w2"),
    shared=("w13", "w2"),
)
