"""What a capacity costs trained rules: bits, and the share that routing at random drops, worked out by hand."""

import math
from itertools import product

import pandas as pd
import pytest

from moe_routing_bench.figures import capacity, training_points


def run(**values: object) -> dict[str, object]:
    known = {"purpose": "final", "step": 9, "run": "r", "router": "softk", "network": "linear", "label": "e", "seed": 1}
    known |= {"capacity_factor": 1.25, "drop_policy": "position", "train_mode": "joint", "causal": True}
    known |= {"val_loss": 1.0, "bits_per_byte": 1 / math.log(2), "val_loss_with_capacity": 1.5}
    return known | {"bits_by_capacity": [("1", 2.0), ("1.25", 9.0)]} | values


def test_what_is_lost_is_in_bits_and_of_each_factor_once() -> None:
    """Half a nat with the capacity of training; of others, those of the evaluation less those without; not its own again."""
    found = capacity.limited(pd.DataFrame([run()]))
    shown = [(row["way"], row["capacity_factor"], row["lost"]) for row in found.to_dict("records")]
    bits = 1 / math.log(2)
    assert shown == [
        (capacity.TRAINED, 1.25, pytest.approx(0.5 * bits)),
        (capacity.LATER, 1.0, pytest.approx(2.0 - bits)),
    ]
    assert capacity.limited(pd.DataFrame([run(causal=False)])).empty


@pytest.mark.parametrize(("factor", "tokens", "top_k", "experts"), [(1.0, 4, 1, 2), (0.5, 5, 1, 3), (1.5, 3, 2, 4)])
def test_the_floor_is_the_mean_over_all_loads(factor: float, tokens: int, top_k: int, experts: int) -> None:
    """Of an expert that each token takes with k / E: what is beyond the capacity, over what is asked for."""
    p, limit = top_k / experts, min(tokens, math.ceil(factor * tokens * top_k / experts))
    over = 0.0
    for taken in product((0, 1), repeat=tokens):
        over += p ** sum(taken) * (1 - p) ** (tokens - sum(taken)) * max(0, sum(taken) - limit)
    assert capacity.floor(factor, tokens, top_k, experts) == pytest.approx(over / (tokens * p))


def test_half_the_interval_of_a_speed_that_was_taken_once_is_the_mean_of_its_runs() -> None:
    """1 % of 100 and 4 % of 200, and nothing of a run without blocks."""
    known = {training_points.X: [100.0, 200.0, 300.0], "step_half_width_ms": [0.1, 0.4, None], "step_ms": [10.0] * 3}
    assert training_points._of_blocks(pd.DataFrame(known)) == pytest.approx((1 + 8 + 0) / 3)
