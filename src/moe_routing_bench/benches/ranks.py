"""Benches over several ranks: how a batch lies on them, their operands by name, and the bytes that they send.

Tokens of a batch are split evenly among the ranks, and so are the experts, both in order. An operand of a rank is a tensor of its own,
`x@0` and `x@1` for the operand `x` of two ranks. A rank is given its own tensors alone, under the names of the bench's table. What others
have reaches it by communication.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.grid.cell import Cell

_SAME = ("bias",)  # operands that all ranks have alike, not a part each


@dataclass(frozen=True)
class Exchange:
    """Sizes of rows that travel between tokens and experts: on each rank x (T_r, H) of `dtype` and topk_ids (T_r, k), and up to `rows` rows of
    its experts."""

    tokens: int  # of all ranks
    hidden: int
    experts: int  # of all ranks
    top_k: int
    ranks: int
    dtype: str

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    @property
    def rows(self) -> int:
        """The most rows that the experts of a rank may have."""
        return self.tokens * min(self.top_k, self.local)

    @property
    def shares(self) -> list[int]:
        """Tokens of each rank."""
        return shares(self.tokens, self.ranks)


def exchange(cell: Cell) -> Exchange:
    """The sizes of a cell."""
    return Exchange(cell.tokens, cell.hidden, cell.experts, cell.top_k, cell.ranks, cell.dtype)


def shares(tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank: they differ by one at most, and the first ranks have fewer. A rank may have none."""
    return [tokens * (rank + 1) // ranks - tokens * rank // ranks for rank in range(ranks)]


def by_rank(name: str, parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """The operand of each rank, by its name."""
    return {f"{name}@{rank}": part for rank, part in enumerate(parts)}


def parts(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """An operand of all ranks, in their order."""
    return [tensor for full, tensor in tensors.items() if full.rpartition("@")[0] == name]


def split(tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Operands of a whole batch or of all experts, cut into those of ranks that have so many rows each."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found |= by_rank(name, [tensor] * len(sizes) if name in _SAME else tensor.split(list(sizes)))
    return found


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Operands of all ranks, put together again to those of the whole batch and of all experts."""
    names = dict.fromkeys(full.rpartition("@")[0] for full in tensors)
    return {name: tensors[f"{name}@0"] if name in _SAME else torch.cat(parts(tensors, name)) for name in names}


def devices(cell: Cell, device: str) -> int:
    """How many devices share the work of a call: ranks have a GPU each, and a CPU together."""
    return 1 if device == "cpu" else cell.get("ranks") or 1


def is_of(name: str, rank: int) -> bool:
    """Whether a tensor of this name is of this rank."""
    return name.endswith(f"@{rank}")


def of_rank(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The operands of a rank, by the names of the bench's table."""
    return {name.rpartition("@")[0]: tensor for name, tensor in tensors.items() if is_of(name, rank)}


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Assignments (n,) of ids (T, k) by expert and, of each, in the order of the batch, and counts (experts,). Ids outside take no row."""
    flat = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten()
    counts = torch.bincount(flat, minlength=experts + 1)
    return flat.argsort(stable=True)[: len(flat) - int(counts[-1])], counts[:-1]


def goes(ids: Tensor, ranks: int, local: int) -> Tensor:
    """How many rows each token has for each rank: (T, ranks) int64 of ids (T, k)."""
    sent = torch.zeros(len(ids), ranks + 1, dtype=torch.long, device=ids.device)
    to = torch.where((ids >= 0) & (ids < ranks * local), ids.long() // local, ranks)
    return sent.scatter_add_(1, to, torch.ones_like(to))[:, :ranks]


def row_traffic(ids: Sequence[Tensor], local: int, row_bytes: int, out: int = 1, back: int = 0) -> dict[str, list[int]]:
    """Row fields, a number per rank: tokens that it has, rows of its experts, and bytes of rows that it sends, counted in three ways.

    `rank_all_bytes` are of a row per assignment, those for itself included; `rank_wire_bytes` of those for other ranks; and
    `rank_deduplicated_bytes` of a row per token and other rank. Rows go `out` to their experts so many times, and `back` so many times.
    """
    ranks = len(ids)
    sent = [goes(each, ranks, local) for each in ids]
    assigned = torch.stack([each.sum(0) for each in sent]).cpu()  # of each rank, to each rank
    others = 1 - torch.eye(ranks, dtype=torch.long)
    once = torch.stack([(each > 0).sum(0) for each in sent]).cpu() * others
    ways = {"rank_all_bytes": assigned, "rank_wire_bytes": assigned * others, "rank_deduplicated_bytes": once}
    fields = {"rank_tokens": [len(each) for each in ids], "rank_rows": assigned.sum(0).tolist()}
    return fields | {name: ((out * way + back * way.T).sum(1) * row_bytes).tolist() for name, way in ways.items()}
