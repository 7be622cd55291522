"""The fields of a config.json: read by any of their names, checked, with the class's default of one that is missing, and what was noted."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from moe_routing_bench.config import config_files
from moe_routing_bench.config.architectures import Architecture
from moe_routing_kernels.errors import UserError, bad, shown

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "d_model"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_k",
        "moe_top_k",
        "top_k_experts",
    ),
    "num_hidden_layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize"),
    "n_group": ("n_group", "num_expert_group"),
    "routed_scaling_factor": ("routed_scaling_factor", "route_scale"),
}
MOST = 2**20  # of any number of a model
# Fields of an MoE layer, but not those of training alone, of attention or of how it is computed.
_NOTABLE = re.compile(r"expert|moe|rout|swiglu|hash|topk|top_k|latent|shared|per_expert|n_group|norm_topk|scoring")
_OTHER = re.compile(
    r"aux|loss|jitter|output_router|dropout|initializer|noise|router_dtype|^ep_size|kv_shared|rope|nextn|^mtp|^index|mamba|^n_groups$|overlap|^use_expert_bias$|fp32"
)


class Fields:
    """The fields of a model, with a list of what was noted and of reasons why the model cannot be measured."""

    def __init__(
        self, fields: Mapping[str, Any], kind: str, found: Callable[[], Any], architecture: Architecture, where: str
    ) -> None:
        """`found` gives the library's class, or None; it is called only for a field that is missing."""
        self.fields, self.kind, self.where = fields, kind, where
        self.architecture = architecture
        self._class, self._instance = found, None
        self._read: set[str] = set()
        self.notes: list[str] = []
        self.unsupported: list[str] = []

    def note(self, text: str) -> None:
        """Note what the preset leaves out or takes for granted."""
        self.notes.append(text)

    def refuse(self, reason: str) -> None:
        """Note why the model cannot be measured."""
        self.unsupported.append(reason)

    def names(self, name: str) -> tuple[str, ...]:
        """The names of a field, the architecture's first."""
        special = self.architecture.names.get(name)
        return tuple(dict.fromkeys((*([special] if special else ()), *ALIASES.get(name, (name,)))))

    def given(self, name: str) -> tuple[bool, Any]:
        """Whether the file has a field, by any of its names, and its value. Raises `UserError` where two of them differ."""
        found = {
            path: value
            for path in self.names(name)
            for there, value in [config_files.field_at(self.fields, path)]
            if there
        }
        special = self.architecture.names.get(name)
        # The other names may be something else there: LongCat has two attentions per layer.
        if special and found.get(special) is not None:
            found = {special: found[special]}
        self._read |= {path.partition(".")[0] for path in found}
        said = {path: value for path, value in found.items() if value is not None}
        if len({repr(value) for value in said.values()}) > 1:
            raise self.bad(" and ".join(said), list(said.values()), "the same value in both")
        return bool(found), next(iter(said.values()), None)

    def label(self, name: str) -> str:
        """The name that the file has for a field, or the first of those that it could have."""
        present = [
            (value is None, path)
            for path in self.names(name)
            for there, value in [config_files.field_at(self.fields, path)]
            if there
        ]
        return min(present, key=lambda each: each[0])[1] if present else self.names(name)[0]

    def left(self, name: str) -> Any:
        """The value of a field under this very name that nothing has read so far, now taken as read; None without one."""
        value = None if name in self._read else self.fields.get(name)
        self.seen(name)
        return value

    def value(self, name: str, otherwise: Any = ...) -> Any:
        """The value of a field, or the class's default, which is then noted; `otherwise` where the class has no such field.

        Raises `UserError` where there is neither.
        """
        there, value = self.given(name)
        return value if there else self._default(name, otherwise)

    def _default(self, name: str, otherwise: Any) -> Any:
        label, defaults = self.names(name)[0], self.architecture.defaults
        if name in defaults:
            self.note(f"{label} is {shown(defaults[name])}, as the architecture has it: the file does not say")
            return defaults[name]
        made = self._made()
        for path in self.names(name) if made is not None else ():
            there, value = config_files.field_at(made, path)
            if there:
                self.note(
                    f"{label} is {shown(value)}, the default of transformers' {type(made).__name__}: the file does not say"
                )
                return value
        if otherwise is not ...:
            return otherwise
        raise self._missing(self.names(name))

    def _made(self) -> Any:
        """An instance of the library's class, made of the fields that sizes depend on; None where there is none."""
        if self._instance is None and (found := self._class()) is not None:
            wanted = {
                path.partition(".")[0] for name in (*ALIASES, self.architecture.width) for path in self.names(name)
            }
            given = {name: self.fields[name] for name in sorted(wanted) if self.fields.get(name) is not None}
            for name, value in given.items():  # classes make a list of all layers
                if isinstance(value, int | float) and not value <= MOST:
                    raise self.bad(name, value, f"at most {MOST}")
            self._instance = config_files.instance_of(found, given, self.where)
        return self._instance

    def _missing(self, names: tuple[str, ...]) -> UserError:
        hint = "is it the config of the language model?"
        if not config_files.library_installed():
            hint = "add it, or install transformers, whose class may have a default"
        return bad(f"config {self.where}", f"no {names[0]}", " or ".join(names[:3]), hint)

    def bad(self, what: str, got: object, allowed: str, hint: str = "") -> UserError:
        """The error for the value of a field."""
        return bad(f"{what} of config {self.where}", got, allowed, hint)

    def count(self, name: str, least: int = 1, otherwise: Any = ...) -> int:
        """A number of things, or a list of the same number for each layer. Raises `UserError` for anything else."""
        value = self.value(name, otherwise)
        label = self.label(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
            self.note(f"{label} is {shown(value)}: the file has a list with one number for all layers")
        elif isinstance(value, list):
            raise self.bad(label, value, "one number for all layers", "a preset is of one layer")
        if value is None and least:
            raise self._missing(self.names(name))
        value = 0 if value is None else value
        if type(value) is not int or not least <= value <= MOST:
            raise self.bad(label, value, f"an integer from {least} to {MOST}")
        return value

    def number(self, name: str) -> float | None:
        """A positive number, or None for null or zero. Raises `UserError` for anything else."""
        value = self.value(name)
        if value is None:
            return None
        if (
            type(value) not in (int, float)
            or not (math.isfinite(value) if type(value) is float else value <= MOST)
            or value < 0
        ):
            raise self.bad(self.label(name), value, "a positive number")
        return float(value) or None

    def flag(self, name: str, otherwise: Any = ...) -> bool:
        """The value of a field that is true or false. Raises `UserError` for anything else."""
        value = self.value(name, otherwise)
        if type(value) is not bool:
            raise self.bad(self.label(name), value, "true or false")
        return value

    def seen(self, *names: str) -> None:
        """Take fields as read."""
        self._read |= set(names)

    def unread(self) -> list[str]:
        """Fields that say something of the MoE layers which nothing has read, as ``name value``."""
        left = [name for name in self.fields if _NOTABLE.search(name) and not _OTHER.search(name)]
        trivial: tuple[Any, ...] = (None, 0, False, [], {}, "")
        return [
            f"{shown(name)[1:-1]} {shown(self.fields[name])}"
            for name in left
            if name not in self._read and self.fields[name] not in trivial
        ]
