"""Which expert serves which domain, for a few routers and every layer."""

import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from moe_routing_bench.figures import quality_rows, style
from moe_routing_bench.figures import quality_style as quality
from moe_routing_bench.quality.comparison.specialisation import mean_bits

TITLE = "Expert specialisation"
SHOWN = ("softk", "switch_top1", "deepseek_v3_small", "hash_balanced", "hash_position", "expert_choice")
_MOST = 3.0  # times as often as an average byte: the end of the scale


def draw(table: pd.DataFrame) -> Figure:
    """Rows: routers. Columns: layers. Each map is domains by experts."""
    rows = quality_rows.finals(table, "load_by_domain")
    rows = rows[rows["domains"].map(len) > 1] if len(rows) else rows
    contests = quality_rows.contests(rows)
    if not contests:
        return quality.nothing(TITLE, rows, quality_rows.why(table, "the loads of several domains"))
    title, group = max(contests, key=lambda contest: contest[1]["router"].nunique())
    by_name = dict(quality_rows.ordered(group))
    chosen = [name for router in SHOWN for name, one in by_name.items() if one["router"].iloc[0] == router]
    chosen = (chosen or list(by_name))[: len(SHOWN)]
    first = {name: by_name[name].sort_values("seed").iloc[0] for name in chosen}
    columns = max(len(row["load_by_domain"]) for row in first.values())
    experts = max(len(layer[0]) for row in first.values() for layer in row["load_by_domain"])
    figure, panels = style.canvas(
        len(chosen), columns, max(8, columns * (1.4 + 0.16 * experts)), 1.0 + 1.35 * len(chosen)
    )
    norm, image = TwoSlopeNorm(1, 0, _MOST), None
    for number, (name, row) in enumerate(first.items()):
        bits = [mean_bits(loads) for loads in by_name[name]["load_by_domain"]]
        mean, half = quality_rows.interval(pd.Series(bits))
        for layer in range(columns):
            axes = panels[number * columns + layer]
            if layer >= len(row["load_by_domain"]):
                axes.set_axis_off()
                continue
            ratio = times_average(counts(row["load_by_domain"][layer]))
            order = np.argsort(-ratio[0], kind="stable")
            image = axes.imshow(ratio[:, order], norm=norm, cmap="RdBu_r", aspect="auto", interpolation="nearest")
            axes.grid(False)
            axes.set_xticks([])
            axes.set_yticks(range(len(ratio)), list(row["domains"]) if layer == 0 else [""] * len(ratio), fontsize=7)
            heading = (
                f"{name}: {mean:z.3f} ± {half:.3f} bits (n = {len(bits)})\nlayer 0" if layer == 0 else f"layer {layer}"
            )
            axes.set_title(heading, fontsize=7.5, loc="left")
            if number == len(chosen) - 1:
                axes.set_xlabel(f"experts, those of {row['domains'][0]} first", fontsize=7)
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.6, pad=0.01, extend="max")
        bar.set_label("choices of this expert:\na domain's byte over an average byte", fontsize=7)
        bar.ax.tick_params(labelsize=7)
    return quality.finish(figure, f"{TITLE}\n{title}", pd.concat(by_name[name] for name in chosen))


def counts(layer: object) -> np.ndarray:
    """Choices (domains, E), float64, of one layer as Arrow gives them."""
    return np.array([list(domain) for domain in layer], dtype=float)  # type: ignore[attr-defined]


def times_average(choices: np.ndarray) -> np.ndarray:
    """P(expert | domain) / P(expert) of counts (domains, E); 1 for an expert that nobody chose."""
    given = choices / choices.sum(1, keepdims=True)
    alone = choices.sum(0) / choices.sum()
    return np.divide(given, alone, out=np.ones_like(given), where=alone > 0)
