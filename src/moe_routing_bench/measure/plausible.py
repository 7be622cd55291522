"""Times of a CPU that cannot be: below what its caches and its arithmetic allow, as measured in the same process.

The cache is warm, so the bandwidth is that of the fastest of several sizes, and far more than that of memory: this finds a time without
work, not a time that is a little too short.
"""

from collections.abc import Iterable, Sequence
from time import perf_counter  # by its own name, as in `timers`
from typing import Any

import torch

_SIZES = (
    1 << 14,
    1 << 16,
    1 << 18,
    1 << 20,
)  # bytes of a copy, from what the first cache holds to what the last one does
_BYTES_SLACK = 4.0  # the first cache is up to so much faster than a copy by torch, whose call takes time too
_FLOPS_SLACK = 2.0
_SIDE = 512  # of the matrices
_REPEATS = 5


def _seconds(call: Any, calls: int) -> float:
    """The least mean time of so many calls."""
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        for _ in range(calls):
            call()
        times.append((perf_counter() - start) / calls)
    return min(times)


def limits() -> tuple[float, float]:
    """Bytes per second, read and written, and FLOPs per second, that nothing exceeds on this CPU with the threads that torch has."""
    rates = []
    for size in _SIZES:
        source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        rates.append(2 * size / _seconds(lambda source=source, target=target: target.copy_(source), (1 << 21) // size))
    products = []
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(_SIDE, _SIDE, dtype=dtype)
        products.append(2 * _SIDE**3 / _seconds(lambda square=square: square @ square, 1))
    return _BYTES_SLACK * max(rates), _FLOPS_SLACK * max(products)


def judge(rows: Iterable[dict[str, Any]], cost: Any, known: Sequence[float] | None = None) -> None:
    """Give rows of `cost` the status `below_roofline`, with the reason, where their time is below these limits, or those that are known."""
    nbytes, flops = known or limits()
    floor = max((cost.read_bytes + cost.write_bytes) / nbytes, cost.flops / cost.rate / flops) * 1e6
    for row in rows:
        if row["median_us"] < floor:
            reason = f"{row['median_us']:.3g} us is below {floor:.3g} us, which the caches of this CPU take"
            row |= {"status": "below_roofline", "reason": reason}
