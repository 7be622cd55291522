"""Traces whose values leave a token without k experts, and files whose parts are of other kinds than they should be."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moe_routing_bench.traces import Options, reading
from moe_routing_kernels.errors import UserError

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.standard_normal((64, 16))
CHOSEN = np.argsort(-LOGITS, axis=1)[:, :4]
WEIGHTS = np.where(
    np.eye(16)[CHOSEN].sum(1) > 0, RANDOM.uniform(0.1, 1, (64, 16)), 0.0
)  # as Megatron's router has them


def read(path, **asked):
    return reading.read(path, Options(**asked))


def refused(path, **asked):
    with pytest.raises(UserError) as caught:
        read(path, **asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def array(tmp_path):
    def written(values):
        np.save(tmp_path / "x.npy", values)
        return tmp_path / "x.npy"

    return written


def test_an_expert_that_is_masked_out_is_never_chosen(array):
    """The lowest ids were, in silence, where fewer than k logits were above -inf."""
    masked = LOGITS.copy()
    masked[5, 3:] = -np.inf
    assert "got '4, with fewer logits above -inf in 1 of 64 tokens" in refused(array(masked), top_k=4)
    assert read(array(masked), top_k=3).ids.shape == (64, 3)


def test_as_many_logits_as_ids_suffice(array):
    masked = np.where(np.eye(16)[CHOSEN].sum(1) > 0, LOGITS, -np.inf)
    assert (read(array(masked), top_k=4).ids == CHOSEN).all()
    assert "in 64 of 64 tokens" in refused(array(masked), top_k=5)


def test_weights_of_the_chosen_experts_have_no_more_ids_than_weights(array):
    assert (np.sort(read(array(WEIGHTS), top_k=4).ids) == np.sort(CHOSEN)).all()
    assert "a 0 is that of an expert that was not chosen" in refused(array(WEIGHTS), top_k=6)


def test_logits_that_are_0_now_and_then_are_logits(array):
    """As those of a padding token are."""
    some = LOGITS.copy()
    some[:32] = 0
    assert "32 tokens have equal logits" in read(array(some), top_k=4).evidence


@pytest.mark.parametrize("name", ["layer", "token", "slot"])
@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_a_layer_token_or_slot_is_a_whole_number(name, value, tmp_path):
    tokens, slots = np.repeat(np.arange(64.0), 4), np.tile(np.arange(4.0), 64)
    columns = {"layer": np.zeros(256), "token": tokens, "slot": slots, "expert": CHOSEN.ravel()}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    assert (read(tmp_path / "x.parquet").ids == CHOSEN).all()
    columns[name] = columns[name].copy()
    columns[name][7] = value
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    assert f"column '{name}': got" in refused(tmp_path / "x.parquet", layer=0).replace('"', "'")


@pytest.mark.parametrize(
    "choices", [5, "text", {"a": 1}, ["text"], [None], [[1]], [{"routed_experts": 3}], [{}]], ids=str
)
def test_choices_that_are_none_are_answered_with_what_is_missing(choices, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"choices": choices}))
    assert "a completion of vLLM with choices[i].routed_experts" in refused(tmp_path / "x.json")


@pytest.mark.parametrize("records", [5, "text", {"a": 1}, None], ids=str)
def test_records_that_are_none_are_answered_with_what_is_missing(records, tmp_path):
    torch.save({"records": records, "last_physical_to_logical_map": torch.arange(16)[None]}, tmp_path / "x.pt")
    assert "records with topk_ids_of_layer" in refused(tmp_path / "x.pt")


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_text_that_is_no_utf8_is_answered_with_what_to_do(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    path.write_bytes("1,2\n3,4\n".encode("utf-16") if suffix == ".csv" else b'{"a": "caf\xe9"}')
    assert "save it as UTF-8" in refused(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_no_advice_to_run_what_a_file_holds(suffix, tmp_path):
    path, content = tmp_path / f"x{suffix}", io.BytesIO()
    values = np.array([{"a": 1}], dtype=object)
    (np.save if suffix == ".npy" else np.savez)(content, values)
    path.write_bytes(content.getvalue())
    message = refused(path)
    assert "allow_pickle=" not in message and "save arrays of numbers" in message


LAYERS = np.stack([np.argsort(RANDOM.random((64, 16)), axis=1)[:, :4] for _ in range(6)])  # (layers, tokens, k)


@pytest.mark.parametrize("sizes", [(20, 44), (16, 16, 16, 16), (64,)], ids=str)
@pytest.mark.parametrize("first", ["tokens", "layers"])
@pytest.mark.parametrize("names", [False, True])
def test_passes_that_have_all_layers_each_are_read_one_after_another(sizes, first, names, tmp_path):
    """As the `routed_experts` of several requests of vLLM are saved; equal ones were taken for layers."""
    parts = np.split(LAYERS, np.cumsum(sizes)[:-1], axis=1)
    parts = [torch.from_numpy(part.transpose(1, 0, 2).copy() if first == "tokens" else part.copy()) for part in parts]
    content = {f"step_{number}": part for number, part in enumerate(parts)} if names and len(parts) > 1 else parts
    torch.save(content, tmp_path / "x.pt")
    recorded = read(tmp_path / "x.pt", first=first, layer=2, experts=16)
    assert (recorded.ids == LAYERS[2]).all() and f"{len(parts)} passes" in recorded.evidence
    for layer in (None, 6, -1):
        assert "--layer" in refused(tmp_path / "x.pt", first=first, layer=layer, experts=16)


@pytest.mark.parametrize("first", ["tokens", "layers"])
def test_passes_with_other_layers_are_refused(first, tmp_path):
    torch.save([torch.from_numpy(LAYERS[:4, :, :3].copy()), torch.from_numpy(LAYERS)], tmp_path / "x.pt")
    assert "parts that differ in tokens alone" in refused(tmp_path / "x.pt", first=first, layer=2)


def test_arrays_that_are_named_by_layers_are_not_passes(tmp_path):
    """The layer that is asked for is that of the name."""
    torch.save({f"layers.{number}.ids": torch.from_numpy(LAYERS) for number in (0, 2)}, tmp_path / "x.pt")
    assert "passes" not in refused(tmp_path / "x.pt", first="layers", layer=2, experts=16)
