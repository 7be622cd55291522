"""YAML without surprises: no key twice, nothing that contains itself, and no size that nobody writes by hand."""

from collections.abc import Iterator
from typing import Any

import yaml

MOST_DEPTH = 12  # lists and mappings in each other; a config needs four
MOST_NODES = 100_000  # values, lists and mappings, with every alias written out
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml


def parse(text: str) -> Any:
    """The content of a YAML document. Raises `yaml.YAMLError`, whose text names the line."""
    _check_size(text)
    loader = _LOADER(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        for node in _mappings(root):
            _check_keys(node)
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


def _mappings(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    """All mappings of a document, each once."""
    seen, left = set[int](), [root]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            left += [one for pair in node.value for one in pair]
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


def _refused(why: str, event: Any) -> yaml.YAMLError:
    return yaml.YAMLError(f"{why}, in line {event.start_mark.line + 1}")
