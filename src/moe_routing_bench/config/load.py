"""Read a config: YAML files, merged, checked, with defaults; every mistake is one line.

The YAML is without surprises: no key twice, nothing that contains itself, and no size that a user would not write by hand.
"""

import functools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_routing_bench.config import schema
from moe_routing_bench.config.sections import DEFAULTS, Config
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad, one_line

MOST_DEPTH = 12  # lists and mappings in each other; a config needs four
MOST_NODES = 100_000  # values, lists and mappings, with every alias written out
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml


def parse_yaml(text: str) -> Any:
    """The content of a YAML document, a new copy for each caller. Raises `yaml.YAMLError`, whose text names the line."""
    return pickle.loads(_parsed(text))


@functools.lru_cache(maxsize=16)  # the presets are read for each of a command's models, and take 16 ms
def _parsed(text: str) -> bytes:
    return pickle.dumps(_constructed(text))


def _constructed(text: str) -> Any:
    _check_size(text)
    loader = _LOADER(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        for node in _nodes(root):
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
            elif isinstance(node, yaml.ScalarNode):
                _check_scalar(node)
        return loader.construct_document(root)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # the 99th of a month, `!!int x`
        raise yaml.YAMLError(f"a value that its tag does not allow: {error}") from error
    finally:
        loader.dispose()


def _check_size(text: str) -> None:
    """Refuse what would take long or much memory to read, as events, before anything is made of them."""
    sizes: dict[str | None, int] = {}
    unclosed: list[tuple[str | None, int]] = [(None, 0)]

    def add(count: int, event: Any) -> None:
        anchor, known = unclosed[-1]
        unclosed[-1] = anchor, known + count
        if known + count > MOST_NODES:
            raise _refused(f"more than {MOST_NODES} values", event)

    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(unclosed) > MOST_DEPTH:
                raise _refused(f"more than {MOST_DEPTH} lists and mappings in each other", event)
            unclosed.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, count = unclosed.pop()
            if anchor is not None:
                sizes[anchor] = count
            add(count, event)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, _ in unclosed]:
                raise _refused(f"*{event.anchor} is within itself", event)
            add(sizes.get(event.anchor, 1), event)
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                sizes[event.anchor] = 1
            add(1, event)


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """All nodes of a document, each once."""
    seen, left = set[int](), [root]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            left += [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def _check_keys(node: yaml.MappingNode) -> None:
    """The last of two equal keys would win, in silence."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            raise yaml.YAMLError(f"key {key.value!r} is there twice, in lines {lines[name]} and {line}")
        lines[name] = line


# What YAML 1.1 reads as something else than it says: 017 is 15, 1:30 is 90, `no` is false, 2026-11-28 a date.
_SPELT = {
    "int": (re.compile(r"[+-]?(0|[1-9][0-9]*)"), "another number", "write decimal digits"),
    "float": (
        re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
        "another number",
        "write decimal digits",
    ),
    "bool": (re.compile(r"true|false", re.IGNORECASE), "a truth value", "write true or false"),
    "timestamp": (re.compile(r"(?!)"), "a date", "no field is one"),
}


def _check_scalar(node: yaml.ScalarNode) -> None:
    """Refuse a value that means something else to YAML 1.1, which Snakemake reads, than to a reader or to YAML 1.2."""
    kind = node.tag.rpartition(":")[2]
    spelt, meaning, advice = _SPELT.get(kind, (None, "", ""))
    if spelt and not spelt.fullmatch(node.value):
        where = f"{one_line(node.value, 60)!r} in line {node.start_mark.line + 1}"
        raise yaml.YAMLError(f"{where} is {meaning} in YAML 1.1: {advice}, or put a text in quotes")


def _refused(why: str, event: Any) -> yaml.YAMLError:
    return yaml.YAMLError(f"{why}, in line {event.start_mark.line + 1}")


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
        content = parse_yaml(guarded.text(path))
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
