"""Coverage of intervals, false verdicts on equals and power, by simulation: `python docs/coverage.py` writes docs/coverage.csv.

Each kind of noise is simulated as the protocol sees it: twenty rounds of short turns, or forty where the interval is not narrow yet, or
six long turns of four blocks; then the intervals of a run of 150 pairs as `collect` makes them, or leaves them out; `alone` has those of times
by a row that knows of no run. `stored_tables.coverage` makes the table of
docs/method.md from the file.
"""

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from moe_routing_bench.comparison import slow_noise, verdicts
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.intervals import half_width, paired_ratio, time_interval, turn_medians
from moe_routing_bench.measure.sampling import TURNS

OUT = Path(__file__).with_name("coverage.csv")
SEED = 49
ROUNDS, MOST = Settings.min_blocks, Settings.max_blocks
PER_TURN = -(-ROUNDS // TURNS)
SLOWER = (1.0, 1.01, 1.02, 1.05)  # equals, and slowdowns to be found
TWINS = 30  # of a run, and pairs of each slowdown
Draw = Callable[
    [np.random.Generator, int], np.ndarray
]  # noise of so many blocks, or of the blocks of so many turns, in units of `scale`


@dataclass(frozen=True)
class Noise:
    """`own` noise of each implementation and `shared` noise of a round, in shares of the time: `scale` times the draw. `placed`: the
    spread of a constant of each entry, as from where its buffers lie, drawn from t with `tails` degrees of freedom."""

    name: str
    own: Draw
    shared: Draw = lambda generator, n: np.zeros(n)
    scale: float = 0.002
    placed: float = 0.0005
    tails: float = np.inf
    long: int = 0  # turns, 0 for short ones
    rounds: tuple[int, ...] = (ROUNDS, MOST)  # of short turns, at which it is looked whether the intervals are narrow


def white(generator: np.random.Generator, n: int) -> np.ndarray:
    """Independent N(0, 1) values."""
    return generator.normal(size=n)


def heavy(generator: np.random.Generator, n: int) -> np.ndarray:
    """Independent values of Student's t with 2 degrees of freedom, whose variance is infinite."""
    return generator.standard_t(2, n)


def chained(r: float) -> Draw:
    """N(0, 1) values, each correlated with the one before."""

    def draw(generator: np.random.Generator, n: int) -> np.ndarray:
        values = generator.normal(size=n)
        for i in range(1, n):
            values[i] = r * values[i - 1] + np.sqrt(1 - r * r) * values[i]
        return values

    return draw


def drift(generator: np.random.Generator, n: int) -> np.ndarray:
    """A slope, of 3 units over the rounds in the root mean square, with white noise."""
    return generator.normal() * 3 * np.linspace(-0.5, 0.5, n) + generator.normal(size=n)


def step(generator: np.random.Generator, n: int) -> np.ndarray:
    """A step of 3 units at a random round, with white noise; zero in the mean over time."""
    level = 3.0 * (np.arange(n) >= generator.integers(1, n))
    return level - level.mean() + generator.normal(size=n)


def spikes(generator: np.random.Generator, n: int) -> np.ndarray:
    """White noise, and a tenth of the blocks is longer by about 10 units; zero in the median."""
    return generator.normal(size=n) + 10 * np.abs(generator.normal(size=n)) * (generator.random(n) < 0.1) - 0.139


def turned(spread: float, r: float = 0.0, level: Draw = white) -> Draw:
    """Blocks of long turns: a constant of each turn, of this spread, and N(0, 1) values within it that are correlated."""

    def draw(generator: np.random.Generator, turns: int) -> np.ndarray:
        levels = level(generator, turns)
        return np.concatenate([spread * level + chained(r)(generator, PER_TURN) for level in levels])

    return draw


def heated(generator: np.random.Generator, turns: int) -> np.ndarray:
    """White noise, a slope of 3 units over the cell, and the place of a turn in its order: first in one, last in the next."""
    order, slope, found = generator.random(), generator.normal() * 3, []
    for turn in range(turns):
        order = 1 - order if turn % 2 else generator.random()
        found.append(slope * ((turn + order) / turns - 0.5) + generator.normal(size=PER_TURN))
    return np.concatenate(found)


NOISES = (
    Noise("independent", white),
    Noise("correlated, r = 0.3", chained(0.3)),
    Noise("correlated, r = 0.5", chained(0.5)),
    Noise("correlated, r = 0.8", chained(0.8)),
    Noise("correlated, r = 0.9", chained(0.9)),
    Noise("r = 0.8, shared by a round", white, lambda g, n: 5 * chained(0.8)(g, n)),
    Noise("slow drift", drift),
    Noise("a step", step),
    Noise("heavy tails", heavy),
    Noise("spikes", spikes),
    Noise("r = 0.9 under white noise", lambda g, n: chained(0.9)(g, n) + white(g, n)),
    Noise("r = 0.9 under white noise, 10 blocks", lambda g, n: chained(0.9)(g, n) + white(g, n), rounds=(10,)),
    Noise("3 blocks", white, rounds=(3,)),
    Noise("3 blocks, r = 0.5", chained(0.5), rounds=(3,)),
    Noise("3 blocks, r = 0.9", chained(0.9), rounds=(3,)),
    Noise("6 blocks", white, rounds=(6,)),
    Noise("6 blocks, heavy tails", heavy, rounds=(6,)),
    Noise("6 blocks, r = 0.5", chained(0.5), rounds=(6,)),
    Noise("6 blocks, r = 0.9", chained(0.9), rounds=(6,)),
    Noise("10 blocks, r = 0.5", chained(0.5), rounds=(10,)),
    Noise("10 blocks, r = 0.9", chained(0.9), rounds=(10,)),
    Noise("heavy placement", white, placed=0.001, tails=2),
    Noise("long turns, alike", turned(0.0), scale=0.01, long=TURNS),
    Noise("long turns that differ", turned(1.0, 0.3), scale=0.01, long=TURNS),
    Noise("long turns that differ, heavy tails", turned(1.0, 0.3, heavy), scale=0.01, long=TURNS),
    Noise("long turns, r = 0.9 within", turned(0.0, 0.9), scale=0.01, long=TURNS),
    Noise("long turns, r = 0.9 between", turned(1.0, 0.0, chained(0.9)), scale=0.01, long=TURNS),
    Noise("long turns, drift", heated, scale=0.01, long=TURNS),
    Noise("two long turns that differ", turned(1.0, 0.3), scale=0.01, long=2),
    Noise("long turns, as layers", turned(0.2, 0.2), scale=0.012, long=TURNS),
)


@dataclass(frozen=True)
class Pair:
    """Block times of two implementations as the protocol would measure them, the true times, and the turn of each block."""

    times: list[np.ndarray]
    truths: np.ndarray
    turns: list[int] | None

    def series(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The logarithms of both times and of their ratio, of blocks or turns."""
        logs = [*map(np.log, self.times), np.log(self.times[0] / self.times[1])]
        first, second, both = logs if self.turns is None else [turn_medians(each, self.turns) for each in logs]
        return first, second, both


def pair(noise: Noise, generator: np.random.Generator, slower: float = 1.0) -> Pair:
    """A pair of implementations, one of which takes `slower` times as long."""
    t = generator.standard_t(noise.tails, 2) if np.isfinite(noise.tails) else generator.normal(size=2)
    truths = np.exp(noise.placed * t) * 100 * np.array([1.0, slower])
    if noise.long:
        turns = [number for number in range(noise.long) for _ in range(PER_TURN)]
        return Pair([truth * np.exp(noise.scale * noise.own(generator, noise.long)) for truth in truths], truths, turns)
    whole, times = noise.scale * noise.shared(generator, noise.rounds[-1]), []
    own = [noise.own(generator, noise.rounds[-1]) for _ in truths]
    for n in noise.rounds:
        # the truth is that of the rounds that were sampled: drifts and steps go on
        times = [
            truth * np.exp(whole[:n] + noise.scale * (one[:n] - (one[:n].mean() if noise.own in (drift, step) else 0)))
            for truth, one in zip(truths, own, strict=True)
        ]
        if all(half_width(time_interval(one), 100) <= Settings.target_half_width for one in times):
            break
    return Pair(times, truths, None)


def judged(one: Pair, of_times: slow_noise.Shares | None, of_ratios: slow_noise.Shares | None) -> dict[str, object]:
    """The interval of the time, and the columns of the ratio, as `recomputed.with_intervals` makes them; `covers` and `ratio_covers` are
    None without an interval. `alone`: whether that of a row without a run covers."""
    (first, _, both), (truth, other) = one.series(), one.truths
    time, ratio = time_interval(one.times[0], one.turns), paired_ratio(*one.times, one.turns)
    alone = time and time[0] <= truth <= time[1]
    if of_times and slow_noise.hides(of_times, len(first)):
        time = None
    elif of_times and one.turns is None and (ends := slow_noise.interval(first, of_times)):
        time = (float(np.exp(ends[0])), float(np.exp(ends[1])))
    if of_ratios and slow_noise.hides(of_ratios, len(both)):
        ratio = (ratio[0], None, None, None)
    elif of_ratios and one.turns is None and (ends := slow_noise.interval(both, of_ratios)):
        ratio = (ratio[0], float(np.exp(ends[0])), float(np.exp(ends[1])), ends[2])
    width = half_width(time or (None, None), 100)
    return dict(zip(("", "_ci_low", "_ci_high", "_p"), ratio, strict=True)) | {
        "alone": alone,
        "covers": time and time[0] <= truth <= time[1],
        "ratio_covers": None if ratio[1] is None or ratio[2] is None else ratio[1] <= truth / other <= ratio[2],
        "width": width,
        "converged": width <= Settings.target_half_width,
    }


def run(noise: Noise, generator: np.random.Generator) -> pd.DataFrame:
    """The pairs of a run, judged by the noise floor of its twins."""
    twins = [pair(noise, generator) for _ in range(TWINS)]
    pairs = [(slower, pair(noise, generator, slower)) for slower in SLOWER for _ in range(TWINS)]
    series = [one.series() for one in (*twins, *(one for _, one in pairs))]
    known = (
        slow_noise.shares(dict(enumerate([s[:2] for s in series]))),
        slow_noise.shares(dict(enumerate([s[2:] for s in series]))),
    )
    found = pd.DataFrame([judged(one, *known) | {"slower": slower} for slower, one in pairs])
    gaps = [abs(np.log(paired_ratio(*one.times, one.turns)[0])) for one in twins]
    floor = pd.Series(verdicts.floor(pd.Series(gaps)), found.index)
    return found.assign(verdict=verdicts.of_pairs(found, "", floor))


def simulated(noise: Noise, runs: int, seed: int = SEED) -> dict[str, object]:
    """A line of the table: shares of all pairs of so many runs."""
    generator = np.random.default_rng([seed, *noise.name.encode()])
    found = pd.concat([run(noise, generator) for _ in range(runs)])
    told = found["verdict"].isin([verdicts.FASTER, verdicts.SLOWER]).groupby(found["slower"]).mean()
    return {
        "noise": noise.name,
        "pairs": len(found),
        "alone": found["alone"].dropna().mean(),
        "given": found["covers"].notna().mean(),
        "time": found["covers"].dropna().mean(),
        "ratios given": found["ratio_covers"].notna().mean(),
        "ratio": found["ratio_covers"].dropna().mean(),
        "half-width": found["width"][np.isfinite(found["width"])].median(),
        "converged": found["converged"].mean(),
        "false": told[1.0],
        **{f"{slower - 1:.0%}": told[slower] for slower in SLOWER[1:]},
    }


def text(value: object) -> object:
    """A number as the file has it; nothing for NaN."""
    return ("" if np.isnan(value) else f"{value:.4f}") if isinstance(value, float) else value


if __name__ == "__main__":
    lines = [simulated(noise, int(sys.argv[1]) if sys.argv[1:] else 34) for noise in NOISES]
    with OUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows({key: text(value) for key, value in line.items()} for line in lines)
