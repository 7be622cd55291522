"""What the workflow and the commands share: the request of a user, and how much of it is done.

A request is a config, its jobs, the platform whose results they are, and a share of it for one of several machines.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load, on
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.store import paths, platforms
from moe_routing_bench.store.project_files import own_or_shipped
from moe_routing_kernels import declarations
from moe_routing_kernels.errors import bad, one_line

LAST = "config.json"  # in a folder of results
FINE = ("ok", "unsupported")  # statuses of rows that need no attention


def last(platform: str) -> Path:
    """The effective config, as JSON, with which the workflow was last run for this folder of results."""
    return paths.results(platform) / LAST


def config_or_last(
    configs: list[Path] | None, config_json: str | None, platform: str | None, run: str | None
) -> tuple[dict[str, Any], str, str | None]:
    """The effective config, the folder of its results, and where the config is from.

    Without a config it is the one that the workflow was last run with for this folder, or, where there was none, the default config,
    and then the last value is None.
    """
    config = effective(configs, config_json)
    folder = _folder(config, platform, run)
    config = _on(config, folder)
    if configs or config_json is not None:
        return config, folder, "--config-json" if config_json is not None else ", ".join(map(str, configs or []))
    from moe_routing_bench.store import companions  # with Arrow, which a list of models does not need

    kept = last(folder)
    if companions.is_there(kept):
        return effective(None, json.dumps(companions.mapping(kept))), folder, str(kept)
    return config, folder, None


def jobs_of(config: dict[str, Any]) -> list[Job]:
    """The jobs of an effective config. Raises `UserError`."""
    return expand(config, models(config.get("models")))


def models(own: str | Path | None = None) -> dict[str, Any]:
    """The model presets of the working directory, or else of the package, and those of a user's own file."""
    return presets.load(own_or_shipped(paths.MODELS), own)


def references(given: list[str] | None) -> list[str]:
    """References of the plugins that are installed, and of those that a command is given."""
    return list(dict.fromkeys([*declarations.installed(), *(given or [])]))


def _folder(config: dict[str, Any], platform: str | None, run: str | None) -> str:
    """The folder of results of the platform and run that a config names, unless they are given."""
    named = "." in (platform or "")
    return platform_of(platform or config.get("platform"), run or (None if named else config.get("run")))


def _on(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A config as it is for the platform of a folder of results."""
    return on(config, folder.partition(".")[0])


def effective(configs: list[Path] | None, config_json: str | None) -> dict[str, Any]:
    """The effective config; `device: cpu` in it hides the GPU from this process too. Raises `UserError`."""
    if config_json is not None and configs:
        raise bad("--config-json", "together with --config", "one of them")
    if config_json is not None:
        try:
            source = json.loads(config_json)
        except (ValueError, RecursionError) as error:
            raise bad("--config-json", config_json, "one JSON text", str(error)) from error
        if not isinstance(source, dict):
            raise bad("--config-json", config_json, "a JSON object")
    elif configs or paths.CONFIG.exists():
        source = configs or [paths.CONFIG]
    else:
        raise bad("config", f"no {paths.CONFIG} here", "one", "`moe-routing-bench init FOLDER` makes a folder with one")
    config = load(source)
    platforms.hide_gpu(config["device"])
    return config


def platform_of(name: str | None, run: str | None = None) -> str:
    """The folder of a platform's results, or of a named run on it; without a name this machine's platform."""
    return paths.folder(name or platforms.current(), run)


def groups_of(share: str | None, jobs: Iterable[str]) -> set[str]:
    """The groups of a share such as ``2/3``, of the jobs whose groups are given; without a share all of them.

    Large groups are dealt out first, each to the share that has the fewest jobs. Raises `UserError` for no such share.
    """
    sizes = Counter(jobs)
    if share is None:
        return set(sizes)
    number, shares = map(int, share.split("/"))
    if number > shares:
        raise bad("config.share", share, f"1/{shares} to {shares}/{shares}")
    dealt = [0] * shares
    groups = set()
    for group, size in sizes.most_common():
        place = dealt.index(min(dealt))
        dealt[place] += size
        if place == number - 1:
            groups.add(group)
    return groups


def unwell(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for every row whose status needs attention."""
    return [
        one_line(f"{row['bench']} {row['cell']} {row['implementation']}: {row['status']}: {row.get('reason') or ''}")
        for row in rows
        if row["status"] not in FINE
    ]
