"""`ops.prepare`: it compiles all that a model's operators may choose, once, side by side; and a capture never compiles."""

import functools
import itertools
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forks
from campaign import sampled

pytest.importorskip("cutlass")
from moe_routing_bench.config import presets
from moe_routing_kernels import ops
from moe_routing_kernels.combine import Combine, cute_combine
from moe_routing_kernels.cute import ahead, cache
from moe_routing_kernels.cute.cache import Asked
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.gemm.sm90.tile import GroupedGemm, Tile
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import preparation
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute import RowLayout
from moe_routing_kernels.target import Target
from project import ROOT
from signals import interruptible, runs

PRESETS = presets.load(Path(__file__).parents[2] / "config/models.yaml")
SMALL = {"hidden": 64, "intermediate": 32, "experts": 4, "top_k": 2, "arch": "sm_90a", "most_tokens": 2}
ONE_TOKEN = SMALL | {"most_tokens": 1}
COMBINE = Combine(64, 128, 2, "bf16", dropping=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; nothing that was loaded before is remembered for it. What compiles is a fork that has imported the compiler."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(forks.programs() / "python"))
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


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with all kernels of SMALL and one token, which two processes have filled at the same time. Not to be changed."""
    folder = tmp_path_factory.mktemp("filled")
    python, forked = forks.programs() / "python", forks.programs() / forks.PYTHON
    code = f"import sys; from moe_routing_kernels import ops; sys.executable = '{python}'; ops.prepare(**{ONE_TOKEN | {'workers': 1}})"
    environment = forks.environment(ROOT / "src") | {cache.FOLDER: str(folder)}
    both = [subprocess.Popen([forked, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    return folder


@pytest.fixture
def copied(filled: Path, folder: Path) -> Path:
    """The cache of this test, with what `filled` holds."""
    shutil.copytree(filled, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.slow
def test_two_processes_share_a_cache_that_both_fill(copied: Path) -> None:
    assert not list(copied.glob(".*.tmp")) and ops.prepare(**ONE_TOKEN) == 0
    names = {path.name.rpartition("-")[0] for path in cache.objects()}
    assert names == {"cute_gate", "cute_permute", "cute_combine", "grouped_gemm"} and len(cache.objects()) > 4


@pytest.mark.slow
def test_what_is_missing_is_compiled_once_side_by_side(copied: Path) -> None:
    there = cache.objects()
    for path in (there[0], there[-1]):
        path.unlink()
    assert ops.prepare(**ONE_TOKEN, workers=2) == 2 and cache.objects() == there
    assert ops.prepare(**ONE_TOKEN) == 0
    assert ops.prepare(**ONE_TOKEN, scale=2.5) == len(set(cache.objects()) - set(there)) > 0
    new = {path.name.rpartition("-")[0] for path in set(cache.objects()) - set(there)}
    assert new == {"cute_gate"}, "the scale is a constant of the gate, and of it alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "training"),
    sampled(
        itertools.product(["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"], [False, True]),
        [("qwen3-30b-a3b", True), ("gpt-oss-120b", False)],
        unpack=True,
    ),
)
def test_no_number_of_tokens_is_left_out(
    name: str, training: bool, asked: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some numbers are asked for, and these make every choice that any makes: here every 29th, and those around powers of two."""
    if training and PRESETS[name].activation != "swiglu":
        pytest.skip("has no kernels for its backward pass")
    some = ops.prepare(**sizes(name, training=training))
    found = asked["kernels"]
    monkeypatch.setattr(
        preparation,
        "_numbers",
        lambda most: sorted({*range(1, most, 29), *(1 << n for n in range(15)), *(1 + (1 << n) for n in range(14))}),
    )
    ops.prepare(**sizes(name, training=training))
    assert asked["kernels"] <= found and some == len(found)
    kinds: Counter[object] = Counter()
    for one in gemms(found):
        gemm = one.arguments[-1]
        kinds[one.module, gemm.columns, gemm.inner, gemm.top_k, gemm.waits == "" and not gemm.activation] += 1
    assert len(kinds) >= 2 and len(gemms(found)) <= 8 * (6 if training else 2) + 2, kinds


def test_a_model_is_asked_for_as_it_is(asked: dict) -> None:
    plain = sizes("qwen3-30b-a3b", most_tokens=64)
    ops.prepare(**plain)
    first = asked["kernels"]
    for more, other in (
        ({"dtype": torch.float16}, {"cute_gate", "cute_permute"}),
        ({"logits": torch.bfloat16}, {"cute_permute", "cute_combine", "grouped_gemm"}),
        ({"ids": torch.int64}, {"cute_gate", "cute_combine", "grouped_gemm"}),
        ({"weights": torch.bfloat16}, {"cute_gate", "cute_permute", "grouped_gemm"}),
        ({"scale": 2.0}, {"cute_permute", "cute_combine", "grouped_gemm"}),
        ({"activation": "swiglu_limit10"}, {"cute_gate", "cute_permute", "cute_combine"}),
    ):
        ops.prepare(**plain | more)
        same = {module.rpartition(".")[2] for module in {one.module for one in first & asked["kernels"]}}
        assert same - {"grouped_gemm"} == other - {"grouped_gemm"}, more
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


@pytest.mark.slow
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


def test_what_compiles_here_is_a_fork(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch and the compiler takes ten times as long as compiling a kernel here."""
    with cache.noting() as noted:
        cute_combine.precompile(COMBINE, "sm_90a")
    monkeypatch.setattr(ahead, "_PROGRAM", "import sys\nsys.exit('a fork' if 'torch' in sys.modules else 'new')")
    with pytest.raises(UserError, match="got 'a fork'"):
        ahead.compile_all(noted)


def test_kernels_with_more_variants_compile_first() -> None:
    """The order of `compile_all`: compiling takes as long as there are variants of the main loop."""
    tiles = (Tile(2, 2, 176, narrowest=88), Tile(2, 2, 176))
    many, one = (
        Asked("a", "compile_for", ("sm_90a", "bf16", GroupedGemm(768, 2048, 128, "swiglu", tile))) for tile in tiles
    )
    other = Asked("b", "compile_for", ("sm_90a", 128))
    assert ahead.variants(many) == len(tiles[0].n_sizes) > ahead.variants(one) == 1 > ahead.variants(other) == 0


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
        ({"arch": ""}, "arch: got ''"),
        ({"arch": 90}, "arch: got 90"),
        ({"arch": "sm_75"}, "arch: got 'sm_75'"),
        ({"arch": "sm_90"}, "arch: got 'sm_90'"),
        ({"arch": "sm_999a"}, "arch: got 'sm_999a'"),
        ({"workers": 0}, "workers: got 0"),
        ({"workers": -1}, "workers: got -1"),
        ({"workers": 1.5}, "workers: got 1.5"),
        ({"hidden": 0}, "hidden: got 0"),
        ({"hidden": 64.0}, "hidden: got 64.0"),
        ({"intermediate": -8}, "intermediate: got -8"),
        ({"experts": 0}, "experts: got 0"),
        ({"ids": torch.int8}, "topk_ids: got "),
        ({"weights": torch.float16}, "weights: got "),
        ({"most_tokens": 2**31}, "assignments: got 4294967296"),
        ({"most_tokens": 2.5}, "most_tokens: got 2.5"),
        ({"scale": [2]}, "scale: got "),
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


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "other",
    [{"arch": "sm_80"}, {"arch": "sm_100a"}, {"arch": "sm_120a"}, {"intermediate": 30}, {"dtype": torch.float32}],
)
def test_where_experts_have_no_kernels_those_around_them_are_compiled(other: dict, training: bool, asked: dict) -> None:
    ops.prepare(**SMALL | other, training=training)
    modules = {one.module.rpartition(".")[2] for one in asked["kernels"]}
    assert {"cute_gate", "cute_permute", "cute_combine"} <= modules
    assert modules <= {"cute_gate", "cute_permute", "cute_pack", "cute_combine"}
    assert all(other.get("arch", "sm_90a") in one.arguments for one in asked["kernels"])


@pytest.mark.slow
def test_kernels_around_experts_compile_for_an_architecture_without_those(folder: Path) -> None:
    """One that test_cute_compile has not."""
    assert ops.prepare(**ONE_TOKEN | {"arch": "sm_120a"}, training=True) == len(cache.objects()) > 3


def test_another_thread_runs_kernels_while_one_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server does that prepares another model."""
    loaded, got = object(), []
    monkeypatch.setattr(cache, "_load", lambda path, tell=False: loaded)
    shape = ("sm_90a", "bf16", 3, cute_combine.choose_tiling(64, 256, "bf16", 3), False)
    with cache.noting() as noted:
        thread = threading.Thread(target=lambda: got.append(cute_combine.compile_for(*shape)))
        thread.start()
        thread.join()
        assert cute_combine.compile_for(*shape) is None and len(noted) == 1
    assert got == [loaded]


@pytest.mark.slow
def test_a_folder_that_is_only_read_serves_what_it_holds(
    filled: Path, folder: Path, asked: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written next to an object, not even a lock, as in a cache that comes with a container image."""
    ops.prepare(**ONE_TOKEN)
    kernel = next(one for one in asked["kernels"] if one.module.endswith(".cute_combine"))
    given, none = folder / "given", folder / "file"
    none.write_text("no folder", encoding="utf-8")
    monkeypatch.setenv(cache.FOLDER, str(none))
    with pytest.raises(UserError, match=f"^kernel cache: got '{none}'.*{cache.FOLDER}"):
        cute_combine.compile_for(*kernel.arguments)
    given.mkdir()
    held = Path(shutil.copy(filled / kernel.path.name, given))
    monkeypatch.setenv(cache.FOLDER, str(given))
    with monkeypatch.context() as patch:
        patch.setattr(cute_combine, "compile_kernel", None)
        assert cute_combine.compile_for(*kernel.arguments)
    assert list(given.iterdir()) == [held]


def children(pid: int) -> set[int]:
    return {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
def test_an_interrupt_ends_the_processes(folder: Path) -> None:
    code = f"from moe_routing_kernels import ops; ops.prepare(**{SMALL | {'workers': 2}}, training=True)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible) as process:
        while len(found := children(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        compiled = len(list(folder.glob("*.o")))
        process.send_signal(signal.SIGINT)
        assert process.wait(120) and process.stderr and "KeyboardInterrupt" in process.stderr.read()
    assert len(list(folder.glob("*.o"))) <= compiled + 2, "no kernel that waits is compiled"
    assert not any(map(runs, found))
    assert not list(folder.glob(".*.tmp"))


def test_a_kernel_that_fails_is_named(folder: Path) -> None:
    with cache.noting() as noted:
        cute_combine.precompile(COMBINE, "sm_90a")
    (good,) = noted
    with pytest.raises(UserError, match=r"^compiling ahead: got .cute_combine: \w+: ") as caught:
        ahead.compile_all([replace(good, arguments=("sm_1", *good.arguments[1:]))])
    assert "\\x1b" not in str(caught.value)


@pytest.mark.slow
def test_the_command_compiles_a_model(tmp_path: Path, copied: Path) -> None:
    """Only those that are missing: most are there."""
    for path in cache.objects()[:2]:
        path.unlink()
    own = tmp_path / "models.yaml"
    own.write_text(
        "tiny: {hidden: 64, intermediate: 32, experts: 4, top_k: 2, router: softmax_topk, activation: swiglu}\n",
        encoding="utf-8",
    )
    command = [
        "moe-routing-bench",
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
    run = functools.partial(
        subprocess.run,
        env=forks.environment(ROOT / "src"),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tiny: [1-9]\d* kernels compiled in .*, the others were in the cache", done.stdout)
    done = run([*command, "--model", "tinny"])
    assert done.returncode == 2 and "did you mean 'tiny'?" in done.stderr


@pytest.mark.parametrize("training", [False, True])
def test_kernels_of_a_layer_over_ranks(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate knows all experts, the exchange sends a rank's tokens to ranks, and the rest is a layer of all tokens and the rank's experts, with no gate of its own."""
    found: list[tuple[object, dict[str, object]]] = []
    monkeypatch.setattr(preparation, "_compile", lambda problem, target, **options: found.append((problem, options)))
    layout = RowLayout(1001, 8, 128)
    whole = Layer(layout, 2048, 768, "bf16", "bf16", "bf16", router="softmax_topk_renorm")
    target = Target.named("sm_90a")
    with cache.noting() as experts:  # which are not compiled through `_compile`
        preparation.compile_ep_layer(whole, 4, target, spare=1, training=training)
    own, rest = found[:4], found[4:]
    assert own == [
        (Gate(251, 128, 8, "fp32", "softmax_topk_renorm"), {}),
        (RowLayout(251, 4, 4).problem, {}),
        (Pack(251, 2048, 4, 251 * 4, "bf16", "bf16", padding=True), {}),
        (Combine(251, 2048, 4, "bf16", dropping=True), {"add": False}),
    ]
    local = replace(whole, layout=RowLayout(1001, 8, 33, ranks=1 if training else 4))
    found.clear()
    with cache.noting() as alone:
        preparation.compile_layer(local, target, inference=not training, training=training)
    assert found[0][0] == Gate(1001, 33, 8, "fp32", "softmax_topk_renorm") and found[1:] == rest
    assert experts == alone and experts
