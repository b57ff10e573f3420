"""Rows of tables to documents: Parquet files, and data sets of the `datasets` library (hub.py)."""

from collections.abc import Iterator

import pyarrow as pa

from pipeline.errors import UserError
from pipeline.readers import hub
from pipeline.readers.files import InputFile, Segment
from pipeline.readers.lines import encode, field, in_pieces, order
from pipeline.records import Document

_ROWS_AT_ONCE = 64  # documents may be long, and all of these are held at once


def segments(file: InputFile, target_bytes: int) -> list[Segment]:
    """Row groups of a Parquet file, rows of a saved data set, or stream shards of one on the hub."""
    if file.format == "parquet":
        return _row_groups(file, target_bytes)
    return hub.segments(file, target_bytes)


def _row_groups(file: InputFile, target_bytes: int) -> list[Segment]:
    from pyarrow import parquet  # not at the top: every worker would wait for it

    try:
        metadata = parquet.read_metadata(file.path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: can't be read as Parquet: {error}") from error
    found, start, weight = [], 0, 0
    for group in range(metadata.num_row_groups):
        weight += metadata.row_group(group).total_byte_size
        if weight >= target_bytes or group == metadata.num_row_groups - 1:
            found.append(Segment(file, start, group + 1, weight))
            start, weight = group + 1, 0
    return found


def read(segment: Segment) -> Iterator[Document]:
    """Documents of a segment, with the row in its file as their place."""
    config = segment.file.config
    rows = _parquet_rows(segment) if segment.file.format == "parquet" else hub.rows(segment)
    for place, record in rows:
        text, name = field(record, config.text_field, config.id_field, f"{segment.file.path}: row {place}")
        encoded, damaged = encode(segment, text, place)
        yield from in_pieces(order(segment, place << 12), encoded, name, damaged)


def _parquet_rows(segment: Segment) -> Iterator[tuple[int, dict]]:
    from pyarrow import parquet

    config, path = segment.file.config, segment.file.path
    try:
        with parquet.ParquetFile(path, memory_map=True) as table:
            wanted = [name for name in (config.text_field, config.id_field) if name in table.schema_arrow.names]
            place = sum(table.metadata.row_group(group).num_rows for group in range(segment.start))
            batches = table.iter_batches(
                _ROWS_AT_ONCE, row_groups=range(segment.start, segment.stop), use_threads=False,
                columns=wanted or table.schema_arrow.names[:1],
            )  # fmt: skip
            for batch in batches:
                for record in batch.to_pylist():
                    yield place, record
                    place += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: can't be read as Parquet: {error}") from error
