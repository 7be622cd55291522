"""Which cases of an exhaustive product stay in the lanes; the others are left to `make campaigns`."""

from collections.abc import Iterable
from typing import Any

import pytest

CAMPAIGN = (pytest.mark.slow, pytest.mark.campaign)


def sampled(values: Iterable[Any], kept: Iterable[Any], unpack: bool = False) -> list[Any]:
    """All values as parameters, of which those in `kept` run in the lanes; with `unpack` each is one value per name. KeyError of an unknown one."""
    every, names = list(values), list(kept)
    if missing := [name for name in names if name not in every]:
        raise KeyError(f"cases: got {missing}; allowed: {every}")
    return [pytest.param(*(one if unpack else (one,)), marks=() if one in names else CAMPAIGN) for one in every]
