"""SGLang's sort of assignments as an optional peer (sglang-kernel 0.4.3, `prepare_moe_input`), for compact rows of all experts.

Strategy: a block per expert counts its assignments among all, one thread adds the counts up, and a block per expert takes rows for
its assignments by atomic additions. So the rows of an expert lie in another order in each call. `order` holds tokens where ours
holds assignments, which is all that copying rows needs. The counts lie beside the sizes of the products: a copy takes them out.

Compulsory bytes: 12 * T * k + 8 * E; floor: launches.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.peers.libraries import SGLANG
from moe_routing_kernels.permute import Permute


def unsupported(problem: Permute) -> str | None:
    """Why SGLang cannot run a problem, or None."""
    if problem.limit is not None:
        return "SGLang has no capacity limit"
    if problem.align != 1:
        return "SGLang's sort makes compact rows; its moe_align_block_size, which makes blocks, is sglang_align"
    return SGLANG.missing()


def bind(
    problem: Permute, *, topk_ids: Tensor, counts: Tensor, offsets: Tensor, order: Tensor, inverse: Tensor
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32 -> counts (E,), offsets (E + 1,), order (T k,) of tokens, inverse (T, k), all int32."""
    operators, experts = SGLANG.operators(), problem.experts
    up, down = (counts.new_empty(experts, 3) for _ in range(2))  # rows, columns and terms of both products per expert
    flat, width = inverse.view(-1), 8  # of the products, which are not run

    def run() -> None:
        operators.prepare_moe_input(topk_ids, offsets, None, up, down, order, flat, experts, width, width)
        counts.copy_(up[:, 0])

    return run
