"""Files whose values can be read in several ways: the ids that went in, by proof, or one line that asks for the rest."""

import itertools

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_routing_bench.traces import Options, reading, series, writing
from moe_routing_bench.traces.columns import role_of
from moe_routing_bench.traces.writing import write
from moe_routing_kernels.errors import UserError
from project import ROOT
from trace_files import completion, lines, npy, npz, parquet, saved, sglang, table

FIELD = ROOT / "tests/data/traces"


def drawn(tokens, top_k, experts, seed=0):
    """Distinct experts for each token, expert 0 among them."""
    scores = np.random.default_rng(seed).random((tokens, experts))
    scores[0, 0] = 1
    return np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)


IDS = drawn(400, 8, 64)
PAIRS = drawn(6, 2, 8)
ONES = drawn(30, 1, 8)
LAYERS = np.stack([drawn(400, 8, 64, seed) for seed in range(3)])
COUNTS = np.random.default_rng(1).integers(40, 60, (32, 8))
FEW_COUNTS = np.array([[90, 132, 40, 61, 104, 165], [20, 107, 105, 64, 19, 197]])
LOGITS = np.random.default_rng(2).normal(size=(50, 16)).astype(np.float32)
BEST = np.argsort(-LOGITS, axis=1, kind="stable")[:, :4]
SHARED = np.concatenate([IDS, np.full((400, 1), 64, np.int32)], axis=1)
WIDE = {f"expert_{slot}": column for slot, column in enumerate(IDS.T)}
TOKEN = np.arange(400)
LONG = {"token": TOKEN.repeat(8), "expert": IDS.ravel()}
HOOKS = [torch.tensor(part) for part in np.split(IDS, [300, 370])]


LATIN = (np.random.default_rng(3).permutation(64)[:, None] + np.array([0, 5, 9, 20, 33, 41, 50, 61])) % 64


def csv(**columns):
    return lines(np.stack([*columns.values()], axis=1), ",".join(columns))


def rows(*columns):
    return lines(np.column_stack(columns))


READ = {  # suffix, bytes, options, ids, and a word of the evidence
    "array": (".npy", npy(IDS), {}, IDS, "repeats within any of 400 tokens"),
    "transposed array": (".npy", npy(IDS.T), {}, IDS, "second dimension counts tokens"),
    "array of float16": (".npy", npy(IDS.astype(np.float16)), {}, IDS, "repeats"),
    "few tokens": (".npy", npy(PAIRS), {"first": "tokens"}, PAIRS, "--first tokens"),
    "few tokens, transposed": (".npy", npy(PAIRS.T), {"first": "k"}, PAIRS, "(k, tokens)"),
    "few tokens of known k": (".npy", npy(PAIRS), {"top_k": 2}, PAIRS, "--top-k"),
    "few tokens of known k, transposed": (".npy", npy(PAIRS.T), {"top_k": 2}, PAIRS, "(k, tokens)"),
    "k = 1": (".npy", npy(ONES), {"first": "tokens"}, ONES, "--first tokens"),
    "layers, k = 1": (
        ".npy",
        npy(np.stack([ONES[::-1, 0], ONES[:, 0]])),
        {"first": "layers", "layer": 1, "experts": 8},
        ONES,
        "layer 1 of 2",
    ),
    "layers": (".npy", npy(LAYERS), {"first": "layers", "layer": 2}, LAYERS[2], "layer 2 of 3"),
    "tokens and layers": (
        ".npy",
        npy(LAYERS.swapaxes(0, 1)),
        {"first": "tokens", "layer": 2},
        LAYERS[2],
        "layer 2 of 3",
    ),
    "a single layer": (".npy", npy(LAYERS[:1]), {"first": "layers"}, LAYERS[0], "layer 0 of 1"),
    "array of known experts": (".npy", npy(IDS), {"experts": 64}, IDS, "repeats"),
    "logits": (".npy", npy(LOGITS), {"top_k": 4}, BEST, "of equal ones the lowest id"),
    "logits of layers": (
        ".npy",
        npy(np.stack([-LOGITS, LOGITS])),
        {"top_k": 4, "first": "layers", "layer": 1},
        BEST,
        "4 highest of 16",
    ),
    "logits in bfloat16": (
        ".pt",
        saved({"router_logits": torch.tensor(LOGITS).bfloat16()}),
        {"top_k": 1},
        torch.tensor(LOGITS).bfloat16().double().argmax(1)[:, None].numpy(),
        "highest",
    ),
    "logits with names": (
        ".csv",
        csv(**{f"logit_{e}": column for e, column in enumerate(LOGITS.T)}),
        {"top_k": 4},
        BEST,
        "highest",
    ),
    "csv": (".csv", lines(IDS), {}, IDS, "repeats"),
    "csv with numbers as names": (".csv", lines(IDS, "0,1,2,3,4,5,6,7"), {"header": True}, IDS, "repeats"),
    "csv whose first token is 0 to 7": (
        ".csv",
        lines(np.vstack([np.arange(8), IDS])),
        {"header": False},
        np.vstack([np.arange(8), IDS]),
        "repeats",
    ),
    "csv of pandas": (".csv", lines(np.column_stack([TOKEN, IDS]), ",0,1,2,3,4,5,6,7"), {}, IDS, "repeats"),
    "csv with tokens": (".csv", csv(token_id=TOKEN + 1000, **WIDE), {}, IDS, "repeats"),
    "csv with weights": (
        ".csv",
        csv(**WIDE, **{f"weight_{slot}": IDS.T[slot] / 64 for slot in range(8)}),
        {},
        IDS,
        "without 'weight_0' and 7 more",
    ),
    "csv with layers": (
        ".csv",
        csv(
            layer=np.arange(3).repeat(400),
            **{f"expert_{slot}": column for slot, column in enumerate(LAYERS.reshape(-1, 8).T)},
        ),
        {"layer": 2},
        LAYERS[2],
        "layer 2 of column 'layer'",
    ),
    "csv with columns by name": (
        ".csv",
        csv(a=PAIRS[:, 0], b=PAIRS[:, 1], c=PAIRS[:, 0]),
        {"columns": "a,b"},
        PAIRS,
        "without 'c'",
    ),
    "csv with columns by number": (".csv", rows(TOKEN[:6], PAIRS), {"columns": "2,3"}, PAIRS, "ids in '2' and 1 more"),
    "csv with a byte-order mark": (".csv", b"\xef\xbb\xbf" + lines(IDS), {}, IDS, "repeats"),
    "csv after an empty line": (".csv", b"\n" + lines(IDS), {}, IDS, "repeats"),
    "csv with names after empty lines": (".csv", b"\n\n" + csv(**WIDE), {}, IDS, "repeats"),
    "csv in quotes": (
        ".csv",
        b"\n".join(b",".join(b'"%d"' % one for one in row) for row in IDS.tolist()),
        {},
        IDS,
        "repeats",
    ),
    "long csv": (".csv", csv(**LONG), {}, IDS, "8 rows per value of 'token'"),
    "long csv without names": (
        ".csv",
        rows(LONG["token"], LONG["expert"]),
        {"columns": "token=1,expert=2"},
        IDS,
        "8 rows",
    ),
    "long csv of k = 1": (".csv", csv(token=TOKEN[:30], expert=ONES[:, 0]), {}, ONES, "1 rows per value"),
    "long csv of layers": (
        ".csv",
        csv(layer_id=np.arange(3).repeat(3200), token=np.tile(LONG["token"], 3), expert=LAYERS.ravel()),
        {"layer": 1},
        LAYERS[1],
        "layer 1 of column",
    ),
    "long csv without tokens, k = 1": (
        ".csv",
        csv(layer_id=np.array([3] * 30 + [4]), expert_ids=np.append(ONES[:, 0], 1)),
        {"layer": 3, "top_k": 1, "experts": 8},
        ONES,
        "--top-k",
    ),
    "long csv without tokens": (".csv", csv(expert=IDS.ravel()), {"top_k": 8}, IDS, "8 rows are a token"),
    "long csv by slot": (
        ".csv",
        csv(slot=np.arange(8).repeat(400), token=np.tile(TOKEN[::-1], 8), expert=IDS[::-1].T.ravel()),
        {},
        IDS,
        "8 rows",
    ),
    "long csv, first choices first": (
        ".csv",
        csv(token=np.tile(TOKEN, 8), expert=IDS.T.ravel()),
        {"top_k": 8},
        IDS,
        "8 rows",
    ),
    "table with layers": (
        ".parquet",
        table(layer=np.arange(3).repeat(400), token=np.tile(TOKEN, 3), expert_ids=LAYERS.reshape(-1, 8)),
        {"layer": 1},
        LAYERS[1],
        "layer 1",
    ),
    "table with a single layer": (".parquet", table(layer=[5] * 6, expert_ids=PAIRS), {}, PAIRS, "layer 5"),
    "long table": (".parquet", table(**LONG), {}, IDS, "8 rows"),
    "list of passes": (".pt", saved(HOOKS), {}, IDS, "differ in tokens alone"),
    "list of equal passes": (
        ".pt",
        saved([torch.tensor(part) for part in np.split(IDS, 4)]),
        {"first": "passes"},
        IDS,
        "4 passes",
    ),
    "passes by number": (
        ".pt",
        saved({f"step_{n}": torch.tensor(np.split(IDS, 4)[i]) for i, n in ((2, 7), (0, 1), (3, 10), (1, 2))}),
        {},
        IDS,
        "4 passes",
    ),
    "list of layers": (
        ".pt",
        saved([torch.tensor(layer) for layer in LAYERS]),
        {"layer": 2},
        LAYERS[2],
        "layer 2 of 3",
    ),
    "list of one array": (".pt", saved([torch.tensor(IDS)]), {}, IDS, "layer 0 of 1"),
    "layers by name": (
        ".pt",
        saved({f"layers.{n}.ids": torch.tensor(layer) for n, layer in zip((3, 10, 7), LAYERS, strict=True)}),
        {"layer": 10},
        LAYERS[1],
        "layer 10 of 3",
    ),
    "layers by number": (
        ".pt",
        saved({n: torch.tensor(layer) for n, layer in zip((3, 10, 7), LAYERS, strict=True)}),
        {"layer": 7},
        LAYERS[2],
        "layer 7 of 3",
    ),
    "passes of each layer": (
        ".pt",
        saved({n: [torch.tensor(part) for part in np.split(layer, [100, 250])] for n, layer in enumerate(LAYERS)}),
        {"layer": 1},
        LAYERS[1],
        "3 passes",
    ),
    "equal passes of each layer": (
        ".pt",
        saved({n: [torch.tensor(part) for part in np.split(layer, 4)] for n, layer in enumerate(LAYERS)}),
        {"layer": 1},
        LAYERS[1],
        "4 passes",
    ),
    "layers of each pass": (
        ".pt",
        saved(
            [{n: torch.tensor(part) for n, part in enumerate(parts)} for parts in np.split(LAYERS, [100, 250], axis=1)]
        ),
        {"first": "passes", "layer": 1},
        LAYERS[1],
        "3 passes",
    ),
    "arrays in a pickle of torch": (".pt", saved({"ids": IDS}), {}, IDS, "repeats"),
    "SGLang with a fused shared expert": (
        ".pt",
        sglang(np.stack([SHARED[:, -8:]] * 2), logical=torch.arange(64).repeat(2, 1)),
        {"layer": 1},
        SHARED[:, 1:-1],
        "1 fused shared of every token",
    ),
    "vLLM": (".json", completion(LAYERS.swapaxes(0, 1)), {"layer": 1}, LAYERS[1], "routed_experts"),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_proven_is_read(name, tmp_path, recwarn):
    suffix, content, options, expected, words = READ[name]
    path = tmp_path / f"ids{suffix}"
    path.write_bytes(content)
    record = reading.read(path, Options(**options))
    assert record.ids.dtype == np.int32 and record.ids.tolist() == np.asarray(expected).tolist()
    assert words in record.evidence and len(record.evidence) < 240
    assert not recwarn.list


FIRST, COLUMNS, EXPERTS = "--first: got", "--columns: got", "--experts: got"
ASKED = {  # suffix, bytes, options, and words of the line
    "few tokens": (".npy", npy(PAIRS), {}, FIRST, "int32 0 to 7 of the shape (6, 2)"),
    "few tokens of known experts": (".npy", npy(PAIRS), {"experts": 8}, FIRST),
    "one token": (".npy", npy(IDS[:1]), {"experts": 64}, FIRST),
    "k = 1": (".npy", npy(ONES), {"experts": 8}, FIRST),
    "layers, k = 1": (".npy", npy(drawn(9, 4, 99).T), {}, FIRST, "layers: ids (layers, tokens)"),
    "layers with few tokens": (".npy", npy(drawn(9, 4, 99)), {"first": "layers", "layer": 0, "experts": 99}, EXPERTS),
    "layers with a token per expert": (
        ".npy",
        npy(drawn(9, 4, 9).T),
        {"first": "layers", "layer": 0, "experts": 9},
        EXPERTS,
    ),
    "a square of known k": (".npy", npy(PAIRS[:2]), {"top_k": 2}, FIRST),
    "no repeat in rows and columns": (".npy", npy(LATIN), {}, FIRST),
    "counts of few layers": (".npy", npy(FEW_COUNTS), {}, FIRST, "counts per expert look the same"),
    "counts of few layers in floats": (".npy", npy(FEW_COUNTS.astype(np.float32)), {}, FIRST),
    "counts of layers": (".npy", npy(COUNTS), {}, "distinct experts", "counts or a mask per expert"),
    "counts of layers and steps": (".npy", npy(COUNTS[None]), {}, FIRST, "(1, 32, 8)", "counts per expert"),
    "counts, each once": (".npy", npy(np.arange(61 * 256).reshape(61, 256)), {}, FIRST),
    "counts as many as experts": (".npy", npy(FEW_COUNTS), {"experts": 6}, "19 to 197", "counts per expert"),
    "counts in the millions": (".npy", npy(FEW_COUNTS * 10**6), {}, "counts per expert are no ids"),
    "counts by name": (".npz", npz(expert_load=IDS), {}, "'expert_load'", "counts per expert"),
    "counts by name in torch": (
        ".pt",
        saved({"logical_count": torch.tensor(IDS), "other": 1}),
        {"key": "logical_count"},
        "counts",
    ),
    "counts of layers by name": (
        ".pt",
        saved({f"layer_{n}_load": torch.tensor(IDS) for n in range(3)}),
        {"layer": 1},
        "counts per expert",
    ),
    "counts in a column": (
        ".csv",
        csv(layer=[0, 0, 1, 1], expert=[0, 1, 0, 1], count=[9, 8, 7, 10]),
        {"columns": "expert"},
        "'count'",
        "counts per expert",
    ),
    "counts in columns of experts": (
        ".csv",
        csv(layer=[0, 1], **{f"expert_{e}": column for e, column in enumerate(FEW_COUNTS.T)}),
        {"layer": 1},
        FIRST,
    ),
    "physical experts of a map": (
        ".npy",
        npy(np.stack([np.random.default_rng(n).permutation(64) for n in range(99)])),
        {},
        EXPERTS,
        "ranks",
    ),
    "one-hot rows of two": (
        ".npy",
        npy(np.array([[0, 1], [1, 0], [1, 0]] * 20)),
        {"first": "tokens"},
        EXPERTS,
        "one-hot",
    ),
    "one-hot rows of two, known": (
        ".npy",
        npy(np.array([[0, 1], [1, 0], [1, 0]] * 20)),
        {"first": "tokens", "experts": 2},
        "k: got '2 for 2",
        "one-hot",
    ),
    "mask of numbers": (".npy", npy((LOGITS > 1).astype(int)), {}, "distinct experts", "mask"),
    "ids from 1": (".npy", npy(IDS + 1), {}, EXPERTS, "count from 1"),
    "ids from 1 of known experts": (".npy", npy(IDS + 1), {"experts": 64}, "1 to 64", "subtract 1"),
    "a shared expert": (".npy", npy(SHARED), {"first": "tokens"}, EXPERTS, "fused shared expert"),
    "a shared expert of known experts": (".npy", npy(SHARED), {"experts": 64}, "0 to 64", "fused shared expert"),
    "a shared expert in a list": (
        ".parquet",
        table(layer=[0] * 400, expert_ids=SHARED),
        {},
        EXPERTS,
        "fused shared expert",
    ),
    "padding": (".npy", npy(np.where(TOKEN[:, None] > 390, -1, IDS)), {}, "-1 in 9 of 400 rows marks padding"),
    "padding in unsigned": (
        ".npy",
        npy(np.where(TOKEN[:, None] == 390, 255, IDS[:, :1]).astype(np.uint8)),
        {"first": "tokens"},
        EXPERTS,
        "255",
    ),
    "float16 above what it holds": (
        ".npy",
        npy(np.array([[0, 2048], [5, 7]], np.float16)),
        {"first": "tokens"},
        "below 2048",
        "float16",
    ),
    "bfloat16 above what it holds": (
        ".pt",
        saved(torch.tensor([[0, 256], [5, 7]]).bfloat16()),
        {"first": "tokens"},
        "below 256",
        "bfloat16",
    ),
    "float16 in a list of passes": (
        ".pt",
        saved([np.array([[0, 2048]], np.float16), np.array([[5, 7], [1, 2]], np.float32)]),
        {},
        "below 2048",
    ),
    "weights": (".npy", npy(LOGITS), {}, "whole numbers", "--top-k"),
    "weights of chosen experts": (".npy", npy(-np.sort(-LOGITS, axis=1)), {"top_k": 4}, "fall in every row", "weights"),
    "as many columns as k": (
        ".npy",
        npy(LOGITS[:, :4]),
        {"top_k": 4},
        "--top-k: got '4 with logits of the shape (50, 4)",
    ),
    "logits of other experts": (".npy", npy(LOGITS), {"top_k": 4, "experts": 8}, EXPERTS, "16"),
    "transposed logits": (".npy", npy(LOGITS.T), {"top_k": 4, "experts": 16}, EXPERTS, "transpose"),
    "logits with nan": (".npy", npy(np.where(LOGITS > 2, np.nan, LOGITS)), {"top_k": 4}, "nan or inf"),
    "logits with inf": (".npy", npy(np.where(LOGITS > 2, np.inf, LOGITS)), {"top_k": 4}, "nan or inf"),
    "logits without fractions": (".npy", npy(np.rint(LOGITS * 99)), {"top_k": 4}, "0 to 65535"),
    "another k": (".npy", npy(IDS), {"top_k": 4}, "--top-k: got 4", "8, the ids per token"),
    "k of 0": (".npy", npy(IDS), {"top_k": 0}, "--top-k: got 0"),
    "a token with an expert twice": (
        ".npy",
        npy(np.where((TOKEN[:, None] > 380) & (np.arange(8) > 6), IDS[:, :1], IDS)),
        {},
        "19 of 400 tokens like it",
    ),
    "layers of unknown order": (".npy", npy(LAYERS), {}, FIRST, "(3, 400, 8)"),
    "layers without a number": (".npy", npy(LAYERS), {"first": "layers"}, "--layer: got None", "0 to 2"),
    "three dimensions, k first": (".npy", npy(LAYERS), {"first": "k", "layer": 0}, FIRST, "layers, tokens"),
    "csv with numbers as names": (".csv", lines(IDS, "0,1,2,3,4,5,6,7"), {}, "first line", "--header"),
    "csv with numbers from 1 as names": (".csv", lines(ONES, "1"), {}, "first line", "--header"),
    "csv with names of half": (".csv", lines(PAIRS, "token,7"), {}, "first line", "--header"),
    "csv with tokens, without names": (".csv", rows(TOKEN, drawn(400, 2, 300, 5)), {}, "--columns"),
    "csv with tokens from 1000, without names": (".csv", rows(TOKEN + 1000, IDS), {}, FIRST),
    "csv with layers, without names": (".csv", rows(np.arange(400) // 200 + 300, IDS), {}, FIRST),
    "csv with layers and tokens": (
        ".csv",
        csv(layer=np.arange(3).repeat(2), token=[0, 1] * 3, expert_0=PAIRS[:, 0], expert_1=PAIRS[:, 1]),
        {},
        "--layer: got None",
        "0, 1, 2",
    ),
    "csv with names that say nothing": (".csv", csv(a=IDS[:, 0], b=IDS[:, 1]), {}, COLUMNS, "'a' int64 0 to"),
    "csv with a column that says nothing": (".csv", csv(request=TOKEN, **WIDE), {}, COLUMNS, "'request'"),
    "csv with numbers of columns missing": (".csv", csv(expert_0=IDS[:, 0], expert_2=IDS[:, 1]), {}, COLUMNS),
    "csv with two kinds of names": (".csv", csv(expert_0=IDS[:, 0], topk_1=IDS[:, 1]), {}, COLUMNS),
    "csv with one token twice": (".csv", csv(token=TOKEN // 2, **WIDE), {}, "a row per token", "several layers"),
    "csv with two tokens": (
        ".csv",
        csv(token=TOKEN, position=TOKEN, **WIDE),
        {},
        "'token' and 'position'",
        "--columns",
    ),
    "long csv with a name that says nothing": (".csv", csv(token=LONG["token"], e0=LONG["expert"]), {}, COLUMNS),
    "csv with equal names": (".csv", lines(PAIRS, "expert,expert"), {}, "different names"),
    "csv with a misspelt column": (".csv", csv(a=PAIRS[:, 0], b=PAIRS[:, 1]), {"columns": "a,d"}, "--columns: got 'd'"),
    "csv with a misspelt role": (
        ".csv",
        csv(a=PAIRS[:, 0], b=PAIRS[:, 1]),
        {"columns": "tokens=a,b"},
        "--columns: got 'tokens'",
        "did you mean 'token'?",
    ),
    "csv without ids": (
        ".csv",
        csv(a=PAIRS[:, 0], b=PAIRS[:, 1]),
        {"columns": "token=a"},
        "--columns",
        "at least one column",
    ),
    "a layer of a csv without layers": (".csv", csv(**WIDE), {"layer": 1}, "--layer: got 1", "no column of layers"),
    "long csv without tokens": (
        ".csv",
        csv(layer=[3, 3, 3, 4], expert_ids=[52, 32, 7, 11]),
        {"layer": 3},
        "--top-k: got",
        "none, with 3 rows",
    ),
    "long csv without tokens of another k": (
        ".csv",
        csv(expert=[52, 32, 7]),
        {"top_k": 2},
        "--top-k: got '2, with 3 rows",
    ),
    "long csv, unequal": (".csv", csv(token=[0, 0, 1], expert=[1, 2, 3]), {}, "1 to 2 for a token"),
    "long csv, apart": (".csv", csv(token=[0, 1, 2, 0, 2, 1], expert=[1, 2, 3, 2, 3, 1]), {}, "next to each other"),
    "long csv of equal requests": (
        ".csv",
        csv(token=[0, 1, 2] * 2, expert=[1, 2, 3, 2, 3, 1]),
        {},
        "--top-k: got 'none",
        "several layers, requests",
    ),
    "long csv, other slots": (".csv", csv(token=[0, 0, 1, 1], slot=[0, 1, 0, 2], expert=[1, 2, 3, 4]), {}, "slots"),
    "slots beside columns": (".csv", csv(slot=TOKEN, **WIDE), {}, COLUMNS),
    "list of equal arrays": (
        ".pt",
        saved([torch.tensor(layer) for layer in LAYERS]),
        {},
        FIRST,
        "(400, 8) x 3",
        "passes",
    ),
    "list of passes times layers": (".pt", saved([part for part in HOOKS for _ in range(2)]), {}, FIRST, "passes"),
    "list of layers times passes": (".pt", saved(HOOKS * 2), {}, FIRST, "passes"),
    "a layer of passes": (".pt", saved(HOOKS), {"layer": 1}, "--layer: got 1", "passes of one layer"),
    "passes as layers": (".pt", saved(HOOKS), {"first": "layers"}, "--first: got 'layers'", "passes of one layer"),
    "a layer of equal passes": (
        ".pt",
        saved([torch.tensor(layer) for layer in LAYERS]),
        {"first": "passes", "layer": 1},
        "--layer: got 1",
    ),
    "passes of different k": (
        ".pt",
        saved([torch.tensor(IDS), torch.tensor(IDS[:, :4])]),
        {"first": "passes"},
        "the same k in each pass",
    ),
    "passes of an array": (".npy", npy(IDS), {"first": "passes"}, FIRST, "is no list"),
    "layers without a layer": (
        ".pt",
        saved({f"layer_{n}": torch.tensor(layer) for n, layer in enumerate(LAYERS)}),
        {},
        "--layer: got None",
        "0 to 2",
    ),
    "numbers without a meaning": (
        ".pt",
        saved({n: torch.tensor(layer) for n, layer in enumerate(LAYERS)}),
        {},
        FIRST,
        "passes",
    ),
    "a number and a text": (
        ".pt",
        saved({1: torch.tensor(IDS), "1": torch.tensor(IDS)}),
        {"key": "1"},
        "--key: got '1'",
    ),
    "a column of texts": (
        ".parquet",
        table(token=["a", "b"], expert_ids=PAIRS[:2]),
        {},
        "string with 0 empty in column 'token'",
    ),
    "lists of different lengths": (".parquet", parquet([[1], [1, 2]], name="ids"), {}, "rows of other lengths"),
    "a key and columns": (".parquet", table(a=PAIRS, b=PAIRS), {"key": "a", "columns": "b"}, "--key"),
    "lists in two columns": (".parquet", table(a=PAIRS, b=PAIRS), {"columns": "a,b"}, "--columns"),
    "a column that is not there": (".parquet", parquet(PAIRS.tolist()), {"columns": "ids"}, "--columns: got 'ids'"),
    "columns of an array": (".npy", npy(IDS), {"columns": "1"}, "--columns: got '1'", "a .npy has no columns"),
    "SGLang with a few shared": (
        ".pt",
        sglang(np.stack([np.where(TOKEN[:, None] % 2, SHARED[:, -8:], IDS)]), logical=torch.arange(64)[None]),
        {},
        "0 to 64",
        "0 to 63",
    ),
    "SGLang with shared ones at first": (
        ".pt",
        sglang(np.stack([np.where(TOKEN[:, None] < 9, SHARED[:, -8:], IDS)]), logical=torch.arange(64)[None]),
        {},
        "0 to 64",
        "0 to 63",
    ),
    "SGLang of other experts": (
        ".pt",
        sglang(LAYERS, logical=torch.arange(64).repeat(3, 1)),
        {"layer": 1, "experts": 65},
        EXPERTS,
        "64, as",
    ),
    "vLLM of different shapes": (
        ".json",
        completion(LAYERS.swapaxes(0, 1), LAYERS[:2].swapaxes(0, 1)),
        {"layer": 1},
        "equal layers and k",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_open_is_asked_in_one_line(name, tmp_path, recwarn):
    suffix, content, options, *words = ASKED[name]
    path = tmp_path / f"ids{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        reading.read(path, Options(**options))
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert "\n" not in message and not recwarn.list


FILES = {  # options, and the shape and first ids that are read, or words of the line
    "c_tk_f16.npy": ({}, (40, 8), [11, 3, 20, 13, 2, 59, 53, 48]),
    "csv_token_first.csv": ({}, (40, 8), [11, 3, 20, 13, 2, 59, 53, 48]),
    "csv_long_te.csv": ({"experts": 64}, (3, 2), [10, 20]),
    "csv_llamacpp_k1.csv": ({"layer": 3, "top_k": 1, "experts": 64}, (3, 1), [52]),
    "p_layers_long.parquet": ({"layer": 3}, (40, 8), None),
    "s_per_token_fused_shared.pt": ({"layer": 1}, (34, 6), [51, 12, 20, 5, 15, 47]),
    "t_hook_steps.pt": ({}, (21, 8), [48, 25, 8, 44, 29, 38, 21, 2]),
    "t_numpy_in_pt.pt": ({}, (40, 8), [11, 3, 20, 13, 2, 59, 53, 48]),
}
OPEN = {
    "csv_llamacpp_k1.csv": "--layer: got None; allowed: 3, 4, of column 'layer_id'",
    "csv_long_te.csv": EXPERTS,
    "f_pad.npy": "-1 in 5 of 40 rows marks padding",
    "h_eplb_weight.npy": FIRST,
    "p_layers_long.parquet": "--layer: got None; allowed: 0, 1, 2, 3, of column 'layer'",
    "s_per_token_fused_shared.pt": "--layer: got None; allowed: 0 to 5",
    "s_stat_mixtral.pt": "counts per expert",
}


@pytest.mark.parametrize("name", FILES)
def test_files_from_the_field_are_read(name, recwarn):
    options, shape, first = FILES[name]
    ids = reading.read(FIELD / name, Options(**options)).ids
    assert ids.shape == shape and (first is None or ids[0].tolist() == first) and not recwarn.list


@pytest.mark.parametrize("name", OPEN)
def test_files_from_the_field_are_asked_about(name):
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        reading.read(FIELD / name)
    assert OPEN[name] in str(caught.value)


def test_layers_of_a_table_are_those_of_its_rows():
    rows_of = pq.read_table(FIELD / "p_layers_long.parquet").to_pylist()
    for layer in range(4):
        expected = [row["expert_ids"] for row in rows_of if row["layer"] == layer]
        assert reading.read(FIELD / "p_layers_long.parquet", Options(layer=layer)).ids.tolist() == expected


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, "layer") for name in ("layer", "layer_id", "Layer", "layerIdx", "moe_layer_3")),
        *((name, "token") for name in ("token", "token_id", "tok", "position", "row", "token index")),
        *((name, "slot") for name in ("slot", "k", "choice_id")),
        *(
            (name, "expert")
            for name in (
                "expert",
                "expert_ids",
                "experts_0",
                "topk_ids_3",
                "topkIdx",
                "ids",
                "selected experts",
                "indices",
            )
        ),
        *((name, "weights") for name in ("weight", "topk_weights", "router_logits", "expert_score_0", "probs")),
        *(
            (name, "counts")
            for name in (
                "count",
                "expert_load",
                "num_tokens",
                "tokens_per_expert",
                "layer_count",
                "load_0",
                "expert_map",
            )
        ),
        *((name, "index") for name in ("", "Unnamed: 0", "__index_level_0__")),
        *((name, "numbered") for name in ("0", "17")),
        *(
            (name, "")
            for name in (
                "a",
                "id",
                "index",
                "e0",
                "num_experts",
                "expert_name",
                "next_token",
                "layer_token",
                "physical_expert",
                "step",
            )
        ),
    ],
)
def test_what_a_name_says(name, role):
    assert role_of(name) == role


def test_an_index_that_does_not_number_rows_is_asked_about(tmp_path):
    path = tmp_path / "ids.csv"
    path.write_bytes(lines(np.column_stack([IDS[:, 0], IDS]), ",0,1,2,3,4,5,6,7"))
    with pytest.raises(UserError, match="--columns"):
        reading.read(path)


def test_expected_repeats_are_those_of_independent_columns():
    """Two columns of 0 and 1 with halves of each agree in half of the rows."""
    halves = np.array([[0, 1], [1, 0], [0, 1], [1, 0]] * 5)
    assert writing.expected_repeats(halves).tolist() == [10, 10]
    ids = drawn(2000, 4, 32)
    shuffled = np.stack([np.random.default_rng(n).permutation(column) for n, column in enumerate(ids.T)], axis=1)
    pairs = sum((shuffled[:, a] == shuffled[:, b]).sum() for a, b in itertools.combinations(range(4), 2))
    assert writing.expected_repeats(ids).sum() / 2 == pytest.approx(pairs, rel=0.15)


@pytest.mark.parametrize(
    ("ids", "proven"),
    [
        (drawn(40, 8, 64), True),
        (drawn(20, 8, 64), False),  # 9 repeats expected
        (drawn(4000, 2, 128), True),
        (drawn(900, 2, 128), False),
        (drawn(9000, 1, 8), False),
        (np.column_stack([IDS, TOKEN + 64]), False),  # a column that shares no value
        (np.column_stack([IDS, 64 + TOKEN % 2]), False),
        (np.arange(3200).reshape(400, 8), False),
        (np.vstack([IDS, IDS[:1, [0, *range(7)]]]), False),  # a repeat
    ],
    ids=["enough", "few", "pairs", "few pairs", "one each", "tokens", "layers", "all different", "a repeat"],
)
def test_what_repeats_prove(ids, proven):
    assert bool(writing.proof_of(ids)) == proven


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([0, 0, 1, 5], True),
        ([5, 1, 1, 0], True),
        ([0, 1, 2, 3, 0, 1, 2, 3], True),
        ([0, 3, 1, 2], False),
        ([3, 3, 4, 0, 9, 2], False),
    ],
    ids=["rising", "falling", "requests", "ids", "some steps"],
)
def test_columns_that_number_rows(column, expected):
    assert writing.numbers_rows(np.array(column)) == expected


def test_equal_logits_go_to_the_lowest_ids_and_are_counted(tmp_path):
    path = tmp_path / "logits.npy"
    path.write_bytes(npy(np.array([[0.5, 1, 0.5, 0.5], [-np.inf, 1.5, 0, 1], [0, 0, 0, 0]])))
    record = reading.read(path, Options(top_k=2))
    assert record.ids.tolist() == [[1, 0], [1, 3], [0, 1]] and "2 tokens have equal logits" in record.evidence
    assert record.experts == 4
    many = np.round(np.random.default_rng(4).random((30, 64)), 1)
    path.write_bytes(npy(many))
    expected = [sorted(range(64), key=lambda expert: (-row[expert], expert))[:9] for row in many]
    assert reading.read(path, Options(top_k=9)).ids.tolist() == expected


SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(7, 20), st.integers(0, 99))


@SETTINGS
@given(SIZES)
def test_what_the_package_writes_is_read_back(tmp_path, sizes):
    ids = drawn(*sizes)
    write(tmp_path / "trace.parquet", ids, sizes[2])
    record = reading.read(tmp_path / "trace.parquet")
    assert record.ids.dtype == np.int32 and record.ids.tolist() == ids.tolist()


WRITERS = {
    ".npy": lambda ids: npy(ids),
    ".npy transposed": lambda ids: npy(ids.T),
    ".npz": lambda ids: npz(ids=ids),
    ".csv": lambda ids: lines(ids),
    ".csv of pandas": lambda ids: lines(ids, ",".join(map(str, range(ids.shape[1])))),
    ".pt": lambda ids: saved(torch.tensor(ids)),
    ".pt of passes": lambda ids: saved([torch.tensor(part) for part in np.split(ids, [1, 2])]),
    ".parquet": lambda ids: table(ids=ids),
}


@SETTINGS
@given(SIZES, st.sampled_from(sorted(WRITERS)))
def test_an_array_gives_its_ids_or_a_question(tmp_path, sizes, name):
    ids = drawn(*sizes)
    path = tmp_path / f"ids{name.split()[0]}"
    path.write_bytes(WRITERS[name](ids))
    try:
        record = reading.read(path, Options(experts=sizes[2]))
    except UserError:
        return
    assert record.ids.tolist() == ids.tolist()


@SETTINGS
@given(
    st.permutations(["token", "layer", *(f"expert_{slot}" for slot in range(8))]),
    st.sampled_from(["x", "value", "slot", "request", "k", "expert"]),
    st.integers(0, 9),
)
def test_the_order_of_columns_does_not_matter_and_other_names_are_asked_about(tmp_path, order, name, renamed):
    columns = {"token": TOKEN, "layer": TOKEN * 0 + 3, **WIDE}
    path = tmp_path / "ids.csv"
    path.write_bytes(csv(**{column: columns[column] for column in order}))
    assert reading.read(path).ids.tolist() == IDS.tolist()
    order[renamed] = name
    path.write_bytes(lines(np.stack([columns.get(column, IDS[:, 0]) for column in order], axis=1), ",".join(order)))
    with pytest.raises(UserError, match=r"--columns|columns: |--first"):
        reading.read(path)


@SETTINGS
@given(st.permutations(["layer_id", "token_idx", "slot", "expert", "weight"]), st.integers(0, 10**6))
def test_long_form_in_any_order_of_columns_and_rows(tmp_path, order, seed):
    rows_of = np.random.default_rng(seed).permutation(3200)
    columns = {
        "layer_id": np.full(3200, 4),
        "token_idx": TOKEN.repeat(8),
        "slot": np.tile(np.arange(8), 400),
        "expert": IDS.ravel(),
        "weight": np.full(3200, 0.5),
    }
    path = tmp_path / "ids.parquet"
    path.write_bytes(table(**{column: columns[column][rows_of] for column in order}))
    assert reading.read(path).ids.tolist() == IDS.tolist()


@SETTINGS
@given(st.integers(2, 40), st.integers(2, 12), st.integers(1, 10**4), st.integers(0, 10**4))
def test_counts_are_never_ids(tmp_path, layers, experts, mean, seed):
    """Loads of a few experts in each layer, from a few tokens to many."""
    counts = np.random.default_rng(seed).multinomial(mean * experts, [1 / experts] * experts, layers)
    path = tmp_path / "counts.npy"
    for array in (counts, counts.T, counts.astype(np.float32), counts[None]):
        path.write_bytes(npy(array))
        for known in (None, experts):
            with pytest.raises(UserError):
                reading.read(path, Options(experts=known))


@pytest.mark.parametrize(("tokens", "proven"), [(80, False), (128, True)])
def test_how_often_chance_would_repeat_an_id_is_counted_once_a_pair(tokens: int, proven: bool) -> None:
    """Two columns that hold each of 8 experts alike: 10 pairs of 80 tokens are too few, 16 of 128 are enough."""
    rng = np.random.default_rng(0)
    first = rng.permutation(np.tile(np.arange(8), tokens // 8))
    shift = rng.permutation(np.tile(np.arange(1, 8), -(-tokens // 7))[:tokens])
    ids = np.stack([first, (first + shift) % 8], axis=1)
    assert bool(writing.proof_of(ids)) == proven and writing.expected_repeats(ids).sum() / 2 == pytest.approx(
        tokens / 8, rel=0.1
    )


def test_the_most_ids_are_not_too_many() -> None:
    writing.check_most(5, "here", 5)
    with pytest.raises(UserError, match="6 in here"):
        writing.check_most(6, "here", 5)


@pytest.mark.parametrize(
    ("counts", "passes"),
    [
        ((300, 300, 70, 70, 70), True),  # two of one length and three of another: no number of layers divides both
        ((300, 300, 70, 70), False),  # two layers of two passes, or passes of equal lengths
        ((300, 70, 300, 70), False),
        ((300, 70, 30), True),
    ],
)
def test_arrays_of_several_lengths_are_passes_where_no_number_of_layers_explains_them(counts, passes):
    assert series._are_passes([(count, 8) for count in counts]) is passes
