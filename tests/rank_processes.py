"""A group of processes with gloo, forks of a test, each of which returns what a function makes of its rank."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_routing_bench.measure import processes


def called(ranks: int, folder: Path, function: Callable[[int], Any], seconds: float = 120) -> list[Any]:
    """What `function(rank)` returns on each rank, or the text of what it raised; None of a rank that was killed. An operation that others do
    not join fails after so many seconds."""
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            try:
                processes.end_with(os.getppid())
                torch.set_num_threads(1)
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
                wait = timedelta(seconds=seconds)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
                result = function(rank)
            except BaseException as error:
                result = repr(error)
            torch.save(result, folder / f"{rank}.pt")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    paths = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]
