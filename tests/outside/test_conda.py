"""`snakemake --sdm conda` with a stand-in for conda: it is given no more than a copy of environment.yml, as Snakemake makes it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from moe_routing_bench.store import paths
from project import GRID, ROOT, Project

pytestmark = pytest.mark.slow
# What Snakemake asks of conda, and an environment that has all dependencies but not the package.
CONDA = f"""#!{sys.executable}
import json, pathlib, shutil, sys, sysconfig, venv
base = pathlib.Path(__file__).parents[1]
command = sys.argv[1:]
options = dict(zip(command, command[1:]))
if command == ["--version"]:
    print("conda 24.9.2")
elif command[0] == "info":
    print(json.dumps({{"conda_prefix": str(base), "platform": "linux-64"}}))
elif command[0] == "config":
    print(json.dumps({{"get": {{"channel_priority": "strict"}}}}))
elif command[:2] == ["env", "create"]:
    shutil.copy(options["--file"], base / "asked.yaml")
    venv.create(options["--prefix"], symlinks=True)
    site = sysconfig.get_path("purelib", "venv", {{"base": options["--prefix"]}})
    pathlib.Path(site, "dependencies.pth").write_text({sysconfig.get_path("purelib")!r})
elif command[0] != "clean":
    sys.exit(f"not known here: {{command}}")
"""


@pytest.fixture
def conda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in, whose programs are found first."""
    base = tmp_path / "conda"
    (base / "bin").mkdir(parents=True)
    (base / "bin/conda").write_text(CONDA)
    (base / "bin/conda").chmod(0o755)
    (base / "bin/activate").write_text(f'echo "$1" >>{base}/activated\nPATH="$1/bin:$PATH"\n')
    monkeypatch.setenv("PATH", f"{base}/bin{os.pathsep}{os.environ['PATH']}")
    return base


def test_rules_run_in_the_environment_with_the_package_of_the_checkout(
    conda: Path, tmp_path: Path, own_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project.create(tmp_path / "project")
    project.configure([GRID[1] | {"benches": ["gate"]}])
    # The process of Snakemake has the package, and hands nothing of it on to its jobs.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    main = f"import sys; sys.path.insert(0, {str(project.folder / 'src')!r}); from snakemake.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", main, paths.measurements("cpu"), "--cores", "1", "--sdm", "conda"]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert yaml.safe_load((conda / "asked.yaml").read_text()) == yaml.safe_load((ROOT / "environment.yml").read_text())
    (row,) = pq.read_table(project.folder / paths.measurements("cpu")).to_pylist()
    assert row["status"] == "ok"
    (activated,) = set((conda / "activated").read_text().splitlines())
    assert Path(activated).parent == project.folder / ".snakemake/conda"
