"""A folder to measure in, for those who have installed the package."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.printing import quoted
from moe_routing_bench.store.shipped import shipped
from moe_routing_kernels.errors import bad, writing

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
