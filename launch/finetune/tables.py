"""Tables of examples: TSV, CSV, JSON lines and Parquet as rows with named columns."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloze.launch.texts.encoding import half_character
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import readable_errors

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_FIELD = 1 << 30  # characters; the library's own limit, 2^17, is less than many a long text


@dataclass(frozen=True)
class Row:
    """A row of a table, and where it stands in its file."""

    values: dict
    place: str


@dataclass(frozen=True)
class Table:
    """The rows of a file."""

    path: Path
    columns: tuple[str, ...]
    rows: list[Row]
    malformed: int = 0
    """Rows with another number of fields than columns, left out by wish."""

    def need(self, columns: tuple[str, ...], field: str) -> None:
        """Raise UserError if one of the columns is missing; `field` is what names other ones."""
        for column in columns:
            if column not in self.columns:
                raise UserError(f"{self.path}: found the columns {', '.join(map(repr, self.columns))}, expected one "
                                f"named {column!r}; name the right one with --{field}")


def read_table(path: str | Path, header: tuple[str, ...] = (), mark: str = "", skip_malformed: bool = False,
               labels: tuple[str, ...] | None = ()) -> Table:
    """Read a table whole.

    Args:
        path: .tsv or .txt (tabs, no quoting: the form of GLUE), .csv (quoted), .jsonl, .parquet; the first two also
            with .gz behind.
        header: columns of a TSV file whose first line does not name the column `mark`; empty: the first line's.
        skip_malformed: whether rows with another number of fields than columns are left out, and counted.
        labels: those that are known before. Of classes that `datasets` has saved as numbers, rows have the names, or
            the numbers if these are the labels (GLUE's SST-2). None: always the numbers.

    Raises:
        UserError: the file cannot be read, or a row does not fit.
    """
    path = Path(path)
    kind = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]).removesuffix(".gz")
    if path.is_dir():
        table = _read_dataset(path, labels)
    elif kind in (".parquet", ".pq"):
        table = _read_parquet(path, labels)
    elif kind in (".jsonl", ".json", ".ndjson"):
        table = _read_json_lines(path)
    elif kind in (".tsv", ".txt", ".csv"):
        table = _read_separated(path, kind == ".csv", header, mark, skip_malformed)
    else:
        raise UserError(f"{path}: found the ending {kind!r}, expected .tsv, .csv, .jsonl or .parquet, or the folder of "
                        "a saved data set")
    if not table.rows:
        raise UserError(f"{path}: found no rows, expected examples")
    return table


def read_text(path: Path) -> str:
    """The whole of a UTF-8 file, .gz or plain. Raises UserError."""
    with readable_errors(path):
        data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except UnicodeError as error:
        raise UserError(f"{path}: found bytes that are no UTF-8 text ({error}); convert the file") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: found a damaged gzip file ({error}), expected a whole one; fetch or make it again"
                        ) from error


def parse_json(text: str) -> Any:
    """What JSON holds. Raises ValueError, for half of a character ("\\ud83d") and a field that comes twice, too."""
    value = json.loads(text, object_pairs_hook=_object)
    if "\\u" in text and (half := half_character(json.dumps(value, ensure_ascii=False))):
        raise ValueError(f"found {half}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"found the fields {', '.join(name for name, _ in pairs)}, of which one comes twice")
    return made


def _read_separated(path: Path, quoted: bool, header: tuple[str, ...], mark: str, skip_malformed: bool) -> Table:
    text = io.StringIO(read_text(path), newline="" if quoted else "\n")
    if quoted:
        csv.field_size_limit(_LONGEST_FIELD)
        reader = csv.reader(text, strict=True)
        lines = ((reader.line_num, fields) for fields in reader)
    else:
        lines = ((number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(text, 1))
    columns, rows, malformed = tuple(header), [], 0
    try:
        for position, (number, fields) in enumerate(lines):
            if position == 0 and (not header or mark in fields):
                columns = tuple(fields)
                if len(set(columns)) < len(columns):
                    raise UserError(f"{path}: row {number}: found the columns {', '.join(columns)}, expected names "
                                    "that differ; rename one")
            elif fields in ([], [""]):
                continue
            elif len(fields) == len(columns):
                rows.append(Row(dict(zip(columns, fields, strict=True)), f"{path}: row {number}"))
            elif skip_malformed:
                malformed += 1
            else:
                raise UserError(f"{path}: row {number}: found {len(fields)} fields, expected {len(columns)} "
                                f"({', '.join(columns)}); mend it, or leave such rows out with "
                                "--skip_malformed_rows true")
    except csv.Error as error:
        raise UserError(f"{path}: row {reader.line_num}: can't be read as CSV ({error}); mend it") from error
    return Table(path, columns, rows, malformed)


def _read_json_lines(path: Path) -> Table:
    rows: list[Row] = []
    columns: dict[str, None] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            values = parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}: row {number}: can't be read as JSON ({error}); expected one object a line"
                            ) from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: row {number}: found {type(values).__name__}, expected one object a line")
        rows.append(Row(values, f"{path}: row {number}"))
        columns |= dict.fromkeys(values)
    return Table(path, tuple(columns), rows)


def _read_parquet(path: Path, labels: tuple[str, ...] | None) -> Table:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        if len(set(names)) < len(names):
            raise UserError(f"{path}: found the columns {', '.join(names)}, expected names that differ; rename one")
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: can't be read as Parquet: {' '.join(str(error).split())}") from error
    return _table(path, table.schema, table.to_pylist(), labels)


def _read_dataset(path: Path, labels: tuple[str, ...] | None) -> Table:
    try:
        import datasets
    except ImportError as error:
        raise UserError("a saved data set needs a library that is missing; pip install 'cloze[hub]'") from error
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds
        raise UserError(f"{path}: can't be read as a saved data set: {' '.join(str(error).split())}") from error
    if isinstance(data, datasets.DatasetDict):
        raise UserError(f"{path}: found the splits {', '.join(data)}, expected one of them; give {path}/SPLIT")
    return _table(path, data.features.arrow_schema, data.to_list(), labels)


def _table(path: Path, schema: pa.Schema, values: list[dict], labels: tuple[str, ...] | None) -> Table:
    for column, names in _class_names(schema).items():
        numbered = {str(number) for number in range(len(names))}
        if labels is None or numbered <= set(labels) and not set(names) <= set(labels):
            continue
        known = dict(enumerate(names)) | {-1: None}  # -1 is the library's word for no label
        for row in values:
            value = row[column]
            row[column] = ([known.get(part, part) for part in value if part != -1] if isinstance(value, list)
                           else known.get(value, value))
    return Table(path, tuple(schema.names), [Row(row, f"{path}: row {n}") for n, row in enumerate(values, 1)])


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Names of the classes that columns hold by number, or lists of them, as `datasets` writes them into a schema."""
    written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    found = {}
    for column, feature in written.get("info", {}).get("features", {}).items():
        if isinstance(feature, list):  # as older versions write lists
            (feature,) = feature
        elif feature.get("_type") in ("List", "LargeList", "Sequence"):
            feature = feature["feature"]
        if feature.get("_type") == "ClassLabel" and column in schema.names:
            found[column] = feature["names"]
    return found
