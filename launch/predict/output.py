"""Output of results: JSON objects, tables."""

import json
import math
import sys
from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table

from cloze.launch.predict.operation import Operation, Result, Row, plain
from cloze.launch.system.console import Output
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def as_json(operation: Operation, row: Row, result: Result) -> Fields:
    """A result with its texts, or with all columns of their table, as JSON values."""
    content = plain(result)
    return beside(operation, row, content if isinstance(content, dict) else {operation.key: content})


def beside(operation: Operation, row: Row, content: Fields) -> Fields:
    """The text or its row of a table, followed by the result; `cloze_` is prefixed to names that a column has
    already.
    """
    if row.values is None:
        given = row.text, list(row.choices) if operation.takes_choices else row.pair
        return {name: text for name, text in zip(operation.fields, given, strict=True) if text is not None} | content
    values = {name: _given(value) for name, value in row.values.items()}
    for name, value in content.items():
        while name in values:
            name = f"cloze_{name}"
        values[name] = value
    return values


def _given(value: object) -> object:
    """A value of a table as a JSON value: dates, bytes and the like as text, NaN as null."""
    if isinstance(value, dict):
        return {str(name): _given(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_given(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def encoded(value: object) -> str:
    """Encode as JSON.

    Raises:
        UserError: for NaN and infinity, which JSON cannot represent.
    """
    try:
        return _ENCODER.encode(value)
    except ValueError as error:
        raise UserError(
            f"the model's result: found a number that is not finite ({error}), expected numbers; the "
            "model's weights or precision overflow on this text"
        ) from error


def wants_table(config: Any) -> bool:
    """Whether results are shown as a table: by the field `format`, else if the output is a terminal."""
    return config.format == "table" or (config.format is None and sys.stdout.isatty())


def print_results(config: Any, results: Iterable[tuple[Row, Result]]) -> None:
    """Print each result as JSON when it is ready, or all of them as a table at the end.

    Args:
        config: the operation, with the field `format`.
    """
    if wants_table(config):
        print_table(line for row, result in results for line in config.table_lines(row, result))
        return
    for row, result in results:
        print(encoded(as_json(config, row, result)), flush=True)


def print_table(lines: Iterable[dict[str, str]]) -> None:
    """Print lines as a table."""
    lines = list(lines)
    if not lines:
        print("(nothing found)")
        return
    table = Table()
    for name in lines[0]:
        table.add_column(name)
    before: dict[str, str] = {}
    for line in lines:
        shown = dict(line)
        for name in ("text", "question"):  # a text is shown in its first line only
            if name in line and len(line) > 2 and before.get(name) == line[name]:
                shown[name] = ""
        table.add_row(*(escape(value) for value in shown.values()))
        before = line
    Output().print(table)
