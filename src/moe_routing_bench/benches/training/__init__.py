"""training: a whole layer forward and backward, as an optimiser step sees it.

The boundary is that of `layer`, behind the router's projection, once forward and once backward: from tokens x, router logits,
the experts' weights and the gradient of the result to the result and the gradients of all of them. The gate and its gradient are
inside. Gradients are written afresh, not added to what an earlier step left; those of experts without a token are zeros and are
written too. No auxiliary loss, no optimiser, no communication. What is saved between the two passes is the implementation's affair.
"""

from moe_routing_bench.benches.bench import Bench, Implementation
from moe_routing_bench.benches.layer import BENCH as LAYER

_LIBRARIES = [  # the packages, and what they need, are those of `layer`
    Implementation(
        name,
        ".step",
        requires=("cuda", "triton", *(("cutlass",) if name == "sonicmoe" else ())),
        options={"way": f"{name}_experts"},
        peer=LAYER[name].peer,
        declares=("rounded_scores",) if name == "liger" else (),
    )
    for name in ("sonicmoe", "liger", "moe_ops")
]
_TRANSFORMERS = [
    Implementation(
        name := f"transformers_{form}",
        ".step",
        options={"way": "transformers_experts", "form": form},
        peer=LAYER[name].peer,
        declares=("rounded_sums",),
    )
    for form in ("eager", "grouped_mm")
]

BENCH = Bench(
    name="training",
    summary="a layer forward and backward: result and the gradients of tokens, logits and weights",
    axes=(
        *("tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace"),
        *("router", "activation", "dtype", "model"),
    ),
    baseline="torch_grouped_mm",
    implementations=(
        Implementation("torch_loop", ".step", options={"way": "torch_loop"}, declares=("rounded_sums",)),
        Implementation("torch_grouped_mm", ".step", options={"way": "torch_grouped_mm"}, declares=("rounded_sums",)),
        Implementation("ops", ".step", options={"way": "ops"}),
        *_LIBRARIES,
        *_TRANSFORMERS,
    ),
    reads=("logits", "bias", "x", "w13", "w2", "d_combined"),
    writes=("combined", "d_x", "d_logits", "d_w13", "d_w2"),
    shared=("w13", "w2"),
)
