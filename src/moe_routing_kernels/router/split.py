"""Shared by the fused routers: which problems they run, and how many splits of K = H they use."""

from moe_routing_kernels.gate import rules
from moe_routing_kernels.router import Router


def unsupported(problem: Router) -> str | None:
    """Why a fused kernel cannot run a problem, or None."""
    if problem.dtype == "fp32":
        return "the fused router takes bf16 and fp16: tensor cores round float32"
    if problem.tokens * problem.experts >= 2**31:
        return "the fused router addresses its scores with 32 bits: fewer than 2^31 of them"
    return rules.unsupported(problem.gate)


def splits(tokens: int, hidden: int, tile: int, multiprocessors: int) -> int:
    """Splits of H (split-K) for tiles of `tile` tokens: 1 where the tiles alone fill half of the GPU.

    A split reads its share of the weight and the last one reads all partial accumulators. With n tokens in a tile and a weight of
    2 bytes per element, both take equally long for sqrt(2 H / (4 n)) splits.
    """
    tiles = -(-tokens // tile)
    most = 2 * multiprocessors // tiles if 2 * tiles <= multiprocessors else 1
    return max(1, min(round((hidden / 2 / min(tile, tokens)) ** 0.5), most))
