"""Operands of a bench over several ranks: tensors of one rank each, `x@0` and `x@1` for the operand `x` of two ranks.

A rank is given its own tensors alone, under the names of the bench's table. What others have reaches it by communication.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor


def shares(tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank: they differ by one at most, and the first ranks have fewer. A rank may have none."""
    return [tokens * (rank + 1) // ranks - tokens * rank // ranks for rank in range(ranks)]


def by_rank(name: str, parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """The operand of each rank, by its name."""
    return {f"{name}@{rank}": part for rank, part in enumerate(parts)}


def parts(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """An operand of all ranks, in their order."""
    return [tensor for full, tensor in tensors.items() if full.rpartition("@")[0] == name]


def is_of(name: str, rank: int) -> bool:
    """Whether a tensor of this name is of this rank."""
    return name.endswith(f"@{rank}")


def of_rank(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The operands of a rank, by the names of the bench's table."""
    return {name.rpartition("@")[0]: tensor for name, tensor in tensors.items() if is_of(name, rank)}
