"""YAML documents that are read, and those that are refused before they cost anything."""

import random
import time

import pytest
import yaml

from moe_routing_bench.config import load

GOOD = [
    "",
    "# nothing\n",
    "a: 1",
    "[1, 2.5, null, true, text]",
    "a: &x [1, 2]\nb: *x\n",
    "a: &m {k: 1, l: 2}\nb:\n  <<: *m\n  k: 3\n",
    "base: &b {a: 1}\nmore: &c\n  <<: *b\n  a: 2\nmost:\n  <<: *c\n  a: 3\n",
    "1: a\n'1': b\n",
    "? [1, 2]\n: a\n",
    "&a a: *a\n",
]
BAD = [
    ("a: 1\nb: 2\na: 3\n", "key 'a' is there twice, in lines 1 and 3"),
    ("l:\n  - {k: 1, m: 2, k: 1}\n", "key 'k' is there twice, in lines 2 and 2"),
    ("a: {b: {c: 1, c: 2}}", "key 'c' is there twice"),
    ("[" * 13 + "]" * 13, "more than 12 lists and mappings in each other, in line 1"),
    ("&a {b: *a}", "*a is within itself"),
    ("a: &a\n  - &b [*a]\n", "*a is within itself, in line 2"),
    ("[" + "1, " * 100_000 + "1]", "more than 100000 values"),
    ("a: *none", "undefined alias"),
    ("a: [1", "expected"),
    ("a: 1\n---\nb: 2\n", "single document"),
    ("a: 2026-11-99", "'2026-11-99' in line 1 is a date"),
    ("a: !!int ''", "'' in line 1 is another number"),
    ("a: !!float x", "'x' in line 1 is another number"),
    ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
]


@pytest.mark.parametrize("text", GOOD)
def test_what_is_read_is_what_yaml_makes_of_it(text):
    try:
        wanted = yaml.safe_load(text)
    except yaml.YAMLError:
        with pytest.raises(yaml.YAMLError):
            load.parse_yaml(text)
    else:
        assert load.parse_yaml(text) == wanted


@pytest.mark.parametrize(("text", "why"), BAD)
def test_what_is_refused(text, why):
    with pytest.raises(yaml.YAMLError, match=why.replace("*", r"\*")):
        load.parse_yaml(text)


def test_the_limits_themselves_are_allowed():
    assert load.parse_yaml("[" * 12 + "1" + "]" * 12)
    assert len(load.parse_yaml("[" + "1, " * 99_998 + "1]")) == 99_999
    tens = "[" + ", ".join("1" * 9) + "]"  # 10 nodes with the list; 1111 * 90 + 2 are just below the limit
    assert len(load.parse_yaml(f"a: &a {tens}\nb: [{', '.join(['*a'] * 9_998)}]")["b"]) == 9_998
    with pytest.raises(yaml.YAMLError, match="more than 100000 values"):
        load.parse_yaml(f"a: &a {tens}\nb: [{', '.join(['*a'] * 9_999)}]")


def test_no_random_text_takes_long_or_breaks():
    """Pieces of YAML in any order: read as PyYAML reads them, or refused, within moments."""
    pieces = ["a: ", "- ", "\n", "  ", *"[]{}1'#b", ", ", "&x ", "*x", "<<: ", "? ", "|\n", "!!int "]
    chance, slowest = random.Random(17), 0.0
    for _ in range(2000):
        text = "".join(chance.choices(pieces, k=chance.randrange(1, 40)))
        begin = time.process_time()
        try:
            found = load.parse_yaml(text)
        except yaml.YAMLError:
            continue
        finally:
            slowest = max(slowest, time.process_time() - begin)
        assert found == yaml.load(text, load._LOADER), text  # libyaml is not as strict as PyYAML's own parser
    assert slowest < 5
