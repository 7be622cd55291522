"""Routing rules of other packages: named by reference, as the axis `router` of a cell."""

import json
import sys

import pytest

from example_package import bench
from moe_routing_bench.benches import plugins
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_kernels import routers
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.gate import Gate, unsupported
from moe_routing_kernels.routers import ROUTERS

RULE = """
import torch
from moe_routing_kernels.routers import GateRule

UNIFORM = GateRule("uniform", "", "top-k of logits, equal weights", options={"total": 2.0})


def route(logits, top_k, bias=None, *, total):
    ids = (logits if logits.dtype == torch.float64 else logits.float()).topk(top_k, dim=-1).indices
    return ids.int(), torch.full(ids.shape, total / top_k, device=ids.device)
"""
SIZES = {"tokens": 64, "experts": 8, "top_k": 2}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The name of a module with the rule, in the working directory: that of a formula of ours, to be told apart from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "softmax_topk", raising=False)
    routers._declared.cache_clear()
    (tmp_path / "softmax_topk.py").write_text(RULE)
    yield "softmax_topk"
    sys.modules.pop("softmax_topk", None)


def test_a_reference_is_a_rule(written):
    """It is no name that is listed, and no fused kernel takes it for the formula of its module's name."""
    torch = pytest.importorskip("torch")
    rule = ROUTERS[f"{written}:UNIFORM"]
    ids, weights = rule.load()(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[1.0, 1.0]] and rule.foreign
    assert rule.name in ROUTERS and rule.name not in list(ROUTERS) and "absent" not in ROUTERS
    said = unsupported(Gate(tokens=4, experts=8, top_k=2, router=rule.name, dtype="fp32"))
    assert said == "no fused kernel for router softmax_topk:UNIFORM"


def test_a_cell_names_it_and_depends_on_its_code(written, tmp_path):
    cell = cell_of("gate", **SIZES, router=f"{written}:UNIFORM")
    assert cell.router == "softmax_topk:UNIFORM" and "-softmax_topk.UNIFORM-" in cell.key
    job = Job(cell, ("torch",), Settings())
    assert plugins.references(job) == ("softmax_topk:UNIFORM",) and "plugins" not in job.spec
    before = plugins.fingerprint(job)
    (tmp_path / "softmax_topk.py").write_text(RULE.replace("total / top_k", "1 / top_k"))
    assert before != plugins.fingerprint(job)
    assert plugins.fingerprint(Job(cell_of("gate", **SIZES), ("torch",), Settings())) is None


@pytest.mark.parametrize(
    ("router", "said"),
    [
        (
            "softmax_topk:ABSENT",
            "got 'softmax_topk:ABSENT'; allowed: NAME = GateRule(...) of literals in softmax_topk.py",
        ),
        ("absent:UNIFORM", "no source of absent"),
        ("a b:c", "config.grid[0].router[0]: got 'a b:c'"),
        ("a..b:c", "plugin: got 'a..b:c'"),
    ],
)
def test_what_is_no_rule_is_one_line(written, router, said):
    with pytest.raises(UserError) as error:
        cell_of("gate", **SIZES, router=router)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_gate_and_routing_measure_it(written, tmp_path):
    """Torch runs it and is right, kernels of other rules say that they cannot, and rows know its code."""
    for name in ("gate", "routing"):
        sizes = ("--tokens", "64", "--hidden", "64", "--max-seconds", "0.1", "--min-blocks", "3")
        done = bench(
            tmp_path, "measure", name, "--router", f"{written}:UNIFORM", "--implementations", "torch", *sizes, "--json"
        )
        (row,) = json.loads(done.stdout)
        assert (
            row["status"] == "ok" and row["router"] == "softmax_topk:UNIFORM" and len(row["plugin_fingerprint"]) == 16
        )
