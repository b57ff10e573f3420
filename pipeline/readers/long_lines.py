"""Reads JSON lines that are too long for memory, piece by piece.

What is kept of such a line is the line without what stands in its long strings. At its end that is read as any other
line is, so that a long line is refused for what a short one is refused for, in the same words.
"""

import codecs
import json
import re
import sys
from collections.abc import Generator, Iterator
from typing import Any

from cloze.pipeline.errors import UserError
from cloze.pipeline.readers.files import Segment, between_characters
from cloze.pipeline.readers.json_lines import document_id, field, no_json, parse

_BODY = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # of a JSON string, up to its quote or what there is
_UNITS = re.compile(  # units that must not be cut: a byte, a surrogate pair, another \uXXXX, an escape of two
    rb"(?:[^\\]|\\u[dD][89abAB][0-9a-fA-F]{2}"
    rb"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]))"
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*",
    re.DOTALL,
)
_LOOK_BACK = 4096


def _matched(pattern: re.Pattern[bytes], text: bytes, start: int = 0, stop: int = sys.maxsize) -> int:
    """End of the match of a pattern that always matches (possibly the empty string)."""
    match = pattern.match(text, start, stop)
    assert match is not None, pattern
    return match.end()


def _characters(data: bytes) -> int:
    return len(data) if data.isascii() else len(data.decode(errors="replace"))


class LongLine:
    """One JSON object whose line is fed in parts; yields its text in pieces of at most `longest` bytes (encoded).

    The id must stand before the text.

    Args:
        most: bytes that the line may have besides its long strings.

    Raises:
        UserError: it isn't JSON, or lacks the field.
    """

    def __init__(self, segment: Segment, offset: int, longest: int, most: int):
        self.where = f"{segment.file.path}: byte {offset}"
        self.config = segment.file.config
        self.id: str | None = None
        self._longest, self._most = longest, most
        self._held = b""  # not looked at yet
        self._begun = False
        self._kept = bytearray()  # the line without its long strings
        self._left_out: list[tuple[int, int]] = []  # where characters of it are missing in what is kept, and how many
        self._kept_characters = self._characters = 0  # of what is kept, and of the line so far
        self._depth = 0  # of objects and lists that are open
        self._name: str | None = None  # the last field of the outermost object
        self._in_string: str | None = None  # the one that is being read: a "name", the "text", or "another"
        self._before = b""  # the last byte of it that is no space
        self._texts = 0
        self._id_late = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next part of the line; yields the complete JSON-escaped pieces of text."""
        self._held += data
        if not self._begun:
            if len(self._held) < len(codecs.BOM_UTF8):
                return
            self._held, self._begun = self._held.removeprefix(codecs.BOM_UTF8), True
        while self._held:
            if self._in_string is None:
                self._pass_structure()
            elif (yield from self._pass_string()):
                break  # until the next part comes

    def finish(self) -> None:
        """The line has ended.

        Raises:
            UserError: it isn't what a short line must be.
        """
        if self._in_string is not None:
            self._check(self._held, closed=False)
        record = self._parse()
        _, self.id = field(record, self.config.text_field, self.config.id_field, self.where)
        if self._id_late:
            name = self.config.id_field
            raise UserError(f"{self.where}: found no {name!r} before the text of a long line; put it there")

    def decode(self, piece: bytes) -> str:
        """The text of a piece that `feed` has yielded last."""
        return self._check(piece)

    def _pass_structure(self) -> None:
        """Keep what stands before the next string, and say which string that is."""
        stop = self._held.find(b'"') + 1
        part = self._held[: stop or len(self._held)]
        self._held = self._held[len(part) :]
        self._keep(part)
        self._depth += sum(part.count(each) for each in b"{[") - sum(part.count(each) for each in b"}]")
        self._before = part.removesuffix(b'"').rstrip(b" \t\r")[-1:] or self._before
        if not stop:
            return
        if self._depth == 1 and self._before in (b"{", b","):
            self._in_string = "name"
        elif self._depth == 1 and self._before == b":" and self._name == self.config.text_field:
            self._texts += 1  # `finish` refuses a second one
            self._id_late = self._id_late or not self._find_id()
            self._in_string = "another" if self._id_late or self._texts > 1 else "text"
        else:
            self._in_string = "another"

    def _pass_string(self) -> Generator[bytes, None, bool]:
        """Pass a string, or what there is of it; yields the text's pieces, and returns whether more must come."""
        available = _matched(_BODY, self._held)
        closed = self._held[available : available + 1] == b'"'
        # The id can be a list or an object, whose strings are a part of it.
        in_id = self._name is not None and self._name == self.config.id_field
        if self._in_string == "name" or (in_id and self._in_string == "another"):
            if not closed:
                self._bound(len(self._held))
                return True
            body = self._held[:available]
            text = self._check(body)
            self._name = text if self._in_string == "name" else self._name
            self._held = self._held[available:]
            self._keep(body)
        else:
            start = 0
            while available - start > self._longest or (closed and start < available):
                stop = min(start + self._longest, available)
                if stop < available:
                    stop = start + self._safe_cut(self._held[start : stop + 1])
                piece = self._held[start:stop]
                if self._in_string == "text":
                    yield piece
                else:
                    self._check(piece)
                self._leave_out(piece)
                start = stop
            self._held = self._held[start:]
        if closed:
            self._keep(self._held[:1])
            self._held, self._in_string, self._before = self._held[1:], None, b'"'
        return not closed

    def _find_id(self) -> bool:
        """Take the id, which each piece of the text carries; returns whether it stands before the text."""
        record, name = self._parse('"}'), self.config.id_field
        if name is None:
            return True
        self.id = document_id(record.get(name))
        return name in record

    def _check(self, body: bytes, *, closed: bool = True) -> str:
        """The characters of a string's next part, which begins where the line has been read to.

        Raises:
            UserError: they are no JSON string, or something before it is wrong.
        """
        text = body.decode(errors="replace")
        try:
            return str(json.loads(f'"{text}"' if closed else f'"{text}'))
        except json.JSONDecodeError as error:
            wrong = self._error(error.msg, self._characters + error.pos - 1)
            # What is kept ends with the quote that begins this string: it doesn't end, and that is the first mistake
            # unless there is one before it.
            self._parse(unless_open=None if error.msg.startswith("Unterminated") else wrong)
            raise

    def _parse(self, end: str = "", *, unless_open: UserError | None = None) -> Any:
        """What is kept of the line, with `end` behind it, as a value.

        Args:
            unless_open: raised if nothing is wrong with it but that a string doesn't end.

        Raises:
            UserError: it isn't JSON, at the character that the error of a short line would name.
        """
        try:
            return parse(self._kept.decode(errors="replace") + end)
        except json.JSONDecodeError as error:
            if unless_open and error.msg.startswith("Unterminated"):
                raise unless_open from error
            raise self._error(error.msg, error.pos + self._missing_before(error.pos)) from error
        except (ValueError, RecursionError) as error:
            raise no_json(self.where, error) from error

    def _error(self, message: str, place: int) -> UserError:
        return no_json(self.where, f"{message}: line 1 column {place + 1} (char {place})")

    def _missing_before(self, place: int) -> int:
        return sum(count for where, count in self._left_out if where <= place)

    def _keep(self, part: bytes) -> None:
        self._bound(len(part))
        self._kept += part
        count = _characters(part)
        self._kept_characters += count
        self._characters += count

    def _leave_out(self, part: bytes) -> None:
        count = _characters(part)
        self._characters += count
        if self._left_out and self._left_out[-1][0] == self._kept_characters:
            count += self._left_out.pop()[1]
        self._left_out.append((self._kept_characters, count))

    def _bound(self, more: int) -> None:
        if len(self._kept) + more > self._most:
            raise UserError(
                f"{self.where}: found a line with more than {self._most / 2**20:.3g} MB besides the strings in its "
                "fields, expected less; leave out what is not needed"
            )

    def _safe_cut(self, data: bytes) -> int:
        """A place to cut at or before `longest`: after a space, else between characters and outside of an escape."""
        limit = self._longest
        if (space := data.rfind(b" ", max(0, limit - _LOOK_BACK), limit)) > 0:
            return space + 1
        # 0: an escape that JSON doesn't have, as which a cut anywhere is refused
        return between_characters(data, _matched(_UNITS, data, 0, limit)) or limit
