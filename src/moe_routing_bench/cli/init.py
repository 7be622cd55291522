"""What a user begins with: `init`, a folder to measure in, and `preset`, a model's preset for config/models.yaml."""

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer
import yaml

from moe_routing_bench.cli.printing import quoted
from moe_routing_bench.config import config_files, huggingface
from moe_routing_bench.fields import file_name
from moe_routing_bench.store.project_files import shipped
from moe_routing_kernels.errors import bad, one_line, writing

_COPIED = ("config", "profiles", "workflow/profiles", "workflow/scripts/slurm.sh")


def init(folder: Annotated[Path, typer.Argument(help="Folder to make; it may be there if it is empty")]) -> None:
    """Make a folder for configs, results and reports: a Snakefile that runs the installed workflow, and configs to edit."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise bad("folder", str(folder), "a new or an empty one")
        shutil.copytree(shipped("workflow/template"), folder, dirs_exist_ok=True)
        for name in _COPIED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            source = shipped(name)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    print(f"wrote {folder}; next: cd {quoted(folder)} && snakemake --cores 1 --resources gpu=1")


def preset(
    path: Annotated[
        Path, typer.Argument(help="A model's config.json, as the Hugging Face hub has it, or the folder that has it")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the preset [default: the name of its folder]")] = None,
) -> None:
    """Print a model preset, to be appended to config/models.yaml, with what was assumed as comments."""
    if name is not None:
        file_name("--name", name)
    fields, assumed = huggingface.preset(path)
    for assumption in assumed:
        print(f"# assumed: {one_line(assumption)}")
    folder = config_files.model_name(config_files.located(path)).lower()
    name = name or re.sub(r"[^a-z0-9.]+", "-", folder).strip("-.")[:100] or "model"
    print(yaml.safe_dump({name: fields}, sort_keys=False, width=1000, allow_unicode=True), end="")
