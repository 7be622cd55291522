"""What a user begins with: `init`, a folder to measure in; `preset`, a model's preset for config/models.yaml; and `kernel`, a module to begin a
kernel of one's own with. It declares an implementation, which is right, and is the baseline until it is edited.
"""

import importlib.util
import inspect
import os
import re
import shutil
import textwrap
from pathlib import Path
from typing import Annotated

import typer
import yaml

from moe_routing_bench import packages
from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli.options import among
from moe_routing_bench.cli.printing import quoted
from moe_routing_bench.config import config_files, huggingface
from moe_routing_bench.fields import file_name
from moe_routing_bench.store.project_files import shipped
from moe_routing_kernels import files
from moe_routing_kernels.errors import bad, one_line, pick, writing

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


_COMPOSED = ("routing", "layer", "training", "model")
KERNELS = tuple(name for name in BENCHES if name not in _COMPOSED and (packages.KERNELS / name).is_dir())
_OPTIONAL = " | None = None"
_ROWS = {"counts", "offsets", "order", "inverse"}  # operands that say where rows lie
_MODULE = '''\
"""{about}{rows}"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.benches.plugins import Plugin
from moe_routing_kernels.{bench} import {problem}, {baseline}

# Read, not run: made of literals. A kernel that needs a GPU has requires=("gpu",), or ("nvidia",), with "triton" or "cutlass" if it needs that.
OWN = Plugin(bench="{bench}", name="{name}")


def unsupported(problem: {problem}) -> str | None:
    """Why this problem cannot run, or None; a problem has {fields}."""
    return {unsupported}


def bind(
    problem: {problem},
    *,
{parameters}
) -> Callable[[], object]:
    """{tensors}

    What is allocated and compiled here is not timed. The call that is returned is: it writes every element of
    {outputs}, and changes nothing else. Of outputs that it allocates itself it returns a dict, by name.
    """
    # The baseline, to be measured as it is: put your kernel in its place.
    return {baseline}.{bind}(problem, {arguments})
'''


def kernel(
    bench: Annotated[str, typer.Argument(help=f"Operation: {' | '.join(KERNELS)}", autocompletion=among(KERNELS))],
    path: Annotated[Path, typer.Argument(help="Python file to write; its name is that of the implementation")],
) -> None:
    """Write a module to begin a kernel of your own with: tensors with their shapes, and the baseline, which you replace.

    It can be measured as it is. `watch`, which is printed, measures every edit.
    """
    hint = (
        "it is made of parts, of which one may be a kernel of yours: see examples/own_kernel"
        if bench in _COMPOSED
        else ""
    )
    pick("bench", bench, KERNELS, hint)
    name = path.stem
    if path.suffix != ".py" or not (name.isidentifier() and name.isascii()):
        raise bad("path", str(path), "letters, digits and underscores before .py")
    if name in (implementation.name for implementation in BENCHES[bench].implementations):
        raise bad("path", str(path), "a new name", f"{bench} has an implementation {name}")
    if os.path.exists(path):
        raise bad("path", str(path), "a new file", "it is there already")
    if importlib.util.find_spec(name):
        raise bad(
            "path", str(path), "a new name", f"there is a module {name} already, which would be found in its place"
        )
    files.check_writable(path)
    with writing(path):
        path.write_text(_text(BENCHES[bench], name), encoding="utf-8")
    there = "" if path.parent == Path() else f"cd {quoted(path.parent)} && "
    print(f"wrote {path}; next: {there}moe-routing-bench watch {bench} --plugin {name} --implementations {name}")


def _text(bench: Bench, name: str) -> str:
    """The module for a bench, from what its baseline binds and what our own modules say of operation, problem and rows."""
    folder, rows = (
        importlib.import_module(module)
        for module in (f"moe_routing_kernels.{bench.name}", "moe_routing_bench.workload.row_map")
    )
    module = bench.load(bench.baseline)
    signature = inspect.signature(module.bind).parameters
    problem = signature["problem"].annotation
    operands = [operand for operand in signature.values() if operand.name in (*bench.reads, *bench.writes)]
    baseline = module.bind.__module__.rpartition(".")[2]
    of_rows = (
        [_docstring(rows).split("\n\n")[1], _docstring(rows.RowMap)]
        if _ROWS & {operand.name for operand in operands}
        else []
    )
    return _MODULE.format(
        name=name,
        bench=bench.name,
        about=_docstring(folder),
        rows="".join(f"\n\n{_filled(text)}" for text in of_rows) + "\n" * bool(of_rows),
        problem=problem.__name__,
        baseline=baseline,
        bind=module.bind.__name__,
        fields=", ".join(problem.__dataclass_fields__),
        unsupported=f"{baseline}.{module.unsupported.__name__}(problem)" if hasattr(module, "unsupported") else "None",
        parameters="\n".join(
            f"    {operand.name}: Tensor{_OPTIONAL if operand.default is None else ''}," for operand in operands
        ),
        tensors=_filled(_docstring(problem), "    "),
        outputs=", ".join(operand.name for operand in operands if operand.name in bench.writes),
        arguments=", ".join(f"{operand.name}={operand.name}" for operand in operands),
    )


def _docstring(thing: object) -> str:
    """The docstring of a module or class."""
    return (thing.__doc__ or "").strip()


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), 116, subsequent_indent=indent)
