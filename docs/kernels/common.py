"""What the five steps share: the problem, how a step is checked and timed, and what it prints."""

import sys
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Int32

from moe_routing_kernels.cute.cache import compile_kernel, fake_tensor

# The first GEMM of Qwen3-30B-A3B's experts without its activation: 4096 tokens, 8 of 128 experts each.
ROWS, INNER, COLUMNS, EXPERTS = 32768, 2048, 1536, 128


def compiled(host: Callable[..., Any], **options: Any) -> Any:
    """Compile a step's `host(x, offsets, w, out, blocks, stream)` for sm_90a; this needs no GPU.

    x is (rows, INNER) and out (rows, COLUMNS) bf16 with any number of rows, w (EXPERTS, COLUMNS, INNER) bf16, offsets (EXPERTS + 1,) int32.
    """
    rows = cute.sym_int()
    w = fake_tensor(BFloat16, EXPERTS, COLUMNS, INNER)
    tensors = [
        fake_tensor(BFloat16, rows, INNER),
        fake_tensor(Int32, EXPERTS + 1),
        w,
        fake_tensor(BFloat16, rows, COLUMNS),
    ]
    return compile_kernel(host, [*tensors, Int32(1)], "sm_90a", **options)


def run(name: str, kernel: Any, blocks: int) -> None:
    """Check a compiled step against float32, time it, and print a line of ``times.csv``: step, microseconds, card.

    Without a GPU, only say that it compiled.
    """
    if not torch.cuda.is_available():
        print(f"{name}: compiled for sm_90a; running it needs a Hopper GPU")
        return
    torch.manual_seed(0)
    counts = torch.bincount(torch.randint(EXPERTS, (ROWS,)), minlength=EXPERTS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().cuda()
    x = torch.randn(ROWS, INNER, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(EXPERTS, COLUMNS, INNER, device="cuda", dtype=torch.bfloat16) / INNER**0.5
    out = torch.full((ROWS, COLUMNS), torch.nan, device="cuda", dtype=torch.bfloat16)
    kernel(x, offsets, w, out, blocks)
    for expert in range(EXPERTS):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        torch.testing.assert_close(out[rows].float(), x[rows].float() @ w[expert].float().T, rtol=2e-2, atol=2e-2)
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel(x, offsets, w, out, blocks)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    median = sorted(times)[len(times) // 2]
    print(f"{name},{median:.1f},{torch.cuda.get_device_name()}")
    sys.stdout.flush()
