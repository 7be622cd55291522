"""experts: feed-forward networks over packed rows, for every expert y = act(x W13^T) W2^T, act one of `activations`."""

from dataclasses import dataclass

from moe_routing_kernels import formats
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.formats.weights import WEIGHTS, WeightFormat
from moe_routing_kernels.implementations import Candidate


@dataclass(frozen=True)
class Experts:
    """Tensors: packed (R, H) of `packed` and scales where it has them, offsets (E + 1,) int32, w13 (E, N, H) and w2
    (E, H, I) of `weights`, and where the activation has biases b13 (E, N) and b2 (E, H), likewise; y (R, H) of `dtype`. N is 2 I, W1
    above W3, or I where nothing is gated. Quantised w13 and w2 are the elements, with w13_scales and w2_scales, and
    w13_zeros or w13_global where `formats.weights` says so; biases are of `dtype`. Rows from offsets[E] on belong to no expert: y is
    undefined there."""

    rows: int  # most rows
    hidden: int
    intermediate: int
    experts: int
    dtype: str  # format of activations and results
    packed: str  # format of the packed rows
    weights: str  # format of the experts' weights, of `formats` or `formats.weights`
    padded: bool = False  # every expert has rows / experts rows; else its rows are offsets[e] to offsets[e + 1]
    activation: str = "swiglu"  # a name that `activation_of` knows
    align: int = 1  # each expert's rows begin at a multiple of this and are followed by padding up to the next
    ranks: int = 1  # expert-parallel ranks that share the rows: on average these experts have rows / ranks

    @property
    def mean_rows(self) -> float:
        """Rows that these experts have together on average, which tiles are chosen by."""
        return self.rows / self.ranks

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
        """Whether one half of the first GEMM's results is a gate for the other half."""
        return activation_of(self.activation).gated

    @property
    def biased(self) -> bool:
        """Whether both GEMMs have biases."""
        return activation_of(self.activation).biased


# Ranks: what takes quantised weights, which no other takes, before what takes plain ones; then as measured. Without a rank: `torch_bmm`,
# which pads every expert, and what dequantises in every call.
IMPLEMENTATIONS = (
    Candidate("torch_loop", "torch_experts:loop", rank=15, waits=True),
    Candidate("torch_bmm", "torch_experts:bmm", layer={"layout": "padded"}),
    Candidate("torch_grouped_mm", "torch_experts:grouped_mm", rank=13),
    Candidate("torch_gather_loop", "torch_experts:gather_loop", rank=14, waits=True, gathers=True),
    Candidate("dequant", "dequant", rank=6, quantised="weights"),
    Candidate("dequant_uncached", "dequant", options={"cached": False}, quantised="weights"),
    # On a CPU waiting costs nothing, and only experts that have rows are dequantised.
    Candidate("dequant_loop", "dequant:loop", rank=5, waits=True, quantised="weights"),
    Candidate(
        "dequant_cute",
        "dequant_cute",
        requires=("nvidia", "triton", "cutlass"),
        rank=3,
        quantised="weights",
        layer={"name": "cute_dequant"},
    ),
    Candidate(
        "scaled_grouped_mm",
        "torch_experts:scaled_grouped_mm",
        requires=("gpu",),
        declares=("rounded_inner",),
        rank=4,
        quantised="rows",
    ),
    Candidate("triton", "triton_experts", requires=("gpu", "triton"), rank=11),
    Candidate("triton_gather", "triton_experts:gather", requires=("gpu", "triton"), rank=10, gathers=True),
    Candidate("cute", "cute_experts", requires=("nvidia", "cutlass"), rank=7),
    Candidate("cute_gather", "cute_experts:gather", requires=("nvidia", "cutlass"), rank=8, gathers=True),
    Candidate("cute_training", "cute_training", requires=("nvidia", "cutlass"), rank=1, trains=True),
    Candidate("cute_quantised", "cute_quantised", requires=("nvidia", "cutlass"), rank=1, quantised="weights"),
    Candidate(
        "cute_fp8",
        "cute_fp8",
        requires=("nvidia", "cutlass"),
        declares=("rounded_inner",),
        rank=2,
        quantised="rows",
    ),
)
