"""What `experts` computes, on what, and when an answer is right.

Inputs: packed (R, H) in the cell's packed format, with scales where that has them, N(0, 1) before it is quantised, padding rows zero;
offsets (E + 1,) int32, the first row of every expert; w13 (E, N, H) and w2 (E, H, I) in the cell's weight format, N(0, 1) over the
square root of the fan-in and shared by all input sets, as are the biases b13 (E, N) and b2 (E, H) of activations that
have them, N(0, 16), so that a tenth of gates and ups is clamped. Where an activation clamps and has no biases, w13 is larger by
`spread`, for the same share. Weights of a quantised format are drawn in that of the activations, which
biases keep, and are then its parts (`formats.weights`): elements, called w13 and w2, w13_scales, w2_scales and so on. The
reference multiplies with what these stand for, so it has no error of the format in it. Output: y (R, H) of the activations' format, the expert of each row as
`moe_routing_kernels.experts` defines it. Padding rows of y are not looked at: nothing reads them.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, close, nbytes, tolerance
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_ids, generator, randn
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.formats import FORMATS, Format, dequantise, quantisation, quantise
from moe_routing_kernels.formats.weights import WEIGHTS, WeightFormat, named

_PRODUCTS, _BIASES = ("w13", "w2"), ("b13", "b2")  # of all experts, biases where there are any
_OF_WEIGHTS = 1 << 31  # seeds of cells and nonces of `draw.again` are below it, and a CPU's generator takes 32 bits
_LIMIT_OVER_SPREAD = 1.7  # beyond which, in size, a tenth of N(0, 1) is; that of swiglu_oai and its biases
_WIDEST = 64.0
_WEIGHTS = (*_PRODUCTS, *_BIASES, *(part for name in _PRODUCTS for part in named(name).values()))


def problem(cell: Cell) -> Experts:
    """The sizes and formats of a cell."""
    rows, formats = row_layout(cell), (cell.dtype, packed_format(cell).name, weight_format(cell).name)
    sizes = (rows.rows, cell.hidden, cell.intermediate, rows.experts)
    return Experts(*sizes, *formats, rows.padded, cell.activation, rows.align, rows.ranks)


def packed_format(cell: Cell) -> Format:
    """The format of the packed rows: that of the activations where the bench does not read another."""
    return FORMATS[cell.get("packed") or cell.dtype]


def weight_format(cell: Cell) -> Format | WeightFormat:
    """The format of the experts' weights, likewise."""
    name = cell.get("weights") or cell.dtype
    return WEIGHTS.get(name) or FORMATS[name]


def plain_weights(cell: Cell) -> str:
    """The format of biases and shared experts, which are never quantised: that of the weights, or else of the activations."""
    form = weight_format(cell)
    return cell.dtype if isinstance(form, WeightFormat) else form.name


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    rng, layout = generator(seed, device), row_layout(cell)
    ids = draw_ids(cell, rng).contiguous()
    known = row_map(layout, ids.cpu().numpy(), layout.rows)
    order = torch.from_numpy(known.order).to(device)
    rows = randn((layout.rows, cell.hidden), cell.dtype, rng).masked_fill_((order < 0)[:, None], 0)
    inputs = {"packed": rows}
    if (form := packed_format(cell)).quantised:
        elements, scales = quantise(rows, form)
        inputs = {"packed": elements, "scales": scales.view(form.scale_shape(*rows.shape))}
    known_tensors = {name: torch.from_numpy(getattr(known, name)).to(device) for name in ("offsets", "inverse")}
    return inputs | known_tensors | {"topk_ids": ids, "order": order}


def shared(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """The experts' weights, drawn once per cell, by a seed that no tokens have: theirs would make rows of x rows of w13."""
    rng, hidden, inner = generator(seed | _OF_WEIGHTS, device), cell.hidden, cell.intermediate
    weights, wanted = plain_weights(cell), problem(cell)
    wide = 2 * inner if wanted.gated else inner
    drawn = {
        "w13": randn((wanted.experts, wide, hidden), weights, rng).mul_(spread(cell) * hidden**-0.5),
        "w2": randn((wanted.experts, hidden, inner), weights, rng).mul_(inner**-0.5),
    }
    if wanted.quantised_weights:
        drawn = {n: part for name, one in drawn.items() for n, part in quantised(cell, name, one).items()}
    if wanted.biased:
        drawn |= {
            "b13": randn((wanted.experts, wide), weights, rng).mul_(4),
            "b2": randn((wanted.experts, hidden), weights, rng).mul_(4),
        }
    return drawn


def spread(cell: Cell) -> float:
    """The standard deviation of the first product's sums, such that an activation with a limit and without biases clamps some.

    It ends where products of clamped values would overflow float16: a limit above 64 clamps fewer, or none.
    """
    known = activation_of(cell.activation)
    return 1.0 if known.limit is None or known.biased else min(known.limit, _WIDEST) / _LIMIT_OVER_SPREAD


def quantised(cell: Cell, name: str, w: Tensor) -> dict[str, Tensor]:
    """The parts of w (E, N, K) by their names beside `name`, that of the elements; w itself where the cell has plain weights."""
    if isinstance(weight_format(cell), Format):
        return {name: w}
    parts = quantisation.quantise(w, WEIGHTS[cell.weights], cell.dtype)
    return {named(name).get(part, name): one for part, one in parts.items()}


def dense(cell: Cell, inputs: dict[str, Tensor], name: str, expert: int, dtype: torch.dtype) -> Tensor:
    """w13 or w2 of one expert as numbers (N, K) of `dtype`, exact but for the last bits of products with float32 scales."""
    parts = {part: inputs[given][expert] for part, given in named(name).items() if given in inputs}
    if not parts:
        return inputs[name][expert].to(dtype)
    form, elements = WEIGHTS[cell.weights], inputs[name][expert]
    out = torch.empty((len(elements), elements.shape[1] * 8 // form.bits), dtype=dtype, device=elements.device)
    quantisation.dequantise({"elements": elements} | parts, form, out)
    return out


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    packed, dtype = inputs["packed"], FORMATS[cell.dtype].torch_dtype
    return {"y": torch.empty(packed.shape, dtype=dtype, device=packed.device)}


def apply(cell: Cell, x: Tensor, inputs: dict[str, Tensor], expert: int) -> Tensor:
    """One expert: x (n, H) -> (n, H) of the precision of x."""
    own = {name: inputs[name][expert].to(x.dtype) for name in _BIASES if name in inputs}
    w13, w2 = (dense(cell, inputs, name, expert, x.dtype) for name in _PRODUCTS)
    sums = x @ w13.T + own.get("b13", 0.0)
    known, gate, up = activation_of(cell.activation), sums[:, : cell.intermediate], sums[:, cell.intermediate :]
    if known.limit is not None:
        gate, up = gate.clamp(max=known.limit), up.clamp(-known.limit, known.limit)
    if known.value == "relu2":
        inner = gate.clamp(min=0) ** 2
    elif known.value == "gelu":
        inner = F.gelu(gate, approximate="tanh") * up
    else:
        inner = gate / (1 + (-known.alpha * gate).exp()) * (up + known.shift)
    return inner @ w2.T + own.get("b2", 0.0)


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expert by expert in float32 (float64 for float32 activations), TF32 off; rows of no expert are zero."""
    wide, form = torch.float64 if cell.dtype == "fp32" else torch.float32, packed_format(cell)
    packed = inputs["packed"]
    y = torch.zeros(packed.shape, dtype=wide, device=packed.device)
    bounds = inputs["offsets"].tolist()
    for expert, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end > first:
            rows = packed[first:end]
            x = dequantise(rows, inputs["scales"][first:end], form) if form.quantised else rows
            y[first:end] = apply(cell, x.to(wide), inputs, expert)
    return {"y": y}


# relu2: sums, twice as they are squared, the square, the down product. Others: gate and up, activation, product, the down product. Those
# of swiglu_oai besides: what the sigmoid is given and gives, and up + 1; the biases of gate, up and the down product.
_ROUNDINGS = {"sigmoid": 5, "gelu": 5, "relu2": 4}
_OAI_ROUNDINGS = 3


def roundings(cell: Cell) -> int:
    """Roundings in a row to the activations' format, for `swiglu` gate and up, activation, product and the down product; in
    float32 also those of the sums. Quantised weights may be rounded to it before each of both products."""
    dequantised = 2 if isinstance(weight_format(cell), WeightFormat) else 0
    sums = 2 * (cell.hidden + cell.intermediate) if cell.dtype == "fp32" else 0
    known = activation_of(cell.activation)
    return _ROUNDINGS[known.value] + _OAI_ROUNDINGS * (bool(known.shift) + known.biased) + dequantised + sums


def check(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    rounded_inner: bool = False,
) -> Check:
    """The rows in use, within the roundings of a plain implementation; `rounded_inner` says that what the second product is given
    is rounded to the packed rows' format."""
    used, limit = inputs["order"] >= 0, tolerance(cell.dtype, roundings(cell))
    if rounded_inner:
        limit = math.hypot(limit, tolerance(packed_format(cell).name))
    return close(outputs["y"][used], expected["y"][used], limit, "y")


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k); the operation has no weights per assignment."""
    return Assignment(inputs["topk_ids"], inverse=inputs["inverse"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Rows in use, and weights and biases of every expert that has one, read once; rows in use written once."""
    kept = inputs["inverse"] >= 0
    rows, active = int(kept.sum()), int(inputs["topk_ids"][kept].unique().numel())
    weights = weight_bytes(cell, inputs) * active
    read = rows * packed_format(cell).row_bytes(cell.hidden) + weights + nbytes(inputs["offsets"])
    return Cost(read, rows * FORMATS[cell.dtype].row_bytes(cell.hidden), products(cell, rows), rate=rate(cell))


def weight_bytes(cell: Cell, inputs: dict[str, Tensor]) -> int:
    """Bytes of one expert's weights and biases, with scales and zero points."""
    return sum(nbytes(inputs[name]) for name in _WEIGHTS if name in inputs) // problem(cell).experts


def rate(cell: Cell) -> int:
    """2 where rows and weights are both floats of 8 bits, which tensor cores multiply twice as fast as numbers of 16; else 1."""
    form = weight_format(cell)
    return 2 if packed_format(cell).bits == 8 and isinstance(form, WeightFormat) and form.codec == "float8" else 1


def products(cell: Cell, rows: int) -> tuple[tuple[int, int, int], ...]:
    """What `rows` rows are multiplied with, as if all were of one expert."""
    wide = (2 if problem(cell).gated else 1) * cell.intermediate
    return (rows, cell.hidden, wide), (rows, cell.intermediate, cell.hidden)
