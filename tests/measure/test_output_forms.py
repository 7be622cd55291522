"""Answers that are no plain tensors, or share memory."""

from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.measure import memory, output_forms
from moe_routing_bench.measure.candidate import Failure


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (torch.zeros(3), None),
        (torch.zeros(6)[::2], None),
        (torch.zeros(3, dtype=torch.float64), "y: float64 of shape (3,), not float32 of shape (3,)"),
        (torch.zeros(1, 3), "y: float32 of shape (1, 3), not float32 of shape (3,)"),
        (torch.zeros(3).as_subclass(Other), "y: Other, not a plain tensor"),
        (torch.zeros(3).to_sparse(), "y: Tensor, not a plain tensor"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "y: a view that is computed when it is read"),
        (torch.zeros(3, device="meta"), "y: on meta, not cpu"),
        (torch.zeros(1).expand(3), "y: elements that share memory"),
        ([0.0] * 3, "y: list, not a plain tensor"),
    ],
)
def test_outputs_of_another_kind_are_refused(output, error) -> None:
    assert output_forms.unlike_asked({"y": output}, {"y": torch.zeros(3)}) == error
    one = SimpleNamespace(timer=SimpleNamespace(returned=[None, {"y": output, "z": 1}]))
    given = SimpleNamespace(outputs=[{"y": torch.zeros(3)}] * 2)
    assert output_forms.unlike_any(one, given) == error


class Names(str):
    __slots__ = ()


@pytest.mark.parametrize("returned", [type("Dict", (dict,), {})(y=torch.zeros(3)), {Names("y"): torch.zeros(3)}])
def test_a_dictionary_that_may_compute_is_refused(returned) -> None:
    one = SimpleNamespace(timer=SimpleNamespace(returned=[returned]))
    with pytest.raises(Failure, match="not a plain dictionary"):
        output_forms.unlike_any(one, SimpleNamespace(outputs=[{"y": torch.zeros(3)}]))


MEMORY = torch.zeros(100)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (None, MEMORY[30:33], True),  # in an input
        (None, MEMORY[3:6], False),  # in its own buffer
        (None, MEMORY[0:3], True),  # in the other's
        (MEMORY[0:3], MEMORY[3:6], False),
        (torch.zeros(3), torch.zeros(3), False),
        (MEMORY[:0], MEMORY[:0], False),
    ],
)
def test_memory_of_outputs_is_not_shared(first, second, shared) -> None:
    """Two sets with outputs y (3,) side by side, of which the rest is inputs."""
    returned = [None if one is None else {"y": one, "z": MEMORY} for one in (first, second)]
    one = SimpleNamespace(timer=SimpleNamespace(returned=returned))
    given = SimpleNamespace(outputs=[{"y": MEMORY[0:3]}, {"y": MEMORY[3:6]}], extents=lambda: [memory.extent(MEMORY)])
    assert output_forms.unshared(one, given) == ("y: in memory of an input or of another set" if shared else None)


def test_two_sets_do_not_share_an_answer_of_their_own() -> None:
    answer = torch.zeros(8)
    given = SimpleNamespace(outputs=[{"y": MEMORY[0:3]}, {"y": MEMORY[3:6]}], extents=lambda: [])
    for other, shared in ((answer[2:5], True), (answer[3:6], False), (answer[5:8], False)):
        one = SimpleNamespace(timer=SimpleNamespace(returned=[{"y": answer[:3]}, {"y": other}]))
        assert (output_forms.unshared(one, given) is not None) == shared
