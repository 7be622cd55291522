"""What `measure` says before it starts: how long it may take, how much memory, how to take less, and whether that suffices."""

import math
import sys
from collections.abc import Sequence

from moe_routing_bench.cli import estimating, machine
from moe_routing_bench.cli.estimating import WITHIN, Estimate
from moe_routing_bench.cli.options import option_of
from moe_routing_bench.cli.printing import duration
from moe_routing_bench.grid.job import Job
from moe_routing_bench.quantities import count
from moe_routing_kernels.errors import bad

LONGEST = 24 * 3600  # seconds that a config may ask for

_SMALLER = ("tokens", "experts", "hidden", "intermediate", "shared_intermediate")  # axes that a cell is large by


def announce(jobs: Sequence[Job], platform: str) -> None:
    """Say on stderr what the cells will take. Raises `UserError` where weights and inputs of one are larger than the memory there is."""
    found = {job.cell.key: estimating.estimate(job, platform) for job in jobs}
    cell, free = jobs[0].cell, machine.available(platform)
    names = ("model", "tokens") if cell.get("model") else _SMALLER  # a model sets the others
    sizes = ", ".join(option_of(name) for name in names if name in cell)
    less = f"fewer --implementations or smaller {sizes}"
    key, most = max(found.items(), key=lambda one: one[1].memory)
    whole, certain = max(found.items(), key=lambda one: one[1].least)
    longest = max(found.values(), key=lambda one: one.step)
    total = sum(one.seconds for one in found.values())
    print(f"estimate, within a factor of {WITHIN}: {duration(total)} for {count(len(jobs), 'cell')}, {_gb(most.memory)} of memory", end="", file=sys.stderr)  # fmt: skip
    print(f" ({_basis(longest)}); {less} take less", file=sys.stderr)
    if certain.least > free:
        raise bad(f"memory for {whole}", _gb(free), f"at least {_gb(certain.least)}, for weights and inputs", f"smaller {sizes}")  # fmt: skip
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


def _basis(one: Estimate) -> str:
    """The sizes and the rates that an estimate is of."""
    size, rates = one.sizes, one.rates
    work = f"{count(one.implementations, 'implementation')}, {size.flops / 1e9:.3g} GFLOP a call, {_gb(size.weights)} of weights"
    return f"{work}; assumed: {rates.flops / 1e9:.3g} GFLOP/s, {rates.bytes / 1e9:.3g} GB/s, no kernel to compile"


def _longer(step: float) -> int:
    """A limit, in whole minutes, that the estimate of a step does not reach, even where it is wrong."""
    return min(60 * math.ceil(WITHIN * step / 60), LONGEST)


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.2g} GB" if amount < 10e9 else f"{amount / 1e9:.0f} GB"
