"""`moe-routing-bench kernel`: what it writes is a plugin, and right."""

import ast
import sys

import pytest

from moe_routing_bench import api
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import init
from moe_routing_bench.cli import main as cli

SMALL = {"tokens": 64, "hidden": 64, "intermediate": 32, "experts": 4}


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command in an empty folder; return (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "kernel", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("bench", init.KERNELS)
def test_what_is_written_is_right_and_says_what_the_tensors_are(bench, call, tmp_path):
    name = f"begun_{bench}"
    code, out, _ = call(bench, f"{name}.py")
    assert (code, out) == (
        0,
        f"wrote {name}.py; next: moe-routing-bench watch {bench} --plugin {name} --implementations {name}\n",
    )
    text = (tmp_path / f"{name}.py").read_text()
    (bind,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "bind")
    shapes = f"{ast.get_docstring(ast.parse(text))} {ast.get_docstring(bind)}"
    assert all(one.arg in shapes for one in bind.args.kwonlyargs)
    values = {axis: value for axis, value in SMALL.items() if axis in BENCHES[bench].axes}
    assert api.check(bench, name, plugins=[name], **values).error is None


def test_every_bench_has_one_or_is_made_of_others(call):
    composed = {"training", "model", *(name for name, bench in BENCHES.items() if bench.stages)}
    assert not composed & set(init.KERNELS)
    for bench in composed:
        code, _, error = call(bench, "mine.py")
        assert code == 2 and "examples/own_kernel" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gat", "mine.py"], "did you mean 'gate'?"),
        (["gate", "my-gate.py"], "letters, digits and underscores before .py"),
        (["gate", "mine"], "before .py"),
        (["gate", "triton.py"], "gate has an implementation triton"),
        (["gate", "numpy.py"], "there is a module numpy already"),
        (["gate", "taken.py"], "it is there already"),
        (["gate", "taken.py/mine.py"], "output: got 'taken.py/mine.py'"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments, said, call, tmp_path):
    (tmp_path / "taken.py").write_text("mine = 1\n")
    code, out, error = call(*arguments)
    assert (code, out) == (2, "") and said in error and error.count("\n") == 1
    assert [one.read_text() for one in tmp_path.iterdir()] == ["mine = 1\n"]
