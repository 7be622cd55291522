"""ep_training: a whole MoE layer over ranks, forward and backward, as an optimiser step sees it."""

from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.ep_layer import AXES, WAYS

BENCH = Bench(
    name="ep_training",
    summary="a layer over ranks forward and backward: result and the gradients of tokens, logits and weights",
    axes=AXES,
    baseline="torch_all_to_all",
    implementations=WAYS,
    reads=("logits", "bias", "x", "w13", "w2", "d_combined"),
    writes=("combined", "d_x", "d_logits", "d_w13", "d_w2"),
    shared=("w13", "w2"),
)
