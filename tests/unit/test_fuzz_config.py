"""Shipped configs with random changes: each is accepted and makes cells, or refused in one line, within moments.

``CONFIGS=10000 pytest tests/unit/test_fuzz_config.py`` tries as many; what it once found is in CORPUS.
"""

import copy
import math
import os
import random
import time
from pathlib import Path

import pytest
import yaml

from moe_routing_bench.config import load as config
from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.quality import plan
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
SHIPPED = {
    path.stem: config.read_mapping(path)
    for path in sorted((*ROOT.glob("config/*.yaml"), *ROOT.glob("config/seeds/*.yaml")))
}
SHIPPED = {name: found for name, found in SHIPPED.items() if "grid" in found and name != "h200-full"}
MODELS = presets.load(ROOT / "config/models.yaml")
NASTY = [
    None,
    True,
    False,
    "",
    "x",
    "none",
    "\n",
    "a\nb",
    "\x00",
    "../..",
    "é" * 40,
    "x" * 5000,
    "1",
    "nan",
    0,
    1,
    2,
    -1,
    3,
    7,
    2**16,
    2**31 - 1,
    2**31,
    2**63,
    10**30,
    10**4000,
    0.0,
    0.5,
    1.0,
    -0.5,
    1e-320,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    [],
    {},
    [[]],
    [None],
    [1],
    [1, 1],
    [0],
    ["x"],
    [math.nan],
    [{}],
    list(range(1, 600)),
    [[[[1]]]],
    {"x": 1},
    {1: 2},
    {None: None},
    [10**30],
    [1e308],
    [1e-320],
    [2**31 - 1],
    ["triton"],
    ["layer"],
    ["none"],
]
COUNT = int(os.environ.get("CONFIGS", "300"))
_PACK = {"benches": ["pack"], "tokens": [64], "hidden": [64], "experts": [32], "top_k": [2]}
_TRACE = "config/traces/softk-e32-k2.parquet"
_RUN = {"label": "a", "router": ["softk"], "seed": [17], "corpora": {"stdlib": "all"}}
_MANY = list(range(1, 600))
CORPUS = [  # what it did before, and what it must say: nothing where it is right
    ({"grid": [_PACK | {"sampler": ["trace"], "trace": "x" * 5000}]}, "trace: got 'xxx"),  # an OSError
    ({"grid": [_PACK | {"sampler": ["trace"], "trace": _TRACE, "hidden": _MANY}]}, None),  # read for each cell: 10 s
    ({"grid": [_PACK], "quality": [_RUN | {"capacity_factor": _MANY, "seed": list(range(99))}]}, "59301 runs"),  # 9 s
    ({"grid": [_PACK], "quality": [_RUN | {"layers": 10**30}]}, "layers: got 1000"),  # accepted, as were the next
    ({"grid": [_PACK], "quality": [_RUN | {"options": {"a": math.nan}}]}, "options: got nan"),
    ({"grid": [_PACK], "quality": [_RUN | {"options": {"a\nb": 1}}]}, r"options: got 'a\nb'"),
]


def places(found, path=()):
    """The paths of all values of a config."""
    yield path
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def at(found, path):
    for key in path:
        found = found[key]
    return found


def changed(found, chance):
    """A copy with up to four changes."""
    found = copy.deepcopy(found)
    for _ in range(chance.randrange(1, 5)):
        path = chance.choice([path for path in places(found) if path])
        holder, key = at(found, path[:-1]), path[-1]
        match chance.randrange(5):
            case 0 | 1:
                holder[key] = copy.deepcopy(chance.choice(NASTY))
            case 2:
                del holder[key]
            case 3:
                holder[key] = copy.deepcopy(at(found, chance.choice(list(places(found)))))
            case 4 if isinstance(holder, dict):
                holder[chance.choice(["sed", 7, "tokens", "run", "quality", "measure"])] = copy.deepcopy(
                    chance.choice(NASTY)
                )
            case 4:
                holder.append(copy.deepcopy(chance.choice([*NASTY, holder[0]])))
        if not found:
            break
    return found


def judged(found):
    """Load and expand as the workflow does; None, or the one line that refuses it."""
    begin = time.process_time()
    try:
        settings = config.load(found)
        jobs = expand(settings, MODELS)
        plan.expand(settings.get("quality", []), settings.get("perft", []))
        assert jobs and all(job.spec and job.name and "\n" not in job.name for job in jobs)
        return None
    except UserError as error:
        text = str(error)
        assert "\n" not in text and len(text) <= 500
        return text
    finally:
        taken = time.process_time() - begin
        assert taken < 5, f"{taken:.1f} s"


@pytest.mark.parametrize("part", range(2))
def test_random_changes(part, monkeypatch):
    monkeypatch.chdir(ROOT)
    chance, refused = random.Random(part), 0
    for _ in range(COUNT // 2):
        name = chance.choice(list(SHIPPED))
        found = changed(SHIPPED[name], chance)
        try:
            refused += judged(found) is not None
        except Exception as error:
            text = yaml.safe_dump(found, width=200)
            raise AssertionError(f"{name}: {type(error).__name__}: {str(error)[:300]}\n{text[:3000]}") from error
    assert 0.3 * COUNT // 2 < refused < COUNT // 2, "some are accepted"


@pytest.mark.parametrize(("found", "words"), CORPUS)
def test_what_was_found(found, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    said = judged(found)
    assert said is None if words is None else words in said
