"""experts: feed-forward networks over packed rows, for every expert y = act(x W13^T) W2^T.

Activations, of g = x W1^T and u = x W3^T: `swiglu` silu(g) * u (Shazeer 2020, arXiv 2002.05202); `geglu` gelu(g) * u, the gelu made of
tanh (Gemma); `relu2` relu(x W13^T)^2, without a gate (So et al. 2021, arXiv 2109.08668; Nemotron); `swiglu_oai` that of gpt-oss:
g' = min(g, 7), u' = u clamped to 7 in size, g' sigmoid(1.702 g') (u' + 1), with biases before it and after W2.
"""

from dataclasses import dataclass

from moe_routing_bench import formats
from moe_routing_bench.formats.weights import WEIGHTS, WeightFormat

ACTIVATIONS = ("swiglu", "geglu", "relu2", "swiglu_oai")
OAI_LIMIT, OAI_ALPHA = 7.0, 1.702  # of gpt-oss's modeling file in transformers


@dataclass(frozen=True)
class Experts:
    """Tensors: packed (R, H) of `packed` and scales where it has them, offsets (E + 1,) int32, w13 (E, N, H) and w2
    (E, H, I) of `weights`, and where the activation has biases b13 (E, N) and b2 (E, H), likewise; y (R, H) of `dtype`. N is 2 I, W1
    above W3, or I where nothing is gated. Of quantised weights w13 and w2 are the elements, beside w13_scales and w2_scales, and
    w13_zeros or w13_global where `formats.weights` says so; biases are of `dtype`. Rows from offsets[E] on belong to no expert: what y holds there is undefined."""

    rows: int  # most rows
    hidden: int
    intermediate: int
    experts: int
    dtype: str  # format of activations and results
    packed: str  # format of the packed rows
    weights: str  # format of the experts' weights, of `formats` or `formats.weights`
    padded: bool = False  # every expert has rows / experts rows; else its rows are offsets[e] to offsets[e + 1]
    activation: str = "swiglu"  # of ACTIVATIONS
    align: int = 1  # each expert's rows begin at a multiple of this and are followed by padding up to the next

    @property
    def packed_format(self) -> formats.Format:
        """The format of the packed rows."""
        return formats.FORMATS[self.packed]

    @property
    def quantised_weights(self) -> WeightFormat | None:
        """The format of the weights where they are quantised, else None."""
        return WEIGHTS.get(self.weights)

    @property
    def gated(self) -> bool:
        """Whether one half of the first product is a gate for the other."""
        return self.activation != "relu2"

    @property
    def biased(self) -> bool:
        """Whether both products have biases."""
        return self.activation == "swiglu_oai"
