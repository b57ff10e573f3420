"""Data sets of the `datasets` library: saved folders, and data sets on the Hugging Face hub."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.readers.files import (
    BYTES_AT_ONCE,
    ROWS_AT_ONCE,
    InputFile,
    Segment,
    changed_while_read,
    checked_name,
    is_changed,
    last_touched,
)
from cloze.pipeline.storage import readable_errors

_SAVED_ROWS = 50_000  # rows of a saved data set in one segment


def find_datasets(entries: list[str], source: int, config: SourceConfig, first: int) -> list[InputFile]:
    """Saved data sets (a folder) and data sets on the hub (a name) as inputs.

    Data on the hub may change: the commit is added to the name, so that a run reads one state and records which.
    """
    files = []
    for number, entry in enumerate(sorted(set(entries)), first):
        saved = os.path.abspath(os.path.expanduser(entry))  # absolute, since workers may run in other folders
        if _is_folder(saved):
            data = _load(saved, config)
            file = saved_file(saved, data, number, source, config)
        else:
            path = _with_commit(entry)
            data = _load(path, config)
            split = (data.info.splits or {}).get(config.dataset_split)
            size = (split and split.num_bytes) or 0
            file = InputFile(
                number, source, path, path, "dataset", None, size, 0, config, rows=data.num_shards, has_rows=True
            )
        if not file.rows:
            raise UserError(f"input: found no rows in the data set {entry!r}, expected text")
        files.append(file)
    return files


def saved_file(path: str, data: Any, number: int, source: int, config: SourceConfig) -> InputFile:
    """A saved data set that was loaded from a folder, as an input."""
    parts = tuple(part["filename"] for part in data.cache_files)
    states = {part: os.stat(part) for part in parts}
    return InputFile(
        number,
        source,
        path,
        checked_name(os.path.basename(path)),
        "dataset",
        None,
        data.data.nbytes,
        max((status.st_mtime_ns for status in states.values()), default=0),
        config,
        rows=len(data),
        parts=parts,
        touched=max((last_touched(part, status) for part, status in states.items()), default=0),
        has_rows=True,
    )


def _is_folder(path: str) -> bool:
    """Whether a path is a folder.

    Raises:
        UserError: for a path without permission, which is not a name on the hub.
    """
    with readable_errors(Path(path)):
        try:
            return stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def segments(file: InputFile, target_bytes: int) -> list[Segment]:
    """Ranges of rows of a saved data set, or stream shards of one on the hub."""
    if os.path.isdir(file.path):
        starts = range(0, file.rows, _SAVED_ROWS)
        weight = max(file.size, target_bytes) // len(starts)
        return [Segment(file, start, min(start + _SAVED_ROWS, file.rows), weight) for start in starts]
    weight = max(file.size, target_bytes) // file.rows
    return [Segment(file, shard, file.rows, weight) for shard in range(file.rows)]


def _with_commit(entry: str) -> str:
    """NAME or NAME@REVISION to NAME@COMMIT."""
    name, _, revision = entry.partition("@")
    with _loading(entry):
        from huggingface_hub import HfApi  # comes with datasets

        return f"{name}@{HfApi().dataset_info(name, revision=revision or None).sha}"


def rows(segment: Segment) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of rows of a segment with the place of their first."""
    path = segment.file.path
    data = _load(path, segment.file.config)
    with _loading(path):  # a stream may end prematurely
        if os.path.isdir(path):
            yield from saved_rows(data, segment.start, segment.stop, segment.file)
        else:
            config = segment.file.config
            stream = data.shard(num_shards=segment.stop, index=segment.start)
            for row, record in enumerate(stream):
                # rows are numbered within a stream shard, so shards interleave, but the order is fixed
                used = {
                    name: value if name in (config.text_field, config.id_field) else None
                    for name, value in record.items()
                }
                yield row * segment.stop + segment.start, pa.RecordBatch.from_pylist([used])


def saved_rows(data: Any, start: int, stop: int, file: InputFile) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of rows [start, stop) of a saved data set, with the place of their first.

    The library maps its files as they are, and a page that is no longer there, or an offset that points outside, would
    end the process. So the files are looked at before each batch, which is checked and copied at once.

    Raises:
        UserError: a file is another than when it was listed.
    """
    table = data.with_format("arrow")
    for low in range(start, stop, ROWS_AT_ONCE):
        if is_changed(file):
            raise changed_while_read(file)
        place = low
        with _loading(file.path):
            batches = table[low : min(low + ROWS_AT_ONCE, stop)].to_batches()
            for batch in batches:
                batch.validate(full=True)
        for batch in batches:
            count = max(1, len(batch) * BYTES_AT_ONCE // max(batch.nbytes, 1))
            for first in range(0, len(batch), count):
                rows = _copied(batch.slice(first, count))
                yield place, rows
                place += len(rows)


def _copied(rows: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _load(path: str, config: SourceConfig) -> Any:
    with _loading(path):
        import datasets

        if not os.path.isdir(path):
            name, _, commit = path.partition("@")
            return datasets.load_dataset(
                name, config.dataset_config, split=config.dataset_split, revision=commit, streaming=True
            )
        data = datasets.load_from_disk(path)
    if isinstance(data, datasets.DatasetDict):
        if config.dataset_split not in data:
            raise UserError(
                f"source.dataset_split: found no {config.dataset_split!r} in {path!r}, there are {', '.join(data)}"
            )
        data = data[config.dataset_split]
    return data


@contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"source.format dataset: the library is missing; {how_to_install('hub')}") from error
    except Exception as error:  # network, names, formats: the library raises many kinds of errors
        what = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"input: the data set {path!r} can't be read: {what}; look at its name and at the network, then run the "
            "same command again"
        ) from error
