"""What the report says of altered models: per contestant what each alteration adds, over seeds."""

import pandas as pd
import pytest

from moe_routing_bench.quality import run_rows
from moe_routing_bench.report import trained_rules

pytestmark = pytest.mark.slow


def run(router, seed, bits, **columns):
    row = dict.fromkeys(run_rows.COLUMNS) | {
        "router": router,
        "seed": seed,
        "bits_per_byte": bits,
        "run": f"{router}{seed}",
    }
    row |= {
        "label": "e8",
        "purpose": "final",
        "step": 4,
        "steps": 4,
        "experts": 8,
        "top_k": 2,
        "params": 1e6,
        "network": "linear",
    }
    return row | {"drop_policy": "position", "train_mode": "joint", "capacity_factor": 1.25, "causal": True} | columns


def test_each_alteration_is_held_against_the_same_seed() -> None:
    rows = [
        run("softk", 1, 2.0, bits_by_format=[("int4_g128", 2.01), ("int2_g128", 2.5)]),
        run("softk", 2, 3.0, bits_by_format=[("int4_g128", 3.01), ("int2_g128", 3.5)]),
        run("hash_balanced", 1, 2.0, bits_by_format=[("int4_g128", 2.0)], bits_by_capacity=[("1", 2.25)]),
    ]
    formats, capacities = trained_rules.altered_costs(pd.DataFrame(rows))
    assert formats.names == ["int4_g128", "int2_g128"] and capacities.names == ["1"]
    lines = {name: (whole, added) for name, whole, added in formats.lines}
    assert lines["softk"][1] == ["+0.0100", "+0.5000"], "the seeds differ by 1, what is added does not"
    assert lines["softk"][0].startswith("2.5000 ± ")
    assert lines["hash_balanced"] == ("2.0000", ["+0.0000", "–"])
    assert capacities.lines == [("hash_balanced", "2.0000", ["+0.2500"])]
    (tiny,) = trained_rules.altered_costs(pd.DataFrame([run("softk", 1, 2.0, bits_by_format=[("int4_g128", 1.99999)])]))
    assert tiny.lines == [("softk", "2.0000", ["+0.0000"])], "no sign before what rounds to zero"
    assert "another capacity factor" in capacities.title and formats.title.startswith("e8: E=8, k=2")


def test_runs_without_such_evaluations_have_no_table() -> None:
    assert trained_rules.altered_costs(pd.DataFrame([run("softk", 1, 2.0)])) == []
    assert (
        trained_rules.altered_costs(
            pd.DataFrame([run("softk", 1, 2.0)]).drop(columns=["bits_by_format", "bits_by_capacity"])
        )
        == []
    )
