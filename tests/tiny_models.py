"""Models of the four families that bench `model` knows, small enough for a CPU: the published architectures with small numbers."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from moe_routing_bench.benches.model.published_models import ARCHITECTURES, Architecture
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Cell

SMALL = {
    "shared_expert_intermediate_size": 40,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
NAMES = tuple(name for name in ARCHITECTURES if name)


def tiny(name: str, layers: int = 3) -> Architecture:
    """The architecture of a preset with 4 heads, 96 tokens in its vocabulary, and small numbers wherever it has its own."""
    known = ARCHITECTURES[name]
    small = {option: SMALL.get(option, value) for option, value in known.options.items()}
    return replace(known, layers=layers, heads=4, vocabulary=96, options=small)


@contextmanager
def installed() -> Iterator[None]:
    """While it lasts, the bench knows the tiny models as ``tiny-<preset>``."""
    table = cast(MutableMapping[str | None, Architecture], ARCHITECTURES)
    added = {f"tiny-{name}": tiny(name) for name in NAMES}
    table.update(added)
    yield
    for name in added:
        del table[name]


def cell(name: str, **axes: Any) -> Cell:
    """A cell of the tiny model of a preset."""
    sizes = {"tokens": 24, "hidden": 32, "intermediate": 24, "experts": 6, "top_k": 2}
    return cell_of("model", **sizes | axes).but(model=f"tiny-{name}")
