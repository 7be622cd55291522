"""Bandwidth ceilings of a mix of reads and writes, by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from moe_routing_bench.measure import completion

ROW = {"cold": True, "copy_gb_per_s": 4000.0, "read_gb_per_s": 5000.0, "write_gb_per_s": 3000.0, "gb_per_s": 2000.0}


@pytest.mark.parametrize(
    ("read", "written", "stream", "expected"),
    [
        (100, 0, None, 5000.0),  # weights that are read: above a copy
        (50, 50, None, 4000.0),
        (75, 25, None, 1 / (0.5 / 4000 + 0.5 / 5000)),
        (75, 25, 3900.0, 1 / (0.5 / 4000 + 0.5 / 5000)),  # a stream that is slower than the mix allows
        (75, 25, 4600.0, 4600.0),
        (75, 25, math.nan, 1 / (0.5 / 4000 + 0.5 / 5000)),
        (0, 100, None, 4000.0),
    ],
)
def test_the_ceiling_is_that_of_the_mix(read, written, stream, expected):
    row = ROW | {"read_bytes": read, "write_bytes": written, "stream_gb_per_s": stream}
    assert completion.mixed_gb_per_s(row) == pytest.approx(expected)
    assert completion.share_of_mixed(pd.Series(row)) == pytest.approx(2000 / expected)


def test_writes_that_are_faster_than_copies_have_a_ceiling_above_them():
    row = ROW | {"read_bytes": 25, "write_bytes": 75, "write_gb_per_s": 6000.0}
    assert completion.mixed_gb_per_s(row) == pytest.approx(1 / (0.5 / 4000 + 0.5 / 6000))


@pytest.mark.parametrize(
    ("read", "written", "expected"), [(75, 25, 1 / (0.5 / 4000 + 0.5 / 2000)), (50, 50, 4000.0), (100, 0, 2000.0)]
)
def test_a_copy_is_no_ceiling_of_what_mostly_reads(read, written, expected):
    """Where reads alone are slower than a copy, a mix of mostly reads is too."""
    row = ROW | {"read_bytes": read, "write_bytes": written, "read_gb_per_s": 2000.0}
    assert completion.mixed_gb_per_s(row) == pytest.approx(expected)
    row = ROW | {"read_bytes": written, "write_bytes": read, "write_gb_per_s": 2000.0}
    assert completion.mixed_gb_per_s(row) == 4000.0, "what mostly writes may be as fast as a copy"


@pytest.mark.parametrize("cold", [False, None, math.nan, np.bool_(False)])
def test_what_may_be_in_a_cache_has_none(cold):
    """And a CPU, where it is not known."""
    row = ROW | {"read_bytes": 1, "write_bytes": 1, "cold": cold}
    assert completion.mixed_gb_per_s(row) is None and math.isnan(completion.share_of_mixed(row))
