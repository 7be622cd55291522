"""Declarations of implementations in other packages: how they are read, checked, named in a config and fingerprinted."""

import importlib
import subprocess
import sys
from dataclasses import replace

import pytest

from example_package import EXAMPLE, install
from moe_routing_bench.benches import plugins
from moe_routing_bench.benches.bench import Peer
from moe_routing_bench.benches.registry import benches_of
from moe_routing_bench.config.expand import cell_of, expand
from moe_routing_bench.config.load import load
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import supervisor
from moe_routing_kernels import declarations
from moe_routing_kernels.errors import UserError

PACK = 'PACK = Plugin(bench="pack", name="own_pack", options={"tile": 4})\n'
KERNEL = '"""A kernel."""\nimport torch\nraise RuntimeError("was run")\n'
ENTRY = {"tokens": [64], "hidden": [64], "experts": [4], "top_k": [2]}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files below the working directory; nothing that was read before is remembered, nor what they add to the search path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for remembered in (
        plugins.read,
        declarations._entry_points,
        importlib.import_module("moe_routing_bench.benches.registry")._benches,
    ):
        remembered.cache_clear()

    def files(**texts: str) -> None:
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/', 1)}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return files


def test_a_declaration_is_read_and_nothing_is_run(write):
    """The module imports torch and raises; it is the module of its kernel, too."""
    write(made_single=KERNEL + PACK)
    (one,) = plugins.read("made_single")
    assert (one.bench, one.name, one.reference, one.options) == ("pack", "own_pack", "made_single:PACK", {"tile": 4})
    assert one.place("pack") == "made_single" and one.version() is None and "made_single" not in sys.modules
    assert plugins.read("made_single:PACK") == (one,)


def test_modules_are_found_from_the_package_of_the_declaration(write):
    text = (
        'from moe_routing_bench.benches import plugins\nA = plugins.Plugin(bench="pack", name="a", module=".kernel")\n'
    )
    text += 'B = plugins.Plugin(bench="layer", name="b", layout="compact", parts={"pack+experts": "made_package.kernel", "combine": "torch"})\n'
    text += 'C = plugins.Plugin(bench="pack", name="c", module=".kernel:rows")\n'
    write(made_package____init__=KERNEL, made_package__declared=text, made_package__kernel=KERNEL)
    first, second, third = plugins.read("made_package.declared")
    assert first.own_modules() == ["made_package.declared", "made_package.kernel"]
    assert second.own_modules() == ["made_package.declared", "made_package.kernel"]
    assert second.fused("pack+experts") == "made_package.kernel"
    assert third.place("pack") == "made_package.kernel:rows" and third.own_modules() == first.own_modules()


def test_a_package_that_a_kernel_wraps_is_its_peer(write):
    write(
        made="A = Plugin(bench='pack', name='a', requires=('cuda',), peer=Peer('acme', 'acme-kernels', 'pip install acme-kernels'))\n"
    )
    (one,) = plugins.read("made")
    assert one.peer == Peer("acme", "acme-kernels", "pip install acme-kernels") and one.requires == ("cuda",)


def test_an_editable_install_is_found_by_a_process_that_is_older(write, tmp_path, monkeypatch):
    """Its .pth file was written after the process had read those of its environment."""
    site, source = tmp_path / "site", tmp_path / "somewhere/else"
    source.mkdir(parents=True)
    site.mkdir()
    (source / "made_late.py").write_text(PACK)
    monkeypatch.setattr(declarations.site, "getsitepackages", lambda: [str(site)])
    with pytest.raises(UserError, match="no source of made_late"):
        plugins.read("made_late")
    (site / "editable.pth").write_text(f"{source}\n")
    assert plugins.read("made_late")[0].name == "own_pack"


@pytest.mark.parametrize(
    ("text", "reference", "said"),
    [
        ("", "made", "plugin: got 'made'; allowed: NAME = Plugin(...) of literals in made.py"),
        (PACK, "made:COMBINE", "plugin: got 'made:COMBINE'"),
        (PACK, "absent", "got 'no source of absent'; allowed: a module that is installed"),
        (PACK, "made.inner", "got 'no source of made.inner'"),
        (PACK, "json.decoder:X", "in decoder.py"),
        (PACK, "sys", "got 'no source of sys'"),
        (PACK, "__main__", "got 'no source of __main__'"),
        (PACK, "made/..", "plugin: got 'made/..'; allowed: package.module or package.module:NAME"),
        ("NAME = 'a'\nPACK = Plugin(bench='pack', name=NAME)", "made", "a declaration is read, not run"),
        ("PACK = Plugin(bench='pack', name='a', size=3)", "made", "unexpected keyword argument 'size'"),
        ("PACK = Plugin(name='a')", "made", "missing 1 required keyword-only argument: 'bench'"),
        ("PACK = Plugin(bench='pack', name='a'", "made", "was never closed"),
        (
            "PACK = Plugin(bench='pack', name='a', module='json.decoder')",
            "made",
            "got 'json.decoder'; allowed: modules of made",
        ),
        ("PACK = Plugin(bench='pack', name='a', module='.kernel')", "made", "got '.kernel'; allowed: modules of made"),
        ("PACK = Plugin(bench='pack', name='a', module='made.kernel')", "made", "got 'no source of made.kernel'"),
    ],
)
def test_what_cannot_be_read_is_one_line(write, monkeypatch, text, reference, said):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as of a script; `python -m pytest` gives it one
    write(made=text)
    with pytest.raises(UserError) as error:
        plugins.read(reference)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "bench='pack', name='torch'",
            "name of plugin made:P: got 'torch'; allowed: a new name; hint: pack has an implementation",
        ),
        ("bench='pack', name='b'", "hint: made:O has an implementation of this name"),
        ("bench='pakc', name='a'", "did you mean 'pack'?"),
        ("bench='pack', name='a,b'", "allowed: letters, digits and underscores"),
        ("bench='pack', name='a', requires=('cudaa',)", "requires of plugin made:P: got 'cudaa'"),
        ("bench='layer', name='a'", "parts of plugin made:P: got 'none'"),
        ("bench='layer', name='a', parts={'pack': 'torch'}", "layout of plugin made:P: got None; allowed: compact"),
        (
            "bench='layer', name='a', layout='compact', parts={'pack': 'torhc'}",
            "part pack of plugin made:P: got 'torhc'",
        ),
        ("bench='layer', name='a', layout='compact', parts={'gate': 'torch'}", "the stages are"),
        ("bench='pack', name='a', parts={'gate': 'torch'}", "the stages are"),
    ],
)
def test_what_no_bench_can_take_is_one_line(write, text, said):
    write(made=f"O = Plugin(bench='pack', name='b')\nP = Plugin({text})\n")
    with pytest.raises(UserError) as error:
        benches_of(["made"])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_config_names_plugins(write):
    """They come after a bench's own; a job names those that it has, also as parts, and is otherwise the job that it was."""
    write(
        made='A = Plugin(bench="pack", name="a")\nB = Plugin(bench="routing", name="b", layout="compact", parts={"pack": "a"})\n'
    )
    grid = [
        {"benches": ["pack", "routing"], "implementations": ["a", "torch", "b"], **ENTRY},
        {"benches": ["gate"], **ENTRY},
    ]
    pack, routing, gate = expand(load({"plugins": ["made"], "grid": grid}), {})
    assert (pack.implementations, pack.plugins) == (("torch", "a"), ("made:A",))
    assert (routing.implementations, routing.plugins) == (("torch", "b"), ("made:A", "made:B"))
    assert gate.plugins == () and "plugins" not in gate.spec and Job.from_spec(pack.spec) == pack
    assert plugins.bench_of(pack)["a"].place("pack") == "made"
    assert plugins.bench_of(routing).operation(plugins.bench_of(routing).stages[2])["a"].name == "a"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"plugins": ["absent"]}, "plugin absent: got 'no source of absent'"),
        ({"plugins": ["a b"]}, "config.plugins[0]: got 'a b'"),
        ({"plugins": "made"}, "hint: write [made]"),
        ({"plugins": ["made"], "implementations": ["aa"]}, "grid implementations: got 'aa'"),
        ({"implementations": ["a"]}, "grid implementations: got 'a'"),
    ],
)
def test_mistakes_of_a_config_are_one_line(write, config, said):
    write(made='A = Plugin(bench="pack", name="a")\n')
    entry = {"benches": ["pack"], **ENTRY} | {name: config[name] for name in config if name == "implementations"}
    with pytest.raises(UserError) as error:
        expand(load({"grid": [entry]} | {name: config[name] for name in config if name == "plugins"}), {})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_fingerprint_is_that_of_the_package(write, tmp_path):
    """Of what is imported within it, wherever it lies, and of nothing else."""
    declared = 'A = Plugin(bench="pack", name="a", module=".kernel")\n'
    kernel = "import json\nfrom made_code import helper\nimport torch\n"
    write(made_code____init__=declared, made_code__kernel=kernel, made_code__helper="", made_code__other="")
    job = Job(cell_of("pack", tokens=4, hidden=4, experts=4, top_k=2), ("a",), Settings(), plugins=("made_code:A",))
    before = plugins.fingerprint(job)
    (one,) = plugins.read("made_code:A")
    named = [line.split()[-1] for line in one.code().splitlines()]
    assert named == [*(f"made_code/{name}.py" for name in ("__init__", "helper", "kernel")), "None"]
    write(made_code__other="x = 1\n")
    assert plugins.fingerprint(job) == before and len(before or "") == 16
    write(made_code__helper="x = 1\n")
    assert plugins.fingerprint(job) != before and plugins.fingerprint(replace(job, plugins=())) is None


def test_what_it_imports_of_this_package_counts_too(write):
    """Wherever both lie; relative imports are within the other package."""
    text = "from . import other\nfrom moe_routing_kernels.errors import bad\n"
    write(
        made_user____init__='A = Plugin(bench="pack", name="a", module=".kernel")\n',
        made_user__kernel=text,
        made_user__other="",
    )
    lines = plugins.read("made_user")[0].code().splitlines()
    names = [line.split()[-1] for line in lines]
    assert {"made_user/kernel.py", "made_user/other.py", "moe_routing_kernels/errors.py"} <= set(names)
    ours = {name for name in names if name.startswith("moe_routing")}
    assert ours == {"moe_routing_kernels/__init__.py", "moe_routing_kernels/errors.py"} and len(set(names)) == len(
        names
    )


def test_a_compiled_kernel_is_named_by_the_code_of_its_package(write, tmp_path):
    """In the cache of CuTe DSL objects."""
    cache = pytest.importorskip("moe_routing_kernels.cute.cache", exc_type=ImportError)
    write(made_cute____init__="", made_cute__kernel="from made_cute import tiles\n", made_cute__tiles="")
    before = cache._key("made_cute.kernel", (1,))
    assert before == cache._key("made_cute.kernel", (1,)) != cache._key("made_cute.kernel", (2,))
    write(made_cute__tiles="WIDTH = 4\n")
    assert before != cache._key("made_cute.kernel", (1,)) and before.startswith("kernel-")


def test_sources_that_cannot_be_parsed_have_no_fingerprint(write):
    write(
        made_broken____init__='A = Plugin(bench="pack", name="a", module=".kernel")\n', made_broken__kernel="import 1\n"
    )
    with pytest.raises(UserError, match="plugin made_broken:A: got "):
        plugins.read("made_broken")[0].code()


def test_an_installed_package_is_known_by_its_entry_points(tmp_path):
    """And its version, in a process that never imports torch."""
    script = (
        "import sys\nfrom moe_routing_kernels import declarations\nfrom moe_routing_bench.benches import plugins\nfrom moe_routing_bench.benches.registry import benches_of\n"
        "found = declarations.installed()\n(one,) = plugins.read('own_kernel:COMBINE')\n"
        "print(found, one.version(), benches_of(found)['layer'].implementations[-1].name)\n"
        "assert 'torch' not in sys.modules and 'own_kernel' not in sys.modules"
    )
    environment = {"PYTHONPATH": f"{EXAMPLE.parents[1] / 'src'}:{install(tmp_path)}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "['own_kernel:COMBINE', 'own_kernel:LAYER'] 0.1.0 own_layer", done.stderr


@pytest.mark.slow
def test_a_row_names_the_code_that_was_there_when_its_cell_began(write, tmp_path):
    """So that a file which is edited meanwhile makes it stale."""
    edits = "open(__file__, 'a').write('# edited')"
    write(
        made_edits=f"""from moe_routing_bench.benches.plugins import Plugin
PACK = Plugin(bench="pack", name="edits")
def bind(problem, *, x, order, inverse, packed):
    {edits}
    return lambda: packed.copy_(x[order.long() // problem.top_k])
"""
    )
    quick = Settings(max_seconds=0.05, min_blocks=3, max_blocks=3, warmup_ms=1)
    job = Job(cell_of("pack", tokens=16, hidden=8, experts=4, top_k=2), ("edits",), quick, plugins=("made_edits:PACK",))
    before = plugins.fingerprint(job)
    (row,) = supervisor.measure(job)
    plugins.read.cache_clear()
    assert row["status"] == "ok" and row["plugin_fingerprint"] == before != plugins.fingerprint(job)
