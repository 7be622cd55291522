"""What config/seeds/published says of the seed documents holds in its own figures: formulas, repeats, drift and anomalies."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "config/seeds/published"
SOURCES = yaml.safe_load((FOLDER / "sources.yaml").read_text())
WORK = ["shape", "experts", "n", "k", "tokens"]  # of 003: base_mm_ms is the same work for every format


def figures(name: str) -> pd.DataFrame:
    return pd.read_csv(FOLDER / f"{name}.csv", dtype={"implausible": "string"})


def test_every_file_has_a_source_and_every_source_a_file():
    assert {path.name for path in FOLDER.iterdir()} == {one["file"] for one in SOURCES.values()} | {"sources.yaml"}
    assert all(one["source"] and one["hardware"] for one in SOURCES.values())


def test_the_speed_up_of_000_is_a_gain_in_per_cent():
    table = figures("000")
    assert len(table) == 10 and table["passed"].all()
    gain = 100 * (table["naive_us"] / table["custom_us"] - 1)
    assert (gain - table["speedup_percent"]).abs().max() < 0.02


def test_speed_ups_and_rates_of_003_follow_from_its_times():
    table = figures("003")
    base = table["base_dequant_ms"].fillna(table["base_mm_ms"])
    assert (base / table["kernel_ms"] - table["speedup"]).abs().max() < 0.0051
    rate = 2 * table["tokens"] * table["n"] * table["k"] / table["kernel_ms"] / 1e9
    assert (rate - table["tflops"]).abs().max() < 0.051


def test_003_has_seven_shapes_in_nine_formats_and_two_activation_types():
    table = figures("003")
    assert table.groupby(["format", "activations"]).size().tolist() == [7] * 18
    assert len(table[WORK].drop_duplicates()) == 7
    accuracy = figures("003_accuracy")
    assert accuracy["passed"].sum() == 18
    pairs = ["activations", "format"]
    assert set(table[pairs].itertuples(index=False)) == set(accuracy[pairs].itertuples(index=False))


@pytest.mark.parametrize("shape", ["small", "medium", "uneven"])
def test_rows_per_expert_of_003_add_up_to_its_tokens(shape):
    loads, table = SOURCES["003"]["rows_per_expert"][shape], figures("003").query("shape == @shape")
    assert (table["tokens"] == sum(loads)).all() and (table["experts"] == len(loads)).all()


def test_the_baseline_of_003_repeats_itself_where_the_machine_was_steady_and_nowhere_else():
    table = figures("003").query("base_dequant_ms.notna()")
    steady = table[table["machine"] == "steady"]
    usual = steady.groupby(WORK)["base_mm_ms"].median().rename("usual")
    assert (steady.join(usual, on=WORK).eval("base_mm_ms / usual - 1").abs() < 0.015).all()
    drifted = table[table["machine"] == "drifted"].join(usual, on=WORK)
    assert len(drifted) == 20
    assert (drifted.index.max() - drifted.index.min()) == 19, "they follow one another in the order of the run"
    moved = drifted.eval("base_mm_ms / usual - 1").abs() > 0.05
    assert list(drifted[~moved]["kernel_ms"]) == [2.3345], "the first, during which the change came"
    assert drifted.eval("usual / base_mm_ms").max() == pytest.approx(41.1, abs=0.05)


def test_the_implausible_times_of_003_are_the_four_that_are_off_by_orders_of_magnitude():
    table = figures("003")
    marked = table[table["implausible"].notna()]
    times = {(i, name): table.at[i, name] for i, names in marked["implausible"].items() for name in names.split()}
    assert sorted(times.values()) == [581.1054, 4604.9666, 5654.7606, 8056.9061]
    for (i, name), value in times.items():
        shape = table[(table[WORK] == table.loc[i, WORK]).all(axis=1)]
        assert value > 9 * shape.drop(index=i)[name].max()


def test_tables_of_004_are_the_ten_operators_of_each_block_and_their_totals():
    table = figures("004")
    assert table.groupby("block").size().to_dict() == {"cuda": 10, "eager": 10, "manual": 10}
    for block, total in SOURCES["004"]["totals_us"].items():
        own = table[table["block"] == block]["self_cuda_us"].sum()
        assert 0.9 * total["cuda"] < own <= total["cuda"]
