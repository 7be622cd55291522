"""How a run's steps differ from one another: the learning rate, and what is frozen when; and how many there may be."""

import math

from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality.language_model import TinyLM
from moe_routing_kernels.errors import bad

FLOOR = 0.1  # the share of the learning rate that is left where the cosine ends
EXPERTS_FIRST = 0.5  # the share of the steps after which the experts are frozen and the router learns


def learning_rate(run: Run, step: int) -> float:
    """The learning rate of a step: a linear warm-up, then a cosine from `lr` to a tenth of it."""
    assert run.lr is not None
    if step < run.warmup:
        return run.lr * (step + 1) / run.warmup
    share = (step - run.warmup) / max(1, run.steps - run.warmup)
    return run.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


def frozen(run: Run, step: int) -> tuple[bool, bool]:
    """Whether the routers, and whether the experts, are frozen in a step.

    The modes are those that 2306.08586 compares: joint training of gate and experts with decoupled training. In
    `frozen_router` the routers stay as they start. In `experts_first` they do so in the first half of the steps, and
    the experts stay as they are in the second. Everything else always learns.
    """
    if run.train_mode == "experts_first":
        first = step < EXPERTS_FIRST * run.steps
        return first, not first
    return run.train_mode == "frozen_router", False


def freeze(model: TinyLM, routers: bool, experts: bool) -> None:
    """Say which parts of the MoE layers are frozen.

    Frozen routers route as in evaluation: no noise, losses or new state.
    """
    for layer in model.layers:
        layer.routers.train(not routers)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not (routers if name.startswith("routers.") else experts))


def check_epochs(run: Run, train_bytes: int) -> None:
    """Raise `UserError` when the run would see its text too often."""
    epochs = run.steps * run.tokens_per_step / train_bytes
    if epochs > run.max_epochs:
        most = int(run.max_epochs * train_bytes / run.tokens_per_step)
        allowed = f"at most {most}: {run.max_epochs:g} epochs of {train_bytes} bytes"
        raise bad("quality steps", run.steps, allowed, "add a corpus, or raise max_epochs")
