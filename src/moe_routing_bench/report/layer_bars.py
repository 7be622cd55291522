"""What layers, layers forward and backward, and whole models set out to reach on one H200. Pure functions; no torch.

`OURS` need no other package. Layers whose products are QuACK's behind our routing (`AROUND_QUACK`) are a rival there, and
are ours in the lines that say so. Of the compulsory bytes of a decoding layer all but a thousandth are weights of active experts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.comparison import ratios, regret
from moe_routing_bench.comparison.regret import as_chosen, entries
from moe_routing_bench.report.bars import (
    AT_MOST,
    PERCENT,
    PERCENT_MORE,
    Bar,
    Figure,
    Level,
    Row,
    Values,
    against,
    own_figure,
    uneven,
)
from moe_routing_kernels import choices

OURS = ("cute", "cute_gather", "cute_dependent", "triton", "triton_gather")
AROUND_QUACK = ("cute_quack", "cute_quack_gather")
_BASELINE = "torch_grouped_mm"
QWEN, _DEEPSEEK = {"model": "qwen3-30b-a3b"}, {"model": "deepseek-v3"}
_WIDE = {"hidden": 4096, "intermediate": 1024, "experts": 128, "top_k": 8}


def labelled(*found: Mapping[str, Any]) -> dict[str, Values]:
    """Cells by their labels: the model or the sizes, the number of tokens, and the skew where one is named."""
    labels = {}
    for one in found:
        sizes = " ".join(
            f"{name}{one[key]}"
            for name, key in (("H", "hidden"), ("I", "intermediate"), ("E", "experts"), ("k", "top_k"))
            if key in one
        )
        labels[f"{one.get('model', sizes)} T={one['tokens']}"] = one
    return labels


LARGE = labelled(
    QWEN | {"tokens": 16384},
    _WIDE | {"tokens": 32768},
    _DEEPSEEK | {"tokens": 8192},
    {"model": "mixtral-8x7b", "tokens": 8192},
)
PREFILL = LARGE | labelled(
    QWEN | {"tokens": 4096},
    *(
        {"model": model, "tokens": tokens}
        for model in ("olmoe-1b-7b", "gpt-oss-120b", "qwen3-next-80b-a3b")
        for tokens in (4096, 16384)
    ),
)
DECODE = labelled(*(one | {"phase": "decode", "tokens": tokens} for tokens in (1, 8, 64) for one in (QWEN, _DEEPSEEK)))
TRAINING = labelled(*({"model": one, "tokens": 4096} for one in ("qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b")))
MODELS = labelled(
    *(
        {"model": one, "phase": "decode", "tokens": 1}
        for one in ("olmoe-1b-7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite", "qwen3-30b-a3b")
    )
)
UNEVEN = {f"load CV {skew:g}": QWEN | {"tokens": 16384, "skew": (0.0, skew)} for skew in (0.7, 1.7)}


def _others(ours: Collection[str]) -> Callable[[str], bool]:
    return lambda name: name not in (*ours, AUTO)


def _regret(kind: int, rows: Sequence[Row]) -> Figure | None:
    """The time of what `auto` chooses over the least of all, by the shipped table; `kind` is that of `regret.KINDS`."""
    shipped = choices.load()
    # As objects: to find out what a column holds takes longer than what is done with it.
    own = as_chosen(pd.DataFrame({name: [row[name] for row in rows] for name in regret.NEEDED}, dtype=object))
    found = regret.lines(entries(own, ""), shipped)
    if len(found) != 1:
        return None
    by_name = dict(zip(own["implementation"], own.index, strict=True))
    chosen, best = (
        dict(rows[by_name[name]]) | {"implementation": name} for name in (found[0].choices[kind].name, found[0].best)
    )
    return Figure(
        ratios.speed(chosen, best), (chosen, best), f"{chosen['implementation']}, the best is {best['implementation']}"
    )


def _of_layers(what: str, ours: Collection[str]) -> list[Bar]:
    """The bars of a prefill, for a set of implementations that counts as ours."""
    return [
        Bar(
            f"{what}: speed over the fastest other",
            "layer",
            partial(against, ours, _others(ours)),
            Level(1.05, 0.95),
            Level(1.15),
            PREFILL,
        ),
        Bar(
            f"{what}: speed over torch sort and grouped_mm",
            "layer",
            partial(against, ours, _BASELINE.__eq__),
            Level(1.6),
            Level(1.9),
            PREFILL,
        ),
        Bar(
            f"{what}: time over its own two dense products, sustained",
            "layer",
            partial(own_figure, "over_dense", ratios.multiple, ours),
            Level(each=(1.20, 1.12, 1.25, 1.08)),
            Level(each=(1.12, 1.06, 1.15, 1.04)),
            LARGE,
            side=AT_MOST,
        ),
    ]


BARS = (
    *_of_layers("layer", OURS),
    *_of_layers("layer, QuACK's products among ours", (*OURS, *AROUND_QUACK)),
    Bar(
        "layer forward and backward: speed over SonicMoE",
        "training",
        partial(against, ("ops",), "sonicmoe".__eq__),
        Level(each=1.0),
        Level(each=1.1),
        TRAINING,
    ),
    Bar(
        "layer, decode: bytes of active weights over time, of copy",
        "layer",
        partial(own_figure, "share_of_copy", ratios.share, OURS),
        Level(each=(0.60, 0.60, 0.75, 0.75, 0.80, 0.80)),
        Level(each=(0.80, 0.80, 0.85, 0.85, 0.90, 0.90)),
        DECODE,
        unit=PERCENT,
    ),
    Bar(
        "layer, uneven loads: time over balanced, less 1",
        "layer",
        partial(uneven, OURS),
        Level(each=(1.08, 1.20)),
        Level(each=(1.04, 1.12)),
        UNEVEN,
        side=AT_MOST,
        unit=PERCENT_MORE,
    ),
    *(
        Bar(
            f"auto, chosen {kind}: regret against the best measured",
            "layer",
            partial(_regret, i),
            Level(1.03, 1.15),
            Level(1.01, 1.08),
            side=AT_MOST,
            mean=ratios.mean,
            joined="in the mean",
            unit=PERCENT_MORE,
        )
        for i, kind in enumerate(regret.KINDS)
    ),
    Bar(
        "model, one token: speed over the better of batched_mm and grouped_mm",
        "model",
        partial(against, ("ops",), ("transformers_batched_mm", "transformers_grouped_mm").__contains__),
        Level(1.3),
        Level(2.0),
        MODELS,
    ),
)
