"""Files that the library of the command line reads because a value names them, wherever it stands."""

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from cloze.pipeline.errors import UserError
from cloze.pipeline.untrusted import check_readable, load_yaml

_MOST_FILES = 8  # that name one another


def names_files(kind: object) -> bool:
    """Whether the library reads a field of this kind from a file, if its value is the path of one."""
    return _section(kind) is not None or _list(kind) is not None


def check_named_files(flag: str, kind: object, value: object, depth: int = 0) -> None:
    """Raise UserError for a pipe, a device or a file too large to be read at once, in the place of a file of fields: a
    pipe has no end, and a corpus in the place of a folder would be read into memory.

    Args:
        flag: of the value, for messages.
        kind: of the field, as its annotation says.
        value: as it is typed, or as YAML has it.
    """
    section, listed = _section(kind), _list(kind)
    if isinstance(value, str) and (section or listed) and depth < _MOST_FILES:
        text = _content(flag, value)
        if text is None and value.lstrip()[:1] in ("[", "{"):
            text = value
        if text is not None and listed != list[str]:
            try:
                loaded = load_yaml(text)
            except (UserError, yaml.YAMLError):  # whoever reads it says so
                return
            if not isinstance(loaded, str):
                check_named_files(flag, kind, loaded, depth + 1)
    elif isinstance(value, dict) and section:
        hints = get_type_hints(section)
        for name, inner in value.items():
            if isinstance(name, str) and name in hints:
                check_named_files(f"{flag}.{name}", hints[name], inner, depth)
    elif isinstance(value, list) and listed:
        for inner in value:
            check_named_files(flag, get_args(listed)[0], inner, depth)


def _content(flag: str, value: str) -> str | None:
    """The text of the file of this path; None: there is no file."""
    path = Path(value)
    try:
        if path.is_dir() or not path.exists():
            return None
    except (OSError, ValueError):  # too long for a name, or no name at all
        return None
    try:
        check_readable(path)
    except UserError as error:
        raise UserError(f"--{flag}: {error}") from error
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):  # as above
        return None


def _section(kind: Any) -> Any:
    return next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None) if not _list(kind) else None


def _list(kind: Any) -> Any:
    return next((each for each in (kind, *get_args(kind)) if get_origin(each) is list), None)
