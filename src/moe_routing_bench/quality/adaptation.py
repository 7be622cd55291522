"""One adaptation: a trained run, the adapters that it gets (PERFT), and how they are trained. Without torch."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moe_routing_bench.errors import bad, pick
from moe_routing_bench.quality.run import Run

VARIANTS = ("R", "E", "D", "S")  # own router, the frozen one, all on, a single one: see `adapters`


@dataclass(frozen=True)
class Adaptation:
    """`run` is the base's model with the label, text, seed and schedule of the adaptation."""

    run: Run = field(default_factory=Run)
    base: str = ""  # name of the run that is adapted
    variant: str = "S"
    rank: int = 8
    adapters: int = 4  # of R and D
    top_k: int = 2  # adapters a token of R
    alpha: float = 32.0  # adapters are scaled by alpha / rank

    def __post_init__(self) -> None:
        """Raise `UserError` for a value that cannot be."""
        pick("perft variant", self.variant, VARIANTS)
        for name in ("rank", "adapters", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad(f"perft {name}", value, "an integer of at least 1")
        if self.top_k > self.adapters:
            raise bad("perft top_k", self.top_k, f"at most adapters = {self.adapters}")
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha < math.inf:
            raise bad("perft alpha", self.alpha, "a number above 0")

    @cached_property
    def spec(self) -> str:
        """The adaptation as one canonical JSON text; the run in it as its own."""
        parts: dict[str, Any] = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return json.dumps(parts | {"run": self.run.spec}, sort_keys=True, separators=(",", ":"))

    @property
    def config_hash(self) -> str:
        """That of the run: what all adaptations which are compared have in common."""
        return self.run.config_hash

    @cached_property
    def name(self) -> str:
        """File name: readable, then 8 digits of the spec's hash."""
        parts = [self.run.label, f"perft{self.variant}", f"r{self.rank}"]
        parts += [f"pilot-lr{self.run.lr:g}"] if self.run.purpose == "pilot" else []
        return "-".join([*parts, f"seed{self.run.seed}", hashlib.sha256(self.spec.encode()).hexdigest()[:8]])

    @staticmethod
    def from_spec(spec: str) -> "Adaptation":
        """The inverse of `spec`. Raises `UserError` when a user's own text is not what it was."""
        parts = json.loads(spec)
        return Adaptation(**parts | {"run": Run.from_spec(parts["run"])})
