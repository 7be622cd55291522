"""permute: expert ids (T, k) to counts, offsets, order and inverse, the results that sorting tokens by expert needs."""

from dataclasses import dataclass

from moe_routing_kernels.implementations import Candidate


@dataclass(frozen=True)
class Permute:
    """Tensors: topk_ids (T, k) of `ids`; counts (E,), offsets (E + 1,), order (rows,), inverse (T, k), all int32."""

    tokens: int
    experts: int
    top_k: int
    rows: int  # length of `order`: the row limit of the layout
    limit: int | None = None  # most assignments that an expert keeps; None: all
    padded: bool = False  # every expert has exactly `limit` rows
    align: int = 1  # not padded: each expert's rows are rounded up to a multiple of this
    ids: str = "int32"  # or int64, as torch.topk has them
    outside: bool = False  # whether ids may be of no expert here, which take no row; kernels take such ids in any case


IMPLEMENTATIONS = (
    Candidate("torch", "torch_permute"),
    Candidate("torch_compile", "torch_permute", requires=("compiler",), options={"compiled": True}),
    Candidate("triton", "triton_permute", requires=("gpu", "triton"), rank=2),
    Candidate("cute", "cute_permute", requires=("nvidia", "cutlass"), rank=1),
)
