"""A streaming kernel with any read:write mix and sequential addresses: the honest ceiling of a stage that mostly reads or writes.

It reads `reads` buffers of the same size, and writes their sum to `writes` buffers; with no writes it stores one value a
program. Triton, so that it needs no compiler on the machine.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _stream(source, target, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    parts = ()
    for i in tl.static_range(READS):  # all loads are issued before the first is used
        parts = parts + (tl.load(source + i * n + offsets),)  # noqa: RUF005
    total = parts[0]
    for i in tl.static_range(1, READS):
        total += parts[i]
    if WRITES == 0:
        tl.store(target + tl.program_id(0), tl.sum(total.to(tl.float32), 0).to(target.dtype.element_ty))
    for i in tl.static_range(WRITES):
        tl.store(target + i * n + offsets, total)


CONFIGS = ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))  # (block, warps): the ceiling is the best of them


def launch(source: Tensor, target: Tensor, reads: int, writes: int, block: int, warps: int) -> int:
    """Stream through bf16 `source` and `target`; returns the bytes moved."""
    part = min(source.numel() // max(reads, 1), target.numel() // max(writes, 1)) // block * block
    _stream[(part // block,)](source, target, part, READS=reads, WRITES=writes, BLOCK=block, num_warps=warps)
    return part * source.element_size() * (reads + writes)


def buffers(nbytes: int) -> tuple[Tensor, Tensor]:
    """Two N(0, 1) bf16 buffers of `nbytes` bytes each on the GPU."""
    source = torch.randn(nbytes // 2, device="cuda", dtype=torch.bfloat16)
    return source, torch.empty_like(source)
