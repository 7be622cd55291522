"""From a validated config to cells: the cartesian product of each grid entry, projected on the axes a bench depends on.

A `Cell` is one frozen point of the grid for one bench; its `key` is readable and unique among the cells of its bench,
and is looked up, never parsed. A `Job` is a cell with the implementations to run and the settings to measure with: its
spec (one JSON text) is everything that a measurement depends on besides code, and its hash is stored with every row.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_routing_bench import skew as skew_model
from moe_routing_bench import trace
from moe_routing_bench.benches import BENCHES, Bench
from moe_routing_bench.errors import bad, pick
from moe_routing_bench.routers import ROUTERS
from moe_routing_bench.settings import Settings

FP8 = {"fp8_row": None, "fp8_block128": 128}  # elements that share a scale, None the whole row; bf16 in, e4m3 out
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4} | dict.fromkeys(FP8, 2)  # bytes of an element of the inputs
LAYOUTS = ("compact", "padded", "block64", "block128")
_NAMES = {"router": ROUTERS, "sampler": skew_model.SAMPLERS, "dtype": DTYPES, "layout": LAYOUTS}
_PRESET = ("hidden", "intermediate", "experts", "top_k", "router")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Cell:
    """One point of the grid. An axis that the bench does not depend on is None; `capacity_factor` None means no limit."""

    bench: str
    seed: int
    model: str | None = None
    phase: str = "prefill"
    tokens: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    top_k: int | None = None
    capacity_factor: float | None = None
    skew: float | None = None
    sampler: str | None = None
    trace: str | None = None
    dtype: str | None = None
    layout: str | None = None
    router: str | None = None

    @property
    def key(self) -> str:
        """Readable name of the cell, such as ``T4096-H2048-E64-k8-cfnone-skew0.7-exact-bf16-compact-seed17``."""
        axes = BENCHES[self.bench].axes
        parts = [self.model] if self.model else []
        for axis, prefix in _KEY_PARTS:
            if axis in axes:
                value = getattr(self, axis)
                if axis == "trace":
                    value = Path(value).stem if value else None
                if value is not None or axis == "capacity_factor":
                    parts.append(f"{prefix}{'none' if value is None else _short(value)}")
        return "-".join([*parts, f"seed{self.seed}"])

    @property
    def capacity(self) -> int | None:
        """Most tokens an expert may hold: ceil(capacity_factor * tokens * top_k / experts); None without a limit."""
        if self.capacity_factor is None:
            return None
        assert self.tokens and self.top_k and self.experts
        factor = Fraction(str(self.capacity_factor))  # 1.1 is 11/10: as a float it would round 11 rows up to 12
        return min(self.tokens, math.ceil(factor * self.tokens * self.top_k / self.experts))

    @property
    def row_limit(self) -> int:
        """Rows that a buffer of this cell's layout needs whatever the routing: an upper bound known without a GPU."""
        assert self.tokens and self.top_k and self.experts
        assignments = self.tokens * self.top_k
        if self.layout == "padded":
            assert self.capacity is not None
            return self.experts * self.capacity
        kept = assignments if self.capacity is None else min(assignments, self.experts * self.capacity)
        if self.block == 1:
            return kept
        busy = min(self.experts, kept)
        return ((kept - busy) // self.block + busy) * self.block

    @property
    def block(self) -> int:
        """Multiple to which the rows of every expert are rounded up."""
        return int(self.layout.removeprefix("block")) if self.layout and self.layout.startswith("block") else 1

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of the inputs."""
        return DTYPES[self.dtype or "fp32"]

    @property
    def packed_bytes(self) -> int:
        """Bytes of one element of the packed rows."""
        return 1 if self.dtype in FP8 else self.dtype_bytes


_KEY_PARTS = (
    ("tokens", "T"),
    ("hidden", "H"),
    ("intermediate", "I"),
    ("experts", "E"),
    ("top_k", "k"),
    ("capacity_factor", "cf"),
    ("skew", "skew"),
    ("sampler", ""),
    ("trace", ""),
    ("router", ""),
    ("dtype", ""),
    ("layout", ""),
)
CELL_FIELDS = tuple(field.name for field in fields(Cell))
_LISTS = ("tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew", "sampler", "dtype", "layout", "router")  # fmt: skip


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Job:
    """A cell, the implementations to measure side by side in it, and how to measure."""

    cell: Cell
    implementations: tuple[str, ...]
    settings: Settings

    @cached_property
    def spec(self) -> str:
        """Everything the measurement depends on besides code, as one canonical JSON text."""
        parts = {
            "cell": _values(self.cell),
            "implementations": self.implementations,
            "settings": _values(self.settings),
        }
        if self.cell.trace:
            parts["trace_sha256"] = file_sha256(Path(self.cell.trace))
        return json.dumps(parts, sort_keys=True, separators=(",", ":"))

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the spec."""
        return spec_hash(self.spec)

    @cached_property
    def name(self) -> str:
        """File name of the job: the cell for people, then 8 digits of the hash, so that another spec is another file."""
        return f"{self.cell.key}-{self.hash[:8]}"

    @staticmethod
    def from_spec(spec: str) -> "Job":
        """The inverse of `spec`."""
        parts = json.loads(spec)
        return Job(Cell(**parts["cell"]), tuple(parts["implementations"]), Settings(**parts["settings"]))


def _values(one: Cell | Settings) -> dict[str, Any]:
    """What `dataclasses.asdict` gives for a flat dataclass, without its deep copies: a grid may have thousands of cells."""
    return {field.name: getattr(one, field.name) for field in fields(one)}


def spec_hash(spec: str) -> str:
    """First 16 hex digits of the SHA-256 of a spec text."""
    return hashlib.sha256(spec.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content; `UserError` when it is missing."""
    if not path.is_file():
        raise bad("trace", str(path), trace.FORMAT, "no such file")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def project(cell: Cell) -> Cell:
    """The cell with every axis that its bench does not depend on set to None."""
    axes = BENCHES[cell.bench].axes
    return replace(
        cell,
        **{name: None for name, _ in _KEY_PARTS if name not in axes},
        model=cell.model if "model" in axes else None,
    )


def expand(config: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> list[Job]:
    """All jobs of a config, each cell once, in the order of the config.

    `config` is schema-valid (`config.load`); `models` is the content of config/models.yaml. A cell asked for by several
    entries gets the union of their implementations. Raises `UserError` for what a schema cannot say.
    """
    settings = Settings(**config.get("measure", {}))
    wanted: dict[Cell, list[str]] = {}
    for entry in config["grid"]:
        _check_entry(entry)
        for name in entry["benches"]:
            bench = BENCHES[pick("grid bench", name, BENCHES)]
            names = _implementations(bench, entry)
            if not names:
                continue
            for cell in _entry_cells(bench, entry, models, config["seed"]):
                known = wanted.setdefault(cell, [])
                known += [n for n in names if n not in known]
    if not wanted:
        raise bad("grid", "no cell", "at least one", "none of the benches has any of the implementations")
    jobs = [Job(cell, _in_table_order(cell.bench, names), settings) for cell, names in wanted.items()]
    _check_keys(jobs)
    return jobs


def _check_entry(entry: Mapping[str, Any]) -> None:
    """Raise `UserError` for a name that does not exist, even on an axis that no bench here depends on, and for values
    that would be ignored in silence."""
    for axis, choices in _NAMES.items():
        for name in entry.get(axis, ()):
            pick(axis, name, choices)
    if "trace" in entry and "trace" not in entry.get("sampler", ()):
        raise bad("trace", entry["trace"], "only with sampler: [trace]", "nothing else reads it")
    given = [axis for axis in _PRESET if axis in entry]
    if "model" in entry and given:
        raise bad(f"grid {given[0]}", entry[given[0]], f"nothing beside model: {entry['model']}", "a model sets it")


def _implementations(bench: Bench, entry: Mapping[str, Any]) -> list[str]:
    """Names of the entry's implementations that this bench has; a name that no bench has is an error."""
    own = [i.name for i in bench.implementations]
    if "implementations" not in entry:
        return own
    everywhere = {i.name: None for b in BENCHES.values() for i in b.implementations}
    chosen = [pick("grid implementation", n, everywhere) for n in entry["implementations"]]
    return [n for n in chosen if n in own]


def _in_table_order(bench: str, names: Iterable[str]) -> tuple[str, ...]:
    names = set(names)
    return tuple(i.name for i in BENCHES[bench].implementations if i.name in names)


def _entry_cells(bench: Bench, entry: Mapping[str, Any], models: Mapping, seed: int) -> Iterable[Cell]:
    for shape in _shapes(entry, models):
        axes = {name: shape.get(name, entry.get(name, _DEFAULTS.get(name))) for name in _LISTS}
        missing = [n for n in bench.axes if n in axes and axes[n] is None]
        if missing:
            raise bad(
                f"grid entry for bench {bench.name}",
                f"no {missing[0]}",
                "a list of values",
                f"add '{missing[0]}: [...]' or a model",
            )
        lists = {n: v if isinstance(v, list) else [v] for n, v in axes.items() if n in bench.axes}
        for values in itertools.product(*lists.values()):
            cell = Cell(
                bench.name, seed, model=shape.get("model"), phase=entry.get("phase", "prefill"),
                trace=entry.get("trace") if "sampler" in lists else None, **dict(zip(lists, values, strict=True)),
            )  # fmt: skip
            cell = _normal(cell)
            check(cell)
            yield project(cell)


_DEFAULTS = {
    "capacity_factor": ["none"], "skew": [0], "sampler": ["exact"], "dtype": ["bf16"],
    "layout": ["compact"], "router": ["softmax_topk_renorm"],
}  # fmt: skip


def _shapes(entry: Mapping[str, Any], models: Mapping) -> Iterable[dict[str, Any]]:
    """One mapping of fixed axes a model preset, or one empty mapping when the entry names none."""
    for name in entry.get("model", [None]):
        if name is None:
            yield {}
            continue
        preset = models[pick("grid model", name, models)]
        if "unsupported" in preset:
            raise bad("grid model", name, "a preset whose expert is SwiGLU", preset["unsupported"])
        yield {
            "model": name,
            **{axis: preset[axis] for axis in _PRESET},
        }


def _normal(cell: Cell) -> Cell:
    """Spell equal cells alike: 'none' is None, numbers are floats, a trace has no skew and a sampler no trace."""
    factor = cell.capacity_factor
    return replace(
        cell,
        capacity_factor=None if factor in (None, "none") else float(factor),
        skew=None if cell.sampler == "trace" or cell.skew is None else float(cell.skew),
        trace=cell.trace if cell.sampler == "trace" else None,
    )


def check(cell: Cell) -> None:
    """Raise `UserError` for a cell that cannot exist: what the schema cannot say."""
    for axis, choices in _NAMES.items():
        if getattr(cell, axis) is not None:
            pick(axis, getattr(cell, axis), choices)
    for name in ("tokens", "hidden", "intermediate", "experts", "top_k"):
        value = getattr(cell, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise bad(name, value, "an integer of at least 1")
    if cell.experts and cell.top_k and cell.top_k > cell.experts:
        raise bad("top_k", cell.top_k, f"1 to experts={cell.experts}", "a token cannot choose an expert twice")
    if cell.capacity_factor is not None and cell.capacity_factor <= 0:
        raise bad("capacity_factor", cell.capacity_factor, "above 0, or none for no limit")
    if cell.layout == "padded" and cell.capacity_factor is None:
        raise bad("layout", "padded", "compact or blockN without a capacity_factor", "padded rows are the capacity")
    if cell.dtype in FP8 and cell.bench != "pack":
        raise bad(
            f"dtype of {cell.bench}", cell.dtype, ", ".join(d for d in DTYPES if d not in FP8), "only pack quantises"
        )
    if cell.router in ROUTERS and cell.experts:
        ROUTERS[cell.router or ""].check(cell.experts, cell.top_k or 1)
    if cell.tokens and cell.experts and cell.top_k and (rows := cell.row_limit) > _INT32_MAX:
        raise bad("grid", f"{rows} rows", f"at most {_INT32_MAX}: rows are counted in int32", "use fewer tokens")
    if cell.sampler == "trace":
        if not cell.trace:
            raise bad("sampler", "trace", "together with trace: FILE", "add the path of a Parquet file")
        assert cell.tokens and cell.experts and cell.top_k
        trace.read(Path(cell.trace), cell.tokens, cell.experts, cell.top_k)
    elif cell.skew is not None and cell.sampler and cell.tokens and cell.experts and cell.top_k:
        skew_model.check(cell.skew, cell.sampler, cell.tokens, cell.experts, cell.top_k)


def _check_keys(jobs: list[Job]) -> None:
    seen: dict[tuple[str, str], Cell] = {}
    for job in jobs:
        other = seen.setdefault((job.cell.bench, job.cell.key), job.cell)
        if other != job.cell:
            raise bad(
                "cell key",
                job.cell.key,
                "one cell a key",
                f"two cells differ only in what the key leaves out: {other} and {job.cell}",
            )
