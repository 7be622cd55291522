"""What a cell will take, before it is measured: time and memory by its sizes and assumed rates, and how to take less. No torch.

The estimate is of operations and bytes: calls of each implementation until it is checked and sampled, and passes over the weights,
which every check compares with what was drawn. It is meant to be within a factor of `WITHIN`; kernels that are compiled first are not in it.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moe_routing_bench.benches.model.published_models import ARCHITECTURES
from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.cli import doctor
from moe_routing_bench.cli.options import option_of
from moe_routing_bench.cli.printing import duration
from moe_routing_bench.grid.cell import Cell, Job
from moe_routing_bench.quantities import count
from moe_routing_bench.store import platforms
from moe_routing_kernels.errors import bad
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.formats.weights import WEIGHTS

WITHIN = 4
_CALLS, _CALLS_OF_A_STEP = 70, 30  # of an implementation: in all, and in its longest step, "checking"
_DRAWS = 5  # what is drawn, and its reference: three draws that are timed, one drawn after binding, and one between
_SETS = 3
_BLOCKS_OF_TURNS = 2.4  # seconds of the blocks of six long turns
_COMPILED = 20.0  # seconds that torch.compile takes
_PROCESS = 1 << 30  # bytes of a process with torch


@dataclass(frozen=True)
class Rates:
    """What a device is assumed to do: operations and bytes a second, and seconds. `checked` is the time of all passes over a byte of
    weights, of which an implementation's longest step has `share`; `drawn` that of an element."""

    flops: float
    wide_flops: float  # of a reference
    bytes: float
    checked: float
    drawn: float
    start: float
    each: float  # for an implementation, besides
    share: float = 0.45


@dataclass(frozen=True)
class Sizes:
    """Of a cell: operations of a call, bytes of the weights that all input sets share, of those that a call reads, of the weights of
    one expert, and of the inputs and outputs of one set."""

    flops: float
    weights: float
    read: float
    expert: float
    moved: float


@dataclass(frozen=True)
class Estimate:
    """Of a cell: seconds in all and of the longest step without a word, bytes that it takes, and bytes that it cannot do without."""

    seconds: float
    step: float
    memory: float
    least: float
    sizes: Sizes
    rates: Rates
    implementations: int


def sizes(cell: Cell) -> Sizes:
    """The sizes of a cell, by its axes; every expert has rows, and none is dropped."""
    tokens, hidden, top_k = (cell.get(name) or 0 for name in ("tokens", "hidden", "top_k"))
    experts, inner, shared = (cell.get(name) or 0 for name in ("experts", "intermediate", "shared_intermediate"))
    ranks = cell.get("ep") or 1
    experts //= ranks
    element, stored = FORMATS[cell.get("dtype") or "bf16"].bytes, cell.get("weights") or cell.get("dtype") or "bf16"
    bits = WEIGHTS[stored].bits if stored in WEIGHTS else FORMATS[stored].bits
    products = 2 if cell.get("activation") == "relu2" else 3
    layers = ARCHITECTURES.get(cell.get("model"), ARCHITECTURES[None]).layers if cell.bench == "model" else 1
    routed, always = tokens * top_k * products * hidden * inner / ranks, tokens * products * hidden * shared
    scores = tokens * hidden * experts if cell.bench in ("router", "model") else 0
    expert = products * hidden * inner * bits / 8
    weights, read = (
        layers * (n * expert + products * hidden * shared * element) for n in (experts, min(experts, tokens * top_k))
    )
    packed = 0 if cell.bench == "router" else tokens * top_k
    moved = element * (2 * hidden * (tokens + packed) + tokens * experts) + 16 * tokens * top_k
    trained = cell.bench in (
        "training",
        "ep_training",
    )  # forward, and backward by rows and by weights, whose gradients are outputs
    flops = 2 * layers * (routed + always + scores) * (3 if trained else 1)
    return Sizes(flops, weights, read, expert, moved + (weights if trained else 0))


def estimate(job: Job, platform: str) -> Estimate:
    """What a job takes on a platform, with the implementations that may run there."""
    cell, settings, bench = job.cell, job.settings, bench_of(job)
    cpu = platform == platforms.CPU
    rates = _cpu(cell.get("dtype") or "bf16", settings.cpu_threads) if cpu else _GPU
    size = sizes(cell)
    known = [bench[name] for name in job.implementations]
    able = [
        implementation
        for implementation in known
        if not platforms.missing(implementation.requires, platform, implementation.peer)
    ]
    twice = [implementation for implementation in able if implementation.name in job.twins]
    copied = {implementation.name: _copied(implementation.name, cell, size) for implementation in able}
    call = size.flops / rates.flops + (size.read + size.moved) / rates.bytes
    calls = {implementation.name: call + 2 * copied[implementation.name] / rates.bytes for implementation in able}
    checks = size.weights * rates.checked
    elements = size.weights / size.expert * cell.hidden * cell.intermediate * 3 if size.expert else 0
    drawing = elements * rates.drawn + _DRAWS * (size.flops / rates.wide_flops + size.moved / rates.bytes)
    together = sum(calls[implementation.name] for implementation in [*able, *twice])
    blocks = settings.max_blocks * sum(
        max(settings.samples_per_block * settings.interval_us / 1e6, calls[implementation.name])
        for implementation in [*able, *twice]
    )
    sampling = min(max(settings.max_seconds, 3 * together), blocks)
    turns = 0 if cpu or size.flops < _LIMITED else (2 * settings.turn_seconds + _BLOCKS_OF_TURNS) * len(able)
    seconds = rates.start + drawing + sampling + turns + _CALLS * together + len(able) * (checks + rates.each)
    seconds += cpu * _COMPILED * sum("compiler" in implementation.requires for implementation in able)
    longest = _CALLS_OF_A_STEP * max(calls.values(), default=0) + rates.share * checks
    least = size.weights + _SETS * size.moved
    memory = least + _DRAWS * 3 * size.moved + max(copied.values(), default=0) + (_PROCESS if cpu else 0)
    return Estimate(seconds, max(longest, drawing), memory, least, size, rates, len(able))


def _copied(name: str, cell: Cell, size: Sizes) -> float:
    """Bytes of weights that an implementation copies in a call: one of transformers those of an expert for every assignment."""
    return size.expert * cell.tokens * cell.top_k if name.endswith("batched_mm") and size.expert else 0.0


# As measured on an NVIDIA H200, where a product of 16-bit numbers that fills the GPU is power-limited.
_GPU = Rates(flops=3e14, wide_flops=2e13, bytes=1.5e12, checked=0.9e-9, drawn=2e-10, start=8.0, each=0.7)
_LIMITED = 1e9  # operations of a call from which long turns are likely


def _cpu(dtype: str, threads: int) -> Rates:
    """Rates of a CPU, by what its cores have for a format: without an instruction for it, a product is slow."""
    flags = doctor.cpu_flags()
    wide = 12e9 + 13e9 * ("avx512f" in flags)
    own = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}.get(dtype)
    slow = {"bf16": 10e9 if "avx512f" in flags else 2e9, "fp16": 1e9}
    rate = wide if own is None else 150e9 if f"amx_{dtype}" in flags else 50e9 if own & flags else slow[dtype]
    return Rates(rate * threads, 2 * wide * threads, 2.5e9, 155e-9, 3e-8, 8.0, 0.7)


LONGEST = 24 * 3600  # seconds that a config may ask for

_SMALLER = ("tokens", "experts", "hidden", "intermediate", "shared_intermediate")  # axes that a cell is large by


def announce(jobs: Sequence[Job], platform: str) -> None:
    """Say on stderr what the cells will take. Raises `UserError` where weights and inputs of one are larger than the memory there is."""
    estimates = {job.cell.key: estimate(job, platform) for job in jobs}
    cell, free = jobs[0].cell, doctor.available(platform)
    names = ("model", "tokens") if cell.get("model") else _SMALLER  # a model sets the others
    sizes = ", ".join(option_of(name) for name in names if name in cell)
    less = f"fewer --implementations or smaller {sizes}"
    key, most = max(estimates.items(), key=lambda item: item[1].memory)
    whole, certain = max(estimates.items(), key=lambda item: item[1].least)
    longest = max(estimates.values(), key=lambda estimated: estimated.step)
    total = sum(estimated.seconds for estimated in estimates.values())
    print(
        f"estimate, within a factor of {WITHIN}: {duration(total)} for {count(len(jobs), 'cell')}, {_gb(most.memory)} of memory",
        end="",
        file=sys.stderr,
    )
    print(f" ({_basis(longest)}); {less} take less", file=sys.stderr)
    if certain.least > free:
        raise bad(
            f"memory for {whole}",
            _gb(free),
            f"at least {_gb(certain.least)}, for weights and inputs",
            f"smaller {sizes}",
        )
    if most.memory > free:
        print(
            f"warning: {key} may take {_gb(most.memory)} of memory, and {_gb(free)} are free: {less}", file=sys.stderr
        )
    limit = jobs[0].settings.timeout
    if 2 * longest.step > limit:
        print(
            f"warning: an implementation may say nothing for {duration(longest.step)} or longer, and is given up after {limit:g} s: "
            f"--timeout {_longer(longest.step)}, or smaller {sizes}",
            file=sys.stderr,
        )


def _basis(estimated: Estimate) -> str:
    """The sizes and the rates that an estimate is of."""
    size, rates = estimated.sizes, estimated.rates
    work = f"{count(estimated.implementations, 'implementation')}, {size.flops / 1e9:.3g} GFLOP a call, {_gb(size.weights)} of weights"
    return f"{work}; assumed: {rates.flops / 1e9:.3g} GFLOP/s, {rates.bytes / 1e9:.3g} GB/s, no kernel to compile"


def _longer(step: float) -> int:
    """A limit, in whole minutes, that the estimate of a step does not reach, even where it is wrong."""
    return min(60 * math.ceil(WITHIN * step / 60), LONGEST)


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.2g} GB" if amount < 10e9 else f"{amount / 1e9:.0f} GB"
