"""What a JSON line says: its fields, or what is wrong with it."""

import json
from collections.abc import Iterable

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


class _Ambiguous(Fields):
    """A JSON object with a repeated name, of which a dictionary would keep only the last value."""

    def __init__(self, pairs: list[tuple[str, object]]):
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _object(pairs: list[tuple[str, object]]) -> Fields:
    values = dict(pairs)
    return values if len(values) == len(pairs) else _Ambiguous(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def parse(line: str) -> object:
    """The value of a line.

    Raises:
        ValueError: it isn't JSON.
        RecursionError: it is nested too deeply.
    """
    return _DECODER.decode(line)


def no_json(where: str, error: object) -> UserError:
    """The refusal of a line that isn't JSON."""
    return UserError(f"{where}: the line isn't JSON ({error}); fix it")


def document_id(value: object) -> str | None:
    """An id as text; None for null."""
    return None if value is None else str(value)


def field(record: object, text_field: str, id_field: str | None, where: str) -> tuple[str, str | None]:
    """The text and the id of a record.

    Raises:
        UserError: that names the fields that are there.
    """
    if not isinstance(record, dict):
        raise UserError(f"{where}: found {_kind(record)}, expected an object with {text_field!r}")
    check_fields(getattr(record, "names", record), text_field, id_field, where)
    text = record[text_field]
    if text is None:
        text = ""  # a null counts as an empty document
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_field}: found {_kind(text)}, expected a string")
    return text, None if id_field is None else document_id(record[id_field])


def _kind(value: object) -> str:
    return dict.__name__ if isinstance(value, dict) else type(value).__name__


def check_fields(found: Iterable[str], text_field: str, id_field: str | None, where: str) -> None:
    """Raise UserError, naming the fields found, unless the text and id fields occur exactly once."""
    found = list(found)
    for name in (text_field, id_field):
        if name is not None and found.count(name) > 1:
            raise UserError(f"{where}: found {found.count(name)} fields {name!r}, expected one; rename the others")
        if name is not None and name not in found:
            raise UserError(
                f"{where}: found no field {name!r}, there are {', '.join(map(repr, found)) or 'none'}; "
                "choose with --source.text_field and --source.id_field"
            )
