"""The choice of `auto`: nearest measured cells, capabilities, phases, and the file that holds the table."""

import json
from dataclasses import replace

import pytest

from moe_routing_kernels import choices
from moe_routing_kernels.choices import Entry, Shape, choose, chooser, distance, fastest
from moe_routing_kernels.choices.chooser import preferred
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.implementations import ranked
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.permute import RowLayout
from moe_routing_kernels.target import Target

SHAPE = Shape(4096, 128, 8, 2048, 768, "swiglu", "bf16", "bf16", "bf16", None, "sm_90")
ABLE = ("cute", "cute_gather", "triton_gather", "triton")


def entry(times: dict[str, float], phase: str = "prefill", **shape: object) -> Entry:
    """A cell of SHAPE, or with other values."""
    return Entry("c", phase, replace(SHAPE, **shape), times)


MANY, FEW = entry({"cute": 9.0, "cute_gather": 8.0}), entry({"cute": 2.0, "triton": 1.0}, "decode", tokens=1)


def test_the_fastest_of_the_nearest_cell_is_chosen() -> None:
    assert choose(SHAPE, ABLE, [MANY, FEW]) == "cute_gather"
    assert choose(replace(SHAPE, tokens=8192), ABLE, [FEW, MANY]) == "cute_gather"
    assert choose(replace(SHAPE, tokens=4), ABLE, [MANY, FEW]) == "triton"


def test_only_what_can_run_is_chosen() -> None:
    """A cell without any time of those that can is passed over, however near it is."""
    assert choose(SHAPE, ["cute"], [MANY, FEW]) == "cute"
    assert choose(SHAPE, ["triton"], [MANY, FEW]) == "triton"
    assert choose(SHAPE, ["triton_gather"], [MANY, FEW]) == "triton_gather"
    assert choose(SHAPE, [], [MANY, FEW]) is None


@pytest.mark.parametrize(
    "other",
    [{"architecture": "sm_80"}, {"architecture": "cpu"}, {"packed": "fp8_row"}, {"dtype": "fp32"}, {"weights": "fp32"}],
)
def test_another_architecture_or_width_says_nothing(other) -> None:
    """Then the first that can run is chosen; formats of one width are alike."""
    assert choose(SHAPE, ABLE, [entry({"triton": 1.0}, **other)]) == "cute"
    half = dict.fromkeys(("dtype", "packed", "weights"), "fp16")
    assert choose(SHAPE, ABLE, [entry({"triton": 1.0}, **half)]) == "triton"


def test_a_phase_leaves_its_own_cells() -> None:
    assert choose(SHAPE, ABLE, [MANY, FEW], "decode") == "triton"
    assert choose(replace(SHAPE, tokens=1), ABLE, [MANY, FEW], "prefill") == "cute_gather"
    assert choose(SHAPE, ABLE, [MANY], "decode") == "cute", "nothing was measured in this phase"
    with pytest.raises(
        UserError, match=r"^phase: got 'decod'; allowed: prefill, decode; hint: did you mean 'decode'\?$"
    ):
        choose(SHAPE, ABLE, [MANY], "decod")


def test_ties_go_to_the_preferred() -> None:
    """Of equal times the first of the able, and equally near cells are asked together."""
    assert choose(SHAPE, ABLE, [entry({"triton": 3.0, "cute_gather": 3.0})]) == "cute_gather"
    above, below = entry({"cute": 1.0, "triton": 1.5}, tokens=8192), entry({"cute": 4.0, "triton": 2.0}, tokens=2048)
    assert choose(SHAPE, ABLE, [above, below]) == choose(SHAPE, ABLE, [below, above]) == "triton"


def test_equally_near_cells_are_pooled_by_what_most_of_them_have() -> None:
    assert fastest([{"a": 1.0, "b": 2.0}, {"b": 1.0}], ["a", "b"]) == "b"
    assert fastest([{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}], ["b", "a"]) == "b"
    times = [{"a": 1.0, "b": 2.2, "c": 9.0}, {"a": 4.0, "b": 2.2, "c": 1.0}]
    assert fastest(times, ["c", "b", "a"]) == "a", "twice as long as the fastest in the geometric mean, b 2.2 times"


def test_a_cell_that_is_a_little_farther_is_not_asked() -> None:
    near, farther = entry({"cute": 2.0, "triton": 3.0}, tokens=4608), entry({"cute": 9.0, "triton": 1.0}, tokens=5120)
    assert choose(SHAPE, ABLE, [near, farther]) == choose(SHAPE, ABLE, [farther, near]) == "cute"


def test_times_are_over_the_fastest_of_their_cell() -> None:
    """Of two names in two cells each, one in common: the one that is a little behind there, and not ten times elsewhere."""
    cells = [{"a": 10.0, "b": 11.0}, {"a": 10.0, "c": 1.0}, {"b": 10.0, "d": 9.0}]
    assert fastest(cells, ["a", "b", "c", "d"]) == "b"


def test_the_shape_of_a_layer_is_that_of_all_ranks() -> None:
    """The capacity factor is over the mean rows of an expert of all of them."""
    layout = RowLayout(64, 2, 4, capacity=24, ranks=4)
    layer = Layer(layout, 96, 32, "swiglu", "bf16", "bf16", "bf16")
    found = chooser._shape(layer, Target.named("sm_90a"))
    assert (found.tokens, found.experts, found.top_k, found.hidden, found.intermediate) == (64, 16, 2, 96, 32)
    assert found.capacity_factor == 3.0 and found.mean_rows == 8.0
    assert (
        chooser._shape(replace(layer, layout=replace(layout, capacity=None)), Target.named("sm_90a")).capacity_factor
        is None
    )
    assert replace(found, capacity_factor=0.5).mean_rows == 4.0


def test_distance_is_in_octaves() -> None:
    """Twice the tokens: one octave of tokens, two of rows per expert. A capacity below the mean limits rows."""
    assert distance(SHAPE, SHAPE) == 0
    assert distance(SHAPE, replace(SHAPE, tokens=8192)) == pytest.approx(3)
    assert distance(SHAPE, replace(SHAPE, hidden=1024, intermediate=1536)) == pytest.approx(2)
    assert distance(SHAPE, replace(SHAPE, experts=256, top_k=16)) == pytest.approx(1)
    assert distance(SHAPE, replace(SHAPE, capacity_factor=0.5)) == pytest.approx(2)
    assert distance(SHAPE, replace(SHAPE, capacity_factor=1.25)) == 0


def test_cells_of_another_activation_come_last() -> None:
    """However far the others are: an implementation that lacks an activation was never measured with it."""
    near, far = entry({"triton": 1.0}, activation="swiglu_oai"), entry({"cute_gather": 1.0}, tokens=2**30, hidden=8)
    assert choose(SHAPE, ABLE, [near, far]) == "cute_gather"
    assert choose(SHAPE, ABLE, [near]) == "triton"


def test_what_waits_for_a_gpu_is_the_last_resort_there() -> None:
    names = ["torch_loop", "torch_grouped_mm", "sonicmoe", "cute"]
    assert preferred(names, "sm_90") == ["cute", "torch_grouped_mm"]
    assert preferred(names, "cpu") == ["cute", "torch_grouped_mm", "torch_loop"]
    assert preferred(["torch_loop", "torch_gather_loop"], "sm_90") == ["torch_gather_loop", "torch_loop"]
    every = [one.name for one in ranked("layer")]
    assert preferred(set(every), "cpu") == every


def test_a_table_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "choices.json"
    path.write_text(choices.text([MANY, FEW]))
    assert choices.load(path) == (MANY, FEW) and choices.text(choices.load(path)) == path.read_text()


def edited(text: str) -> str:
    return text.replace("9.0", "7.0")


def older(text: str) -> str:
    return json.dumps(json.loads(text) | {"version": 0})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-20], "a readable table"),
        (lambda text: "[]", "a readable table"),
        (lambda text: '{"version": 1}', "a readable table"),
        (edited, "one whose entries are those that were written"),
        (older, "got 0; allowed: 1"),
    ],
)
def test_a_damaged_or_stale_table_is_refused_in_one_line(damage, said, tmp_path) -> None:
    path = tmp_path / "choices.json"
    path.write_text(damage(choices.text([MANY])))
    with pytest.raises(UserError, match=said) as caught:
        choices.load(path)
    assert "\n" not in str(caught.value) and "moe-routing-bench choices --out" in str(caught.value)
    with pytest.raises(UserError, match="a readable table"):
        choices.load(tmp_path / "none.json")


def test_a_table_of_other_implementations_is_refused() -> None:
    choices.check_names([MANY], ["cute", "cute_gather"])
    with pytest.raises(UserError, match=r"^implementations of the table of choices: got 'cute_gather'"):
        choices.check_names([MANY], ["cute"])
