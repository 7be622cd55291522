"""The tables of whole layers: what counts as ours, which rivals a mean is over, and which times are marked."""

import importlib
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import yaml
from rows import frame, one

from moe_routing_bench.comparison import origins

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {"tokens": 4096, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "skew": 0.0}
FORMATS = dict.fromkeys(("dtype", "packed", "weights"), "bf16") | {"activation": "swiglu"}
SEEN = {"gpu_name": "NVIDIA H200", "started_at": "2026-11-28T00:00:00", "git_sha": "a" * 40, "git_dirty": False}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("layer_tables")


def cell(
    key: str, phase: str = "prefill", doubts: dict[str, object] | None = None, **us: float
) -> list[dict[str, object]]:
    """The rows of one layer by their times."""
    known = {**SIZES, **FORMATS, **SEEN, "cell": key, "phase": phase, "over_dense": 1.0, "share_of_copy": 0.5}
    return [one("layer", name, median_us=time, **(known | (doubts or {}))) for name, time in us.items()]


def shown(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, *cells: list[dict[str, object]], phase: str = "prefill"
) -> str:
    rows = frame(*(row for found in cells for row in found))
    monkeypatch.setattr(tables.stored_tables, "stored", lambda name: rows)
    return tables.layers(phase)


def test_products_of_another_package_are_a_rival_whatever_they_are_called(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cute_quack_gather` is faster than ours here: it is neither ours nor left out."""
    times = {
        "cute": 110.0,
        "cute_gather": 100.0,
        "cute_quack_gather": 90.0,
        "sonicmoe": 200.0,
        "torch_grouped_mm": 400.0,
    }
    (line,) = [line for line in shown(tables, monkeypatch, cell("a", **times)).splitlines() if "4096" in line]
    assert "0.900x (`cute_quack_gather`)" in line


def test_ours_is_what_auto_runs_and_not_the_best_of_all_variants(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"cute": 100.0, "cute_gather": 80.0, "torch_grouped_mm": 400.0}
    monkeypatch.setattr(tables.regret, "choose", lambda shape, able, entries: "cute")
    assert "| `cute` | 4.00x (`torch_grouped_mm`)" in shown(tables, monkeypatch, cell("a", **times))


def test_a_mean_names_its_rivals_and_tells_cells_with_torch_alone_apart(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = {"cute": 100.0, "torch_grouped_mm": 400.0, "cute_quack": 100.0, "sonicmoe": 121.0}
    alone = {"cute": 100.0, "torch_grouped_mm": 400.0, "cute_grouped_mm": 800.0}
    found = shown(tables, monkeypatch, cell("a", **rival), cell("b", **rival), cell("c", **alone)).splitlines()[-1]
    assert [float(ratio) for ratio in re.findall(r"([\d.]+)x", found)] == [1.0, 1.0, 4.0, 1.59]
    assert "over 2 layers" in found and "with the 1 in which" in found
    assert "in 2: `cute_quack`, `sonicmoe`" in found


@pytest.mark.parametrize(
    ("rival", "phase", "led"),
    [
        ("sonicmoe", "decode", False),
        ("sonicmoe", "prefill", True),
        ("flag_gems", "decode", True),
        ("torch_loop", "decode", False),
    ],
)
def test_at_decoding_no_lead_is_stated_over_libraries_made_for_training(
    rival: str, phase: str, led: bool, tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"cute": 100.0, "torch_grouped_mm": 400.0, rival: 200.0}
    found = shown(tables, monkeypatch, *(cell(key, phase, **times) for key in "ab"), phase=phase).splitlines()[-1]
    assert ("2.00x" in found) is led and ("x over `torch_grouped_mm`" in found) is led


def test_at_decoding_a_mean_leaves_out_layers_without_a_rival_that_people_decode_with(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"cute": 100.0, "torch_grouped_mm": 400.0, "sonicmoe": 300.0}
    cells = [cell("a", "decode", **times, vllm_triton=120.0), cell("b", "decode", **times)]
    found = shown(tables, monkeypatch, *cells, phase="decode").splitlines()[-1]
    assert "1.20x over the fastest rival" in found and "over 1 layer " in found and "no lead" in found


def test_what_failed_is_named_and_is_no_rival(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {**SIZES, **FORMATS, **SEEN, "cell": "a", "phase": "decode", "model": "m", "status": "crashed"}
    rows = frame(one("layer", "sonicmoe", median_us=None, reason="preparing: ImportError", **known))
    monkeypatch.setattr(tables.stored_tables, "stored", lambda name: rows)
    assert "`sonicmoe`" in tables._without(tables.failed("decode")) and tables.measured("decode").empty


def test_a_kernel_of_a_server_that_is_among_the_rows_is_not_said_to_be_absent(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said,) = tables._absent(frame(one("layer", "vllm_triton"), one("layer", "cute")))
    assert "`sglang_triton`" in said and "`vllm_triton`" not in said
    ported = frame(one("layer", "flag_gems"), one("layer", "cute"))
    assert "`flag_gems` is a port of vLLM's" in tables._absent(ported)[0]
    assert tables._absent(frame(*(one("layer", name) for name in tables.PRODUCTION))) == []


def headlined(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, **more: float) -> str:
    """The headline of layers with these rivals besides torch and SonicMoE."""
    times = {"cute": 100.0, "sonicmoe": 200.0, "torch_grouped_mm": 400.0} | more
    rows = [
        row | {"model": tables.FIRST, "tokens": tokens}
        for tokens in tables.OF_FIRST
        for row in cell(f"T{tokens}", "decode" if tokens <= tables.FEW else "prefill", **times)
    ]
    rows += [row | {"model": "other", "tokens": 9} for row in cell("other", "prefill", **times | {"cute": 50.0})]
    model, weights, tokens = tables.QUANTISED
    served = cell("fp8", "decode", auto=100.0, vllm_triton_fp8=90.0, sglang_triton_fp8=120.0, dequant=80.0)
    served = [row | {"model": model, "weights": weights, "tokens": tokens} for row in served]

    def stored(name: str) -> pd.DataFrame:
        if "published" in name:
            return frame(*served).head(0 if "published-more" in name else None)
        return frame(*(row for row in rows if (row["phase"] == "decode") == ("decode" in name)))

    monkeypatch.setattr(tables.stored_tables, "stored", stored)
    return tables.headline()


def test_the_headline_has_four_layers_with_their_rivals(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, two kernels that serve models, and the fastest rival; the last in the format that the model is published in, where torch is no rival."""
    found = headlined(tables, monkeypatch, vllm_triton=150.0, sglang_triton=160.0)
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in found.splitlines() if line.startswith("|")][
        2:
    ]
    assert [line[1:] for line in lines[:3]] == [["100", "150", "160", "150 (`vllm_triton`)", "1.50x"]] * 3
    assert lines[3][1:] == ["100", "90.0", "120", "90.0 (`vllm_triton_fp8`)", "0.900x"] and len(lines) == 4
    assert "decoding 1.50x (1.50x to 1.50x in 2 layers)" in found
    assert "prefill 2.12x (1.50x to 3.00x in 2 layers)" in found and "No rows yet of FlashInfer" in found


def test_without_kernels_that_serve_models_the_headline_says_so(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lead of decoding is stated over nothing but what people decode with."""
    found = headlined(tables, monkeypatch)
    assert "No rows yet of vLLM" in found and found.count(tables.NO_ROW) == 6
    assert "decoding no layer with a rival that people use" in found and "prefill 2.83x" in found


def test_a_mean_of_the_headline_counts_layers_with_suspect_rows(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"cute": 100.0, "torch_grouped_mm": 400.0, "sonicmoe": 200.0}
    cells = [cell("a", doubts={"suspect": True}, **times), cell("b", **times)]
    shown(tables, monkeypatch, *cells)
    assert tables._mean(tables.measured("prefill")).endswith("in 2 layers, 1 of them with suspect rows)")


def test_what_failed_is_named_below_the_table(tables: ModuleType) -> None:
    """In the page, where all rivals are; of the stored rows of decoding some have no time."""
    block = (DOCS / "experts.md").read_text().partition("<!-- generated: decode -->")[2].partition("<!-- end -->")[0]
    names = tables.failed("decode")["implementation"].unique()
    assert len(names) and "Left out at" in block
    assert all(f"`{name}`" in block.partition("Left out at")[2] for name in names)


def test_energy_has_the_digits_that_runs_agree_in(tables: ModuleType) -> None:
    assert [tables.energy(value) for value in (0.09112, 0.859, 123.4)] == ["0.091", "0.86", "120"]


def test_rivals_of_decoding_are_those_of_prefill() -> None:
    """For a model that both configs have; but for the port of a kernel that is a rival itself."""
    listed = {}
    for name in ("layers", "decode"):
        config = yaml.safe_load((DOCS.parent / f"config/{name}.yaml").read_text())
        for entry in config["grid"]:
            if entry["benches"] == ["layer"] and not entry.get("skew"):
                for model in entry.get("model", []):
                    listed.setdefault(model, {}).setdefault(name, set()).update(entry["implementations"])
    both = {model: found for model, found in listed.items() if len(found) == 2}
    assert len(both) >= 2
    for model, found in both.items():
        layers, decode = (found[name] - origins.ours("layer") - {"flag_gems"} for name in ("layers", "decode"))
        assert layers == decode, model


@pytest.mark.parametrize(
    ("doubts", "mark", "meaning"),
    [({"suspect": True}, "100†", "† suspect"), ({"converged": False}, "100°", "° interval wider"), ({}, "100 ", None)],
    ids=["suspect", "unconverged", "sound"],
)
def test_times_in_doubt_are_marked_and_the_marks_explained(
    doubts: dict[str, object], mark: str, meaning: str | None, tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shown(tables, monkeypatch, cell("a", doubts=doubts, cute=100.0, torch_grouped_mm=400.0))
    assert f"| {mark}" in found and (meaning in found if meaning else "†" not in found and "°" not in found)


def test_a_mean_says_how_many_of_its_layers_have_suspect_rows(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(cell, cute=100.0, torch_grouped_mm=400.0)
    found = shown(tables, monkeypatch, make("a", doubts={"suspect": True}), make("b"), make("c"))
    assert "1 of the 3 have suspect rows" in found


def test_every_table_of_layers_marks_what_its_rows_doubt(tables: ModuleType) -> None:
    """The page has as many marks as there are doubted rows among those that each table shows."""
    page = (DOCS / "experts.md").read_text()
    for phase, name in (("prefill", "layers"), ("decode", "decode")):
        rows = tables.measured(phase)
        there = rows[rows["implementation"].isin(tables.WAYS)]
        block = page.partition(f"<!-- generated: {name} -->")[2].partition("<!-- end -->")[0]
        lines = "".join(line for line in block.splitlines() if line.startswith("|"))
        assert lines.count("†") == int((there["suspect"] == True).sum())  # noqa: E712
        assert lines.count("°") == int((there["converged"] == False).sum())  # noqa: E712


def test_the_stored_layers_have_the_means_that_were_recomputed_by_hand(tables: ModuleType) -> None:
    """From results/nvidia-h200.layers: products of QuACK as a rival, and vLLM's and SGLang's kernels told apart."""
    rows: pd.DataFrame = tables.measured("prefill")
    (said,) = tables.together(rows[rows["skew"] == 0])
    assert [float(ratio) for ratio in re.findall(r"([\d.]+)x", said)] == [1.12, 0.972, 1.38, 1.95]
    assert "over 11 layers" in said and "in which torch" not in said


def test_a_layer_without_what_serves_models_is_that_of_a_run_with_it(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, as measured on one card: no row of the first run stays, and a layer that has such a rival keeps its own."""
    own = frame(
        *cell("a", cute=110.0, torch_grouped_mm=400.0),
        *cell("b", cute=50.0, vllm_triton=60.0),
        *cell("c", cute=1.0, sonicmoe=2.0),
    )
    others = {
        "published": frame(*cell("a", cute=100.0, sonicmoe=90.0, vllm_triton=105.0)),
        "published-more": frame(*cell("a", cute=1.0, vllm_triton=1.0), *cell("b", cute=2.0, vllm_triton=3.0)),
    }

    def stored(name: str) -> pd.DataFrame:
        return next((rows for run, rows in others.items() if f"200.{run}/" in name), own)

    monkeypatch.setattr(tables.stored_tables, "stored", stored)
    found = tables.with_servers("prefill")
    assert {
        key: dict(zip(rows["implementation"], rows["median_us"], strict=True)) for key, rows in found.groupby("cell")
    } == {
        "a": {"cute": 100.0, "sonicmoe": 90.0, "vllm_triton": 105.0},
        "b": {"cute": 50.0, "vllm_triton": 60.0},
        "c": {"cute": 1.0, "sonicmoe": 2.0},
    }
    said = " ".join(tables.together(found))
    assert "3 layers" in said and "no row of `torch_grouped_mm`" in said
