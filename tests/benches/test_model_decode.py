"""A guard against a slow dispatcher: a token decoded with our experts never takes twice as long as with the library's own loop."""

import time
from collections.abc import Callable

import pytest
import torch

import tiny_models
from moe_routing_bench.benches.registry import BENCHES

pytestmark = pytest.mark.slow

MOST = 2.0  # times the library's loop; 1.2 to 1.5 where it was set
ROUNDS = 20
REFERENCE, OURS = "transformers_eager", "ops"


def quickest(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the quickest of `ROUNDS` calls of each, in turns: what else the machine does meets both."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_decoded_token_takes_less_than_twice_as_long(name: str) -> None:
    """In one thread, as threads that wait for each other take long where other work runs; measured once more where it is exceeded."""
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tiny_models.installed():
            bench, definition = BENCHES["model"], BENCHES["model"].definition()
            sizes = {"hidden": 256, "intermediate": 128, "experts": 16, "top_k": 4}
            cell = tiny_models.cell(name, tokens=1, phase="decode", **sizes)
            inputs = definition.build(cell, 1, "cpu") | definition.shared(cell, 1, "cpu")
            calls = {
                one: bench.bind(one, cell, inputs | definition.empty_outputs(cell, inputs)) for one in (REFERENCE, OURS)
            }
            ratio = MOST + 1
            for _ in range(2):
                if ratio > MOST:
                    seconds = quickest(calls)
                    ratio = seconds[OURS] / seconds[REFERENCE]
    finally:
        torch.set_num_threads(threads)
    assert ratio <= MOST, f"{ratio:.2f} times as long as the library's loop"
