"""The projection as one library matrix product with float32 output, then an implementation of `gate`: not fused."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.grid import Cell


def _stage(cell: Cell) -> Cell:
    """The cell that the gate sees: scores are float32."""
    return replace(cell, bench="gate", dtype="fp32")


def supports(cell: Cell, *, gate: str) -> str | None:
    """Why the gate cannot run this cell, or None."""
    module = BENCHES["gate"].load(gate)
    return module.supports(_stage(cell)) if hasattr(module, "supports") else None


def precompile(cell: Cell, arch: str, *, gate: str) -> None:
    """Put the gate's kernel into the cache; needs no GPU."""
    BENCHES["gate"].load(gate).precompile(_stage(cell), arch, **BENCHES["gate"][gate].options)


def prepare(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, gate: str) -> Callable[[], None]:
    """Bind x (T, H), router_weight (E, H) and the selection bias; the call writes topk_ids and topk_weights."""
    x, transposed = inputs["x"], inputs["router_weight"].T
    scores = {name: inputs[name] for name in ("bias",) if name in inputs}
    logits = scores["logits"] = torch.empty(len(x), transposed.shape[1], dtype=torch.float32, device=x.device)
    choose = BENCHES["gate"].load(gate).prepare(_stage(cell), scores, outputs, **BENCHES["gate"][gate].options)

    def run() -> None:
        torch.mm(x, transposed, out_dtype=torch.float32, out=logits)
        choose()

    return run
