"""Validation loss over every byte once, and what the routers did to those bytes."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.quality.data import IGNORED, Windows
from moe_routing_bench.quality.model import TinyLM
from moe_routing_bench.quality.moe import Seen, capacity, ranks

CAPACITY_FACTORS = (
    1.0,
    1.05,
    1.1,
    1.25,
    1.5,
    2.0,
    3.0,
    4.0,
)  # at which drops are counted, whatever the run trains with
BYTE_CLASSES = ("lower", "upper", "digit", "space", "newline", "punctuation", "other")


def byte_classes() -> Tensor:
    """The index in `BYTE_CLASSES` of each of the 256 bytes, int64."""

    def index(byte: int) -> int:
        one = chr(byte)
        if byte >= 128:
            return 6
        tests = (one.islower(), one.isupper(), one.isdigit(), one in " \t", one in "\n\r", one.isprintable())
        return next((number for number, fits in enumerate(tests) if fits), 6)

    return torch.tensor([index(byte) for byte in range(256)])


@dataclass
class Loads:
    """Sums over the bytes of a validation pass, of one router: on the device, float64."""

    by_domain: Tensor  # (domains, E) choices
    by_class: Tensor  # (classes, E) choices
    entropy: Tensor  # nats
    dropped: Tensor  # choices over the capacity
    lost: Tensor  # tokens all of whose choices were dropped
    chosen: Tensor  # tokens with at least one choice
    over: Tensor  # (factors,) choices over the capacity at each of `CAPACITY_FACTORS`, by position

    @staticmethod
    def empty(domains: int, experts: int, device: str) -> "Loads":
        """All zero."""
        sizes = ((domains, experts), (len(BYTE_CLASSES), experts), (), (), (), (), (len(CAPACITY_FACTORS),))
        return Loads(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))

    def add(self, seen: Seen, top_k: int | None, valid_T: Tensor, domain_T: Tensor, class_T: Tensor) -> None:
        """Add a batch: `valid_T` bool leaves padding out. `top_k` is the number of choices that a capacity counts
        on; where it is None, drops by factor are not counted."""
        experts = self.by_domain.shape[1]
        scores = seen.scores_TE.double() * valid_T[:, None]
        self.entropy += torch.special.entr(scores).sum()
        if seen.ids_TK is None or seen.kept_TK is None:
            choices = scores  # soft: what share of its weight a token gives each expert
        else:
            wanted = (seen.ids_TK >= 0) & (seen.ids_TK < experts) & valid_T[:, None]
            dropped = wanted & ~seen.kept_TK
            self.dropped += dropped.sum()
            self.lost += (wanted.any(1) & (dropped == wanted).all(1)).sum()
            self.chosen += wanted.any(1).sum()
            if top_k is not None:
                limits = [capacity(len(wanted), top_k, experts, factor) for factor in CAPACITY_FACTORS]
                over = ranks(seen.ids_TK, experts) >= torch.tensor(limits, device=wanted.device)[:, None, None]
                self.over += (over & wanted).sum((1, 2))
            choices = torch.zeros_like(scores)
            choices.scatter_add_(1, seen.ids_TK.long().clamp(0, experts - 1), wanted.double())
        self.by_domain.index_add_(0, domain_T, choices)
        self.by_class.index_add_(0, class_T, choices)


@torch.no_grad()
def loss_of(model: TinyLM, windows: Windows, batch: int) -> tuple[float, list[Loads]]:
    """Mean loss in nats a byte over all windows, and the loads of each router (of one layer after another)."""
    device = windows.bytes.device.type
    classes = byte_classes().to(windows.bytes.device)
    domains = int(windows.domains.max()) + 1
    loads = [Loads.empty(domains, layer.count, device) for layer in model.layers for _ in layer.routers]
    total = torch.zeros((), dtype=torch.float64, device=windows.bytes.device)
    with evaluating(model):
        for numbers in windows.in_order(batch):
            inputs, targets = windows.take(numbers)
            with autocast(device):
                logits = model(inputs)
            total += F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum").double()  # fmt: skip
            valid = (targets != IGNORED).flatten()
            domain = torch.from_numpy(windows.domains[numbers]).to(inputs.device).repeat_interleave(windows.sequence)
            # drops by factor are those of what routers ask for, which a capacity in the layers before would change
            seen = [(one, layer.top_k if layer.capacity_factor is None else None) for layer in model.layers for one in layer.seen]  # fmt: skip
            for sums, one in zip(loads, seen, strict=True):
                sums.add(*one, valid, domain, classes[inputs.flatten()])
    return float(total) / windows.total, loads


def bits(nats: float) -> float:
    """Nats in bits."""
    return nats / math.log(2)


def evaluate(model: TinyLM, windows: Windows, batch: int) -> dict[str, Any]:
    """Row fields: losses with and without the capacity, and statistics of the routing.

    Loads, and drops by capacity factor, are of the pass without capacity (what the routers ask for); drops at the run's
    own factor are of the pass with it, in which layers see what the drops before them left.
    """
    with without_capacity(model):
        loss, loads = loss_of(model, windows, batch)
    limited = any(layer.capacity_factor is not None for layer in model.layers)
    with_capacity, drops = loss_of(model, windows, batch) if limited else (loss, loads)
    fields: dict[str, Any] = {
        "val_loss": loss, "bits_per_byte": bits(loss), "perplexity": math.exp(min(loss, 700.0)),
        "val_loss_with_capacity": with_capacity, "val_bytes": windows.total,
    }  # fmt: skip
    if not loads:
        return fields
    total = [one.by_domain.sum(0) for one in loads]
    cv = [float(one.std(correction=0) / one.mean()) for one in total]
    lost = sum(float(one.lost) for one in drops) / max(1.0, sum(float(one.chosen) for one in drops))
    wanted = sum(float(one.by_domain.sum()) for one in drops)
    asked = sum(float(one.by_domain.sum()) for one in loads if float(one.chosen))
    over = torch.stack([one.over for one in loads]).sum(0)
    return fields | {
        "capacity_factors": list(CAPACITY_FACTORS) if asked else None, "drop_rate_by_factor": (over / asked).tolist() if asked else None,
        "load_cv": sum(cv) / len(cv), "load_cv_by_layer": cv,
        "max_violation_by_layer": [float(one.max() / one.mean()) - 1 for one in total],
        "dead_experts": sum(int((one == 0).sum()) for one in total),
        "gate_entropy": sum(float(one.entropy) for one in loads) / len(loads) / windows.total,
        "experts_per_token": asked / len(model.layers) / windows.total if asked else None,  # soft MoE asks for no one
        "drop_rate": sum(float(one.dropped) for one in drops) / max(1.0, wanted), "token_drop_rate": lost,
        "load_by_domain": [one.by_domain.tolist() for one in loads], "load_by_class": [one.by_class.tolist() for one in loads],
    }  # fmt: skip


@torch.no_grad()
def routing_ids(model: TinyLM, windows: Windows, batch: int, tokens: int, layer: int) -> tuple[Tensor | None, str]:
    """Expert ids (tokens, k) int32 on the CPU that a layer chose for windows evenly spread over the text, or None and why
    there are none that a bench can replay: these have k distinct true experts a token."""
    if not model.layers:
        return None, "a dense model routes nothing"
    windows_needed = -(-tokens // windows.sequence)
    full = (windows.lengths == windows.sequence).nonzero()[0]
    if windows_needed > len(full):
        return None, f"validation has {len(full) * windows.sequence} bytes in whole windows, asked were {tokens}"
    chosen, found = full[[i * len(full) // windows_needed for i in range(windows_needed)]], []
    with evaluating(model), without_capacity(model):
        for first in range(0, len(chosen), batch):
            inputs, _ = windows.take(chosen[first : first + batch])
            with autocast(inputs.device.type):
                model(inputs)
            ids = model.layers[layer].seen[0].ids_TK
            if ids is None:
                return None, "soft routing has no ids"
            found.append(ids.cpu())
    ids = torch.cat(found)[:tokens]
    if int(ids.min()) < 0 or int(ids.max()) >= model.layers[layer].count:
        return None, "tokens with fewer than k true experts"
    return ids, ""


@contextlib.contextmanager
def evaluating(model: TinyLM) -> Iterator[None]:
    """Evaluation mode inside; after it every part is in the mode that it was in, frozen ones too."""
    before = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


@contextlib.contextmanager
def without_capacity(model: TinyLM) -> Iterator[None]:
    """No limit inside."""
    before = [layer.capacity_factor for layer in model.layers]
    for layer in model.layers:
        layer.capacity_factor = None
    try:
        yield
    finally:
        for layer, factor in zip(model.layers, before, strict=True):
            layer.capacity_factor = factor


def autocast(device: str) -> torch.autocast:
    """bfloat16 on a GPU, nothing on a CPU."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")
