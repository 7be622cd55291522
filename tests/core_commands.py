"""Each command of an installation without extras, run as a program: it prints what became of them as JSON. Arguments are modules to hide.

It needs nothing but the standard library and the package.
"""

import contextlib
import io
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}
# Arguments and exit status of those that need no extra; `doctor` says that torch is not there.
LIGHT = {
    "ask": (["deepseek-v3", "--tokens", "64"], 0),
    "list": (["--platform", "nvidia-h200"], 0),
    "doctor": ([], 1),
    "init": (["bench"], 0),
    "preset": (["."], 0),
}


class Hidden:
    """A finder of modules that does not find some."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        return None if name.partition(".")[0] in self.names else PathFinder.find_spec(name, path, target)  # type: ignore


def outcome(name: str, arguments: list[str]) -> tuple[int, str, str]:
    """Exit status, output and errors of a command."""
    from moe_routing_bench.cli.main import main

    sys.argv = ["moe-routing-bench", name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), error.getvalue()


def imported() -> tuple[int, str, str]:
    """What becomes of `from moe_routing_bench import api`: 0 or 1, and the type and text of what it raised."""
    try:
        from moe_routing_bench import api
    except Exception as error:
        return 1, type(error).__name__, str(error)
    return 0, api.__name__, ""


def run(hidden: list[str]) -> dict[str, tuple[int, str, str]]:
    """What became of each command, by name."""
    if hidden:  # a finder of modules only: installed distributions are not found by it
        sys.meta_path = [Hidden(hidden) if finder is PathFinder else finder for finder in sys.meta_path]
    from moe_routing_bench.cli.commands import SECTIONS

    Path("config.json").write_text(json.dumps(MODEL))
    names = [name for section in SECTIONS.values() for name in section]
    found = {name: outcome(name, LIGHT[name][0] if name in LIGHT else []) for name in names}
    found["api"] = imported()
    loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "pyarrow", "pandas"}
    return found | {"loaded": (0, ", ".join(sorted(loaded)), "")}


if __name__ == "__main__":
    json.dump(run(sys.argv[1:]), sys.stdout)
