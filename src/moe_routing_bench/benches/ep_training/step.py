"""One step of a layer over ranks: forward under autograd, then the gradients of tokens, logits and weights in one call."""

import functools
from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.benches.ep_layer import step
from moe_routing_bench.benches.ep_layer.definition import Sharded
from moe_routing_bench.benches.mailboxes import captured
from moe_routing_bench.benches.training import step as training
from moe_routing_kernels.activations import activation_of


def unsupported(problem: Sharded, *, way: str) -> str | None:
    """Why this problem cannot run, or None."""
    if activation_of(problem.layer.activation).limit is not None:
        return training.unsupported(problem.layer, way="ops")
    return step.unsupported(problem, way=way)


precompile = functools.partial(step.precompile, training=True)


def bind(
    problem: Sharded,
    *,
    way: str,
    logits: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    d_combined: Tensor,
    combined: Tensor,
    d_x: Tensor,
    d_logits: Tensor,
    d_w13: Tensor,
    d_w2: Tensor,
    bias: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind logits (T_r, E) float32, x and d_combined (T_r, H), and the rank's w13 and w2; the call returns the result and all gradients, which
    torch allocates. All ranks of the default process group call together."""
    run = training.differentiated(step.layer(problem, way, bias), (x, logits, w13, w2), d_combined)
    return captured(run) if way.endswith("_graph") else run
