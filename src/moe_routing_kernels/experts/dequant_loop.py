"""Experts with quantised weights in plain torch, one after the other: an expert that has rows is dequantised, then multiplied with.

The baseline of AutoRound's ARK (its pull request 1813).
"""

import itertools
from collections.abc import Callable

from torch import Tensor

from moe_routing_kernels.experts import Experts, dequant
from moe_routing_kernels.experts.common import feed_forward, not_quantised, other_activations, plain_rows


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    return not_quantised(problem) or (None if problem.packed_format.quantised else other_activations(problem))


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    scales: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    **quantisation: Tensor,
) -> Callable[[], None]:
    """Bind packed (R, H) and its scales, offsets (E + 1,) int32, the elements w13 and w2, their `quantisation` parts by name, and biases; the
    call writes y (R, H).

    The call reads the offsets on the host: its true cost is the wall time, and a CUDA graph cannot hold it.
    """
    weights = dequant.parts(w13, w2, quantisation)
    up, down = dequant.kept_workspace(problem, 1, packed.device)

    def run() -> None:
        for e, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if end > first:
                expert = slice(e, e + 1)
                w13_parts, w2_parts = ({name: part[expert] for name, part in parts.items()} for parts in weights)
                dequant.fill(problem, (w13_parts, w2_parts), (up, down))
                rows = plain_rows(problem, packed[first:end], None if scales is None else scales[first:end])
                biases = (None if bias is None else bias[expert] for bias in (b13, b2))
                feed_forward(problem.activation, rows, 0, up, down, *biases, out=y[first:end])

    return run
