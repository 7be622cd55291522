"""Where vLLM, SGLang and Megatron-LM have the expert ids in what they return or write.

vLLM 0.33.0, ``entrypoints/openai/completion/protocol.py``: a completion's ``choices[i].routed_experts`` is the base64 text of a
.npy file (tokens - 1, layers, k). SGLang 0.5.23, ``srt/eplb/expert_distribution.py``, mode ``per_token``: ``torch.save`` of
``records``, one per forward pass, with ``topk_ids_of_layer`` (layers, tokens, 8). Megatron Core 0.16.1,
``core/transformer/moe/router_replay.py``: ``RouterReplay.get_recorded_data()`` is a list of ids (T, k), one per layer.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.errors import bad, pick
from moe_routing_bench.traces.checks import checked_layer

_SGLANG_IDS = "topk_ids_of_layer"
_NO_EXPERT = -1  # where SGLang has a padding token, or more places than the model's k


def name_of(names: Sequence[str], key: str | None, path: Path) -> str:
    """The name of the array to read: `key`, or the only one. Raises `UserError`."""
    if key is None and len(names) != 1:
        raise bad("--key", "none", ", ".join(names) or "nothing: there is no array", f"the array of {path} to read")
    return pick("--key", names[0] if key is None else key, names)


def tensor(value: Any, path: Path) -> Any:
    """A dense torch tensor of real numbers. Raises `UserError` for anything else."""
    import torch

    if not isinstance(value, torch.Tensor):
        hint = "save the ids of all layers as one tensor, or as a list of tensors"
        raise bad("ids", f"{type(value).__name__} in {path}", "a tensor", hint)
    if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
        raise bad("ids", f"{value.layout} of {value.dtype} in {path}", "a dense tensor of whole numbers")
    return value.detach()


def array(value: Any) -> NDArray[Any]:
    """A tensor as an array: floating point as float64, for numpy has no bfloat16."""
    return (value.double() if value.is_floating_point() else value).numpy()


def of_layers(tensors: Sequence[Any], layer: int | None, first: str | None, path: Path) -> Any:
    """Of a list with the ids of each layer, as Megatron's, those of one."""
    _check_first(first, "layers", path)
    return tensors[checked_layer(layer, len(tensors), path)]


def is_sglang(found: Any) -> bool:
    """Whether a file is one of SGLang's recorder of expert distributions, whatever its mode."""
    return isinstance(found, Mapping) and "last_physical_to_logical_map" in found and "records" in found


def sglang(found: Mapping[str, Any], layer: int | None, first: str | None, path: Path) -> NDArray[Any]:
    """Ids (T, k) of one layer in all forward passes of a dump of the mode `per_token`, without padding.

    The ids are those of physical experts. Raises `UserError` where these are not the model's own: with redundant experts, or
    after experts were moved.
    """
    _check_first(first, "layers", path)
    records = found["records"]
    if not records or not all(isinstance(one, Mapping) and _SGLANG_IDS in one for one in records):
        hint = "start the server with --expert-distribution-recorder-mode per_token, and record a request"
        raise bad("records", f"{len(records)} in {path}, without {_SGLANG_IDS}", f"records with {_SGLANG_IDS}", hint)
    passes = [array(tensor(one[_SGLANG_IDS], path)) for one in records]
    number = checked_layer(layer, len(passes[0]), path)
    _check_identity(array(tensor(found["last_physical_to_logical_map"], path)), number, path)
    ids = np.concatenate([one[number] for one in passes])
    used = ids != _NO_EXPERT
    if not used.any():
        raise bad("--layer", layer, f"a layer with experts: layer {number} in {path} has no ids")
    return ids[used.any(1)][:, used.any(0)]


def _check_identity(logical: NDArray[Any], layer: int, path: Path) -> None:
    if layer < len(logical) and (logical[layer] != np.arange(logical.shape[1])).any():
        allowed = "physical experts that are the model's experts, in order"
        raise bad("physical experts", f"moved or redundant ones in {path}", allowed, "record without EPLB")


def vllm(text: bytes, first: str | None, path: Path) -> list[bytes]:
    """The .npy files, each an array (tokens, layers, k), in the choices of a completion response. Raises `UserError`."""
    _check_first(first, "tokens", path)
    response = json.loads(text)
    choices = response.get("choices") if isinstance(response, dict) else None
    texts = [one["routed_experts"] for one in choices or [] if isinstance(one.get("routed_experts"), str)]
    if not texts or len(texts) < len(choices or []):
        hint = "start the server with --enable-return-routed-experts"
        raise bad("input", str(path), "a completion of vLLM with choices[i].routed_experts", hint)
    return [base64.b64decode(one, validate=True) for one in texts]


def _check_first(first: str | None, known: str, path: Path) -> None:
    if first not in (None, known):
        raise bad("--first", first, f"{known}: such is the layout of {path}")
