"""Draws the picture of README.md, the layer of its table by the number of tokens: `python docs/img/layers.py` rewrites it."""

import contextlib
import sys
from pathlib import Path

from moe_routing_bench.figures import paper
from moe_routing_bench.figures.chart import Chart
from moe_routing_bench.report import platform, platform_sections
from moe_routing_bench.report.platform_charts import plain
from moe_routing_bench.study import models

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("layers.png")
MODEL, PLATFORM, RUNS = "qwen3-30b-a3b", "nvidia-h200", ("nvidia-h200.decode", "nvidia-h200.layers")


def chart() -> Chart:
    """Ours and the fastest others over tokens, with even loads in bf16."""
    with contextlib.chdir(ROOT):
        sizes = {name: getattr(models()[MODEL], name) for name in platform_sections.SIZES}
        cells = platform_sections.of_model(platform.read(PLATFORM), sizes)
    found = platform_sections.preview(
        [one for one in cells if one.bench == "layer" and one.run in RUNS and plain(one) and not one.axes["skew"]]
    )
    assert found is not None, "the stored rows have no line over tokens"
    return found


def main(out: Path = PICTURE) -> None:
    """Write the picture."""
    paper.preview(chart(), f"Layer of {MODEL}, bf16, one NVIDIA H200", out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
