"""Tables of examples: TSV, CSV, JSON lines and Parquet as rows with named columns."""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cloze.launch.texts.encoding import half_character
from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError, on_one_line
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.fields import Fields
from cloze.pipeline.readers.files import ROWS_AT_ONCE, check_parquet_rows
from cloze.pipeline.readers.hub import saved_file, saved_rows
from cloze.pipeline.storage import at_rest, readable_errors
from cloze.pipeline.untrusted import MOST_BYTES, load_json, unique_fields

if TYPE_CHECKING:
    import pyarrow as pa

# Characters of a line, which is read at once; SQuAD 2.0's train file has 42 million in one.
LONGEST_LINE = 1 << 28
_MOST_HEAD = 1000  # lines that the names of a table may take
_LONGEST_FIELD = 1 << 30  # maximum characters of a field; the csv module's default, 2^17, is too small for long texts
COLUMNS = "cloze_columns"  # entry of a model's config.json: the fields of its Columns
ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".pq")  # endings of files that are tables


@dataclass(frozen=True)
class Columns:
    """The columns that contain a model's texts."""

    texts: tuple[str, ...]
    """Columns of the text or of the pair of texts; with choices, of the texts that all choices share."""
    choices: tuple[str, ...] = ()
    """Columns of the choices, in their order."""
    prefix: tuple[str, ...] = ()
    """Columns whose texts each choice begins with."""
    header: tuple[str, ...] = ()
    """All columns of a TSV file whose first line does not name them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns of texts."""
        return self.texts + self.prefix + self.choices


def columns_of(note: Fields | None) -> Columns | None:
    """The Columns saved in a model's config.json; None if it has none.

    Raises:
        UserError: for a damaged entry.
    """
    if note is None:
        return None
    known = {each.name for each in dataclasses.fields(Columns)}
    if (
        not isinstance(note, dict)
        or not note.get("texts")
        or not set(note) <= known
        or not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in note.values())
    ):
        raise UserError(
            f"config.json: {COLUMNS}: found {str(note)[:60]}, expected the columns of a model that Cloze "
            "has trained; export it again"
        )
    return Columns(**{name: tuple(names) for name, names in note.items()})


@dataclass(frozen=True)
class TableRow:
    """A row of a table, and its place in the file."""

    values: Fields
    place: str

    def text(self, column: str) -> str:
        """The text in a column; UserError for anything else."""
        value = self.values.get(column)
        if not isinstance(value, str):
            raise UserError(f"{self.place}: found {value!r:.60} in column {column!r}, expected a text; fix the row")
        return value


@dataclass
class Reading:
    """A table that is read row by row, only once."""

    path: Path
    rows: Iterator[TableRow] = field(init=False)
    columns: tuple[str, ...] = ()
    """Names of the columns; of JSON lines, in which each row may have others, those of the first row."""
    malformed: int = 0
    """Malformed rows (number of fields differs from the columns) skipped so far."""


@dataclass(frozen=True)
class Table:
    """The rows of a file."""

    path: Path
    columns: tuple[str, ...]
    rows: list[TableRow]
    malformed: int = 0
    """Malformed rows (number of fields differs from the columns) that were skipped."""

    @property
    def left_out(self) -> str:
        """The end of a line about the table: how many malformed rows were skipped, if any."""
        return f", {self.malformed:,} malformed rows left out" if self.malformed else ""

    def need(self, columns: tuple[str, ...], field: str) -> None:
        """Raise UserError if columns are missing.

        Args:
            field: the option with which the user names other columns.
        """
        if missing := [column for column in columns if column not in self.columns]:
            raise missing_columns(self.path, self.columns, {field: missing})


def missing_columns(path: str | Path, found: tuple[str, ...], missing: dict[str, list[str]]) -> UserError:
    """The error for missing columns of a table.

    Args:
        missing: option -> missing columns that it names.
    """
    fields = " and ".join(f"--{field}" for field in missing)
    names = list(dict.fromkeys(name for names in missing.values() for name in names))
    expected = f"one named {names[0]!r}" if len(names) == 1 else " and ".join(map(repr, names))
    return UserError(
        f"{path}: found the columns {', '.join(map(repr, found))}, expected {expected}; name the right "
        f"{'one' if len(names) == 1 else 'ones'} with {fields}"
    )


def read_table(
    path: str | Path,
    header: tuple[str, ...] = (),
    mark: str = "",
    skip_malformed: bool = False,
    labels: tuple[str, ...] | None = (),
) -> Table:
    """Read a table whole; arguments and errors as of `open_table`."""
    reading = open_table(path, header, mark, skip_malformed, labels)
    rows = list(reading.rows)
    columns = tuple(dict.fromkeys(name for row in rows for name in row.values))
    return Table(reading.path, columns, rows, reading.malformed)


def open_table(
    path: str | Path,
    header: tuple[str, ...] = (),
    mark: str = "",
    skip_malformed: bool | None = None,
    labels: tuple[str, ...] | None = (),
) -> Reading:
    """Begin to read a table.

    Args:
        path: .tsv or .txt (tabs, no quoting: the form of GLUE), .csv (quoted; separated by commas, or by semicolons or
            tabs if the first line has them and no comma), .jsonl, .parquet; all but the last also with .gz appended.
        header: columns of a TSV file whose first line does not name the column `mark`; empty: the first line's.
        skip_malformed: whether malformed rows (number of fields differs from the columns) are skipped and counted;
            None: never, and the error message does not suggest it.
        labels: labels known before. For classes saved as numbers by `datasets`, rows have the names, or the numbers if
            these are the labels (GLUE's SST-2). None: always the numbers.

    Raises:
        UserError: the file cannot be read or has no row; also raised by the iterator, for a malformed row.
    """
    path = Path(path)
    kind = ending(path)
    reading = Reading(path)
    if path.is_dir():
        rows = _read_dataset(path, labels)
    elif kind in (".parquet", ".pq"):
        rows = _read_parquet(path, labels)
    elif kind in (".jsonl", ".json", ".ndjson"):
        rows = _read_json_lines(path)
    elif kind in (".tsv", ".txt", ".csv"):
        records = _records(path) if kind == ".csv" else _tabbed(path)
        rows = _separated(reading, records, () if kind == ".csv" else header, mark, skip_malformed)
    else:
        raise UserError(
            f"{path}: found the ending {kind!r}, expected .tsv, .csv, .jsonl or .parquet, or the folder of "
            "a saved data set"
        )
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}: found no rows, expected examples")
    reading.columns, reading.rows = tuple(first.values), itertools.chain([first], rows)
    return reading


def ending(path: Path) -> str:
    """The ending that determines the format, in small letters: the one before .gz if that is the last."""
    return "".join(path.suffixes[-2:] if _is_gzip(path) else path.suffixes[-1:]).lower().removesuffix(".gz")


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


# A gzip file may hold this many characters for each of its bytes, and any file this many in all. Gzip packs texts to a
# tenth at best, and one letter to a thousandth.
_MOST_UNPACKED, _ALWAYS_READ = 200, 1 << 24


def read_text(path: Path) -> str:
    """The whole of a UTF-8 file, .gz or plain.

    Raises:
        UserError: as `_lines`, or there are more characters than anybody reads at once: a gzip file may hold a thousand
            times its size.
    """
    lines, size = [], 0
    for line in _lines(path, ""):
        lines.append(line)
        if (size := size + len(line)) > MOST_BYTES:
            raise UserError(f"{path}: found more than {MOST_BYTES:,} characters, expected fewer; divide it")
    return "".join(lines)


def _lines(path: Path, newline: str) -> Iterator[str]:
    """Lines of a UTF-8 file, .gz or plain, with their line ends; newline as for `open`.

    Raises:
        UserError: the file can't be read, is no UTF-8 text, or holds next to nothing many times.
    """
    with readable_errors(path):
        try:
            with (
                (gzip.open if _is_gzip(path) else open)(path, "rt", encoding="utf-8-sig", newline=newline) as file,
                at_rest(file, path),
            ):
                packed = path.stat().st_size if _is_gzip(path) else math.inf
                size, most = 0, max(_ALWAYS_READ, _MOST_UNPACKED * packed)
                while line := file.readline(LONGEST_LINE):
                    if (size := size + len(line)) > most:
                        raise UserError(
                            f"{path}: found more than {most:,} characters, {_MOST_UNPACKED} times the size of the "
                            "file, expected texts, which gzip packs to a tenth at best; unpack it"
                        )
                    if len(line) == LONGEST_LINE:
                        raise UserError(f"{path}: found a line of {LONGEST_LINE:,} characters or more, expected less")
                    if "\0" in line:
                        raise UserError(f"{path}: found a byte 0x00, as of UTF-16, expected text in UTF-8; convert it")
                    yield line
        except UnicodeError as error:
            raise UserError(f"{path}: found bytes that are no UTF-8 text ({error}); convert the file") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(
                f"{path}: found a damaged gzip file ({error}), expected a whole one; fetch or make it again"
            ) from error


def parse_json(text: str) -> object:
    """The value of a text in JSON.

    Raises:
        ValueError: for half of a character ("\\ud83d") and a field that comes twice, too.
    """
    value = load_json(text, unique_fields)
    if "\\u" in text and (half := half_character(json.dumps(value, ensure_ascii=False))):
        raise ValueError(f"found {half}")
    return value


def json_value(value: object) -> object:
    """A value of a table as a JSON value: dates and the like as text, bytes in base64, an entry of a map (which pyarrow
    gives as a tuple) as an object of its key and value, NaN and infinity as null.
    """
    if isinstance(value, dict):
        return {str(name): json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [json_value(each) for each in value]
    if isinstance(value, tuple):
        return dict(zip(("key", "value"), map(json_value, value), strict=True))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value if value is None or isinstance(value, str | int) else str(value)


def _on_a_line(columns: Iterable[str]) -> str:
    """Names of columns, in which quotes may hold line breaks, for a message of one line."""
    return " ".join(", ".join(columns).split())


def _tabbed(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Records of a file without quoting, each with its place."""
    for number, line in enumerate(_lines(path, "\n"), 1):
        text = line.rstrip("\r\n")
        yield f"row {number}", text.split("\t") if text else []


def _records(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Records of a quoted file, each with its place: its number, and its last line if records span several lines."""
    csv.field_size_limit(_LONGEST_FIELD)
    lines, head = _lines(path, ""), list[str]()
    delimiter = _delimiter(lines, head)
    reader = csv.reader(itertools.chain(head, lines), delimiter=delimiter, strict=True)
    number = 0
    try:
        for number, fields in enumerate(reader, 1):
            line = f" (line {reader.line_num})" if reader.line_num != number else ""
            yield f"row {number}{line}", fields
    except csv.Error as error:
        raise UserError(
            f"{path}: row {number + 1} (line {reader.line_num}): can't be read as CSV ({error}); fix it"
        ) from error


def _delimiter(lines: Iterator[str], head: list[str]) -> str:
    """The delimiter of a CSV file by its first record that is no empty line: the comma, unless only another one occurs.

    Args:
        head: gets the lines that were taken for it.
    """

    def replayed() -> Iterator[str]:
        for number in range(_MOST_HEAD):
            if number == len(head):
                head.extend(itertools.islice(lines, 1))
            yield from head[number : number + 1]

    for delimiter in ",;\t":
        with contextlib.suppress(csv.Error):  # delimiters only occur outside of quoted fields
            if len(next(filter(None, csv.reader(replayed(), delimiter=delimiter, strict=True)), [])) > 1:
                return delimiter
    return ","


def _separated(
    reading: Reading,
    records: Iterator[tuple[str, list[str]]],
    header: tuple[str, ...],
    mark: str,
    skip_malformed: bool | None,
) -> Iterator[TableRow]:
    path, columns = reading.path, header
    filled = ((place, fields) for place, fields in records if fields)  # "" in a table of one column is an empty cell
    for position, (place, fields) in enumerate(filled):
        if position == 0 and (not header or mark in fields):
            columns = tuple(fields)
            if len(set(columns)) < len(columns):
                raise UserError(
                    f"{path}: {place}: found the columns {_on_a_line(columns)}, expected names that differ; rename one"
                )
        elif len(fields) == len(columns):
            yield TableRow(dict(zip(columns, fields, strict=True)), f"{path}: {place}")
        elif skip_malformed:
            reading.malformed += 1
        else:
            how = "" if skip_malformed is None else ", or leave such rows out with --skip_malformed_rows true"
            raise UserError(
                f"{path}: {place}: found {len(fields)} fields, expected {len(columns)} "
                f"({_on_a_line(columns)}); fix it{how}"
            )


def _read_json_lines(path: Path) -> Iterator[TableRow]:
    for number, line in enumerate(_lines(path, "\n"), 1):
        if not line.strip():
            continue
        try:
            values = parse_json(line)
        except ValueError as error:
            raise UserError(
                f"{path}: row {number}: can't be read as JSON ({error}); expected one object a line"
            ) from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: row {number}: found {type(values).__name__}, expected one object a line")
        yield TableRow(values, f"{path}: row {number}")


def _read_parquet(path: Path, labels: tuple[str, ...] | None) -> Iterator[TableRow]:
    import pyarrow as pa
    from pyarrow import parquet

    @contextlib.contextmanager
    def readable() -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # names and texts of no UTF-8, times
            raise UserError(f"{path}: can't be read as Parquet: {on_one_line(error)}") from error

    def values() -> Iterator[Fields]:
        with readable(), file, open(path, "rb") as whole, at_rest(whole, path):
            for group, left in enumerate(rows):  # pyarrow joins no nested columns of dictionaries of two
                for batch in file.iter_batches(ROWS_AT_ONCE, [group]):  # many may share one long text, stored once
                    batch.validate(full=True)  # a number of no dictionary's value would end the process
                    yield from batch.to_pylist()
                    left -= len(batch)
                if left:  # Arrow passes over pages whose heads, which no checksum covers, say another kind
                    raise pa.ArrowInvalid(f"row group {group} has {left} rows fewer than its footer says")

    with readable():
        file = parquet.ParquetFile(path, page_checksum_verification=True)
        names, rows = file.schema_arrow.names, [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    check_parquet_rows(str(path), rows, file.metadata.num_rows)
    if len(set(names)) < len(names):
        raise UserError(f"{path}: found the columns {_on_a_line(names)}, expected names that differ; rename one")
    return _rows(path, file.schema_arrow, values(), labels)


def _read_dataset(path: Path, labels: tuple[str, ...] | None) -> Iterator[TableRow]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"a saved data set needs a library that is missing; {how_to_install('hub')}") from error
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds
        raise UserError(f"{path}: can't be read as a saved data set: {on_one_line(error)}") from error
    if isinstance(data, datasets.DatasetDict):
        raise UserError(f"{path}: found the splits {', '.join(data)}, expected one of them; give {path}/SPLIT")
    file = saved_file(str(path), data, 0, 0, SourceConfig())

    def values() -> Iterator[Fields]:
        for _, batch in saved_rows(data, 0, len(data), file):
            try:
                rows = batch.to_pylist()
            except (ValueError, OverflowError) as error:  # times of no calendar
                raise UserError(f"{path}: can't be read as a saved data set: {error}") from error
            yield from rows

    return _rows(path, data.features.arrow_schema, values(), labels)


def _rows(
    path: Path, schema: pa.Schema, values: Iterator[Fields], labels: tuple[str, ...] | None
) -> Iterator[TableRow]:
    """Rows of a typed table, with names for numbered classes (open_table: labels)."""
    named = {}
    for column, names in _class_names(path, schema).items():
        numbered = {str(number) for number in range(len(names))}
        if labels is None or numbered <= set(labels) and not set(names) <= set(labels):
            continue
        named[column] = dict(enumerate(names)) | {-1: None}  # -1 is `datasets`' value for no label
    for number, row in enumerate(values, 1):
        place = f"{path}: row {number}"
        for column, known in named.items():
            value = row[column]
            row[column] = (
                [_name(known, part, column, place) for part in value if part != -1]
                if isinstance(value, list)
                else _name(known, value, column, place)
            )
        yield TableRow(row, place)


def _name(known: dict[int, str | None], value: object, column: str, place: str) -> str | None:
    """The name of a class by its number. A text, as in a column that was changed later, and None stay as they are."""
    if value is None or isinstance(value, str):
        return value
    if type(value) is not int or value not in known:
        raise UserError(
            f"{place}: {column}: found {str(value)[:60]!r}, expected the number of one of its {len(known) - 1} classes"
        )
    return known[value]


def _class_names(path: Path, schema: pa.Schema) -> dict[str, list[str]]:
    """Class names of columns with numbered classes, or lists of them, as `datasets` writes them into the schema.

    Raises:
        UserError: what stands there is not what it writes.
    """
    found = {}
    wrong = None
    try:
        written = load_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        for column, feature in written.get("info", {}).get("features", {}).items():
            if isinstance(feature, list):  # lists as older versions write them
                (feature,) = feature
            elif feature.get("_type") in ("List", "LargeList", "Sequence"):
                feature = feature["feature"]
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and column in schema.names:
                names = found[column] = feature["names"]
                if not isinstance(names, list) or len({name for name in names if isinstance(name, str)}) < len(names):
                    wrong = f"names of {column!r}: {names!s:.60}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"{error!r:.100}"
    if wrong:
        raise UserError(
            f"{path}: found other metadata under 'huggingface' than `datasets` writes ({wrong}), expected lists of "
            "different names; write the table anew, or without metadata"
        )
    return found
