"""Check and time pack and combine of both DSLs on a GPU: `PYTHONPATH=src python tests/gpu/check_kernels.py`.

Correctness against fp64 on poisoned outputs, then cold-L2 times (CUDA graphs over rotating buffer sets) beside a 2
GiB copy and a streaming kernel of the same read:write mix. GB/s always means compulsory bytes: each token row or kept
row read once, each output row written once, plus the indices.

Switches, all optional: CHECK=0 or TIME=0 or VARIANTS=0 skips a part; SHAPES=name,name times only those; THREADS,
VECTORS, STREAMING (CuTe: threads a block, vectors a thread, cache hints) and BYTES, WARPS (Triton: row bytes and
warps a program) are comma lists for the variants; SECONDS is the time after which variants are skipped (75).
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from moe_routing_bench import cute_support
from moe_routing_bench.benches.combine import cute_combine, triton_combine
from moe_routing_bench.benches.pack import cute_pack, triton_pack

START = time.time()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-23}
MODULES = {
    "pack": {"cute": cute_pack, "triton": triton_pack},
    "combine": {"cute": cute_combine, "triton": triton_combine},
}
COLD_BYTES = 5 * 60e6  # rotate over at least five times the L2 of an H200

# tokens, hidden, experts, top_k, dtype, layout, capacity factor
CHECKS = [
    (1, 4096, 8, 2, "bf16", "compact", None),
    (1, 1, 1, 1, "fp32", "compact", None),
    (5, 13, 4, 2, "bf16", "padded", 1.0),
    (7, 100, 8, 8, "fp16", "aligned", None),
    (300, 2880, 32, 4, "bf16", "padded", 1.25),
    (1000, 7168, 256, 8, "bf16", "aligned", None),
    (513, 4097, 16, 6, "bf16", "compact", 0.5),
    (2048, 2048, 64, 8, "fp32", "padded", 1.0),
    (999, 64, 128, 32, "fp16", "aligned", 2.0),
    (64, 4096, 128, 8, "bf16", "aligned", None),
    (33, 6144, 8, 2, "fp16", "compact", 0.1),
    (65536, 4224, 64, 8, "bf16", "compact", None),  # more than 2**31 elements
]
TIMED = {
    "big_k8": (16384, 4096, 128, 8, "bf16", "compact", None),
    "big_k2": (32768, 4096, 8, 2, "bf16", "compact", None),
    "padded": (16384, 4096, 64, 8, "bf16", "padded", 1.25),
    "aligned": (16384, 7168, 256, 8, "bf16", "aligned", None),
    "h2048": (16384, 2048, 64, 8, "bf16", "compact", None),
    "fp32": (16384, 2048, 64, 4, "fp32", "compact", None),
    "odd": (16384, 2047, 64, 4, "bf16", "compact", None),
    "small": (1024, 4096, 128, 8, "bf16", "compact", None),
    "decode": (64, 4096, 128, 8, "bf16", "aligned", None),
}
VARIED = ("big_k8", "big_k2", "small")


def routing(
    tokens: int, experts: int, top_k: int, layout: str, factor: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random distinct experts a token -> (order (R,), inverse (T, k)), rows grouped by expert."""
    flat = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.flatten()
    capacity = tokens if factor is None else min(tokens, math.ceil(factor * tokens * top_k / experts))
    source = flat.argsort(stable=True)
    counts = flat.bincount(minlength=experts)
    rank = torch.arange(len(flat), device="cuda") - (counts.cumsum(0) - counts)[flat[source]]
    kept = counts.clamp(max=capacity)
    room = {"compact": kept, "padded": torch.full_like(kept, capacity), "aligned": (kept + 127) // 128 * 128}[layout]
    row = (room.cumsum(0) - room)[flat[source]] + rank
    alive = rank < capacity
    order = torch.full((int(room.sum()),), -1, dtype=torch.int32, device="cuda")
    inverse = torch.full_like(flat, -1, dtype=torch.int32)
    order[row[alive]] = source[alive].int()
    inverse[source[alive]] = row[alive].int()
    return order, inverse.view(tokens, top_k)


def make_case(shape: tuple) -> SimpleNamespace:
    """The cell and its routing."""
    tokens, hidden, experts, top_k, dtype, layout, factor = shape
    order, inverse = routing(tokens, experts, top_k, layout, factor)
    return SimpleNamespace(
        tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype, layout=layout, capacity_factor=factor,
        order=order, inverse=inverse, kept=int((inverse >= 0).sum()),
    )  # fmt: skip


def tensors(case: SimpleNamespace, operation: str) -> tuple[dict, dict]:
    """Fresh inputs and NaN outputs of one operation; index tensors are copied so that they are cold too."""
    rows, dtype = len(case.order), DTYPES[case.dtype]
    height = case.tokens if operation == "pack" else rows
    data = torch.empty(height, case.hidden, dtype=dtype, device="cuda").normal_()
    if operation == "pack":
        inputs = {"x": data, "order": case.order.clone(), "inverse": case.inverse.clone()}
        return inputs, {"packed": torch.full((rows, case.hidden), torch.nan, dtype=dtype, device="cuda")}
    weights = torch.rand(case.tokens, case.top_k, device="cuda").masked_fill(case.inverse < 0, torch.nan)
    inputs = {"y": data, "inverse": case.inverse.clone(), "weights": weights}
    return inputs, {"combined": torch.full((case.tokens, case.hidden), torch.nan, dtype=dtype, device="cuda")}


def verify(case: SimpleNamespace, operation: str, inputs: dict, outputs: dict) -> None:
    """AssertionError where an output differs: pack bit by bit, combine within rounding of the fp64 sum."""
    if operation == "pack":
        for order, packed in zip(case.order.split(65536), outputs["packed"].split(65536), strict=True):
            expected = inputs["x"][order.clamp(min=0).long() // case.top_k].masked_fill_(order[:, None] < 0, 0)
            assert torch.equal(packed, expected)
        return
    parts = (case.inverse.split(4096), inputs["weights"].split(4096), outputs["combined"].split(4096))
    for inverse, weights, combined in zip(*parts, strict=True):
        terms = torch.zeros((*inverse.shape, case.hidden), dtype=torch.float64, device="cuda")
        live = inverse >= 0
        terms[live] = inputs["y"][inverse[live].long()].double() * weights[live].double()[:, None]
        error = (combined.double() - terms.sum(1)).abs()
        bound = ROUNDING[case.dtype] * terms.sum(1).abs() + 1e-6 * terms.abs().sum(1) + 1e-7
        assert bool((error <= bound).all()), f"max error {error.max()}"


def check_all() -> int:
    """Every check for every operation and DSL, eagerly and replayed from a CUDA graph; the number of failures."""
    failures = 0
    for shape in CHECKS:
        case = make_case(shape)
        for operation, modules in MODULES.items():
            inputs, outputs = tensors(case, operation)
            (output,) = outputs.values()
            for name, module in modules.items():
                try:
                    run = module.prepare(case, inputs, outputs)
                    for launch in (run, capture([run]).replay):
                        output.fill_(torch.nan)
                        launch()
                        verify(case, operation, inputs, outputs)
                except Exception as error:
                    failures += 1
                    print(f"FAILED {operation} {name} {shape}: {type(error).__name__}: {error}", flush=True)
    print(f"correctness: {len(CHECKS)} shapes, {failures} failures, {time.time() - START:.0f} s", flush=True)
    return failures


def capture(runs: list[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of the calls in turn, captured on a side stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def microseconds(runs: list[Callable[[], None]], expected: float, samples: int = 15) -> float:
    """Median time of one call; `expected` microseconds size the graph to at least 300."""
    runs[0]()
    graph = capture(runs * math.ceil(300 / (expected * len(runs))))
    calls = math.ceil(300 / (expected * len(runs))) * len(runs)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


@triton.jit
def stream_kernel(source, target, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum READS consecutive parts of n elements and write the sum to WRITES parts."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    parts = ()
    for i in tl.static_range(READS):
        parts = parts + (tl.load(source + i * n.to(tl.int64) + at, mask=at < n),)  # noqa: RUF005
    total = parts[0]
    for i in tl.static_range(1, READS):
        total += parts[i]
    for i in tl.static_range(WRITES):
        tl.store(target + i * n.to(tl.int64) + at, total, mask=at < n)


def stream_rate(case: SimpleNamespace, operation: str) -> float:
    """GB/s of the streaming kernel with this operation's mix and size, over cold buffers."""
    many = (len(case.order) if operation == "pack" else case.kept) / case.tokens
    parts = min(64, max(1, round(many)))
    reads, writes = (1, parts) if operation == "pack" else (parts, 1)
    n, dtype = case.tokens * case.hidden // 16 * 16, DTYPES[case.dtype]
    size = (reads + writes) * n * dtype.itemsize
    sets = min(256, math.ceil(COLD_BYTES / size) + 1)
    data = [[torch.zeros(m * n, dtype=dtype, device="cuda") for m in (reads, writes)] for _ in range(sets)]
    block = 2048 if reads > 4 else 4096
    launch = stream_kernel[(triton.cdiv(n, block),)]
    runs = [lambda s=s, t=t: launch(s, t, n, reads, writes, block) for s, t in data]
    return size / microseconds(runs, size / 3e6) / 1e3


def compulsory_bytes(case: SimpleNamespace, operation: str) -> int:
    """Bytes that must move: see the module docstring."""
    row, indices = case.hidden * DTYPES[case.dtype].itemsize, 4 * case.inverse.numel()
    if operation == "pack":
        return (case.tokens + len(case.order)) * row + indices
    return (case.kept + case.tokens) * row + 2 * indices


def variants(case: SimpleNamespace, operation: str) -> dict[str, Callable]:
    """Name -> function(inputs, outputs) that binds one non-default configuration."""

    def switch(name: str, default: str) -> list[int]:
        return [int(value) for value in os.environ.get(name, default).split(",")]

    found: dict[str, Callable] = {}
    arch = cute_support.current_arch()
    slab = cute_pack.choose_slab(case, case.tokens, len(case.order))
    for threads in switch("THREADS", "128,256"):
        for vectors in switch("VECTORS", "1,2,4,8"):
            for streaming in switch("STREAMING", "0,1"):
                tiling = cute_support.row_tiling(case.hidden, case.dtype, vectors, threads, bool(streaming))
                if operation == "combine" and tiling.vectors * case.top_k > 32:
                    continue
                name = f"cute t{threads} v{tiling.vectors} lanes{tiling.lanes} stream{streaming}"

                def bind(inputs: dict, outputs: dict, tiling=tiling) -> Callable[[], None]:
                    extra = slab if operation == "pack" else False  # rows checked for padding; no residual
                    compiled = MODULES[operation]["cute"].compile_for(arch, case.dtype, case.top_k, tiling, extra)
                    residual = () if operation == "pack" else outputs.values()  # given, not read
                    arguments = (*inputs.values(), *residual, *outputs.values())
                    return lambda: compiled(*arguments)

                found[name] = bind
    itemsize = DTYPES[case.dtype].itemsize
    for size in switch("BYTES", "2048,4096,8192,16384"):
        for warps in switch("WARPS", "4,8"):
            block = (1, min(size // itemsize, triton.next_power_of_2(case.hidden)))

            def bind(inputs: dict, outputs: dict, block=block, warps=warps) -> Callable[[], None]:
                extra = (slab,) if operation == "pack" else ()
                arguments = (*inputs.values(), *outputs.values(), *extra)
                return MODULES[operation]["triton"].launcher(*arguments, block, warps)

            found[f"triton b{size} w{warps}"] = bind
    return found


def time_shape(name: str, copy: float, rows: list[str]) -> None:
    """Time the defaults, and for VARIED shapes the variants, of both operations; append table lines to `rows`."""
    case = make_case(TIMED[name])
    for operation, modules in MODULES.items():
        size = compulsory_bytes(case, operation)
        stream = stream_rate(case, operation)
        torch.cuda.empty_cache()
        data = [tensors(case, operation) for _ in range(min(256, math.ceil(COLD_BYTES / size) + 1))]
        binders = {f"{dsl} default": lambda i, o, m=m: m.prepare(case, i, o) for dsl, m in modules.items()}
        if name in VARIED and os.environ.get("VARIANTS") != "0":
            binders |= variants(case, operation)
        for label, bind in binders.items():
            if time.time() - START > float(os.environ.get("SECONDS", "75")) and "default" not in label:
                rows.append(f"{name:8} {operation:8} {label:30} skipped: time")
                continue
            try:
                taken = microseconds([bind(*pair) for pair in data], size / 3e6)
            except Exception as error:
                rows.append(f"{name:8} {operation:8} {label:30} {type(error).__name__}: {str(error)[:80]}")
                continue
            rate = size / taken / 1e3
            shares = f"{rate / copy:7.1%} {rate / stream:8.1%} (stream {stream:.0f})"
            rows.append(f"{name:8} {operation:8} {label:30} {taken:9.2f} us {rate:7.0f} GB/s {shares}")
        del data
        torch.cuda.empty_cache()


def check_quack() -> None:
    """QuACK's gate on one supported cell of each dtype; what it refuses is printed."""
    from moe_routing_bench.benches.gate import quack_gate

    for dtype, experts, top_k in (("bf16", 128, 8), ("fp32", 64, 4), ("fp32", 128, 8), ("bf16", 64, 2), ("bf16", 8, 8)):
        cell = SimpleNamespace(tokens=4096, experts=experts, top_k=top_k, dtype=dtype)
        if reason := quack_gate.supports(cell):
            print(f"quack {dtype} E={experts} k={top_k}: {reason}")
            continue
        logits = torch.randn(4096, experts, device="cuda").to(DTYPES[dtype])
        ids = torch.empty(4096, top_k, dtype=torch.int32, device="cuda")
        weights = torch.empty(4096, top_k, device="cuda")
        try:
            quack_gate.prepare(cell, {"logits": logits}, {"topk_ids": ids, "topk_weights": weights})()
            values = logits.float().topk(top_k).values
            expected = values.softmax(-1)
            chosen = logits.float().gather(1, ids.long())
            print(f"quack {dtype} E={experts} k={top_k}: logits differ in {int((chosen != values).sum())} places, "
                  f"weights by at most {float((weights - expected).abs().max()):.2e}")  # fmt: skip
        except Exception as error:
            print(f"quack {dtype} E={experts} k={top_k}: {type(error).__name__}: {str(error)[:200]}")


def main() -> None:
    """Run the parts that are switched on and print the table last."""
    torch.manual_seed(17)
    failures = check_all() if os.environ.get("CHECK") != "0" else 0
    torch.cuda.empty_cache()
    rows: list[str] = []
    if os.environ.get("TIME") != "0":
        source, target = (torch.zeros(2**28, dtype=torch.int32, device="cuda") for _ in range(2))
        copy = 2 * 2**30 / microseconds([lambda: torch.neg(source, out=target)], 500) / 1e3
        del source, target
        rows.append(
            f"{torch.cuda.get_device_name()}: copy of 2 GiB by a kernel {copy:.0f} GB/s; shares are of copy, then of stream"
        )
        for name in os.environ.get("SHAPES", ",".join(TIMED)).split(","):
            time_shape(name, copy, rows)
    try:
        check_quack()
    except ImportError as error:
        print(f"quack: {error}")
    print("\n".join(rows))
    print(f"{failures} failures, {time.time() - START:.0f} s")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
