"""Run by hand on a machine with several GPUs: `timeout 300 python tests/gpu/expert_parallel.py [--times] [WORD]` checks `ops.ep` with NCCL.

Outputs and gradients of each rank are compared with those of one GPU that has all tokens. `--times` also prints times of a layer, of
`all_to_all_single` with as many bytes, and of a copy between GPUs. WORD picks checks and layers whose names have it. Without GPUs two processes
check small sizes with gloo.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from moe_routing_bench.benches.mailboxes import captured
from moe_routing_kernels import ops
from moe_routing_kernels.exchange.mailbox import Mailbox
from moe_routing_kernels.ops import ep

CUDA = torch.cuda.is_available()
RANKS = torch.cuda.device_count() if CUDA else 2
DTYPE, TOLERANCE = (torch.bfloat16, 2e-2) if CUDA else (torch.float32, 1e-5)
SIZES = (512, 256, 16, 4) if CUDA else (64, 32, 16, 4)  # hidden, intermediate, experts, top_k
UNEVEN = [100 + 37 * rank for rank in range(RANKS)]
CASES = {
    "even": {"tokens": [256] * RANKS},
    "uneven": {"tokens": UNEVEN},
    "no token on the last rank": {"tokens": [64] * (RANKS - 1) + [0]},
    "all to the first rank": {"tokens": [64] * RANKS, "lean": 50.0},
    "capacity": {"tokens": UNEVEN, "capacity": 40},
    "most_tokens": {"tokens": UNEVEN, "most_tokens": max(UNEVEN)},
}
LAYERS: dict[
    str, tuple[int, int, int, int, int, bool]
] = {  # tokens of a rank, hidden, intermediate, experts, top_k; and whether it is trained
    "DeepSeek-V3, a quarter of its experts": (128, 7168, 2048, 64, 8, False),
    "Qwen3-30B-A3B": (8192, 2048, 768, 128, 8, True),
    "Qwen3-30B-A3B, few tokens": (128, 2048, 768, 128, 8, False),
    "Mixtral-8x7B": (8192, 4096, 14336, 8, 2, True),
}


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def drawn(seed: int, device: torch.device, *shapes: tuple[int, ...], scales: tuple[float, ...]) -> list[Tensor]:
    draw = torch.Generator(device).manual_seed(seed)
    pairs = zip(shapes, scales, strict=True)
    return [torch.randn(shape, generator=draw, device=device) * scale for shape, scale in pairs]


def grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def check(device: torch.device, tokens: list[int], lean: float = 0.0, boxed: bool = False, **options: int) -> float:
    """The largest relative error of outputs and gradients of any rank; `boxed` with a mailbox, of two calls, with other tokens in the first."""
    rank, (hidden, inter, experts, top_k) = dist.get_rank(), SIZES
    shapes = (sum(tokens), hidden), (sum(tokens), experts), (experts, 2 * inter, hidden), (experts, hidden, inter)
    x, logits, w13, w2 = drawn(7, device, *shapes, scales=(1, 1, hidden**-0.5, inter**-0.5))
    logits[:, : experts // RANKS] += lean
    whole = [x.to(DTYPE), logits, w13.to(DTYPE), w2.to(DTYPE)]
    first, local = sum(tokens[:rank]), experts // RANKS
    mine, held = slice(first, first + tokens[rank]), slice(rank * local, (rank + 1) * local)
    parts = [mine, mine, held, held]
    own = [one[part].clone().requires_grad_() for one, part in zip(whole, parts, strict=True)]
    whole = [one.requires_grad_() for one in whole]
    box = Mailbox(max(tokens) + 3, hidden, top_k, local, DTYPE) if boxed else None
    if box:
        flipped = [each.detach().flip(0).requires_grad_() for each in own]
        ep.layer(*flipped, top_k=top_k, mailbox=box).sum().backward()
    y = ep.layer(*own, top_k=top_k, mailbox=box, **options)
    expected = ops.layer(*whole, top_k=top_k, capacity=options.get("capacity"))
    gradient = drawn(8, device, (sum(tokens), hidden), scales=(1,))[0].to(DTYPE)
    y.backward(gradient[mine])
    expected.backward(gradient)
    pairs = [(y, expected[mine])]
    pairs += [(grad(one), grad(every)[part]) for one, every, part in zip(own, whole, parts, strict=True)]
    with torch.no_grad():
        errors = [(a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30) for a, b in pairs]
    worst = torch.stack(errors).max().nan_to_num(1e9)  # the largest of all ranks may leave out what is no number
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def check_mailbox(device: torch.device, tokens: list[int], lean: float = 0.0) -> float:
    """The largest relative error of outputs of any rank, in eager mode and in replays of a CUDA graph with another routing."""
    rank, (hidden, inter, experts, top_k) = dist.get_rank(), SIZES
    first, local = sum(tokens[:rank]), experts // RANKS
    mine, held = slice(first, first + tokens[rank]), slice(rank * local, (rank + 1) * local)
    shapes = (sum(tokens), hidden), (sum(tokens), experts), (experts, 2 * inter, hidden), (experts, hidden, inter)
    x, logits, w13, w2 = drawn(7, device, *shapes, scales=(1, 1, hidden**-0.5, inter**-0.5))
    logits[:, :local] += lean
    x, w13, w2, others = x.to(DTYPE), w13.to(DTYPE), w2.to(DTYPE), logits.flip(1).contiguous()
    box = Mailbox(max(tokens) + 3, hidden, top_k, local, DTYPE)
    own, errors = logits[mine].clone(), []

    def call() -> Tensor:
        return ep.layer(x[mine], own, w13[held], w2[held], top_k, residual=x[mine], mailbox=box)

    def compare(got: Tensor, scores: Tensor) -> None:
        expected = ops.layer(x, scores, w13, w2, top_k=top_k)[mine].double() + x[mine].double()
        errors.append((got.double() - expected).norm() / expected.norm().clamp_min(1e-30))

    with torch.no_grad():
        for scores in (logits, others, logits):
            own.copy_(scores[mine])
            compare(call(), scores)
        results: list[Tensor] = []
        replay = captured(lambda: results.append(call()))
        for scores in (others, logits, others):
            own.copy_(scores[mine])
            results[-1].fill_(float("nan"))
            replay()
            compare(results[-1], scores)
    worst = torch.stack(errors).max().nan_to_num(1e9)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def nobody_comes(device: torch.device) -> bool:
    """Whether a rank that waits in vain says so after its time, and the next mailbox works."""
    box = Mailbox(16, 64, 2, 4, DTYPE, seconds=1.0)
    x, ids = torch.ones(8, 64, device=device, dtype=DTYPE), torch.zeros(8, 2, device=device, dtype=torch.int32)
    said = True
    if dist.get_rank() == 0:
        box.out(x, ids, ids.float())
        torch.cuda.synchronize()
        try:
            box.out(x, ids, ids.float())
        except RuntimeError as error:
            said = "rank 1" in str(error)
        else:
            said = False
    dist.barrier()
    return said


def microseconds(run: Callable[[], object], calls: int = 20, repeats: int = 5) -> float:
    """Time of a call: the median of repeats, of the slowest rank."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        times.append(elapsed(run, calls))
    worst = torch.tensor(median(times), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def elapsed(run: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def copies(store: Any) -> None:
    """A copy from GPU 0 to GPU 1. The other ranks wait for the store: a kernel that waits on GPU 1 would take turns with the copy."""
    if dist.get_rank() == 0:
        for mebibytes in (1, 64, 512):
            source = torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda:0")
            target = torch.empty_like(source, device="cuda:1")
            copy = functools.partial(target.copy_, source)
            elapsed(copy, 3)
            us = elapsed(copy, 20)
            say(f"copy of {mebibytes} MiB to another GPU: {us:.1f} us, {source.numel() / us / 1e3:.0f} GB/s")
        store.set("copied", "yes")
    store.wait(["copied"], timedelta(seconds=60))
    dist.barrier()


def exchanges(device: torch.device, tokens: int, hidden: int) -> None:
    """`all_to_all_single` of a row of each token for each rank: the bytes of one direction of a layer with k well above the ranks."""
    rows = torch.randn(tokens * RANKS, hidden, device=device).to(DTYPE)
    come, wire = torch.empty_like(rows), tokens * hidden * rows.element_size() * (RANKS - 1)
    there = functools.partial(dist.all_to_all_single, come, rows)

    def pair() -> None:
        there()
        dist.all_to_all_single(rows, come)

    for what, run, count in (
        ("there", there, 1),
        ("there, graph", captured(there), 1),
        ("pair, graph", captured(pair), 2),
    ):
        us = microseconds(run)
        say(
            f"all_to_all_single, T={tokens}, H={hidden}, {what}: {us:.1f} us, {count * wire / us / 1e3:.0f} GB/s to others"
        )


def mailboxes(device: torch.device, tokens: int, hidden: int, experts: int, top_k: int) -> None:
    """The same rows by a mailbox: out, back, and both."""
    local = experts // RANKS
    box = Mailbox(tokens, hidden, top_k, local, DTYPE)
    x, logits = drawn(dist.get_rank(), device, (tokens, hidden), (tokens, experts), scales=(1, 1))
    ids, weights = ops.gate(logits, top_k)
    x, y, sums = x.to(DTYPE), torch.empty_like(x, dtype=DTYPE), torch.randn_like(box.rows)
    wire = tokens * hidden * x.element_size() * (RANKS - 1)

    def pair() -> None:
        box.out(x, ids, weights)
        box.back(sums, ids, None, y)

    for what, run in (("pair", pair), ("pair, graph", captured(pair))):
        us = microseconds(run)
        say(
            f"mailbox, T={tokens}, H={hidden}, {box.letters.blocks} blocks, {what}: {us:.1f} us, {2 * wire / us / 1e3:.0f} GB/s to others"
        )


def layers(
    device: torch.device, name: str, tokens: int, hidden: int, inter: int, experts: int, top_k: int, trained: bool
) -> None:
    rank, local = dist.get_rank(), experts // RANKS
    shapes = (tokens, hidden), (tokens, experts), (local, 2 * inter, hidden), (local, hidden, inter)
    x, logits, w13, w2 = drawn(rank, device, *shapes, scales=(1, 1, hidden**-0.5, inter**-0.5))
    own = [x.to(DTYPE), logits, w13.to(DTYPE), w2.to(DTYPE)]

    def report(what: str, us: float, products: int = 1) -> None:
        rate = products * 6 * tokens * top_k * hidden * inter / us / 1e6
        say(f"{name}, T={tokens} of a rank, {what}: {us:.1f} us, {rate:.0f} TFLOP/s of a GPU")

    with torch.no_grad():
        forward = functools.partial(ep.layer, *own, top_k=top_k)
        padded = functools.partial(forward, most_tokens=tokens)
        report("the host reads counts", microseconds(forward))
        report("most_tokens", microseconds(padded))
        report("most_tokens, graph", microseconds(captured(padded)))
        stored = functools.partial(forward, mailbox=Mailbox(tokens, hidden, top_k, local, DTYPE))
        report("mailbox", microseconds(stored))
        report("mailbox, graph", microseconds(captured(stored)))
        alone = functools.partial(ops.layer, *own[:2], *(torch.cat([one] * RANKS) for one in own[2:]), top_k=top_k)
        report("all experts on one GPU, graph", microseconds(captured(alone)))
        del alone
    if trained:
        leaves = [one.requires_grad_() for one in own]
        gradient = torch.randn_like(own[0])

        def step(**options: Any) -> tuple[Tensor, ...]:
            return torch.autograd.grad(ep.layer(*leaves, top_k=top_k, **options), leaves, gradient)

        report("forward and backward", microseconds(step, 10), 3)
        static = functools.partial(step, most_tokens=tokens)
        report("forward and backward, most_tokens, graph", microseconds(captured(static), 10), 3)
        stored = functools.partial(step, mailbox=Mailbox(tokens, hidden, top_k, local, DTYPE))
        report("forward and backward, mailbox", microseconds(stored, 10), 3)
        report("forward and backward, mailbox, graph", microseconds(captured(stored), 10), 3)


def main(rank: int, place: str, times: bool, word: str) -> None:
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, wait = dist.FileStore(place, RANKS), timedelta(seconds=60)  # type: ignore[attr-defined]
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=RANKS, timeout=wait, device_id=device if CUDA else None
    )
    checks = {name: functools.partial(check, device, **case) for name, case in CASES.items()}
    if CUDA:
        plain = {name: case for name, case in CASES.items() if set(case) <= {"tokens", "lean"}}
        checks |= {f"{name}, mailbox": functools.partial(check_mailbox, device, **case) for name, case in plain.items()}
        trained = functools.partial(check, device, boxed=True)
        checks |= {f"{name}, trained by mailbox": functools.partial(trained, **case) for name, case in plain.items()}
    errors = []
    for name in filter(lambda name: word in name, checks):
        errors.append(checks[name]())
        say(f"{name}: largest relative error {errors[-1]:.1e}, {'ok' if errors[-1] < TOLERANCE else 'WRONG'}")
    if CUDA and not word:
        say("a rank that does not come is named:", nobody_comes(device))
    if times and CUDA and not word:
        copies(store)
        for tokens, hidden in ((128, 7168), (4096, 7168), (8192, 2048)):
            exchanges(device, tokens, hidden)
            mailboxes(device, tokens, hidden, 256, 8)
    for name, sizes in LAYERS.items() if times and CUDA else ():
        if word in name:
            layers(device, name, *sizes)
    dist.destroy_process_group()
    if max(errors, default=0) >= TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    options = [each for each in sys.argv[1:] if each != "--times"]
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, (os.path.join(folder, "store"), "--times" in sys.argv, *(options or [""])), RANKS)
