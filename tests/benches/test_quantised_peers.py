"""Peers with quantised weights: what they are given after repacking, and what they return, with operators in plain torch in their place."""

import pytest
from test_library_peers import checked, loaded  # noqa: F401 (a fixture)

SIZES = {"tokens": 19, "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2}
MARLIN = (
    *(f"int{kind}_{group}" for kind in ("4", "4z", "8") for group in ("g32", "g64", "g128", "row")),
    *("e4m3_g128", "e4m3_row", "e4m3_block128", "mxfp4"),
)


def outcome(way: str, **axes):
    """As `checked`, with what peers take unless it is told."""
    return checked("experts", way, **(SIZES | {"dtype": "bf16", "packed": "bf16"} | axes))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("weights", MARLIN)
def test_marlin(weights: str) -> None:
    assert outcome("marlin", weights=weights).error is None


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    "axes",
    [
        {"activation": "swiglu_oai"},
        {"activation": "relu2"},
        {"dtype": "fp16", "packed": "fp16", "weights": "e4m3_g128"},
        {"capacity_factor": 0.5},
        {"layout": "block64"},
    ],
)
def test_marlin_with(axes: dict) -> None:
    """Biases, another activation, exponents of fp16, rows of no expert, and padding."""
    assert outcome("marlin", **({"weights": "int4z_row"} | axes)).error is None


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("way", "axes", "reason"),
    [
        ("marlin", {"weights": "int8z_g128"}, "no kernel for int8z_g128 beside bf16"),
        ("marlin", {"weights": "mxfp4", "dtype": "fp16", "packed": "fp16"}, "mxfp4 beside fp16"),
        ("marlin", {"weights": "bf16"}, "quantised weights"),
        ("marlin", {"weights": "int4_g128", "intermediate": 192}, "whole groups"),
        ("marlin", {"weights": "int4_g32", "intermediate": 96}, "one of 64"),
    ],
)
def test_what_cannot_run_says_why(way: str, axes: dict, reason: str) -> None:
    assert reason in outcome(way, **axes)
