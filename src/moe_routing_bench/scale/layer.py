"""The time of one MoE layer on N GPUs: dispatch, experts and combine of EP ranks, and data-parallel copies of them.

Copies do not communicate, so N beyond EP changes no time. With tensor parallelism every rank has all experts at a share of their width, all tokens of the group
come by an all-gather and go by a reduce-scatter. `overlap` is the declared share of communication that experts hide; nothing measured it, so it is 0 by default.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.scale import exchange, flows
from moe_routing_bench.scale.exchange import Links, Times
from moe_routing_bench.scale.experts import Answer, Experts, Sizes
from moe_routing_kernels.errors import UserError, bad

AUTO = "auto"
FITS = (
    0.8  # share of a GPU's memory that the experts of all layers may take; the rest is for activations and the KV cache
)


@dataclass(frozen=True)
class Question:
    """A layer on `gpus` GPUs with `tokens` tokens each."""

    model: str
    sizes: Sizes
    layers: int | None
    gpus: int
    tokens: int
    payload: str = "fp8"
    mode: str = AUTO
    once: bool = True
    overlap: float = 0.0
    skew: float = 0.0
    trace: Path | None = None
    spare: int = 1  # slots of a rank for replicas of hot experts, where they are planned
    trials: int = 8
    seed: int = 17


@dataclass(frozen=True)
class Estimate:
    """One way to spread the layer. Times are µs: with even loads, and the median and the 5th and 95th percentile over draws."""

    ep: int
    tp: int
    dp: int
    mode: str
    experts_us: float
    dispatch_us: float
    combine_us: float
    layer_us: float
    drawn_us: float
    low_us: float
    high_us: float
    planned_us: float | None
    busiest: float
    memory_share: float | None
    measured: bool
    source: str

    @property
    def communication(self) -> float:
        """Share of dispatch and combine in the layer with even loads; with overlap, the hidden part does not count."""
        return max(0.0, self.layer_us - self.experts_us) / self.layer_us

    @property
    def fits(self) -> bool | None:
        """Whether the experts of all layers fit into the memory; None where the preset does not say how many layers there are."""
        return None if self.memory_share is None else self.memory_share <= FITS

    def asdict(self) -> dict[str, Any]:
        """All fields, and the two shares that follow."""
        return asdict(self) | {"communication": self.communication, "fits": self.fits}


class Model:
    """Estimates of a question from the stored rows of one GPU."""

    def __init__(self, question: Question, rows: pd.DataFrame) -> None:
        """Raises `UserError` where no stored layer has these sizes, and for loads that they cannot have."""
        flows.check_loads(question.sizes.experts, question.sizes.top_k, question.skew, question.trace)
        self.question, self.rows = question, rows
        self.experts = Experts(rows, question.sizes, question.model)

    @cached_property
    def links(self) -> Links:
        """The fitted links, with the copy bandwidth of the stored rows."""
        return exchange.load(self.experts.memory)

    def ways(self) -> Iterator[tuple[int, int]]:
        """All (EP, TP) of these GPUs: EP divides the experts and fills hosts; TP is within a host, where a shard has rows."""
        q = self.question
        for ep in range(1, min(q.gpus, q.sizes.experts) + 1):
            if not self.refused(ep):
                yield ep, 1
        for tp in (2, 4, 8):
            if q.gpus % tp == 0 and q.sizes.intermediate % tp == 0:
                yield 1, tp

    def refused(self, ep: int) -> UserError | None:
        """Why a number of ranks cannot be."""
        q, host = self.question, self.links.host
        if q.sizes.experts % ep:
            return bad("--ep", ep, f"a divisor of the {q.sizes.experts} experts of {q.model}")
        if q.gpus % ep:
            return bad("--gpus", q.gpus, f"a multiple of EP={ep}")
        if ep > host and ep % host:
            return bad("--ep", ep, f"at most {host}, or a multiple of the {host} GPUs of a host")
        return None

    def estimate(self, ep: int, tp: int = 1) -> Estimate:
        """One way. Raises `UserError` for ranks that cannot be, and where stored rows are missing."""
        if tp > 1:
            return self._sharded(tp)
        if why := self.refused(ep):
            raise why
        q = self.question
        group = flows.Group(ep, q.tokens, q.sizes.experts, q.sizes.top_k, self.links.host)
        answer = self.experts.rank(q.tokens, ep)
        even = flows.even(group)
        mode, times = min(((mode, self._times(even, mode)) for mode in self._modes()), key=lambda found: found[1].both)
        draws = [flows.drawn(group, q.seed + i, q.skew, q.trace) for i in range(q.trials if ep > 1 else 0)]
        drawn = [self._drawn(flow, mode, ep) for flow in draws] or [self._layer(answer.us, times)]
        return self._made(
            ep, 1, mode, answer, times, drawn, self._planned(group, mode), [flow.busiest for flow in draws]
        )

    def _modes(self) -> Sequence[str]:
        return exchange.MODES if self.question.mode == AUTO else (self.question.mode,)

    def _times(self, flow: flows.Flow, mode: str) -> Times:
        q = self.question
        return exchange.times(flow, q.sizes.hidden, mode, q.payload, self.links, q.once)

    def _drawn(self, flow: flows.Flow, mode: str, ep: int) -> float:
        return self._layer(self.experts.rank(self.question.tokens, ep, flow.busiest).us, self._times(flow, mode))

    def _layer(self, experts: float, times: Times) -> float:
        return experts + times.both - min(experts, self.question.overlap * times.both)

    def _planned(self, group: flows.Group, mode: str) -> float | None:
        """The median over the same draws with experts and replicas placed by their expected loads; None where there is nothing to place.

        The weights of replicas are not counted.
        """
        q = self.question
        if group.ranks == 1 or (q.skew == 0 and q.trace is None):
            return None
        spare = min(q.spare, group.experts - group.experts // group.ranks)
        times = []
        for seed in range(q.seed, q.seed + q.trials):
            placed = flows.planned(group, seed, q.skew, q.trace, spare)
            times.append(self._drawn(flows.drawn(group, seed, q.skew, q.trace, placed), mode, group.ranks))
        return float(np.median(times))

    def _sharded(self, tp: int) -> Estimate:
        """Tensor parallelism: all tokens of `tp` ranks by an all-gather, their sums by a reduce-scatter, both in bf16."""
        q = self.question
        if q.gpus % tp:
            raise bad("--gpus", q.gpus, f"a multiple of TP={tp}")
        if q.sizes.intermediate % tp or tp > self.links.host:
            raise bad("--tp", tp, f"a divisor of intermediate={q.sizes.intermediate}, at most {self.links.host}")
        sizes = Sizes(q.sizes.hidden, q.sizes.intermediate // tp, q.sizes.experts, q.sizes.top_k, q.sizes.weights)
        answer = Experts(self.rows, sizes, f"{q.model} --tp {tp}").layer(q.tokens * tp)
        moved = 2.0 * q.sizes.hidden * q.tokens * (tp - 1)
        way = self.links.push_us + moved / self.links.nvlink + 2 * moved / self.links.memory
        times = Times(way, way)
        return self._made(1, tp, "all-gather", answer, times, [self._layer(answer.us, times)], None, [])

    def _made(
        self,
        ep: int,
        tp: int,
        mode: str,
        answer: Answer,
        times: Times,
        drawn: Sequence[float],
        planned: float | None,
        busiest: Sequence[float],
    ) -> Estimate:
        q = self.question
        low, middle, high = np.percentile(drawn, [5, 50, 95]).tolist()
        whole = q.sizes.experts * q.sizes.expert_bytes * q.layers / self.links.capacity if q.layers else None
        return Estimate(
            ep=ep,
            tp=tp,
            dp=q.gpus // (ep * tp),
            mode=mode if ep * tp > 1 else "none",
            experts_us=answer.us,
            dispatch_us=times.dispatch,
            combine_us=times.combine,
            layer_us=self._layer(answer.us, times),
            drawn_us=middle,
            low_us=low,
            high_us=high,
            planned_us=planned,
            busiest=float(np.median(busiest)) if len(busiest) else 1.0,
            memory_share=None if whole is None else whole / (ep * tp),
            measured=answer.measured,
            source=answer.source,
        )


def all_ways(model: Model) -> tuple[list[Estimate], Mapping[tuple[int, int], str]]:
    """The estimates of all ways, and why others have none. Raises the first `UserError` where none has."""
    found, reasons = [], {}
    for ep, tp in model.ways():
        try:
            found.append(model.estimate(ep, tp))
        except UserError as error:
            reasons[ep, tp] = str(error)
    if not found:
        raise UserError(next(iter(reasons.values())))
    return found, reasons


def best(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest over draws of those whose experts fit into the memory; where none fits, of all."""
    return min([one for one in estimates if one.fits is not False] or estimates, key=lambda one: one.drawn_us)
