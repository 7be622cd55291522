"""One adaptation: a trained run, the adapters (PERFT) that it gets, and how they are trained. Without torch."""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from moe_routing_bench.bounds import Amount, Count
from moe_routing_bench.fields import Choice, check_fields
from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.grid.spec import canonical, spec_hash
from moe_routing_kernels.errors import bad

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
        parts: dict[str, Any] = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
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
