"""The commands of the examples' pages, run as they stand in a copy of the repository; of the workflow a dry run, to see its jobs."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import forks
from example_package import EXAMPLE, install, run
from project import ROOT, Project, measured

pytestmark = pytest.mark.slow

SMALL = "--tokens 64 --hidden 64 --max-seconds 0.1"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the repository."""
    return Project.create(tmp_path_factory.mktemp("copy"))


def blocks(page: Path, kind: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.S)


def test_a_bench_of_one_s_own_model(copy: Project) -> None:
    """The preset has the sizes of config.json; one layer of it is measured, and the workflow would measure the rest."""
    (commands,) = blocks(ROOT / "examples/own_model/README.md", "sh")
    preset, measure, workflow = commands.splitlines()
    copy.run("bash", "-ec", preset, forked=True)
    (found,) = yaml.safe_load((copy.folder / "examples/own_model/models.yaml").read_text()).items()
    assert found[0] == "my-moe" and (found[1]["hidden"], found[1]["experts"], found[1]["top_k"]) == (512, 32, 4)
    printed = copy.run("bash", "-ec", f"{measure} --max-seconds 0.1", forked=True).stdout
    assert "T64-H512-I192-E32-k4" in printed
    assert re.findall(r"^ (\w+) +(ok|unsupported)", printed, re.M) == [("torch_loop", "ok"), ("torch_grouped_mm", "ok")]
    dry = copy.run("bash", "-ec", f"{workflow} --dry-run", forked=True)
    assert measured(dry) == dict.fromkeys(("layer", "gate", "permute", "pack", "combine"), 2)
    assert "reports/cpu.my-moe/index.html" in dry.stdout + dry.stderr


def test_a_kernel_of_a_package_of_its_own(tmp_path: Path) -> None:
    """The commands of its page, after installing it otherwise: pip would ask an index for what builds it."""
    (commands,) = blocks(EXAMPLE / "README.md", "sh")
    pip, *others = [line.partition("#")[0].strip() for line in commands.splitlines()]
    assert pip == "pip install --no-deps -e ."
    site = install(tmp_path)
    for line in others:
        sizes = f" {SMALL} --intermediate 32" if "layer" in line else f" {SMALL}" if "measure" in line else ""
        words = shlex.split(line.replace(" --tokens 256", "") + sizes)
        done = run(tmp_path, *words, path=site)
    assert re.search(r"own_layer +ok", done.stdout), done.stdout
    (config,) = map(yaml.safe_load, blocks(EXAMPLE / "README.md", "yaml"))
    assert config["plugins"] == ["own_kernel"]


def test_a_kernel_in_cute_dsl(tmp_path: Path) -> None:
    """What its page does without a GPU, as it stands there: compiled, with copies of 16 bytes; without one it is not measured."""
    pytest.importorskip("cutlass")
    page = ROOT / "examples/own_cute_kernel/README.md"
    shutil.copytree(page.parent / "own_cute", tmp_path / "own_cute")
    without, gpu, _ = blocks(page, "sh")
    compiled, printed = without.splitlines()
    own = {"MOE_ROUTING_BENCH_DEVICE": "cpu", "MOE_ROUTING_KERNELS_CACHE": str(tmp_path / "kernels")}
    environment = forks.environment(ROOT / "src") | own

    def said(command: str) -> str:
        done = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert said(compiled).startswith("1 kernels in ") and list((tmp_path / "kernels").glob("row_pack-*.o"))
    assert re.search(r"ld\.global\.v4\.b32.*st\.global\.v4\.b32", said(printed), re.S)
    small, count = re.subn(r"--tokens \d+ .*", SMALL, gpu.splitlines()[0])
    assert count == 1 and re.search(r"own_rows +unsupported +needs an NVIDIA GPU", said(small))
