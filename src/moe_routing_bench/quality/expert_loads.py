"""What the routers of a model did to the bytes of a validation pass: loads, entropies and drops."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.quality.language_model import TinyLM
from moe_routing_bench.quality.moe_layer import Seen
from moe_routing_bench.quality.token_dispatch import capacity, ranks

# at which drops are counted, whatever the run trains with
CAPACITY_FACTORS = (1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
BYTE_CLASSES = ("lower", "upper", "digit", "space", "newline", "punctuation", "other")


def byte_classes() -> Tensor:
    """The index in `BYTE_CLASSES` of each of the 256 bytes, int64."""

    def index(byte: int) -> int:
        character = chr(byte)
        if byte >= 128:
            return 6
        tests = (
            character.islower(),
            character.isupper(),
            character.isdigit(),
            character in " \t",
            character in "\n\r",
            character.isprintable(),
        )
        return next((number for number, fits in enumerate(tests) if fits), 6)

    return torch.tensor([index(byte) for byte in range(256)])


@dataclass
class Loads:
    """Sums over the bytes of a validation pass, for one router: float64 on the device."""

    by_domain: Tensor  # (domains, E) choices
    by_class: Tensor  # (classes, E) choices
    entropy: Tensor  # nats
    dropped: Tensor  # choices over the capacity
    lost: Tensor  # tokens all of whose choices were dropped
    chosen: Tensor  # tokens with at least one choice
    by_token: Tensor  # (vocabulary, E) choices
    over: Tensor  # (factors,) choices over the capacity at each of `CAPACITY_FACTORS`, by position

    @staticmethod
    def empty(domains: int, experts: int, device: str, vocabulary: int = 256) -> "Loads":
        """All sums are zero."""
        sizes = (
            (domains, experts),
            (len(BYTE_CLASSES), experts),
            (),
            (),
            (),
            (),
            (vocabulary, experts),
            (len(CAPACITY_FACTORS),),
        )
        return Loads(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))

    def add(
        self, seen: Seen, top_k: int | None, valid_T: Tensor, domain_T: Tensor, class_T: Tensor, token_T: Tensor
    ) -> None:
        """Add a batch; `valid_T` bool is false for padding.

        `top_k` is the number of choices per token that a capacity counts on. Where it is None, drops by factor are not
        counted.
        """
        experts = self.by_domain.shape[1]
        scores = seen.scores_TE.double() * valid_T[:, None]
        self.entropy += torch.special.entr(scores).sum()
        if seen.ids_TK is None or seen.kept_TK is None:
            choices = scores  # soft routing: the share of its weight that a token gives each expert
        else:
            wanted = (seen.ids_TK >= 0) & (seen.ids_TK < experts) & valid_T[:, None]
            dropped = wanted & ~seen.kept_TK
            self.dropped += dropped.sum()
            self.lost += (wanted.any(1) & (dropped == wanted).all(1)).sum()
            self.chosen += wanted.any(1).sum()
            if top_k is not None:
                limits = [capacity(len(wanted), top_k, experts, factor) for factor in CAPACITY_FACTORS]
                rank = ranks(seen.ids_TK, experts, seen.seated_by)
                over = rank >= torch.tensor(limits, device=wanted.device)[:, None, None]
                self.over += (over & wanted).sum((1, 2))
            choices = torch.zeros_like(scores)
            choices.scatter_add_(1, seen.ids_TK.long().clamp(0, experts - 1), wanted.double())
        self.by_domain.index_add_(0, domain_T, choices)
        self.by_class.index_add_(0, class_T, choices)
        self.by_token.index_add_(0, token_T, choices)


def drop_rate(model: TinyLM) -> float | None:
    """The share of the last forward pass's choices that were over the capacity; None where nothing is chosen."""
    chosen = dropped = 0
    for layer in model.layers:
        for seen in layer.seen:
            if seen.ids_TK is not None and seen.kept_TK is not None:
                wanted = (seen.ids_TK >= 0) & (seen.ids_TK < layer.count)
                chosen += int(wanted.sum())
                dropped += int((wanted & ~seen.kept_TK).sum())
    return dropped / chosen if chosen else None


def information(counts: Tensor) -> float:
    """Mutual information in bits of row and column, from counts (R, E) of choices, with the correction of Miller and Madow; nan without any.

    The same as `specialisation.mutual_information`, on the device: counts by token are too many to store.
    """
    total = counts.sum()
    if not float(total):
        return float("nan")
    parts = (counts.sum(1), counts.sum(0), counts)
    rows, columns, joint = (float(torch.special.entr(part / total).sum()) / math.log(2) for part in parts)
    cells = [int((part > 0).sum()) for part in parts]
    return rows + columns - joint - (cells[2] - cells[0] - cells[1] + 1) / (2 * float(total) * math.log(2))
