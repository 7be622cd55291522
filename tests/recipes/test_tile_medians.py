"""What the notebook says of fewer kinds of tiles follows from `results/nvidia-h200.layers/tiles.csv`.

A column is a name of tiles. In run 1: slabs x tokens / tokens of the narrowest form, o where the products overlap. In run 2: the same without
slabs; `new` is a choice that was kept but for one to four tokens (`2wg`, two warpgroups for the tile of 8) and where tiles have names.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moe_routing_bench.config import presets
from moe_routing_kernels import ops

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PRESETS = presets.load(ROOT / "config/models.yaml")
MODELS = {
    "mixtral": "mixtral-8x7b",
    "olmoe": "olmoe-1b-7b",
    "qwen3": "qwen3-30b-a3b",
    "qwen3-next": "qwen3-next-80b-a3b",
    "deepseek-v3": "deepseek-v3",
    "gpt-oss": "gpt-oss-120b",
}
SECTION = (ROOT / "docs/notebook.md").read_text().partition("## 2026-11-28: fewer kinds of tiles\n")[2]
# Most rows per expert, and the tile that was kept for them: the code may choose others since.
KEPT = {7: "1x8/0", 26: "1x24/0", 40: "1x48/0", 95: "2x112/40", 140: "2x144/72", 172: "2x176/88", 190: "2x112/40"}
LOW_ROWS = 40
LOW, FORMS = ["1x24/0o", "new"], ["112/40", "new"]


@pytest.fixture(scope="module")
def ratios() -> pd.DataFrame:
    """Each median over that of the tiles until then: a column for each name of tiles."""
    medians = pd.read_csv(ROOT / "results/nvidia-h200.layers/tiles.csv")
    medians["rows"] = medians.tokens * medians.model.map(
        lambda name: PRESETS[MODELS[name]].top_k / PRESETS[MODELS[name]].experts
    )
    table = medians.pivot(index=["run", "model", "tokens", "rows"], columns="tiles", values="median_us")
    return table.div(table["old"], axis=0)


@pytest.fixture(scope="module")
def kept(ratios: pd.DataFrame) -> pd.Series:
    """The ratio of each cell in which the tiles that were kept were measured."""
    found = {cell: measured.get(name) for cell, measured in ratios.iterrows() if (name := name_of(*cell, measured))}
    return pd.Series(found).rename_axis(ratios.index.names).dropna()


def name_of(run: int, model: str, tokens: int, rows: float, measured: pd.Series) -> str | None:
    """The column of the tiles that were kept; None where it is not certain that they were measured."""
    tile = next((name for most, name in KEPT.items() if rows <= most), "new")
    if run == 1:  # a tile of 8 had the warpgroups of that day
        overlap = "o" if rows <= LOW_ROWS or PRESETS[MODELS[model]].experts * LOW_ROWS <= 4096 else ""
        return None if rows <= 7 else f"{tile}{overlap}"
    if tokens <= 4:
        return None if model == "mixtral" else "2wg"
    if 7 < rows < 8.5:  # took tiles of 8 that day
        return None
    named = tile.partition("x")[2]
    return named if pd.notna(measured.get(named)) else "new"


def said(what: str) -> str:
    """The measured cell of the row that begins so."""
    return next(line.split("|")[3].strip() for line in SECTION.splitlines() if line.startswith(f"| {what}"))


def spread(values: pd.Series) -> tuple[str, str]:
    return f"{values.min():.3f}", f"{values.max():.3f}"


def test_each_median_is_of_a_known_model_and_has_one_of_before(ratios: pd.DataFrame) -> None:
    assert set(ratios.index.get_level_values("model")) == set(MODELS)
    assert (ratios["old"] == 1).all() and (ratios.notna().sum(axis=1) > 1).all()
    assert f"all {ratios.notna().sum().sum()} medians" in SECTION


@pytest.mark.parametrize(
    ("row", "columns", "least", "most", "left_out"),
    [
        pytest.param("low tiles of 24", LOW, 12, 12, (), id="24-tokens-12-rows"),
        pytest.param("low tiles of 24", ["1x24/0o"], 26, 26, (), id="24-tokens-26-rows"),
        pytest.param("low tiles of 24", ["1x48/0o", "new"], 28, 38, (), id="48-tokens"),
        pytest.param("low tiles of 24", ["1x24/0o"], 8, 8, (), id="24-tokens-8-rows"),
        pytest.param("tiles of 8 up to 8 rows", ["new"], 8, 8, ["gpt-oss"], id="8-tokens-8-rows"),
        pytest.param("tiles of 8 up to 8 rows", ["new"], 8, 8, [*MODELS][:5], id="8-tokens-8-rows-gpt-oss"),
        pytest.param("shared tiles from 40", ["2x112/40", "2x112/40o"], 46, 46, (), id="shared-46-rows"),
        pytest.param("one tile of 176", ["2x176/40", "2x176/40o"], 40, 180, (), id="one-tile-for-all"),
        pytest.param("two tiles of 112", FORMS, 178, 188, (), id="two-tiles"),
        pytest.param("two tiles of 112", ["112/40"], 166, 166, ["olmoe"], id="two-tiles-166-rows"),
        pytest.param(
            "two tiles of 112", ["112/40"], 166, 166, [m for m in MODELS if m != "olmoe"], id="two-tiles-166-rows-olmoe"
        ),
        pytest.param("two warpgroups", ["2wg"], 0, 1, ["deepseek-v3", "gpt-oss", "mixtral"], id="two-warpgroups"),
        pytest.param(
            "two warpgroups", ["2wg"], 0, 1, [m for m in MODELS if m != "deepseek-v3"], id="two-warpgroups-deepseek"
        ),
        pytest.param(
            "two warpgroups", ["2wg"], 0, 1, [m for m in MODELS if m != "gpt-oss"], id="two-warpgroups-gpt-oss"
        ),
        pytest.param(
            "two warpgroups", ["2wg"], 0, 1, [m for m in MODELS if m != "mixtral"], id="two-warpgroups-mixtral"
        ),
    ],
)
def test_the_table_has_the_range_of_the_medians(
    row: str, columns: list[str], least: float, most: float, left_out: tuple, ratios: pd.DataFrame
) -> None:
    rows = ratios.index.get_level_values("rows").to_series().round().to_numpy()
    chosen = (rows >= least) & (rows <= most) & ~ratios.index.get_level_values("model").isin(left_out)
    low, high = spread(ratios.loc[chosen, columns].stack())
    assert (low if low == high else f"{low} to {high}") in said(row)


def test_what_overlaps_is_beside_what_does_not(ratios: pd.DataFrame) -> None:
    """Low tiles that were kept, in the cells whose choice they are."""
    rows = ratios.index.get_level_values("rows").to_series().to_numpy()
    least = {"1x8/0": 0, "1x24/0": 7, "1x48/0": 26}
    most = {"1x8/0": 7, "1x24/0": 26, "1x48/0": 40}
    pairs = [(ratios[f"{name}o"] / ratios[name])[(rows > least[name]) & (rows <= most[name])] for name in least]
    assert " to ".join(spread(pd.concat(pairs))) in said("GEMMs with low tiles")


def test_the_tiles_that_were_kept_are_beside_those_before(kept: pd.Series) -> None:
    """All cells in one sentence, and the worst by name: no cell that is slower is left out."""
    sentence = re.sub(r"\s+", " ", SECTION)
    geometric = np.exp(np.log(kept).mean())
    assert (
        f"Over the {len(kept)} cells in which the tiles that were kept were measured, the time is {geometric:.3f} of"
        in sentence
    )
    assert (
        f"more than 1.01 in {(kept > 1.01).sum()}" in sentence
        and f"less than 0.98 in {(kept < 0.98).sum()}" in sentence
    )
    assert f"{kept.min():.3f} at best" in sentence
    for cell, value in kept[kept > 1.02].items():
        assert f"{cell[1]} T={cell[2]} with {value:.3f}" in sentence
    shared = kept[(kept.index.get_level_values("rows") > 40) & (kept.index.get_level_values("rows") < 160)]
    assert " to ".join(spread(shared)) in said("three tiles")


def test_operators_with_limits_are_beside_those_without() -> None:
    """Gates and whole layers of `limits.csv`: each number that the notebook has of them."""
    table = pd.read_csv(ROOT / "results/nvidia-h200.layers/limits.csv")
    sentences = re.sub(r"\s+", " ", SECTION)
    gates, layers = (table[table.operator == name] for name in ("gate", "layer"))
    many = gates[gates.tokens == 16384]

    def mean(some: pd.DataFrame) -> str:
        return f"{np.exp(np.log(some.ratio).mean()):.3f}"

    assert (
        f"{len(gates)} gates take {mean(gates)} of their time in the geometric mean, {' to '.join(spread(gates.ratio))}"
        in sentences
    )
    assert f"{len(many)} gates take {mean(many)}, at most {many.ratio.max():.3f}" in sentences
    assert f"{len(layers)} whole layers" in sentences
    assert f"take {mean(layers)} of their time in the geometric mean, {' to '.join(spread(layers.ratio))}" in sentences


@pytest.mark.campaign
def test_so_many_kernels_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times were measured by hand, on a machine of 16 cores. They hold as long as nearly as many kernels are compiled: a layer that is measured anew may choose another."""
    pytest.importorskip("cutlass")
    from moe_routing_kernels.cute import ahead

    monkeypatch.setattr(ahead, "compile_all", lambda kernels, _workers: len(kernels))
    sizes = {
        field: getattr(PRESETS["qwen3-30b-a3b"], field) for field in ("hidden", "intermediate", "experts", "top_k")
    }
    found = ops.prepare(**sizes, arch="sm_90a")
    (said,) = re.findall(r"(\d+) kernels in 18 s on 16 cores", (ROOT / "docs/operators.md").read_text())
    assert int(said) == pytest.approx(found, abs=2)
