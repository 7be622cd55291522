"""What a training step is given: its bytes, its learning rate, and what is frozen; and how many steps there may be.

The bytes depend on the text, the seed and the step alone, so that every router sees the same bytes, and a resumed run goes
on as if nothing had happened.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.grid.run_spec import BYTES, Run
from moe_routing_bench.quality.language_model import IGNORED, TinyLM
from moe_routing_bench.quality.texts import Corpus, Tokens
from moe_routing_kernels.errors import bad

START = ord("\n")  # stands before the first byte of a text, so that this byte is predicted too


class Windows:
    """The tokens of several texts, cut into windows of `sequence` targets that cover every token once.

    No window reaches from one domain into another. The input of a target is the token before it.
    """

    def __init__(self, texts: Sequence[Tokens], sequence: int, device: str, size: int | None = None) -> None:
        """Put all tokens on the device; `size` is the number of their bytes, where tokens are not bytes."""
        self.sequence, self.first_bytes = sequence, torch.arange(BYTES, device=device)
        padded, starts, lengths, domains, offset = [], [], [], [], 0
        for domain, text in enumerate(texts):
            first = np.arange(0, len(text), sequence)
            starts.append(first + offset)
            lengths.append(np.minimum(sequence, len(text) - first))
            domains.append(np.full(len(first), domain))
            # int32: torch indexes no tensor of uint16
            padded += [np.array([START], np.uint8), text if text.dtype == np.uint8 else text.astype(np.int32)]
            offset += 1 + len(text)
        padded.append(np.zeros(sequence, np.uint8))  # the last window may reach beyond the end
        self.tokens = torch.from_numpy(np.concatenate(padded)).to(device)
        self.starts, self.lengths, self.domains = (np.concatenate(parts) for parts in (starts, lengths, domains))
        self.total = int(self.lengths.sum())
        self.size = self.total if size is None else size

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.starts)

    def take(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, S) int64 of windows; targets after the end of a text are `IGNORED`."""
        device, steps = self.tokens.device, torch.arange(self.sequence, device=self.tokens.device)
        start, length = (
            torch.from_numpy(part[numbers]).to(device, non_blocking=True)[:, None]
            for part in (self.starts, self.lengths)
        )
        first = start + steps
        targets = torch.where(steps < length, self.tokens[first + 1].long(), IGNORED)
        return self.tokens[first].long(), targets

    def batch(self, step: int, batch: int, seed: int) -> np.ndarray:
        """The windows of a step, counted from 0; each epoch takes all windows in a random order of its own."""
        wanted = np.arange(step * batch, (step + 1) * batch)
        orders = {epoch: self._order(seed, epoch) for epoch in np.unique(wanted // len(self)).tolist()}
        return np.array([orders[number // len(self)][number % len(self)] for number in wanted.tolist()])

    @functools.lru_cache(maxsize=2)  # noqa: B019  # the windows live as long as the run
    def _order(self, seed: int, epoch: int) -> np.ndarray:
        """The order of all windows in an epoch."""
        return np.random.default_rng((seed, epoch)).permutation(len(self))

    def mixed(self, batch: int) -> Iterator[np.ndarray]:
        """All windows once, in an order of chance that is always the same; the last batch may be smaller.

        In the order of the texts a batch would be of one domain, and what rules drop or see of a batch would be of that.
        """
        return self._cut(np.random.default_rng(0).permutation(len(self)), batch)

    def by_domain(self, batch: int) -> Iterator[np.ndarray]:
        """All windows once, in the order of the texts: a batch is of one domain, or of two that follow one another."""
        return self._cut(np.arange(len(self)), batch)

    def _cut(self, order: np.ndarray, batch: int) -> Iterator[np.ndarray]:
        for first in range(0, len(self), batch):
            yield order[first : first + batch]


def windows(corpora: Sequence[Corpus], sequence: int, device: str) -> tuple[Windows, Windows]:
    """Training and validation windows; those of validation know the first byte of each token."""
    train = Windows([corpus.train for corpus in corpora], sequence, device, sum(c.train_bytes for c in corpora))
    size = sum(corpus.validation_bytes for corpus in corpora)
    validation = Windows([corpus.validation for corpus in corpora], sequence, device, size)
    validation.first_bytes = torch.from_numpy(corpora[0].vocabulary.first).to(device)
    return train, validation


def frequencies(corpora: Sequence[Corpus], vocabulary: int) -> list[int]:
    """How often each token of the vocabulary occurs in the training texts."""
    return np.sum([np.bincount(corpus.train, minlength=vocabulary) for corpus in corpora], axis=0).tolist()


FLOOR = 0.1  # the share of the learning rate that is left where the cosine ends
EXPERTS_FIRST = 0.5  # the share of the steps after which the experts are frozen and the router learns


def learning_rate(run: Run, step: int) -> float:
    """The learning rate of a step: a linear warm-up, then a cosine from `lr` to a tenth of it."""
    assert run.lr is not None
    if step < run.warmup:
        return run.lr * (step + 1) / run.warmup
    share = (step - run.warmup) / max(1, run.steps - run.warmup)
    return run.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


def frozen(run: Run, step: int) -> tuple[bool, bool]:
    """Whether the routers, and whether the experts, are frozen in a step.

    The modes are those that 2306.08586 compares: joint training of gate and experts with decoupled training. In
    `frozen_router` the routers stay as they start. In `experts_first` they do so in the first half of the steps, and
    the experts stay as they are in the second. Everything else always learns.
    """
    if run.train_mode == "experts_first":
        first = step < EXPERTS_FIRST * run.steps
        return first, not first
    return run.train_mode == "frozen_router", False


def freeze(model: TinyLM, routers: bool, experts: bool) -> None:
    """Say which parts of the MoE layers are frozen.

    Frozen routers route as in evaluation: no noise, losses or new state.
    """
    for layer in model.layers:
        layer.routers.train(not routers)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not (routers if name.startswith("routers.") else experts))


def check_epochs(run: Run, tokens: int) -> None:
    """Raise `UserError` when the run would see its text too often."""
    epochs = run.steps * run.tokens_per_step / tokens
    if epochs > run.max_epochs:
        most = int(run.max_epochs * tokens / run.tokens_per_step)
        allowed = f"at most {most}: {run.max_epochs:g} epochs of {tokens} tokens"
        raise bad("quality steps", run.steps, allowed, "add a corpus, or raise max_epochs")
