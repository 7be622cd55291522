"""A copy of the repository with a small grid, on which tests run Snakemake for real and count its jobs."""

import os
import re
import shutil
import subprocess
from importlib.util import cache_from_source
from pathlib import Path

import yaml

import forks
from moe_routing_bench.figures import FIGURES

ROOT = Path(__file__).parents[1]
SMALL = {
    "check_seeds": 1,
    "warmup_ms": 1,
    "interval_us": 50,
    "samples_per_block": 1,
    "settle_blocks": 2,
    "min_blocks": 3,
    "max_blocks": 4,
    "max_seconds": 0.05,
    "wall_calls": 1,
}
GRID = [
    {
        "benches": ["pack", "combine"],
        "implementations": ["torch"],
        "tokens": [64, 128],
        "hidden": [64],
        "experts": [4],
        "top_k": [2],
    },
    {
        "benches": ["gate", "routing"],
        "implementations": ["torch"],
        "tokens": [64],
        "hidden": [64],
        "experts": [4],
        "top_k": [2],
    },
]
CELLS = {"pack": 2, "combine": 2, "gate": 1, "routing": 1}
DRAWN = sum(figure.source == "measurements" for figure in FIGURES.values())  # the small grid trains nothing
SHOWN = ("pareto", "speedup", "load_cv")  # the figures of runs whose jobs are counted: some that are drawn fast
# The smallest entry of training runs, which adapters are also trained on.
BASE = {
    "label": "base",
    "router": ["softk"],
    "seed": [1],
    "corpora": {"stdlib": 20000},
    "experts": 4,
    "dim": 16,
    "heads": 2,
    "expert_hidden": 16,
    "sequence": 32,
    "batch": 4,
    "steps": 4,
    "warmup": 1,
    "lr": 0.01,
}
OF_BOTH = ("crossover", "training_curves")  # figures of both tables, of measurements and of training runs


class Project:
    """A working copy in a folder of its own; its `src` is what runs."""

    def __init__(self, folder: Path) -> None:
        """Use the copy at `folder`."""
        self.folder = folder

    @classmethod
    def create(cls, folder: Path) -> "Project":
        """Copy what git would publish (tracked files, and new ones that are not ignored), compiled as far as it is here, and give it the small grid."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file() and not name.startswith(("results/", "reports/")):
                compiled = [cache_from_source(name)] if name.startswith("src/") and name.endswith(".py") else []
                for one in (name, *compiled):
                    if (ROOT / one).is_file():
                        (folder / one).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(ROOT / one, folder / one)
        project = cls(folder)
        project.configure(GRID, SMALL)
        return project

    def copy(self, folder: Path) -> "Project":
        """The same state in another folder, so that a test may change it; of what is there, what has not been changed stays."""
        made, there = _states(self.folder), _states(folder)
        for name in there:
            if name not in made or there[name] != made[name]:
                path = folder / name
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink(
                    missing_ok=True
                )
        for name, state in made.items():
            path = folder / name
            if state is None:
                path.mkdir(parents=True, exist_ok=True)
            elif there.get(name) != state:
                shutil.copy2(self.folder / name, path, follow_symlinks=False)
        return Project(folder)

    def configure(self, grid: list[dict], measure: dict | None = None, **sections: list) -> None:
        """Write the default config, with training entries or adaptations as `sections`."""
        parts = {"seed": 17, "device": "cpu", "measure": measure or SMALL, "grid": grid} | sections
        text = yaml.safe_dump(parts, sort_keys=False)
        (self.folder / "config/config.yaml").write_text(text)

    def run(self, *command: str | Path, check: bool = True, forked: bool = False) -> subprocess.CompletedProcess:
        """A command of the environment, as users start it or as a fork, with the copy's sources first."""
        environment = forks.environment(self.folder / "src", forked=forked)
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def snakemake(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess:
        """Run the workflow."""
        return self.run("snakemake", *arguments, "--cores", "1", "--resources", "gpu=1", check=check, forked=True)

    def jobs(self, *arguments: str) -> dict[str, int]:
        """Jobs that a run would start, by rule; `figure` counts all figures."""
        return count(self.snakemake("--dry-run", *arguments))

    def bench(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """A command of `moe-routing-bench`."""
        return self.run("moe-routing-bench", *arguments, check=check, forked=True)

    def draw_only(self, *names: str) -> None:
        """`draw_only` of the copy's package."""
        draw_only(self.folder / "src/moe_routing_bench", *names)

    def edit(self, name: str) -> None:
        """Append a line to a file."""
        with (self.folder / name).open("a") as file:
            file.write("\n# edited\n")


def _states(folder: Path) -> dict[str, tuple | None]:
    """What says whether the files and links below a folder are the same, and None for folders, which come before what they hold."""
    found: dict[str, tuple | None] = {}
    waiting = [(folder, "")]
    while waiting:
        here, prefix = waiting.pop()
        found[prefix] = None
        for entry in os.scandir(here) if here.is_dir() else ():
            if entry.is_dir(follow_symlinks=False):
                waiting.append((Path(entry.path), f"{prefix}{entry.name}/"))
            else:
                state = entry.stat(follow_symlinks=False)
                found[f"{prefix}{entry.name}"] = (state.st_size, state.st_mtime_ns, state.st_mode)
    return found


def draw_only(package: Path, *names: str) -> None:
    """Leave these of a package's figures: each is a process, and `make report` draws every one."""
    captions = package / "figures/captions.yaml"
    every = yaml.safe_load(captions.read_text())
    captions.write_text(yaml.safe_dump({name: every[name] for name in names}))


def reduced(config: Path, tokens: list[int]) -> None:
    """Leave of a default config a cell for each of its benches and of `tokens`: all of its cells are measured by `make report`."""
    parts = yaml.safe_load(config.read_text())
    benches = sorted({bench for entry in parts["grid"] for bench in entry["benches"]})
    sizes = {"tokens": tokens, "hidden": [128], "intermediate": [256], "experts": [8], "top_k": [2]}
    parts["grid"] = [{"benches": benches, "implementations": ["torch", "torch_bmm", "torch_loop", "triton"], **sizes}]
    config.write_text(yaml.safe_dump(parts, sort_keys=False))


def count(done: subprocess.CompletedProcess) -> dict[str, int]:
    """The job stats that Snakemake printed; empty when there was nothing to do."""
    text = done.stdout + done.stderr
    if "Nothing to be done" in text:
        return {}
    table = re.search(r"^job +count\n[- ]+\n(.*?)^total +(\d+)", text, re.MULTILINE | re.DOTALL)
    assert table, text
    found: dict[str, int] = {}
    for line in table[1].splitlines():
        if line.strip():
            rule, number = line.split()
            rule = "figure" if rule.startswith("figure_") else rule
            found[rule] = found.get(rule, 0) + int(number)
    assert sum(found.values()) == int(table[2]), text
    return found


def measured(done: subprocess.CompletedProcess) -> dict[str, int]:
    """Cells that a dry run would measure, by bench, from its messages."""
    found: dict[str, int] = {}
    for bench in re.findall(r"^\s*(?:Job \d+: )?measure (\w+) \S+", done.stdout + done.stderr, re.MULTILINE):
        found[bench] = found.get(bench, 0) + 1
    return found
