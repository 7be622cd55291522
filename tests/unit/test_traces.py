"""Recorded routing of other programs: the ids that went in, out of every kind of file, and everything else refused in one line."""

import io
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_routing_bench.cli import main as cli
from moe_routing_bench.statistics import load_statistics
from moe_routing_bench.traces import Options, reading, writing
from moe_routing_bench.traces.writing import CAPACITY_FACTORS, summary, write
from moe_routing_bench.workload import trace
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import UserError
from trace_files import completion, lines, npy, npz, parquet, saved, sglang

IDS = np.array([[3, 0], [1, 2], [0, 3], [2, 1], [5, 3]], np.int32)
TOKENS = ("--first", "tokens")
LAYERS = np.stack([IDS[::-1], IDS, IDS[:, ::-1]])  # (layers, tokens, k)


PADDED = np.concatenate([LAYERS, np.full((3, 2, 2), -1, np.int32)], axis=1)
DENSE = np.concatenate([np.full((1, 5, 2), -1, np.int32), LAYERS])

GOOD = {  # suffix, bytes, options: each holds IDS
    "npy": (".npy", npy(IDS), {"first": "tokens"}),
    "npy of uint8": (".npy", npy(IDS.astype(np.uint8)), {"first": "tokens"}),
    "npy of whole floats": (".npy", npy(IDS.astype(np.float16)), {"first": "tokens"}),
    "npy in the order of Fortran": (".npy", npy(np.asfortranarray(IDS)), {"first": "tokens"}),
    "npy, layers first": (".npy", npy(LAYERS), {"layer": 1, "first": "layers"}),
    "npy, tokens first": (".npy", npy(LAYERS.swapaxes(0, 1)), {"layer": 1, "first": "tokens"}),
    "npz of one array": (".npz", npz(anything=IDS), {"first": "tokens"}),
    "npz by name": (".npz", npz(weights=IDS / 2, ids=IDS), {"key": "ids", "first": "tokens"}),
    "csv": (".csv", lines(IDS), {"first": "tokens"}),
    "csv with names": (".CSV", lines(IDS, "expert_0,expert_1"), {"first": "tokens"}),
    "csv of numpy.savetxt": (".csv", lines(IDS.astype(float)), {"first": "tokens"}),
    "parquet": (".parquet", parquet(IDS.tolist()), {}),
    "parquet of fixed lists": (
        ".parquet",
        parquet(IDS.tolist(), pa.list_(pa.int16(), 2), "ids"),
        {"key": "ids", "first": "tokens"},
    ),
    "tensor": (".pt", saved(torch.tensor(IDS)), {"first": "tokens"}),
    "tensor of bfloat16": (".pth", saved(torch.tensor(IDS).bfloat16()), {"first": "tokens"}),
    "tensor by name": (
        ".pt",
        saved({"logits": torch.ones(2), "ids": torch.tensor(IDS)}),
        {"key": "ids", "first": "tokens"},
    ),
    "tensor by number": (".pt", saved({3: torch.tensor(IDS)}), {"key": "3", "first": "tokens"}),
    "tensor of layers": (".pt", saved(torch.tensor(LAYERS)), {"layer": 1, "first": "layers"}),
    "Megatron": (".pt", saved([torch.tensor(one) for one in LAYERS]), {"layer": 1, "first": "layers"}),
    "SGLang": (".pt", sglang(LAYERS[:, :2], LAYERS[:, 2:]), {"layer": 1}),
    "SGLang with padding": (".pt", sglang(PADDED), {"layer": 1}),
    "SGLang with a dense layer": (".pt", sglang(DENSE), {"layer": 2}),
    "vLLM": (".json", completion(LAYERS.swapaxes(0, 1)), {"layer": 1}),
    "vLLM, two choices": (".json", completion(*np.split(LAYERS.swapaxes(0, 1), [3])), {"layer": 1}),
}


@pytest.mark.parametrize("name", GOOD)
def test_ids_of_every_kind(name, tmp_path):
    suffix, content, options = GOOD[name]
    path = tmp_path / f"ids{suffix}"
    path.write_bytes(content)
    record = reading.read(path, Options(**options))
    assert record.evidence
    write(tmp_path / "out.parquet", record.ids, record.experts or 6)
    assert trace.read(tmp_path / "out.parquet", 5, 6, 2).tolist() == IDS.tolist()


class Object:
    """What a pickle could execute."""

    def __reduce__(self):
        return print, ("executed",)


def objects():
    buffer = io.BytesIO()
    np.save(buffer, np.array([Object()], object), allow_pickle=True)
    return buffer.getvalue()


STAT = saved({"rank": 0, "logical_count": torch.ones(2, 3, 6), "average_utilization_rate_over_window": None})
BAD = {  # suffix, bytes, options, and words of the message
    "another suffix": (".pkl", b"", [], "suffix of the input: got '.pkl'", ".npy"),
    "a pickle in a npy": (".npy", objects(), [], "got 'ids.npy'", "pickled objects, which could run code"),
    "a pickle in a pt": (".pt", saved(Object()), [], "got 'ids.pt'", "without pickled objects"),
    "objects in an array in a pt": (
        ".pt",
        saved({"ids": np.array([Object()], object)}),
        [],
        "got 'ids.pt'",
        "it holds",
    ),
    "a pickle of another program": (".pt", pickle.dumps({"ids": 1}), [], "got 'ids.pt'"),
    "garbage": (".npy", b"junk" * 9, [], "got 'ids.npy'"),
    "a npy cut short": (".npy", npy(IDS)[:-4], [], "got 'ids.npy'", "a whole .npy file"),
    "a npz cut short": (".npz", npz(ids=IDS)[:-9], [], "got 'ids.npz'"),
    "an empty csv": (".csv", b"", [], "Empty CSV"),
    "an empty pt": (".pt", b"", [], "got 'ids.pt'"),
    "no token": (".npy", npy(IDS[:0]), [], "got 'none, of the shape (0, 2)", "at least one token"),
    "k of 0": (".npy", npy(IDS[:, :0]), [], "none, of the shape (5, 0)"),
    "one dimension": (".npy", npy(IDS[0]), [], "got '(2,) in ids.npy'", "(tokens, k)"),
    "a layer of one": (".npy", npy(IDS), ["--layer", "1"], "--layer: got 1", "none"),
    "layers of unknown order": (
        ".npy",
        npy(LAYERS),
        ["--layer", "1"],
        "--first: got",
        "layers for (layers, tokens, k)",
        "(3, 5, 2)",
    ),
    "layers without a layer": (".npy", npy(LAYERS), ["--first", "layers"], "--layer: got None", "0 to 2"),
    "a layer that is not there": (
        ".npy",
        npy(LAYERS),
        ["--first", "layers", "--layer", "3"],
        "--layer: got 3",
        "0 to 2",
    ),
    "a layer below 0": (".npy", npy(LAYERS), ["--first", "layers", "--layer", "-1"], "--layer: got -1"),
    "another order": (".npy", npy(LAYERS), ["--first", "experts"], "--first: got 'experts'", "tokens, layers"),
    "below 0": (".npy", npy(IDS - 1), [], "got '-1 to 4 in ids.npy'", "0 to 65535", "-1 in 2 of 5 rows marks padding"),
    "at the number of experts": (".npy", npy(IDS), ["--experts", "5"], "got '0 to 5 in ids.npy'", "0 to 4"),
    "beyond 64 bits": (".npy", npy(IDS.astype(np.uint64) + np.uint64(2**63)), [], "0 to 65535"),
    "no experts": (".npy", npy(IDS), ["--experts", "0"], "--experts: got 0", "1 to 65536"),
    "an expert twice": (
        ".npy",
        npy(np.array([[0, 1], [2, 2]])),
        ["--first", "tokens"],
        "[2, 2] of token 1",
        "distinct",
    ),
    "fractions": (".npy", npy(IDS / 2), [], "1.5 of token 0", "whole numbers"),
    "nan": (".npy", npy(np.where(IDS == 2, np.nan, IDS)), [], "nan of token 1", "whole numbers"),
    "a mask": (".npy", npy(IDS > 1), [], "got 'bool in ids.npy'", "topk"),
    "complex": (".npy", npy(IDS * 1j), [], "complex128", "whole numbers"),
    "texts": (".npy", npy(IDS.astype(str)), [], "whole numbers"),
    "several arrays": (".npz", npz(a=IDS, b=IDS), [], "--key: got 'none'", "a, b"),
    "a misspelt array": (
        ".npz",
        npz(weights=IDS, ids=IDS),
        ["--key", "idz"],
        "--key: got 'idz'",
        "did you mean 'ids'?",
    ),
    "a key of a npy": (".npy", npy(IDS), ["--key", "ids"], "--key: got 'ids'", "a .npy has no names"),
    "ragged csv": (".csv", b"7,2\n3\n", [], "Expected 2 columns, got 1"),
    "csv with a gap": (".csv", b"7,2\n3,\n", [], "int64 with 1 empty in column '2'"),
    "csv with a word": (".csv", b"7,2\n3,x\n", [], "string with 0 empty in column '2'"),
    "csv with semicolons": (".csv", b"1;2\n3;4\n", [], "with commas"),
    "csv of another encoding": (".csv", b"\xe9,2\n1,2\n", [], "got 'ids.csv'", "UTF-8"),
    "ragged parquet": (".parquet", parquet([[1, 2], [3]]), [], "rows of other lengths"),
    "parquet with a gap": (".parquet", parquet([[1, 2], None]), [], "without a value"),
    "parquet of numbers": (".parquet", parquet([1, 2]), [], "--top-k: got 'none, with 2 rows"),
    "parquet of another column": (
        ".parquet",
        parquet([[1]], name="ids"),
        ["--key", "idz"],
        "--key: got 'idz'",
        "allowed: ids",
    ),
    "no tensor": (".pt", saved("text"), [], "str in ids.pt", "a tensor"),
    "a sparse tensor": (".pt", saved(torch.tensor(IDS).to_sparse()), [], "torch.sparse_coo"),
    "a key of a tensor": (".pt", saved(torch.tensor(IDS)), ["--key", "ids"], "--key: got 'ids'"),
    "Megatron without a recording": (".pt", saved([None]), ["--layer", "0"], "NoneType in ids.pt"),
    "Megatron without a layer": (".pt", saved([]), ["--layer", "0"], "no layer in ids.pt"),
    "SGLang in another mode": (".pt", STAT, [], "counts per expert", "per_token"),
    "SGLang without a pass": (
        ".pt",
        saved({"records": [], "last_physical_to_logical_map": torch.ones(1)}),
        [],
        "per_token",
    ),
    "SGLang, a dense layer": (".pt", sglang(DENSE), ["--layer", "0"], "layer 0 in ids.pt has no ids"),
    "SGLang with moved experts": (
        ".pt",
        sglang(LAYERS, logical=torch.arange(8).flip(0).repeat(3, 1)),
        ["--layer", "1"],
        "without EPLB",
    ),
    "SGLang, tokens first": (
        ".pt",
        sglang(LAYERS),
        ["--layer", "1", "--first", "tokens"],
        "--first: got 'tokens'",
        "layers",
    ),
    "vLLM without the flag": (
        ".json",
        b'{"choices": [{"routed_experts": null}]}',
        [],
        "--enable-return-routed-experts",
    ),
    "json of something else": (".json", b"[1, 2]", [], "a completion of vLLM"),
    "json of nothing": (".json", b"{", [], "got 'ids.json'"),
    "vLLM cut short": (".json", b'{"choices": [{"routed_experts": "k05V"}]}', [], "got 'ids.json'"),
}


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run `trace` in an empty folder; return (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "trace", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name, call, recwarn):
    suffix, content, options, *words = BAD[name]
    Path(f"ids{suffix}").write_bytes(content)
    status, out, error = call(f"ids{suffix}", "--out", "out.parquet", *options)
    assert (status, out) == (2, "") and "executed" not in error
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) <= 500
    assert not [word for word in words if word not in error], error
    assert not [one for one in recwarn if one.category is UserWarning], "more than a line"
    assert [path.name for path in Path().iterdir()] == [f"ids{suffix}"]


def test_other_bad_input(call, monkeypatch):
    Path("a.csv").write_bytes(lines(IDS, "expert_0,expert_1"))
    Path("b.csv").write_bytes(lines(IDS[:, :1]))
    Path("folder.parquet").mkdir()
    for arguments, words in (
        (["absent.npy"], "no such file"),
        (["x" * 4000 + ".npy"], "no such file"),
        (["x" * 10**4 + ".npy"], "at most 4096 letters"),
        (["folder.parquet"], "a folder"),
        (["a.csv", "b.csv", *TOKENS], "got '1 and 2 in different inputs'"),
        (["a.csv", "--out", "out.npy"], "ends with .parquet"),
        (["a.csv", *TOKENS, "--out", "folder.parquet"], "output: got 'folder.parquet'"),
        (["a.csv", *TOKENS, "--out", "a.csv/out.parquet"], "output: got 'a.csv/out.parquet'"),
    ):
        status, out, error = call(*arguments)
        assert (status, out) == (2, "") and words in error
    Path("of_eight.pt").write_bytes(sglang(IDS[None]))
    Path("ninth.npy").write_bytes(npy(np.where(IDS == 5, 8, IDS)[None]))
    assert "0 to 8 in all inputs" in call("of_eight.pt", "ninth.npy", "--first", "layers")[2], (
        "one states how many experts there are"
    )
    monkeypatch.setattr(writing, "MOST_IDS", 19)
    assert "got '20 in all inputs'; allowed: at most 19" in call("a.csv", "a.csv", *TOKENS)[2]
    monkeypatch.setattr(reading, "MOST_BYTES", 100)
    Path("zeros.npz").write_bytes(npz(ids=np.zeros((1000, 2))))
    assert "at most 100" in call("zeros.npz")[2]


SIZED = {
    ".npz": npz(ids=np.zeros((1000, 2))),
    ".csv": b"1,2\n" * 99,
    ".parquet": parquet([[1, 2]] * 9999),
    ".json": b" " * 999,
    ".pt": saved(torch.zeros(999)),
}


@pytest.mark.parametrize("suffix", SIZED)
def test_sizes_are_checked_before_anything_is_read(suffix, call, monkeypatch):
    """Also those of what a file unpacks to: the packed bytes of each are fewer than the limit, where it packs."""
    packed = suffix in (".npz", ".parquet")
    Path(f"ids{suffix}").write_bytes(SIZED[suffix])
    most = len(SIZED[suffix]) - (not packed)
    monkeypatch.setattr(reading, "MOST_BYTES", most)
    monkeypatch.setattr(guarded, "MOST_TABLE", most)
    for module, name in ((np.lib.npyio.NpzFile, "__getitem__"), (torch, "load"), (reading, "table_of")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    status, out, error = call(f"ids{suffix}")
    assert (status, out) == (2, "") and f"at most {most}" in error


def test_a_tensor_that_repeats_few_bytes_is_not_copied(call):
    Path("ids.pt").write_bytes(saved(torch.zeros(1).expand(2**20, 2**20)))
    assert f"at most {writing.MOST_VALUES}" in call("ids.pt")[2]
    Path("ids.pt").write_bytes(saved([torch.zeros(1, dtype=torch.int64).expand(2**20, 2**20)] * 2))
    assert f"at most {writing.MOST_VALUES}" in call("ids.pt", "--first", "passes")[2]


EVIL = "\x1b]0;title\x07\x1b[2J\u202e\x9b1m"
TEXTS = {  # suffix, bytes, options, exit status
    "names of a csv": (".csv", lines(IDS, f"{EVIL},b"), [], 2),
    "a column that is named": (".csv", lines(IDS, f"{EVIL},b"), ["--columns", f"{EVIL},b"], 2),
    "names in an archive": (".npz", npz(**{EVIL: IDS, "b": IDS}), [], 2),
    "names of tensors": (".pt", saved({EVIL: torch.tensor(IDS), "b": torch.tensor(IDS)}), [], 2),
    "an array of counts": (".pt", saved({f"load {EVIL}": torch.tensor(IDS)}), [], 2),
    "names of a table": (".parquet", parquet(IDS.tolist(), name=EVIL), ["--key", "ids"], 2),
    "a column of counts": (".parquet", parquet(IDS.tolist(), name=f"load {EVIL}"), [], 2),
    "a cell": (".csv", f"7,{EVIL}\n1,2\n".encode(), ["--no-header", *TOKENS], 2),
    "an object": (".pt", saved(Object()), [], 2),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_file_never_reaches_the_terminal_raw(name, call):
    suffix, content, options, expected = TEXTS[name]
    Path(f"ids{suffix}").write_bytes(content)
    status, out, error = call(f"ids{suffix}", *options)
    assert status == expected and ("\\x1b" in out + error or name in ("an object", "a cell"))
    assert all(line.isprintable() for line in (out + error).splitlines()), "a control character"


def test_the_command(call):
    Path("a.csv").write_bytes(lines(IDS))
    Path("b.npy").write_bytes(npy(IDS[:3]))
    status, out, error = call("a.csv", "b.npy", *TOKENS, "--experts", "8", "--out", "new/out.parquet")
    assert (status, error) == (0, "")
    said = dict(line.strip().rsplit("  ", 1) for line in out.splitlines()[1:-3])
    said = {name.strip(): value.strip() for name, value in said.items()}
    found = load_statistics(np.bincount(np.concatenate([IDS, IDS[:3]]).ravel(), minlength=8).tolist())
    assert (said["tokens"], said["k"], said["experts"], said["experts seen"], said["dead experts"]) == (
        "8",
        "2",
        "8",
        "5",
        "3",
    )
    assert float(said["load coefficient of variation"]) == pytest.approx(found["load_cv"], abs=1e-3)
    assert float(said["busiest expert over mean"]) == pytest.approx(found["load_max_over_mean"], abs=1e-3)
    assert "wrote new/out.parquet" in out and "--experts 8 --top-k 2" in out
    assert trace.read(Path("new/out.parquet"), 8, 8, 2).tolist() == [*IDS.tolist(), *IDS[:3].tolist()]
    assert "a.csv: (tokens, k), as --first tokens says\nb.npy: (tokens, k), as --first" in out
    status, out, _ = call("new/out.parquet")
    assert status == 0 and "6 (the highest id + 1" in out and "wrote" not in out


ROUTINGS = st.integers(1, 6).flatmap(
    lambda k: st.lists(st.permutations(range(9)).map(lambda one: one[:k]), min_size=1, max_size=12)
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROUTINGS, st.sampled_from(["npy", "csv", "pt", "parquet"]))
def test_any_routing_is_kept_and_summarised(tmp_path, rows, kind):
    content = {"npy": npy, "csv": lines, "pt": lambda ids: saved(torch.tensor(ids)), "parquet": parquet}[kind]
    path = tmp_path / f"ids.{kind}"
    path.write_bytes(content(rows))
    options = {"first": None if kind == "parquet" else "tokens", "header": False if kind == "csv" else None}
    ids = reading.read(path, Options(**options, experts=9)).ids
    assert ids.dtype == np.int32 and ids.tolist() == [list(row) for row in rows]
    found, loads = summary(ids, 9), np.bincount(ids.ravel(), minlength=9)
    limits = [min(len(ids), int(np.ceil(factor * ids.size / 9 - 1e-9))) for factor in CAPACITY_FACTORS]
    dropped = [np.maximum(loads - limit, 0).sum() / ids.size for limit in limits]
    assert found.drops == pytest.approx(dropped) and found.seen + found.dead == 9
    assert found.load_max_over_mean == pytest.approx(loads.max() / loads.mean())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(GOOD)), st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_damaged_bytes_are_read_or_refused(tmp_path, name, at, junk):
    suffix, content, options = GOOD[name]
    path, at = tmp_path / f"ids{suffix}", at % len(content)
    path.write_bytes(content[:at] + junk + content[at + len(junk) :])
    try:
        ids = reading.read(path, Options(**options | {"experts": 6})).ids
    except UserError:
        return
    assert ids.dtype == np.int32 and ids.ndim == 2 and ids.min() >= 0 and ids.max() < 6


def test_an_edited_trace_of_equal_size_is_read_again(tmp_path) -> None:
    """In place, where the file keeps its size and its number."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"expert_ids": [[0, 1], [1, 0]]}), path)
    trace.check(path, 2, 2, 2)
    known = path.stat()
    with path.open("r+b") as file:
        file.write(b"edited")
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns + 1_000_000_000))
    assert (path.stat().st_size, path.stat().st_ino) == (known.st_size, known.st_ino)
    with pytest.raises(UserError):
        trace.check(path, 2, 2, 2)


@pytest.mark.parametrize(
    ("columns", "got"),
    [
        ({"expert_ids": [[0, 2], [1, 0]]}, "ids 0 to 2"),
        ({"expert_ids": [[0, -1], [1, 0]]}, "ids -1 to 1"),
        ({"expert_ids": [[0, 1], [1, 0]], "layer": [3, 4]}, "different values of 'layer'"),
        ({"expert_ids": [[0, None], [1, 0]]}, "rows of other lengths"),
        ({"expert_ids": [[0, 1], None]}, "rows of other lengths"),
        ({"expert_ids": [[0, 1, 0, 1]]}, "1 rows"),
        ({"expert_ids": [[1, 1], [1, 0]]}, "holds an expert twice"),
    ],
)
def test_a_trace_that_just_misses_is_refused(columns: dict, got: str, tmp_path: Path) -> None:
    """Two tokens of two of two experts."""
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=got):
        trace.read(tmp_path / "t.parquet", 2, 2, 2)


def test_an_expert_twice_is_found_wherever_it_is(tmp_path: Path) -> None:
    pq.write_table(pa.table({"expert_ids": [[0, 1, 0]]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="twice"):
        trace.read(tmp_path / "t.parquet", 1, 3, 3)
