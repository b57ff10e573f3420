"""Writes results to files: tables with the columns of the input, JSON lines, arrays of vectors."""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

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
        if path.suffix == ".parquet":
            return _write_parquet(path, aside, rows)
        with open(aside, "w", encoding="utf-8", newline="") as file:
            return _write_separated(path, file, rows)


def _write_separated(path: Path, file: IO[str], rows: Iterator[Fields]) -> int:
    """Write CSV or TSV; lists and objects are JSON in their cell, null is an empty cell."""
    columns: tuple[str, ...] = ()
    number = 0
    for chunk in _chunks(rows):
        if not columns:
            columns = _columns(chunk)
            writer = csv.DictWriter(
                file, columns, delimiter="\t" if path.suffix == ".tsv" else ",", lineterminator="\n"
            )
            writer.writeheader()
        _check(path, columns, chunk)
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in chunk)
        number += len(chunk)
    return number


def _cell(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else value


def _write_parquet(path: Path, aside: Path, rows: Iterator[Fields]) -> int:
    writer, number = None, 0
    try:
        for chunk in _chunks(rows):
            if writer is None:
                schema = _schema(path, chunk)
                writer = parquet.ParquetWriter(aside, schema)
            _check(path, schema.names, chunk)
            writer.write_table(_table(path, chunk, schema))
            number += len(chunk)
    finally:
        if writer:
            writer.close()
    return number


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


def _chunks(rows: Iterator[Fields]) -> Iterator[list[Fields]]:
    while chunk := list(itertools.islice(rows, _CHUNK)):
        yield chunk


def _columns(chunk: list[Fields]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in chunk for name in row))


def _check(path: Path, columns: Iterable[str], chunk: list[Fields]) -> None:
    """Raise UserError for a new column after the first rows, which are written already."""
    if late := [name for name in _columns(chunk) if name not in columns]:
        raise UserError(
            f"output: {path}: found the column {late[0]!r}, which none of the first {_CHUNK:,} rows has, "
            "expected theirs; write *.jsonl"
        )
