"""The figures: a literal table; each is one file with a pure function ``draw(table) -> matplotlib Figure``. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Figure:
    """A figure's name (file and rule name), module below this package, title, caption, and the table that it draws.

    `source` is the name of that table's Parquet file: "measurements", "quality" for the training runs, or "perft" for the
    adaptations of these.
    """

    name: str
    module: str
    title: str
    caption: str
    source: str = "measurements"


_TABLE = (
    Figure("bandwidth", "bandwidth", "Bandwidth per stage", "Compulsory bytes over time against the traffic of the call, one panel a stage; dashed: the median copy bandwidth measured in the same processes. Error bars: 95 % confidence interval of the median time. A logarithmic axis where points lie far below the copy."),
    Figure("stage_share", "stage_share", "Where the layer's time goes", "Time of router, permute, pack, experts and combine, each stage timed on its own, as a share of their sum; the label is the median time of the whole layer with its 95 % confidence interval. One cell of each model first."),
    Figure("load_cv", "load_cv", "Load imbalance and drops against skew", "Left: realised coefficient of variation of tokens per expert against the target; a group-limited router (DeepSeek-V3, 256 experts) overrides part of the drawn assignment and so leaves the line. Right: share of assignments over capacity, which are dropped."),
    Figure("pareto", "pareto", "Layer time against drops and padding", "Layer time of one shape (the one measured at most capacity factors and skews), one column a skew; every point is a capacity factor and implementation, with the 95 % confidence interval of its median time. The dashed line joins the Pareto front: no other point is both faster and drops (above) or pads (below) less."),
    Figure("speedup", "speedup", "Speed-up over the torch baseline", "Median time of the bench's baseline over that of the implementation, paired within rounds, as the median over skew, capacity, dtype, layout and router; blank: not ok or not asked for; ≈: not told apart from the baseline."),
    Figure("roofline", "roofline", "Roofline", "Left: layer throughput against arithmetic intensity under the measured copy bandwidth and matrix peak. Right: share of the measured copy bandwidth of the stages that only move data."),
    Figure("quality_pareto", "quality_pareto", "Quality against speed", "Validation bits per byte (routing without a capacity limit) against bytes trained on a second; crosses: mean and 95 % confidence interval over seeds. The star is a dense model of equal active FLOPs, with dotted lines through it; the dashed line joins the Pareto front of the causal rules. Rules that see later tokens (†) have a panel of their own: their loss is not comparable. An interval may run out of the panel.", "quality"),
    Figure("training_curves", "training_curves", "Training curves", "Validation bits per byte against bytes trained on, mean over seeds with its 95 % confidence interval. Middle: difference to the dense model, or where there is none to the best rule, paired by seed. Rules that see later tokens (†) apart.", "quality"),
    Figure("training_load_cv", "training_load_cv", "Load imbalance over training", "Coefficient of variation of the choices per expert over the validation bytes, without a capacity limit, mean over layers; band: 95 % confidence interval over seeds. Dashed: rules that see later tokens (†).", "quality"),
    Figure("quality_drops", "quality_drops", "Drops of trained routers against capacity", "Share of the validation choices, as trained rules make them without a capacity, that one of this factor would not take: mean over seeds with its 95 % confidence interval. Grey: the factor in training. Black: what independent uniform choices would leave over, the expected excess of a binomial over the capacity; only a rule that balances can stay below it. Dashed: rules that see later tokens (†).", "quality"),
    Figure("specialisation", "specialisation", "Expert specialisation", "How often the bytes of a domain go to an expert, over how often an average byte does, by layer, in the run of the first seed; experts are ordered by the first domain. Above: the mutual information of a choice's expert and its byte's domain, mean over layers and seeds, with its 95 % confidence interval. A few rules of the config with the most.", "quality"),
    Figure("gate_balance", "gate_balance", "Balance against certainty", "Load coefficient of variation against the entropy of the router's scores, both over the validation bytes and mean over layers; crosses: mean and 95 % confidence interval over seeds. Dotted: the entropy of equal scores. Hollow: rules that see later tokens (†).", "quality"),
    Figure("networks", "networks", "Router networks", "Validation bits per byte by the network that gives the router's logits, one panel a rule; grey: the runs of one seed, which saw the same bytes; points: mean and 95 % confidence interval over seeds.", "quality"),
    Figure("train_modes", "train_modes", "Learning to specialise", "What expert and domain tell about each other (above) and validation bits per byte (below) when router and experts learn together (joint), when the router stays as it starts (frozen_router), and when experts learn first and the router after them (experts_first); grey: the runs of one seed, which saw the same bytes; points: mean and 95 % confidence interval over seeds.", "quality"),
    Figure("perft", "perft", "Routed fine-tuning", "Validation bits per byte of a new text after low-rank adapters beside a frozen trained model learned it, against the parameters that were trained (left) and those of them that a token meets (right). Points: mean and 95 % confidence interval over seeds, dots: seeds.", "perft"),
)  # fmt: skip
FIGURES: Mapping[str, Figure] = MappingProxyType({figure.name: figure for figure in _TABLE})
