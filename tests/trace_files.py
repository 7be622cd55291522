"""Bytes of files with recorded routing, as numpy, torch, pandas, vLLM, SGLang and Megatron-LM write them."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def parquet(column, kind=None, name="expert_ids"):
    buffer = io.BytesIO()
    pq.write_table(pa.table({name: pa.array(column, kind)}), buffer)
    return buffer.getvalue()


def table(**columns):
    """A Parquet file of several columns."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({name: pa.array(np.asarray(column).tolist()) for name, column in columns.items()}), buffer)
    return buffer.getvalue()


def lines(ids, *first):
    return "\n".join([*first, *(",".join(map(str, row)) for row in np.asarray(ids).tolist()), ""]).encode()


def completion(*arrays):
    choices = [{"text": "", "routed_experts": base64.b64encode(npy(one)).decode()} for one in arrays]
    return json.dumps({"object": "text_completion", "choices": choices}).encode()


def sglang(*passes, logical=None):
    """A dump as SGLang's, of ids (layers, tokens, k) per forward pass: each in an array of 8 places filled with -1."""
    records = []
    for number, ids in enumerate(passes):
        ids = torch.nn.functional.pad(torch.tensor(ids), (0, 8 - ids.shape[2]), value=-1)
        record = {"forward_pass_id": number, "rank": 0, "gatherer_key": "primary", "topk_ids_of_layer": ids}
        records.append(record | {"positions": [0], "extend_seq_lens": None, "forward_mode": 1, "misc_objects": []})
    logical = torch.arange(8).repeat(len(passes[0]), 1) if logical is None else logical
    return saved({"records": records, "last_physical_to_logical_map": logical})
