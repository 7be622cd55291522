"""The accuracy matrix: kernels against what codes stand for, formats against weights before, and the command that prints both."""

import csv
import io
import json
import math
import sys
import types

import pyarrow as pa
import pytest
import torch

from moe_routing_bench.benches.experts import BENCH
from moe_routing_bench.cli import main as cli
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.measure import accuracy
from moe_routing_bench.store import companions as stored
from moe_routing_bench.store.parquet import write_table
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.experts import dequant
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.implementations import Entry

SHAPE = {"tokens": 24, "hidden": 128, "intermediate": 64, "experts": 3, "top_k": 2}
IN_TORCH = ("torch_loop", "dequant", "dequant_loop")
# The cases of AutoRound's ARK (its pull request 1813), which has groups of 128
ARK = (
    "plain",
    "int4_g128",
    "int4z_g128",
    "int8_g128",
    "int8z_g128",
    "int2_g128",
    "int2z_g128",
    "e4m3_g128",
    "e5m2_g128",
)


def matrix(weights, drawn="normal", names=IN_TORCH, dtype="bf16", **axes):
    cell = cell_of("experts", **SHAPE | axes, dtype=dtype, weights=dtype if weights == "plain" else weights)
    return {row.get("implementation"): row for row in accuracy.rows(cell, drawn, names, "cpu")}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("weights", ARK)
def test_the_18_cases_of_ark(weights, dtype):
    for drawn in accuracy.DRAWS:
        rows = matrix(weights, drawn, dtype=dtype)
        assert list(rows) == (["torch_loop"] if weights == "plain" else ["dequant", "dequant_loop"])
        for row in rows.values():
            assert row["status"] == "ok" and row["reason"] is None and row["activations"] == dtype
            assert 0 < row["kernel_error"] <= row["tolerance"] < 0.02 and row["kernel_cosine"] > 0.9999
            assert row["kernel_snr_db"] == pytest.approx(-20 * math.log10(row["kernel_error"]))
            if weights == "plain":
                assert row["output_error"] == row["weight_error"] == 0
                assert row["output_snr_db"] is row["weight_snr_db"] is row["of_bound"] is None
            else:
                assert 0.2 < row["of_bound"] <= 1 + 1e-5 and 0 < row["weight_error"] < 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_format_is_within_its_bound(weights):
    for drawn in accuracy.DRAWS:
        (row,) = matrix(weights, drawn, names=(), dtype="fp32").values()
        assert 0.2 < row["of_bound"] <= 1 + 1e-5 and row["weight_snr_db"] > 0 and "status" not in row


def test_the_bound_of_an_element_is_of_the_span_of_its_group():
    """From the least to the largest where there are zero points, else as far below zero as above."""
    w = torch.cat([torch.linspace(-1, 2, 32), torch.linspace(-8, 4, 32)]).double()[None]
    got = w.clone()
    got[0, 3] += 0.01
    for name, span in (("int4z_g32", 3), ("int4_g32", 4)):
        form = WEIGHTS[name]
        assert accuracy._of_bound(form, "fp32", got, w) == pytest.approx(0.01 / span / form.error_bound("fp32"))
    got[0, 40] -= 0.2
    assert accuracy._of_bound(form, "fp32", got, w) == pytest.approx(0.2 / 16 / form.error_bound("fp32")), "the worst"


@pytest.mark.parametrize(("place", "span"), [(5, 1 + (3 * 31 / 63 - 1)), (70, 0.5 + 1.0)])
def test_the_worst_error_may_be_in_the_last_group_which_is_shorter(place, span):
    """Of 80 columns in groups of 32 the last group has 16: its elements count as all others do."""
    w = torch.cat([torch.linspace(-1, 2, 64), torch.linspace(-0.5, 1, 16)]).double()[None]
    got, form = w.clone(), WEIGHTS["int4z_g32"]
    got[0, 40] += 0.001
    got[0, place] += 0.01
    assert accuracy._of_bound(form, "fp32", got, w) == pytest.approx(0.01 / span / form.error_bound("fp32"))


def test_every_row_counts_and_biases_are_those_of_before():
    """Also that of the first token; outliers are the same ones in every run."""
    for drawn in accuracy.DRAWS:
        first, again = (matrix("int8_g32", drawn, tokens=1, top_k=1, activation="swiglu_oai") for _ in range(2))
        assert first == again and {row["status"] for row in first.values()} == {"ok"}
        assert all(0 < row["output_error"] < 0.1 for row in first.values())


def test_a_row_names_the_card_and_the_time_of_day(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    assert (accuracy.place("cuda")["gpu_name"], accuracy.place("cpu")["gpu_name"]) == ("NVIDIA X", None)
    assert accuracy.place("cpu")["ended_at"].endswith("+00:00")


def test_what_formats_lose():
    """More bits, smaller groups and zero points lose less; outliers cost integers more than floats with as many bits."""

    def snr(weights, drawn="normal"):
        (row,) = matrix(weights, drawn, names=()).values()
        return row["weight_snr_db"]

    assert snr("int8_g32") > snr("e4m3_g128") > snr("int4_g32") > snr("int4_row") > snr("int2_g32")
    assert snr("int4z_g32") > snr("int4_g32") and snr("nvfp4") > snr("mxfp4")
    lost = {name: snr(name) - snr(name, "outliers") for name in ("int8_row", "int8_g32", "e4m3_row")}
    assert lost["int8_row"] > lost["int8_g32"] > 1 > lost["e4m3_row"]


def test_quantised_rows_are_part_of_what_is_lost():
    alone, both = (
        matrix("int8_g32", names=("dequant_loop",), packed=one)["dequant_loop"] for one in ("bf16", "fp8_row")
    )
    assert both["activations"] == "fp8_row" and both["status"] == "ok"
    assert both["output_error"] > 2 * alone["output_error"] and both["weight_error"] == alone["weight_error"]


def test_wrong_and_crashing_kernels_are_rows(monkeypatch):
    cell = cell_of("experts", **SHAPE, dtype="bf16", weights="int4_g32")
    first = BENCH.definition().build(cell, cell.seed, "cpu")["order"] == 0  # the row of token 0 is one that counts
    bad, worse = types.ModuleType("bad"), types.ModuleType("worse")

    def bind(problem, **tensors):
        call = dequant.bind_loop(problem, **tensors)

        def run():
            call()
            tensors["y"][first] *= 2

        return run

    def crash(problem, **tensors):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(bad, "bind", bind, raising=False)
    monkeypatch.setattr(worse, "bind", crash, raising=False)
    monkeypatch.setattr(
        type(BENCH),
        "load",
        lambda self, name: {"dequant": bad, "dequant_uncached": worse}.get(name, Entry(dequant, "loop")),
    )
    monkeypatch.setattr(type(BENCH), "__getitem__", lambda self, name: types.SimpleNamespace(options={}, declares=()))
    rows = matrix("int4_g32", names=("dequant", "dequant_uncached", "dequant_loop"))
    assert {name: row["status"] for name, row in rows.items()} == {
        "dequant": "incorrect",
        "dequant_uncached": "crashed",
        "dequant_loop": "ok",
    }
    assert "relative L2 error" in rows["dequant"]["reason"] and rows["dequant"]["kernel_error"] > 0.05
    assert rows["dequant_uncached"]["reason"] == "RuntimeError: no such kernel"


def test_errors_by_hand():
    got, want = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]])
    found = accuracy._errors("x", got, want)
    assert found["x_error"] == pytest.approx(1 / math.sqrt(18)) and found["x_snr_db"] == pytest.approx(
        10 * math.log10(18)
    )
    assert found["x_cosine"] == pytest.approx(21 / (5 * math.sqrt(18)))


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*arguments):
        named = arguments if arguments[0] in ("accuracy", "compile") else ("accuracy", *arguments)
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *named])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


SMALL = ("--tokens", "8", "--hidden", "32", "--intermediate", "32", "--experts", "2")


def test_the_command_prints_the_matrix(call):
    code, out, said = call(
        *SMALL,
        "--weights",
        "plain,int4_g32",
        "--activations",
        "bf16,fp8_row",
        "--implementations",
        "torch_loop,dequant_loop",
    )
    assert "accuracy " in said and "100%" in said, "how far it is"
    lines = [line.split()[:3] for line in out.splitlines()[2:]]
    assert (
        code == 0
        and "of bound" in out
        and lines
        == [
            [weights, activations, drawn]
            for weights in ("bf16", "int4_g32")
            for activations in ("bf16", "fp8_row")
            for drawn in ("normal", "outliers")
        ]
    )


def test_the_command_prints_all_columns(call):
    arguments = (*SMALL, "--weights", "int8_row", "--activations", "fp32", "--drawn", "outliers")
    code, out, _ = call(*arguments, "--json")
    found = json.loads(out)
    assert code == 0 and [row["implementation"] for row in found] == ["dequant", "dequant_uncached", "dequant_loop"]
    code, out, _ = call(*arguments, "--csv")
    table = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["implementation"] for row in table] == [row["implementation"] for row in found]
    assert float(table[0]["of_bound"]) == pytest.approx(found[0]["of_bound"])


def test_what_was_compared_is_kept_when_the_rest_is_stopped(call, tmp_path, monkeypatch):
    path, compare, done = tmp_path / "accuracy.parquet", accuracy.rows, []

    def stopped(cell, kind, *more):
        if done:
            raise KeyboardInterrupt
        done.append(kind)
        return compare(cell, kind, *more)

    monkeypatch.setattr(accuracy, "rows", stopped)
    asked = (*SMALL, "--weights", "int8_row", "--activations", "fp32", "--implementations", "dequant")
    code, printed, error = call(*asked, "--out", str(path), "--json")
    assert [row["drawn"] for row in json.loads(printed)] == ["normal"] and "of 1 of 2 cells\n" in error
    kept = stored.read_matrix(path, "cpu").to_pylist()
    assert code == 130 and [(row["implementation"], row["drawn"]) for row in kept] == [("dequant", "normal")]


def test_the_matrix_is_kept_in_a_file(call, tmp_path):
    path = tmp_path / "accuracy.parquet"
    code, out, _ = call(
        *SMALL,
        "--weights",
        "plain,mxfp4",
        "--activations",
        "fp16",
        "--implementations",
        "dequant_loop",
        "--out",
        str(path),
    )
    rows = stored.read_matrix(path, "cpu").to_pylist()
    assert code == 0 and out.endswith(f"wrote {path}\n")
    assert [(row["weights"], row["drawn"], row["status"]) for row in rows] == [
        ("fp16", "normal", None),
        ("fp16", "outliers", None),
        ("mxfp4", "normal", "ok"),
        ("mxfp4", "outliers", "ok"),
    ]
    assert all((row["hidden"], row["seed"], row["platform"], row["gpu_name"]) == (32, 17, "cpu", None) for row in rows)
    assert rows[2]["torch_version"] == torch.__version__ and rows[2]["kernel_error"] > 0 and rows[2]["ended_at"]


def test_kernels_of_the_matrix_are_compiled_ahead_where_the_config_asks_for_it(call, tmp_path, monkeypatch):
    """Those of all that the command compares in without options, beside those of the grid's cells; nothing of a CPU's smaller grid."""
    pytest.importorskip("cutlass")
    compiled, rows = [], []
    monkeypatch.setattr(
        type(BENCH), "precompile", lambda _, name, cell, target: compiled.append((name, cell, target.arch))
    )
    monkeypatch.setattr(accuracy, "rows", lambda cell, *_: rows.append(cell) or [])
    monkeypatch.setenv("MOE_ROUTING_KERNELS_CACHE", str(tmp_path))
    one = "- {benches: [%s], implementations: [cute], tokens: [64], hidden: [32], experts: [4], top_k: [2]}\n"
    grid = f"grid:\n  {one % 'pack'}cpu:\n  grid:\n    {one % 'combine'}"
    for text in ("", "accuracy: true\n"):
        (tmp_path / "c.yaml").write_text(text + grid)
        call("compile", "--config", str(tmp_path / "c.yaml"), "--arch", "sm_90a")
    call("accuracy")
    (first, again), matrix = compiled[:2], compiled[2:]
    assert first == again and first[0] == "cute" and first[1].bench == "pack"
    assert {cell for _, cell, _ in matrix} == set(rows) and len(set(rows)) == 2 * (1 + len(WEIGHTS))
    assert {name for name, _, _ in matrix} == {one.name for one in BENCH.implementations}
    assert {arch for *_, arch in compiled} == {"sm_90a"}


def test_a_file_of_other_columns_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no columns: \['speed'\]"):
        stored.write_matrix(tmp_path / "accuracy.parquet", [{"weights": "mxfp4", "speed": 1}])
    write_table(tmp_path / "other.parquet", pa.table({"weights": ["mxfp4"]}))
    with pytest.raises(UserError, match="other columns in"):
        stored.read_matrix(tmp_path / "other.parquet", "cpu")
    with pytest.raises(UserError, match="accuracy rows: got"):
        stored.read_matrix(tmp_path / "none.parquet", "cpu")
    stored.write_matrix(tmp_path / "accuracy.parquet", [{"weights": "mxfp4", "platform": "cpu"}])
    assert stored.read_matrix(tmp_path / "accuracy.parquet", "cpu").num_rows == 1
    with pytest.raises(UserError, match=r"those of cpu in .*; allowed: those of nvidia-h200"):
        stored.read_matrix(tmp_path / "accuracy.parquet", "nvidia-h200")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--weights", "int4_g31"], "error: --weights: got 'int4_g31'"),
        (["--activations", "int8"], "error: --activations: got 'int8'"),
        (["--drawn", "uniform"], "error: --drawn: got 'uniform'; allowed: normal, outliers"),
        (["--implementations", "torch"], "error: --implementations: got 'torch'"),
        (
            ["--weights", "int2_g32", "--hidden", "66"],
            "error: --hidden: got 66; allowed: a multiple of 4 with weights int2_g32",
        ),
        (["--json", "--csv"], "error: --csv: got 'together with --json'"),
    ],
)
def test_mistakes_are_one_line(call, arguments, said):
    code, out, err = call(*arguments)
    assert code == 2 and not out and err.startswith(said) and err.count("\n") == 1


def test_a_failure_is_in_the_exit_status(call, monkeypatch):
    monkeypatch.setattr(accuracy, "rows", lambda *_: [{"weights": "int8_row", "status": "incorrect"}])
    code, _, err = call(*SMALL, "--weights", "int8_row", "--activations", "bf16", "--drawn", "normal")
    assert code == 1 and err.endswith("\n1 of 1 rows are of implementations that failed\n")
