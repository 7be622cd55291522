"""The table of number formats against torch's own numbers, and quantising rows by it."""

import math
from dataclasses import replace

import pytest
import torch

from moe_routing_kernels.formats import FORMATS, LEAST_AMAX, PLAIN, QUANTISED, dequantise, empty_rows, name_of, quantise


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_limits_are_those_of_the_elements(form):
    info = torch.finfo(form.torch_dtype)
    assert (form.bits, form.largest, form.least_normal) == (info.bits, info.max, info.smallest_normal)
    assert form.roundoff == info.eps / 2 and form.bytes == form.torch_dtype.itemsize
    assert form.quantised == (form.name in QUANTISED) == (form.name not in PLAIN)
    assert form.quantised or name_of(form.torch_dtype) == form.name


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("columns", [1, 128, 300])
def test_empty_rows_hold_what_row_bytes_says(form, columns):
    found = empty_rows(form, 5, columns, "cpu")
    assert sum(one.nbytes for one in found.values()) == 5 * form.row_bytes(columns)
    assert found["packed"].shape == (5, columns) and ("scales" in found) == form.quantised


@pytest.mark.parametrize("group", [-1, 1, 32, 48, 128, 1000])
@pytest.mark.parametrize("columns", [1, 48, 300])
def test_a_group_has_the_largest_element_and_an_error_of_half_a_step(group, columns):
    form = replace(FORMATS["fp8_block128"], group=group)
    torch.manual_seed(17)
    x = torch.randn(7, columns, dtype=torch.float64) * torch.logspace(-8, 8, 7)[:, None]
    x[2] = 0
    x[3] = LEAST_AMAX / 2
    elements, scales = quantise(x, form)
    size = columns if group == -1 else group
    assert scales.shape == (7, math.ceil(columns / size)) and scales.dtype == torch.float64
    for g, part in enumerate(elements.float().split(size, 1)):
        assert (part[[0, 1, 4, 5, 6]].abs().amax(1) == form.largest).all()
        assert (part[[2, 3]] == 0).all() and (scales[[2, 3], g] == 1).all()
    back = dequantise(elements, scales.float().view(form.scale_shape(7, columns)), form)
    wide = scales.repeat_interleave(size, 1)[:, :columns]
    assert ((back - x).abs() <= 1.001 * form.roundoff * torch.maximum(x.abs(), form.least_normal * wide) + 1e-30).all()
    assert quantise(x.bfloat16(), form)[1].dtype == torch.float32
