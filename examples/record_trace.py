"""Record the expert ids of one layer of a transformers model while it runs, as a trace for the sampler `trace`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moe_routing_bench.traces.writing import write


@contextmanager
def recording(experts: torch.nn.Module, path: Path) -> Iterator[None]:
    """Write the ids of every token that `experts` computes in the block, such as ``model.model.layers[3].mlp.experts``."""
    seen = []
    hook = experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].cpu()))  # (hidden, ids, weights)
    try:
        yield
    finally:
        hook.remove()
    write(path, torch.cat(seen), experts.num_experts)
