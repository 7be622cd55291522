"""The figures: a literal table; each is one file with a pure function ``draw(table) -> matplotlib Figure``. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Figure:
    """A figure's name (file and rule name), module below this package, title and caption."""

    name: str
    module: str
    title: str
    caption: str


_TABLE = (
    Figure("bandwidth", "bandwidth", "Bandwidth per stage", "Compulsory bytes over time against the traffic of the call, one panel a stage; dashed: the median copy bandwidth measured in the same processes. Error bars: 95 % confidence interval of the median time. A logarithmic axis where points lie far below the copy."),
    Figure("stage_share", "stage_share", "Where the layer's time goes", "Time of router, permute, pack, experts and combine, each stage timed on its own, as a share of their sum; the label is the median time of the whole layer with its 95 % confidence interval. One cell of each model first."),
    Figure("load_cv", "load_cv", "Load imbalance and drops against skew", "Left: realised coefficient of variation of tokens per expert against the target; a group-limited router (DeepSeek-V3, 256 experts) overrides part of the drawn assignment and so leaves the line. Right: share of assignments over capacity, which are dropped."),
    Figure("pareto", "pareto", "Layer time against drops and padding", "Layer time of one shape (the one measured at most capacity factors and skews), one column a skew; every point is a capacity factor and implementation, with the 95 % confidence interval of its median time. The dashed line joins the Pareto front: no other point is both faster and drops (above) or pads (below) less."),
    Figure("speedup", "speedup", "Speed-up over the torch baseline", "Median time of the bench's baseline over that of the implementation, paired within rounds, as the median over skew, capacity, dtype, layout and router; blank: not ok or not asked for; ≈: not told apart from the baseline."),
    Figure("roofline", "roofline", "Roofline", "Left: layer throughput against arithmetic intensity under the measured copy bandwidth and matrix peak. Right: share of the measured copy bandwidth of the stages that only move data."),
)  # fmt: skip
FIGURES: Mapping[str, Figure] = MappingProxyType({figure.name: figure for figure in _TABLE})
