"""The validation loss over every token once, and the row fields of an evaluation."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.quality.expert_loads import CAPACITY_FACTORS, Loads, byte_classes, information
from moe_routing_bench.quality.language_model import TinyLM
from moe_routing_bench.quality.run_rows import MIXED
from moe_routing_bench.quality.steps import IGNORED, Windows
from moe_routing_kernels.formats.quantisation import dequantise, quantise
from moe_routing_kernels.formats.weights import WEIGHTS, WeightFormat


@torch.no_grad()
def loss_of(model: TinyLM, windows: Windows, batch: int, mixed: bool = True) -> tuple[float, list[Loads]]:
    """The mean loss over all windows in nats per token, and the loads of each router, layer by layer.

    Batches are of all domains, or, where they are not `mixed`, of one domain each.
    """
    device = windows.tokens.device.type
    classes = byte_classes().to(windows.tokens.device)[windows.first_bytes]
    domains = int(windows.domains.max()) + 1
    vocabulary = len(windows.first_bytes)
    loads = [Loads.empty(domains, layer.count, device, vocabulary) for layer in model.layers for _ in layer.routers]
    total = torch.zeros((), dtype=torch.float64, device=windows.tokens.device)
    with evaluating(model):
        for numbers in windows.mixed(batch) if mixed else windows.by_domain(batch):
            inputs, targets = windows.take(numbers)
            with autocast(device):
                logits = model(inputs)
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            total += loss.double()
            valid = (targets != IGNORED).flatten()
            domain = torch.from_numpy(windows.domains[numbers]).to(inputs.device).repeat_interleave(windows.sequence)
            # Drops by factor are those of what the routers ask for, which a capacity in earlier layers would change.
            seen = [
                (item, layer.top_k if layer.capacity_factor is None else None)
                for layer in model.layers
                for item in layer.seen
            ]
            for sums, load in zip(loads, seen, strict=True):
                sums.add(*load, valid, domain, classes[inputs.flatten()], inputs.flatten())
    return float(total) / windows.total, loads


def bits(nats: float, windows: Windows) -> float:
    """Nats per token of a text in bits per byte."""
    return nats / math.log(2) * (windows.total / windows.size)


def evaluate(model: TinyLM, windows: Windows, batch: int) -> dict[str, Any]:
    """Row fields: the losses with and without the capacity, and statistics of the routing.

    Loads and drops by capacity factor come from the pass without a capacity: they are what the routers ask for. Drops
    at the run's own factor come from the pass with it, in which a layer sees what the drops of the layers before it
    left.
    """
    with without_capacity(model):
        loss, loads = loss_of(model, windows, batch)
    limited = any(layer.capacity_factor is not None for layer in model.layers)
    loss_with_capacity, drops = loss_of(model, windows, batch) if limited else (loss, loads)
    fields: dict[str, Any] = {
        "val_loss": loss,
        "bits_per_byte": bits(loss, windows),
        "perplexity": math.exp(min(loss, 700.0)),
        "val_loss_with_capacity": loss_with_capacity,
        "val_bytes": windows.size,
        "validation_batches": MIXED,
    }
    return fields | _routing_fields(model, loads, drops, windows.total) if loads else fields


def _routing_fields(model: TinyLM, loads: Sequence[Loads], drops: Sequence[Loads], tokens: int) -> dict[str, Any]:
    """Row fields of a model with routers, from the loads of the pass without a capacity and of the one with it."""
    total = [load.by_domain.sum(0) for load in loads]
    cv = [float(load.std(correction=0) / load.mean()) for load in total]
    asked = sum(float(load.by_domain.sum()) for load in loads if float(load.chosen))  # soft routing asks for no expert
    over = torch.stack([load.over for load in loads]).sum(0)
    dropped, lost, chosen = (
        sum(float(getattr(drop, name)) for drop in drops) for name in ("dropped", "lost", "chosen")
    )
    wanted = sum(float(drop.by_domain.sum()) for drop in drops)
    return {
        "capacity_factors": list(CAPACITY_FACTORS) if asked else None,
        "drop_rate_by_factor": (over / asked).tolist() if asked else None,
        "load_cv": sum(cv) / len(cv),
        "load_cv_by_layer": cv,
        "max_violation_by_layer": [float(load.max() / load.mean()) - 1 for load in total],
        "dead_experts": sum(int((load == 0).sum()) for load in total),
        "gate_entropy": sum(float(load.entropy) for load in loads) / len(loads) / tokens,
        "experts_per_token": asked / len(model.layers) / tokens if asked else None,
        "drop_rate": dropped / max(1.0, wanted),
        "token_drop_rate": lost / max(1.0, chosen),
        "load_by_domain": [load.by_domain.tolist() for load in loads],
        "load_by_class": [load.by_class.tolist() for load in loads],
        "token_bits_by_layer": [information(load.by_token) for load in loads],
    }


@torch.no_grad()
def routing_ids(model: TinyLM, windows: Windows, batch: int, tokens: int, layer: int) -> tuple[Tensor | None, str]:
    """Expert ids (tokens, k) int32 on the CPU that a layer chose for windows spread evenly over the text.

    None, and the reason, where there are none that a bench can replay: it needs k distinct true experts per token.
    """
    if not model.layers:
        return None, "a dense model routes nothing"
    windows_needed = -(-tokens // windows.sequence)
    full = (windows.lengths == windows.sequence).nonzero()[0]
    if windows_needed > len(full):
        return None, f"validation has {len(full) * windows.sequence} bytes in whole windows, {tokens} were asked for"
    chosen, selected = full[[i * len(full) // windows_needed for i in range(windows_needed)]], []
    with evaluating(model), without_capacity(model):
        for first in range(0, len(chosen), batch):
            inputs, _ = windows.take(chosen[first : first + batch])
            with autocast(inputs.device.type):
                model(inputs)
            ids = model.layers[layer].seen[0].ids_TK
            if ids is None:
                return None, "soft routing has no ids"
            selected.append(ids.cpu())
    ids = torch.cat(selected)[:tokens]
    if int(ids.min()) < 0 or int(ids.max()) >= model.layers[layer].count:
        return None, "some tokens have fewer than k true experts"
    return ids, ""


@contextlib.contextmanager
def evaluating(model: TinyLM) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each part, frozen ones included, is in the mode it was in."""
    before = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


def without_capacity(model: TinyLM) -> contextlib.AbstractContextManager[None]:
    """Inside, no layer has a capacity."""
    return with_capacity(model, None)


@contextlib.contextmanager
def with_capacity(model: TinyLM, factor: float | None) -> Iterator[None]:
    """Inside, every layer has this capacity factor."""
    before = [layer.capacity_factor for layer in model.layers]
    for layer in model.layers:
        layer.capacity_factor = factor
    try:
        yield
    finally:
        for layer, capacity in zip(model.layers, before, strict=True):
            layer.capacity_factor = capacity


def autocast(device: str) -> torch.autocast:
    """bfloat16 on a GPU, nothing on a CPU."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


# those of the seed document 003, and two of 4-bit floats
FORMATS = (
    *("int8_g128", "int8z_g128", "int4_g128", "int4z_g128", "int2_g128", "int2z_g128", "e4m3_g128", "e5m2_g128"),
    *("mxfp4", "nvfp4"),
)
CAPACITIES = (1.0, 1.25, 1.5, 2.0)


def altered_fields(model: TinyLM, windows: Windows, batch: int) -> dict[str, dict[str, float] | float | None]:
    """Row fields: bits per byte by format of the experts' weights, without a capacity, and by capacity factor; None for a dense model.

    `bits_of_one_domain` is with the model's own capacity, if it has one, and batches of one domain each: what a server with
    such a load would lose, and no figure to compare rules by.

    Each is a pass over all windows. The model is afterwards what it was.
    """
    if not model.layers:
        return {"bits_by_format": None, "bits_by_capacity": None, "bits_of_one_domain": None}
    by_format, by_capacity, of_one = {}, {}, None
    if any(layer.capacity_factor is not None for layer in model.layers):
        of_one = bits(loss_of(model, windows, batch, mixed=False)[0], windows)
    for name in FORMATS:
        with with_capacity(model, None), quantised(model, WEIGHTS[name]) as whole:
            if whole:
                by_format[name] = bits(loss_of(model, windows, batch)[0], windows)
    for factor in CAPACITIES:
        with with_capacity(model, factor):
            by_capacity[f"{factor:g}"] = bits(loss_of(model, windows, batch)[0], windows)
    return {"bits_by_format": by_format, "bits_by_capacity": by_capacity, "bits_of_one_domain": of_one}


@contextlib.contextmanager
def quantised(model: TinyLM, form: WeightFormat) -> Iterator[bool]:
    """Inside, the experts' weights are what their codes in `form` stand for.

    Gives False, and changes nothing, where the sizes of the experts do not fill whole bytes. Scales are of the format that experts
    compute in: bfloat16 on a GPU, else float32.
    """
    weights: list[nn.Parameter] = [
        weight for layer in model.layers for weight in (layer.experts.w13_EDH, layer.experts.w2_EHD)
    ]
    before = [weight.detach().clone() for weight in weights]
    whole = all(form.packs(weight.shape[1]) for weight in weights)
    try:
        if whole:
            for weight in weights:
                _round(weight.data, form, "bf16" if weight.is_cuda else "fp32")
        yield whole
    finally:
        for weight, values in zip(weights, before, strict=True):
            weight.data.copy_(values)


def _round(weight: Tensor, form: WeightFormat, dtype: str) -> None:
    """Replace weight (E, K, N) by what its codes stand for; products sum over K, whose neighbours share a scale."""
    rows = weight.transpose(1, 2).contiguous()
    parts, out = quantise(rows, form, dtype), torch.empty_like(rows)
    dequantise(parts, form, out)
    weight.copy_(out.transpose(1, 2))
