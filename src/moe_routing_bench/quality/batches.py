"""Which bytes a step trains on.

They depend on the text, the seed and the step alone, so that every router sees the same bytes, and a resumed run goes
on as if nothing had happened.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.quality.texts import Bytes, Corpus

START = ord("\n")  # stands before the first byte of a text, so that this byte is predicted too
IGNORED = -100  # target of padding


class Windows:
    """The bytes of several texts, cut into windows of `sequence` targets that cover every byte once.

    No window reaches from one domain into another. The input of a target is the byte before it.
    """

    def __init__(self, texts: Sequence[Bytes], sequence: int, device: str) -> None:
        """Put all bytes on the device."""
        self.sequence = sequence
        padded, starts, lengths, domains, offset = [], [], [], [], 0
        for domain, text in enumerate(texts):
            first = np.arange(0, len(text), sequence)
            starts.append(first + offset)
            lengths.append(np.minimum(sequence, len(text) - first))
            domains.append(np.full(len(first), domain))
            padded += [np.array([START], np.uint8), text]
            offset += 1 + len(text)
        padded.append(np.zeros(sequence, np.uint8))  # the last window may reach beyond the end
        self.bytes = torch.from_numpy(np.concatenate(padded)).to(device)
        self.starts, self.lengths, self.domains = (np.concatenate(one) for one in (starts, lengths, domains))
        self.total = int(self.lengths.sum())

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.starts)

    def take(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, S) int64 of windows; targets after the end of a text are `IGNORED`."""
        device, steps = self.bytes.device, torch.arange(self.sequence, device=self.bytes.device)
        start, length = (
            torch.from_numpy(one[numbers]).to(device, non_blocking=True)[:, None] for one in (self.starts, self.lengths)
        )
        found = start + steps
        targets = torch.where(steps < length, self.bytes[found + 1].long(), IGNORED)
        return self.bytes[found].long(), targets

    def batch(self, step: int, batch: int, seed: int) -> np.ndarray:
        """The windows of a step, counted from 0; each epoch takes all windows in a random order of its own."""
        wanted = np.arange(step * batch, (step + 1) * batch)
        epochs = np.unique(wanted // len(self))
        orders = {epoch: np.random.default_rng((seed, epoch)).permutation(len(self)) for epoch in epochs}
        return np.array([orders[one // len(self)][one % len(self)] for one in wanted])

    def mixed(self, batch: int) -> Iterator[np.ndarray]:
        """All windows once, in an order of chance that is always the same; the last batch may be smaller.

        In the order of the texts a batch would be of one domain, and what rules drop or see of a batch would be of that.
        """
        order = np.random.default_rng(0).permutation(len(self))
        for first in range(0, len(self), batch):
            yield order[first : first + batch]


def windows(corpora: Sequence[Corpus], sequence: int, device: str) -> tuple[Windows, Windows]:
    """Training and validation windows."""
    return (
        Windows([one.train for one in corpora], sequence, device),
        Windows([one.validation for one in corpora], sequence, device),
    )


def frequencies(corpora: Sequence[Corpus]) -> list[int]:
    """How often each of the 256 bytes occurs in the training texts."""
    return np.sum([np.bincount(one.train, minlength=256) for one in corpora], axis=0).tolist()
