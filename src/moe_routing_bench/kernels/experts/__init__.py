"""experts: SwiGLU feed-forward networks over packed rows, y = (silu(x W1^T) * (x W3^T)) W2^T for every expert."""

from dataclasses import dataclass

from moe_routing_bench import formats


@dataclass(frozen=True)
class Experts:
    """Tensors: packed (R, H) of `packed` and scales where it has them, offsets (E + 1,) int32, w13 (E, 2 I, H) and w2
    (E, H, I) of `weights`; y (R, H) of `dtype`. w13 holds W1 above W3. Rows from offsets[E] on belong to no expert:
    what y holds there is undefined."""

    rows: int  # most rows
    hidden: int
    intermediate: int
    experts: int
    dtype: str  # format of activations and results
    packed: str  # format of the packed rows
    weights: str  # format of the experts' weights
    padded: bool = False  # every expert has rows / experts rows; else its rows are offsets[e] to offsets[e + 1]

    @property
    def packed_format(self) -> formats.Format:
        """The format of the packed rows."""
        return formats.FORMATS[self.packed]
