"""Device memory of an implementation, of one input set: what binding keeps, and what a call takes on top."""

from collections.abc import Callable

import torch

_CALLS = 3  # after which nothing is compiled, tuned or allocated for the first time


def footprint(before: int | None, call: Callable[[], object]) -> dict[str, int]:
    """Row fields of a call that was bound when `allocated` said `before`: `workspace_bytes`, kept since then by binding and by the first
    calls; `transient_bytes`, the most that one more call has on top; and their sum, `peak_memory_bytes`. Empty for None, a CPU.

    Inputs and outputs are the harness's and count nowhere. Memory that other libraries take outside of torch's allocator is not seen.
    """
    if before is None:
        return {}
    for _ in range(_CALLS):
        call()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    workspace, transient = max(0, kept - before), torch.cuda.max_memory_allocated() - kept
    return {"workspace_bytes": workspace, "transient_bytes": transient, "peak_memory_bytes": workspace + transient}


def allocated(device: str) -> int | None:
    """Bytes that torch's allocator has given out on the GPU; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
