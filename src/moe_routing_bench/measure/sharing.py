"""Memory of inputs and outputs that two processes share: the judge, which checks and times, and a runner, which computes.

On a CPU each piece is an anonymous file that both map. On a GPU all pieces are in a pool of their own: a runner maps whole
segments of the judge's memory, and expected answers must be in none of them.
"""

import mmap
import os
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


class Arena:
    """Pieces of memory on one device that can be handed to other processes. They live as long as the arena."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._files: dict[int, tuple[int, int]] = {}  # descriptor and size, by address
        self._pool = None if device == "cpu" else torch.cuda.MemPool()

    def empty(self, nbytes: int) -> Tensor:
        """A new piece (nbytes,) uint8, uninitialised."""
        if self._pool is not None:
            with torch.cuda.use_mem_pool(self._pool):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        size = max(1, nbytes)
        descriptor = os.memfd_create("moe-routing-bench")
        os.ftruncate(descriptor, size)
        tensor = _mapped(descriptor, size)
        self._files[tensor.data_ptr()] = (descriptor, size)
        return tensor[:nbytes]

    def moved(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor in the arena."""
        copy = self.empty(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def handle(self, tensor: Tensor) -> "tuple[Handle, list[int]]":
        """What another process needs to map a tensor of the arena, and the descriptors to send with it."""
        form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        storage = tensor.untyped_storage()
        if self._pool is not None:
            return Handle(*form, device=storage._share_cuda_()), []
        descriptor, size = self._files[storage.data_ptr()]
        return Handle(*form, size=size), [descriptor]


@dataclass(frozen=True)
class Handle:
    """A tensor of another process: its form, and where its memory is (of a file on a CPU, the descriptor comes with the message)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int = 0
    device: tuple[Any, ...] | None = None

    def attached(self, descriptors: list[int]) -> Tensor:
        """The tensor in this process. Takes the first of the descriptors, on a CPU."""
        if self.device is not None:
            torch.cuda.init()  # else torch maps no memory of another process, and the process ends
            storage = torch.UntypedStorage._new_shared_cuda(*self.device)
            empty = torch.empty(0, dtype=self.dtype, device=f"cuda:{self.device[0]}")
        else:
            storage = _mapped(descriptors.pop(0), self.size).untyped_storage()
            empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def read(descriptor: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A copy of a tensor that lies in a file, on the CPU. ValueError where the file is too short."""
    nbytes = prod(shape) * dtype.itemsize
    data = bytearray(os.pread(descriptor, nbytes, offset))
    if len(data) != nbytes:
        raise ValueError(f"{len(data)} bytes of {nbytes}")
    return torch.frombuffer(data, dtype=dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
