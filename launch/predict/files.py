"""Writes results to files: tables with the columns of the input, JSON lines, arrays of vectors."""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from cloze.launch.predict.operation import Operation, Result, Row
from cloze.launch.predict.output import as_json, beside, encoded
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publishing

_CHUNK = 4096  # number of rows that determine the columns of a table and their types

Results = Iterable[tuple[Row, Result]]
Write = Callable[[list[Fields]], None]
"""Writes some rows of a table."""


def write_results(path: Path, operation: Operation, loaded: LoadedModel | None, results: Results) -> int:
    """Write results as they are computed; returns their number. *.jsonl: as printed; *.csv, *.tsv, *.parquet: one row
    per text with the columns of the input, then the result; *.npy: vectors (N, hidden size) fp32.

    Raises:
        UserError: a row has other columns or types than earlier rows; the file cannot be written.
    """
    with publishing(path) as aside:
        if path.suffix == ".npy":
            vectors = [result.vector for _, result in results]
            with open(aside, "wb") as file:
                np.save(file, np.stack(vectors))
            return len(vectors)
        if path.suffix == ".jsonl":
            with open(aside, "w", encoding="utf-8") as file:
                written = (file.write(encoded(as_json(operation, *pair)) + "\n") for pair in results)
                return sum(1 for _ in written)
        rows = (beside(operation, row, operation.columns(loaded, result)) for row, result in results)
        return _write_table(path, aside, rows)


def _write_table(path: Path, aside: Path, rows: Iterator[Fields]) -> int:
    """Write rows in the columns of the first ones, by which a file begins."""
    columns: tuple[str, ...] = ()
    number = 0
    with ExitStack() as opened:
        while chunk := list(itertools.islice(rows, _CHUNK)):
            if not columns:
                columns = _columns(chunk)
                begin = _parquet if path.suffix == ".parquet" else _separated
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
    """CSV or TSV; lists and objects are JSON in their cell, null is an empty cell."""
    with open(aside, "w", encoding="utf-8", newline="") as file:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        writer = csv.DictWriter(file, _columns(first), delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        yield lambda chunk: writer.writerows({name: _cell(value) for name, value in row.items()} for row in chunk)


def _cell(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else value


@contextmanager
def _parquet(path: Path, aside: Path, first: list[Fields]) -> Iterator[Write]:
    schema = _schema(path, first)
    with parquet.ParquetWriter(aside, schema) as writer:
        yield lambda chunk: writer.write_table(_table(path, chunk, schema))


def _schema(path: Path, chunk: list[Fields]) -> pa.Schema:
    """Schema from the first rows; a column without values is text, one of empty lists has lists of texts; numbers in
    vectors are fp32.
    """
    found = _table(path, [dict.fromkeys(_columns(chunk)), *chunk], None).schema
    kinds = {
        pa.null(): pa.string(),
        pa.list_(pa.null()): pa.list_(pa.string()),
        pa.list_(pa.float64()): pa.list_(pa.float32()),
    }
    return pa.schema([field.with_type(kinds.get(field.type, field.type)) for field in found])


def _table(path: Path, chunk: list[Fields], schema: pa.Schema | None) -> pa.Table:
    try:
        return pa.Table.from_pylist(chunk, schema)
    except (pa.ArrowException, TypeError) as error:
        raise UserError(
            f"output: {path}: found values of two kinds in one column ({' '.join(str(error).split())}), "
            "expected one; write *.jsonl"
        ) from error


def _columns(chunk: list[Fields]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in chunk for name in row))
