"""What an answer may be: plain tensors of the asked kind, each in memory of its own, that hold what they will hold when they are read."""

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]

from moe_routing_bench.measure import memory
from moe_routing_bench.measure.candidate import Candidate, Failure
from moe_routing_bench.measure.inputs import Sets


def unlike_asked(outputs: dict[str, Tensor], asked: dict[str, Tensor]) -> str | None:
    """Which output is not a plain tensor of the type, shape and device that is `asked`, in words."""
    for name, tensor in asked.items():
        output = outputs[name]
        if (
            type(output) is not Tensor
            or output.layout is not torch.strided
            or _functorch.is_functorch_wrapped_tensor(output)
        ):
            return f"{name}: {type(output).__name__}, not a plain tensor"
        if output.is_conj() or output.is_neg() or output._is_zerotensor():
            return f"{name}: a view that is computed when it is read"
        if (output.dtype, output.shape) != (tensor.dtype, tensor.shape):
            return f"{name}: {_kind(output)}, not {_kind(tensor)}"
        if output.device != tensor.device:
            return f"{name}: on {output.device}, not {tensor.device}"
        if any(step == 0 and size > 1 for step, size in zip(output.stride(), output.shape, strict=True)):
            return f"{name}: elements that share memory"
    return None


def unlike_any(candidate: Candidate, sets: Sets) -> str | None:
    """`unlike_asked` of all sets that ran, before anything else may read an output."""
    outputs = ((outputs_of(candidate, sets, i), sets.outputs[i]) for i in range(len(candidate.timer.returned)))
    return next((error for output, asked in outputs if (error := unlike_asked(output, asked))), None)


def unshared(candidate: Candidate, sets: Sets) -> str | None:
    """Which returned output lies in memory that is not its own, in words: that of an input, or of another set."""
    spans = []
    for i, returned in enumerate(candidate.timer.returned):
        if returned is None or type(returned) is not dict:
            continue
        asked = sets.outputs[i]
        outputs = {name: tensor for name, tensor in returned.items() if name in asked and isinstance(tensor, Tensor)}
        spans += [(*memory.extent(tensor), i, name) for name, tensor in outputs.items() if not _in_place(tensor, asked)]
    spans = [span for span in spans if span[0] < span[1]]
    taken = [(*span, None, "an input or another output") for span in sets.extents()] if spans else []
    last, owner = 0, None
    for first, end, i, name in sorted(spans + taken, key=lambda span: span[:2]):
        if first < last and (i is not None or owner is not None) and (i is None or owner is None or i != owner[0]):
            which = name if i is not None else owner[1] if owner else name
            return f"{which}: in memory of an input or of another set"
        if end > last:
            last, owner = end, None if i is None else (i, name)
    return None


def _in_place(tensor: Tensor, asked: dict[str, Tensor]) -> bool:
    """Whether a tensor lies in one of the buffers that were given for its set."""
    first, end = memory.extent(tensor)
    return any(start <= first and end <= stop for start, stop in map(memory.extent, asked.values()))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def outputs_of(candidate: Candidate, sets: Sets, i: int) -> dict[str, Tensor]:
    """The outputs of set i; those that an implementation allocates itself are what its last timed call returned.

    `Failure` for a dictionary that may compute when it is read.
    """
    returned = candidate.timer.returned[i]
    if not isinstance(returned, dict):
        return sets.outputs[i]
    if type(returned) is not dict or any(type(name) is not str for name in returned):
        raise Failure("incorrect", f"outputs are returned in a {type(returned).__name__}, not a plain dictionary")
    return sets.outputs[i] | returned
