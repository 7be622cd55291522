"""The low tiles of quantised and fp8 GEMMs: tokens on the N side, one variant, for few rows per expert."""

import math

FEW_ROWS = 56  # per expert, up to which weights' bytes set the time and tiles are low
FEW_SIZES = (8, 16, 24, 32, 48, 64)  # tokens of a low tile
# The cost of a tile in addition to its tokens, in tokens: loads of weights from shared memory, the epilogue.
PER_TILE = 32


def choose_low(mean: float, sizes: tuple[int, ...] = FEW_SIZES) -> int:
    """Tokens of a tile of one variant: the least expected cost where rows per expert are spread like a Poisson variable's."""
    return min(sizes, key=lambda tokens: _tiles(mean, tokens) * (tokens + PER_TILE))


def _tiles(mean: float, tokens: int) -> float:
    """Expected tiles of an expert that has a row: one, and one more for each multiple of `tokens` that its rows exceed."""
    spread = math.sqrt(2 * mean)
    return sum(
        0.5 * math.erfc((full * tokens + 0.5 - mean) / spread) if full else 1.0
        for full in range(math.ceil((mean + 4 * spread) / tokens) + 1)
    )
