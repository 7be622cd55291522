"""Seed 004: a Qwen MoE block in three forms, operator by operator, with the profiles of implementations that stand for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.report.seeds import divisor, figures, number

STANDING = {  # for each block, the first of these that was profiled
    "eager": ("transformers_eager",),
    "manual": ("torch_loop",),
    "cuda": ("cute_gather", "triton_gather", "torch_gather_loop"),
}
SHOWN = 10  # operators of each, as many as were published
_SIZES = {"hidden": 2048, "intermediate": 1408}
_Profile = Mapping[str, Any]


def tables(rows: pd.DataFrame, source: Mapping[str, Any], profiles: Sequence[_Profile], platform: str) -> list[Table]:
    """A table of totals of each profiled cell, and a table of operators for each block."""
    return [
        table
        for one in profiles
        for table in (_totals(one, rows, source, platform), *_operators(one, source, platform))
    ]


def _standing(profile: _Profile) -> dict[str, str]:
    """What stands for each block in a profile, without blocks for which nothing was profiled."""
    ran = {name for name, parts in profile["implementations"].items() if "operators" in parts}
    found = {block: next((name for name in names if name in ran), None) for block, names in STANDING.items()}
    return {block: name for block, name in found.items() if name}


def _totals(profile: _Profile, rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> Table:
    axes, stands = profile["axes"], _standing(profile)
    eager = stands.get("eager")
    medians = rows[rows["cell"] == profile["cell"]].set_index("implementation")["median_us"]
    lines = []
    for block, total in source["totals_us"].items():
        own = profile["implementations"].get(stands.get(block), {})
        difference = _difference(profile, eager, stands.get(block))
        lines.append(
            [
                block,
                number(total["cpu"]),
                number(total["cuda"]),
                number(source["max_diff"].get(block)),
                stands.get(block, ABSENT),
                number(own.get("self_cpu_us")),
                number(own.get("self_device_us")),
                number(difference),
                number(medians.get(stands.get(block))),
            ]
        )
    by = divisor(_SIZES, {name: axes[name] for name in _SIZES})
    reduced = f" Hidden and intermediate sizes are divided by {by}." if by and by > 1 else ""
    return Table(
        f"One call of each form, {axes['dtype']}",
        (
            Group("form", ("block",)),
            Group(f"published ({source['short']}, fp32)", ("self CPU µs", "self CUDA µs", "max_diff to eager")),
            Group(
                f"measured ({platform}, {axes['dtype']})",
                (
                    "implementation",
                    "self CPU µs",
                    "self device µs",
                    f"max_diff to {eager or 'eager'}",
                    "not profiled, µs",
                ),
            ),
        ),
        lines,
        "Sums over all operators of one profiled call, ours after a warm-up; their times are apparently of a first call. Not profiled: the "
        f"median time of the row.{reduced}",
    )


def _difference(profile: _Profile, *names: str | None) -> float | None:
    """The largest difference of two implementations' results, where both had one."""
    pairs = {frozenset((one["first"], one["second"])): one["max_diff"] for one in profile["differences"]}
    return pairs.get(frozenset(names))  # type: ignore


def _operators(profile: _Profile, source: Mapping[str, Any], platform: str) -> list[Table]:
    """A table for each block that something stands for."""
    known, dtype = figures("004"), profile["axes"]["dtype"]
    found = []
    for block, name in _standing(profile).items():
        theirs = known[known["block"] == block].to_dict("records")
        ours = profile["implementations"][name]["operators"][:SHOWN]
        groups = (
            Group("", ("rank",)),
            Group(f"published ({source['short']}): {block}", ("operator", "self CPU µs", "self CUDA µs", "calls")),
            Group(
                f"measured ({platform}): {name}, {dtype}",
                ("operator or kernel", "self CPU µs", "self device µs", "calls"),
            ),
        )
        lines = [
            [str(i + 1), *_line(theirs, i, "self_cuda_us"), *_line(ours, i, "self_device_us")]
            for i in range(max(len(theirs), len(ours)))
        ]
        found.append(Table(f"Operators of the {block} block, {dtype}", groups, lines))
    return found


def _line(operators: Sequence[Mapping[str, Any]], i: int, device: str) -> list[str]:
    """Operator, both self times and calls of the i-th; dashes where there are fewer."""
    if i >= len(operators):
        return [ABSENT] * 4
    one = operators[i]
    return [one["operator"][:60], number(one["self_cpu_us"]), number(one[device]), str(one["calls"])]
