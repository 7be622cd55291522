"""Check and time the operators and their backward on a GPU: `PYTHONPATH=src:tests/ops python tests/gpu/check_backward.py`.

Correctness: the kernels against float64 on the CPU tests' cases and on large ones, the same bits in every run, gradients
through autograd, a CUDA graph, and torch.compile. Then cold-L2 microseconds (as in check_kernels) of each direction
beside plain torch, and the share of the copy bandwidth that its compulsory bytes reach. CHECK=0 or TIME=0 skips a part.
"""

import math
import os
import time
from collections.abc import Callable

import torch
from check_kernels import COLD_BYTES, microseconds
from ops_cases import CASES, DTYPES, check, data, routing
from torch import Tensor

from moe_routing_bench import ops
from moe_routing_bench.ops import triton_ops

START = time.time()
# tokens, hidden, experts, top_k, layout, capacity factor
LARGE = {
    "aligned": (1000, 2880, 64, 8, "block128", None),
    "dropped": (3000, 4097, 16, 6, "compact", 0.7),
    "padded": (2048, 2048, 64, 8, "padded", 1.25),
    "few_tokens": (3, 7168, 256, 8, "block64", None),
}
TIMED = {
    "big_k8": (16384, 4096, 128, 8, "compact", None),
    "big_k2": (16384, 4096, 128, 2, "compact", None),
    "h2048": (16384, 2048, 128, 8, "compact", None),
    "blocks": (16384, 2048, 128, 8, "block128", None),
    "dropped": (16384, 4096, 64, 8, "padded", 1.0),
    "small": (1024, 4096, 128, 8, "compact", None),
    "decode": (64, 4096, 128, 8, "compact", None),
}


def layer(x: Tensor, scale: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """An MoE layer whose experts scale rows: pack, experts, combine with x as the residual."""
    return ops.combine(ops.pack(x, order, inverse) * scale, inverse, weights, residual=x)


def check_layer() -> None:
    """Output and gradients of `layer`: eager on two runs, from a CUDA graph, compiled whole, and in float64."""
    order, inverse = routing(512, 16, 4, "padded", 1.0, device="cuda")
    inputs = [one.requires_grad_() for one in data(len(order), 1024, inverse, torch.bfloat16)]
    grad = torch.randn_like(inputs[0])

    def run(function: Callable, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
        output = function(*inputs, order, inverse)
        gradients = torch.autograd.grad(output, inputs, grad)
        return [output.detach(), *gradients]  # a graph that lives on would tie the capture to this stream

    want = run(layer, inputs, grad)
    assert all(map(torch.equal, run(layer, inputs, grad), want)), "two runs differ"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(layer, inputs, grad)
    graph.replay()
    assert all(map(torch.equal, captured, want)), "a CUDA graph differs"
    compiled = run(torch.compile(layer, fullgraph=True), inputs, grad)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    exact = run(layer, wide, grad.double())
    for results in (want, compiled):
        for got, right in zip(results, exact, strict=True):
            error = float((got.double() - right).norm() / right.norm())
            assert error < 0.01, f"relative error {error}"


def check_all() -> int:
    """Every case; the number of failures."""
    failures = 0
    cases = {f"case {name}": shape for name, shape in CASES.items()} | {f"large {n}": s for n, s in LARGE.items()}
    jobs: dict[str, Callable] = {"layer": check_layer}
    for name, (tokens, hidden, *rest) in cases.items():
        for dtype in DTYPES:
            known = routing(tokens, *rest, device="cuda")
            jobs[f"{name} {dtype}"] = lambda name=name, dtype=dtype, known=known, hidden=hidden: check(
                name, dtype, *known, hidden
            )
    order, inverse = routing(4, 4, 2, device="cuda")
    none = torch.full_like(inverse, -1)
    empty = {"all_dropped": (torch.full_like(order, -1), none), "no_rows": (order[:0], none), "no_tokens": (torch.full_like(order, -1), none[:0])}  # fmt: skip
    for name, known in empty.items():
        jobs[name] = lambda name=name, known=known: check(name, torch.float32, *known, 16)
    for name, job in jobs.items():
        try:
            job()
        except Exception as error:
            failures += 1
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"correctness: {len(jobs)} cases, {failures} failures, {time.time() - START:.0f} s", flush=True)
    return failures


def in_torch(order: Tensor, inverse: Tensor) -> dict[str, Callable]:
    """What one writes without these operators; index_add_ has atomics, so its sums may differ from run to run."""
    top_k = inverse.shape[1]
    token, kept = order.clamp_min(0).long() // top_k, (order >= 0)[:, None]
    rows = inverse.clamp_min(0).long()

    def pack_backward(grad: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(grad).index_add_(0, token, torch.where(kept, y, 0))

    def combine_backward(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.where(inverse >= 0, weights, 0).view(-1)
        scale = flat[order.clamp_min(0).long()][:, None]
        d_y = torch.where(kept, grad[token] * scale, 0).to(y.dtype)
        return d_y, torch.where(inverse >= 0, (y[rows] * grad[:, None]).sum(-1, dtype=torch.float32), 0)

    return {"pack_backward": pack_backward, "combine_backward": combine_backward}


def time_shape(name: str, copy: float) -> None:
    """One line for each direction: microseconds of the operator, share of copy, microseconds of plain torch."""
    tokens, hidden, *rest = TIMED[name]
    order, inverse = routing(tokens, *rest, device="cuda")
    rows, kept, size = len(order), int((inverse >= 0).sum()), 2 * hidden
    torch.cuda.empty_cache()
    sets = [data(rows, hidden, inverse, torch.bfloat16) for _ in range(min(64, math.ceil(COLD_BYTES / (tokens * size)) + 1))]  # fmt: skip
    unit = torch.ones(inverse.shape, device="cuda")
    plain = in_torch(order, inverse)
    # name: the call of (x or gradient (T, H), y (R, H), weights), rows of `size` bytes read and written
    directions = {
        "pack": (lambda x, y, w: triton_ops.pack(x, order, inverse), tokens + rows),
        "pack_backward": (lambda g, y, w: triton_ops.combine(y, inverse, unit, None), kept + tokens),
        "combine": (lambda x, y, w: triton_ops.combine(y, inverse, w, None), kept + tokens),
        "combine_residual": (lambda x, y, w: triton_ops.combine(y, inverse, w, x), kept + 2 * tokens),
        "combine_backward": (lambda g, y, w: triton_ops.combine_backward(g, y, inverse, w, rows), tokens + kept + rows),
        "only_d_y": (lambda g, y, w: triton_ops.combine_backward(g, None, inverse, w, rows), tokens + rows),
        "only_d_weights": (lambda g, y, w: triton_ops.combine_backward(g, y, inverse, w, None), tokens + kept),
    }
    for direction, (call, moved) in directions.items():
        expected = moved * size / 3e6

        def measured(call: Callable, expected=expected) -> float:
            return microseconds([lambda one=one: call(*one) for one in sets], expected)

        taken = measured(call)
        beside = f"{measured(plain[direction]):9.2f}" if direction in plain else "        -"
        share = moved * size / taken / 1e3 / copy
        print(f"{name:8} {direction:17} {taken:9.2f} us {share:7.1%} of copy; torch {beside} us", flush=True)


def main() -> None:
    """Run the parts that are switched on."""
    torch.manual_seed(17)
    failures = check_all() if os.environ.get("CHECK") != "0" else 0
    if os.environ.get("TIME") != "0":
        torch.cuda.empty_cache()
        source, target = (torch.zeros(2**28, dtype=torch.int32, device="cuda") for _ in range(2))
        copy = 2 * 2**30 / microseconds([lambda: torch.neg(source, out=target)], 500) / 1e3
        del source, target
        print(f"{torch.cuda.get_device_name()}: copy of 2 GiB by a kernel {copy:.0f} GB/s")
        for name in TIMED:
            time_shape(name, copy)
    print(f"{failures} failures, {time.time() - START:.0f} s")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
