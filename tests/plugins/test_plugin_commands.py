"""The command line with implementations of other packages: the example's, installed or in the working directory, and broken ones."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from example_package import EXAMPLE, bench, install, measured
from moe_routing_bench.cli import watch

SIZES = ("--tokens", "64", "--hidden", "64", "--max-seconds", "0.1", "--min-blocks", "3")
OWN = """
from moe_routing_bench.benches.plugins import Plugin

OWN = Plugin(bench="combine", name="own")


def bind(problem, *, y, inverse, topk_weights, combined, residual=None):
    raise KeyError("xx")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the search path in which the example is installed."""
    return install(tmp_path_factory.mktemp("installed"))


def test_an_installed_package_is_listed_checked_and_measured(site, tmp_path):
    """Beside our own, without being asked for; rows say the declaration, the version and the code."""
    assert "own_bmm (own_kernel:COMBINE)" in bench(tmp_path, "list", "--platform", "cpu", path=site).stdout
    assert "own_kernel:COMBINE: own_bmm of combine, 0.1.0" in bench(tmp_path, "doctor", path=site, check=False).stdout
    torch, own = measured(tmp_path, "combine", *SIZES, "--implementations", "torch,own_bmm", path=site)
    assert torch["status"] == own["status"] == "ok" and own["best_other"] == "torch" and own["rel_l2_error"] < 1e-2
    assert (own["plugin"], own["implementation_version"]) == ("own_kernel:COMBINE", "0.1.0") and "plugin" not in torch
    assert (
        torch["plugin_fingerprint"] == own["plugin_fingerprint"]
        and torch["code_fingerprint"] == own["code_fingerprint"]
    )


@pytest.mark.slow
def test_a_layer_has_the_kernel_as_a_part(site, tmp_path):
    asked = ("layer", *SIZES, "--intermediate", "32", "--implementations", "torch_grouped_mm,own_layer")
    rows = measured(tmp_path, *asked, path=site)
    assert [(row["status"], row["isolated"]) for row in rows] == [("ok", False), ("ok", True)]
    assert [name for name, _ in rows[0]["stage_us"]] == ["router", "permute", "pack", "experts", "combine"]
    assert "stage_us" not in rows[1], "its process would have to be believed"


def test_a_package_of_the_working_directory_is_measured(tmp_path):
    shutil.copytree(EXAMPLE / "own_kernel", tmp_path / "own_kernel")
    asked = ("combine", *SIZES, "--implementations", "own_bmm", "--plugin", "own_kernel:COMBINE")
    (row,) = measured(tmp_path, *asked)
    assert row["status"] == "ok" and row["plugin"] == "own_kernel:COMBINE" and row["implementation_version"] is None


def test_a_broken_kernel_is_a_row_with_its_file_and_line(tmp_path):
    """And `doctor` says of a module that it cannot be imported."""
    (tmp_path / "own.py").write_text(OWN)
    asked = ("measure", "combine", *SIZES, "--implementations", "own", "--plugin", "own", "--json")
    done = bench(tmp_path, *asked, check=False)
    (row,) = json.loads(done.stdout)
    assert (
        done.returncode == 1 and row["status"] == "crashed" and f"KeyError: 'xx' ({tmp_path}/own.py:8)" in row["reason"]
    )
    (tmp_path / "own.py").write_text(f"import nowhere\n{OWN}")
    done = bench(tmp_path, "doctor", "--plugin", "own", check=False)
    assert done.returncode == 1 and "own:OWN: No module named 'nowhere'" in done.stdout
    text = (tmp_path / "own.py").read_text()
    peer = 'peer=Peer(module="nowhere", distribution="nowhere", install="pip install nowhere"), '
    (tmp_path / "own.py").write_text(text.replace("Plugin(", f"Plugin({peer}", 1))
    done = bench(tmp_path, "doctor", "--plugin", "own", check=False)
    assert re.search(r"plugin +- +own:OWN: nowhere is not installed; pip install nowhere", done.stdout)


def test_what_does_not_fit_ends_with_one_line(tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace('name="own"', 'name="triton"'))
    for command in (("list", "--platform", "cpu"), ("measure", "combine")):
        done = bench(tmp_path, *command, "--plugin", "own", check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: name of plugin own:OWN: got 'triton'; allowed: a new name")


def test_a_watch_ends_with_the_fastest_version_and_not_the_last():
    """A version that is wrong meanwhile is none."""
    watching = watch._Watch.__new__(watch._Watch)
    watching._mine, watching._profile, watching._rounds = ["own"], None, 4
    watching._last, watching._fastest = {}, {}
    watching._rivals = SimpleNamespace(said=lambda *known: [])
    row = {"implementation": "own", "status": "ok", "ci_low_us": None}
    for us in (5.0, 3.0, None, 4.0):
        known = row | {"median_us": us} if us else row | {"status": "incorrect", "reason": "no", "median_us": None}
        watching._show({"own": known}, SimpleNamespace(seconds=1.0, output=lambda: ""))
    assert watching._last["own"]["median_us"] == 4.0
    assert watching.closing() == "4 rounds; fastest: own 3 us"
