"""What a command is asked for: a config, its jobs, and a platform."""

import json
from pathlib import Path
from typing import Any

from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load
from moe_routing_bench.errors import bad
from moe_routing_bench.grid.job import Job
from moe_routing_bench.store import paths, platforms


def asked(
    configs: list[Path] | None, config_json: str | None, platform: str | None, run: str | None
) -> tuple[list[Job], str]:
    """The jobs of the effective config, and the folder of their results: of the platform and run that it names, unless they are given."""
    config = effective(configs, config_json)
    named = "." in (platform or "")
    return expand(config, presets.load(paths.MODELS)), platform_of(
        platform or config.get("platform"), run or (None if named else config.get("run"))
    )


def effective(configs: list[Path] | None, config_json: str | None) -> dict[str, Any]:
    """The effective config; `device: cpu` in it hides the GPU from this process too. Raises `UserError`."""
    if config_json is not None and configs:
        raise bad("--config-json", "together with --config", "one of them")
    if config_json is not None:
        try:
            source = json.loads(config_json)
        except json.JSONDecodeError as error:
            raise bad("--config-json", config_json, "one JSON text", str(error)) from error
        if not isinstance(source, dict):
            raise bad("--config-json", config_json, "a JSON object")
    else:
        source = configs or [paths.CONFIG]
    config = load(source)
    platforms.hide_gpu(config["device"])
    return config


def platform_of(name: str | None, run: str | None = None) -> str:
    """The folder of a platform's results, or of a named run on it; without a name this machine's platform."""
    return paths.folder(name or platforms.current(), run)
