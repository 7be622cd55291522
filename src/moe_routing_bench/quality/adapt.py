"""PERFT: low-rank adapters next to a frozen MoE layer, h' = MoE(x) + Δ(x) (2411.08212, section 3; 2508.02587), and their training.

Δ(x) = Σ_m g_m(x) · alpha/r · x W_down,m W_up,m over M adapters of rank r (LoRA, 2106.09685, section 4.1). The variants differ in the gates g.
R has a router of its own over M adapters. E takes the frozen router and has one adapter per expert. D has M adapters that are always on, S
has a single one. All adapters are computed and then gated: at these ranks that is less work than grouping tokens. The training loop is that
of a run, around a trained model that is frozen. Suffixes: T tokens, M adapters, R = M r, B sequences, S positions, D model width.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.grid.run_spec import Adaptation, Run
from moe_routing_bench.quality import code, engine, evaluate, run_rows, texts, train
from moe_routing_bench.quality.adaptation_rows import COLUMNS, SCHEMA
from moe_routing_bench.quality.language_model import TinyLM, own_draws
from moe_routing_bench.quality.loop import Training, go_on, now, saved
from moe_routing_bench.quality.moe_layer import MoE
from moe_routing_bench.quality.steps import Windows
from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers import learned

ROUTER = "topk_prenorm"  # of PERFT-R: not renormalised, as in OLMoE, for which PERFT was proposed
_PART = ".adapters."  # is in the names of what learns, and in no other


class Adapters(nn.Module):
    """The adapters of one layer.

    After a forward pass `losses` holds what their own router adds to the training loss.
    """

    def __init__(self, variant: str, dim: int, count: int, active: int, rank: int, alpha: float) -> None:
        """Each token uses `active` of `count` adapters. W_down starts as in LoRA and W_up at zero, so that Δ = 0."""
        super().__init__()
        self.variant, self.count, self.active, self.rank, self.scale = variant, count, active, rank, alpha / rank
        bound = 1 / math.sqrt(dim)
        self.down_DR = nn.Parameter(torch.empty(dim, count * rank).uniform_(-bound, bound))
        self.up_RD = nn.Parameter(torch.zeros(count * rank, dim))
        self.router = learned.build(ROUTER, dim, count, active) if variant == "R" else None
        self.losses: dict[str, Tensor] = {}

    def forward(self, x_BSD: Tensor, token_ids_BS: Tensor, positions_S: Tensor, routing) -> Tensor:
        """Δ (B, S, D), where `routing` is what the layer's own router decided.

        Raises `UserError` for PERFT-E where that is soft routing.
        """
        hidden_TR = x_BSD.flatten(0, 1) @ self.down_DR
        if self.router is not None:
            routing = self.router(x_BSD, token_ids_BS, positions_S)
            self.losses = routing.losses
        if self.variant in ("R", "E"):
            if hasattr(routing, "dispatch"):
                raise bad("PERFT-E", "soft routing", "a base whose router chooses experts")
            gates_TM = gates(routing.ids, routing.weights, self.count)
            hidden_TR = (hidden_TR.unflatten(1, (self.count, self.rank)) * gates_TM[:, :, None]).flatten(1)
        return (hidden_TR @ self.up_RD * self.scale).view_as(x_BSD)

    def parameter_counts(self) -> tuple[int, int]:
        """All parameters, and those that a token meets: those of `active` adapters and of the whole router."""
        router = 0 if self.router is None else sum(p.numel() for p in self.router.parameters())
        size = 2 * self.rank * self.down_DR.shape[0]
        return self.count * size + router, self.active * size + router


def gates(ids_TK: Tensor, weights_TK: Tensor, count: int) -> Tensor:
    """Weights (T, count) by adapter, 0 where an adapter was not chosen; ids that name no adapter are left out."""
    valid_TK = (ids_TK >= 0) & (ids_TK < count)
    index_TK = torch.where(valid_TK, ids_TK, 0).long()
    return weights_TK.new_zeros(len(ids_TK), count).scatter_add(1, index_TK, weights_TK * valid_TK)


def attach(model: TinyLM, adaptation: Adaptation) -> TinyLM:
    """Freeze a trained model with the state of its routers, and give each MoE layer adapters, which alone learn.

    The layers lose their capacity, so that what the frozen model computes for a token depends on no other token.
    Raises `UserError` for a model without MoE layers, or whose layers are applied more than once.
    """
    if not model.layers or any(len(layer.routers) > 1 for layer in model.layers):
        raise bad("PERFT base", adaptation.run.router, "a router whose layer is applied once")
    model.requires_grad_(False).eval()
    for number, layer in enumerate(model.layers):
        with own_draws(adaptation.run.seed, number):
            layer.adapters = _adapters(layer, adaptation).to(model.head.weight.device)
        layer.capacity_factor = None
    return model


def _adapters(layer: MoE, adaptation: Adaptation) -> Adapters:
    counts = {
        "R": (adaptation.adapters, adaptation.top_k),
        "E": (layer.count, layer.top_k),
        "D": (adaptation.adapters, adaptation.adapters),
        "S": (1, 1),
    }
    count, active = counts[adaptation.variant]
    dim = layer.experts.w13_EDH.shape[1]
    return Adapters(adaptation.variant, dim, count, active, adaptation.rank, adaptation.alpha)


def adapters_of(model: TinyLM) -> list[Adapters]:
    """The adapters of each layer."""
    return [layer.adapters for layer in model.layers if isinstance(layer.adapters, Adapters)]


def parameter_counts(model: TinyLM) -> tuple[int, int]:
    """The trainable parameters of all layers, and how many of them a token meets."""
    pairs = [adapter.parameter_counts() for adapter in adapters_of(model)]
    return sum(size for size, _ in pairs), sum(size for _, size in pairs)


class Adapting(Training):
    """A frozen run with adapters. Its state is that of the adapters and of their optimizer."""

    def __init__(self, adaptation: Adaptation, base_file: Path, device: str) -> None:
        """`base_file` is the Parquet of the run that is adapted, with its weights next to it.

        Raises `UserError` where it is another run, kept no weights, or cannot be adapted.
        """
        self.adaptation = adaptation
        self.base = Run.from_spec(run_rows.spec_of(run_rows.read(base_file)))
        if self.base.name != adaptation.base:
            raise bad("PERFT base", self.base.name, adaptation.base, f"of {base_file}")
        self.weights = run_rows.weights_of(base_file)
        super().__init__(adaptation.run, device)
        routers = [adapter.router for adapter in adapters_of(self.model) if adapter.router is not None]
        self.router_parameters = [p for router in routers for p in router.parameters()]
        old = texts.load(
            self.base.corpora, self.base.validation_share, self.base.vocabulary, self.base.validation_tokens
        )
        self.old = {
            corpus.name: Windows([corpus.validation], self.run.sequence, device, corpus.validation_bytes)
            for corpus in old
        }

    def build(self) -> TinyLM:
        """The base's model with its weights, which are frozen, and with adapters that change nothing yet."""
        model = super().build()
        model.load_state_dict(saved(self.weights, self.device)["model"])
        return attach(model, self.adaptation)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the adapters and their optimizer."""
        return {"model": learnt(self.model), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.model.load_state_dict(self.model.state_dict() | state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.own_rates()

    def evaluation(self) -> dict[str, Any]:
        """Row fields: the losses on the new text and, in bits per byte, on the text of the base."""
        loss = self._loss(self.validation)
        old = [evaluate.bits(self._loss(windows), windows) for windows in self.old.values()]
        sizes = [windows.size for windows in self.old.values()]
        mean = sum(bits * size for bits, size in zip(old, sizes, strict=True)) / sum(sizes)
        return {
            "val_loss": loss,
            "bits_per_byte": evaluate.bits(loss, self.validation),
            "val_bytes": self.validation.size,
            "old_bits_per_byte": mean,
            "old_bits_per_byte_by_domain": old,
        }

    def _loss(self, windows: Windows) -> float:
        return evaluate.loss_of(self.model, windows, self.run.batch)[0]


def learnt(model: TinyLM) -> dict[str, Tensor]:
    """The state of the adapters alone, by name."""
    return {name: value for name, value in model.state_dict().items() if _PART in name}


def adapt(
    adaptation: Adaptation,
    base_file: Path,
    out: Path,
    device: str,
    chosen: Mapping[str, Any] | None = None,
    spec: str | None = None,
) -> list[dict[str, Any]]:
    """Train the adapters and write the rows to `out`.

    Evaluations are before the first step, every `eval_every`, and at the end.

    A killed adaptation goes on as a run does; `chosen` and `spec` are those of `train.train`.
    """
    with engine.stream(device):
        training, checkpoint = Adapting(adaptation, base_file, device), out.with_suffix(".ckpt")
        fixed = _fixed(training) | dict(chosen or {})
        before = fixed | training.evaluation() | {"step": 0, "tokens_seen": 0, "epochs": 0.0, "ended_at": now()}
        after = go_on(training, checkpoint, adaptation.name, adaptation.spec, fixed, lambda last: training.evaluation())
    rows = [before, *({name: value for name, value in row.items() if name in COLUMNS} for row in after)]
    run_rows.write(out, rows, spec or adaptation.spec, SCHEMA)
    return rows


def _fixed(training: Adapting) -> dict[str, Any]:
    """The fields that are the same in every row of an adaptation."""
    adaptation, run = training.adaptation, training.run
    first, *_ = adapters_of(training.model)
    params, active = parameter_counts(training.model)
    everything = sum(p.numel() for p in training.model.parameters())
    names = ("purpose", "label", "router", "seed", "experts", "sequence", "batch", "steps", "lr")
    return {name: getattr(run, name) for name in names} | {
        "causal": train.is_causal(run, training=False),  # the base is frozen
        "schema_version": run_rows.SCHEMA_VERSION,
        "run": adaptation.name,
        "config_hash": adaptation.config_hash,
        "base": adaptation.base,
        "variant": adaptation.variant,
        "rank": adaptation.rank,
        "adapters": first.count,
        "top_k": first.active,
        "alpha": adaptation.alpha,
        "base_params": everything - params,
        "params": params,
        "active_params": active,
        "domains": [corpus.name for corpus in training.corpora],
        "old_domains": list(training.old),
        "train_bytes": training.train.size,
        "corpus_sha256": train.corpus_hash(training.corpora),
        **train.origin(training.device, code.adaptation_files()),
    }
