"""A mailbox whose rows and sums travel as messages of gloo, for tests of what ranks with GPUs store into each other's memory."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor


class Messages:
    """Rows have places, rows that are not sent stay as they were, and ids are -1 where no row came."""

    def __init__(
        self,
        most: int,
        hidden: int,
        top_k: int,
        local: int,
        dtype: torch.dtype,
        copies: int = 1,
        stale: float = torch.nan,
    ) -> None:
        self.most, self.local, rows = most, local, dist.get_world_size() * most
        self._rows = torch.full((copies, rows, hidden), stale, dtype=dtype)
        self._ids = torch.full((copies, rows, top_k), 77, dtype=torch.int32)
        self._weights = torch.full((copies, rows, top_k), stale)
        self.calls: list[str] = []
        self._lay(0)

    def _lay(self, number: int) -> None:
        self.rows, self.ids, self.weights = self._rows[number], self._ids[number], self._weights[number]

    def numbered(self, number: int) -> "Messages":
        own = copy.copy(self)
        own._lay(number)
        return own

    def check(self, *layer: object) -> None:
        self.layer = layer

    def _to_all(self, tokens: Tensor, value: int) -> Tensor:
        """The rows of each rank's tokens, by place."""
        sent = tokens.new_full((dist.get_world_size(), self.most, tokens.shape[1]), value)
        sent[:, : len(tokens)] = tokens
        come = torch.empty_like(sent.flatten(0, 1))
        dist.all_to_all_single(come, sent.flatten(0, 1))
        return come

    @staticmethod
    def _ready(*tensors: Tensor | None) -> None:
        """What the kernels check, also of no rows: strides."""
        assert all(each is None or each.stride() == torch.empty(each.shape).stride() for each in tensors)

    def out(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("out")
        self._ready(x, ids, weights)
        here = self._to_all(ids, -1) - dist.get_rank() * self.local
        self.ids.copy_(torch.where((here >= 0) & (here < self.local), here, -1))
        came = (self.ids >= 0).any(1)
        self.rows[came] = self._to_all(x, 0)[came]
        self.weights[came] = self._to_all(weights, 0)[came]
        return self.rows, self.ids, self.weights

    def back(
        self,
        sums: Tensor,
        ids: Tensor,
        residual: Tensor | None = None,
        combined: Tensor | None = None,
        came: Tensor | None = None,
    ) -> Tensor:
        self.calls.append("back")
        self._ready(sums, ids, residual, combined, came)
        came = self.ids if came is None else came
        answers = torch.where((came >= 0).any(1, keepdim=True), sums, 0)
        come = torch.empty_like(answers)
        dist.all_to_all_single(come, answers)
        total = come.view(-1, self.most, sums.shape[1])[:, : len(ids)].float().sum(0)
        total = (total if residual is None else total + residual).to(sums.dtype)
        return total if combined is None else combined.copy_(total)

    def back_choices(self, values: Tensor, ids: Tensor, came: Tensor) -> Tensor:
        combined = self.back(values, ids, came=came)
        self.calls[-1] = "back_choices"
        return combined

    def read(self) -> None:
        self.calls.append("read")
