"""Reads plain text, sentence pairs and JSON lines as documents."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from cloze.pipeline.errors import UserError
from cloze.pipeline.readers.files import BLANK_LINES, NEWLINE, Block, Segment, blocks, cut_place
from cloze.pipeline.readers.json_lines import field, no_json
from cloze.pipeline.readers.json_lines import parse as parse_json
from cloze.pipeline.readers.long_lines import LongLine
from cloze.pipeline.records import Document

MOST_PLACES = 1 << 40  # of a file in order keys: bytes of its text, or rows and their pieces
LONGEST_JSON_LINE = 16 << 20  # bytes; a longer line is never held in memory as a whole
# Bytes of text; a longer document is divided into pieces, which bounds memory, even for a shard of 64 of them.
LONGEST_PIECE = 1 << 20
_LINE_ENDS = re.compile(rb"\r?\n")  # not NEWLINE, at which what is too long is cut anywhere, not between words
_REPLACEMENT = "\ufffd".encode()  # in place of what is no text
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Texts:
    """The reader of plain text, and of what is divided at a separator as text is.

    Args:
        separator: what stands between two documents; None: a file is one.
    """

    separator: re.Pattern[bytes] | None = NEWLINE

    @property
    def longest(self) -> int | None:
        """Bytes of the longest piece of a document; None: a document is held as a whole."""
        return LONGEST_PIECE

    def read(self, segment: Segment, content: bytes | None = None) -> Iterator[Document]:
        """Documents of a segment.

        Args:
            content: all bytes of its file, if it is small and they were read already.

        Raises:
            UserError: for bytes that aren't UTF-8 (unless replaced) or a malformed line.
        """
        found = blocks(segment, self.separator, self.longest) if content is None else [Block(0, content)]
        for block in self.without_long_lines(segment, _without_mark(found)):
            if isinstance(block, Document):
                yield block
            else:
                yield from self.parse(segment, block)

    def without_long_lines(self, segment: Segment, found: Iterator[Block]) -> Iterator[Block | Document]:
        """The blocks, with documents in place of what is too long for `parse`: by default nothing is."""
        return found

    def parse(self, segment: Segment, block: Block) -> Iterator[Document]:
        """Documents of a block, which ends at a separator."""
        starts = [0, *(match.end() for match in self.separator.finditer(block.data))] if self.separator else [0]
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(block.data)], strict=True)):
            if data := block.data[start:stop]:
                in_pieces = number == 0 and block.piece
                text, damaged = _valid(segment, data, block.offset + start)
                if in_pieces or not data.isspace():
                    # Blank lines before a document may be in another block or segment: its place is its first letter.
                    place = order(segment, block.offset + start + len(data) - len(data.lstrip()))
                    yield Document(place, text, piece=block.piece if in_pieces else 0, damaged=damaged)


@dataclass(frozen=True)
class Lines(Texts):
    """A reader of lines that have an inner form; a subclass says which in `documents`."""

    @property
    def longest(self) -> None:
        return None  # a line is parsed as a whole

    def parse(self, segment: Segment, block: Block) -> Iterator[Document]:
        offset = block.offset
        for line in block.data.split(b"\n"):
            if line.strip():
                text, damaged = _valid(segment, line.rstrip(b"\r"), offset)
                yield from self.documents(segment, offset, text, damaged)
            offset += len(line) + 1

    def documents(self, segment: Segment, offset: int, line: bytes, damaged: bool) -> Iterator[Document]:
        """The document of a line that is not blank, or its pieces (`in_pieces`).

        Args:
            offset: bytes of the file before the line.
            line: UTF-8, without its end.
            damaged: whether invalid bytes were replaced.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Pairs(Lines):
    """The reader of lines of two segments with a tab between them."""

    def documents(self, segment: Segment, offset: int, line: bytes, damaged: bool) -> Iterator[Document]:
        if line.count(b"\t") != 1:
            raise UserError(
                f"{segment.file.path}: byte {offset}: found {line.count(9)} tabs in {line[:40]!r}, expected "
                "one between the two segments of a pair; fix the line"
            )
        yield Document(order(segment, offset), line, damaged=damaged)


@dataclass(frozen=True)
class JsonLines(Texts):
    """The reader of lines of JSON objects."""

    @property
    def longest(self) -> int:
        return LONGEST_JSON_LINE

    def without_long_lines(self, segment: Segment, found: Iterator[Block]) -> Iterator[Block | Document]:
        """Blocks of whole JSON lines, and the documents of lines that are too long for memory."""
        line, piece = None, 0
        last: Document | None = None  # the last piece so far, yielded after the rest of the line was checked
        for block in found:
            if block.piece == 1:
                line, piece, last = LongLine(segment, block.offset, LONGEST_PIECE, LONGEST_JSON_LINE), 0, None
                begin = block.offset
                characters, line_damaged = codecs.getincrementaldecoder("utf-8")(), False
            if block.piece:
                assert line is not None, "the first piece begins it"
                end = len(block.data) if block.goes_on else (block.data + b"\n").find(b"\n")
                part = block.data[:end]
                line_damaged |= _damages(segment, characters, part, block.offset, final=not block.goes_on)
                for escaped in line.feed(part.replace(b"\0", _REPLACEMENT)):
                    if last is not None:
                        yield last
                    piece += 1
                    data, damaged = _valid(segment, escaped, block.offset)
                    text, broken = _encode(segment, line.decode(data), begin)
                    last = Document(order(segment, begin) + piece, text, line.id, piece, damaged or broken)
                if block.goes_on:
                    continue
                line.finish()
                last = last or Document(order(segment, begin), b"", line.id)  # an empty text counts as one piece
                yield replace(last, damaged=last.damaged or line_damaged)
                block = Block(block.offset + end, block.data[end:])
            yield block

    def parse(self, segment: Segment, block: Block) -> Iterator[Document]:
        config, path = segment.file.config, segment.file.path
        offset = block.offset
        for line in block.data.split(b"\n"):
            if line and not line.isspace():
                data, damaged = _valid(segment, line, offset)
                try:
                    # a byte order mark may follow where files were concatenated
                    record = parse_json(data.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise no_json(f"{path}: byte {offset}", error) from error
                text, name = field(record, config.text_field, config.id_field, f"{path}: byte {offset}")
                encoded, broken = _encode(segment, text, offset)
                place = order(segment, offset)
                yield from in_pieces(place, encoded, name, damaged or broken)
            offset += len(line) + 1


def _without_mark(blocks: Iterable[Block]) -> Iterator[Block]:
    mark = codecs.BOM_UTF8  # some editors put it at the start
    for block in blocks:
        if block.offset == 0 and block.data.startswith(mark):
            block.data = b" " * len(mark) + block.data[len(mark) :]  # offsets do not change
        yield block


def _damages(segment: Segment, characters: codecs.IncrementalDecoder, data: bytes, offset: int, final: bool) -> bool:
    """Whether the next part of a long line has invalid UTF-8 or zero bytes (`_valid`), in any of its fields."""
    before, _ = characters.getstate()  # the beginning of a character across two parts
    try:
        characters.decode(data, final)
    except UnicodeDecodeError as error:
        if segment.stops_at_errors:
            raise _bad_byte(segment, f"byte {offset - len(before) + error.start}", error) from error
        characters.reset()
        return True
    if b"\0" in data and segment.stops_at_errors:
        raise _zero_byte(segment, offset + data.index(0))
    return b"\0" in data


def order(segment: Segment, place: int) -> int:
    """The order key of the document at `place` of a file: a byte, or a row and its piece.

    Raises:
        UserError: the place is beyond the bits that the key has for it, and would be one in another file.
    """
    if place >= MOST_PLACES:
        raise UserError(
            f"{segment.file.path}: found a document behind {MOST_PLACES >> 40} TiB, expected a shorter file; divide it"
        )
    return segment.file.number * MOST_PLACES | place


def in_pieces(place: int, text: bytes | memoryview, name: str | None, damaged: bool) -> Iterator[Document]:
    """A document, or its pieces if it is long, copied from parts of a memoryview, never as a whole."""
    if len(text) <= LONGEST_PIECE:
        yield Document(place, bytes(text), name, damaged=damaged)
        return
    start = piece = 0
    while start < len(text):
        stop = min(start + LONGEST_PIECE, len(text))
        if stop < len(text):
            stop = start + cut_place(bytes(text[start : stop + 1]), LONGEST_PIECE)
        piece += 1
        yield Document(place + piece, bytes(text[start:stop]), name, piece=piece, damaged=damaged and piece == 1)
        start = stop


def _encode(segment: Segment, text: str, place: int) -> tuple[bytes, bool]:
    """UTF-8 of a string; lone surrogates, which JSON can write, are encoding errors."""
    try:
        return text.encode(), False
    except UnicodeEncodeError as error:
        if segment.stops_at_errors:
            lone = f"the lone surrogate {error.object[error.start]!r}"
            raise _bad_encoding(segment, f"byte {place}", lone) from error
        return _SURROGATE.sub("\ufffd", text).encode(), True


def _valid(segment: Segment, data: bytes, offset: int) -> tuple[bytes, bool]:
    """As `valid`, of a file of text. No text has a zero byte, which is UTF-8 too; UTF-16 and UTF-32 have many."""
    text, damaged = valid(segment, data, lambda place: f"byte {offset + place}")
    if b"\0" not in text:
        return text, damaged
    if segment.stops_at_errors:
        raise _zero_byte(segment, offset + text.index(0))
    return text.replace(b"\0", _REPLACEMENT), True


def valid(segment: Segment, data: bytes, where: Callable[[int], str]) -> tuple[bytes, bool]:
    """Text as valid UTF-8, and whether invalid bytes were replaced.

    Args:
        where: description of a byte's place for errors.
    """
    if data.isascii():
        return data, False
    try:
        data.decode()
        return data, False
    except UnicodeDecodeError as error:
        if segment.stops_at_errors:
            raise _bad_byte(segment, where(error.start), error) from error
        return data.decode(errors="replace").encode(), True


def _bad_byte(segment: Segment, where: str, error: UnicodeDecodeError) -> UserError:
    return _bad_encoding(segment, where, f"byte 0x{error.object[error.start]:02x}")


def _zero_byte(segment: Segment, place: int) -> UserError:
    return _bad_encoding(segment, f"byte {place}", "byte 0x00, as of UTF-16")


def _bad_encoding(segment: Segment, where: str, what: str) -> UserError:
    return UserError(
        f"{segment.file.path}: {where}: found {what}, expected UTF-8; convert the file (iconv -f LATIN1 -t "
        "UTF-8, if it is that), or replace such bytes with --source.encoding_errors replace"
    )


PARAGRAPHS, LINES, WHOLE_FILES = Texts(BLANK_LINES), Texts(_LINE_ENDS), Texts(None)
PAIRS, JSON_LINES = Pairs(), JsonLines()
