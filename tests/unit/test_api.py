"""The benchmark as a library: rows and checks without the command line, outside the checkout."""

import re
import subprocess

import pyarrow as pa
import pytest

import forks
from moe_routing_bench import api
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_kernels.errors import UserError
from project import ROOT

SMALL = {"tokens": 64, "hidden": 64, "intermediate": 32, "experts": 4}
KERNEL = """
from moe_routing_bench.benches.plugins import Plugin

OWN = Plugin(bench="combine", name="api_own")


def bind(problem, *, y, inverse, topk_weights, combined, residual=None):
    def combine():
        rows = y[inverse.long()].float() * topk_weights.unsqueeze(-1)
        combined.copy_(FACTOR * (rows.sum(1) if residual is None else rows.sum(1) + residual))

    return combine
"""


def test_a_job_is_what_the_command_line_measures():
    """Axes that are not given have typical values; a list is a sweep; a model gives its own sizes."""
    (job,) = api.jobs("gate", ["torch"], settings={"max_seconds": 0.1})
    assert (job.cell.tokens, job.cell.top_k, job.settings.max_seconds) == (1024, 2, 0.1)
    two = api.jobs("pack", tokens=[64, 128], hidden=64)
    assert [one.cell.tokens for one in two] == [64, 128] and len(two[0].implementations) > 3
    (modelled,) = api.jobs("layer", ["torch_bmm"], model="mixtral-8x7b", tokens=64)
    assert (modelled.cell.hidden, modelled.cell.experts) == (4096, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokens": -5}, "^tokens: got -5; allowed: an integer from 1"),
        ({"tokens": "64"}, "^tokens: got '64'"),
        ({"tokns": 5}, "^axis: got 'tokns'.*did you mean 'tokens'"),
        ({"implementations": ["troch"]}, "^implementations: got .troch.*did you mean 'torch'"),
        ({"settings": {"max_second": 1}}, "did you mean 'max_seconds'"),
        ({"settings": {"max_seconds": -1}}, "^max_seconds: got -1"),
        ({"plugins": ["nowhere"]}, "no source of nowhere"),
    ],
)
def test_bad_arguments_are_named_as_they_were_given(arguments, said):
    with pytest.raises(UserError, match=said):
        api.jobs("gate", **arguments)


@pytest.mark.parametrize("bench", ["gate", "router", "permute", "pack", "experts", "combine", "routing", "layer"])
def test_every_baseline_is_right(bench):
    values = {name: value for name, value in SMALL.items() if name in BENCHES[bench].axes}
    assert api.check(bench, BENCHES[bench].baseline, **values).error is None


def test_a_check_says_what_is_wrong_and_raises_what_a_kernel_raises(tmp_path, monkeypatch):
    """In this process, for a debugger."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, factor in (("api_right", "1"), ("api_wrong", "2"), ("api_broken", "factor")):
        (tmp_path / f"{name}.py").write_text(KERNEL.replace("FACTOR", factor))
    right, wrong = (api.check("combine", "api_own", plugins=[name], **SMALL) for name in ("api_right", "api_wrong"))
    assert right.error is None and right.rel_l2_error < right.tolerance
    assert wrong.error and wrong.error.startswith("combined: relative L2 error")
    (tmp_path / "api_short.py").write_text(
        KERNEL.replace("    return combine", "    return lambda: {'combined': combined[:3]}")
    )
    assert api.check("combine", "api_own", plugins=["api_short"], **SMALL).error == (
        "combined: bfloat16 of shape (3, 64), not bfloat16 of shape (64, 64)"
    )
    with pytest.raises(NameError, match="factor"):
        api.check("combine", "api_own", plugins=["api_broken"], **SMALL)
    with pytest.raises(UserError, match=r"of combine: got .cute.; allowed: one that can.*needs an NVIDIA GPU"):
        api.check("combine", "cute", **SMALL)
    with pytest.raises(UserError, match="2 cells"):
        api.check("combine", "torch", tokens=[64, 128])


def test_rows_without_a_baseline_have_one_that_dequantises(monkeypatch):
    """Cell by cell, in the order of the jobs."""

    def measured(job, out):
        times = {"dequant": 20.0, "cute_quantised": 10.0 if job.cell.tokens == 64 else 5.0}
        known = {"status": "ok", "weights": "int4_g128", "set_aside": 0, "turns": "short", "baseline": None}
        return [
            known | {"implementation": name, "block_medians_us": [us, us], "tokens": job.cell.tokens}
            for name, us in times.items()
        ]

    monkeypatch.setattr(api, "_measured", measured)
    rows = api.measure(
        "experts", **SMALL | {"tokens": [64, 128], "hidden": 256, "intermediate": 256}, weights="int4_g128"
    )
    assert [(row["tokens"], row["baseline"], row["speedup"]) for row in rows] == [
        (64, "dequant", 1.0),
        (64, "dequant", pytest.approx(2.0)),
        (128, "dequant", 1.0),
        (128, "dequant", pytest.approx(4.0)),
    ]


@pytest.mark.parametrize(
    ("code", "written", "statuses", "out", "err", "raised", "printed"),
    [
        (0, True, ["ok", "unsupported"], "", "careful", None, ""),
        (0, True, ["ok", "crashed"], "", "careful", None, "careful"),
        (1, True, ["ok"], "", "error: no memory\n", "^no memory$", ""),
        (0, False, ["ok"], "said so", "", "^said so$", ""),
        (3, False, ["ok"], "", "", "^exit status 3$", ""),
    ],
)
def test_a_measurement_that_made_no_rows_is_an_error(
    code, written, statuses, out, err, raised, printed, tmp_path, monkeypatch, capsys
):
    """What a failed implementation prints is passed on; what a sound one prints is not."""
    (job,) = api.jobs("gate", ["torch"])
    path = tmp_path / "rows.parquet"
    if written:
        path.touch()
    done = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(api.subprocess, "run", lambda *_, **__: done)
    rows = [{"status": status} for status in statuses]
    monkeypatch.setattr(api.records, "read", lambda _: pa.Table.from_pylist(rows))
    if raised:
        with pytest.raises(UserError, match=raised):
            api._measured(job, path)
    else:
        assert api._measured(job, path) == rows and capsys.readouterr().err == printed


def test_plug_ins_that_are_installed_take_part_once(monkeypatch):
    asked = []
    monkeypatch.setattr(api.declarations, "installed", lambda: ["theirs", "mine"])
    monkeypatch.setattr(api.by_hand, "jobs", lambda *known: asked.append(known) or [])
    api.jobs("gate", ["torch"], plugins=["mine", "other"], tokens=8, isolate="all")
    assert asked == [("gate", ["torch"], {"tokens": 8}, {}, ["theirs", "mine", "other"], {}, "all")]
    monkeypatch.setattr(api.presets, "load", lambda *files: {"files": files[1:]})
    api.jobs("layer", model="m", models="own.yaml")
    assert asked[1][5] == {"files": ("own.yaml",)}


def test_a_script_outside_the_checkout(tmp_path):
    """The one of docs/usage.md, for less long, after torch has been used; then a kernel of the folder that fails: why, and its traceback."""
    page = (ROOT / "docs/usage.md").read_text()
    (shown,) = re.findall(r"^```python\n(from moe_routing_bench import api.*?)^```", page, re.M | re.S)
    (tmp_path / "api_broken.py").write_text(KERNEL.replace("FACTOR", "factor"))
    text = f"""
import torch
torch.randn(512, 512).square().sum()
{shown.replace("top_k=8)", "top_k=8, settings={'max_seconds': 0.1, 'min_blocks': 3})", 1)}
(row,) = api.measure("combine", ["api_own"], plugins=["api_broken"], **{SMALL})
print(row["status"], row["reason"], row["median_us"])
"""
    environment = forks.environment(ROOT / "src") | {
        "MOE_ROUTING_BENCH_DEVICE": "cpu",
        "MOE_ROUTING_BENCH_WORKER": "cold",
    }
    done = subprocess.run(
        [forks.programs() / forks.PYTHON, "-c", text],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    measured, _, unsupported, checked, broken = done.stdout.splitlines()
    assert re.fullmatch(r"torch ok [\d.]+ None", measured) and "needs an NVIDIA GPU" in unsupported
    assert checked.startswith("right: relative error")
    assert re.fullmatch(
        r"crashed preparing: NameError: name 'factor' is not defined \(\S*api_broken.py:\d+\) None", broken
    )
    assert "Traceback" in done.stderr and "NameError: name 'factor'" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"api_broken.py", "__pycache__"}
