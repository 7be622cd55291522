"""One training run: everything that its result depends on besides code. Without torch, so that the workflow can plan."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_routing_bench.errors import bad, pick

DENSE = "dense"
DROP_POLICIES = ("position", "random", "score")
MATCHES = ("active_flops", "parameters")
PURPOSES = ("final", "pilot")
TRAIN_MODES = ("joint", "frozen_router", "experts_first")
BUILT_IN = ("shakespeare", "stdlib", "kjv")


@dataclass(frozen=True)
class Run:
    """A (router, config, seed). Sizes are bytes (= tokens), sequences or steps; see config/README.md for each."""

    router: str = "softk"
    seed: int = 17
    label: str = "run"  # the config entry that asked for it
    purpose: str = "final"
    network: str = "linear"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the router, as `routers.learned.build` takes them
    experts: int = 8
    top_k: int = 2
    capacity_factor: float | None = 1.25  # None: no limit
    drop_policy: str = "position"
    train_mode: str = "joint"  # whether router and experts learn together: see `train.frozen`
    match: str = "active_flops"  # what the dense model, and a rule of fixed k, have in common with the others
    dim: int = 64
    layers: int = 2
    heads: int = 4
    expert_hidden: int = 128
    corpora: Mapping[str, int | None] = field(default_factory=lambda: {"stdlib": 1_000_000})  # most bytes, None: all
    validation_share: float = 0.1
    max_epochs: float = 4.0
    sequence: int = 128
    batch: int = 16
    steps: int = 100
    warmup: int = 10
    lr: float | None = 1e-3  # None: the best of the pilots
    pilots: tuple[str, ...] = ()  # names of the runs among which the learning rate is chosen
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 100
    trace_tokens: int = 0  # tokens whose routing is kept as a trace
    keep_weights: bool = False  # for a timing run afterwards

    def __post_init__(self) -> None:
        """Raise `UserError` for a value that cannot be."""
        pick("drop_policy", self.drop_policy, DROP_POLICIES)
        pick("match", self.match, MATCHES)
        pick("train_mode", self.train_mode, TRAIN_MODES)
        pick("purpose", self.purpose, PURPOSES)
        for name in ("experts", "top_k", "dim", "layers", "heads", "expert_hidden", "sequence", "batch", "steps", "eval_every"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad(f"quality {name}", value, "an integer of at least 1")
        for name in ("lr", "capacity_factor", "max_epochs", "clip"):
            value = getattr(self, name)
            if value is None and name in ("lr", "capacity_factor"):
                continue
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise bad(f"quality {name}", value, "a number above 0")
        if not 0 < self.validation_share < 1:
            raise bad("quality validation_share", self.validation_share, "between 0 and 1")
        if not 0 <= self.warmup < self.steps:
            raise bad("quality warmup", self.warmup, f"0 to steps - 1 = {self.steps - 1}")
        if self.dim % (2 * self.heads):
            raise bad("quality dim", self.dim, f"a multiple of 2 x heads = {2 * self.heads}")
        if self.top_k > self.experts:
            raise bad("quality top_k", self.top_k, f"at most experts = {self.experts}")
        if self.lr is None and not self.pilots:
            raise bad("quality lr", "none", "a number, or pilots to take it from")
        if not self.corpora:
            raise bad("quality corpora", "none", f"at least one of {', '.join(BUILT_IN)}, or a path")
        for name in self.corpora:
            if name not in BUILT_IN and not Path(name).exists():
                raise bad("quality corpus", name, f"{', '.join(BUILT_IN)}, or an existing file or folder")

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one step trains on."""
        return self.batch * self.sequence

    @cached_property
    def spec(self) -> str:
        """The run as one canonical JSON text; of a user's own text it holds the hash of the content."""
        parts: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        own = {name: content_sha256(Path(name)) for name in self.corpora if name not in BUILT_IN}
        return json.dumps(parts | ({"corpora_sha256": own} if own else {}), sort_keys=True, separators=(",", ":"))

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the spec."""
        return hashlib.sha256(self.spec.encode()).hexdigest()[:16]

    @property
    def config_hash(self) -> str:
        """The same without what may differ between runs that are compared."""
        own = {
            "router",
            "network",
            "options",
            "capacity_factor",
            "drop_policy",
            "train_mode",
            "seed",
            "lr",
            "pilots",
            "trace_tokens",
            "keep_weights",
        }
        parts = {name: value for name, value in json.loads(self.spec).items() if name not in own}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def name(self) -> str:
        """File name: readable, then 8 digits of the hash, so that another spec is another file."""
        factor = "none" if self.capacity_factor is None else f"{self.capacity_factor:g}"
        parts = [self.label, self.router, f"E{self.experts}", f"k{self.top_k}", f"cf{factor}"]
        parts += [self.network] if self.network != "linear" else []
        parts += [self.drop_policy] if self.drop_policy != "position" else []
        parts += [self.train_mode] if self.train_mode != "joint" else []
        parts += [f"pilot-lr{self.lr:g}"] if self.purpose == "pilot" else []
        return "-".join([*parts, f"seed{self.seed}", self.hash[:8]])

    @staticmethod
    def from_spec(spec: str) -> "Run":
        """The inverse of `spec`. Raises `UserError` when a user's own text is not what it was."""
        parts = json.loads(spec)
        parts.pop("corpora_sha256", None)
        run = Run(**parts | {"pilots": tuple(parts["pilots"])})
        if run.spec != spec:
            raise bad("quality corpora", "another content", "the text that the run was planned with", "plan it again")
        return run


def content_sha256(path: Path) -> str:
    """SHA-256 over the names and contents of a file, or of all files below a folder."""
    digest = hashlib.sha256()
    for file in documents(path):
        digest.update(file.relative_to(path.parent).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def documents(path: Path) -> list[Path]:
    """The file itself, or every visible file below a folder, sorted."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
