"""Read a config: YAML files, merged, checked, with defaults; every mistake is one line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_routing_bench.config import schema, strict_yaml
from moe_routing_bench.config.sections import DEFAULTS, Config
from moe_routing_kernels.errors import bad


def load(source: Mapping[str, Any] | str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """A validated config with its defaults filled in.

    `source` is a path, several paths (a later file overrides an earlier one: mappings are merged, lists replaced, as
    Snakemake does) or a mapping that was read already. Raises `UserError` for anything that `sections.Config` does not allow.
    """
    if isinstance(source, Mapping):
        config = dict(source)
    else:
        config = {}
        for path in [source] if isinstance(source, str | Path) else source:
            config = _merged(config, read_mapping(Path(path)))
    schema.validated(Config, config, "config")
    if config.get("device") == "cpu" and config.get("platform", "cpu") != "cpu":
        raise bad("config.platform", config["platform"], "cpu, as device is cpu", "leave device out")
    return {**DEFAULTS, **config}


def on(config: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """A loaded config as it is for a platform: on ``cpu`` the parts that its section `cpu` has stand in for its own."""
    rest = {name: value for name, value in config.items() if name != "cpu"}
    return rest | config.get("cpu", {}) if platform == "cpu" else rest


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping; `UserError` for any other file."""
    try:
        content = strict_yaml.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise bad(
            "config file", str(path), "a readable YAML file", getattr(error, "strerror", None) or "not UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise bad("config file", str(path), "valid YAML", str(error)) from error
    if not isinstance(content, dict):
        raise bad(f"config file {path}", type(content).__name__, "a mapping of keys to values")
    return content


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: _merged(base[k], v) for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **over, **both}
