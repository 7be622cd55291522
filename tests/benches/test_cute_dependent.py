"""The fused part whose kernels each start before the one ahead of it is over: what it launches, in which order, and on what."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.layer import Layer, cute_dependent
from moe_routing_kernels.permute import RowLayout

FEW = Layer(RowLayout(5, 8, 64), 64, 32, "bf16", "bf16", "bf16", "softmax_topk_renorm")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (FEW, None),
        (replace(FEW, layout=RowLayout(512, 8, 64)), None),
        (replace(FEW, layout=RowLayout(513, 8, 64)), "is for at most 4096 rows, with which kernels may overlap"),
        (replace(FEW, layout=RowLayout(513, 8, 64, capacity=64)), None),  # which leaves 4096
        (replace(FEW, packed="fp8_block128"), "rows that are never packed cannot be fp8_block128"),
        (replace(FEW, layout=RowLayout(5, 8, 2048)), "the cute permute takes up to 1024 experts"),
        (replace(FEW, weights="int4_g128"), "int4_g128"),
    ],
)
def test_what_it_takes(problem, reason):
    found = cute_dependent.unsupported(problem)
    assert found is None if reason is None else found and reason in found


@pytest.mark.parametrize("residual", [None, torch.zeros(5, 64)])
@pytest.mark.parametrize("capacity", [None, 3])
def test_each_kernel_is_told_to_overlap_and_given_what_the_one_ahead_writes(residual, capacity, monkeypatch):
    problem = replace(FEW, layout=RowLayout(5, 8, 64, capacity))
    bound, ran = {}, []

    def record(name):
        def bind(*given, **named):
            bound[name] = given, named
            return lambda: ran.append(name)

        return bind

    monkeypatch.setattr(cute_dependent.cute_permute, "bind", record("permute"))
    monkeypatch.setattr(cute_dependent.cute_experts, "launches", record("experts"))
    monkeypatch.setattr(cute_dependent.cute_combine, "bind", record("combine"))
    names = ("topk_ids", "topk_weights", "x", "w13", "w2", "combined", "b13", "b2")
    given = {name: torch.zeros(5, 8) for name in names} | {"x": torch.zeros(5, 64, dtype=torch.bfloat16)}
    cute_dependent.bind(problem, **given, residual=residual)()
    assert ran == ["permute", "experts", "combine"]

    (layout,), permute = bound["permute"]
    assert layout == problem.layout.problem and permute["topk_ids"] is given["topk_ids"] and permute["signals"] is True
    rows = problem.layout.rows
    shapes = {name: tuple(permute[name].shape) for name in ("counts", "offsets", "order", "inverse")}
    assert shapes == {"counts": (64,), "offsets": (65,), "order": (rows,), "inverse": (5, 8)}
    assert all(permute[name].dtype == torch.int32 for name in shapes)
    (experts, x, order, top_k, offsets, w13, w2, b13, b2, y), overlap = bound["experts"]
    assert (experts, top_k, overlap) == (problem.experts, 8, {"waits": True, "signals": True})
    assert x is given["x"] and order is permute["order"] and offsets is permute["offsets"]
    assert all(one is given[name] for one, name in ((w13, "w13"), (w2, "w2"), (b13, "b13"), (b2, "b2")))
    assert y.shape == (rows, 64) and y.dtype == torch.bfloat16
    (combined,), arguments = bound["combine"]
    assert combined == Combine(5, 64, 8, "bf16", dropping=capacity is not None)
    wanted = {"y": y, "inverse": permute["inverse"], "residual": residual}
    assert all(arguments[name] is one for name, one in wanted.items()) and arguments["waits"] is True
    assert arguments["topk_weights"] is given["topk_weights"] and arguments["combined"] is given["combined"]


def test_what_is_compiled_ahead_is_what_runs(monkeypatch):
    """Precompiled kernels have the arguments that `bind` asks for: others would be compiled again on the GPU."""
    seen = []
    for module in ("cute_permute", "cute_experts", "cute_combine"):
        kernel = getattr(cute_dependent, module)
        monkeypatch.setattr(kernel, "_compiled", lambda *given, module=module: seen.append((module, *given)))
    cute_dependent.precompile(FEW, "sm_90a")
    combine = Combine(5, 64, 8, "bf16", dropping=False)
    assert seen == [
        ("cute_permute", FEW.layout.problem, "sm_90a", True),
        ("cute_experts", FEW.experts, "sm_90a", 8, True, True),
        ("cute_combine", combine, "sm_90a", False, True),
    ]
