"""The wheel of the kernels without the benchmark: it resolves with vLLM and SGLang, compiles with both CuTe DSLs, and runs a model."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from index import uv

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ENGINES = ("vllm==0.33.0", "sglang==0.5.23")
PINS = {"torch": "2.14.", "nvidia-cutlass-dsl": "4.8.0", "apache-tvm-ffi": "0.1.11"}  # of both
OLDER = (
    "nvidia-cutlass-dsl==4.8.0",
    "nvidia-cutlass-dsl-libs-base==4.8.0",
    "nvidia-cutlass-dsl-libs-core==4.8.0",
    "nvidia-cutlass-dsl-libs-cu13==4.8.0",
    "apache-tvm-ffi==0.1.11",
)
STUDY = ("moe_routing_bench", "pandas", "pyarrow", "pydantic", "snakemake", "seaborn", "matplotlib", "yaml")
SIZES = "hidden=64, intermediate=32, experts=4, top_k=2, arch='sm_90a', most_tokens=1"
MODEL = """
import json, sys
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
import moe_routing_kernels
from moe_routing_kernels.ops import transformers
torch.manual_seed(3)
sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64)
config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, intermediate_size=32, **sizes)
model = Qwen3MoeForCausalLM(config).eval()
tokens = torch.randint(0, 64, (2, 9))
with torch.no_grad():
    model.set_experts_implementation("eager")
    want = model(tokens).logits
    model.set_experts_implementation(transformers.register())
    error = (model(tokens).logits - want).abs().max().item()
loss = model(tokens, labels=tokens).loss
loss.backward()
learns = all(p.grad is not None and p.grad.isfinite().all().item() for n, p in model.named_parameters() if "experts" in n)
print(json.dumps({"file": moe_routing_kernels.__file__, "error": error, "learns": learns, "loaded": sorted(set(sys.argv[1:]) & set(sys.modules))}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(ROOT / "src/moe_routing_kernels")], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, and nothing of a checkout."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def python(code: str, *paths: Path, arguments: tuple[str, ...] = (), **variables: str) -> str:
    """What a program prints whose only packages are in `paths`, and in the environment's folder: editable installs are not found."""
    packages = sysconfig.get_path("purelib")
    added = [*map(str, paths), packages, f"{packages}/nvidia_cutlass_dsl/dsl_packages"]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(added)}
    command = [sys.executable, "-S", "-c", code, *arguments]
    done = subprocess.run(command, env=environment, cwd=paths[0], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_the_wheel_resolves_with_what_an_engine_pins(engine: str, wheel: Path) -> None:
    """Of an index only metadata is read: nothing is downloaded."""
    target = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34")
    asked = f"{engine}\nmoe-routing-kernels[cute,triton] @ {wheel.as_uri()}\n"
    printed = uv("pip", "compile", "-", "--no-header", "--no-annotate", *target, given=asked)
    versions = dict(line.split("==") for line in printed.splitlines() if "==" in line)
    assert "moe-routing-kernels @" in printed
    for name, version in PINS.items():
        assert versions[name].startswith(version), (name, versions[name])


def test_importing_it_takes_less_than_a_fifth_of_a_second(alone: Path) -> None:
    code = "import time; start = time.process_time(); import moe_routing_kernels; print(time.process_time() - start)"
    assert min(float(python(code, alone)) for _ in range(3)) < 0.2


def test_a_model_of_transformers_runs_and_learns_with_it_alone(alone: Path) -> None:
    got = json.loads(python(MODEL, alone, arguments=STUDY).splitlines()[-1])
    assert Path(got["file"]).is_relative_to(alone) and got["learns"] and got["error"] < 1e-5
    assert not {"moe_routing_bench", "snakemake", "pydantic"} & set(
        got["loaded"]
    )  # transformers itself may load others


def test_operators_load_nothing_of_the_study(alone: Path) -> None:
    code = f"import sys; from moe_routing_kernels import ops; print([name for name in {STUDY} if name in sys.modules])"
    assert python(code, alone).strip() == "[]"


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_it_compiles_with_the_older_cute_dsl(training: bool, alone: Path, tmp_path: Path) -> None:
    """4.8.0 and tvm-ffi 0.1.11, as the engines pin them; `tests/ops/test_prepare.py` has the version of this environment."""
    pytest.importorskip("cutlass")
    folder = tmp_path / "older"
    asked = ("-q", "--no-deps", "--no-compile", "--target", str(folder))  # few of their files are imported
    command = [sys.executable, "-m", "pip", "install", *asked, *OLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the older CuTe DSL cannot be had: {done.stderr.splitlines()[-1][:200]}")
    code = (
        "import importlib.metadata as m; from moe_routing_kernels import ops;"
        f"print(ops.prepare({SIZES}, training={training}), m.version('nvidia-cutlass-dsl'), m.version('apache-tvm-ffi'))"
    )
    paths = (alone, folder, folder / "nvidia_cutlass_dsl/dsl_packages")
    printed = python(code, *paths, MOE_ROUTING_KERNELS_CACHE=str(tmp_path / "cache"))
    count, *versions = printed.splitlines()[-1].split()
    assert versions == ["4.8.0", "0.1.11"]
    assert int(count) == len(list((tmp_path / "cache").glob("*.o"))) > (8 if training else 4)
