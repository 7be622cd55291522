"""Names of activations: one grammar for kernels, operators, configs, presets and the schema file."""

import re

import pytest
import yaml

from moe_routing_bench.config import sections
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.fields import words
from moe_routing_kernels.activations import ACTIVATIONS, Activation, activation_of, limited_name
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.experts import Experts

SHAPE = {"tokens": 4, "hidden": 8, "intermediate": 8, "experts": 2, "top_k": 1}
LIMITS = {
    "swiglu_limit10": 10.0,
    "swiglu_limit7.5": 7.5,
    "swiglu_limit0.000001": 1e-6,
    "swiglu_limit999999.5": 999999.5,
}
NUMBERS = ["", "0", "0.0", "07", "7.50", "7.", ".5", "1e1", "-3", "+3", "inf", "nan", "10\n", " 10", "٧"]
NUMBERS += ["1000000", "0.0000001"]
BAD = [*(f"swiglu_limit{number}" for number in NUMBERS), "swiglu_Limit10", "geglu_limit10", "gelu", ""]


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("swiglu", Activation("sigmoid")),
        ("geglu", Activation("gelu")),
        ("relu2", Activation("relu2", gated=False)),
        ("swiglu_oai", Activation("sigmoid", alpha=1.702, limit=7.0, shift=1.0, biased=True)),
        ("swiglu_oai_unbiased", Activation("sigmoid", alpha=1.702, limit=7.0, shift=1.0)),
        *((name, Activation("sigmoid", limit=limit)) for name, limit in LIMITS.items()),
    ],
)
def test_a_name_describes_an_activation(name, described):
    problem = Experts(1, 8, 8, 2, "bf16", "bf16", "bf16", activation=name)
    assert activation_of(name) == described and (problem.gated, problem.biased) == (described.gated, described.biased)
    cell = cell_of("experts", activation=name, **SHAPE)
    assert cell.activation == name and (name == "swiglu" or name in cell.key.split("-"))


@pytest.mark.parametrize("name", [*BAD, None, ["swiglu"], 7])
def test_any_other_name_is_refused_in_one_line(name):
    with pytest.raises(UserError, match=r"activation: got .*; allowed: swiglu, .*, swiglu_limit<number>") as error:
        activation_of(name)
    assert "\n" not in str(error.value)
    if name == "swiglu_limit7.50":
        assert "hint: such as swiglu_limit10 or swiglu_limit7.5" in str(error.value)


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_a_config_and_its_schema_refuse_what_the_parser_refuses(name):
    with pytest.raises(UserError, match=r"activation.*: got .*allowed: swiglu, .*, swiglu_limit<number>"):
        cell_of("experts", activation=name, **SHAPE)
    assert not in_schema(name)


@pytest.mark.parametrize("name", [*ACTIVATIONS, *LIMITS])
def test_the_schema_takes_what_the_parser_takes(name):
    assert in_schema(name)


def in_schema(name):
    """Whether the schema file's items of the axis take a name. Its patterns are searched for, as JSON schema does."""
    items = yaml.safe_load(sections.text())["$defs"]["GridEntry"]["properties"]["activation"]["items"]
    names, other = items["anyOf"]
    # `$` of JSON schema is the end, that of Python also before a last newline.
    return name in names["enum"] or re.search(other["pattern"].replace("$", r"\Z"), name) is not None


def test_sentences_say_how_other_names_are_spelt():
    assert words(AXES["activation"].type) == f"{', '.join(ACTIVATIONS)} or swiglu_limit<number>"


@pytest.mark.parametrize(
    ("limit", "name"), [(10, "swiglu_limit10"), *((limit, name) for name, limit in LIMITS.items())]
)
def test_a_limit_has_one_name(limit, name):
    assert limited_name(limit) == name and activation_of(name).limit == limit


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan"), 1e6, 1 / 3, True, "10", None])
def test_a_limit_that_no_name_has_is_refused(limit):
    with pytest.raises(UserError, match=r"limit of swiglu: got .*allowed: a number above 0 and below a million"):
        limited_name(limit)
