"""The ceilings of a CPU, and its limits, below which no time can be.

Ceilings are measured whole once for the cells of a warm server, and scaled by a short probe before and after each cell.
Whole, they take longer than a tiny cell. What is known of an earlier cell counts only with the same threads on the same CPUs, for ten
minutes, and while the probe takes about as long as it did then: a clock or a load that has changed is measured again. The probe
alternates copies with products, so that both see the same tenth of a second, and knows its own noise: on a machine that others use, two
probes of the same state differ by more than what is a drift on a GPU.

Limits are what the caches and the arithmetic allow, as measured in the same process. The cache is warm, so the bandwidth is that of the
fastest of several sizes, and far more than that of memory: this finds a time without work, not a time that is a little too short.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from time import perf_counter  # by its own name, as in `timers`
from typing import Any

import torch

from moe_routing_bench.measure.calibration import timed

MOST_SECONDS = 600.0  # that the machine was on, suspended or not
MOST_CHANGE = 0.25  # of a probe, up to which ceilings are taken to change as it does
_WHOLE, _SHORT = 8 << 20, 2 << 20  # elements of a copy
_WHOLE_SIDE, _SHORT_SIDE = 768, 256  # of a product
_SIZES = (
    1 << 14,
    1 << 16,
    1 << 18,
    1 << 20,
)  # bytes of a copy, from what the first cache holds to what the last one does
_BYTES_SLACK = 4.0  # the first cache is up to so much faster than a copy by torch, whose call takes time too
_FLOPS_SLACK = 2.0
_SIDE = 512  # of the matrices
_PROBES = 25  # copies, and products, of a probe
_SURE = 8  # between so many from either end the median of 25 lies in 95.7 % of cases, whatever their distribution
_REPEATS = 5


class CpuCeilings:
    """Ceilings of a CPU: no stream and no graph. `known` is JSON: what an earlier cell has measured, or this one.

    `noise` is of the last measurement: the share by which the probe's median may be off, by the names of the ceilings.
    """

    noise: Mapping[str, float] = {}

    def __init__(self, known: dict[str, Any] | None = None) -> None:
        """Make the buffers of the probe."""
        self.known = known
        self._copy, self._product = _copy(_SHORT), _product(_SHORT_SIDE)

    @property
    def at(self) -> str | None:
        """When they were measured whole."""
        return self.known["at"] if self.known else None

    @property
    def limits(self) -> Sequence[float] | None:
        """`limits`, of the same time."""
        return self.known["limits"] if self.known else None

    def measure(self) -> dict[str, float]:
        """Row fields copy_, read_, write_gb_per_s, peak_tflops, launch_us, as the probe says that they are now."""
        probe, noise = self._probed()
        if not self.known or not self._holds(self.known, probe):
            self.known = _surroundings() | {
                "rates": _whole(),
                "limits": limits(),
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "clock": time.clock_gettime(time.CLOCK_BOOTTIME),
            }
            probe, noise = self._probed()
            self.known["probe"] = probe
        copy, product = (now / then for now, then in zip(probe, self.known["probe"], strict=True))
        scales = {"peak_tflops": product, "launch_us": 1.0}
        self.noise = {name: noise[name == "peak_tflops"] for name in self.known["rates"]}
        return {name: rate * scales.get(name, copy) for name, rate in self.known["rates"].items()}

    def sustained(self, *_: Any) -> dict[str, float]:
        """Nothing: no power limit is known of a CPU."""
        return {}

    def _probed(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Copies and products per second; and by what share each may be off."""
        pairs = [[timed(call, "cpu", repeats=1) for call in (self._copy, self._product)] for _ in range(_PROBES)]
        copies, products = (sorted(times) for times in zip(*pairs, strict=True))
        return (1 / median(copies), 1 / median(products)), (_off(copies), _off(products))

    @staticmethod
    def _holds(known: dict[str, Any], probe: tuple[float, float]) -> bool:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - known["clock"]
        changes = [abs(now / then - 1) for now, then in zip(probe, known["probe"], strict=True)]
        same = all(known[name] == value for name, value in _surroundings().items())
        return same and 0 <= age <= MOST_SECONDS and max(changes) <= MOST_CHANGE


def _off(times: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the median of sorted times, as a share of it."""
    return math.log(times[-_SURE] / times[_SURE - 1]) / 2


def _surroundings() -> dict[str, Any]:
    return {"threads": torch.get_num_threads(), "cpus": sorted(os.sched_getaffinity(0))}


def _whole() -> dict[str, float]:
    source, a = torch.ones(_WHOLE), torch.randn(_WHOLE_SIDE, _WHOLE_SIDE)
    target, size = torch.empty_like(source), source.numel() * source.element_size()
    return {
        "copy_gb_per_s": 2 * size / timed(lambda: target.copy_(source), "cpu") / 1e9,
        "read_gb_per_s": size / timed(source.sum, "cpu") / 1e9,
        "write_gb_per_s": size / timed(lambda: target.fill_(1), "cpu") / 1e9,
        "peak_tflops": 2 * _WHOLE_SIDE**3 / timed(lambda: a @ a, "cpu") / 1e12,
        "launch_us": timed(lambda: a[0, 0].add_(0), "cpu", 20) * 1e6,
    }


def _copy(elements: int) -> Callable[[], object]:
    source = torch.ones(elements)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(side: int) -> Callable[[], object]:
    a = torch.randn(side, side)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


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
