"""What trained rules and adapters reach: loss against speed, seconds and parameters, and balance of the loads against certainty."""

import numpy as np
import pandas as pd

from moe_routing_bench.figures import palette, row_groups, training_rows
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.grid.run_spec import VARIANTS
from moe_routing_bench.quality import compare, perft_summary
from moe_routing_bench.quantities import count

X, Y = "train_tokens_per_s", "bits_per_byte"
ENTROPY, LOAD = "gate_entropy", "load_cv"
_SPEED = Scale("trained bytes per second (more is better)"), Scale("validation bits per byte (less is better)")
_OWN_SPEED = tuple(Scale(f"{one.label}; own scale") for one in _SPEED)  # of rules that see later tokens
_SECONDS = Scale("training seconds (steps alone)", "log"), Scale("validation bits per byte")
_BOTH = "a loss, and a speed with the machine to itself"
_NO_ENTROPY = "an entropy and a load"
_CERTAINTY = Scale("entropy of the router's scores (nats per token)"), Scale("CV of choices per expert (0: balanced)")


def quality_pareto(table: pd.DataFrame) -> Chart:
    """The same crosses for the page; rules that see later tokens in panels of their own."""
    rows = compare.with_speeds(compare.alone(training_rows.finals(table, X, Y)))
    contests = training_rows.contests(rows)
    if not contests:
        return nothing("points", *_SPEED, rows, training_rows.why(table, _BOTH))
    found = [(title, name, group) for title, runs in contests for name, group in training_rows.ordered(runs)]
    records = [
        _mark(title, name, group) for title, name, group in sorted(found, key=lambda one: not one[2]["causal"].all())
    ]
    tints = {name: palette.router(group["router"].iloc[0]) for _, name, group in found}
    return Chart(
        "points",
        *_SPEED,
        _joined(marks(records)),
        tints,
        pd.concat(group for *_, group in found),
        note=f"speed: {compare.timed(rows)}",
        own={one["panel"]: _OWN_SPEED for one in records if training_rows.NOT_CAUSAL in one["panel"]},
        named=True,
        shared=True,
        level=True,
    )


def _joined(found: pd.DataFrame) -> pd.DataFrame:
    """The marks, with those of each panel's Pareto front joined, of causal rules alone."""
    causal = found[~found["panel"].str.contains(training_rows.NOT_CAUSAL)]
    fronts = [row_groups.front(group.assign(slow=-group["x"]), "slow", "y") for _, group in causal.groupby("panel")]
    return found.assign(join=pd.Series("front", index=pd.concat(fronts).index)) if fronts else found


def _mark(title: str, name: str, group: pd.DataFrame) -> dict[str, object]:
    (x, x_half), (y, half) = training_rows.interval(group[X]), training_rows.interval(group[Y])
    x_half = max(x_half, _of_blocks(group))
    panel = (
        title
        if group["causal"].all()
        else f"{title}: {training_rows.NOT_CAUSAL} rules that see later tokens (own scale)"
    )
    return {
        "panel": panel,
        "series": name,
        "x": x,
        "y": y,
        "x_low": x - x_half,
        "x_high": x + x_half,
        "low": y - half,
        "high": y + half,
        "says": f"n = {len(group)} seeds",
    }


def _of_blocks(rows: pd.DataFrame) -> float:
    """Half of the interval of a speed that was taken once, from its blocks of steps; 0 where none is known."""
    halves = (rows[X] * rows["step_half_width_ms"] / rows["step_ms"]).fillna(0)
    return float(np.sort(halves.to_numpy(float)).mean())


def loss_seconds(table: pd.DataFrame) -> Chart:
    """Mean loss over seeds of causal rules at every evaluation, against the bytes seen until then over the rule's speed."""
    timed = compare.with_speeds(compare.alone(training_rows.finals(table, X, Y)))
    timed = timed[timed["causal"].astype(bool)]
    contests = training_rows.contests(timed)
    if not contests:
        return nothing("lines", *_SECONDS, timed, training_rows.why(table, _BOTH))
    every = training_rows.history(table, "bits_per_byte")
    records, routers, shown = [], [], []
    for title, runs in contests:
        speeds = runs.groupby("contestant")["train_tokens_per_s"].mean()
        for name, group in training_rows.ordered(every[every["run"].isin(set(runs["run"]))]):
            routers.append((name, group["router"].iloc[0]))
            for seen, values in group.groupby("tokens_seen")["bits_per_byte"]:
                mean, half = training_rows.interval(values)
                end = seen == group["tokens_seen"].max()
                says = f"{seen / 1e6:.3g} MB seen" + (", end of the schedule" if end else "")
                records.append(
                    {
                        "panel": title,
                        "series": name,
                        "x": seen / speeds[name],
                        "y": mean,
                        "low": mean - half,
                        "high": mean + half,
                        "says": says,
                    }
                )
        shown.append(runs)
    tints = {name: palette.router(router) for name, router in routers}
    rows = pd.concat(shown)
    return Chart(
        "lines",
        *_SECONDS,
        marks(records),
        tints,
        rows,
        note=f"speed: {compare.timed(rows)}",
        named=True,
        shared=True,
        level=True,
    )


def gate_balance(table: pd.DataFrame) -> Chart:
    """A cross per rule, its mean with the intervals over seeds, in a panel per number of experts, whose name says the entropy of equal scores."""
    rows = training_rows.finals(table, ENTROPY, LOAD)
    contests = training_rows.contests(rows)
    if not contests:
        return nothing("points", *_CERTAINTY, rows, training_rows.why(table, _NO_ENTROPY))
    found, tints = [], {}
    for title, group in contests:
        panel = f"{title}; entropy of equal scores: {np.log(group['experts'].iloc[0]):.2f}"
        for name, runs in training_rows.ordered(group):
            tints[name] = palette.router(runs["router"].iloc[0])
            (x, x_half), (y, half) = training_rows.interval(runs[ENTROPY]), training_rows.interval(runs[LOAD])
            found.append(
                {
                    "panel": panel,
                    "series": name,
                    "x": x,
                    "y": y,
                    "x_low": x - x_half,
                    "x_high": x + x_half,
                    "low": y - half,
                    "high": y + half,
                    "says": f"n = {len(runs)} seeds",
                }
            )
    return Chart(
        "points",
        *_CERTAINTY,
        marks(found),
        tints,
        pd.concat(group for _, group in contests),
        named=True,
        shared=True,
        level=True,
        timed=False,
    )


_PANELS = (("params", "trainable parameters"), ("active_params", "trainable parameters that a token meets"))
_MISSING = "no final adaptation of a trained run"
_NEW_BITS = Scale("validation bits per byte of the new text (less is better)")


def perft(table: pd.DataFrame) -> Chart:
    """The same for the page: a line per variant through its ranks, in a panel per entry and way to count parameters."""
    found = perft_summary.summary(table)
    if found.empty:
        return nothing("lines", Scale("parameters", "log"), _NEW_BITS, table.iloc[:0], _MISSING)
    rows, records, own = perft_summary.finals(table), [], {}
    for label in found["label"].unique():
        about = _describe(rows[rows["label"] == label]).replace("\n", "; ")
        for column, name in _PANELS:
            panel = f"{about}; against {name}"
            own[panel] = (Scale(name, "log"), _NEW_BITS)
            for one in found[found["label"] == label].sort_values("rank").to_dict("records"):
                half = np.nan_to_num(one["bits_per_byte_half_width"])
                records.append(
                    {
                        "panel": panel,
                        "series": f"PERFT-{one['variant']}",
                        "x": one[column],
                        "y": one["bits_per_byte"],
                        "low": one["bits_per_byte"] - half,
                        "high": one["bits_per_byte"] + half,
                        "says": f"rank {one['rank']}, n = {one['seeds']} seeds",
                        "text": f"r={one['rank']}",
                    }
                )
    tints = palette.assigned(f"PERFT-{variant}" for variant in VARIANTS if variant in set(found["variant"]))
    return Chart(
        "lines", Scale("parameters", "log"), _NEW_BITS, marks(records), tints, rows, own=own, level=True, timed=False
    )


def _describe(rows: pd.DataFrame) -> str:
    """Base, texts, and what the frozen model has without adapters."""
    one, seeds = rows.iloc[0], rows["seed"].nunique()
    frozen = (rows["bits_per_byte"] + rows["gain"]).mean()
    texts = f"{' + '.join(one['old_domains'])} → {' + '.join(one['domains'])}"
    return f"{one['label']}: {one['router']}, E={one['experts']:.0f}, {one['base_params'] / 1e6:.3g} M frozen parameters, {texts}\nwithout adapters {frozen:.3f} bits per byte; n = {count(seeds, 'seed')}"
