"""A model preset for config/models.yaml, from a model's own config."""

import re
from pathlib import Path
from typing import Annotated

import typer
import yaml

from moe_routing_bench.config import config_files, huggingface


def preset(
    path: Annotated[
        Path, typer.Argument(help="A model's config.json, as the Hugging Face hub has it, or the folder that has it")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the preset [default: the name of its folder]")] = None,
) -> None:
    """Print a model preset, to be appended to config/models.yaml, with what was assumed as comments."""
    found, assumed = huggingface.preset(path)
    for one in assumed:
        print(f"# assumed: {one}")
    name = (
        name
        or re.sub(r"[^a-z0-9.]+", "-", config_files.model_name(config_files.located(path)).lower()).strip("-")
        or "model"
    )
    print(yaml.safe_dump({name: found}, sort_keys=False, width=1000, allow_unicode=True), end="")
