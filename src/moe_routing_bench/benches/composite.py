"""Operations made of others: `routing` and `layer` run the implementations of gate, permute, pack and combine in turn.

Buffers between the stages are allocated once, at the row limit of the layout, so that nothing waits for the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import nvtx
import torch
from torch import Tensor

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.grid import Cell

Experts = Callable[[Cell, dict[str, Tensor], Tensor], Callable[[], None]]


@dataclass(frozen=True)
class Staged:
    """A call made of named stages, each under an NVTX range; the timer measures the whole and every stage."""

    stages: tuple[tuple[str, Callable[[], None]], ...]

    def __call__(self) -> None:
        """Run all stages in order."""
        for name, stage in self.stages:
            with nvtx.annotate(name):
                stage()


def stage_cells(cell: Cell, layout: str) -> dict[str, Cell]:
    """The cells that the stages see: scores are float32, rows lie in the composite's own layout."""
    inner = replace(cell, layout=layout)
    return {"gate": replace(inner, dtype="fp32"), "permute": inner, "pack": inner, "combine": inner}


def supports(cell: Cell, layout: str, **chosen: str) -> str | None:
    """The first stage's reason why it cannot run, or None."""
    if layout == "padded" and cell.capacity is None:
        return "padded rows need a capacity factor"
    for bench, stage in stage_cells(cell, layout).items():
        module = BENCHES[bench].load(chosen.get(bench, "torch"))
        options = BENCHES[bench][chosen.get(bench, "torch")].options
        reason = module.supports(stage, **options) if hasattr(module, "supports") else None
        if reason:
            return f"{bench}: {reason}"
    return None


def prepare(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    layout: str,
    experts: Experts | None,
    **chosen: str,
) -> Staged:
    """Bind the stages. `chosen` names the implementation of each stage (default torch); `experts` None is the identity.

    Inputs: logits (T, E) float32, bias (E,) where the rule has one, x (T, H). Output: combined (T, H).
    """
    x, cells = inputs["x"], stage_cells(cell, layout)
    tokens, top_k, rows = cell.tokens or 0, cell.top_k or 0, cells["pack"].row_limit
    ints = {"topk_ids": (tokens, top_k), "counts": (cell.experts or 0,), "offsets": ((cell.experts or 0) + 1,), "order": (rows,), "inverse": (tokens, top_k)}  # fmt: skip
    held = {name: torch.empty(shape, dtype=torch.int32, device=x.device) for name, shape in ints.items()}
    held["topk_weights"] = torch.empty(tokens, top_k, device=x.device)
    held["packed"] = x.new_empty(rows, cell.hidden or 0)
    held["y"] = held["packed"] if experts is None else torch.empty_like(held["packed"])

    def bound(bench: str, ins: dict[str, Tensor], outs: dict[str, Tensor]) -> Callable[[], None]:
        name = chosen.get(bench, "torch")
        return BENCHES[bench].load(name).prepare(cells[bench], ins, outs, **BENCHES[bench][name].options)

    def of(*names: str) -> dict[str, Tensor]:
        return {name: held[name] for name in names}

    scores = {name: inputs[name] for name in ("logits", "bias") if name in inputs}
    stages = [
        ("router", bound("gate", scores, of("topk_ids", "topk_weights"))),
        ("permute", bound("permute", of("topk_ids"), of("counts", "offsets", "order", "inverse"))),
        ("pack", bound("pack", {"x": x, **of("order", "inverse")}, of("packed"))),
    ]
    if experts is not None:
        stages.append(("experts", experts(cells["pack"], inputs | held, held["y"])))
    given = {"y": held["y"], "inverse": held["inverse"], "weights": held["topk_weights"]}
    stages.append(("combine", bound("combine", given, outputs)))
    return Staged(tuple(stages))
