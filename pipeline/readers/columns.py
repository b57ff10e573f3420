"""Rows of tables to documents: Parquet files, and data sets of the `datasets` library (hub.py)."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from cloze.pipeline.errors import UserError
from cloze.pipeline.readers import hub
from cloze.pipeline.readers.files import BYTES_AT_ONCE, ROWS_AT_ONCE, InputFile, Segment, check_parquet_rows
from cloze.pipeline.readers.json_lines import check_fields, document_id
from cloze.pipeline.readers.lines import MOST_PLACES, in_pieces, order, valid
from cloze.pipeline.records import Document
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.stores.reading import open_raw

_BAD = (pa.ArrowException, OSError, UnicodeError)  # the last by names of columns that are no UTF-8
_BUFFERED = 1 << 20  # bytes of a column's pages read at once
# Maximum bytes of a row's text: Arrow holds four copies while it decodes a Parquet page, and a worker has 1.5 GB.
_LONGEST_TEXT = 192 << 20
_PIECES = 12  # bits of an order key for the pieces of a row, below those for the row (`order`)
_MOST_ROWS = MOST_PLACES >> _PIECES


@dataclass(frozen=True)
class Rows:
    """The reader of a table's rows.

    Args:
        segments: the segments of a file, of about so many bytes.
        rows: batches of rows of a segment, each with the place of its first.
    """

    segments: Callable[[InputFile, int], list[Segment]]
    rows: Callable[[Segment], Iterator[tuple[int, pa.RecordBatch]]]

    def read(self, segment: Segment, content: bytes | None = None) -> Iterator[Document]:
        """Documents of a segment, with their row in the file as place. A long text is never copied as a whole."""
        config = segment.file.config
        for start, rows in self.rows(segment):
            if start + len(rows) > _MOST_ROWS:
                raise UserError(
                    f"{segment.file.path}: found row {_MOST_ROWS:,}, expected at most {_MOST_ROWS:,} rows in a file or "
                    "data set; divide it"
                )
            for place, text, name in _values(rows, segment, config.text_field, config.id_field, start):

                def where(_: int, row: int = place) -> str:
                    return f"row {row}"

                for document in in_pieces(order(segment, place << _PIECES), text, name, damaged=False):
                    data, damaged = valid(segment, document.text, where)
                    yield replace(document, text=data, damaged=damaged)


def _row_groups(file: InputFile, target_bytes: int) -> list[Segment]:
    from pyarrow import parquet  # not at the top, since every worker would wait for the import

    try:
        metadata = parquet.read_metadata(_source(file.path))
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    except _BAD as error:
        raise _unreadable(file.path, error) from error
    check_parquet_rows(file.path, [group.num_rows for group in groups], metadata.num_rows)
    segments, start, weight = [], 0, 0
    for number, group in enumerate(groups):
        weight += group.total_byte_size
        if weight >= target_bytes or number == len(groups) - 1:
            segments.append(Segment(file, start, number + 1, weight))
            start, weight = number + 1, 0
    return segments


def _source(path: str) -> str | io.RawIOBase:
    """The argument for Arrow: a path, or a file object for an object in a store."""
    return open_raw(path) if is_url(path) else path


_TEXTS = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null


def _values(
    rows: pa.RecordBatch, segment: Segment, text_field: str, id_field: str | None, start: int
) -> Iterator[tuple[int, memoryview, str | None]]:
    """Row, text and id of each document. A null is an empty document."""
    where = f"{segment.file.path}: row {start}"
    check_fields(rows.schema.names, text_field, id_field, where)
    texts = rows.column(text_field)
    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    if isinstance(texts, pa.ExtensionArray):  # as JSON's, which are texts
        texts = texts.storage
    if not any(test(texts.type) for test in _TEXTS):
        raise UserError(f"{where}: {text_field}: found {texts.type}, expected a string")
    texts = texts.cast(pa.large_binary())  # of the same bytes
    try:
        names = [None] * len(rows) if id_field is None else [*map(document_id, rows.column(id_field).to_pylist())]
    except (ValueError, OverflowError) as error:  # texts of no UTF-8, times of no calendar
        raise UserError(f"{where}: {id_field}: found an id that can't be read ({error}); fix it") from error
    for place, (text, name) in enumerate(zip(texts, names, strict=True), start):
        data = memoryview(text.as_buffer() if text.is_valid else b"")
        if len(data) > _LONGEST_TEXT:
            raise UserError(
                f"{segment.file.path}: row {place}: {text_field}: found {len(data) >> 20} MB in one row, expected at "
                f"most {_LONGEST_TEXT >> 20}; divide it, or write it as a JSON line or as text, read in pieces"
            )
        yield place, data, name


def _parquet_rows(segment: Segment) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of rows with the place of their first."""
    from pyarrow import parquet

    config, path = segment.file.config, segment.file.path
    try:
        # Writers may add a checksum to each page; Arrow looks at it only when it is told to. A mapped file that shrinks
        # would end the process (SIGBUS).
        with parquet.ParquetFile(_source(path), buffer_size=_BUFFERED, page_checksum_verification=True) as table:
            check_fields(table.schema_arrow.names, config.text_field, config.id_field, path)
            groups = [table.metadata.row_group(group) for group in range(segment.stop)]
            place = sum(group.num_rows for group in groups[: segment.start])
            groups = groups[segment.start :]
            mean = sum(group.total_byte_size for group in groups) // max(1, sum(group.num_rows for group in groups))
            batches = table.iter_batches(
                min(ROWS_AT_ONCE, max(1, BYTES_AT_ONCE // max(mean, 1))),
                row_groups=range(segment.start, segment.stop),
                use_threads=False,
                columns=[name for name in (config.text_field, config.id_field) if name is not None],
            )
            end = place + sum(group.num_rows for group in groups)
            for batch in batches:
                _check_numbers(batch)
                yield place, batch
                place += len(batch)
            if place != end:  # Arrow passes over pages whose heads, which no checksum covers, say another kind
                raise pa.ArrowInvalid(f"found {place} rows, expected {end}, as its footer says")
    except _BAD as error:
        raise _unreadable(path, error) from error


def _check_numbers(batch: pa.RecordBatch) -> None:
    """Raise pyarrow.ArrowException for a number of a dictionary's value that it does not have: Arrow would read what
    lies before its memory, or end the process. Texts are looked at later, by the rules of the source.
    """
    import pyarrow.compute as pc

    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            low, high = pc.min_max(column.indices).as_py().values()
            count = len(column.dictionary)
            if low is not None and not 0 <= low <= high < count:
                raise pa.ArrowIndexError(f"found numbers from {low} to {high}, out of bounds of {count} values")
        elif pa.types.is_nested(column.type):  # of an id, whose texts must be right anyway
            column.validate(full=True)


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(f"{path}: can't be read as Parquet: {' '.join(str(error).split())}")


PARQUET, DATA_SETS = Rows(_row_groups, _parquet_rows), Rows(hub.segments, hub.rows)
