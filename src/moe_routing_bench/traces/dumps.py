"""Where vLLM and SGLang have the expert ids in what they return or write.

vLLM 0.33.0, ``entrypoints/openai/completion/protocol.py``: a completion's ``choices[i].routed_experts`` is the base64 text of a
.npy file (tokens - 1, layers, k). SGLang 0.5.23, ``srt/eplb/expert_distribution.py``: ``torch.save`` of ``records``, one per
forward pass, with ``topk_ids_of_layer`` (layers, tokens, 8), in the mode ``per_token``, and of ``logical_count`` in the mode
``stat``. A fused shared expert has the ids from the number of routed experts up.
"""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces import Options, Values, array, is_array
from moe_routing_bench.traces.layout import checked_layer
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad

_SGLANG_IDS = "topk_ids_of_layer"
_NO_EXPERT = -1  # where SGLang has a padding token, or more places than the model's k


def is_sglang(content: Any) -> bool:
    """Whether a file is one of SGLang's recorder of expert distributions, whatever its mode."""
    return isinstance(content, Mapping) and (
        ("last_physical_to_logical_map" in content and "records" in content) or "logical_count" in content
    )


def sglang(content: Mapping[str, Any], options: Options, where: object) -> Values:
    """Ids (T, k) of one layer in all forward passes of a dump of the mode `per_token`, without padding and shared experts.

    The ids are those of physical experts. Raises `UserError` where these are not the model's own: with redundant experts, or
    after experts were moved; and for dumps of other modes, which hold counts.
    """
    _check_first(options.first, "layers", where)
    records = content.get("records", ())
    records = records if isinstance(records, list | tuple) else ()
    if not records or not all(isinstance(record, Mapping) and _SGLANG_IDS in record for record in records):
        hint = "start the server with --expert-distribution-recorder-mode per_token, and record a request"
        what = "counts per expert" if "logical_count" in content else f"{len(records)} records"
        raise bad("records", f"{what} in {where}, without {_SGLANG_IDS}", f"records with {_SGLANG_IDS}", hint)
    passes = [_tensor(record[_SGLANG_IDS], where) for record in records]
    if any(part.ndim != 3 or part.shape[::2] != passes[0].shape[::2] for part in passes):
        raise bad(
            "records", f"{_SGLANG_IDS} of different shapes in {where}", "(layers, tokens, places) in every record"
        )
    number = checked_layer(options.layer, len(passes[0]), where)
    experts = _experts(_tensor(content["last_physical_to_logical_map"], where), number, where)
    ids = np.concatenate([part[number] for part in passes])
    used = ids != _NO_EXPERT
    if not used.any():
        raise bad("--layer", options.layer, f"a layer with experts: layer {number} in {where} has no ids")
    ids, note = _routed(ids[used.any(1)][:, used.any(0)], experts)
    proof = f"{_SGLANG_IDS} of {len(passes)} passes, layer {number}{note}"
    return Values(ids, options.without("layer", "first"), proof, experts, from_zero=True)


def _tensor(value: Any, where: object) -> NDArray[Any]:
    if not is_array(value):
        raise bad("ids", f"{type(value).__name__} in {where}", "a tensor")
    return array(value, where)


def _experts(logical: NDArray[Any], layer: int, where: object) -> int:
    """The number of routed experts. Raises `UserError` where the layer's physical experts are not these, in order."""
    if logical.ndim != 2 or layer >= len(logical) or (logical[layer] != np.arange(logical.shape[1])).any():
        allowed = "physical experts that are the model's experts, in order"
        raise bad("physical experts", f"moved or redundant ones in {where}", allowed, "record without EPLB")
    return logical.shape[1]


def _routed(ids: NDArray[Any], experts: int) -> tuple[NDArray[Any], str]:
    """Ids without those of fused shared experts, where every token has as many of these; otherwise all ids."""
    shared = ids >= experts
    count = int(shared[0].sum())
    if not 0 < count < ids.shape[1] or (shared.sum(1) != count).any():
        return ids, ""
    note = f", without {count} fused shared of every token: the file has {experts} experts, and these ids start there"
    return ids[~shared].reshape(len(ids), -1), note


def vllm(path: Path, options: Options) -> Values:
    """Ids (T, k) of one layer in the choices of a completion response, one choice after another. Raises `UserError`."""
    _check_first(options.first, "tokens", path)
    response = guarded.json_of(path, guarded.MOST_TABLE)
    choices = response.get("choices") if isinstance(response, dict) else None
    choices = choices if isinstance(choices, list) else []
    each = [choice.get("routed_experts") if isinstance(choice, dict) else None for choice in choices]
    texts = [text for text in each if isinstance(text, str)]
    if not texts or len(texts) < len(choices):
        hint = "start the server with --enable-return-routed-experts"
        raise bad("input", str(path), "a completion of vLLM with choices[i].routed_experts", hint)
    arrays = [np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False) for text in texts]
    if any(part.ndim != 3 or part.shape[1:] != arrays[0].shape[1:] for part in arrays):
        shapes = " and ".join(sorted({str(part.shape) for part in arrays})[:3])
        raise bad(
            "routed_experts", f"{shapes} in {path}", "(tokens, layers, k), with equal layers and k in all choices"
        )
    number = checked_layer(options.layer, arrays[0].shape[1], path)
    ids = np.concatenate([part[:, number] for part in arrays])
    return Values(ids, options.without("layer", "first"), f"routed_experts of vLLM, layer {number}", from_zero=True)


def _check_first(first: str | None, known: str, where: object) -> None:
    if first not in (None, known):
        raise bad("--first", first, f"{known}: such is the layout of {where}")
