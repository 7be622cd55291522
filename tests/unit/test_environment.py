"""pyproject.toml, uv.lock, constraints.txt, environment.yml and the installer say the same thing."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from signals import interruptible

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
KERNELS = tomllib.loads((ROOT / "src/moe_routing_kernels/pyproject.toml").read_text())["project"]
OWN = {PROJECT["name"], KERNELS["name"]}  # which an extra names
EXPORT = "--frozen --no-hashes --no-emit-workspace --no-annotate --no-header --quiet"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def constraints() -> dict[str, list[Requirement]]:
    """Name -> its pins: several where a version depends on the Python."""
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin = Requirement(line)
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    return pins


def declared() -> list[Requirement]:
    extras = EXTRAS.values()
    found = [Requirement(line) for group in (PROJECT["dependencies"], *extras) for line in group]
    return [one for one in found if one.name not in OWN]


def minor_versions(specifiers: SpecifierSet) -> set[int]:
    return {minor for minor in range(30) if specifiers.contains(f"3.{minor}.1")}


def uv(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("uv is not installed")
    return subprocess.run([program, *arguments, "--python", sys.executable], cwd=cwd, capture_output=True, text=True)


def test_conda_environment_fits_the_project() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (python,) = [entry.removeprefix("python") for entry in conda if re.match(r"python\b", entry)]
    offered, allowed = minor_versions(SpecifierSet(python)), minor_versions(SpecifierSet(PROJECT["requires-python"]))
    assert environment["name"] == PROJECT["name"]
    assert "pip" in conda
    assert offered
    assert offered <= allowed


def test_conda_environment_needs_no_other_file() -> None:
    """Snakemake copies it to a folder of its own."""
    (pip,) = [
        one["pip"]
        for one in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
        if isinstance(one, dict)
    ]
    pins = [Requirement(line) for line in pip]  # raises for an option and for a path
    known = {str(pin) for found in constraints().values() for pin in found}
    assert {str(pin) for pin in pins} <= known
    extras = [*EXTRAS["bench"], *EXTRAS["gpu"], *EXTRAS["peers"]]
    needed = [Requirement(line) for line in (*PROJECT["dependencies"], *extras)]
    names = {canonicalize_name(one.name) for one in needed} - OWN  # whose sources are found by PYTHONPATH
    assert names <= {canonicalize_name(pin.name) for pin in pins}


def test_container_defers_to_the_project() -> None:
    """What the definition copies is there, and it installs the project as the pinned versions allow, on a Python that they know."""
    definition = (ROOT / "workflow/apptainer.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", definition, re.M | re.S))
    (minor,) = re.findall(r"^Bootstrap: docker\nFrom: python:3\.(\d+)-slim-\w+$", definition, re.M)
    assert int(minor) in minor_versions(SpecifierSet(PROJECT["requires-python"]))
    (folder,) = re.findall(r"^ *cd (\S+)$", sections["post"], re.M)
    copied = [line.split() for line in sections["files"].splitlines() if line.strip()]
    assert all((ROOT / here).exists() and there == f"{folder}/{here}" for here, there in copied)
    hook = PYPROJECT["tool"]["hatch"]["build"]["hooks"]["custom"]["path"]
    needed = {"pyproject.toml", "constraints.txt", "src", hook, PROJECT["readme"], *PROJECT["license-files"]}
    assert needed == {here for here, _ in copied}
    (extras,) = re.findall(
        r"pip install .*--constraint constraints\.txt --editable src/moe_routing_kernels --editable '\.\[([\w,]+)\]'$",
        sections["post"],
        re.M,
    )
    assert set(extras.split(",")) <= EXTRAS.keys()
    assert "export PYTHONPATH=$PWD/src" in sections["environment"] and 'exec snakemake "$@"' in sections["runscript"]


def test_profile_of_slurm_asks_for_a_gpu_where_a_job_runs_on_one() -> None:
    """Every rule that is not local: where devices are constrained, a job that asks for none has none, and is another platform."""
    blocks = re.findall(
        r"^ *rule(?: (\w+))?:\n(.*?)(?=^ *(?:rule|if|for)\b[^\n]*:$|\Z)",
        "".join(path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk"))),
        re.M | re.S,
    )
    submitted = {name for name, body in blocks if "localrule: True" not in body}
    profile = yaml.safe_load((ROOT / "workflow/profiles/slurm/profile.yaml").read_text())
    assert submitted == {"measure", "measure_again", "profile", "accuracy", "train", "time_training", "adapt"}
    asked = {name: one["gpu"] for name, one in profile["set-resources"].items()}
    assert "ranks" in asked.pop("measure")  # an expression, which tests/workflow/test_cluster.py evaluates
    assert asked == dict.fromkeys(submitted - {"measure"}, 1)


def test_module_of_the_docs_finds_program_and_sources(tmp_path: Path) -> None:
    if shutil.which("modulecmd") is None:
        pytest.skip("no modulecmd; apt-get install environment-modules")
    (text,) = re.findall(r"^ *```tcl\n(.*?)^ *```", (ROOT / "docs/cluster.md").read_text(), re.M | re.S)
    program = tmp_path / "checkout/.venv/bin/snakemake"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    text = textwrap.dedent(text).replace("/shared/moe-routing-bench", str(tmp_path / "checkout"))
    (tmp_path / "moe-routing-bench").write_text(text)
    script = 'eval "$(modulecmd bash load moe-routing-bench)"; command -v snakemake; echo "$PYTHONPATH"'
    environment = os.environ | {"MODULEPATH": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    found, sources = done.stdout.splitlines()
    assert found == str(program) and sources.split(":")[0] == str(tmp_path / "checkout/src"), done.stderr


@pytest.mark.parametrize("minor", sorted(minor_versions(SpecifierSet(PROJECT["requires-python"]))))
def test_every_dependency_is_pinned_once_on_every_python(minor: int) -> None:
    machine = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1", "sys_platform": "linux"}
    pins = constraints()
    for requirement in declared():
        here = [p for p in pins.get(canonicalize_name(requirement.name), []) if applies(p.marker, machine)]
        assert len(here) == 1, f"{requirement} has {len(here)} pins on Python 3.{minor}"
        (pin,) = here[0].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} is pinned to {pin}"


def applies(marker: Marker | None, machine: dict[str, str]) -> bool:
    return marker is None or marker.evaluate(machine)


def test_the_kernels_have_the_version_of_the_benchmark_and_fewer_needs() -> None:
    """Whatever an engine pins, they install with it: no upper bound but that of a major version that is not there yet."""
    assert KERNELS["version"] == PROJECT["version"]
    assert f"{KERNELS['name']}=={KERNELS['version']}" in EXTRAS["bench"]
    needed = [Requirement(line) for line in KERNELS["dependencies"]]
    assert {one.name for one in needed} == {"filelock", "numpy", "torch"}
    assert not [one for one in needed if any(bound.operator in ("<", "==", "~=") for bound in one.specifier)]


def test_lock_is_up_to_date() -> None:
    for offline in (["--offline"], []):
        check = uv("lock", "--check", *offline)
        if check.returncode == 0:
            return
    if re.search("error sending request|Failed to fetch|timed out|dns error", check.stderr):
        pytest.skip(f"uv reaches no index: {check.stderr.splitlines()[-1].strip()}")
    pytest.fail(f"uv.lock does not fit pyproject.toml; run: make lock\n{check.stderr}")


def test_constraints_are_the_lock_exported() -> None:
    assert exported("--all-extras") == (ROOT / "constraints.txt").read_text(), "run: make lock"


def test_conda_environment_ends_with_the_lock_exported() -> None:
    pins = "".join(f'      - "{line}"\n' for line in exported("--extra", "gpu", "--extra", "peers").splitlines())
    assert (ROOT / "environment.yml").read_text().endswith(f"  - pip:\n{pins}"), "run: make lock"


def exported(*extras: str) -> str:
    export = uv("export", *EXPORT.split(), *extras)
    assert export.returncode == 0, export.stderr
    makefile = (ROOT / "Makefile").read_text()
    assert EXPORT in makefile and f"$(EXPORT) {' '.join(extras)}" in makefile
    return export.stdout


def fake_nvidia_smi(folder: Path, *, gpus: int) -> Path:
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {0 if gpus else 9}\n")
    program.chmod(0o755)
    return folder


def fake_torch_wheel(folder: Path, python_tag: str) -> Path:
    """The smallest file that pip takes for a CPU build of the pinned torch."""
    (torch,) = constraints()["torch"]
    version = str(torch.specifier).removeprefix("==") + "+cpu"
    info = f"torch-{version}.dist-info"
    folder.mkdir()
    with zipfile.ZipFile(folder / f"torch-{version}-{python_tag}-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {python_tag}-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def chosen_commands(machine: Path, *options: str, gpus: int, find_links: Path | None = None) -> list[str]:
    """What the installer would run on a machine of that kind, whatever this one is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    environment["PATH"] = f"{fake_nvidia_smi(machine / 'bin', gpus=gpus)}{os.pathsep}{environment['PATH']}"
    if find_links:
        environment["PIP_FIND_LINKS"] = str(find_links)
    command = ["bash", str(ROOT / "workflow/scripts/install.sh"), "--print", *options, sys.executable]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_gpu_machine_gets_the_cuda_build_and_the_peers(tmp_path: Path) -> None:
    (command,) = chosen_commands(tmp_path, gpus=1)
    assert "--constraint constraints.txt" in command
    assert command.endswith("--editable .[bench,dev,slurm,gpu,peers]")


def test_the_report_needs_nothing_for_gpus_where_there_is_none(tmp_path: Path) -> None:
    (command,) = chosen_commands(tmp_path, "--report", gpus=0, find_links=fake_torch_wheel(tmp_path / "wheels", "py3"))
    assert re.search(r"--editable \.\[bench\] torch==[\d.]+\+cpu$", command)
    assert not {"triton", "nvidia-cutlass-dsl", "pyright"} & {
        Requirement(line).name for line in (*PROJECT["dependencies"], *EXTRAS["bench"])
    }


def test_the_report_of_a_gpu_machine_needs_the_compilers_and_the_peers(tmp_path: Path) -> None:
    (command,) = chosen_commands(tmp_path, "--report", gpus=1)
    assert command.endswith("--editable .[bench,gpu,peers]")


def test_a_cpu_machine_takes_the_cpu_build_from_find_links(tmp_path: Path) -> None:
    (command,) = chosen_commands(tmp_path, gpus=0, find_links=fake_torch_wheel(tmp_path / "wheels", "py3"))
    assert "--constraint constraints.txt" in command
    assert re.search(r"--editable \.\[bench,dev,slurm,gpu\] torch==[\d.]+\+cpu$", command)


@pytest.mark.parametrize("wheel_tag", [None, "py2"], ids=["no find-links", "a wheel for another Python"])
def test_a_cpu_machine_else_takes_torch_alone_from_the_cpu_index(tmp_path: Path, wheel_tag: str | None) -> None:
    find_links = fake_torch_wheel(tmp_path / "wheels", wheel_tag) if wheel_tag else None
    torch, project = chosen_commands(tmp_path, gpus=0, find_links=find_links)
    assert re.search(rf"--no-deps --index-url {CPU_INDEX} torch==[\d.]+\+cpu$", torch)
    assert CPU_INDEX not in project
    assert re.search(r"--editable \.\[bench,dev,slurm,gpu\] torch==[\d.]+\+cpu$", project)


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    installer = tmp_path / "workflow/scripts/install.sh"
    installer.parent.mkdir(parents=True)
    shutil.copy(ROOT / "workflow/scripts/install.sh", installer)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    python = tmp_path / "python3.9"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    python.chmod(0o755)
    run = subprocess.run(["bash", str(installer), str(python)], capture_output=True, text=True)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"error: {python} is Python 3.9.2, but 3.11 to 3.13 is needed")
    assert not (tmp_path / ".venv").exists()


def installed_by(program: str, folder: Path, gpus: int) -> subprocess.CompletedProcess[str]:
    """An installation for the report in a folder whose environment has a script as its Python."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    python.with_name("pip").touch()  # else the environment is made anew
    return installed(folder, gpus)


def installed(folder: Path, gpus: int, *python: str) -> subprocess.CompletedProcess[str]:
    """An installation for the report in a folder."""
    for name in ("workflow/scripts/install.sh", "constraints.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    environment = os.environ | {"PATH": f"{fake_nvidia_smi(folder / 'bin', gpus=gpus)}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(folder / "workflow/scripts/install.sh"), "--report", *python]
    return subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=interruptible)


@pytest.mark.parametrize(
    ("gpus", "what"), [(0, f"torch==.* from {CPU_INDEX}"), (1, "the packages of constraints.txt")], ids=["CPU", "GPU"]
)
def test_what_cannot_be_fetched_ends_with_a_line_that_says_what_helps(tmp_path: Path, gpus: int, what: str) -> None:
    """After what pip says itself."""
    run = installed_by("echo 'ERROR: no network' >&2; exit 1", tmp_path, gpus)
    assert run.returncode == 1 and "no network" in run.stderr
    assert re.match(f"error: pip could not get {what}.*PIP_FIND_LINKS=.*SYSTEM_TORCH=1", run.stderr.splitlines()[-1])


@pytest.mark.parametrize("there", [True, False])
def test_a_new_environment_gets_the_pinned_pip_where_it_is_to_be_had(tmp_path: Path, there: bool) -> None:
    """Before it installs anything else, which goes on with the pip of that Python where it is not."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
case $* in
  *'-m venv .venv') mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *' pip=='*) echo "$*" >>asked; exit {int(not there)} ;;
  *--editable*) echo "$*" >>asked; exit 1 ;;
esac
""")
    python.chmod(0o755)
    run = installed(tmp_path, 1, str(python))
    first, second = (tmp_path / "asked").read_text().splitlines()
    (pin,) = constraints()["pip"]
    assert first.endswith(f" {pin}") and "--editable" in second
    assert (f"pip {pin.specifier}".replace("==", "") + " could not be had" in run.stdout) is not there


def test_an_interrupt_of_the_installation_says_that_it_can_go_on(tmp_path: Path) -> None:
    """While the shell waits for pip, as people interrupt it: in the moment before it does, it would only see that pip has failed."""
    run = installed_by("sleep 0.5; kill -INT $PPID; exit 1", tmp_path, 1)
    assert run.returncode == 130
    assert run.stderr.splitlines() == ["interrupted; the same command goes on from here"]


def test_a_config_that_is_not_there_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    run = subprocess.run(["make", "report", "CONFIG=absent.yaml"], cwd=tmp_path, capture_output=True, text=True)
    first, *_ = run.stderr.splitlines()
    assert (
        run.returncode == 2
        and first == "error: CONFIG: got 'absent.yaml'; allowed: a config, such as config/layers.yaml"
    )
    assert not (tmp_path / ".venv").exists()


def test_the_name_of_a_run_reaches_snakemake_whole() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/.report", "report", "RUN=two words"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shlex.split(run.stdout.splitlines()[-1])[-1] == "run=two words"


def test_pre_commit_runs_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [hook["entry"] for hook in hooks] == [line.strip() for line in recipe.splitlines()]
