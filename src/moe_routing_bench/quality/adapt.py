"""One adaptation from its spec to its rows: the training loop of a run, around a trained model that is frozen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_routing_bench.grid.run_spec import Adaptation, Run
from moe_routing_bench.quality import adapters, code, engine, evaluate, run_rows, texts, train
from moe_routing_bench.quality.adaptation_rows import COLUMNS, SCHEMA
from moe_routing_bench.quality.language_model import TinyLM
from moe_routing_bench.quality.loop import Training, go_on, now, saved
from moe_routing_bench.quality.steps import Windows
from moe_routing_kernels.errors import bad

_PART = ".adapters."  # is in the names of what learns, and in no other


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
        routers = [adapter.router for adapter in adapters.of(self.model) if adapter.router is not None]
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
        return adapters.attach(model, self.adaptation)

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
    first, *_ = adapters.of(training.model)
    params, active = adapters.parameter_counts(training.model)
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
