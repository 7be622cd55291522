"""What a report says of itself, on hand-made rows: how much was measured, what names mean, other runs beside it, shares in one spelling."""

import pytest
from rows import frame, one

from browser import asked
from moe_routing_bench.figures import palette
from moe_routing_bench.grid.run_spec import DENSE
from moe_routing_bench.report import page, words
from moe_routing_bench.report.render import render
from moe_routing_kernels.routers.zoo import ZOO

pytestmark = pytest.mark.slow

GPU = {"gpu_name": "NVIDIA H200", "git_sha": "abcdef123", "started_at": "2026-11-21T06:55:00+00:00"}


def test_how_much_was_measured():
    """Rows, those with a time, cells, device, day and commit; one of each is singular; what is not known is said."""
    rows = [
        one("gate", "cute", cell="a", **GPU),
        one("gate", "torch", cell="a", **GPU),
        one("gate", "cute", cell="b", status="crashed", **GPU),
    ]
    assert words.scope(frame(*rows)) == "3 rows, 2 of them with a time, of 2 cells."
    assert words.measured(frame(*rows)) == "Measured by commit abcdef1 (2026-11-21), on NVIDIA H200 (GPU-1)."
    assert "by version 0.1.0, commit abcdef1" in words.measured(frame(*rows), {"abcdef123": "0.1.0"})
    changed = frame(*rows, one("gate", "torch", cell="c", **GPU | {"git_dirty": True}))
    said = words.measured(changed)
    assert "(GPU-1): 3 rows; by commit abcdef1 with changes (2026-11-21), on NVIDIA H200 (GPU-1): 1 row." in said
    alone = frame(one("gate", "torch", gpu_name=None, cpu_model="C", git_sha=None, started_at=None))
    assert words.scope(alone) == "1 row, 1 of them with a time, of 1 cell."
    assert words.measured(alone) == "Measured by commit unknown (date unknown), on C."


def test_how_many_rows_are_suspect():
    """Of those with a time; nothing where none is."""
    rows = [
        one("gate", "cute", suspect=True),
        one("gate", "torch"),
        one("gate", "triton", status="crashed", suspect=True),
    ]
    assert words.suspects(frame(*rows)) == "1 of 2 rows with a time is suspect"
    assert words.suspects(frame(rows[0], rows[0] | {"cell": "b"})) == "2 of 2 rows with a time are suspect"
    assert words.suspects(frame(*rows[1:])) == ""


def test_names_that_the_rows_have_are_explained():
    """Benches, our ways and packages of others; nothing of a name that no row has, nor of training where there is none."""
    known = dict(
        words.meanings(frame(one("gate", "cute"), one("gate", "quack"), one("pack", "unheard_of")), trained=False)
    )
    assert known["quack"] == "kernels of the package quack-kernels" and "CuTe DSL" in known["cute"]
    assert {"gate", "pack", "cell", "roofline"} < set(known)
    assert not {"torch", "vllm", "unheard_of", "combine", "causal rule"} & set(known)
    assert "causal rule" in dict(words.meanings(frame(one("gate", "cute")), trained=True))


def test_a_layer_that_is_put_together_names_its_parts():
    """With the package that a part is of; what this project's layer for models calls is not said to be another's."""
    names = ("cute", "cute_gather", "cute_quack", "torch_grouped_mm", "sonicmoe")
    known = dict(words.meanings(frame(*(one("layer", name) for name in names), one("model", "ops")), trained=False))
    assert known["cute_gather"] == "router, permute and combine by cute; pack+experts by gather of cute_experts"
    assert (
        known["cute_quack"]
        == "kernels of the package quack-kernels: router, permute, pack and combine by cute; experts by quack_heuristic"
    )
    assert known["torch_grouped_mm"] == "router, permute, pack and combine by torch; experts by torch_grouped_mm"
    assert (
        known["sonicmoe"]
        == "kernels of the package sonic-moe: router by cute; permute+pack+experts+combine by sonicmoe"
    )
    assert " by " not in known["cute"] and known["ops"].startswith("this project's layer")
    assert "sonicmoe" in dict(words.meanings(frame(one("training", "sonicmoe")), trained=False))


def test_other_runs_of_the_platform_are_linked(tmp_path):
    """Those that have a report; not of another platform whose name begins alike, and not the page itself."""
    for name in ("nvidia-h200", "nvidia-h200.layers", "nvidia-h200nvl", "nvidia-h100"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    (tmp_path / "nvidia-h200.empty").mkdir()
    assert words.siblings(tmp_path / "nvidia-h200/index.html") == [("layers", "../nvidia-h200.layers/index.html")]
    assert words.siblings(tmp_path / "nvidia-h200.layers/index.html") == [("the grid", "../nvidia-h200/index.html")]
    assert words.siblings(tmp_path / "nvidia-h100/index.html") == []
    render(frame(one("gate", "cute")), {}, tmp_path / "nvidia-h200/index.html")
    text = (tmp_path / "nvidia-h200/index.html").read_text()
    assert '<a href="../nvidia-h200.layers/index.html">layers</a>.' in text
    assert text.index('id="scope"') < text.index('id="ask"')
    render(frame(one("gate", "cute")), {}, tmp_path / "nvidia-h100/index.html")
    assert "Other runs" not in (tmp_path / "nvidia-h100/index.html").read_text()


def test_a_question_goes_to_another_run(tmp_path):
    """Where this one has no row of the stage: a link per run of the platform, with what was asked; without other runs, none."""
    for name in ("cpu.layers", "cpu.model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    found = {}
    for folder in ("cpu", "apart"):
        render(frame(one("gate", "cute", tokens=64, median_us=1.0)), {}, tmp_path / folder / "index.html")
        script = """document.querySelector("#question [name=bench]").value = "layer"; answer();
            return [byId("said").textContent, [...byId("said").querySelectorAll("a")].map(one => one.getAttribute("href"))];"""
        found[folder] = asked(tmp_path / folder / "index.html", script)
    said = "Not measured: this run has no row of layer with a time."
    assert found["apart"] == [said, []]
    assert found["cpu"][0] == f"{said} Ask another run: layers, model"
    assert [link.partition("#ask?")[0] for link in found["cpu"][1]] == [
        "../cpu.layers/index.html",
        "../cpu.model/index.html",
    ]
    assert all("bench=layer" in link and "tokens=64" in link for link in found["cpu"][1])


def test_shares_have_one_spelling():
    assert page.percent("5% of 95 %, 1.5%") == "5\u00a0% of 95\u00a0%, 1.5\u00a0%"
    assert page.percent("a % b") == "a % b"


def test_no_two_routers_look_alike():
    """Each has a colour and a mark of its own together, on paper and on the page; that of the dense model is no mark of a dark colour."""
    names = [*ZOO, DENSE]
    looks = {(palette.router(name), palette.symbol(name)): name for name in names}
    assert len(looks) == len(names)
    dark = [shape for (tint, shape), name in looks.items() if name != DENSE and max(bytes.fromhex(tint[1:])) < 0x60]
    assert dark and palette.symbol(DENSE) not in dark


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_no_column_breaks_words(width, tmp_path):
    """A text of a table has room for its words at every width: the table scrolls rather than breaking them to letters."""
    text = "threads were left running after the measurement, significantly more of them than before it"
    rows = [one("gate", "cute", cell=f"c{i}", status="incorrect", reason=f"{text}, {i}") for i in range(3)]
    render(frame(*rows), {}, tmp_path / "index.html")
    least = asked(
        tmp_path / "index.html",
        'return Math.min(...[...document.querySelectorAll(".scroll td.wide")].filter(one => one.offsetWidth).map(one => one.offsetWidth))',
        width=width,
    )
    assert least >= 9 * 15
