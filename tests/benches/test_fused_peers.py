"""The layers of vLLM's and SGLang's Triton kernels: what they are given, and, where the packages' files are, what these make of it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fused_cases
import pytest
import torch
from torch import Tensor

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.peers import sglang_triton, vllm_triton
from moe_routing_bench.peers.loading import file_of
from moe_routing_kernels.experts.common import activate

PACKAGES = {"vllm": vllm_triton, "sglang": sglang_triton}
CASES = Path(fused_cases.__file__)
OAI = {"swigluoai": "swiglu_oai_unbiased", "silu": "swiglu", "gelu_tanh": "geglu"}


def dense(w: Tensor, scales: Tensor | None, zeros: Tensor | None, form: str | None, block: list[int] | None) -> Tensor:
    """Weights (E, N, K) as numbers, by the kernels' order of codes, scales and zero points."""
    if form is None:
        return w.float()
    assert scales is not None
    rows, columns = block or (1, 0)
    if form == "int4_w4a16":
        w = torch.stack([w & 15, w >> 4], -1).flatten(-2)
        zeros = None if zeros is None else torch.stack([zeros & 15, zeros >> 4], 2).flatten(1, 2)
    numbers = w.float()
    if block is None:
        assert w.dtype in (torch.int8, torch.float8_e4m3fn)
        return numbers * scales.float()[..., None]
    if form != "fp8_w8a8":
        offset = (
            zeros.float().repeat_interleave(columns, 2) if zeros is not None else 8 if form == "int4_w4a16" else 128
        )
        numbers = numbers - offset
    return numbers * scales.float().repeat_interleave(max(rows, 1), 1).repeat_interleave(columns, 2)


def fused_experts_impl(x, w13, w2, topk_weights, topk_ids, **options) -> Tensor:
    """Both packages' function in plain torch."""
    form = next((name.removeprefix("use_") for name in options if name.startswith("use_") and options[name]), None)
    block, clamped = options["block_shape"], options.get("gemm1_alpha") or options["activation"] == "swigluoai"
    ups = dense(w13, options["w1_scale"], options["w1_zp"], form, block)
    downs = dense(w2, options["w2_scale"], options["w2_zp"], form, block)
    biases = [options.get(name, options.get(other)) for name, other in (("b1", "w1_bias"), ("b2", "w2_bias"))]
    way = "relu2" if options["activation"].startswith("relu2") else OAI[options["activation"]]
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(w13)):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        bias = [0.0 if rows is None else rows[expert].float() for rows in biases]
        sums = x[token].float() @ ups[expert].T + bias[0]
        if clamped:  # gate and up in turns
            sums = torch.cat([sums[:, ::2], sums[:, 1::2]], 1)
        y = activate("swiglu_oai_unbiased" if clamped else way, sums) @ downs[expert].T + bias[1]
        total.index_add_(0, token, y * topk_weights[token, slot, None])
    return total.to(x.dtype)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages are there, in plain torch."""
    tables = SimpleNamespace(
        fused_experts_impl=fused_experts_impl,
        try_get_optimal_moe_config=lambda *given, return_down_config=False, **how: (
            ({"BLOCK_SIZE_M": 16}, (None, None)) if return_down_config else {"BLOCK_SIZE_M": 16}
        ),
        get_config_file_name=lambda experts, inner, form, *rest, **how: f"E={experts},N={inner},{form}.json",
        get_moe_configs=lambda *given: None,
        __file__=__file__,
    )
    monkeypatch.setattr(vllm_triton, "fused_moe", lambda: tables)
    monkeypatch.setattr(sglang_triton, "fused_moe", lambda: (tables, tables))
    for module in PACKAGES.values():
        monkeypatch.setattr(module, "missing", lambda: None)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("case", fused_cases.CASES)
def test_what_they_are_given(package: str, case: str, capsys: pytest.CaptureFixture) -> None:
    assert fused_cases.error_of(package, fused_cases.CASES[case]) is None
    out = capsys.readouterr().out
    assert "default tiles: no table E=" in out
    assert package != "vllm" or ",N=128," in out, "vLLM's tables go by the size before two codes are in a byte"


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"capacity_factor": 1.0}, "capacity"),
        ({"activation": "swiglu_limit10"}, "swiglu_limit10"),
        ({"dtype": "fp32", "packed": "fp32", "weights": "fp32"}, "one format"),
        ({"weights": "int4_row"}, "4 bits in groups"),
        ({"weights": "int8z_row"}, "not int8z_row"),
        ({"weights": "int2_g32"}, "not int2_g32"),
        ({"weights": "mxfp4"}, "not mxfp4"),
        ({"weights": "int4_g128", "intermediate": 192}, "multiples of 128"),
        ({"weights": "int4_g128", "activation": "swiglu_oai"}, "with swiglu_oai"),
        ({"packed": "fp8_block128", "weights": "e4m3_row"}, "e4m3_row with fp8_row"),
        ({"packed": "fp8_row"}, "e4m3_row with fp8_row"),
        ({"packed": "fp8_block128", "weights": "e4m3_block128", "activation": "swiglu_oai"}, "with swiglu_oai"),
    ],
)
def test_what_cannot_run_says_why(package: str, axes: dict, reason: str) -> None:
    assert reason in str(fused_cases.error_of(package, axes))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("package", PACKAGES)
def test_shared_experts_are_added(package: str) -> None:
    x, weights = torch.randn(3, 32).bfloat16(), torch.rand(3, 2)
    w13, w2, residual = (
        torch.randn(4, 32, 32).bfloat16(),
        torch.randn(4, 32, 16).bfloat16(),
        torch.randn(3, 32).bfloat16(),
    )
    ids = torch.tensor([[0, 1], [3, 2], [1, 0]], dtype=torch.int32)
    problem = (
        BENCHES["layer"]
        .definition()
        .problem(cell_of("layer", hidden=32, intermediate=16, experts=4, tokens=3, top_k=2))
    )
    given = {"x": x, "topk_ids": ids, "topk_weights": weights, "w13": w13, "w2": w2, "combined": torch.empty_like(x)}
    bind = PACKAGES[package].bind
    alone, both = bind(problem, **given)()["combined"], bind(problem, **given, residual=residual)()["combined"]
    assert torch.equal(both, alone + residual)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_not_there_says_so(package: str) -> None:
    if file_of(PACKAGES[package].MODULE):
        pytest.skip(f"{package} is installed")
    assert package in str(PACKAGES[package].missing())


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_files_of_the_package(package: str) -> None:
    """One subprocess runs every case: triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    if not file_of(PACKAGES[package].MODULE):
        pytest.skip(f"needs the files of {package} (docs/peers.md), which are not installed where tests run")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, str(CASES), package], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sglangs_newest_table_is_of_the_highest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.10 is newer than 3.9; the version that is here comes before both."""
    for version in ("3_9_0", "3_10_0", "3_2_0"):
        (tmp_path / f"configs/triton_{version}").mkdir(parents=True)
        (tmp_path / f"configs/triton_{version}/a.json").touch()
    tables = SimpleNamespace(__file__=str(tmp_path / "tables.py"))
    for version, folder in (("4.0.0", "3_10_0"), ("3.2.0", "3_2_0")):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
        assert sglang_triton._table(tables, "a.json") == f"table triton_{folder}/a.json"
    assert sglang_triton._table(tables, "b.json") is None
