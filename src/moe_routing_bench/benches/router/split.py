"""What the fused routers share: which cells they run, and into how many parts they cut H."""

from typing import Any

from moe_routing_bench.benches.gate import rules

SMS = 132


def supports(cell: Any) -> str | None:
    """Why a fused kernel cannot run a cell, or None."""
    if cell.dtype == "fp32":
        return "the fused router takes bf16 and fp16: tensor cores round float32"
    return rules.supports(cell)


def parts(tokens: int, hidden: int, tile: int) -> int:
    """Parts that H is cut into, for tiles of `tile` tokens: 1 where the tiles alone fill half of the GPU.

    A part reads its share of the weight and the last one reads all partials: at n live tokens a tile, both are equally
    long for sqrt(2 H / (4 n)) parts of a weight of 2 bytes an element.
    """
    tiles = -(-tokens // tile)
    most = 2 * SMS // tiles if 2 * tiles <= SMS else 1
    return max(1, min(round((hidden / 2 / min(tile, tokens)) ** 0.5), most))
