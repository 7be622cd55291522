"""Compiling CuTe DSL kernels for an architecture without a GPU of that architecture.

Compilation uses fake tensors, so it needs no GPU; extents may be symbolic, so that one compiled kernel serves every
number of tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import torch

from moe_routing_kernels.cute import VECTOR_BYTES
from moe_routing_kernels.errors import NoForm
from moe_routing_kernels.target import of_device

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}


def fake_tensor(dtype: Any, *shape: Any) -> Any:
    """A contiguous tensor for compilation, of a shape whose extents may be symbolic, its base aligned to 16 bytes."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=VECTOR_BYTES)


def current_arch() -> str:
    """The DSL's name of the current CUDA device's architecture, such as sm_80 or sm_90a."""
    return of_device(torch.cuda.current_device()).arch


def compile_kernel(
    host: Callable, arguments: Sequence[Any], arch: str, keep: bool = False, only: str | None = None
) -> Any:
    """Compile a `@cute.jit` host function for `arch`; the last parameter of `host` is the stream.

    The result takes torch tensors and launches on torch's current stream. `keep` also stores PTX and cubin on it
    (`__ptx__`, `__cubin__`), for tests. `only` is the one architecture that a kernel is written for: raises `NoForm` for another,
    where the compiler itself would fail.
    """
    if only not in (None, arch):
        raise NoForm(f"arch: got {arch!r}; allowed: {only}, for which the kernel is written")
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--gpu-arch {arch} --enable-tvm-ffi" + (" --keep-ptx --keep-cubin" if keep else "")
    return cute.compile(host, *arguments, stream, options=options)
