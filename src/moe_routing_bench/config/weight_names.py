"""Formats of weights by the names that checkpoints and serving engines have for them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_FORMATS: Mapping[str, tuple[str, ...]] = {
    "int4": ("int4_g128", "int4_g32", "int4z_g128"),
    "int8": ("int8_row", "int8_g128"),
    "int2": ("int2_g128",),
    "uint4": ("int4z_g128",),
    "w4a16": ("int4_g128", "int4z_g128"),
    "w8a16": ("int8_row", "int8_g128"),
    "w8a8": ("int8_row", "e4m3_row"),
    "awq": ("int4z_g128",),
    "gptq": ("int4_g128", "int4z_g128"),
    "fp8": ("e4m3_block128", "e4m3_row"),
    "fp8e4m3": ("e4m3_block128", "e4m3_row"),
    "fp8e5m2": ("e5m2_block128", "e5m2_row"),
    "e4m3": ("e4m3_block128", "e4m3_row"),
    "e5m2": ("e5m2_block128", "e5m2_row"),
    "fp4": ("mxfp4", "nvfp4"),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
}


def hint(value: Any, names: Sequence[str]) -> str:
    """The hint for a name that is none of `names` but that others have for formats among them; nothing for any other."""
    plain = re.sub(r"[^a-z0-9]", "", str(value)[:100].lower())
    plain = re.sub(r"^(?:torch)?float8", "fp8", plain).removesuffix("fn")
    found = [name for name in _FORMATS.get(plain, ()) if name in names]
    return f"write {' or '.join(found)}: the name says what shares a scale" if found else ""
