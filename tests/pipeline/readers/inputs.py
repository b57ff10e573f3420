"""Input files, compressed in every way, and their documents."""

import bz2
import gzip
import lzma
from functools import partial

import pyarrow as pa

from cloze.pipeline import readers
from cloze.pipeline.config import PrepareConfig, SourceConfig


def read(inputs, **source) -> list:
    config = PrepareConfig(input=[str(path) for path in inputs], source=SourceConfig(**source))
    _, tasks = readers.plan(config)
    return [document for task in tasks for document in readers.read(task)]


def texts(inputs, **source) -> list[str]:
    return [document.text.decode().strip() for document in read(inputs, **source)]


def with_arrow(data: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": partial(with_arrow, codec="zstd"),
    ".lz4": partial(with_arrow, codec="lz4"),
}


def compress(path, data: bytes) -> None:
    """In three streams, as `cat a.gz b.gz c.gz` gives; the second one is empty."""
    compressor = COMPRESSORS.get(path.suffix, bytes)
    half = len(data) // 2
    path.write_bytes(b"".join(map(compressor, (data[:half], b"", data[half:]))))
