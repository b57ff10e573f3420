"""Output of results: as JSON objects or a table on a terminal; into files as JSON lines, as tables with the columns of
the input, or as arrays of vectors.
"""

import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from rich.markup import escape
from rich.table import Table

from cloze.launch.predict.operation import Operation, Result, Row, plain
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import Output
from cloze.launch.texts.tables import json_value
from cloze.pipeline.errors import UserError, on_one_line
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publishing

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_ENDS_CELL = re.compile(r"[\t\n\r]")
_CHUNK = 4096  # number of rows that determine the columns of a table and their types

Results = Iterable[tuple[Row, Result]]
Write = Callable[[list[Fields]], None]
"""Writes some rows of a table."""


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
    values = {name: json_value(value) for name, value in row.values.items()}
    for name, value in content.items():
        while name in values:
            name = f"cloze_{name}"
        values[name] = value
    return values


def encoded(value: object) -> str:
    """Encode as JSON.

    Raises:
        UserError: for NaN and infinity, which JSON cannot represent.
    """
    try:
        return _ENCODER.encode(value)
    except ValueError as error:
        raise _not_finite(str(error)) from error


def _not_finite(number: str) -> UserError:
    return UserError(
        f"the model's result: found a number that is not finite ({number}), expected numbers; the model's weights or "
        "precision overflow on this text"
    )


def _check_finite(value: object) -> None:
    """Raise UserError for NaN and infinity, at any depth, which are none in JSON lines either."""
    parts: Iterable[object] = [value]
    if isinstance(value, np.ndarray):
        parts = [] if np.isfinite(value).all() else value.ravel().tolist()
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    for part in parts:
        if isinstance(part, float):
            if not math.isfinite(part):
                raise _not_finite(str(part))
        elif isinstance(part, dict | list | tuple):
            _check_finite(part)


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


def write_results(path: Path, operation: Operation, loaded: LoadedModel | None, results: Results) -> int:
    """Write results as they are computed; returns their number. *.jsonl: as printed; *.csv, *.tsv, *.parquet: one row
    per text with the columns of the input, then the result; *.npy: vectors (N, hidden size) fp32.

    Raises:
        UserError: a row has other columns or types than earlier rows; the file cannot be written.
    """
    with publishing(path) as aside:
        if path.suffix == ".npy":
            vectors = np.stack([result.vector for _, result in results])
            _check_finite(vectors)
            with open(aside, "wb") as file:
                np.save(file, vectors)
            return len(vectors)
        if path.suffix == ".jsonl":
            with open(aside, "w", encoding="utf-8") as lines:
                written = (lines.write(encoded(as_json(operation, *pair)) + "\n") for pair in results)
                return sum(1 for _ in written)
        given: set[str] = set()  # the columns of the input

        def rows() -> Iterator[Fields]:
            for row, result in results:
                given.update(row.values or ())
                content = operation.columns(loaded, result)
                _check_finite(content)
                yield beside(operation, row, content)

        return _write_table(path, aside, rows(), given)


def _write_table(path: Path, aside: Path, rows: Iterator[Fields], given: Set[str]) -> int:
    """Write rows in the columns of the first ones, by which a file begins."""
    columns: tuple[str, ...] = ()
    number = 0
    with ExitStack() as opened:
        while chunk := list(itertools.islice(rows, _CHUNK)):
            if not columns:
                columns = _columns(chunk)
                begin = partial(_parquet, given=given) if path.suffix == ".parquet" else _separated
                write = opened.enter_context(begin(path, aside, chunk))
            if late := [name for name in _columns(chunk) if name not in columns]:
                raise UserError(
                    f"output: {path}: found the column {late[0]!r}, which none of the first {_CHUNK:,} rows has, "
                    "expected theirs; write *.jsonl"
                )
            write(chunk)
            number += len(chunk)
    return number


@contextmanager
def _separated(path: Path, aside: Path, first: list[Fields]) -> Iterator[Write]:
    """CSV, or TSV, which has no quotes (launch/texts/tables.py); lists and objects are JSON in their cell, null is an
    empty cell.
    """
    columns = _columns(first)
    with open(aside, "w", encoding="utf-8", newline="") as file:
        quoted = csv.writer(_Lines(file), lineterminator="\r\n")  # so that it quotes a cell with either half of it
        write = _write_tabbed(path, file) if path.suffix == ".tsv" else quoted.writerows
        write([columns])
        yield lambda chunk: write([_cell(row.get(name)) for name in columns] for row in chunk)


class _Lines:
    """Ends the rows of a `csv.writer` with a line feed alone."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def _write_tabbed(path: Path, file: TextIO) -> Callable[[Iterable[Sequence[str]]], None]:
    def write(rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            if damaging := next((cell for cell in row if _ENDS_CELL.search(cell)), None):
                raise UserError(
                    f"output: {path}: found a tab or a line end in {damaging[:40]!r}, which a cell of TSV can't hold; "
                    "write *.csv, *.jsonl or *.parquet"
                )
            file.write("\t".join(row) + "\n")

    return write


def _cell(value: object) -> str:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else str(value)


@contextmanager
def _parquet(path: Path, aside: Path, first: list[Fields], given: Set[str]) -> Iterator[Write]:
    schema = _schema(path, first, given)
    try:
        writer = parquet.ParquetWriter(aside, schema)
    except pa.ArrowException as error:  # objects without fields
        raise UserError(
            f"output: {path}: found values that Parquet has no type for ({on_one_line(error)}), expected "
            "numbers, texts, lists and objects; write *.jsonl"
        ) from error
    with writer:
        yield lambda chunk: writer.write_table(_table(path, chunk, schema))


def _schema(path: Path, chunk: list[Fields], given: Set[str]) -> pa.Schema:
    """Schema from the first rows; a column without values is text, one of empty lists has lists of texts; numbers in
    vectors that are results are fp32.
    """
    found = _table(path, [dict.fromkeys(_columns(chunk)), *chunk], None).schema
    kinds = {pa.null(): pa.string(), pa.list_(pa.null()): pa.list_(pa.string())}
    vectors = pa.list_(pa.float64()), pa.list_(pa.float32())
    return pa.schema(
        field.with_type(
            vectors[1] if field.type == vectors[0] and field.name not in given else kinds.get(field.type, field.type)
        )
        for field in found
    )


def _table(path: Path, chunk: list[Fields], schema: pa.Schema | None) -> pa.Table:
    kinds = dict.fromkeys(_columns(chunk)) if schema is None else dict(zip(schema.names, schema.types, strict=True))
    return pa.table({name: _column(path, name, [row.get(name) for row in chunk], kind) for name, kind in kinds.items()})


def _column(path: Path, name: str, values: list[object], kind: pa.DataType | None) -> pa.Array:
    """Values as a column of a type, or of the one that they have."""
    try:
        column = _array(values) if kind is None else pa.array(values, kind)
        changed = kind is not None and _changes(column, values)
    except OverflowError as error:
        raise _no_column(path, name, "a whole number outside of the range of the column's type") from error
    except (pa.ArrowException, TypeError) as error:
        why = on_one_line(error) if kind is None else f"of another kind than the first rows, which made it {kind}"
        raise _no_column(path, name, why) from error
    if changed:
        raise _no_column(path, name, f"of the type {kind} in the first rows")
    return column


def _array(values: list[object]) -> pa.Array:
    """Values as an array of the type that they have."""
    try:
        return pa.array(values)
    except OverflowError:  # above 2^63, as a column of Parquet may have them
        return pa.array(values, pa.uint64())


def _changes(column: pa.Array, values: list[object]) -> bool:
    """Whether a column of a given type has other values: 1.5 becomes 1 in one of whole numbers, and an object loses the
    fields that the type lacks. Vectors of results are rounded to fp32, as they are meant to be.
    """
    kind = column.type
    vectors = pa.types.is_list(kind) and pa.types.is_float32(kind.value_type)
    if vectors or not (pa.types.is_integer(kind) or pa.types.is_nested(kind)):
        return False
    return _present(column.to_pylist()) != _present(_array(values).to_pylist())


def _present(value: object) -> object:
    """A value without the fields that are null: a type may name some that a row lacks."""
    if isinstance(value, dict):
        return {name: _present(part) for name, part in value.items() if part is not None}
    return [_present(part) for part in value] if isinstance(value, list) else value


def _no_column(path: Path, name: str, why: str) -> UserError:
    return UserError(
        f"output: {path}: found values that are no column of a table (in {name!r}: {why}), expected one kind of values "
        "in each; write *.jsonl"
    )


def _columns(chunk: list[Fields]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in chunk for name in row))
