"""What a build adds to the package: the workflow, the configs, what answers read of published rows, and the commit, because who installs a wheel has neither."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "moe_routing_bench/project"  # in a wheel; store/project_files.py finds it there
KERNELS = "src/moe_routing_kernels"  # a wheel has their sources: without torch the benchmark reads tables of them
FILES = (
    *("config", "profiles", "workflow/profiles", "workflow/report", "workflow/rules", "workflow/template"),
    *("workflow/Snakefile", "workflow/scripts/slurm.sh", "environment.yml", "results/answers.json.gz"),
)


class BuildHook(BuildHookInterface):
    """Runs for wheels and sdists, and does nothing for an editable install, which is of a checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name further files to include, before they are collected."""
        if version == "editable":
            return
        wheel = self.target_name == "wheel"
        if wheel:
            build_data["force_include"] |= {str(Path(self.root, name)): f"{FOLDER}/{name}" for name in FILES}
            build_data["force_include"] |= {str(path): f"{FOLDER}/kernels/{place}" for path, place in self._kernels()}
        if commit := self._commit():
            self._folder = tempfile.TemporaryDirectory()  # until the build has ended
            file = Path(self._folder.name, "COMMIT")
            file.write_text(commit, encoding="utf-8")
            build_data["force_include"][str(file)] = f"{FOLDER}/COMMIT" if wheel else "COMMIT"

    def _kernels(self) -> Iterator[tuple[Path, str]]:
        """The files that the wheel of the kernels has, and their places below the folder that holds the package."""
        folder = Path(self.root, KERNELS)
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json") or path.name == "py.typed":
                yield path, path.relative_to(folder.parent).as_posix()

    def _commit(self) -> str:
        """``<sha>`` or ``<sha>-dirty`` of the checkout, or what an sdist says; nothing where the sources are neither."""
        recorded = Path(self.root, "COMMIT")
        if not Path(self.root, ".git").exists():
            return recorded.read_text(encoding="utf-8") if recorded.is_file() else ""
        sha = self._git("rev-parse", "HEAD")
        return f"{sha}-dirty" if self._git("status", "--porcelain", "--", "src") else sha

    def _git(self, *words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=self.root, stdout=subprocess.PIPE, encoding="utf-8", check=True
        ).stdout.strip()
