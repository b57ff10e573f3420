"""Parquet files and data sets of the `datasets` library."""

import os
from collections.abc import Iterator

import pyarrow as pa

from pipeline.config import SourceConfig
from pipeline.errors import UserError
from pipeline.readers.files import InputFile, Segment
from pipeline.readers.lines import encode, field, in_pieces, order
from pipeline.records import Document

_ROWS_AT_ONCE = 64  # documents may be long, and all of these are held at once
_SAVED_ROWS = 50_000  # rows of a saved data set that make one segment


def segments(file: InputFile, target_bytes: int) -> list[Segment]:
    """Row groups of a Parquet file, rows of a saved data set, or stream shards of one on the hub."""
    if file.format == "parquet":
        return _row_groups(file, target_bytes)
    if os.path.isdir(file.path):
        rows = file.size
        return [Segment(file, start, min(start + _SAVED_ROWS, rows), weight=target_bytes // 8)
                for start in range(0, rows, _SAVED_ROWS)]  # fmt: skip
    return [Segment(file, shard, file.size, weight=target_bytes) for shard in range(file.size)]


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
    rows = _parquet_rows(segment) if segment.file.format == "parquet" else _dataset_rows(segment)
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


def find_datasets(entries: list[str], source: int, config: SourceConfig, first: int) -> list[InputFile]:
    """Saved data sets (a folder) and data sets on the hub (a name) as inputs; `size` counts rows or stream shards."""
    files = []
    for number, entry in enumerate(sorted(set(entries)), first):
        folder = os.path.isdir(entry)
        data = _load(entry, config)
        size = len(data) if folder else data.num_shards
        if not size:
            raise UserError(f"input: found no rows in the data set {entry!r}, expected text")
        name = os.path.basename(os.path.normpath(entry)) if folder else entry
        files.append(InputFile(number, source, entry, name, "dataset", None, size, 0, config))
    return files


def _dataset_rows(segment: Segment) -> Iterator[tuple[int, dict]]:
    data = _load(segment.file.path, segment.file.config)
    if os.path.isdir(segment.file.path):
        for start in range(segment.start, segment.stop, _ROWS_AT_ONCE):
            columns = data[start : min(start + _ROWS_AT_ONCE, segment.stop)]
            for row, values in enumerate(zip(*columns.values(), strict=True)):
                yield start + row, dict(zip(columns, values, strict=True))
    else:
        stream = data.shard(num_shards=segment.stop, index=segment.start)
        for row, record in enumerate(stream):
            # rows are numbered inside a stream shard, and shards interleave: an order all the same, and a fixed one
            yield row * segment.stop + segment.start, record


def _load(entry: str, config: SourceConfig):
    try:
        import datasets
    except ImportError as error:
        raise UserError("source.format dataset: the library is missing; pip install 'cloze[hub]'") from error
    try:
        if not os.path.isdir(entry):
            return datasets.load_dataset(entry, config.dataset_config, split=config.dataset_split, streaming=True)
        data = datasets.load_from_disk(entry)
    except Exception as error:  # network, names, formats: the library raises many kinds
        raise UserError(f"input: the data set {entry!r} can't be loaded: {' '.join(str(error).split())}") from error
    if isinstance(data, datasets.DatasetDict):
        if config.dataset_split not in data:
            raise UserError(
                f"source.dataset_split: found no {config.dataset_split!r} in {entry!r}, there are {', '.join(data)}"
            )
        data = data[config.dataset_split]
    return data
