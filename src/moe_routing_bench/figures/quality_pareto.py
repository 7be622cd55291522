"""Quality against training speed; rules that see later tokens in panels of their own."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.grid.run_spec import DENSE
from moe_routing_bench.quality import compare

X, Y = "train_tokens_per_s", "bits_per_byte"
TITLE = "Quality against training speed"
_SCALES = Scale("trained bytes per second (more is better)"), Scale("validation bits per byte (less is better)")


def draw(table: pd.DataFrame) -> Figure:
    """One row per number of experts; causal rules left, the others right."""
    rows = compare.with_speeds(quality_rows.finals(table, X, Y))
    contests = quality_rows.contests(rows)
    figure, axes, found = quality.panels(contests, 2, 13, 4.6)
    if not contests:
        style.empty(axes[0], quality_rows.why(table, "a loss and a speed"))
        return quality.finish(figure, TITLE, rows, timed=True)
    for title, group, (left, right) in found:
        causal = group["causal"].astype(bool)
        _panel(left, group[causal], f"{title}\ncausal rules")
        _panel(
            right,
            group[~causal],
            f"{quality_rows.NOT_CAUSAL} rules that see later tokens\n(own scale: their loss means something else)",
        )
    shown = pd.concat(group for _, group in contests)
    blocks = ", 95 % CI over its blocks" if shown["step_half_width_ms"].notna().any() else ""
    return quality.finish(figure, TITLE, shown, f"speed: {compare.timed(shown)}{blocks}", timed=True)


def chart(table: pd.DataFrame) -> Chart:
    """The same crosses for the page; rules that see later tokens in panels of their own."""
    rows = compare.with_speeds(quality_rows.finals(table, X, Y))
    contests = quality_rows.contests(rows)
    if not contests:
        return nothing("points", *_SCALES, rows, quality_rows.why(table, "a loss and a speed"))
    found = [(title, name, group) for title, runs in contests for name, group in quality_rows.ordered(runs)]
    records = [_mark(title, name, group) for title, name, group in sorted(found, key=lambda one: not one[2]["causal"].all())]  # fmt: skip
    tints = {name: quality.color(group["router"].iloc[0]) for _, name, group in found}
    return Chart("points", *_SCALES, _joined(marks(records)), tints, pd.concat(group for *_, group in found), note=f"speed: {compare.timed(rows)}")  # fmt: skip


def _joined(found: pd.DataFrame) -> pd.DataFrame:
    """The marks, with those of each panel's Pareto front joined, of causal rules alone."""
    causal = found[~found["panel"].str.contains(quality_rows.NOT_CAUSAL)]
    fronts = [style.front(group.assign(slow=-group["x"]), "slow", "y") for _, group in causal.groupby("panel")]
    return found.assign(join=pd.Series("front", index=pd.concat(fronts).index)) if fronts else found


def _mark(title: str, name: str, group: pd.DataFrame) -> dict[str, object]:
    (x, x_half), (y, half) = quality_rows.interval(group[X]), quality_rows.interval(group[Y])
    x_half = max(x_half, _of_blocks(group))
    panel = (
        title
        if group["causal"].all()
        else f"{title}: {quality_rows.NOT_CAUSAL} rules that see later tokens (own scale)"
    )
    return {"panel": panel, "series": name, "x": x, "y": y, "x_low": x - x_half, "x_high": x + x_half, "low": y - half, "high": y + half, "says": f"n = {len(group)} seeds"}  # fmt: skip


def _of_blocks(rows: pd.DataFrame) -> float:
    """Half of the interval of a speed that was taken once, from its blocks of steps; 0 where none is known."""
    return float((rows[X] * rows["step_half_width_ms"] / rows["step_ms"]).fillna(0).mean())


def _panel(axes: Axes, rows: pd.DataFrame, title: str) -> None:
    if rows.empty:
        style.empty(axes, "no such rule was trained")
        return
    found = [
        (name, group["router"].iloc[0], *quality.cross(axes, group, X, Y, _of_blocks(group)))
        for name, group in quality_rows.ordered(rows)
    ]
    for _, router, x, y in found:
        if router == DENSE:
            axes.axvline(x, color="0.3", lw=0.8, ls=":")
            axes.axhline(y, color="0.3", lw=0.8, ls=":")
    if rows["causal"].all():
        edge = style.front(pd.DataFrame({"slow": -x, "y": y} for *_, x, y in found), "slow", "y")
        axes.step(-edge["slow"], edge["y"], where="post", color="0.2", lw=1, ls="--")
    axes.margins(0.08)
    quality.frame(axes, [x for *_, x, _ in found], [y for *_, y in found])
    axes.set(xlabel="trained bytes per second (more is better)", ylabel="validation bits per byte (less is better)")
    axes.set_title(title, fontsize=9)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k")
    quality.label(axes, [(x, y, name, quality.color(router)) for name, router, x, y in found])
