"""Reads YAML from untrusted files, with a bound on what aliases expand to."""

from collections.abc import Callable

import yaml

from cloze.pipeline.errors import UserError

# A configuration has some hundred values; nested aliases can expand ten lines to a billion.
MOST_VALUES = 100_000


def load_yaml(text: str, load: Callable[[str], object] = yaml.safe_load, *, name: str = "configuration") -> object:
    """Parse YAML with `load`, after a check that its aliases do not exhaust the memory.

    Args:
        name: name of the file, for messages.

    Raises:
        UserError: its aliases expand to more than MOST_VALUES values or to themselves, or it is nested too deep.
        yaml.YAMLError: it is not YAML.
    """
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
        raise UserError(
            f"{name}: found values that are nested too deep, or contain themselves, expected sections of values"
        ) from error


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
