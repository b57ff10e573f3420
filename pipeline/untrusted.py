"""Reads YAML and JSON that others wrote, with bounds on depth and on what aliases expand to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from cloze.pipeline.errors import UserError

# A configuration has some hundred values; nested aliases can expand ten lines to a billion.
MOST_VALUES = 100_000
# Sections of a configuration are nested 5 deep. libyaml builds nested values by recursion with no bound of its own, and
# overflows the stack at some 50,000.
MOST_LEVELS = 64
_Events: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str, load: Callable[[str], object] = yaml.safe_load, *, name: str = "configuration") -> object:
    """Parse YAML with `load`, after a check that its depth and its aliases do not exhaust the memory.

    Args:
        name: name of the file, for messages.

    Raises:
        UserError: its aliases expand to more than MOST_VALUES values or to themselves, or it is nested too deep.
        yaml.YAMLError: it is not YAML.
    """
    too_deep = f"{name}: found values that are nested too deep, or contain themselves, expected sections of values"
    if len(text) > MOST_LEVELS and not _is_shallow(text):  # a level takes a character at least
        raise UserError(too_deep)
    try:
        if "*" in text and "&" in text:
            values = _expanded(yaml.compose(text, yaml.SafeLoader), {})
            if values > MOST_VALUES:
                raise UserError(
                    f"{name}: found YAML whose aliases expand to {values:,} values, expected at most "
                    f"{MOST_VALUES:,}; write the values out"
                )
        return load(text)
    except RecursionError as error:
        raise UserError(too_deep) from error


def load_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON as `json.loads`, but values that are nested too deep for it are an error like all others.

    Args:
        pairs: makes an object of its fields in their order.

    Raises:
        json.JSONDecodeError: it is not JSON, or nested too deep.
        UnicodeDecodeError: it is no text.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise json.JSONDecodeError("Values are nested too deep", "", 0) from None


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it can't be read.
        UserError: it is no regular file; a pipe or a device may have no end.
        ValueError: as `load_json`.
    """
    check_regular(path)
    return load_json(path.read_bytes())


def check_regular(path: Path) -> None:
    """Raise UserError for what is there and no regular file: a pipe or a device may have no end."""
    if path.is_dir():
        raise UserError(f"{path}: found a folder, expected a file; move it away, then run the same command again")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: found no regular file, expected one; remove it")


def _is_shallow(text: str) -> bool:
    """Whether values are nested at most MOST_LEVELS deep. Events come from a parser without recursion."""
    level = 0
    for event in yaml.parse(text, _Events):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > MOST_LEVELS:
            return False
    return True


def _expanded(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Number of values in a tree of nodes with expanded aliases; RecursionError if one contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in known:
        if not known[id(node)]:
            raise RecursionError
        return known[id(node)]
    known[id(node)] = 0  # marks nodes that are being expanded
    parts = (part for each in node.value for part in (each if isinstance(each, tuple) else (each,)))
    known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]
