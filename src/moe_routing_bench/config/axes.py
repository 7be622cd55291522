"""The axes of the grid, each in one line: everything that differs between cells is here, and nowhere else.

A cell's key, the columns of a row, the schema of a config, the options of ``measure`` and the keys by which figures and
findings group rows are derived from this table. Which benches read an axis is said by the benches (`Bench.axes`). The
order is that of keys, columns and options.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from moe_routing_bench.fields import NONE, Choice, Distinct, OrNone, file_name
from moe_routing_bench.grid.cell import Cell, Value
from moe_routing_bench.workload import skew, trace
from moe_routing_kernels import formats
from moe_routing_kernels.activations import ACTIVATIONS, LIMITED, LIMITS
from moe_routing_kernels.errors import bad
from moe_routing_kernels.formats import weights
from moe_routing_kernels.permute import LAYOUTS, MOST_ROWS
from moe_routing_kernels.routers import ROUTERS, SCALED
from moe_routing_kernels.shared_experts import GATES

_LISTED = "`moe-routing-bench list` prints"


@dataclass(frozen=True)
class Axis:
    """One axis.

    `kind` is int, float or str. `prefix` stands before the value in a key. `scope`: a config ``entry`` holds a ``list`` of values or
    one ``scalar``, or the whole ``config`` holds one. `default` is the value where an entry says nothing; None: it must be said, by
    the entry or a model, unless `optional`. `follows` names the axis whose value is the default; then a key shows the value only where
    it differs. `typical` is the value of a cell that is measured by hand without saying it. `choices` are the names that are
    allowed; an `open` table of names grows, so the schema file does not repeat it, and `also` is a pattern of others, which sentences spell `spelt`. `least`, `most` and `above` bound numbers.
    `optional`: None is a value of its own, spelt ``none`` in a config. `part`: "shape" (of the model and batch), "workload" (decides
    the expert loads), "format" or "way". `universal`: every bench reads it. `preset`: a model sets it. `silent`: a key shows it
    only where it is not the default. `sparse`: a cell holds it only where it has a value, so that a cell without it is the same as before
    the axis was there. `shared`: it is of shared experts, which a model sets where an entry asks for them.
    """

    name: str
    kind: type
    summary: str
    part: str
    unit: str = ""
    prefix: str = ""
    scope: str = "list"
    default: Value = None
    follows: str = ""
    typical: Value = None
    choices: tuple[str, ...] = ()
    open: bool = False
    also: str = ""
    spelt: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    optional: bool = False
    preset: bool = False
    universal: bool = False
    silent: bool = False
    sparse: bool = False
    shared: bool = False

    @property
    def option(self) -> str:
        """How a command line spells it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def type(self) -> Any:
        """The type of one value in a config, as an annotation."""
        marks = [Choice(self.choices, _LISTED if self.open else "", self.also, self.spelt)] if self.choices else []
        bounds = ((Ge, self.least), (Gt, self.above), (Le, self.most))
        marks += [mark(value) for mark, value in bounds if value is not None]
        element: Any = Annotated[self.kind, *marks] if marks else self.kind
        return element | OrNone if self.optional and self.kind is not str else element

    @property
    def listed(self) -> tuple[str, ...]:
        """The names that are allowed, and how others are spelt."""
        return (*self.choices, self.spelt) if self.spelt else self.choices

    @property
    def entry_type(self) -> Any:
        """The type of what a config says of it: a list of values, or one value."""
        return Annotated[list[self.type], Distinct()] if self.scope == "list" else self.type

    def text(self, value: Value) -> str:
        """The value in a key, behind its prefix."""
        if value is None:
            return f"{self.prefix}{NONE}"
        if self.name == "trace":
            value = Path(str(value)).stem
        elif self.also:
            value = str(value).replace(":", ".")
        return self.prefix + (f"{value:g}" if isinstance(value, float) else str(value))


_TABLE = (
    Axis("model", str, "model preset that gives hidden, intermediate, experts, top_k and router", "shape", optional=True),
    Axis("phase", str, "kind of the batch, as a label", "shape", scope="scalar", default="prefill", choices=("prefill", "decode"), universal=True, silent=True),
    Axis("tokens", int, "tokens of the batch", "shape", prefix="T", typical=1024, least=1, most=2**31 - 1),
    Axis("hidden", int, "width of a token row", "shape", unit="elements", prefix="H", typical=1024, least=1, most=2**20, preset=True),
    Axis("intermediate", int, "inner width of an expert", "shape", unit="elements", prefix="I", typical=1024, least=1, most=2**20, preset=True),
    Axis("experts", int, "number of experts", "shape", prefix="E", typical=8, least=1, most=2**16, preset=True),
    Axis("top_k", int, "experts chosen per token", "shape", prefix="k", typical=2, least=1, most=2**16, preset=True),
    Axis("shared_intermediate", int, "inner width of the shared experts together; none: there are none", "shape", unit="elements", prefix="S", least=1, most=2**20, optional=True, sparse=True, shared=True),
    Axis("shared_gate", str, "score of a token that its shared experts are multiplied by", "way", prefix="gate-", choices=GATES, optional=True, sparse=True, shared=True),
    Axis("tp", int, "tensor-parallel ranks that the inner width of experts is divided by; the cell is what one rank runs", "shape", prefix="tp", least=1, most=1024, optional=True, sparse=True),
    Axis("ep", int, "expert-parallel ranks that experts are divided among; the cell is what the first of them runs for all tokens", "shape", prefix="ep", least=1, most=2**16, optional=True, sparse=True),
    Axis("ranks", int, "expert-parallel processes that make a call together, each with a device, an equal part of the tokens and one of the experts", "shape", prefix="ranks", default=2, least=2, most=64),
    Axis("capacity_factor", float, "most rows of an expert over the mean, tokens * top_k / experts", "workload", prefix="cf", above=0, most=2**16, optional=True),
    Axis("skew", float, "coefficient of variation of the expected expert loads", "workload", prefix="skew", default=0.0, least=0),
    Axis("sampler", str, "how assignments are drawn", "workload", default="exact", choices=skew.SAMPLERS),
    Axis("trace", str, "Parquet file of recorded routing, for the sampler trace", "workload", scope="scalar", optional=True),
    Axis("router", str, "routing rule", "way", default="softmax_topk_renorm", choices=tuple(ROUTERS), open=True, also=rf"[\w.]+:\w+|{SCALED}", preset=True),
    Axis("activation", str, "function between an expert's GEMMs; a model has its own", "way", default="swiglu", choices=ACTIVATIONS, also=LIMITS, spelt=LIMITED, preset=True, silent=True),
    Axis("dtype", str, "format of the activations", "format", default="bf16", choices=formats.PLAIN),
    Axis("packed", str, "format of the rows after pack", "format", prefix="packed-", follows="dtype", choices=tuple(formats.FORMATS)),
    Axis("weights", str, "format of the experts' weights", "format", prefix="weights-", follows="dtype", choices=weights.NAMES, open=True),
    Axis("layout", str, "how rows of different experts lie in the packed buffer", "way", default="compact", choices=LAYOUTS),
    Axis("seed", int, "seed of everything that is drawn", "workload", prefix="seed", scope="config", default=17, least=0, most=2**31 - 1, universal=True),
)  # fmt: skip
AXES: Mapping[str, Axis] = MappingProxyType({axis.name: axis for axis in _TABLE})
PRESET = tuple(axis.name for axis in _TABLE if axis.preset)
SHARED = tuple(axis.name for axis in _TABLE if axis.shared)


def of(benches_axes: Iterable[str]) -> tuple[Axis, ...]:
    """The axes of a bench that declares `benches_axes`, in the order of the table. KeyError for a name that is no axis."""
    declared = {AXES[name].name for name in benches_axes}
    return tuple(axis for axis in AXES.values() if axis.universal or axis.name in declared)


def key(values: Mapping[str, Value]) -> str:
    """The key of a cell with these values, such as ``T4096-H2048-E64-k8-cfnone-skew0.7-exact-bf16-compact-seed17``.

    An axis without a value is left out, unless its absence means something that others do not.
    """
    parts = []
    for axis in AXES.values():
        value = values.get(axis.name)
        if axis.name not in values or (value is None and not (axis.optional and axis.prefix)):
            continue
        if (axis.silent and value == axis.default) or (axis.follows and value == values.get(axis.follows)):
            continue
        parts.append(axis.text(value))
    return "-".join(parts)


def family(bench: str, values: Mapping[str, Value]) -> str:
    """What a cell has in common with the cells that it is compared with: its bench, and its model or the sizes of one."""
    if values.get("model"):
        return f"{bench}-{values['model']}"
    sizes = [AXES[name].text(values[name]) for name in PRESET if AXES[name].kind is int and name in values]
    return "-".join([bench, *sizes])


def names(*parts: str, without: Iterable[str] = ()) -> list[str]:
    """Names of the axes of these parts (all when none is named), to group rows by, without the axes that a comparison varies.

    An axis that is added later is in every such list, so that unlike rows are never pooled.
    """
    left_out = set(without)
    unknown = left_out - set(AXES)
    assert not unknown, f"no axes: {sorted(unknown)}"
    return [axis.name for axis in AXES.values() if (not parts or axis.part in parts) and axis.name not in left_out]


def spelled(axis: Axis, value: Any) -> Value:
    """A value of a config in the one spelling that specs, keys and rows have: ``none`` is None, a float axis has floats."""
    if value is None or (axis.optional and value == NONE):
        return None
    return float(value) if axis.kind is float else value


def check(bench: str, values: Mapping[str, Any]) -> None:
    """Raise `UserError` for values that make no cell: what single values cannot say."""
    experts, top_k, tokens = (values.get(name) for name in ("experts", "top_k", "tokens"))
    if experts and top_k and top_k > experts:
        raise bad("top_k", top_k, f"1 to experts={experts}", "a token cannot choose an expert twice")
    if (ranks := values.get("ranks")) and experts and experts % ranks:
        raise bad("ranks", ranks, f"a divisor of experts={experts}", "every rank has as many experts")
    if values.get("layout") == "padded" and values.get("capacity_factor") is None:
        raise bad("layout", "padded", "compact or blockN without a capacity_factor", "padded rows are the capacity")
    packed = values.get("packed")
    if packed and packed != values["dtype"] and not formats.FORMATS[packed].quantised:
        raise bad(
            "packed",
            packed,
            ", ".join((values["dtype"], *formats.QUANTISED)),
            "rows are copied as they are, or quantised",
        )
    form = weights.WEIGHTS.get(values.get("weights") or "")
    for name in ("hidden", "intermediate"):
        if form and not form.packs(values[name]):
            whole = 8 // form.bits
            raise bad(name, values[name], f"a multiple of {whole} with weights {form.name}", f"a byte holds {whole}")
    if values.get("shared_gate") and not values.get("shared_intermediate"):
        raise bad(
            "shared_gate", values["shared_gate"], "none without shared_intermediate", "there is nothing to multiply"
        )
    if (router := values.get("router")) and router not in ROUTERS:
        raise bad("router", router, f"{', '.join(ROUTERS)}, with another scale as in sigmoid_renorm_x2.827")
    if router and experts:
        ROUTERS[router].check(experts, top_k or 1)
    if not (tokens and experts and top_k):
        return
    from moe_routing_bench.workload.row_map import row_layout  # numpy, which published answers do without

    if (rows := row_layout(Cell(bench, "", tuple(values.items()))).rows) > MOST_ROWS:
        raise bad("grid", f"{rows} rows", f"at most {MOST_ROWS}: kernels count in int32", "use fewer tokens")
    if values.get("sampler") == "trace":
        if not values.get("trace"):
            raise bad("sampler", "trace", "together with trace: FILE", "add the path of a Parquet file")
        path = Path(values["trace"])
        trace.check(path, tokens, experts, top_k)
        file_name("name of the trace", path.stem)
    elif values.get("skew") is not None and values.get("sampler"):
        skew.check(values["skew"], values["sampler"], tokens, experts, top_k)
