"""One training run: everything that its result depends on besides code.

Nothing here imports torch, as the workflow plans runs with it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from moe_routing_bench.fields import Choice, check_fields
from moe_routing_bench.grid.cell import Amount, Count, Seed, Share, Whole, canonical, spec_hash
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad

DENSE = "dense"
DROP_POLICIES = ("position", "random", "score")
MATCHES = ("active_flops", "parameters")
PURPOSES = ("final", "pilot")
TRAIN_MODES = ("joint", "frozen_router", "experts_first")
# how a shared expert is weighted: by 1, by a sigmoid of its own (Qwen2-MoE), or jointly with the chosen experts (Inkling)
SHARED_GATES = ("plain", "gated", "joint")
# how queries and keys are made: as they are, normalised per head (Qwen3), or each key mixed with the one before it (2209.11895, "smeared keys")
ATTENTIONS = ("plain", "qk_norm", "key_shift")
PACKAGES = "packages"  # the cleaned text of config/texts.yaml
BUILT_IN = ("shakespeare", "stdlib", "kjv", PACKAGES)
BYTES = 256  # the vocabulary of bytes; a larger one is of pairs that are merged
# fields of which an entry of a config lists values, besides the seeds
AXES = ("router", "network", "capacity_factor", "drop_policy", "train_mode", "shared_gate")
# fields that say how a model is trained, whatever it is; an adaptation has its own
SCHEDULE = ("validation_share", "max_epochs", "batch", "steps", "warmup", "lr", "weight_decay", "clip", "eval_every")
# fields that came later: a spec has them where they are not the default, so that names of stored runs stay
_LATER = ("shared_hidden", "shared_gate", "vocabulary", "validation_tokens", "altered", "lr_source", "attention")
# fields in which runs that are compared may differ
_OWN = {
    "router",
    "network",
    "options",
    "capacity_factor",
    "drop_policy",
    "train_mode",
    "shared_gate",
    "seed",
    "lr",
    "pilots",
    "lr_source",
    "trace_tokens",
    "keep_weights",
}


@dataclass(frozen=True)
class Run:
    """A router, a config and a seed.

    Sizes count tokens (bytes, with a vocabulary of 256), sequences or steps; config/README.md explains each.
    """

    router: str = "softk"  # or rules of the first layers that ``+`` joins, the last of them for all further layers
    seed: Seed = 17
    label: str = "run"  # the config entry that asked for it
    purpose: Annotated[str, Choice(PURPOSES)] = "final"
    network: str = "linear"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the router, as `routers.learned.build` takes them
    experts: Count = 8
    top_k: Count = 2
    capacity_factor: Amount | None = 1.25  # None: no limit
    drop_policy: Annotated[str, Choice(DROP_POLICIES)] = "position"
    # whether router and experts learn together: see `schedule.frozen`
    train_mode: Annotated[str, Choice(TRAIN_MODES)] = "joint"
    # what the dense model and rules of a fixed k have in common with the others
    match: Annotated[str, Choice(MATCHES)] = "active_flops"
    dim: Count = 64
    layers: Count = 2
    heads: Count = 4
    expert_hidden: Count = 128
    # at most so many bytes of each, None: all
    corpora: Mapping[str, int | None] = field(default_factory=lambda: {"stdlib": 1_000_000})
    validation_share: Share = 0.1
    max_epochs: Amount = 4.0
    sequence: Count = 128
    batch: Count = 16
    steps: Count = 100
    warmup: Whole = 10
    lr: Amount | None = 1e-3  # None: the best of the pilots
    pilots: tuple[str, ...] = ()  # names of the runs among which the learning rate is chosen
    weight_decay: Annotated[float, Ge(0)] = 0.1
    clip: Amount = 1.0
    eval_every: Count = 100
    trace_tokens: Whole = 0  # tokens whose routing is kept as a trace
    keep_weights: bool = False  # for a timing run afterwards
    shared_hidden: Whole = 0  # width of an expert that every token has besides those that are chosen
    vocabulary: Annotated[int, Ge(BYTES), Le(2**16)] = BYTES
    validation_tokens: Whole = 0  # the most of all domains together, of each an equal share; 0: all
    altered: bool = True  # whether the last evaluation also alters formats and capacities
    shared_gate: Annotated[str, Choice(SHARED_GATES)] = "plain"
    lr_source: str = ""  # the study whose rows chose the learning rate, or "fallback" where it has none
    attention: Annotated[str, Choice(ATTENTIONS)] = "plain"

    def __post_init__(self) -> None:
        """Raise `UserError` for a value that is not allowed."""
        check_fields(self, "quality")
        if not 0 <= self.warmup < self.steps:
            raise bad("quality warmup", self.warmup, f"0 to steps - 1 = {self.steps - 1}")
        if self.dim % (2 * self.heads):
            raise bad("quality dim", self.dim, f"a multiple of 2 x heads = {2 * self.heads}")
        if self.top_k > self.experts:
            raise bad("quality top_k", self.top_k, f"at most experts = {self.experts}")
        if self.shared_gate != "plain" and not self.shared_hidden:
            raise bad(
                "quality shared_gate", self.shared_gate, "plain", "without shared_hidden there is no shared expert"
            )
        if self.lr is None and not self.pilots:
            raise bad("quality lr", "none", "a number, or pilots to take it from")
        if self.vocabulary != BYTES and set(self.corpora) != {PACKAGES}:
            raise bad("quality vocabulary", self.vocabulary, f"{BYTES}, the bytes, for corpora other than {PACKAGES}")
        if not self.corpora:
            raise bad("quality corpora", "none", f"at least one of {', '.join(BUILT_IN)}, or a path")
        for name in self.corpora:
            if name not in BUILT_IN and not os.path.exists(name):
                raise bad("quality corpus", name, f"{', '.join(BUILT_IN)}, or an existing file or folder")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on."""
        return self.batch * self.sequence

    @cached_property
    def spec(self) -> str:
        """The run as one canonical JSON text, which holds the hash of the content of a user's own text."""
        parts: dict[str, Any] = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in _LATER or getattr(self, item.name) != item.default
        }
        hashes = {name: content_sha256(Path(name)) for name in self.corpora if name not in BUILT_IN}
        return canonical(parts | ({"corpora_sha256": hashes} if hashes else {}))

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the spec."""
        return spec_hash(self.spec)

    @property
    def config_hash(self) -> str:
        """The same of the spec without the fields in which runs that are compared may differ."""
        parts = {name: value for name, value in json.loads(self.spec).items() if name not in _OWN}
        return spec_hash(json.dumps(parts, sort_keys=True))

    @cached_property
    def name(self) -> str:
        """The file name: readable, then 8 digits of the hash, so that each spec has a file of its own."""
        factor = "none" if self.capacity_factor is None else f"{self.capacity_factor:g}"
        parts = [self.label, self.router, f"E{self.experts}", f"k{self.top_k}", f"cf{factor}"]
        parts += [self.network] if self.network != "linear" else []
        parts += [self.drop_policy] if self.drop_policy != "position" else []
        parts += [self.train_mode] if self.train_mode != "joint" else []
        parts += [f"shared-{self.shared_gate}"] if self.shared_gate != "plain" else []
        parts += [self.attention] if self.attention != "plain" else []
        parts += [f"pilot-lr{self.lr:g}"] if self.purpose == "pilot" else []
        return "-".join([*parts, f"seed{self.seed}", self.hash[:8]])

    @staticmethod
    def from_spec(spec: str) -> "Run":
        """The inverse of `spec`. Raises `UserError` when a user's own text has changed since."""
        parts = json.loads(spec)
        parts.pop("corpora_sha256", None)
        run = Run(**parts | {"pilots": tuple(parts["pilots"])})
        if run.spec != spec:
            raise bad("quality corpora", "another content", "the text that the run was planned with", "plan it again")
        return run


def content_sha256(path: Path) -> str:
    """SHA-256 over the name and content of a file, or of all files below a folder. Raises `UserError` as `document` does."""
    digest = hashlib.sha256()
    for file in documents(path):
        digest.update(os.fsencode(file.relative_to(path.parent).as_posix()) + b"\0" + document(file))
    return digest.hexdigest()


_MOST_BYTES, _MOST_FILES = 2**28, 2**17  # of a text
_TEXT = "a file, or a folder of files, of text"


def documents(path: Path) -> list[Path]:
    """The file itself, or every visible file below a folder, sorted. Raises `UserError` for a folder that is no folder of texts."""
    if not path.is_dir():
        return [path]
    files, size = [], 0
    try:
        for file in path.rglob("*"):
            if not file.name.startswith(".") and file.is_file():
                files.append(file)
                size += file.stat().st_size
            if len(files) > _MOST_FILES or size > _MOST_BYTES:
                allowed = f"at most {_MOST_FILES} files of {_MOST_BYTES} bytes together"
                raise bad("quality corpus", f"a larger folder {path}", allowed)
    except (OSError, RuntimeError) as error:
        raise bad("quality corpus", str(path), _TEXT, getattr(error, "strerror", None) or str(error)) from error
    return sorted(files)


def document(path: Path) -> bytes:
    """The content of one of these files. Raises `UserError` for one that cannot be read."""
    try:
        return guarded.content(path, _MOST_BYTES)
    except OSError as error:
        raise bad("quality corpus", str(path), _TEXT, error.strerror or str(error)) from error


VARIANTS = ("R", "E", "D", "S")  # own router, the frozen one, all on, a single one: see `model.adapters`


@dataclass(frozen=True)
class Adaptation:
    """Adapters on a base; `run` has the base's model, and the label, text, seed and schedule of the adaptation."""

    run: Run = field(default_factory=Run)
    base: str = ""  # name of the run that is adapted
    variant: Annotated[str, Choice(VARIANTS)] = "S"
    rank: Count = 8
    adapters: Count = 4  # per layer, for R and D
    top_k: Count = 2  # adapters per token, for R
    alpha: Amount = 32.0  # adapters are scaled by alpha / rank

    def __post_init__(self) -> None:
        """Raise `UserError` for a value that is not allowed."""
        check_fields(self, "perft")
        if self.top_k > self.adapters:
            raise bad("perft top_k", self.top_k, f"at most adapters = {self.adapters}")

    @cached_property
    def spec(self) -> str:
        """The adaptation as one canonical JSON text, in which the run is the text of its own spec."""
        parts: dict[str, Any] = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return canonical(parts | {"run": self.run.spec})

    @property
    def config_hash(self) -> str:
        """That of the run: what adaptations that are compared have in common."""
        return self.run.config_hash

    @cached_property
    def name(self) -> str:
        """The file name: readable, then 8 digits of the hash of the spec."""
        parts = [self.run.label, f"perft{self.variant}", f"r{self.rank}"]
        parts += [f"pilot-lr{self.run.lr:g}"] if self.run.purpose == "pilot" else []
        return "-".join([*parts, f"seed{self.run.seed}", spec_hash(self.spec)[:8]])

    @staticmethod
    def from_spec(spec: str) -> "Adaptation":
        """The inverse of `spec`. Raises `UserError` when a user's own text has changed since."""
        parts = json.loads(spec)
        return Adaptation(**parts | {"run": Run.from_spec(parts["run"])})
