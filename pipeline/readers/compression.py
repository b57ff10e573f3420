"""Decompression of input (gzip, bz2, xz, zstd, lz4) as one stream of bytes; damaged or truncated files are errors."""

import bz2
import io
import lzma
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from cloze.pipeline.stores.reading import open_raw

SUFFIXES = {".bz2": "bz2", ".gz": "gzip", ".lz4": "lz4", ".xz": "xz", ".zst": "zstd"}
# Archives, and formats that neither Python nor Arrow reads: read as text they would be noise.
UNREAD = {".7z", ".lzma", ".rar", ".snappy", ".tar", ".tbz2", ".tgz", ".txz", ".tzst", ".z", ".zip"}
ERRORS = (OSError, EOFError, lzma.LZMAError, pa.ArrowException)  # errors of reading damaged data
_PIECE_BYTES = 1 << 14  # compressed, read at once


def open_stream(path: str, compression: str | None) -> Any:
    """Open a path or URL for reading, decompressed. Reading raises one of ERRORS for damaged or truncated data, and for
    other data after the end of a stream.

    Raises:
        OSError: there is no such file.
    """
    return open_raw(path) if compression is None else _decompressed(open_raw(path), compression)


def _decompressed(raw: io.RawIOBase, compression: str) -> Any:
    if compression in _STREAMS:
        return _Streams(raw, *_STREAMS[compression])
    return pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)


def expansion(path: str, compression: str, size: int) -> float:
    """Ratio of decompressed to compressed bytes in the first `size` bytes of a file. Raises one of ERRORS."""
    with open_raw(path) as raw:
        stream, read = _decompressed(raw, compression), 0
        while read < size and (data := stream.read(size - read)):
            read += len(data)
        return read / max(1, raw.tell())


_Decompressor = bz2.BZ2Decompressor | lzma.LZMADecompressor


class _Streams(io.RawIOBase):
    """The concatenated compressed streams of a file as one stream.

    Python's LZMAFile and BZ2File treat other data after a stream as the end of the file: after padding or damage
    between two streams the rest would be lost silently. Arrow treats an empty bz2 stream as an error.

    Args:
        padding: bytes that may follow a stream, in multiples of four (section 2.2 of the .xz file format).
    """

    def __init__(self, file: io.RawIOBase, new: Callable[[], _Decompressor], padding: bytes):
        self._file, self._new, self._padding = file, new, padding
        self._decompressor = new()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes; none at the end."""
        piece = b""
        while True:
            if self._decompressor.eof and not (piece := self._next_stream()):
                return b""
            if not piece and self._decompressor.needs_input and not (piece := self._file.read(_PIECE_BYTES)):
                raise EOFError("it ends in the middle")
            data, piece = self._decompressor.decompress(piece, size), b""
            if data:
                return data

    def _next_stream(self) -> bytes:
        """Begin the next stream; returns its first bytes, none at the end of the file."""
        rest, padded = self._decompressor.unused_data, 0
        while rest or (rest := self._file.read(_PIECE_BYTES)):
            begun = rest.lstrip(self._padding)
            padded += len(rest) - len(begun)
            if rest := begun:
                break
        if padded % 4:
            raise lzma.LZMAError(f"found {padded} bytes of padding behind a stream, expected a multiple of 4")
        if rest:
            self._decompressor = self._new()
        return rest


_STREAMS: dict[str, tuple[Callable[[], _Decompressor], bytes]] = {
    "bz2": (bz2.BZ2Decompressor, b""),
    "xz": (lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ), b"\0"),
}
