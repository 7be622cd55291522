"""`ops.prepare`: it compiles all that a model's operators may choose, once, side by side; and a capture never compiles."""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")
from moe_routing_bench import ops
from moe_routing_bench.config import presets
from moe_routing_bench.errors import UserError
from moe_routing_bench.kernels.combine import Combine, cute_combine
from moe_routing_bench.kernels.cute import ahead, cache
from moe_routing_bench.kernels.cute.cache import Asked
from moe_routing_bench.ops import preparation

PRESETS = presets.load(Path(__file__).parents[2] / "config/models.yaml")
SMALL = {"hidden": 64, "intermediate": 32, "experts": 4, "top_k": 2, "arch": "sm_90a", "most_tokens": 2}
COMBINE = Combine(64, 128, 2, "bf16", dropping=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; nothing that was loaded before is remembered for it."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    return tmp_path


def sizes(name: str, **others: object) -> dict[str, object]:
    preset = PRESETS[name]
    found = {one: getattr(preset, one) for one in ("hidden", "intermediate", "experts", "top_k", "activation")}
    return found | {"rule": preset.router, "arch": "sm_90a"} | others


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Asked]]:
    """What `prepare` would compile, which it does not here."""
    noted: dict[str, set[Asked]] = {}

    def compile_all(kernels: dict[Asked, None], workers: int | None) -> int:
        noted["kernels"] = set(kernels)
        return len(kernels)

    monkeypatch.setattr(ahead, "compile_all", compile_all)
    return noted


def gemms(kernels: set[Asked]) -> list[Asked]:
    return [one for one in kernels if any(hasattr(argument, "tile") for argument in one.arguments)]


@pytest.mark.slow
def test_all_is_compiled_once_and_lies_in_the_cache(folder: Path) -> None:
    count = ops.prepare(**SMALL, workers=2)
    assert count == len(list(folder.glob("*.o"))) > 4
    assert ops.prepare(**SMALL) == 0
    assert ops.prepare(**SMALL, scale=2.5) > 0  # a constant of the gate, and of it alone
    names = {path.name.rpartition("-")[0] for path in folder.glob("*.o")}
    assert names == {"cute_gate", "cute_permute", "cute_combine", "cute_swapped"}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"])
def test_no_number_of_tokens_is_left_out(
    name: str, training: bool, asked: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some numbers are asked for, and these make every choice that any makes: here every seventh, and those around powers of two."""
    if training and PRESETS[name].activation != "swiglu":
        pytest.skip("has no kernels for its backward pass")
    some = ops.prepare(**sizes(name, training=training))
    found = asked["kernels"]
    monkeypatch.setattr(
        preparation,
        "_numbers",
        lambda most: sorted({*range(1, most, 7), *(1 << n for n in range(15)), *(1 + (1 << n) for n in range(14))}),
    )
    ops.prepare(**sizes(name, training=training))
    assert asked["kernels"] <= found and some == len(found)
    kinds: Counter[object] = Counter()
    for one in gemms(found):
        product = one.arguments[-1]
        kinds[
            one.module, product.columns, product.inner, product.top_k, product.waits == "" and not product.activation
        ] += 1
    assert len(kinds) >= 2 and len(gemms(found)) <= 8 * (6 if training else 2) + 2, kinds


def test_a_model_is_asked_for_as_it_is(asked: dict) -> None:
    plain = sizes("qwen3-30b-a3b", most_tokens=64)
    ops.prepare(**plain)
    first = asked["kernels"]
    for more, other in (
        ({"dtype": torch.float16}, {"cute_gate", "cute_permute"}),
        ({"logits": torch.bfloat16}, {"cute_permute", "cute_combine", "cute_swapped"}),
        ({"ids": torch.int64}, {"cute_gate", "cute_combine", "cute_swapped"}),
        ({"weights": torch.bfloat16}, {"cute_gate", "cute_permute", "cute_swapped"}),
        ({"scale": 2.0}, {"cute_permute", "cute_combine", "cute_swapped"}),
        ({"activation": "swiglu_limit10"}, {"cute_gate", "cute_permute", "cute_combine"}),
    ):
        ops.prepare(**plain | more)
        same = {module.rpartition(".")[2] for module in {one.module for one in first & asked["kernels"]}}
        assert same - {"cute_swapped"} == other - {"cute_swapped"}, more
    ops.prepare(**plain | {"capacity_factor": 1.0})
    assert asked["kernels"]


def test_noting_compiles_and_remembers_nothing(folder: Path) -> None:
    with cache.noting() as noted:
        assert cute_combine._compiled(COMBINE, "sm_90a", False, False) is None
        cute_combine.precompile(replace(COMBINE, tokens=128), "sm_90a")
    assert len(noted) == 1 and not list(folder.glob("*.o"))
    with cache.noting() as again:
        cute_combine.precompile(COMBINE, "sm_90a")
    assert again == noted


def test_other_threads_run_on_while_one_notes() -> None:
    with cache.noting() as noted, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cute_combine.choose_tiling, 64, 128, "bf16", 2).result()
        kernel = pool.submit(cute_combine.compile_for, "sm_90a", "bf16", 2, asked, False).result()
    assert kernel is not None and not noted


def test_a_kernel_that_fails_is_one_line_and_the_others_are_there(folder: Path) -> None:
    with cache.noting() as noted:
        cute_combine.precompile(COMBINE, "sm_90a")
    (good,) = noted
    bad = replace(good, arguments=("sm_1", *good.arguments[1:]))
    with pytest.raises(UserError, match=r"^compiling ahead: got .*; hint: 1 of 2 processes failed") as caught:
        ahead.compile_all([good, bad], workers=2)
    assert "\n" not in str(caught.value) and good.path.exists() and not bad.path.exists()
    assert ahead.compile_all([good]) == 0


def test_a_process_that_ends_is_no_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache.noting() as noted:
        cute_combine.precompile(COMBINE, "sm_90a")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="exit status 1"):
        ahead.compile_all(noted)


def test_a_capture_never_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match=r"^CUDA graph capture: got 'a kernel that is not compiled yet'.*ops\.prepare"):
        cute_combine.compile_for("sm_90a", "bf16", 2, cute_combine.choose_tiling(64, 256, "bf16", 2), False)
    assert not list(folder.glob("*.o"))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"arch": None}, "arch: got "),
        ({"most_tokens": 0}, "most_tokens: got 0"),
        ({"dtype": torch.int8}, "dtype: got "),
        ({"rule": "softmax"}, "rule: got "),
        ({"activation": "swish"}, "activation: got "),
        ({"top_k": 5}, "top_k: got 5"),
        ({"capacity_factor": -1.0}, "capacity factor: got "),
        ({"arch": "hopper"}, "arch: got 'hopper'"),
    ],
)
def test_bad_input_is_one_line(given: dict, what: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(what)}") as caught:
        ops.prepare(**SMALL | given)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command_compiles_a_model(tmp_path: Path) -> None:
    own = tmp_path / "models.yaml"
    own.write_text(
        "tiny: {hidden: 64, intermediate: 32, experts: 4, top_k: 2, router: softmax_topk, activation: swiglu}\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "moe_routing_bench.cli",
        "compile",
        "--model",
        "tiny",
        "--models",
        str(own),
        "--arch",
        "sm_90a",
        "--tokens",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tiny: [1-9]\d* kernels compiled", done.stdout)
    done = subprocess.run([*command, "--model", "tinny"], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 2 and "did you mean 'tiny'?" in done.stderr
