"""Select rows of AISimulate for config/published/aisimulate-h200.csv and scale/aisimulate-*.csv: `python docs/aisimulate.py FOLDER`.

FOLDER is `aisimulate_core/systems/data/h200_sxm` of an unpacked wheel (`pip download --no-deps aisimulate==0.13.0`). The rows keep the layout that
`moe-routing-bench report --rows` reads: a whole layer on one GPU has the name of its preset; a rank of tensor parallelism has the sizes of the
rank and no preset; with expert parallelism or uneven loads the name of the implementation says so.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from stored_tables import ROOT

from moe_routing_bench.config import presets

OUT = ROOT / "config/published/aisimulate-h200.csv"
SCALE = ROOT / "config/published/scale"  # times of dispatch and combine
TOKENS = (1, 8, 64, 1024, 4096, 8192, 16384)
SIZES = {"hidden": "hidden_size", "intermediate": "inter_size", "experts": "num_experts", "top_k": "topk"}
# their format: ours of weights, and of packed rows
FORMATS = {
    "bfloat16": ("bf16", "bf16"),
    "fp8_block": ("e4m3_block128", "fp8_block128"),
    "fp8": ("e4m3_tensor", "fp8_tensor"),  # one scale for a tensor: no format here, kept as data
    "int4_wo": ("int4_g128", "bf16"),
    "w4a16_mxfp4": ("mxfp4", "bf16"),
}
WHOLE = {  # presets by their format, with the numbers of tokens
    "bfloat16": {"qwen3-30b-a3b": TOKENS, "mixtral-8x7b": TOKENS, "qwen3-235b-a22b": TOKENS, "deepseek-v3": TOKENS},
    "fp8_block": {"qwen3-30b-a3b": TOKENS, "mixtral-8x7b": TOKENS, "qwen3-235b-a22b": TOKENS, "deepseek-v3": TOKENS},
    "fp8": {"qwen3-30b-a3b": (1, 64, 4096)},
    "int4_wo": {"qwen3-30b-a3b": TOKENS, "mixtral-8x7b": TOKENS, "deepseek-v3": TOKENS},
    "w4a16_mxfp4": {"gpt-oss-120b": TOKENS},
}
PARTS = ("qwen3-30b-a3b", "deepseek-v3")  # also with parallelism and uneven loads, at these numbers of tokens
PART_TOKENS, PART_FORMATS = (8, 4096), ("bfloat16", "fp8_block")
PARALLEL = ((2, 1), (8, 1), (1, 8))


def read(folder: Path) -> pd.DataFrame:
    """All rows of whole layers with what names them."""
    found = pd.concat(
        [pd.read_parquet(path) for path in sorted(folder.glob("moe/*/*/moe_perf.parquet"))], ignore_index=True
    )
    return found[found["framework"].notna()].assign(
        package=found["framework"].map({"VLLM": "vllm", "SGLang": "sglang", "TRTLLM": "tensorrt-llm"})
    )


def selected(rows: pd.DataFrame) -> pd.DataFrame:
    """The chosen rows with the columns of the file."""
    models = {name: presets.values(preset) for name, preset in presets.load(ROOT / "config/models.yaml").items()}
    balanced = rows["distribution"] == "balanced"
    alone = (rows["moe_tp_size"] == 1) & (rows["moe_ep_size"] == 1)
    parts = []
    for form, by_model in WHOLE.items():
        for model, tokens in by_model.items():
            chosen = _of(rows, models[model], form) & rows["num_tokens"].isin(tokens) & balanced & alone
            parts.append(_named(rows[chosen], form).assign(model=model))
    for form in PART_FORMATS:
        for model in PARTS:
            same = rows[_of(rows, models[model], form) & rows["num_tokens"].isin(PART_TOKENS)]
            latest = same["version"] == same.groupby("package")["version"].transform("max")
            even, ranks = (
                same["distribution"] == "balanced",
                list(zip(same["moe_tp_size"], same["moe_ep_size"], strict=True)),
            )
            parallel, whole = (
                pd.Series([pair in wanted for pair in ranks], same.index) for wanted in (PARALLEL, ((1, 1),))
            )
            parts.append(_named(same[latest & ((parallel & even) | (whole & ~even))], form))
    found = pd.concat(parts).sort_values(["model", "weights", "hidden", "intermediate", "tokens", "implementation"])
    keys = [name for name in found if name != "median_us"]
    return found.groupby(keys, sort=False, as_index=False)["median_us"].first()[list(found)]  # some are there twice


def _of(rows: pd.DataFrame, sizes: Mapping[str, object], form: str) -> pd.Series:
    same = rows["moe_dtype"] == form
    for name, column in SIZES.items():
        same &= rows[column] == sizes[name]
    return same


def _named(rows: pd.DataFrame, form: str) -> pd.DataFrame:
    weights, packed = FORMATS[form]
    tp, ep, loads = rows["moe_tp_size"].astype(int), rows["moe_ep_size"].astype(int), rows["distribution"]
    uneven = (" " + loads).where(loads != "balanced", "")
    ranks = ep.map({1: ""}).where(ep == 1, " ep" + ep.astype(str))
    name = rows["package"] + "-" + rows["version"] + " " + rows["kernel_source"]
    return pd.DataFrame(
        {
            "bench": "layer",
            "implementation": name + ranks + uneven,
            "median_us": (rows["latency"] * 1000).round(2),
            "tokens": rows["num_tokens"],
            "hidden": rows["hidden_size"],
            "intermediate": rows["inter_size"] // tp,
            "experts": rows["num_experts"],
            "top_k": rows["topk"],
            "dtype": "bf16",
            "weights": weights,
            "packed": packed,
            "model": "",
            "package": rows["package"],
            "version": rows["version"],
            "kernel": rows["kernel_source"],
            "tensor_parallel": tp,
            "expert_parallel": ep,
            "loads": loads,
        }
    )


def exchanged(folder: Path, version: str) -> pd.DataFrame:
    """Dispatch and combine (us) of DeepEP through a version of SGLang, with the columns of `SCALE`; normal mode with the number of SMs that was fastest in the cell."""
    parts = []
    for kind, mode, time in (("ll", "low-latency", "avg_t_us"), ("normal", "normal", "transmit_us")):
        rows = pd.read_parquet(folder / f"comm/sglang/{version}/wideep_deepep_{kind}_perf.parquet")
        rows = rows[rows["device"] == "NVIDIA H200"].rename(
            columns={f"dispatch_{time}": "dispatch", f"combine_{time}": "combine"}
        )
        cell = ["node_num", "hidden_size", "num_topk", "num_experts", "num_token"]
        fastest = (rows["dispatch"] + rows["combine"]).sort_values(kind="stable").index
        rows = rows.loc[fastest].drop_duplicates(cell).sort_values(cell)
        limited = (rows["node_num"].clip(upper=4)).where(
            (mode == "normal") & (rows["node_num"] > 1), 0
        )  # DeepEP's test: top-4 hosts
        parts.append(
            pd.DataFrame(
                {
                    "mode": mode,
                    "ranks": 8 * rows["node_num"],
                    "tokens": rows["num_token"],
                    "hidden": rows["hidden_size"],
                    "experts": rows["num_experts"],
                    "top_k": rows["num_topk"],
                    "host_groups": limited,
                    "sms": rows["dispatch_sms"] if mode == "normal" else 0,
                    "counts": "us",
                    "dispatch": rows["dispatch"].round(2),
                    "combine": rows["combine"].round(2),
                }
            )
        )
    return pd.concat(parts)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    selected(read(folder)).to_csv(OUT, index=False)
    for version in ("0.5.6.post2", "0.5.12"):
        exchanged(folder, version).to_csv(SCALE / f"aisimulate-sglang-{version}.csv", index=False)
