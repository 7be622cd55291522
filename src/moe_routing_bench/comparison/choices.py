"""Rows of layers as entries of the table that `auto` chooses from."""

from collections.abc import Iterable

import pandas as pd

from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.config.axes import SHARED
from moe_routing_kernels.choices.table import SIZES, Entry, Shape
from moe_routing_kernels.errors import bad
from moe_routing_kernels.implementations import ranked

BENCH = "layer"
# What a card is, by a word of its name: rows name the card, a choice is made for its architecture.
ARCHITECTURES = {
    "A100": "sm_80",
    "L40S": "sm_89",
    "H100": "sm_90",
    "H200": "sm_90",
    "H20": "sm_90",
    "GH200": "sm_90",
    "B200": "sm_100",
}
_VERSIONS = ("torch_version", "triton_version", "cutlass_dsl_version", "driver")
_WHOLE = ("tokens", "experts", "top_k", "hidden", "intermediate")


def entries(rows: pd.DataFrame, run: str) -> list[Entry]:
    """An entry for every layer with a time among rows of a run. Left out are rows of other packages, which are not everywhere, and cells
    with shared experts, which take as long in all implementations and would hide how those differ."""
    ok = as_chosen(rows[(rows["bench"] == BENCH) & (rows["status"] == "ok")])
    ok = ok[ok["plugin"].isna()]
    ok = ok[ok[list(SHARED)].isna().all(axis=1)]
    return [_entry(cell, run) for _, cell in ok.groupby(["cell", ok["gpu_name"].fillna("")], sort=True)]


def fullest(found: Iterable[Entry]) -> list[Entry]:
    """One entry per cell and card, in the order of cards and cells: of those with the most implementations, that which was measured last.

    A run that asks for some of them alone, as one that compares formats, does not take the others from the table.
    """
    kept: dict[tuple[str, str], Entry] = {}
    for one in sorted(found, key=lambda one: (len(one.times), one.measured)):
        kept[one.card, one.cell] = one
    return [kept[key] for key in sorted(kept)]


def architecture(card: str | None) -> str:
    """The architecture of a card, ``cpu`` where there is none; of an unknown one its name, which fits no other."""
    if not card:
        return "cpu"
    words = card.replace("-", " ").split()
    return next((found for name, found in ARCHITECTURES.items() if name in words), card)


def check_cards(found: Iterable[Entry]) -> None:
    """Raise `UserError` for an entry of a card whose architecture is unknown: no choice would ever be made from it."""
    for one in found:
        if one.shape.architecture == one.card:
            raise bad("card", one.card, ", ".join(ARCHITECTURES), "add its architecture to comparison/choices.py")


def chosen(configuration: str) -> str:
    """The implementation that `auto` ran, with which the `configuration` of its row begins; that of the implementation follows."""
    return configuration.partition(";")[0]


def as_chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with those of `auto` as rows of what it chose, unless that was measured in the same cell."""
    auto = rows["implementation"] == AUTO
    if not auto.any():
        return rows
    ran = rows[auto].assign(implementation=rows["configuration"].map(chosen, na_action="ignore"))
    found = pd.concat([rows[~auto], ran[ran["implementation"].isin([one.name for one in ranked("layer")])]])
    return found.drop_duplicates(["cell", "gpu_name", "implementation"])  # the first is its own


def _entry(cell: pd.DataFrame, run: str) -> Entry:
    """The entry of the rows of one cell."""
    first, by_name = cell.iloc[0], cell.set_index("implementation")
    card = None if pd.isna(first["gpu_name"]) else str(first["gpu_name"])
    known = {name: None if pd.isna(first[name]) else first[name] for name in SIZES}
    known |= {name: int(known[name]) for name in _WHOLE}
    if known["capacity_factor"] is not None:
        known["capacity_factor"] = float(known["capacity_factor"])
    doubted = by_name[by_name["suspect"] == True]  # noqa: E712
    return Entry(
        cell=str(first["cell"]),
        phase=str(first["phase"]),
        shape=Shape(**known, architecture=architecture(card)),
        times={name: round(float(us), 3) for name, us in by_name["median_us"].items()},
        model="" if pd.isna(first["model"]) else str(first["model"]),
        verdicts={name: str(said) for name, said in by_name["best_verdict"].dropna().items()},
        suspect={name: str(why) for name, why in doubted["suspect_reason"].items()},
        run=run,
        measured=str(cell["started_at"].min()),
        card=card or "",
        commit=f"{first['git_sha']}{'+' if cell['git_dirty'].eq(True).any() else ''}",
        versions={name.removesuffix("_version"): str(first[name]) for name in _VERSIONS if not pd.isna(first[name])},
    )
