"""Quantised weights: what the parts are by the contract of `formats.weights`, their bytes, and the error that is promised."""

import pytest
import torch
from torch import Tensor

from moe_routing_kernels.formats import FORMATS, ROW, quantisation
from moe_routing_kernels.formats.groups import pack, unpack
from moe_routing_kernels.formats.quantisation import dequantise, quantise
from moe_routing_kernels.formats.weights import NAMES, WEIGHTS, WeightFormat, bits

SIZES = [(130, 300), (8, 128), (3, 20), (1, 4)]  # N, K: shorter last groups and blocks, whole ones, less than one
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def drawn(rows: int, columns: int, experts: int = 2) -> Tensor:
    torch.manual_seed(17)
    w = torch.randn(experts, rows, columns) * columns**-0.5
    w[0, 0] = 0
    w[-1, -1] = w[-1, -1].abs() + 0.5  # a group whose range is from 0 up
    return w


def back(parts: dict[str, Tensor], form: WeightFormat, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full_like(like, torch.nan, dtype=dtype)
    dequantise(parts, form, out)
    return out


def by_hand(parts: dict[str, Tensor], form: WeightFormat, shape: torch.Size) -> Tensor:
    """The weights in float64, element by element as the contract says it."""
    found = torch.empty(shape, dtype=torch.float64)
    each = 8 // form.bits
    group = shape[2] if form.group == ROW else form.group
    for e, n, k in torch.cartesian_prod(*(torch.arange(size) for size in shape)).tolist():
        where = (e, n // form.rows, k // group)
        stored, scale = parts["elements"][e, n, k // each], parts["scales"][where].double()
        if form.global_scale:
            scale = (parts["scales"][where].float() * parts["global"][e]).double()
        code = (int(stored) >> (k % each * form.bits)) % 2**form.bits if stored.dtype == torch.uint8 else 0
        if form.codec == "integers":
            zero = int(parts["zeros"][where]) if form.zero_points else 2 ** (form.bits - 1)
            found[e, n, k] = (code - zero) * scale
        elif form.codec == "float4":
            found[e, n, k] = E2M1[code].double() * scale
        else:
            found[e, n, k] = stored.double() * scale
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("form", WEIGHTS.values(), ids=list(WEIGHTS))
def test_parts_mean_what_the_contract_says(form, dtype):
    """Rounded once to what is asked for; of one expert as of all."""
    w = drawn(2, 132)
    parts = quantise(w, form, dtype)
    want, torch_dtype = by_hand(parts, form, w.shape), FORMATS[dtype].torch_dtype
    assert torch.equal(back(parts, form, w, torch.float64), want)
    assert torch.equal(back(parts, form, w, torch_dtype), want.to(torch_dtype))
    second = {name: part[1] for name, part in parts.items()}
    assert torch.equal(back(second, form, w[1], torch.float64), want[1])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("form", WEIGHTS.values(), ids=list(WEIGHTS))
def test_layout_bytes_and_error(form, dtype):
    for rows, columns in SIZES:
        check_layout_bytes_and_error(rows, columns, form, dtype)


def check_layout_bytes_and_error(rows, columns, form, dtype):
    w = drawn(rows, columns)
    parts = quantise(w, form, dtype)
    own = parts["scales"].dtype
    assert str(own) == f"torch.{form.scale or FORMATS[dtype].element}"
    assert parts["scales"].shape == (2, *form.scale_shape(rows, columns))
    assert ("zeros" in parts, "global" in parts) == (form.zero_points, form.global_scale)
    assert str(parts["elements"].dtype) == f"torch.{form.element}"
    assert sum(part.nbytes for part in parts.values()) == 2 * form.bytes_of(rows, columns, dtype)
    got, size, tall = back(parts, form, w), form.group_of(columns), form.rows
    tiles, errors = (
        torch.nn.functional.pad(one, (0, -columns % size, 0, -rows % tall))
        .unflatten(2, (-1, size))
        .unflatten(1, (-1, tall))
        for one in (w, (got - w).abs())
    )  # a tile's range has zero in it, so that zeros beyond the edges change none
    low, high = tiles.amin((2, 4)).clamp(max=0), tiles.amax((2, 4)).clamp(min=0)
    span = high - low if form.zero_points else 2 * torch.maximum(high, -low)
    assert span.shape == (2, *form.scale_shape(rows, columns))
    assert (errors.amax((2, 4)) <= form.error_bound(dtype) * (1 + 1e-5) * span).all()
    assert not got[0, 0].any() or tall > 1


@pytest.mark.parametrize("name", ["int8_g32", "int4z_g32", "int2_row", "e4m3_row", "e5m2_g128", "mxfp4", "nvfp4"])
def test_the_bound_is_nearly_reached(name):
    """A bound that is twice as large as it has to be would let a wrong codec pass."""
    form = WEIGHTS[name]
    w = drawn(64, 512)[1:, :-1]
    error = (back(quantise(w, form, "fp32"), form, w) - w).abs()
    span = torch.stack(
        [
            part.max() - part.min() if form.zero_points else 2 * part.abs().max()
            for part in w[0].split(form.group_of(512), 1)
        ]
    )
    assert error.max() > 0.5 * form.error_bound("fp32") * span.min()


@pytest.mark.parametrize("name", ["int8_g32", "int4z_g64", "int2_row", "e4m3_g128", "e5m2_row"])
def test_weights_too_small_for_scales_of_fp16_are_off_by_half_of_its_least_number(name):
    form, w = WEIGHTS[name], drawn(4, 64)[:1] * 1e-6
    error = (back(quantise(w, form, "fp16"), form, w) - w).abs().max()
    assert error <= 2.0**-14 / 2 * (1 if form.codec == "integers" else 2**-2)


def test_weights_of_float64_are_quantised_in_it():
    """What is just above the middle of two codes, and in the middle in float32, takes the upper one."""
    for dtype, code in ((torch.float64, 129), (torch.float32, 128)):
        w = torch.tensor([127.5, 0.5 + 1e-12], dtype=torch.float64).to(dtype)
        assert quantise(w[None, None], WEIGHTS["int8_row"], "fp32")["elements"].flatten().tolist() == [255, code]


def test_values_of_e2m1_and_their_ties():
    """Each number as itself, a tie to the even code, what is beyond 6 as 6."""
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9])
    want = torch.tensor([0, 1, 1, 2, 2, 4, 4, 6.0])
    row = torch.cat([E2M1, x, -x])[None, None]
    form = WEIGHTS["mxfp4"]
    parts = quantise(row, form, "bf16")
    assert parts["scales"].view(torch.uint8).tolist() == [[[127]]]
    assert torch.equal(back(parts, form, row)[0, 0], torch.cat([E2M1, want, -want]))


def test_scales_of_mxfp4_end_at_the_least_of_their_format():
    """2 ** -127, which weights of float32 can be smaller than."""
    parts = quantise(torch.full((1, 1, 32), 1e-42), WEIGHTS["mxfp4"], "fp32")
    assert parts["scales"].view(torch.uint8).item() == 0 and not parts["elements"].any()


def test_scales_of_nvfp4_reach_the_end_of_their_format():
    w = drawn(8, 64)
    parts = quantise(w, WEIGHTS["nvfp4"], "bf16")
    assert (parts["scales"].float().flatten(1).amax(1) == 448).all() and parts["global"].dtype == torch.float32
    assert torch.allclose(parts["global"] * 448 * 6, w.abs().amax((1, 2)))


@pytest.mark.parametrize("width", [8, 4, 2])
def test_the_first_code_is_in_the_low_bits(width):
    codes = (torch.arange(16).view(1, 2, 8) % 2**width).to(torch.uint8)
    packed, out = pack(codes, width), torch.empty(1, 2, 8)
    assert int(packed[0, 0, 0]) == sum(int(codes[0, 0, i]) << (width * i) for i in range(8 // width))
    unpack(packed, width, out)
    assert torch.equal(out, codes.float())


def test_names_widths_and_what_packs():
    assert NAMES[:3] == ("bf16", "fp16", "fp32") and len(WEIGHTS) == len(NAMES) - 3
    assert [bits(name) for name in ("int2z_row", "mxfp4", "e5m2_row", "fp8_row", "fp32")] == [2, 4, 8, 8, 32]
    assert not WEIGHTS["int2_g32"].packs(66) and WEIGHTS["int2_g32"].packs(68) and WEIGHTS["int8_row"].packs(7)
    with pytest.raises(AssertionError, match="packs no rows of 3"):
        quantise(torch.ones(1, 2, 3), WEIGHTS["int4_row"], "bf16")


def test_scales_of_mxfp4_bring_the_largest_to_four_or_more():
    """Powers of two on both sides of 1, to the ends of the format."""
    amax = torch.tensor([3.9, 4.0, 7.9, 8.0, 1000.0, 2.0**-120, 2.0**127])
    found = quantisation._power_of_two(amax).float()
    assert found.tolist() == [0.5, 1.0, 1.0, 2.0, 128.0, 2.0**-122, 2.0**125]
