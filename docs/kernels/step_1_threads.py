"""Step 1: a thread per element of the result. Run it: `python docs/kernels/step_1_threads.py`.

out[r, c] = sum_k w[e, c, k] x[r, k] for the rows r of expert e, offsets[e] <= r < offsets[e + 1].

A thread looks up the expert of its row and adds INNER products. It is right, and reads each operand from the caches anew for every product:
two loads of 2 bytes per multiply-add.
"""

import cutlass
import cutlass.cute as cute
from common import COLUMNS, EXPERTS, INNER, ROWS, compiled, run
from cutlass import BFloat16, Float32, Int32

THREADS = 256  # of a block, which takes as many columns of one row


@cute.kernel
def kernel(x: cute.Tensor, offsets: cute.Tensor, w: cute.Tensor, out: cute.Tensor):
    """A block: a row, blockIdx.x / (COLUMNS / THREADS), and THREADS of its columns."""
    block = cute.arch.block_idx()[0]
    per_row = cutlass.const_expr(COLUMNS // THREADS)
    row, column = block // per_row, block % per_row * THREADS + cute.arch.thread_idx()[0]
    expert = Int32(0)
    for e in cutlass.range(1, EXPERTS, unroll=1):  # the last expert that begins at the row or above it
        if offsets[e] <= row:
            expert = Int32(e)
    total = Float32(0.0)
    for k in cutlass.range(INNER, unroll=8):
        total += Float32(x[row, k]) * Float32(w[expert, column, k])
    out[row, column] = total.to(BFloat16)


@cute.jit
def host(x: cute.Tensor, offsets: cute.Tensor, w: cute.Tensor, out: cute.Tensor, blocks: Int32, stream):
    """Launch `blocks` blocks."""
    kernel(x, offsets, w, out).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


if __name__ == "__main__":
    run("1 threads", compiled(host), ROWS * (COLUMNS // THREADS))
