"""Reports: the counts of a finished task, in a file that is written last and checked when read."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from cloze.pipeline.fields import Fields
from cloze.pipeline.jobs.run_folder import mark_of
from cloze.pipeline.storage import publish_text
from cloze.pipeline.stores.places import Place
from cloze.pipeline.untrusted import are_counts, check_readable, load_json

Kind = Callable[[Any], bool]  # whether a value is of this kind


def save_report(path: Place, content: Fields) -> None:
    """Write `content` as JSON after a line with the SHA-256 of its mark and itself."""
    text = json.dumps(content)
    # Not synced: a report lost in a power failure only means that its task runs again.
    publish_text(path, f"{_digest(path, text)}\n{text}\n", durable=False)


def load_report(path: Place, kinds: Mapping[str, Kind]) -> Fields | None:
    """The content that `save_report` wrote; None if the file is missing, damaged, another one in its place, or has
    values of another kind, which a right digest does not rule out.

    Args:
        kinds: of each value by its name.
    """
    check_readable(path)
    try:
        digest, text = path.read_text(encoding="utf-8").splitlines()
        content = load_json(text) if digest == _digest(path, text) else None
    except (FileNotFoundError, ValueError):
        return None
    return content if has_kinds(content, kinds) else None


def has_kinds(content: object, kinds: Mapping[str, Kind]) -> TypeGuard[Fields]:
    """Whether these are the names and the kinds of a section's values."""
    return (
        isinstance(content, dict)
        and content.keys() == kinds.keys()
        and all(is_kind(content[name]) for name, is_kind in kinds.items())
    )


def is_count(value: object) -> bool:
    return are_counts([value])


def is_text(value: object) -> bool:
    return isinstance(value, str)


def counts_by_name(*needed: str) -> Kind:
    """The kind of counts by name, of which these are needed."""
    return lambda value: isinstance(value, dict) and value.keys() >= {*needed} and are_counts(value.values())


def list_of_counts(length: int) -> Kind:
    """The kind of lists of this many counts."""
    return lambda value: isinstance(value, list) and len(value) == length and are_counts(value)


def _digest(path: Place, text: str) -> str:
    return hashlib.sha256(mark_of(path) + text.encode()).hexdigest()
